"""Quantised safetensors: which tensors together are one weight, and what becomes of it.

Rule: a method, a width of codes or an order of them that isn't known here is refused by name, before anything is read;
`planaria.loader.composed` reads what this module names. A weight's kind says all that reading it takes:

gptq:BITS:sym|asym:v1|v2   qweight [K / (32 / BITS), N], scales, qzeros (v1: one less than it is), g_idx
awq:4:asym                 qweight [K, N / 8], its own order of nibbles, scales, qzeros
ints:BITS:sym|asym         compressed-tensors: weight_packed [N, K / (32 / BITS)], weight_scale, zero points, g_idx
int8:8:sym|asym            weight [N, K], its scale (of all, of a row, of groups of columns), zero points
fp8, fp8:SIZE              weight [N, K], its scale (of all, of a row; of blocks of SIZE x SIZE)
bnb4:SIZE                  bitsandbytes: codes, the largest of each block of SIZE, the table that codes point into; or
bnb4:SIZE:OUTER:MEAN       these largest as codes themselves, of blocks of OUTER, with a table of their own
bnb8:8                     int8 and the largest value of a row
":ordered" after it: groups of columns that don't follow one another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from planaria.checkpoint.spec import TensorInfo
from planaria.errors import ModelError

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")  # of compressed-tensors
UNUSED = ("input_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale", "q_scale", "weight_shape")
FLOATS = ("f64", "f32", "f16", "bf16")
TILE = 128  # rows and columns of fp8 that share a scale
Parts = dict[str, TensorInfo]  # tensors of one stem, by what comes after it


def method_of(path: str, config: dict[str, Any]) -> str:
    """ "" for plain weights. Raises ModelError for what can't be read, naming it."""
    given = config.get("quantization_config")
    if not given:
        return ""
    if not isinstance(given, dict):
        raise ModelError(f"{path}: config.json: quantization_config {given!r}: must be an object")
    method = str(given.get("quant_method", "none named"))
    why = _refused(method, given)
    if why is not None:
        raise ModelError(
            f"{path}: weights quantized with {method}{why} are not supported (these are: {', '.join(METHODS)}); use "
            "another checkpoint (--quantization packs a plain one at load) or a GGUF file"
        )
    return method


def _refused(method: str, given: dict[str, Any]) -> str | None:
    """What of it can't be read; None: nothing."""
    if method not in METHODS:
        return ""
    if method == "gptq" and given.get("bits") not in (4, 8):
        return f" to {given.get('bits')} bits"
    if method == "gptq" and str(given.get("checkpoint_format") or "gptq") not in ("gptq", "gptq_v2"):
        return f" in the format {given['checkpoint_format']}"
    if method == "awq" and (given.get("bits", 4) != 4 or str(given.get("version") or "gemm").lower() != "gemm"):
        return f" to {given.get('bits', 4)} bits in the layout {given.get('version')}"
    if method == "compressed-tensors" and str(given.get("format")) not in FORMATS:
        return f" in the format {given.get('format')}"
    if method == "compressed-tensors":
        groups = given.get("config_groups")
        widths = [_width(group) for group in (groups.values() if isinstance(groups, dict) else ())]
        wrong = next((width for width in widths if width not in ((4, "int"), (8, "int"), (8, "float"))), None)
        return None if wrong is None else " as {1}{0}".format(*wrong)
    if method == "fp8" and given.get("weight_block_size") not in (None, [TILE, TILE]):
        return f" in blocks of {given['weight_block_size']}"
    if method == "bitsandbytes" and given.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        return f" stored as {given['bnb_4bit_quant_storage']}"
    return None


def _width(group: object) -> tuple[object, object]:
    weights = group.get("weights") if isinstance(group, dict) else None
    return (weights.get("num_bits"), weights.get("type", "int")) if isinstance(weights, dict) else (None, None)


def together(
    path: str, config: dict[str, Any], tensors: Sequence[TensorInfo], read: Callable[[TensorInfo], bytes]
) -> list[TensorInfo]:  # fmt: skip
    """The tensors, with those of a quantised weight as one under the weight's name. read: a small tensor's bytes.
    Raises ModelError."""
    method = method_of(path, config)
    if method in ("", "mxfp4"):
        return list(tensors)
    given, stems = config["quantization_config"], dict[str, Parts]()
    for tensor in tensors:
        stem, suffix = _stem(tensor.name, method)
        stems.setdefault(stem, {})[suffix] = tensor
    out: list[TensorInfo] = []
    for stem, parts in stems.items():
        try:
            out += _weights(stem, parts, method, given, read)
        except (
            ArithmeticError, AttributeError, KeyError, RecursionError, StopIteration, TypeError, ValueError,
        ) as e:  # fmt: skip
            raise ModelError(
                f"{path}: what is there of {stem} ({', '.join(sorted(parts))}) is no weight quantized with {method} "
                f"({e}); get the model's files again"
            ) from None
    return out


def _stem(name: str, method: str) -> tuple[str, str]:
    """A weight's name without "weight" and what comes after it."""
    if method == "bitsandbytes" and ".weight" in name:
        stem, _, rest = name.partition(".weight")
        return stem, f"weight{rest}"
    stem, _, suffix = name.rpartition(".")
    return stem, suffix


