"""Memory of the nodes that outlives ranks: each rank's cells, and in which steps they were written. What a step has
written that did not end on all ranks is anything. A rank that dies may have scribbled over any other cell, too; what
its blocks' checksums were tells so.
"""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np

from planaria.core.kv_index import BufferIndex, begin, found
from planaria.hosts.kv_keys import Shape
from planaria.hosts.memory import KVMemory
from planaria.protocol import Allocate, KVCut, StepPlan
from planaria.topology import Layout
from planaria.topology import kv_parts as pieces_of
from planaria.worker.kv_layout import common, parts_of_kv
from tests.sim.tier import GARBAGE

if TYPE_CHECKING:
    from tests.sim.process import Process, SimWorker


class EngineMemory:
    """Of an engine of a fleet, whose ranks are not simulated one by one: its index is the shipping one, in the memory
    that its keeper has; its cells are in `worker`. What it wrote after step `committed` is anything."""

    def __init__(self, kept: KVMemory) -> None:
        self.kept, self.layout = kept, Layout()
        self.worker: SimWorker | None = None
        self.committed = self.number = 0
        self.new_number: Callable[[], int] = lambda: 1

    def open(self, layout: Layout, shape: Shape) -> tuple[list[BufferIndex], bool]:
        """The index of each lane, and is something in them?"""
        buffer = self.kept.index(shape.size)
        if self.worker is not None and found(buffer, str(layout).encode()) is not None:
            return [BufferIndex(buffer, shape, lane) for lane in range(shape.lanes)], True
        return self.begin(layout, shape), False

    def begin(self, layout: Layout, shape: Shape) -> list[BufferIndex]:
        self.kept.clear()
        self.worker, self.layout, self.number = None, layout, self.new_number()
        self.kept.made(0, self.number)
        return begin(self.kept.index(shape.size), shape, str(layout).encode(), self.number)

    def hold(self, worker: SimWorker) -> None:
        """Give it the cells that are there, and keep those it has from now on."""
        if self.worker is not None:
            worker.cells = self.worker.cells
            spoil(self.worker, self.committed)
        self.worker = worker


def spoil(worker: SimWorker, committed: int) -> None:
    for step, cells in worker.written.items():
        for block, offset in cells if step > committed else ():
            worker.cells[block][offset] = GARBAGE


def _cells(part: pieces_of.KVRect) -> set[tuple[int, int]]:
    """Layers and heads."""
    return {(layer, head) for layer in part.layers for head in part.heads}


