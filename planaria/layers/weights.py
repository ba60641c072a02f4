"""From a checkpoint's tensors to packed weights: what is fused, what stays packed, what is quantised.

Rule: a tensor is checked against the shape the model expects before anything of it is read, its part of the
rows or columns is read once, and nothing keeps the source after `Ops.pack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from planaria.errors import PlanariaError
from planaria.kernels.blocks import BLOCK, KINDS
from planaria.kernels.numbers import to_float32
from planaria.kernels.ops import Ops, Quantized, Rows, Stacked, Weight
from planaria.kernels.quant import dequantise, quantise
from planaria.layers.rope import rope_tables
from planaria.models.config import RopeConfig

OnWeights = Callable[[int, int], None]  # (weights read, weights in all)
Array = npt.NDArray[Any]
ROWS = 16  # a multiple of these is before each part of a product
QUANTIZATIONS = ("keep", "none", "q8_0", "q4_1")


class Source(Protocol):
    """What a checkpoint's tensors are read from; see planaria.loader."""

    def names(self) -> Iterable[str]: ...

    def expect(self, name: str, shape: tuple[int, ...]) -> None: ...

    def get(
        self, name: str, *, dequantise: bool = False, rows: slice | None = None, cols: slice | None = None
    ) -> Array | Quantized: ...

    def forget(self, name: str) -> None: ...


class Packings(Protocol):
    """What was packed before for this part of the model, in memory that others have, too (`whole`: and the checkpoint
    was checked), or is to be."""

    @property
    def whole(self) -> bool: ...

    def thing(self, key: str, make: Callable[[], tuple[Any, int]]) -> tuple[Any, int]:
        """What `make` makes of the checkpoint, and its bytes; key: what is asked for. Raises PartDiffers."""


class PartDiffers(PlanariaError):
    """What was packed before isn't this part."""


@dataclass(frozen=True)
class TensorPart:
    """A tensor [size, K] of the checkpoint, of which a rank wants `rows` (of its first dimension), in `order` (places
    among them) where one is given."""

    name: str
    size: int
    rows: range
    order: tuple[int, ...] | None = None


class LinearParts(NamedTuple):
    """A weight that `linear` has read: its parts one below the other, and these columns."""

    weight: Weight
    parts: tuple[TensorPart, ...]
    columns: range


def cut(part: range, size: int) -> slice | None:
    """None for all of a dimension, so that a source may hand out its tensor whole."""
    return None if part == range(size) else slice(part.start, part.stop)


