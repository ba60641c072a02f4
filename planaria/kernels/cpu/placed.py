"""Where packed things are in memory that processes share, and the things again in a process that has it mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from planaria.kernels.cpu.pack import Packed, form_of
from planaria.kernels.cpu.recorder import Rope, Vector


class PackedAt(msgspec.Struct, frozen=True, array_like=True):
    """A weight, a vector or rotary tables. numbers: of its form; arrays: where each is, and its bytes."""

    kind: str
    numbers: tuple[int, ...]
    arrays: tuple[tuple[int, int], ...]


def placed(thing: Any, offset_of: Callable[[int], int]) -> PackedAt:
    """offset_of: of an address. Raises KeyError where it isn't of that memory, TypeError for another kind of thing."""
    kind, numbers, arrays = _parts(thing)
    return PackedAt(kind, numbers, tuple((offset_of(int(a.ctypes.data)), int(a.nbytes)) for a in arrays))


def _parts(thing: Any) -> tuple[str, tuple[int, ...], tuple[npt.NDArray[Any], ...]]:
    match thing:
        case Packed():
            return "packed", form_of(thing), (thing.data,) if thing.biased else (thing.data, thing.bias)
        case Vector():
            return "vector", (thing.length,), (thing.values,)
        case Rope():
            return "rope", thing.cos.shape, (thing.cos, thing.sin)
    raise TypeError(f"{type(thing).__name__} can't be shared")


def found(at: PackedAt, memory: npt.NDArray[np.uint8]) -> Any:
    """The thing. Raises ValueError where it can't be there."""
    arrays = [memory[offset : offset + size] for offset, size in at.arrays]
    if [array.nbytes for array in arrays] != [size for _, size in at.arrays]:
        raise ValueError(f"a {at.kind} that ends beyond {memory.nbytes} bytes")
    match at.kind, at.numbers, arrays:
        case "packed", (kind, rows, columns, panels, length, stride, scales, biased), (data, *apart):
            bias = data[panels * stride :] if biased else apart[0] if apart else data[:0]
            if panels * (stride + 64 * biased) == data.nbytes and panels * 64 == bias.nbytes:
                return Packed(kind, rows, columns, panels, length, stride, scales, data, bias.view(np.float32))
        case "vector", (length,), (values,):
            if values.nbytes >= 4 * length:
                return Vector(values.view(np.float32), length)
        case "rope", (positions, half), (cos, sin):
            if cos.nbytes == sin.nbytes == 4 * positions * half:
                return Rope(*(table.view(np.float32).reshape(positions, half) for table in (cos, sin)))
    raise ValueError(f"no {at.kind} of {at.numbers} has {[array.nbytes for array in arrays]} bytes")
