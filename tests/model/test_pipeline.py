"""Stages of a pipeline as threads of this process: which may run when, shown by holding one of them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.pipeline_trace import overlap, traced
from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.core.engine import EngineCore
from planaria.kernels.ops import Batch
from planaria.mesh.comm import Array, Solo
from planaria.mesh.mesh import Mesh
from planaria.protocol import LaneResult, StepPlan, StepResult
from planaria.types import Request, SamplingParams
from planaria.worker.runner import Runner
from planaria.worker.sampler import Follower, Sampler
from planaria.worker.stage import Stage

STAGES, ROWS, SIZE, VOCAB, COUNT = 2, 4, 16, 32, 6
LIMIT = 30.0


class Wire(Solo):
    """One axis over queues of this process."""

    def __init__(self, rank: int, wires: dict[tuple[int, int], queue.SimpleQueue[Array]]) -> None:
        super().__init__(rank)
        self.rank, self.size, self.wires = rank, STAGES, wires

    def send(self, x: Array, to: int) -> None:
        self.wires[self.rank, to].put(x.copy())

    def receive(self, x: Array, source: int) -> None:
        x[...] = self.wires[source, self.rank].get(timeout=LIMIT)


class Rank:
    """A stage: the first hands its tokens on as hidden states, the last draws each token's successor."""

    def __init__(self, rank: int, wires: dict[tuple[int, int], queue.SimpleQueue[Array]]) -> None:
        self.rank = rank
        self.plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[LaneResult] = queue.SimpleQueue()
        self.began: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)
        self.step = 0
        scheduler = scheduling()
        self.batch = Batch(64, ROWS, 8, 64)
        mesh = Mesh(rank, Solo(), Wire(rank, wires))
        stage = Stage(self.batch, self.forward, mesh, hidden_size=1)
        sampler = Sampler(ROWS, VOCAB, plain=True) if mesh.samples else Follower(ROWS, VOCAB)
        self.runner = Runner(self.batch, self.forward, sampler, scheduler, SIZE, stage)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def forward(self) -> Array:
        self.began.put(self.step)
        assert self.go.acquire(timeout=LIMIT)
        tokens, _, samples = self.batch.counts[:3].tolist()
        if self.rank < STAGES - 1:
            return self.batch.tokens[:tokens].astype(np.float32)[:, None]
        hidden = self.batch.make_hidden(1)[:tokens, 0]
        logits = np.zeros((samples, VOCAB), np.float32)
        for line, index in enumerate(self.batch.sample_index[:samples].tolist()):
            logits[line, (int(hidden[index]) + 1) % VOCAB] = 1.0
        return logits

    def serve(self) -> None:
        while (plan := self.plans.get()) is not None:
            self.step = plan.step
            self.results.put(self.runner.step(plan.step, plan.lanes[0], plan.freed_rows[0], plan.turn))


def scheduling() -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=ROWS, max_num_batched_tokens=64, max_model_len=64, depth=STAGES, micro_steps=STAGES
    )  # fmt: skip


@contextmanager
def pipeline() -> Iterator[list[Rank]]:
    wires: dict[tuple[int, int], queue.SimpleQueue[Array]] = {
        (a, b): queue.SimpleQueue() for a in range(STAGES) for b in range(STAGES)
    }
    ranks = [Rank(rank, wires) for rank in range(STAGES)]
    yield ranks
    for rank in ranks:
        rank.plans.put(None)
        rank.go.release(1000)
        rank.thread.join(LIMIT)


def test_a_stage_goes_on_while_the_next_is_held() -> None:
    """The first stage ends step 2, and begins step 3 once step 1 is done, while the last is held in step 2."""
    core = EngineCore(scheduling(), CacheConfig(block_size=SIZE), 16)
    for i in range(2):
        params = SamplingParams(temperature=0, ignore_eos=True)
        assert core.admit(Request(f"r{i}", [10 * i + 1], params, 0, max_tokens=COUNT)) == []
    with pipeline() as (first, last):
        spans = [traced(rank.runner.stage) for rank in (first, last)]

        def plan() -> None:
            made = core.plan(0.0)
            assert made is not None
            for rank in (first, last):
                rank.plans.put(made)

        plan()
        plan()
        assert core.plan(0.0) is None  # one step in flight for each stage
        first.go.release(3)
        assert first.began.get(timeout=LIMIT) == 1 and last.began.get(timeout=LIMIT) == 1
        assert first.began.get(timeout=LIMIT) == 2  # while the last is still in step 1
        last.go.release()
        assert last.began.get(timeout=LIMIT) == 2
        tokens = commit(core, last, 1)
        plan()
        assert first.began.get(timeout=LIMIT) == 3  # while the last is still in step 2
        last.go.release(1000)
        first.go.release(1000)
        flight = deque([2, 3])
        while flight:
            for name, drawn in commit(core, last, flight.popleft()).items():
                tokens[name] = tokens.get(name, []) + drawn
            while (made := core.plan(0.0)) is not None:
                for rank in (first, last):
                    rank.plans.put(made)
                flight.append(made.step)
    assert [step for step, _, _ in spans[0]] == [step for step, _, _ in spans[1]] == list(range(1, 2 * COUNT + 1))
    assert spans[0][1][2] <= spans[1][1][1]  # step 2: the first stage's end, the last's begin
    assert tokens == {f"r{i}": [10 * i + 2 + k for k in range(COUNT)] for i in range(2)}


def test_overlap_of_a_trace() -> None:
    """Busy at once from 2 to 3 and from 5 to 6, of 0 to 8; nobody from 6 to 7."""
    every, some = overlap([[(1, 0.0, 3.0), (2, 5.0, 6.0)], [(1, 2.0, 5.5), (2, 5.5, 6.0), (3, 7.0, 8.0)]])
    assert (every, some) == (2 / 8, 7 / 8)


def commit(core: EngineCore, last: Rank, step: int) -> dict[str, list[int]]:
    result = last.results.get(timeout=LIMIT)
    return {delta.request_id: delta.tokens for delta in core.commit(StepResult(0, step, (result,)))}
