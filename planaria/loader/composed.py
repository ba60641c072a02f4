"""Weights that a checkpoint has in several tensors, or another way round, as the kernels take them.

Rule: what a kind's blocks say exactly stays packed; the rest becomes float32. Only the rows and columns that are asked
for are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.checkpoint.spec import TensorInfo
from planaria.errors import ModelError
from planaria.kernels.ops import Quantized
from planaria.kernels.quant import BLOCK

Array = npt.NDArray[Any]
Read = Callable[..., Array]  # (part, rows, columns) -> its values there; ranges of its first two dimensions
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the values


def composed(info: TensorInfo, rows: range, columns: range, read: Read) -> Array | Quantized:
    """Rows and columns of a tensor with parts; columns begin and end at multiples of 32, or at the tensor's end."""
    return KINDS[info.kind](info, rows, columns, read)


def _turned(info: TensorInfo, rows: range, columns: range, read: Read) -> Array:
    """[K, N], the other way round."""
    return read(info.parts[0], columns, rows).T


def _mxfp4(info: TensorInfo, rows: range, columns: range, read: Read) -> Quantized:
    """Codes [N, K / 32, 16], two neighbours along K in a byte, and exponents of 2 [N, K / 32]: exact in q8_0, as a
    code's double is an integer; but a scale below 2^-23 is 0."""
    blocks = range(columns.start // BLOCK, columns.stop // BLOCK)
    codes, exponents = (read(part, rows, blocks) for part in info.parts)
    if exponents.max(initial=0) > 143:
        raise ModelError(f"tensor {info.name}: a block's scale is 2^{int(exponents.max()) - 127}; get the file again")
    data = np.empty((len(rows), len(blocks), 34), np.uint8)
    with np.errstate(under="ignore"):
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float16)
    data[..., :2] = scales[..., None].view(np.uint8)
    data[..., 2::2] = FP4[codes & 15].view(np.uint8)
    data[..., 3::2] = FP4[codes >> 4].view(np.uint8)
    return Quantized("q8_0", data.reshape(len(rows), -1), (len(rows), len(columns)))


KINDS: dict[str, Callable[[TensorInfo, range, range, Read], Array | Quantized]] = {
    "turned": _turned, "mxfp4": _mxfp4,
}  # fmt: skip
