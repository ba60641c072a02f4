"""Tensors in memory that processes share, and where packed things are in it: what cpu/placed.py is, for torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from planaria.kernels.reference_linear import Linear

DTYPES = {
    str(each): each
    for each in (
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64,
        torch.bool,
    )
}  # fmt: skip


def seen(memory: Any, device: torch.device) -> Tensor:
    """A memoryview, or memory of a device, as uint8. It is there as long as the tensor."""
    if hasattr(memory, "__cuda_array_interface__"):
        return torch.as_tensor(memory, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors and warns of it
        return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)


class TensorAt(msgspec.Struct, frozen=True, array_like=True):
    """at: bytes from the beginning of a part."""

    at: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ThingAt(msgspec.Struct, frozen=True, array_like=True):
    """A weight, or a tensor. numbers: of its form."""

    kind: str
    numbers: tuple[int, ...]
    tensors: tuple[TensorAt, ...]


def moved(thing: Any, take: Callable[[int], tuple[int, Tensor]]) -> tuple[ThingAt, Any]:
    """Where it is from now on, and the thing there. take: uint8 room in the part, and where that begins. Raises
    TypeError for another kind of thing."""
    kind, numbers, tensors = _parts(thing)
    places, copies = list[TensorAt](), list[Tensor]()
    for tensor in tensors:
        at, room = take(max(1, tensor.numel() * tensor.dtype.itemsize))
        copy = room[: tensor.numel() * tensor.dtype.itemsize].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor))
        places.append(TensorAt(at, str(tensor.dtype), tuple(tensor.shape)))
    return ThingAt(kind, numbers, tuple(places)), _thing(kind, numbers, copies)


def found(at: ThingAt, memory: Callable[[int, int], Tensor]) -> Any:
    """The thing. memory: so many bytes from a place of the part. Raises ValueError where it can't be there."""
    tensors = list[Tensor]()
    for each in at.tensors:
        if each.dtype not in DTYPES or min((*each.shape, each.at)) < 0:
            raise ValueError(f"no tensor is {each}")
        tensors.append(memory(each.at, each.num_bytes).view(DTYPES[each.dtype]).view(each.shape))
    return _thing(at.kind, at.numbers, tensors)


def _parts(thing: Any) -> tuple[str, tuple[int, ...], tuple[Tensor, ...]]:
    if isinstance(thing, Linear):
        return "linear", (*thing.weight.shape, int(thing.bias is not None)), (thing.whole,)
    if isinstance(thing, Tensor):
        return "tensor", (), (thing,)
    if hasattr(thing, "packed_parts"):
        numbers, tensors = thing.packed_parts()
        return "packed", numbers, tensors
    raise TypeError(f"{type(thing).__name__} can't be shared")


def _thing(kind: str, numbers: tuple[int, ...], tensors: list[Tensor]) -> Any:
    match kind, numbers, tensors:
        case "linear", (rows, columns, biased), (whole,):
            if whole.shape == (rows * columns + biased * rows,):
                return Linear.of(whole, rows, columns, biased)
        case "tensor", (), (tensor,):
            return tensor
        case "packed", _, _:
            from planaria.kernels.gpu.packed import DevicePacked

            return DevicePacked.of_parts(numbers, tensors)
    raise ValueError(f"no {kind} of {numbers} has {[tuple(each.shape) for each in tensors]}")
