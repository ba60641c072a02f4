"""An adapter as peft writes it: a folder with adapter_config.json and adapter_model.safetensors, read whole, checked
against the model, and known by a digest of its bytes from then on.

Only LoRA on matrices that all tokens go through: what would change an answer and isn't computed here is refused by
name. Nothing in a folder names another file; what is there must be plain files of a size that the model's shapes bound.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from planaria.checkpoint.files import opened
from planaria.checkpoint.folder import json_object, safetensors_header
from planaria.checkpoint.spec import TensorInfo
from planaria.errors import ModelError
from planaria.models.config import ModelConfig
from planaria.models.linears import linears
from planaria.protocol import LoraModule

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG, MAX_NAMES = 1 << 20, 16 << 20  # bytes; of the header of tensors' names
MAX_SCALE = 3e38
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
PLAIN = re.compile(r"\^?[\w.]+")  # keys of rank_pattern and alpha_pattern, which peft takes for regular expressions
# Fields of adapter_config.json that change what is computed, and what they may be.
REFUSED = (
    "use_rslora", "use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "modules_to_save",
    "layer_replication", "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config",
    "kasa_config", "monteclora_config", "megatron_config",
)  # fmt: skip
OF_THE_MODEL = ("pissa", "olora", "corda", "loftq")  # begin with parts of the model's matrices, and take them out there
# Bits of an unsigned integer, by what its bytes are; all of them are set in what is infinite or no number.
EXPONENTS = {"f32": ("u4", 0x7F800000), "f16": ("u2", 0x7C00), "bf16": ("u2", 0x7F80)}


class Adapter(msgspec.Struct, frozen=True):
    """parts: its modules, those of a layer together. rank: the largest of them; nbytes: of them all."""

    digest: str
    parts: tuple[tuple[LoraModule, ...], ...]
    rank: int
    nbytes: int


def read_adapter(folder: Path, model: ModelConfig, max_rank: int) -> Adapter:
    """Raises ModelError, one line that names the file and what is wrong with it."""
    shapes = linears(model)
    if not os.path.exists(folder / WEIGHTS) and os.path.exists(folder / "adapter_model.bin"):
        raise ModelError(f"{folder}: has weights only as a pickle file; save it with safe_serialization=True")
    most = MAX_NAMES + 4 * max_rank * sum(map(sum, shapes.values()))
    config, weights = _read(folder / CONFIG, MAX_CONFIG), _read(folder / WEIGHTS, most)
    said = json_object(folder / CONFIG, config)
    _check(folder / CONFIG, said, max_rank)
    found = _tensors(folder / WEIGHTS, weights, model, shapes)
    modules = [_module(folder, name, pair, weights, said, shapes[name]) for name, pair in found.items()]
    layers: dict[int, list[LoraModule]] = {}
    for module in modules:
        match = LAYER.match(module.name)
        layers.setdefault(int(match[1]) if match else -1, []).append(module)
    whole = hashlib.sha256(len(config).to_bytes(8, "little") + config + weights)
    return Adapter(
        whole.hexdigest(), tuple(tuple(layers[layer]) for layer in sorted(layers)),
        max(module.rank for module in modules), sum(len(module.a) + len(module.b) for module in modules),
    )  # fmt: skip


def _read(path: Path, most: int) -> bytes:
    """Its bytes, so many at most."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise ModelError(
                    f"{path}: has {size} bytes; an adapter of this model and of a rank up to --max-lora-rank "
                    f"has {most} at most"
                )
            return file.read(most + 1)[:most]
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; an adapter is a folder with {CONFIG} and {WEIGHTS}") from None
    except (OSError, ValueError) as e:
        raise ModelError(f"{path}: can't be read: {getattr(e, 'strerror', None) or e}") from None


