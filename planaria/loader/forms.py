"""What becomes of a checkpoint's weights in memory: which stay packed, as what, and what that takes."""

from __future__ import annotations

import math
from typing import NamedTuple

from planaria.checkpoint.quantised import kept_as
from planaria.checkpoint.spec import Checkpoint, TensorInfo
from planaria.kernels.blocks import BLOCK, FLOAT8, KINDS, PACKED

PLAIN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
NAMES = {
    "gptq": "GPTQ", "awq": "AWQ", "ints": "compressed-tensors int", "int8": "int8", "fp8": "fp8",
    "bnb4": "bitsandbytes, 4 bits", "bnb8": "bitsandbytes int8", "mxfp4": "MXFP4",
}  # fmt: skip


class Form(NamedTuple):
    """Tensors that are stored alike and kept alike. form: "" for plain matrices, in the dtype of activations."""

    stored: str
    form: str
    tensors: int
    weights: int
    stored_bytes: int
    bytes: int

    @property
    def unpacked(self) -> bool:
        """Do they take more memory than in the file, for want of a form that says the same?"""
        return not self.form and self.stored_bytes < self.weights


def forms(checkpoint: Checkpoint, quantization: str, element: int, *, float8: bool = False) -> list[Form]:
    """Most bytes first. quantization: as of a device's configuration; element: bytes of a plain weight; float8: do
    weights of 8 bits stay so?"""
    found: dict[tuple[str, str], Form] = {}
    for tensor in checkpoint.tensors:
        stored, form = _stored(tensor), _form(tensor, quantization, float8)
        weights = math.prod(tensor.shape)
        size = math.ceil(weights * _per_weight(tensor, form)) if form else weights * element
        before = found.get((stored, form), Form(stored, form, 0, 0, 0, 0))
        found[stored, form] = Form(
            stored, form, before.tensors + 1, before.weights + weights, before.stored_bytes + tensor.nbytes,
            before.bytes + size,
        )  # fmt: skip
    return sorted(found.values(), key=lambda each: -each.bytes)


def unpacked_line(checkpoint: Checkpoint, quantization: str, dtype: str, *, float8: bool = False) -> str:
    """What to say of weights that are unpacked though packed ones stay so; "" for nothing."""
    if quantization != "keep":
        return ""
    lines = [
        f"{each.tensors} of {each.stored}"
        for each in forms(checkpoint, quantization, 2, float8=float8)
        if each.unpacked
    ]
    return f"tensors unpacked to {dtype}, as no packed form says the same: {', '.join(lines)}" if lines else ""


def _stored(tensor: TensorInfo) -> str:
    name, *rest = tensor.kind.split(":")
    if not tensor.parts or name in ("turned", "latent"):
        kind = tensor.parts[0].kind if tensor.parts else tensor.kind
        return PLAIN.get(kind, kind)
    said = NAMES.get(name, name)
    if name in ("gptq", "awq"):
        said += f", {rest[0]} bits"
    if name == "ints":
        said += rest[0]
    return said + (", columns in an order of their own" if "ordered" in rest else "")


def _form(tensor: TensorInfo, quantization: str, float8: bool) -> str:
    if len(tensor.shape) != 2:
        return "float32"  # norms and biases
    if quantization == "none":
        return ""
    own = kept_as(tensor.kind) if tensor.parts else tensor.kind if tensor.kind in KINDS else ""
    if float8 and tensor.kind.startswith("fp8") and tensor.parts[0].kind == FLOAT8:
        own = FLOAT8
    own = own if tensor.shape[1] % BLOCK == 0 else ""
    if quantization == "keep" or (quantization == "q4_1" and own.startswith("q4")):
        return own
    if tensor.shape[1] % BLOCK or tensor.name.endswith(("mlp.gate.weight", "mlp.router.weight")):
        return ""
    table = tensor.name in ("model.embed_tokens.weight", "lm_head.weight")
    return "q8_0" if table else quantization


def _per_weight(tensor: TensorInfo, form: str) -> float:
    """Bytes."""
    if form == "float32":
        return 4
    if tensor.kind == form:
        return tensor.nbytes / math.prod(tensor.shape)
    return PACKED[form].nbytes / PACKED[form].elements