def _weights(
    stem: str, parts: Parts, method: str, given: dict[str, Any], read: Callable[[TensorInfo], bytes]
) -> list[TensorInfo]:  # fmt: skip
    form = _form(parts, method, given, read)
    if form is None:
        return list(parts.values())
    names, kind, shape = form
    there = {name: parts[name] for name in names if name in parts}
    size = sum(part.nbytes for part in there.values())
    weight = replace(
        parts[names[0]], name=f"{stem}.weight", kind=kind, shape=shape, nbytes=size, parts=tuple(there.values())
    )  # fmt: skip
    return [weight, *(tensor for suffix, tensor in parts.items() if suffix not in there and suffix not in UNUSED)]


def _form(
    parts: Parts, method: str, given: dict[str, Any], read: Callable[[TensorInfo], bytes]
) -> tuple[Sequence[str], str, tuple[int, int]] | None:  # fmt: skip
    """(names of its parts, kind, shape) of the weight, if it is quantised."""
    if "qweight" in parts and method == "gptq":
        words, columns = _two(parts["qweight"])
        bits, order = int(given["bits"]), ":ordered" if given.get("desc_act") else ""
        version = "v2" if given.get("checkpoint_format") == "gptq_v2" else "v1"
        kind = f"gptq:{bits}:{'sym' if given.get('sym', True) else 'asym'}:{version}{order}"
        if order:
            _ = parts["g_idx"]
        return _needed(parts, "qweight", "scales", "qzeros", "g_idx"), kind, (columns, words * (32 // bits))
    if "qweight" in parts and method == "awq":
        rows, words = _two(parts["qweight"])
        return _needed(parts, "qweight", "scales", "qzeros"), "awq:4:asym", (words * 8, rows)
    sym = "asym" if "weight_zero_point" in parts else "sym"
    if "weight_packed" in parts:
        (rows, words), bits = _two(parts["weight_packed"]), _bits(given)
        names = _needed(parts, "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
        order = ":ordered" if "weight_g_idx" in parts else ""
        orders = [group["weights"].get("actorder") for group in given["config_groups"].values()]
        if not order and any(each in ("group", "dynamic", True) for each in orders):
            raise KeyError("weight_g_idx")
        return names, f"ints:{bits}:{sym}{order}", (rows, words * (32 // bits))
    if "weight" in parts and parts["weight"].kind == "i8":
        shape = _two(parts["weight"])
        if method != "bitsandbytes":
            return _needed(parts, "weight", "weight_scale", "weight_zero_point"), f"int8:8:{sym}", shape
        if parts["SCB"].shape != shape[:1]:
            raise ValueError(f"SCB has shape {list(parts['SCB'].shape)}")
        return _needed(parts, "weight", "SCB"), "bnb8:8", shape
    if "weight" in parts and parts["weight"].kind.startswith("f8") and method != "bitsandbytes":
        scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        rows, columns = _two(parts["weight"])
        tiles = -(-rows // TILE), -(-columns // TILE)
        tiled = parts[scale].shape == tiles and tiles[0] != rows
        return _needed(parts, "weight", scale), f"fp8:{TILE}" if tiled else "fp8", (rows, columns)
    if "weight.quant_map" in parts:
        return _nf4(parts, read)
    return None


def _needed(parts: Parts, first: str, scale: str, *rest: str) -> tuple[str, ...]:
    """The names. Raises KeyError where codes or scales aren't there, ValueError for scales that are none."""
    if parts[first] and parts[scale].kind not in FLOATS:
        raise ValueError(f"scales are {parts[scale].kind}")
    return first, scale, *rest


def _nf4(parts: Parts, read: Callable[[TensorInfo], bytes]) -> tuple[Sequence[str], str, tuple[int, int]]:
    """bitsandbytes keeps what isn't a tensor as JSON in one."""
    state = next(name for name in parts if name.startswith("weight.quant_state.bitsandbytes__"))
    said = json.loads(read(parts[state]))
    rows, columns = (int(size) for size in said["shape"])
    names = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
    sizes = [int(said["blocksize"])]
    kind = f"bnb4:{sizes[0]}"
    if "weight.nested_absmax" in parts:
        sizes.append(int(said["nested_blocksize"]))
        kind += f":{sizes[1]}:{float(said['nested_offset'])}"
    if min(rows, columns, *sizes) < 1 or parts["weight"].nbytes * 2 != rows * columns:
        raise ValueError(f"{rows} x {columns} codes in {parts['weight'].nbytes} bytes, blocks of {sizes}")
    parts.pop(state)
    return names, kind, (rows, columns)


def _two(tensor: TensorInfo) -> tuple[int, int]:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def _bits(given: dict[str, Any]) -> int:
    widths = {int(group["weights"]["num_bits"]) for group in given["config_groups"].values()}
    if len(widths) != 1:
        raise ValueError("groups of several widths")
    return widths.pop()


def kept_as(kind: str) -> str:
    """The packed form of a kind that is made of parts; "" for none: it is unpacked."""
    name, *rest = kind.split(":")
    if "ordered" in rest or name in ("fp8", "bnb4", "turned", "latent"):
        return ""
    if name in ("mxfp4", "int8", "bnb8") or rest[0] == "8":
        return "q8_0"
    return "q4_0" if "sym" in rest else "q4_1"
