"""A step's forward pass as a whole, or in micro-batches of which one computes while others exchange tokens.

Rule: all lanes split a step or none does. They tell each other, once a step, how many tokens each has and whether that
is above its threshold; one that is above makes all split, since what is exchanged is everybody's. Part i of n has the
tokens from T * i // n of each lane, so that everyone knows all counts. Where a lane's tokens are dealt to several ranks
it has as many as these parts of all shares are together, the next ones of the step. What a token computes does not
depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from planaria.config.options import ParallelConfig
from planaria.kernels.ops import Act, Array, Batch, Operations
from planaria.kernels.share import BatchShare
from planaria.mesh.all2all.plain import room
from planaria.mesh.mesh import Mesh
from planaria.worker.turns import InTurns, Rotation

if TYPE_CHECKING:
    from planaria.mesh.all2all import All2All
    from planaria.worker.streams import Streams


class Compiles(Protocol):
    def compile(
        self, forward: Callable[[Operations], Act], batch: Batch, lanes: All2All | None = None
    ) -> Callable[[], Array]:
        """See `Ops.compile`."""


def cut(part: Batch, whole: Batch, first: int, last: int) -> None:
    """Fill `part` with the tokens [first, last) of a step; the block table is the same. Of a sequence that is cut the
    earlier part knows nothing of the later tokens."""
    tokens, samples = last - first, whole.sample_index[: int(whole.counts[2])]
    for name in ("tokens", "positions", "slots", "loras"):
        getattr(part, name)[:tokens] = getattr(whole, name)[first:last]
    starts = whole.seq_start[: int(whole.counts[1]) + 1]
    begin = int(np.searchsorted(starts, first, "right")) - 1 if tokens else 0
    end = int(np.searchsorted(starts, last, "left")) if tokens else 0
    count = end - begin
    part.seq_start[: count + 1] = starts[begin : end + 1].clip(first, last) - first
    part.seq_len[:count] = whole.seq_len[begin:end] - (starts[begin + 1 : end + 1] - last).clip(0)
    part.seq_row[:count] = whole.seq_row[begin:end]
    low, high = np.searchsorted(samples, (first, last))
    part.sample_index[: high - low] = samples[low:high] - first
    part.counts[:3] = (tokens, count, high - low)
    part.adapted = whole.adapted
    if whole.arrived is not None:
        part.arrived = whole.arrived[first:last]
    elif whole.hidden is not None:
        part.make_hidden(whole.hidden.shape[1])[:tokens] = whole.hidden[first:last]


def blank(whole: Batch, count: int, place: int) -> Batch:
    """For the micro-batch at this place, of so many."""
    most, step = -(-whole.max_tokens // count), whole.step
    tokens = most * whole.size if isinstance(whole, BatchShare) else most
    made = Batch(tokens, min(step.max_seqs, tokens), 0, min(step.max_samples, tokens))
    made.block_table = step.block_table
    if isinstance(whole, BatchShare):
        made = BatchShare(made, whole.rank, whole.size)
    made.place = place + 1
    return made


def cut_share(part: BatchShare, whole: BatchShare, bounds: Callable[[int], tuple[int, int]]) -> None:
    """As `cut`, of a step whose tokens are dealt. bounds: of a share of so many tokens, those of this part."""
    begins = whole.bounds()
    spans = [bounds(end - begin) for begin, end in pairwise(begins)]
    sizes = [last - first for first, last in spans]
    start = sum(first for first, _ in spans)
    cut(part.step, whole.step, start, start + sum(sizes))
    first, last = spans[whole.rank]
    before = sum(sizes[: whole.rank])
    part.take(before, before + last - first)
    if whole.arrived is not None:  # the stage before has them part by part
        part.arrived = whole.arrived[first:last]
    elif whole.hidden is not None:
        part.make_hidden(whole.hidden.shape[1])[: last - first] = whole.hidden[first:last]


class MicroBatch:
    """One of `turns.count` micro-batches: a batch and a recorded forward pass of its own."""

    def __init__(
        self, ops: Compiles, forward: Callable[[Operations], Act], whole: Batch, exchange: All2All, turns: Rotation,
        place: int,
    ) -> None:  # fmt: skip
        self.place, self.exchange = place, InTurns(exchange, turns, place)
        self.batch = whole if turns.count == 1 else blank(whole, turns.count, place)
        self.forward = ops.compile(forward, self.batch, self.exchange)
        self.result: Array | None = None

    def fill(self, whole: Batch, of: int) -> None:
        """With this part's tokens of a step."""
        if isinstance(whole, BatchShare) and isinstance(self.batch, BatchShare):
            cut_share(self.batch, whole, lambda tokens: self.bounds(tokens, of))
        else:
            cut(self.batch, whole, *self.bounds(int(whole.counts[0]), of))

    def bounds(self, tokens: int, of: int) -> tuple[int, int]:
        """Of the tokens of a lane, or of a share of them, those of this part."""
        return tokens * self.place // of, tokens * (self.place + 1) // of


