"""Steps that draw, recorded once and played again: a whole step costs the host one call.

Rule: a recording is of a shape (rows, tokens of each, most keys), reads and writes addresses that stay, and lives as
long as the function it is of, which is an epoch's. A step whose shape isn't recorded runs as any other: nobody waits
for a recording. Ranks that compute together record in the same step, for they see the same shapes; one by itself beside
its steps.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from planaria.kernels.gpu.attention import SPLIT
from planaria.kernels.ops import Batch

logger = logging.getLogger("planaria.kernels")

OFTEN = 3  # steps of a shape after which it is worth a recording
MOST_ROWS = 256

_one_at_a_time = threading.Lock()  # they share a stream and memory


class StepShape(NamedTuple):
    """rows: of a recording; each: tokens of a row; keys: of a row at most; draws: are tokens drawn in it, too? cuts:
    by top_k or top_p?"""

    rows: int
    each: int
    keys: int
    draws: bool = False
    cuts: bool = False


class StepRecorder(Protocol):
    """A device's way to record. beside: it may do so in a thread, while another computes."""

    beside: bool

    def enter(self) -> None:
        """The calling thread is to prepare and record."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """`work` as it would be done once more, and what it gives. Nothing is computed now."""


class CudaRecorder:
    """All recordings share memory: one is played at a time, and read before the next."""

    beside = True

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device()

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = work()
        return graph.replay, out


def shape_of(batch: Batch, most_keys: int) -> tuple[StepShape, int] | None:
    """Of what the batch holds, and the tokens of its longest sequence; None: a step that isn't recorded."""
    tokens, rows, samples = batch.counts[:3].tolist()
    if batch.prefill or not 0 < rows <= MOST_ROWS or samples != tokens:
        return None
    starts = batch.seq_start[: rows + 1]
    each = 1 if tokens == rows else int((starts[1:] - starts[:-1]).max())
    longest, most = int(batch.seq_len[:rows].max()), min(_rows(rows), batch.max_seqs)
    if most * each > min(batch.max_tokens, batch.max_samples):
        return None
    return StepShape(most, each, min(_keys(longest + each - 1), _keys(most_keys))), longest


def _rows(rows: int) -> int:
    """Of a recording for so many: few shapes, and little that is computed for nobody."""
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


def _keys(keys: int) -> int:
    return SPLIT << max(0, (-(-keys // SPLIT) - 1).bit_length())


class StepGraphs:
    """Recordings of one function. make(shape): what is to be recorded. beside: record in a thread; it ends with
    `close`."""

    def __init__(
        self, recorder: StepRecorder, make: Callable[[StepShape], Callable[[], Any]], *, beside: bool,
    ) -> None:  # fmt: skip
        self._recorder, self._make, self._beside = recorder, make, beside
        self.ready: dict[StepShape, tuple[Callable[[], None], Any]] = {}
        self._seen: Counter[StepShape] = Counter()
        self._failed = self._closed = False
        self._thread: threading.Thread | None = None

    def find(self, shape: StepShape) -> tuple[Callable[[], None], Any] | None:
        """How to play it, and what it gives; None: not yet."""
        found = self.ready.get(shape)
        if found is None and not self._failed:
            self._seen[shape] += 1
            if self._seen[shape] >= OFTEN:
                self._begin(shape)
        return found

    def _begin(self, shape: StepShape) -> None:
        if not self._beside:
            self._record(shape)
        elif self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._record, args=(shape,), name="planaria-graphs", daemon=True)
            self._thread.start()

    def _record(self, shape: StepShape) -> None:
        try:
            self._recorder.enter()
            with torch.inference_mode(), _one_at_a_time:
                found = self._recorder.record(self._make(shape))
        except Exception as e:
            self._failed = True
            logger.warning("steps are not recorded from now on: %s: %s", type(e).__name__, e)
            return
        if not self._closed:
            self.ready[shape] = found
            logger.debug("recorded: %s", shape)

    def close(self) -> None:
        """Let go of all of them. Waits for the one that is being made."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()
        self.ready.clear()