class SimMemory:
    """See NodeMemory. `clear` is the engine's; a rank sees the memory of its own node."""

    origin = None

    def __init__(self, seed: int, nodes: Callable[[], set[int]]) -> None:
        self.nodes = nodes  # that ranks are on now
        self.chance = random.Random(f"scribbling of {seed}")
        self.scribbled = 0
        self.parts: dict[tuple[int, int, int], tuple[int, int, Layout, SimWorker]] = {}  # by node, rank and bank
        self._finished: dict[tuple[int, int], int] = {}  # by epoch and rank: its last step
        self._index = bytearray()

    def clear(self) -> None:
        self.parts.clear()
        self._index = bytearray()

    def index(self, size: int) -> memoryview:
        if len(self._index) < size:
            self._index = bytearray(size)
        return memoryview(self._index)

    def settle(self, timeout: float) -> bool:
        return True

    def numbers(self, process: Process) -> tuple[int, ...]:
        own = process.device.node, process.rank
        return tuple(found[0] for place, found in self.parts.items() if place[:2] == own)

    num_bytes = 0

    def whole(self, number: int, layout: Layout, homes: Collection[str]) -> bool:
        """All is on one simulated node; `homes` are the same for all of them."""
        found = [self.parts.get((node, rank, number % 2)) for node in self.nodes() for rank in range(layout.size)]
        return len(self.nodes()) == 1 and all(part is not None and part[0] == number for part in found)

    def keep(self, number: int) -> None:
        self.parts = {place: part for place, part in self.parts.items() if part[0] == number}
        self._index = bytearray()

    def node_left(self, node: int) -> None:
        for place in [place for place in self.parts if place[0] == node]:
            del self.parts[place]

    def finished(self, process: Process, step: int) -> None:
        self._finished[process.epoch, process.rank] = step

    def _everywhere(self, epoch: int, layout: Layout) -> int:
        """The last step of an epoch that ended on all ranks."""
        return min(self._finished.get((epoch, rank), 0) for rank in range(layout.size))

    def allocate(self, process: Process, command: Allocate, worker: SimWorker) -> list[int]:
        """Give it the cells that are there, and keep those it has from now on. Returns blocks that it finds damaged."""
        place = process.device.node, process.rank, command.number % 2
        found, damaged = self.parts.get(place), []
        if command.recut is not None:
            self.parts.pop(place, None)
            found, damaged = None, self._cut(process, command.recut, worker)
        if found is not None and found[0] == command.number:
            _, epoch, layout, before = found
            worker.cells, worker.sums = before.cells, before.sums
            spoil(before, self._everywhere(epoch, layout) if layout == process.layout else -1)
            if before.pid != process.pid and command.full:
                full = array("i", command.full[process.layout.coords(process.rank).dp])
                damaged = [block for block in full if worker.sums.get(block) != worker.sum(block)]
        self.parts[place] = command.number, process.epoch, process.layout, worker
        return damaged

    def _cut(self, process: Process, cut: KVCut, worker: SimWorker) -> list[int]:
        """Give it what ranks of another layout had. Cells of the wrong ones, or that differ, are anything."""
        config, (lane, *_) = process.sim.scenario.config, process.layout.coords(process.rank)
        before, after = (parts_of_kv(config, each) for each in (cut.layout, process.layout))
        own, size = after[process.rank % len(after)], len(before)
        found = pieces_of.pieces(own, before)
        sources = [self.parts[process.device.node, lane * size + p.rank, cut.number % 2] for p in found]
        for _, epoch, layout, source in sources:
            spoil(source, self._everywhere(epoch, layout))
        here = len(worker.cells[0])
        places: list[dict[tuple[int, int], tuple[int, int]]] = [
            {} for _ in range(here)
        ]  # by layer and head: whose cell
        for number, piece in enumerate(found):
            held = before[piece.rank]
            both = _cells(piece.part) & _cells(held)
            for at, its in self._in_both(own, held, piece, here, config.tokens_here(cut.layout)):
                places[at].update(dict.fromkeys(both, (number, its)))
        damaged = []
        full = array("i", cut.full[lane]) if cut.full else array("i")
        for new, old in enumerate(array("i", cut.blocks[lane])):
            for at, of in enumerate(places):
                cells = {sources[number][3].cells[old][its] for number, its in of.values()}
                worker.cells[new][at] = cells.pop() if of.keys() == _cells(own) and len(cells) == 1 else GARBAGE
            if new in full:
                worker.sums[new] = worker.sum(new)
                if any(source.sums.get(old) != source.sum(old) for *_, source in sources):
                    damaged.append(new)
        return damaged

    @staticmethod
    def _in_both(
        own: pieces_of.KVRect, held: pieces_of.KVRect, piece: pieces_of.KVPiece, here: int, there: int
    ) -> Iterator[tuple[int, int]]:
        """Cells of a block here, and where they are there."""
        counts = (len(own.heads), here), (len(held.heads), there)
        items = ([np.arange(heads * tokens).reshape(heads, tokens, 1)] for heads, tokens in counts)
        ((to, of),) = common(own, next(items), held, next(items), piece.part.heads)
        every = np.arange(len(own.heads) * here)[to], np.arange(len(held.heads) * there)[of]
        yield from zip((every[0] % here).tolist(), (every[1] % there).tolist(), strict=True)

    def scribble(self, process: Process) -> None:
        """It leaves in the midst of a step."""
        if process.busy and process.worker is not None and isinstance(plan := process.inbox[0][1], StepPlan):
            own = process.layout.coords(process.rank).dp
            with contextlib.suppress(Exception):
                process.worker.step(plan.step, plan.lanes[own], plan.freed_rows[own], plan.turn)

    def die(self, process: Process) -> None:
        """It is killed, and may write anywhere in full blocks before. What isn't full has no checksum."""
        worker = process.worker
        if worker is None or self.chance.random() > 0.4:
            return
        self.scribbled += 1
        full = [block for block, found in worker.sums.items() if found == worker.sum(block)]
        for block in self.chance.sample(full, min(self.chance.randint(1, 4), len(full))):
            worker.cells[block][self.chance.randrange(len(worker.cells[block]))] = GARBAGE
