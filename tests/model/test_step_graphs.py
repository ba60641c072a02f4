"""When a step is recorded, and when a recording is let go of; with stand-ins for what is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from planaria.kernels.gpu.draw import Drawer
from planaria.kernels.gpu.graphs import MOST_ROWS, OFTEN, StepGraphs, StepShape, shape_of
from planaria.kernels.gpu.ops import GpuOps
from planaria.kernels.gpu.step import NOBODY, Places, lay_out
from planaria.kernels.ops import Batch
from planaria.mesh.comm import CollectiveAborted, Solo
from planaria.protocol import FreeMemory
from planaria.worker.device import make_follower
from planaria.worker.worker import Worker, free

ONE = StepShape(1, 1, 512)


class Recording:
    """Says which thread recorded; `go` holds it up."""

    beside = True

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.go = threading.Event()

    def enter(self) -> None:
        assert self.go.wait(10)

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.threads.append(threading.get_ident())
        return lambda: None, work()


def graphs(recorder: Recording, *, beside: bool, fails: bool = False) -> StepGraphs:
    def make(shape: StepShape) -> Callable[[], Any]:
        if fails:
            raise RuntimeError("the device has no memory left")
        return lambda: shape

    return StepGraphs(recorder, make, beside=beside)


def test_recorded_beside_steps_when_it_is_worth_it() -> None:
    recorder = Recording()
    made = graphs(recorder, beside=True)
    assert [made.find(ONE) for _ in range(OFTEN + 2)] == [None] * (OFTEN + 2), "nobody waits for it"
    assert not recorder.threads
    recorder.go.set()
    assert made._thread is not None
    made._thread.join(10)
    found = made.find(ONE)
    assert found is not None and found[1] == ONE and recorder.threads != [threading.get_ident()]
    assert made.find(StepShape(2, 1, 512)) is None
    made.close()
    assert made.find(ONE) is None


def test_functions_record_one_after_the_other() -> None:
    """Each of them has a thread."""

    class Slow(Recording):
        inside = 0

        def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            self.inside += 1
            assert self.inside == 1
            self.go.wait(0.1)  # the other one would come in now
            found = super().record(work)
            self.inside -= 1
            return found

        def enter(self) -> None:
            pass

    recorder = Slow()
    both = [graphs(recorder, beside=True) for _ in range(2)]
    for made in both:
        for _ in range(OFTEN):
            made.find(ONE)
    for made in both:
        assert made._thread is not None
        made._thread.join(10)
        assert made.find(ONE) is not None
        made.close()


def test_ranks_that_compute_together_record_in_the_same_step() -> None:
    recorder = Recording()
    recorder.go.set()
    made = graphs(recorder, beside=False)
    assert [made.find(ONE) is None for _ in range(OFTEN + 1)] == [True] * OFTEN + [False]
    assert recorder.threads == [threading.get_ident()]


def test_what_is_recorded_when_the_epoch_has_ended_is_not_kept() -> None:
    recorder = Recording()
    made = graphs(recorder, beside=True)
    for _ in range(OFTEN):
        made.find(ONE)
    threading.Timer(0.05, recorder.go.set).start()
    made.close()
    assert recorder.threads and not made.ready


def test_what_cannot_be_recorded_is_tried_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recording()
    recorder.go.set()
    made = graphs(recorder, beside=False, fails=True)
    with caplog.at_level("WARNING", "planaria.kernels"):
        for _ in range(3 * OFTEN):
            assert made.find(ONE) is None
    assert caplog.text.count("the device has no memory left") == 1


def batch_of(counts: list[int], keys: int = 9) -> Batch:
    batch = Batch(600, 300, 64, 600)
    for i, count in enumerate(counts):
        batch.seq_start[i + 1], batch.seq_len[i] = batch.seq_start[i] + count, keys
    batch.counts[:3] = sum(counts), len(counts), sum(counts)
    return batch


@pytest.mark.parametrize(
    ("counts", "keys", "shape"),
    [
        ([1], 9, (1, 1, 512)), ([1] * 3, 512, (4, 1, 512)), ([1] * 5, 513, (8, 1, 1024)), ([3, 1], 9, (2, 3, 512)),
        ([1] * 70, 1500, (96, 1, 2048)), ([1] * (MOST_ROWS + 1), 9, None), ([], 9, None),
    ],
)  # fmt: skip
def test_shapes(counts: list[int], keys: int, shape: tuple[int, int, int] | None) -> None:
    found = shape_of(batch_of(counts, keys), 4096)
    assert found == (None if shape is None else (StepShape(*shape), keys))


def test_a_shape_fits_where_steps_do() -> None:
    batch = Batch(7, 5, 4, 7)
    for i in range(5):
        batch.seq_start[i + 1], batch.seq_len[i] = i + 1, 1
    batch.counts[:3] = 5
    batch.counts[1] = 5
    assert shape_of(batch, 64) == (StepShape(5, 1, 512), 1)
    batch.seq_start[5], batch.counts[0], batch.counts[2] = 6, 6, 6
    assert shape_of(batch, 64) is None, "five rows of two tokens are more than a step has room for"


def test_other_steps_have_no_shape() -> None:
    batch = batch_of([1])
    batch.prefill = True
    assert shape_of(batch, 4096) is None
    batch = batch_of([1, 1])
    batch.counts[2] = 1  # a row that draws nothing
    assert shape_of(batch, 4096) is None


@pytest.mark.parametrize(("carried_by", "recordings"), [("meta", 2), ("cpu", 0)])
def test_sums_that_go_through_main_memory_are_not_recorded(carried_by: str, recordings: int) -> None:
    class Two(Solo):
        size, device = 2, carried_by

    ops = GpuOps("meta", "bfloat16", tp=Two())
    ops.recorder = Recording()
    ops.compile(lambda own: own, Batch(8, 2, 4, 2))
    assert len(ops.graphs) == recordings


@pytest.mark.parametrize("each", [1, 2])
def test_rows_of_nobody_store_nothing_and_see_nothing(each: int) -> None:
    """Whatever a larger step left where the recording reads."""
    batch = batch_of([each] * 8)
    places = Places(batch, torch.device("cpu"))
    for name in ("tokens", "positions", "slots", "loras"):
        getattr(batch, name)[:] = 7
    lay_out(batch, places, 16, 8, each, 9)
    counts = [each] * 4 + [1]
    smaller = batch_of(counts)
    smaller.slots[:], smaller.tokens[:] = np.arange(600), 5
    lines = np.arange(8 * each)[lay_out(smaller, places, 16, 8, each, 9)]
    assert list(lines) == list(range(4 * each + 1)), "a sequence's tokens begin at its own"
    nobody = np.delete(np.arange(8 * each), lines)
    assert set(places.host["slots"][nobody]) == {NOBODY["slots"]} and NOBODY["slots"] < -1, "not another rank's either"
    assert set(places.host["loras"][nobody]) == {-1}
    assert list(places.host["slots"][lines]) == list(range(4 * each + 1))
    assert not places.host["tokens"][nobody].any() and not places.host["lengths"][5:8].any()
    assert list(places.host["starts"][:9]) == list(range(0, 8 * each + 1, each))
    assert list(places.host["lengths"][:5]) == [9] * 4 + [9 - 1 + each], "the last of its own token sees 9 keys"
    assert torch.equal(places.here["slots"], torch.from_numpy(places.host["slots"])), "copied"


def test_what_is_tried_beside_steps_leaves_what_the_stage_before_sent() -> None:
    """Layers add to it in place."""
    ops, sent = GpuOps("cpu", "float32"), list[torch.Tensor]()
    recorder = ops.recorder = Recording()
    recorder.go.set()
    recorder.beside = False
    ops._shared = lambda x: x  # type: ignore[method-assign]
    batch = Batch(8, 2, 4, 8)

    def forward(own: GpuOps) -> torch.Tensor:
        sent.append(own.step.hidden)
        return own.step.hidden.add_(1.0)

    run = ops.compile(forward, batch)
    batch.seq_start[1], batch.seq_len[0], batch.counts[:3] = 1, 1, 1
    for number in range(OFTEN):
        batch.arrived = torch.full((1, 8), float(number))
        run()
    tried, recorded = sent[OFTEN - 1 : OFTEN + 1]
    assert len(sent) == OFTEN + 2 and tried.data_ptr() != recorded.data_ptr()


def test_tokens_that_the_host_knows_are_not_those_of_the_step_before() -> None:
    batch = batch_of([1] * 4)
    places = Places(batch, torch.device("cpu"))
    batch.follows, batch.drawn_at[:4] = True, [2, 0, -1, 1]
    for follows, found in ((True, [2, 0, -1, 1]), (False, [-1] * 4)):
        batch.follows = follows
        lay_out(batch, places, 16, 4, 1, 9)
        assert places.here["drawn_at"][:5].tolist() == [*found, -1]


class Ended:
    """A group that was aborted."""

    def broadcast(self, x: Any) -> None:
        pass

    def check(self) -> None:
        raise CollectiveAborted((1,), "rank 1 is gone")


def test_tokens_of_a_group_that_was_aborted_are_not_read() -> None:
    """Its operations end then, and with them the wait; what they left is worth nothing."""
    drawer = Drawer(4, 50, torch.device("cpu"), Ended())
    with pytest.raises(CollectiveAborted, match="rank 1 is gone"):
        drawer.send(2).read()
    assert drawer.send(2, told=False).read()[0].tolist() == [0, 0]


def test_who_draws_no_more_has_nothing_to_draw_with() -> None:
    config: Any = SimpleNamespace(
        scheduler=SimpleNamespace(max_num_seqs=4), model=SimpleNamespace(vocab_size=50)
    )  # fmt: skip
    ops = GpuOps("cpu", "float32")
    ops.drawer_of(4, 50)
    assert not make_follower(config, ops).follows([0]) and ops.drawer is None
    told = Ended()
    assert make_follower(config, ops, told).follows([0]) and ops.drawer is not None and ops.drawer.others is told  # type: ignore[arg-type]


def test_recordings_are_let_go_of_before_the_kv_they_read() -> None:
    did = list[str]()
    ops = SimpleNamespace(leave=lambda: did.append("recordings"))
    kv = SimpleNamespace(forget=lambda model: did.append("KV"))
    ends: dict[str, Any] = {"end_micro_batches": lambda: None, "experts": None, "runner": None, "rank": 0}
    rank: Any = SimpleNamespace(ops=ops, kv=kv, model=None, draft=SimpleNamespace(free=lambda weights: None), **ends)
    free(rank, FreeMemory(weights=False))
    assert did == ["recordings", "KV"]
    rank.groups = SimpleNamespace(leave=lambda: did.append("groups"))
    Worker._leave_groups(rank)
    assert did[2:] == ["recordings", "groups"]