class WeightLoader:
    """Reads and packs. Without `ops` it only checks names and shapes, which a model's constructor can't tell.

    quantization: "keep" leaves packed tensors packed; "none" unpacks them; "q8_0" and "q4_1" pack every
    matrix at load (the embedding and the head at q8_0 at least), but keep what the file has packed that
    way. packings: of this part, if it is shared.
    """

    def __init__(
        self,
        source: Source,
        ops: Ops | None,
        quantization: str,
        progress: OnWeights | None = None,
        total: int = 0,
        packings: Packings | None = None,
    ) -> None:
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        self._source, self._ops, self._quantization = source, ops, quantization
        self._progress, self._total, self._packings = progress, total, packings
        self.used: set[str] = set()
        self.linears: list[LinearParts] = []
        self.num_weights = 0  # checked or read so far
        self.num_bytes = 0  # of what was packed: plain weights in the activation dtype, norms in float32
        self._threads = int(getattr(ops, "threads", 1))
        self._itemsize = 4 if str(getattr(ops, "dtype", "")).endswith("float32") else 2

    def vector(self, name: str, size: int, part: range | None = None, *, plus: float = 0.0, times: float = 1.0) -> Any:
        """A norm's weight, float32; `part` of it. (w + plus) * times."""
        part = part or range(size)
        self._expect(name, (size,), len(part))
        if self._ops is None:
            return None
        ops, own = self._ops, part

        def make() -> Any:
            packed = ops.vector((self._float(name, cut(own, size)) + np.float32(plus)) * np.float32(times))
            self.num_bytes += 4 * len(own)
            self._finish([name])
            return packed

        return self._thing(f"vector {name} {part} of {size} {plus} {times}", make)

    def constant(self, size: int, value: float) -> Any:
        """As `vector`, of the same number everywhere, which is in no checkpoint."""
        ops = self._ops
        if ops is None:
            return None
        return self._thing(f"constant {size} {value}", lambda: ops.vector(np.full(size, value, np.float32)))

    def has(self, name: str) -> bool:
        """Has the checkpoint such a tensor?"""
        return name in self._source.names()

    def linear(
        self, parts: Sequence[TensorPart], columns: range, size: int, *, bias: bool = False, kind: str = "",
        single: bool = False,
    ) -> Weight:  # fmt: skip
        """`columns` (of `size`) of the parts' rows, one below the other, with the parts' biases; a tuple where parts
        are packed unlike, unless it must be `single`. kind: of quantization, default what all are packed to."""
        for part in parts:
            self._expect(f"{part.name}.weight", (part.size, size), len(part.rows) * len(columns))
            if bias:
                self._expect(f"{part.name}.bias", (part.size,), len(part.rows))
        if self._ops is None:
            return None

        def make() -> Weight:
            weights = stack([self._matrix(part, columns, size, kind or self._quantization) for part in parts], single)
            biases = [
                ordered(self._float(f"{part.name}.bias", cut(part.rows, part.size)), part.order)
                for part in parts
                if bias
            ]
            names = [f"{part.name}.weight" for part in parts]
            rows = np.cumsum([w.shape[0] for w in weights])
            shifts = np.split(np.concatenate(biases), rows[:-1]) if biases else [None] * len(weights)
            packed = tuple(self._pack(w, shift) for w, shift in zip(weights, shifts, strict=True))
            self._finish(names)
            return packed if len(packed) > 1 else packed[0]

        weight = self._thing(f"linear {list(parts)} {columns} of {size} {bias} {kind}", make)
        self.linears.append(LinearParts(weight, tuple(parts), columns))
        return weight

    def plain(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Weight:
        """All of a matrix that is kept in the activation dtype, whatever the others are packed to."""
        return self.linear([TensorPart(name, rows, range(rows))], range(columns), columns, bias=bias, kind="none")

    def group(self, experts: Sequence[tuple[Weight, Weight]]) -> Weight:
        """Experts read by `linear`, as one."""
        return None if self._ops is None else self._ops.group(experts)

    def table(self, name: str, rows: range, size: int, width: int) -> Weight:
        """The embedding or the output head: `rows` of [size, width]."""
        kind = "q8_0" if self._quantization == "q4_1" else ""
        return self.linear([TensorPart(name, size, rows)], range(width), width, kind=kind)

    def keys_and_values(
        self, name: str, heads: range, num_heads: int, key: int, value: int, rank: int
    ) -> tuple[Weight, Weight]:
        """Of [num_heads * (key + value), rank], which makes a head's key and value of a latent: the key's part turned
        round, [heads * rank, key], and the value's, [heads * value, rank]. Both are plain, whatever the file or the
        quantisation says: blocks along `rank` can't be turned, and both together are a small part of a layer."""
        size = num_heads * (key + value)
        self._expect(f"{name}.weight", (size, rank), len(heads) * (key + value) * rank)
        if self._ops is None:
            return None, None
        rows = range(heads.start * (key + value), heads.stop * (key + value))

        def make() -> tuple[Weight, Weight]:
            both = self._float(f"{name}.weight", cut(rows, size)).reshape(len(heads), key + value, rank)
            keys, values = both[:, :key].transpose(0, 2, 1).reshape(-1, key), both[:, key:].reshape(-1, rank)
            packed = self._pack(keys), self._pack(values)
            self._finish([f"{name}.weight"])
            return packed

        keys, values = self._thing(f"keys and values {name} {rows} of {size}, {key} of {key + value}, {rank}", make)
        return keys, values

    def rope(self, rope: RopeConfig, head_dim: int, length: int) -> Any:
        """Rotary tables for positions below `length`."""
        if self._ops is None:
            return None
        ops = self._ops
        return self._thing(
            f"rope {rope} {head_dim} {length}", lambda: ops.rope_table(*rope_tables(rope, head_dim, length))
        )

    def unused(self, ignored: Callable[[str], bool]) -> list[str]:
        """Tensors of the checkpoint that the model did not ask for."""
        return sorted(name for name in self._source.names() if name not in self.used and not ignored(name))

    def _thing(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` makes, or has made in another process."""
        if self._packings is None:
            return make()
        before = self.num_bytes

        def measured() -> tuple[Any, int]:
            return make(), self.num_bytes - before

        thing, size = self._packings.thing(key, measured)
        self.num_bytes = before + size
        return thing

    def _expect(self, name: str, shape: tuple[int, ...], wanted: int) -> None:
        self._source.expect(name, shape)
        self.used.add(name)
        self.num_weights += wanted

    def _pack(self, weight: Rows | Quantized, bias: Array | None = None) -> Weight:
        assert self._ops is not None
        packed = self._ops.pack(weight, bias)
        size = weight.data.size if isinstance(weight, Quantized) else weight.size * self._itemsize
        self.num_bytes += size + (0 if bias is None else bias.size * self._itemsize)
        return packed

    def _finish(self, names: Sequence[str]) -> None:
        for name in names:
            self._source.forget(name)
        if self._progress is not None:
            self._progress(self.num_weights, self._total)

    def _float(self, name: str, rows: slice | None) -> Array:
        values = self._source.get(name, rows=rows, dequantise=True)
        assert isinstance(values, np.ndarray)
        return values

    def _matrix(self, part: TensorPart, columns: range, size: int, kind: str) -> Array | Quantized:
        """One tensor's part as `kind` wants it; one whose K is no multiple of a block stays plain."""
        weight = self._columns(part, columns, size, kind)
        if isinstance(weight, Quantized):
            return replace(weight, data=ordered(weight.data, part.order))
        return ordered(weight, part.order)

    def _columns(self, part: TensorPart, columns: range, size: int, kind: str) -> Array | Quantized:
        blocks = range(columns.start // BLOCK * BLOCK, min(size, -(-columns.stop // BLOCK) * BLOCK))
        weight = self._source.get(f"{part.name}.weight", rows=cut(part.rows, part.size), cols=cut(blocks, size))
        if blocks != columns:  # heads of a size that cuts through a block of a packed weight
            plain = dequantise(weight, self._threads) if isinstance(weight, Quantized) else weight
            weight = plain[:, columns.start - blocks.start : columns.stop - blocks.start]
        if isinstance(weight, Quantized):
            if kind in ("keep", weight.kind) or (self._quantization == "q4_1" and weight.kind.startswith("q4")):
                return weight
            weight = dequantise(weight, self._threads)
        packs = kind in KINDS and weight.shape[1] % BLOCK == 0
        return quantise(weight, kind, self._threads) if packs else weight


def ordered(rows: Array, order: tuple[int, ...] | None) -> Array:
    """The rows in this order."""
    return rows if order is None else rows[list(order)]


def stack(weights: Sequence[Array | Quantized], single: bool = False) -> list[Rows | Quantized]:
    """Weights one below the other, as few as can be: neighbours that are packed alike become one. Where more are left,
    and there is to be a single one or no part of a product can begin where one of them does, they become plain."""
    runs = [list(run) for _, run in groupby(weights, _form)]
    if len(runs) > 1 and (single or any(sum(w.shape[0] for w in run) % ROWS for run in runs[:-1])):
        runs = [[dequantise(w) if isinstance(w, Quantized) else w for w in weights]]
    return [_joined(run) for run in runs]


def _form(weight: Array | Quantized) -> tuple[str, int] | None:
    return (weight.kind, weight.skip) if isinstance(weight, Quantized) else None


def _joined(run: Sequence[Array | Quantized]) -> Rows | Quantized:
    first = run[0]
    if len(run) == 1:
        return first
    if isinstance(first, Quantized):
        rows = Stacked([w.data for w in run if isinstance(w, Quantized)])
        return replace(first, data=rows, shape=(rows.shape[0], first.shape[1]))
    plain = [w for w in run if not isinstance(w, Quantized)]
    if len({w.dtype for w in plain}) > 1:
        plain = [to_float32(w) for w in plain]
    return Stacked(plain)