def _check(path: Path, said: Mapping[str, Any], max_rank: int) -> None:
    """What adapter_config.json says. Raises ModelError."""
    if said.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {said.get('peft_type')!r:.40}; only LORA is served")
    for name in REFUSED:
        if said.get(name):
            raise ModelError(f"{path}: {name} is {said[name]!r:.60}, which is not supported; train it without")
    if (began := str(said.get("init_lora_weights")).lower()).startswith(OF_THE_MODEL):
        raise ModelError(
            f"{path}: init_lora_weights is {began!r:.40}, so the adapter is one to a model whose own weights are "
            "changed; save it with path_initial_model_for_weight_conversion, which makes it one to the model as it is"
        )
    if said.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias is {said['bias']!r:.40}, which is not supported; train it with bias='none'")
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise ModelError(f"{path}: r is {rank!r:.40}; it must be a number from 1 to --max-lora-rank ({max_rank})")
    for name, value in {"lora_alpha": alpha, **_pattern(path, said, "alpha_pattern")}.items():
        if type(value) not in (int, float) or not abs(value) < MAX_SCALE:
            raise ModelError(f"{path}: {name} is {value!r:.40}; it must be a number that float32 holds")
    for name, value in _pattern(path, said, "rank_pattern").items():
        if type(value) is not int or not 1 <= value <= max_rank:
            raise ModelError(f"{path}: the rank of {name} is {value!r:.40}; it must be from 1 to {max_rank}")


def _pattern(path: Path, said: Mapping[str, Any], field: str) -> dict[str, Any]:
    found = said.get(field) or {}
    if not isinstance(found, dict) or not all(PLAIN.fullmatch(key) for key in found):
        raise ModelError(f"{path}: {field} must name modules as they are called; regular expressions are not supported")
    return found


def _of(said: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """What a pattern says of a module, or the default."""
    for key, value in (said.get(field) or {}).items():
        if name == key.removeprefix("^") or (not key.startswith("^") and name.endswith(f".{key}")):
            return value
    return default


def _tensors(
    path: Path, data: bytes, model: ModelConfig, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, dict[str, TensorInfo]]:
    """By module, its A and its B."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for tensor in safetensors_header(path, data, len(data), 0):
        match = TENSOR.fullmatch(tensor.name)
        if match is None:
            raise ModelError(f"{path}: tensor {tensor.name:.200} is none of a LoRA on matrices; it is not supported")
        if match[1] not in shapes:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in shapes}))
            raise ModelError(
                f"{path}: changes {match[1]:.200}, which {model.architecture} hasn't here, or which adapters can't "
                f"change; they can change {kinds}"
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise ModelError(f"{path}: no tensors in it")
    return found


def _module(
    folder: Path, name: str, pair: Mapping[str, TensorInfo], data: bytes, said: Mapping[str, Any],
    shape: tuple[int, int],
) -> LoraModule:  # fmt: skip
    path = folder / WEIGHTS
    if len(pair) < 2:
        raise ModelError(f"{path}: {name} has lora_{next(iter(pair))} alone; get the file again")
    a, b = pair["A"], pair["B"]
    rank, alpha = (_of(said, field, name, said[plain]) for field, plain in (
        ("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"),
    ))  # fmt: skip
    if a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
        raise ModelError(
            f"{path}: {name} is {list(a.shape)} and {list(b.shape)}; of rank {rank} it must be {[rank, shape[1]]} and "
            f"{[shape[0], rank]}: the adapter is of another model, or {CONFIG} is of another adapter"
        )
    if a.kind != b.kind or a.kind not in EXPONENTS:
        raise ModelError(f"{path}: {name} is of {a.kind} and {b.kind}; both must be float32, float16 or bfloat16")
    import numpy as np

    parts = [data[tensor.offset : tensor.offset + tensor.nbytes] for tensor in (a, b)]
    kind, exponent = EXPONENTS[a.kind]
    for part in parts:
        if bool((np.frombuffer(part, kind) & exponent == exponent).any()):
            raise ModelError(f"{path}: {name} has numbers that are NaN or infinite")
    return LoraModule(name, rank, alpha / rank, a.kind, *parts)
