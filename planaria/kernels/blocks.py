"""GGUF's packed kinds: what a block of a file says, in numbers. The `gguf` package's `quants.py` is the reference, bit
for bit.

A weight is scale * (code - offset) + minimum, or scale * LEVELS[code], or scale * float8 / 256. 16 or 32 weights along
K share a scale and a minimum, which are float16 numbers of their own, or small integers times float16 numbers of a
superblock of 256.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planaria.checkpoint.gguf_file import COMMON_TYPES

BLOCK = 32  # along K: weights may be cut between any two of these
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Small = npt.NDArray[np.int8]


class Scales(NamedTuple):
    """Of blocks [..., blocks]: scale, minimum float16 [..., blocks]; where these are a superblock's, sub_scales and
    sub_minima int8 [..., blocks, groups]; minima are subtracted then, else added."""

    scale: Halves
    minimum: Halves | None
    sub_scales: Small | None
    sub_minima: Small | None


class Plane(NamedTuple):
    """Some bits of each code. They begin `at` a byte of the block; each `run` of bytes has the bits of as many codes in
    its lowest bits, those of the codes that follow in the next, and so on."""

    at: int
    bits: int
    run: int


@dataclass(frozen=True)
class BlockKind:
    """number: of the kind, ggml's. elements, nbytes: of a block in a file. planes: of codes, the lowest bits first.
    scale, minimum: where the float16 numbers are. small: reads integers that are scales and minima of `group` weights.
    offset: subtracted from a code. levels: a code is a place in LEVELS. float8: it is a number, see FLOAT8."""

    number: int
    elements: int
    nbytes: int
    planes: tuple[Plane, ...]
    scale: int = 0
    minimum: int | None = None
    small: Callable[[Bytes], tuple[Small, Small | None]] | None = field(default=None, repr=False)
    group: int = BLOCK
    offset: int = 0
    levels: bool = False
    float8: bool = False

    @property
    def bits(self) -> int:
        return sum(plane.bits for plane in self.planes)

    @property
    def both(self) -> int:
        """Numbers of a scale: 1, or 2 with a minimum."""
        return 1 if self.minimum is None else 2

    @property
    def by_bytes(self) -> bool:
        """Whether all CPUs' kernels round its rows to 8 bits: those of superblocks."""
        return self.small is not None and not self.levels

    def codes(self, blocks: Bytes) -> Bytes:
        """[..., elements] of blocks [..., nbytes]."""
        parts = [_fields(blocks[..., at : at + self.elements * bits // 8], bits, run) for at, bits, run in self.planes]
        for part, plane in zip(parts[1:], self.planes, strict=False):  # above the one below it: two at most
            parts[0] |= part << np.uint8(plane.bits)
        return parts[0]

    def scales(self, blocks: Bytes) -> Scales:
        small = self.small(blocks) if self.small is not None else (None, None)
        return Scales(_half(blocks, self.scale), None if self.minimum is None else _half(blocks, self.minimum), *small)


def _half(blocks: Bytes, at: int) -> Halves:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _fields(packed: Bytes, bits: int, run: int) -> Bytes:
    """See `Plane`."""
    if bits == 8:
        return packed
    codes = packed.reshape(*packed.shape[:-1], -1, 1, run) >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def _k_scales(b: Bytes) -> tuple[Small, Small | None]:
    """Scales and minima of 6 bits in 12 bytes, as Q4_K and Q5_K have them."""
    words = np.ascontiguousarray(b[..., 4:16]).view("<u4")  # four at a time
    upper = words[..., 2]
    found = np.empty((2, *words.shape[:-1], 2), "<u4")
    for i, (own, more) in enumerate(((words[..., 0], upper), (words[..., 1], upper >> np.uint32(4)))):
        found[i, ..., 0] = own & np.uint32(0x3F3F3F3F)
        found[i, ..., 1] = more & np.uint32(0x0F0F0F0F) | own >> np.uint32(2) & np.uint32(0x30303030)
    scales, minima = found.view(np.int8)
    return scales, minima


def _q6_k_scales(b: Bytes) -> tuple[Small, Small | None]:
    return b[..., 192:208].view(np.int8), None


def _q3_k_scales(b: Bytes) -> tuple[Small, Small | None]:
    low, high = b[..., 96:104], b[..., 104:108]
    scales = np.concatenate([low & 15, low >> 4], -1) | _fields(high, 2, 4) << np.uint8(4)
    return scales.view(np.int8) - np.int8(32), None


def _q2_k_scales(b: Bytes) -> tuple[Small, Small | None]:
    both = b[..., :16]
    return (both & 15).view(np.int8), (both >> 4).view(np.int8)


def _iq4_xs_scales(b: Bytes) -> tuple[Small, Small | None]:
    high = np.ascontiguousarray(b[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = _fields(b[..., 4:8], 4, 1) | (high & 3).astype(np.uint8) << np.uint8(4)
    return scales.view(np.int8) - np.int8(32), None


_TYPES = {name.lower(): (number, elements, nbytes) for number, (name, elements, nbytes) in COMMON_TYPES.items()}


def _kind(name: str, planes: Sequence[tuple[int, int, int]], **rest: Any) -> BlockKind:
    return BlockKind(*_TYPES[name], tuple(Plane(*plane) for plane in planes), **rest)


KINDS = {
    "q8_0": _kind("q8_0", [(2, 8, 32)]),
    "q4_0": _kind("q4_0", [(2, 4, 16)], offset=8),
    "q4_1": _kind("q4_1", [(4, 4, 16)], minimum=2),
    "q5_0": _kind("q5_0", [(6, 4, 16), (2, 1, 1)], offset=16),
    "q5_1": _kind("q5_1", [(8, 4, 16), (4, 1, 1)], minimum=2),
    "q2_k": _kind("q2_k", [(16, 2, 32)], scale=80, minimum=82, small=_q2_k_scales, group=16),
    "q3_k": _kind("q3_k", [(32, 2, 32), (0, 1, 32)], scale=108, small=_q3_k_scales, group=16, offset=4),
    "q4_k": _kind("q4_k", [(16, 4, 32)], minimum=2, small=_k_scales),
    "q5_k": _kind("q5_k", [(48, 4, 32), (16, 1, 32)], minimum=2, small=_k_scales),
    "q6_k": _kind("q6_k", [(0, 4, 64), (128, 2, 32)], scale=208, small=_q6_k_scales, group=16, offset=32),
    "iq4_nl": _kind("iq4_nl", [(2, 4, 16)], levels=True),
    "iq4_xs": _kind("iq4_xs", [(8, 4, 16)], small=_iq4_xs_scales, levels=True),
}
# Of no GGUF file: numbers of 8 bits (e4m3), of which each 32 along K have a scale. A 256th of one is a float16 with the
# same bits, but for their places; so scales are 256 times what checkpoints say, far from a float16's bounds.
FLOAT8 = "f8_e4m3"
PACKED = {**KINDS, FLOAT8: BlockKind(0, BLOCK, 34, (Plane(2, 8, BLOCK),), float8=True)}  # CPUs' kernels take KINDS