class MicroBatches:
    """`forward` of `Stage`. exchanges: one for each micro-batch. splits: must a step of so many tokens be split?
    enter_thread: makes a thread one that computes steps. streams: of the device they compute on.

    Its threads end with `close`, which must not be called while a step runs."""

    def __init__(
        self, ops: Compiles, forward: Callable[[Operations], Act], batch: Batch, mesh: Mesh,
        exchanges: Sequence[All2All], splits: Callable[[int, bool], bool], enter_thread: Callable[[], Any],
        streams: Streams | None = None,
    ) -> None:  # fmt: skip
        self.batch, self.mesh, self.splits, self.streams = batch, mesh, splits, streams
        self.once, self.turns = Rotation(1), Rotation(len(exchanges), self.streams)
        self.whole = MicroBatch(ops, forward, batch, exchanges[0], self.once, 0)
        self.parts = [MicroBatch(ops, forward, batch, exchange, self.turns, i) for i, exchange in enumerate(exchanges)]
        self._threads = ThreadPoolExecutor(len(exchanges) - 1, "planaria-micro-batch", enter_thread)
        self._joined: Array | None = None

    def __call__(self) -> Array:
        step = self.batch.step
        splits = self.splits(int(step.counts[0]), step.prefill)
        told = self.whole.exchange.tell(2 * int(self.batch.counts[0]) + splits)
        counts = [number // 2 for number in told]
        if any(number % 2 for number in told):
            return self._in_parts(counts)
        self.whole.exchange.counts = counts
        self.once.take(0)
        out = self.whole.forward()
        self.once.hand_on(0)
        return out

    def _in_parts(self, counts: Sequence[int]) -> Array:
        self.turns.begin()
        count = self.turns.count
        for part in self.parts:
            part.fill(self.batch, count)
            spans = (part.bounds(number, count) for number in counts)
            part.exchange.counts = [last - first for first, last in spans]
        others = [self._begin(part) for part in self.parts[1:]]
        self._run(self.parts[0])
        wait(others)
        if self.streams is not None:
            self.streams.end()
        if self.turns.error is not None:
            raise self.turns.error
        return self._join()

    def _begin(self, part: MicroBatch) -> Future[None]:
        """In a thread; if that can't enter there is nobody to take this part's turn, so the others must not wait."""
        begun = self._threads.submit(self._run, part)
        begun.add_done_callback(lambda done: self._failed(error) if (error := done.exception()) is not None else None)
        return begun

    def _run(self, part: MicroBatch) -> None:
        """An error is left in `turns`."""
        try:
            own = self.streams.of(part.place) if self.streams is not None else nullcontext()
            with own:
                self.turns.take(part.place)
                part.result = part.forward()
                self.turns.hand_on(part.place)
        except BaseException as e:
            self._failed(e)

    def _failed(self, error: BaseException) -> None:
        if self.turns.fail(error):
            self.mesh.abort(f"rank {self.mesh.rank} failed in a micro-batch: {error}")  # ends what others wait for

    def _join(self) -> Array:
        """The results one after the other."""
        results = [part.result for part in self.parts if part.result is not None]
        rows = sum(map(len, results))
        if self._joined is None or len(self._joined) < rows:
            self._joined = room(results[0], (rows, results[0].shape[1]))
        first = 0
        for result in results:
            self._joined[first : first + len(result)] = result
            first += len(result)
        return self._joined[:rows]

    def close(self) -> None:
        self._threads.shutdown()


def make_forward(
    ops: Compiles, forward: Callable[[Operations], Act], batch: Batch, mesh: Mesh, exchanges: Sequence[All2All],
    parallel: ParallelConfig, enter_thread: Callable[[], Any], *, queues: bool,
) -> tuple[Callable[[], Array], MicroBatches | None]:  # fmt: skip
    """The forward pass of a worker, and who does it where there is a way of exchange for each of several
    micro-batches. queues: does a thread only queue what a device does?"""
    if len(exchanges) < 2:
        return ops.compile(forward, batch), None

    def splits(tokens: int, prefill: bool) -> bool:
        return parallel.splits(tokens, prefill=prefill)

    streams = None
    if queues:
        from planaria.worker.streams import Streams

        streams = Streams(len(exchanges))
    made = MicroBatches(ops, forward, batch, mesh, exchanges, splits, enter_thread, streams)
    return made, made
