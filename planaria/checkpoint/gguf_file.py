"""The header of a GGUF file: metadata and tensor index.

Read here with `struct`, since the `gguf` package makes an array view per string and takes seconds for a vocabulary;
its tables of element types are used. Every length is checked against the file, so that a damaged file ends in one
line. Strings stay as text, float32 values become the shortest decimal that is the same float32 (1e-05, not
9.999999747378752e-06).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from typing import Any

from planaria.checkpoint.files import opened
from planaria.errors import ModelError

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4
MAX_NESTING = 4  # of arrays in arrays
MAX_ALIGNMENT = 1 << 20
ROPE_FREQS = "rope_freqs.weight"
ROPE = (ROPE_FREQS, "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True)
class GGUFTensor:
    """`shape` with the slowest dimension first, as torch has it; `offset` from the start of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: list[GGUFTensor]
    data_start: int  # everything before it is the header
    rope: dict[str, bytes] = field(default_factory=dict)  # of the tensors in ROPE: they belong to the configuration


def read_header(path: str) -> GGUFHeader:
    """Raises ModelError if the file isn't a GGUF file of version 2 or 3, is damaged or is shorter than it says."""
    try:
        with opened(path) as f:
            magic = f.read(4)
            if magic != MAGIC:
                raise ModelError(f"{path}: not a GGUF file (starts with {magic!r}); get the file again")
            buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise ModelError(f"{path}: can't be read: {e.strerror or e}") from None
    except ValueError:  # nothing but the magic number, or not even that
        raise ModelError(f"{path}: damaged or truncated GGUF header; get the file again") from None
    with buffer:
        reader = _Reader(buffer, path)
        try:
            return reader.header()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
            raise ModelError(
                f"{path}: damaged or truncated GGUF header ({reader.part}, by byte {reader.at}); get the file again"
            ) from None


# Element types that are read and unpacked without the gguf package: name, elements and bytes of a block.
COMMON_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17),
}  # fmt: skip
NEEDS_GGUF = 'needs the gguf package to be unpacked: pip install "planaria[gguf]"'


def _element_type(type_id: int, what: str) -> tuple[str, int, int]:
    """Name, elements and bytes of a block. Raises ModelError."""
    if type_id in COMMON_TYPES:
        return COMMON_TYPES[type_id]
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise ModelError(f"{what}: element type {type_id} {NEEDS_GGUF}") from None
    try:
        kind = GGMLQuantizationType(type_id)
        return (kind.name, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        raise ModelError(f"{what} has the unknown element type {type_id}") from None


class _Reader:
    def __init__(self, buffer: mmap.mmap, path: str) -> None:
        self.buffer, self.path, self.at, self.size = buffer, path, 4, len(buffer)
        self.part = "its first numbers"  # what is being read, for errors

    def header(self) -> GGUFHeader:
        (version,) = self.take("<I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path}: GGUF version {version} is not supported (2 and 3, little-endian, are); convert it again"
            )
        num_tensors, num_values = self.take("<QQ")
        metadata: dict[str, Any] = {}
        for i in range(num_values):
            self.part = f"metadata {i} of {num_values}"
            key = self.string()
            self.part += f", {key[:80]!r}"
            (kind,) = self.take("<I")
            metadata[key] = self.value(kind)
        raw: dict[str, tuple[Any, ...]] = {}
        for i in range(num_tensors):
            self.part = f"tensor {i} of {num_tensors}"
            name = self.string()
            if name in raw:
                self.part += f", {name[:80]!r} again"
                raise struct.error
            (num_dims,) = self.take("<I")
            if num_dims > MAX_DIMS:
                raise struct.error
            dims = self.take(f"<{num_dims}Q")
            raw[name] = (dims[::-1], *self.take("<IQ"))
        alignment = metadata.get("general.alignment", 32)
        self.part = f"general.alignment, {alignment!r:.40}"
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            raise struct.error
        data_start = -(-self.at // alignment) * alignment
        tensors = []
        for name, (shape, type_id, offset) in raw.items():
            kind, per_block, block_bytes = _element_type(type_id, f"{self.path}: tensor {name}")
            if not all(shape) or (shape and shape[-1] % per_block):
                raise ModelError(f"{self.path}: tensor {name} {list(shape)} isn't a whole number of {kind} blocks")
            nbytes = math.prod(shape) // per_block * block_bytes
            end = data_start + offset + nbytes
            if end > self.size:
                raise ModelError(
                    f"{self.path}: truncated: tensor {name} ends at byte {end} of {self.size}; get the file again"
                )
            tensors.append(GGUFTensor(name, kind.lower(), shape, data_start + offset, nbytes))
        of_rope = [t for t in tensors if t.name in ROPE and t.kind == "f32"]
        rope = {t.name: self.buffer[t.offset : t.offset + t.nbytes] for t in of_rope}
        return GGUFHeader(metadata, tensors, data_start, rope)

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.buffer, self.at)
        self.at += struct.calcsize(form)
        return values

    def string(self) -> str:
        (length,) = self.take("<Q")
        if length > self.size - self.at:
            raise struct.error
        self.at += length
        return self.buffer[self.at - length : self.at].decode("utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary and its merges are 100,000 strings and more."""
        buffer, at, size, unpack = self.buffer, self.at, self.size, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(buffer, at)[0]
            if at > size:
                raise struct.error
            out.append(buffer[start:at].decode())
        self.at = at
        return out

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.take("<IQ")
            if count > self.size - self.at or depth > MAX_NESTING:
                raise struct.error
            if item == STRING:
                return self.strings(count)
            if item == ARRAY:
                return [self.value(ARRAY, depth + 1) for _ in range(count)]
            return list(self.take(f"<{count}{self.scalar(item)}"))
        (value,) = self.take("<" + self.scalar(kind))
        return shortest_float32(value) if kind == 6 else value

    def scalar(self, kind: int) -> str:
        try:
            return SCALARS[kind]
        except KeyError:
            raise struct.error from None


def shortest_float32(value: float) -> float:
    """The decimal with the fewest digits that rounds to the same float32."""
    if not math.isfinite(value):
        return value
    same = struct.pack("<f", value)
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == same:
                return short
        except OverflowError:
            continue
    return value
