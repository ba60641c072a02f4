"""A rank's adapters: its part of each, in the slot that the engine names, and forward passes with and without them.

Rule: an adapter is known by the digest of its bytes, and usable when all of it has come. A request that names one that
isn't here can't enter. A step in which no row has an adapter runs a recording that knows of none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.config.options import LoRAConfig
from planaria.kernels.numbers import BFLOAT16, to_float32
from planaria.kernels.ops import Act, Array, Batch, Operations, Ops
from planaria.layers.decoder import Model
from planaria.layers.weights import LinearParts, ordered
from planaria.mesh.all2all import All2All
from planaria.models.config import ModelConfig
from planaria.models.linears import linears
from planaria.protocol import LoraModule, PutLora, Ready, Reply

DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": BFLOAT16}


class Adapting:
    """Operations in which products with these weights, by id, have a table of adapters; row t of each is token t's."""

    early = False

    def __init__(self, ops: Operations, tables: dict[int, Any]) -> None:
        self._ops, self._tables = ops, tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Act, weight: Any, residual: Act | None = None, *, reduce: bool = False) -> Act:
        return self._ops.linear(x, weight, residual, reduce=reduce, lora=self._tables.get(id(weight)))

    def linear_norm(self, x: Act, weight: Any, norm: Any, eps: float, residual: Act) -> Act:
        return self._ops.linear_norm(x, weight, norm, eps, residual, lora=self._tables.get(id(weight)))


class Loras:
    """Of a model, or a part of one."""

    def __init__(self, config: LoRAConfig, model_config: ModelConfig, ops: Ops, model: Model) -> None:
        self.config, self.ops = config, ops
        self.shapes = linears(model_config)
        self.slots: dict[str, int] = {}  # by digest
        self._linears = [linear for linear in model.linears if all(part.name in self.shapes for part in linear.parts)]
        self._tables = [
            ops.lora_table(list(rows_of(linear)), config.max_lora_rank, config.max_loras) for linear in self._linears
        ]
        self._at = {part.name: (n, i) for n, each in enumerate(self._linears) for i, part in enumerate(each.parts)}

    @property
    def num_bytes(self) -> int:
        """With something in each slot."""
        item = 4 if str(getattr(self.ops, "dtype", "")).endswith("float32") else 2
        sizes = (len(part.rows) + len(each.columns) for each in self._linears for part in each.parts)
        return sum(sizes) * self.config.max_lora_rank * self.config.max_loras * item

    def slot(self, digest: str) -> int:
        """Raises ValueError."""
        if digest not in self.slots:
            raise ValueError(f"the adapter {digest[:12]} is not on this rank")
        return self.slots[digest]

    def of_rows(self, rows: int) -> RowSlots:
        """For so many rows, none of which has one."""
        return RowSlots(self, rows)

    def handle(self, command: PutLora, rank: int) -> Reply:
        self.put(command)
        return Ready(rank)

    def put(self, command: PutLora) -> None:
        """Between two steps. Modules of layers that other ranks have are theirs."""
        if command.first:
            self.slots = {digest: slot for digest, slot in self.slots.items() if slot != command.slot}
            for linear, table in zip(self._linears, self._tables, strict=True):
                self.ops.put_lora(table, command.slot, [None] * len(linear.parts))
        pairs: dict[int, list[tuple[Array, Array] | None]] = {}
        for module in command.modules:
            if module.name in self._at:
                number, part = self._at[module.name]
                of = pairs.setdefault(number, [None] * len(self._linears[number].parts))
                of[part] = self._cut(module, self._linears[number], part)
        for number, each in pairs.items():
            self.ops.put_lora(self._tables[number], command.slot, each)
        if command.last:
            self.slots[command.digest] = command.slot

    def _cut(self, module: LoraModule, linear: LinearParts, part: int) -> tuple[Array, Array]:
        """This rank's columns of A, and rows of B with the scaling in them."""
        rows, columns = self.shapes[module.name]
        own, kind = linear.parts[part], DTYPES[module.dtype]
        a = np.frombuffer(module.a, kind).reshape(module.rank, columns)[:, linear.columns.start : linear.columns.stop]
        b = np.frombuffer(module.b, kind).reshape(rows, module.rank)[own.rows.start : own.rows.stop]
        return to_float32(a), to_float32(ordered(b, own.order)) * np.float32(module.scaling)

    def compile(
        self, forward: Callable[[Operations], Act], batch: Batch, lanes: All2All | None = None
    ) -> Callable[[], Array]:
        """See `Ops.compile`."""
        tables = {id(linear.weight): table for linear, table in zip(self._linears, self._tables, strict=True)}
        plain = self.ops.compile(forward, batch, lanes)
        adapted = self.ops.compile(lambda ops: forward(Adapting(ops, tables)), batch, lanes)  # type: ignore[arg-type]
        return lambda: (adapted if batch.adapted else plain)()


class RowSlots:
    """Which slot each row's adapter is in, -1: it has none; and so the tokens of a batch."""

    def __init__(self, loras: Loras, rows: int) -> None:
        self.loras = loras
        self.of: npt.NDArray[np.int32] = np.full(rows, -1, np.int32)

    def enter(self, row: int, digest: str) -> None:
        """Raises ValueError."""
        self.of[row] = self.loras.slot(digest) if digest else -1

    def leave(self, row: int) -> None:
        self.of[row] = -1

    def together(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows in another order, those of one adapter one after the other."""
        slots = self.of[rows]
        return rows[np.argsort(slots, kind="stable")] if (slots >= 0).any() else rows


def rows_of(linear: LinearParts) -> Iterator[range]:
    """Where the parts are among the weight's rows."""
    first = 0
    for part in linear.parts:
        yield range(first, first + len(part.rows))
        first += len(part.rows)
