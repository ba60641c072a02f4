"""The weights of a checkpoint, by their Hugging Face names, straight from the mapped files.

Nothing is copied before it is used: arrays are read-only views of the mapping wherever the file's layout allows. A rank
that asks for a slice reads only its pages.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.checkpoint.gguf_file import NEEDS_GGUF
from planaria.checkpoint.shared import opened
from planaria.checkpoint.spec import Checkpoint, TensorInfo
from planaria.errors import ModelError
from planaria.kernels import quant
from planaria.kernels.blocks import BLOCK, KINDS
from planaria.kernels.numbers import BFLOAT16, float8_values, to_float32
from planaria.kernels.ops import Quantized
from planaria.loader.composed import composed

DTYPES: dict[str, Any] = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": BFLOAT16,
    "i64": np.int64, "i32": np.int32, "i16": np.int16, "i8": np.int8, "u8": np.uint8, "bool": np.bool_,
    "f8_e4m3": np.uint8, "f8_e5m2": np.uint8,
}  # fmt: skip
INTEGERS = ("i64", "i32", "i16", "i8", "u8", "bool")
Array = npt.NDArray[Any]


class WeightSource:
    """Weights of one checkpoint. Files are mapped when first used and let go with the last array that views them.
    float8: do such weights stay as they are?"""

    def __init__(self, checkpoint: Checkpoint, *, float8: bool = False) -> None:
        self.checkpoint, self.float8 = checkpoint, float8
        self._infos = {t.name: t for t in checkpoint.tensors}
        self._maps: dict[int, tuple[mmap.mmap, npt.NDArray[np.uint8]]] = {}

    def names(self) -> list[str]:
        return list(self._infos)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError if the tensor is missing, has another shape or is of integers."""
        found = self._info(name)
        if found.kind in INTEGERS:
            raise ModelError(
                f"{self.checkpoint.path}: tensor {name} is of {found.kind}: codes of a quantisation that config.json "
                "doesn't name (quantization_config)? Get the model's files again"
            )
        if found.shape != tuple(shape):
            raise ModelError(
                f"{self.checkpoint.path}: tensor {name} has shape {list(found.shape)}, the configuration asks for "
                f"{list(shape)}; the weights and config.json are not of the same model"
            )

    def get(
        self,
        name: str,
        *,
        dequantise: bool = False,
        rows: slice | None = None,
        cols: slice | None = None,
    ) -> Array | Quantized:
        """A tensor, or its rows (dimension 0) and columns (dimension 1) in the given ranges (step 1).

        Float kinds come as stored (read-only views, bfloat16 as its bits), but those of 8 bits as float32; kinds that
        stay packed (blocks.py) come as `Quantized`, and so their columns are cut at multiples of 32; other packed kinds
        come as float32. With `dequantise` all come as float32.
        Raises ModelError for a missing tensor, ValueError for a range that can't be cut.
        """
        info = self._info(name)
        row_range, col_range = _ranges(info, rows, cols)
        if info.parts:
            made = composed(info, row_range, col_range, self._part, float8=self.float8)
            if isinstance(made, Quantized):
                return quant.dequantise(made) if dequantise else made
            return to_float32(made) if dequantise else made
        raw = self._rows(info, row_range)
        if info.kind in DTYPES:
            values = raw if raw.ndim < 2 else raw[:, col_range.start : col_range.stop]
            if info.kind.startswith("f8"):
                return float8_values(info.kind)[values]
            return to_float32(values) if dequantise else values
        num_rows, num_columns = len(row_range), info.shape[1]
        if info.kind not in KINDS:
            whole = _dequantise_with_gguf(raw, info.kind, name) if num_rows else np.empty((0, num_columns), np.float32)
            return whole[:, col_range.start : col_range.stop]
        kind = KINDS[info.kind]
        first, last = col_range.start // kind.elements, -(-col_range.stop // kind.elements)
        data = raw[:, first * kind.nbytes : last * kind.nbytes]
        skip = col_range.start - first * kind.elements
        weight = Quantized(info.kind, data, (num_rows, len(col_range)), skip)
        return quant.dequantise(weight) if dequantise else weight

    def forget(self, name: str) -> None:
        """Tell the system that a tensor's pages aren't needed in this process any more (views stay valid: they are
        read again when touched). Keeps resident memory low while weights are packed one after the other."""
        info = self._info(name)
        for part in info.parts or (info,):
            self._forget(part)

    def _forget(self, info: TensorInfo) -> None:
        mapped = self._maps.get(info.file)
        if mapped is None or not hasattr(mapped[0], "madvise"):
            return
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            mapped[0].madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Let the mappings go; each ends with the last array that views it. Idempotent."""
        self._maps.clear()

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _part(self, part: TensorInfo, rows: range | None = None, columns: range | None = None) -> Array:
        """A tensor of another's parts, in these ranges of its first two dimensions, or all of it."""
        raw = self._rows(part, range(part.shape[0] if part.shape else 1) if rows is None else rows)
        return raw if columns is None else raw[:, columns.start : columns.stop]

    def _info(self, name: str) -> TensorInfo:
        try:
            return self._infos[name]
        except KeyError:
            raise ModelError(
                f"{self.checkpoint.path}: tensor {name} is missing; the checkpoint is incomplete or of another model"
            ) from None

    def _bytes(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        if info.file not in self._maps:
            self._maps[info.file] = _map(self.checkpoint.files[info.file])
        whole = self._maps[info.file][1]
        if info.offset + info.nbytes > len(whole):
            raise ModelError(f"{self.checkpoint.files[info.file]}: became shorter since it was opened; get it again")
        return whole[info.offset : info.offset + info.nbytes]

    def _rows(self, info: TensorInfo, row_range: range) -> Array:
        """Rows in Hugging Face's order: values [n, ...] of float kinds, bytes [n, bytes per row] of packed ones."""
        data = self._bytes(info)
        if info.kind in DTYPES:
            dtype = np.dtype(DTYPES[info.kind])
            if info.offset % dtype.itemsize:
                data = data.copy()
            table: Array = data.view(dtype).reshape(info.shape)
        else:
            table = data.reshape(info.shape[0], -1)
        if info.rotated_heads:
            return table[_unrotate(row_range, info.shape[0], info.rotated_heads)]
        return (
            table if len(row_range) == (info.shape[0] if info.shape else 1) else table[row_range.start : row_range.stop]
        )


def _dequantise_with_gguf(data: Array, kind: str, name: str) -> npt.NDArray[np.float32]:
    """Rows of bytes [N, bytes per row] of a GGUF kind that no kernel reads packed -> float32 [N, K]."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError(f"tensor {name}: element type {kind} {NEEDS_GGUF}") from None
    try:
        found: npt.NDArray[np.float32] = dequantize(data, GGMLQuantizationType[kind.upper()])
        return found
    except (KeyError, NotImplementedError):
        raise ModelError(
            f"tensor {name}: element type {kind} is not supported; use a file of another quantization, such as Q4_K_M"
        ) from None


def _map(path: str) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    try:
        with opened(path) as f:
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:
        raise ModelError(f"{path}: can't be mapped: {e}") from None
    return mapped, np.frombuffer(mapped, np.uint8)


def _ranges(info: TensorInfo, rows: slice | None, cols: slice | None) -> tuple[range, range]:
    def cut(part: slice | None, dim: int) -> range:
        size = info.shape[dim] if dim < len(info.shape) else 1
        if part is None:
            return range(size)
        start, stop, step = part.indices(size)
        if step != 1 or stop < start or (part.stop is not None and part.stop > size):
            raise ValueError(f"{info.name}: {part} is not a range of dimension {dim}, which has {size}")
        return range(start, stop)

    if cols is not None and len(info.shape) != 2:
        raise ValueError(f"{info.name}: columns of a tensor with {len(info.shape)} dimension(s)")
    row_range, col_range = cut(rows, 0), cut(cols, 1)
    if info.kind in KINDS and (col_range.start % BLOCK or col_range.stop % BLOCK):
        raise ValueError(f"{info.name}: columns {cols} of {info.kind} must be cut at multiples of {BLOCK}")
    return row_range, col_range


def _unrotate(row_range: range, num_rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Stored row of each wanted row: within a head of size d, row (half, i) is stored as (i, half)."""
    dim = num_rows // heads
    row = np.arange(row_range.start, row_range.stop)
    head, within = row // dim, row % dim
    return head * dim + (within % (dim // 2)) * 2 + within // (dim // 2)
