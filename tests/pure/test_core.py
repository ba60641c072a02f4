"""The core against HashWorker: no schedule may change a token, leak a block or leave a request open."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.core import holding
from planaria.core.engine import CLAIM, EngineCore, full_blocks
from planaria.core.kv_cache import KeyScope, chain
from planaria.core.kv_index import BufferIndex, Shape, begin, found
from planaria.protocol import LanePlan, LaneResult, StepPlan, StepResult
from planaria.types import Delta, FinishReason, Request, SamplingParams
from tests.reference_worker import HashWorker, RowState, hash_tokens

VOCAB = 50


class LoggingWorker(HashWorker):
    """Knows what each step wrote."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self.written: dict[int, list[tuple[int, int]]] = {}

    def _compute(self, row: int, state: RowState, position: int, token: int) -> None:
        super()._compute(row, state, position, token)
        index, offset = divmod(position, self.block_size)
        self.written.setdefault(self.books.step, []).append((state.blocks[index], offset))


@dataclass
class Run:
    """An engine core, a reference worker for each lane, and what each request was given."""

    core: EngineCore
    workers: list[LoggingWorker]
    depth: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, FinishReason] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    flight: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    buffer: bytearray = field(default_factory=bytearray)

    def compute(self, plan: StepPlan) -> StepResult:
        parts = zip(self.workers, plan.lanes, plan.freed_rows, strict=True)
        lanes = tuple(worker.step(plan.step, rows, freed, plan.turn) for worker, rows, freed in parts)
        return StepResult(plan.epoch, plan.step, lanes)

    def restart(self, num_lanes: int | None = None, *, kept: bool = False) -> None:
        """All that workers had is gone; maybe there are more or fewer lanes. kept: but not what was committed. What
        steps in flight wrote is anything."""
        self.lose_workers(num_lanes or len(self.workers), kept=kept)
        indexes = [] if kept else self.new_indexes()
        epoch, num_lanes = self.core.epoch + 1, len(self.workers)
        self.take(self.core.lost(epoch, num_lanes=num_lanes, kept=kept, indexes=indexes))
        for lane in self.core.lanes:
            lane.pool.check()

    def lose_workers(self, num_lanes: int, *, kept: bool) -> None:
        old = self.workers
        size = old[0].block_size
        self.workers = [LoggingWorker(len(old[0].cells), size, VOCAB) for _ in range(num_lanes)]
        for worker, before in zip(self.workers, old if kept else (), strict=False):
            worker.cells = before.cells
            for step in range(self.core.committed + 1, self.core.planned + 1):
                for block, offset in before.written.get(step, ()):
                    worker.cells[block][offset] = 7
        self.flight.clear()

    def new_indexes(self) -> list[BufferIndex]:
        """Of the workers that there are now."""
        scheduler, cache = self.core.config, self.core.cache
        width = scheduler.max_model_len // cache.block_size + 1
        shape = Shape(len(self.workers), self.core.lanes[0].num_blocks, cache.block_size, scheduler.max_num_seqs, width)
        self.buffer = bytearray(shape.size)
        return begin(memoryview(self.buffer), shape, b"digest", 1)

    def die(self, behind: int) -> None:
        """The engine is gone, and another goes on with what it left. The last `behind` tokens of each request were
        heard by nobody."""
        core, told = self.core, {id: list(tokens) for id, tokens in self.tokens.items()}
        open = list(core.snapshot())
        self.lose_workers(len(self.workers), kept=True)
        found_there = found(memoryview(self.buffer), b"digest")
        assert found_there is not None and found(memoryview(self.buffer), b"other") is None
        number, shape = found_there
        assert number == 1
        indexes = [BufferIndex(memoryview(self.buffer), shape, lane) for lane in range(shape.lanes)]
        self.core = EngineCore(core.config, core.cache, shape.num_blocks, shape.lanes, indexes, adopt=True)
        for lane in self.core.lanes:
            lane.pool.check()
        for request in open:
            output = told.get(request.id, [])
            self.tokens[request.id] = output = output[: max(0, len(output) - behind)]
            self.cached.pop(request.id, None)
            again = Request(
                request.id, list(request.prompt), request.params, request.seed, max_tokens=request.max_tokens,
                priority=request.priority, salt=request.salt, output=list(output),
            )  # fmt: skip
            self.take(self.core.admit(again))

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.finish, "a token after the end"
            got = self.tokens.setdefault(delta.request_id, [])
            assert delta.index == len(got), "tokens lost or repeated"
            got.extend(delta.tokens)
            if delta.index == 0:
                self.cached[delta.request_id] = delta.num_cached
            if delta.finish is not None:
                self.finish[delta.request_id] = delta.finish

    def step(self) -> bool:
        """Plan up to `depth` steps ahead, then commit one. False when there is nothing to do."""
        while len(self.flight) < self.depth and (plan := self.core.plan(0.0)) is not None:
            self.flight.append((plan, self.compute(plan)))
            if self.core.config.micro_steps > 1:
                self.check_turns()
        if not self.flight:
            return False
        self.take(self.core.commit(self.flight.popleft()[1]))
        for lane in self.core.lanes:
            lane.pool.check()
        return True

    def check_turns(self) -> None:
        """The steps in flight are of different turns, and no row draws in two of them."""
        turns = [plan.turn for plan, _ in self.flight]
        drawing = [(i, row) for _, result in self.flight for i, lane in enumerate(result.lanes) for row in lane.rows]
        assert len(set(turns)) == len(turns) and len(set(drawing)) == len(drawing)

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("no end")


def make(
    *, num_blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 64, depth: int = 2, caching: bool = True,
    policy: str = "fcfs", micro_steps: int = 1, lanes: int = 1, drafts: int = 0,
) -> Run:  # fmt: skip
    scheduler = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=max(budget, seqs), max_model_len=num_blocks * block_size,
        policy=policy, depth=depth, micro_steps=micro_steps, max_logit_rows=seqs + 8, max_drafts=drafts,
    )  # fmt: skip
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=caching)
    workers = [LoggingWorker(num_blocks, block_size, VOCAB) for _ in range(lanes)]
    run = Run(EngineCore(scheduler, cache, num_blocks, lanes), workers, depth)
    run.core = EngineCore(scheduler, cache, num_blocks, lanes, run.new_indexes())
    return run


def request(
    id: str, prompt: list[int], max_tokens: int, seed: int = 0, priority: int = 0, salt: str = "", **params: object
) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(id, prompt, sampling, seed, max_tokens=max_tokens, priority=priority, salt=salt)


def all_free(run: Run) -> None:
    assert not run.core.lane_of
    for lane in run.core.lanes:
        lane.pool.check()
        assert lane.pool.num_free == lane.num_blocks
        assert sorted(lane.free_rows) == list(range(lane.config.max_num_seqs))
        assert not lane.entries and not lane.waiting and not lane.computing


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
jobs = st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=12)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    jobs, st.integers(11, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 6), st.integers(1, 40), st.integers(1, 4),
    st.booleans(), st.sampled_from(["fcfs", "priority"]), st.integers(1, 3), st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([0, 0, 1, 4]),
)  # fmt: skip
def test_no_schedule_changes_a_token(  # type: ignore[no-untyped-def]
    jobs, blocks, block_size, seqs, budget, depth, caching, policy, micro_steps, lanes, drafts
):
    """Pool size, block size, rows, budget, depth, caching, micro-steps, lanes, drafts and arrival times: the tokens are
    those of the definition."""
    num_blocks = max(blocks, -(-42 // block_size))
    run = make(num_blocks=num_blocks, block_size=block_size, seqs=seqs, budget=budget, depth=depth, caching=caching,
               policy=policy, micro_steps=micro_steps, lanes=lanes, drafts=drafts)  # fmt: skip
    for i, (prompt, max_tokens, seed, wait) in enumerate(jobs):
        run.take(run.core.admit(request(f"r{i}", list(prompt), max_tokens, seed, priority=wait % 3)))
        for _ in range(wait):
            run.step()
    run.run()
    for i, (prompt, max_tokens, seed, _) in enumerate(jobs):
        assert run.tokens[f"r{i}"] == hash_tokens(prompt, seed, max_tokens, VOCAB)
        assert run.finish[f"r{i}"] == FinishReason.LENGTH
    all_free(run)


@given(
    jobs, st.integers(11, 20), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([0, 0, 3]), st.booleans(), st.data(),
)  # fmt: skip
def test_cancel_and_loss_at_any_step(  # type: ignore[no-untyped-def]
    jobs, blocks, depth, micro_steps, lanes, drafts, caching, data
):
    """Cancelled requests stop and free their blocks; after a loss, also one after which there are other lanes,
    everything open starts over with its tokens, or goes on with what was kept."""
    run = make(num_blocks=blocks, block_size=4, seqs=4, budget=16, depth=depth, micro_steps=micro_steps, lanes=lanes,
               drafts=drafts, caching=caching)  # fmt: skip
    for i, (prompt, max_tokens, seed, _) in enumerate(jobs):
        run.take(run.core.admit(request(f"r{i}", list(prompt), max_tokens, seed)))
    cancelled = set()
    for _ in range(10_000):
        match data.draw(st.sampled_from(["step"] * 6 + ["cancel", "lose", "keep", "keep", "die", "die"])):
            case "cancel":
                victim = f"r{data.draw(st.integers(0, len(jobs) - 1))}"
                if victim not in run.finish:
                    cancelled.add(victim)
                run.take(run.core.cancel(victim))
            case "lose":
                stale = [result for _, result in run.flight]
                run.restart(data.draw(st.integers(1, 3)) if lanes > 1 else 1)
                assert all(run.core.commit(result) == [] for result in stale), "a ghost of an old epoch was heard"
            case "die":
                run.die(data.draw(st.integers(0, 2)))
            case "keep":
                replayed = run.core.replayed_tokens
                run.restart(kept=True)
                assert run.core.replayed_tokens == replayed
            case _:
                if not run.step():
                    break
    for i, (prompt, max_tokens, seed, _) in enumerate(jobs):
        full = hash_tokens(prompt, seed, max_tokens, VOCAB)
        if f"r{i}" in cancelled:
            assert run.finish[f"r{i}"] == FinishReason.ABORT
            assert run.tokens.get(f"r{i}", []) == full[: len(run.tokens.get(f"r{i}", []))]
        else:
            assert run.tokens[f"r{i}"] == full
    all_free(run)


@settings(max_examples=2 * settings.default.max_examples)
@given(prompts, st.integers(1, 30), st.integers(0, 3), st.integers(1, 4), st.integers(0, 40), st.integers(1, 3))
def test_stop_tokens(prompt, max_tokens, min_tokens, depth, stop, micro_steps):  # type: ignore[no-untyped-def]
    """It ends with the first stop token after `min_tokens`, and says which; the step in flight adds nothing."""
    run = make(depth=depth, micro_steps=micro_steps)
    run.take(run.core.admit(request("a", prompt, max_tokens, 1, stop_token_ids=(stop,), min_tokens=min_tokens)))
    run.run()
    full = hash_tokens(prompt, 1, max_tokens, VOCAB)
    at = next((i for i, token in enumerate(full) if token == stop and i >= min_tokens), None)
    assert run.tokens["a"] == (full if at is None else full[: at + 1])
    assert run.finish["a"] == (FinishReason.LENGTH if at is None else FinishReason.STOP)
    all_free(run)


def test_shared_prompt_is_computed_once() -> None:
    """64 requests with one prompt: the first computes it, the others wait for it and hit."""
    run = make(num_blocks=512, block_size=4, seqs=64, budget=4096)
    prompt = [i % 7 for i in range(41)]
    for i in range(64):
        run.take(run.core.admit(request(f"r{i}", list(prompt), 5, seed=i)))
    run.run()
    assert [run.cached[f"r{i}"] for i in range(64)] == [0] + [40] * 63
    lane = run.core.lanes[0]
    assert lane.prefix_hits == 63 * 40 and lane.prefix_queries == 64 * 41


def test_a_replay_shares_prefixes_and_goes_by_age() -> None:
    """64 requests of one prompt are lost in the middle: it is computed again once, the oldest are back first, and one
    that comes now waits for them."""
    run = make(num_blocks=512, block_size=4, seqs=8, budget=64)
    prompt = [i % 7 for i in range(41)]
    for i in range(64):
        run.take(run.core.admit(request(f"r{i}", list(prompt), 6, seed=i)))
    while len(run.tokens) < 8 or min(map(len, run.tokens.values())) < 2:
        run.step()
    started = [f"r{i}" for i in range(8)]
    assert sorted(run.tokens) == started  # the oldest run, the others wait
    run.flight.clear()
    run.workers = [LoggingWorker(512, 4, VOCAB)]
    run.take(run.core.lost(1))
    run.take(run.core.admit(request("late", list(prompt), 6)))
    lane = run.core.lanes[0]
    queries, hits = lane.prefix_queries, lane.prefix_hits
    run.run()
    assert lane.prefix_queries - queries - (lane.prefix_hits - hits) < 2 * 41 + 64 * 8, "the prompt was computed again"
    assert list(run.finish)[:8] == started and list(run.finish)[-1] == "late"
    for i in range(64):
        assert run.tokens[f"r{i}"] == hash_tokens(prompt, i, 6, VOCAB)


@pytest.mark.parametrize("caching", [True, False])
def test_another_engine_goes_on_with_what_was_committed(caching: bool) -> None:
    """With the whole of each history that its journal has; a prompt of before, without an id, is found by its key; and
    what bears the same id but isn't the same request gets nothing."""
    run = make(num_blocks=64, block_size=4, budget=256, caching=caching)
    for i in range(3):
        run.take(run.core.admit(request(f"r{i}", [i] * 21, 12, seed=i)))
    while min((len(tokens) for tokens in run.tokens.values()), default=0) < 5:
        run.step()
    run.core.cancel("r2")
    del run.tokens["r2"]
    run.die(behind=1)
    lane = run.core.lanes[0]
    assert run.core.replayed_tokens == 0 and [e.request.computed for e in lane.entries.values()] == [21 + 3] * 2
    run.take(run.core.admit(request("r2", [2] * 20 + [1], 12, seed=2)))
    run.take(run.core.admit(request("else", [1] * 21, 2)))
    run.run()
    for i in range(2):
        assert run.tokens[f"r{i}"] == hash_tokens([i] * 21, i, 12, VOCAB)
    assert run.cached["r2"] == run.cached["else"] == 20 * caching
    all_free(run)


@pytest.mark.parametrize("moved", [False, True], ids=["another-engine", "cut-anew"])
def test_what_was_used_last_is_evicted_last(moved: bool) -> None:
    """By another engine too, and where its KV was cut anew, whatever blocks it is in."""
    run = make(num_blocks=10, block_size=4, seqs=2, budget=64)
    for name, token in [("a", 1), ("b", 2), ("a again", 1)]:
        run.take(run.core.admit(request(name, [token] * 17, 1)))
        run.run()
    if moved:
        lane = run.core.lanes[0]
        holding.move(lane, {block: 9 - block for block in range(10)})
        run.workers[0].cells.reverse()
    else:
        run.die(behind=0)
    for name, token in [("c", 3), ("a at last", 1)]:
        run.take(run.core.admit(request(name, [token] * 17, 1)))
        run.run()
    assert run.cached["a at last"] == 16
    all_free(run)


def test_a_block_that_is_used_again_has_no_key_of_before() -> None:
    """The engine dies while another request's history is computed where a prefix was."""
    run = make(num_blocks=8, block_size=4, seqs=2, budget=64)
    run.take(run.core.admit(request("a", [1] * 13, 1)))
    run.run()
    run.take(run.core.admit(request("b", [3] * 29, 2)))
    plan = run.core.plan(0.0)
    assert plan is not None
    run.compute(plan)
    run.core.lane_of.pop("b"), run.core.lanes[0].entries.pop("b")  # its client left with the engine
    run.die(behind=0)
    run.take(run.core.admit(request("c", [1] * 13, 1)))
    run.run()
    assert run.tokens["c"] == hash_tokens([1] * 13, 0, 1, VOCAB)


def test_what_was_forgotten_is_not_found_by_another_engine() -> None:
    run = make(num_blocks=8, block_size=4, seqs=2, budget=64)
    run.take(run.core.admit(request("a", [1] * 13, 1)))
    run.run()
    run.core.forget_prefixes()
    run.die(behind=0)
    run.take(run.core.admit(request("b", [1] * 13, 1)))
    run.run()
    assert run.cached["b"] == 0 and run.tokens["b"] == run.tokens["a"]


def test_a_prefix_is_shared_by_requests_with_the_same_salt_alone() -> None:
    run = make(num_blocks=32)
    for id, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "y"), ("e", "")):
        run.take(run.core.admit(request(id, [1] * 13, 2, salt=salt)))
        run.run()
    assert run.cached == {"a": 0, "b": 0, "c": 12, "d": 0, "e": 12}
    assert len({tuple(tokens) for tokens in run.tokens.values()}) == 1


def test_a_requests_blocks_are_not_anothers_with_its_id_and_another_salt() -> None:
    run = make(num_blocks=32)
    run.take(run.core.admit(request("a", [1] * 13, 9, salt="x")))
    run.step()
    run.core.snapshot()[0].salt = "y"
    run.die(behind=0)
    assert run.core.snapshot()[0].computed == 0


def test_whatever_kv_depends_on_is_in_its_keys() -> None:
    roots = [
        KeyScope("w", "f32").root(), KeyScope("v", "f32").root(), KeyScope("w", "bf16").root(),
        KeyScope("w", "f32").root("salt"), KeyScope("w", "f32").root("", "adapter"),
        KeyScope("w", "f32").root("adapter"), KeyScope("wf", "32").root(),
    ]  # fmt: skip
    keys = {tuple(chain([1, 2, 3, 4], 2, [], root)) for root in roots}
    assert len(set(roots)) == len(keys) == len(roots)
    assert chain([1, 2, 3, 4], 2, [], roots[0])[1:] != chain([2, 2, 3, 4], 2, [], roots[0])[1:]


@pytest.mark.parametrize("engine", [True, False], ids=["of another engine", "of another rank"])
def test_what_has_suffered_is_computed_again_and_what_comes_after_it(engine: bool) -> None:
    run = make(num_blocks=32, budget=64)
    for id, prompt in (("a", [1] * 14), ("b", [2] * 14), ("old", [0] * 9)):
        run.take(run.core.admit(request(id, prompt, 1 if id == "old" else 20)))
    for _ in range(4):
        run.step()
    lane = run.core.lanes[0]
    a, old = lane.entries["a"].blocks, lane.pool.block_of[chain([0] * 4, 4, [], lane.scope.root())[0]]
    assert {*a[:3], old} <= full_blocks(run.core)[0] and a[-1] not in full_blocks(run.core)[0]
    for block in (a[1], old):
        run.workers[0].cells[block] = [7] * 4
    if engine:
        run.die(behind=0)
    else:
        run.core.lost(1, kept=True)
        run.lose_workers(1, kept=True)
    run.core.cut({0: {a[1], old}})
    run.core.lanes[0].pool.check()
    computed = {entry.request.id: entry.request.computed for entry in run.core.lanes[0].entries.values()}
    assert computed["a"] == 4 and computed["b"] >= 14
    run.take(run.core.admit(request("new", [0] * 9, 3)))
    run.run()
    assert run.cached["new"] == 0 and run.tokens["a"] == hash_tokens([1] * 14, 0, 20, VOCAB)
    assert run.tokens["new"] == hash_tokens([0] * 9, 0, 3, VOCAB)
    all_free(run)


def test_what_nobody_claims_goes_after_a_while() -> None:
    run = make(num_blocks=12, block_size=4, seqs=4, budget=64)
    run.take(run.core.admit(request("gone", [1] * 30, 6)))
    run.step()
    run.core.lane_of.pop("gone"), run.core.lanes[0].entries.pop("gone")  # its client left with the engine
    run.die(behind=0)
    free = [(run.core.plan(now), run.core.lanes[0].pool.num_free)[1] for now in (5.0, 4.0 + CLAIM, 5.0 + CLAIM)]
    assert free[:2] == [4, 4] and free[2] == 12


def test_what_nobody_claims_makes_room() -> None:
    run = make(num_blocks=12, block_size=4, seqs=4, budget=64)
    run.take(run.core.admit(request("gone", [1] * 30, 6)))
    run.take(run.core.admit(request("stays", [2] * 2, 9)))
    for _ in range(4):
        run.step()
    run.core.lane_of.pop("gone"), run.core.lanes[0].entries.pop("gone")  # its client left with the engine
    run.die(behind=0)
    assert run.core.lanes[0].pool.num_free < 6
    run.take(run.core.admit(request("more", [3] * 30, 6)))
    run.run()
    assert run.tokens["stays"] == hash_tokens([2] * 2, 0, 9, VOCAB)
    assert run.tokens["more"] == hash_tokens([3] * 30, 0, 6, VOCAB)
    all_free(run)


def test_who_waits_with_blocks_makes_room() -> None:
    """After a fault two wait with what they have computed, and one comes that goes before them and needs it all."""
    run = make(num_blocks=12, block_size=4, seqs=4, budget=64, policy="priority")
    for i in range(2):
        run.take(run.core.admit(request(f"r{i}", [i] * 17, 6, seed=i)))
    for _ in range(4):
        run.step()
    run.restart(kept=True)
    run.take(run.core.admit(request("first", [3] * 40, 4, priority=-1)))
    run.run()
    assert next(iter(run.finish)) == "first" and run.tokens["first"] == hash_tokens([3] * 40, 0, 4, VOCAB)
    for i in range(2):
        assert run.tokens[f"r{i}"] == hash_tokens([i] * 17, i, 6, VOCAB)
    all_free(run)


def test_preemption_keeps_order_and_tokens() -> None:
    """Memory for one and a half requests: the later one is preempted, the earlier never."""
    run = make(num_blocks=10, block_size=4, seqs=4, budget=64)
    run.take(run.core.admit(request("a", [1] * 8, 24)))
    run.take(run.core.admit(request("b", [2] * 8, 24)))
    run.run()
    assert run.core.lanes[0].preemptions >= 1
    assert list(run.finish) == ["a", "b"]
    for id, token in (("a", 1), ("b", 2)):
        assert run.tokens[id] == hash_tokens([token] * 8, 0, 24, VOCAB)


def test_priority_goes_first() -> None:
    run = make(seqs=1, policy="priority")
    for id, priority in (("low", 5), ("high", -1), ("mid", 2)):
        run.take(run.core.admit(request(id, [1], 3, priority=priority)))
    run.run()
    assert list(run.finish) == ["high", "mid", "low"]


def test_impossible_requests_are_answered() -> None:
    run = make(num_blocks=4, block_size=4)
    run.take(run.core.admit(request("long", [1] * 10, 7)))
    run.take(run.core.admit(request("none", [], 7)))
    assert run.finish == {"long": FinishReason.ERROR, "none": FinishReason.ERROR}
    assert run.core.plan(0.0) is None


def test_plan_is_flat_in_unchanged_rows() -> None:
    """Between block boundaries a plan names no row at all, however many run."""
    run = make(num_blocks=512, block_size=64, seqs=64, budget=4096, depth=1)
    for i in range(64):
        run.take(run.core.admit(request(f"r{i}", [i], 50)))
    run.step()
    for _ in range(40):
        plan = run.core.plan(0.0)
        assert plan is not None and plan.lanes == ((),) and plan.freed_rows == ((),)
        part = run.workers[0].step(plan.step, plan.lanes[0], plan.freed_rows[0])
        run.take(run.core.commit(StepResult(plan.epoch, plan.step, (part,))))


def test_micro_steps_take_turns() -> None:
    """Rows that come together are dealt over the turns; a turn without rows is left out."""
    run = make(num_blocks=512, block_size=16, seqs=64, budget=4096, depth=2, micro_steps=2)
    for i in range(8):
        run.take(run.core.admit(request(f"r{i}", [i], 20)))
    while run.core.lanes[0].prefilling or run.core.lanes[0].waiting:
        run.step()
    assert [turn.num_rows for turn in run.core.lanes[0].turns] == [4, 4]
    for _ in range(4):
        run.step()
        assert len(run.flight) == 1 or sorted(plan.turn for plan, _ in run.flight) == [0, 1]
    run.run()
    all_free(run)
    run.take(run.core.admit(request("alone", [1], 5)))
    steps = 0
    while run.step():
        steps += 1
        assert len(run.flight) == 0
    assert steps == 5 and run.tokens["alone"] == hash_tokens([1], 0, 5, VOCAB)


def test_parts_of_a_prompt_pipeline() -> None:
    """Two parts of one history are in flight at once; its row is of the turn of the last."""
    run = make(num_blocks=64, block_size=4, seqs=4, budget=16, depth=2, micro_steps=2)
    run.take(run.core.admit(request("a", [1] * 40, 3)))
    plans = [run.core.plan(0.0), run.core.plan(0.0)]
    rows = [plan.lanes[0][0] for plan in plans if plan is not None]
    assert [(row.start, row.count, row.sample) for row in rows] == [(0, 16, False), (16, 16, False)]
    assert run.core.plan(0.0) is None  # both turns are in flight
    run = make(num_blocks=512, block_size=16, seqs=4, budget=4096, depth=2, micro_steps=2)
    run.take(run.core.admit(request("b", [i % 5 for i in range(700)], 4)))
    plans = [run.core.plan(0.0), run.core.plan(0.0)]  # though a step has room for all of it
    assert [(plan.lanes[0][0].start, plan.lanes[0][0].count) for plan in plans if plan] == [(0, 256), (256, 256)]
    run.take(run.core.admit(request("c", [i % 5 for i in range(700)], 4)))
    for plan in plans:
        assert plan is not None
        part = run.workers[0].step(plan.step, plan.lanes[0], plan.freed_rows[0], plan.turn)
        run.take(run.core.commit(StepResult(plan.epoch, plan.step, (part,))))
    run.run()
    assert run.tokens["b"] == run.tokens["c"] == hash_tokens([i % 5 for i in range(700)], 0, 4, VOCAB)
    all_free(run)


def test_a_last_token_is_kept_when_another_request_stops_in_the_same_commit() -> None:
    """With a step ahead, the second's row is given up before its last token comes; the first's end must not take it."""
    run = make(depth=2, caching=False)
    first, second = hash_tokens([1, 2, 3], 5, 3, VOCAB), hash_tokens([4, 5], 6, 3, VOCAB)
    assert first[2] not in first[:2]
    run.take(run.core.admit(request("stops", [1, 2, 3], 10, 5, stop_token_ids=(first[2],))))
    run.take(run.core.admit(request("ends", [4, 5], 3, 6)))
    run.run()
    assert run.tokens == {"stops": first, "ends": second}
    assert run.finish == {"stops": FinishReason.STOP, "ends": FinishReason.LENGTH}
    all_free(run)


@pytest.mark.parametrize("depth", [1, 2])
def test_who_could_not_draw_waits_with_what_is_computed(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grammar was not ready: only the last token is computed again, to draw the next one."""
    run = make(depth=depth, caching=False)
    parts: list[tuple[int, int]] = []
    worker, step = run.workers[0], run.workers[0].step

    def told(number: int, rows: LanePlan, freed: tuple[int, ...], turn: int = 0) -> LaneResult:
        parts.extend((row.start, row.count) for row in rows if row.fresh is not None)
        return step(number, rows, freed, turn)

    monkeypatch.setattr(worker, "step", told)
    run.take(run.core.admit(request("a", list(range(30)), 60, seed=3, grammar="5")))
    run.run()
    assert run.finish and parts[0] == (0, 30) and len(parts) > 2
    assert all(start >= 29 and count == 1 for start, count in parts[1:])
    all_free(run)


def test_steps_get_shorter_and_longer_while_requests_run() -> None:
    """In the bounds of what is configured, and with the same tokens."""
    run = make(budget=64, depth=1, num_blocks=256)
    prompts = [list(range(i, i + 150)) for i in range(3)]
    for i, prompt in enumerate(prompts):
        run.take(run.core.admit(request(str(i), prompt, 20)))
    longest = []
    for limit in (16, 40, 1000, 1):
        run.core.limit_steps(limit)
        took = []
        for _ in range(3):
            plan = run.core.plan(0.0)
            assert plan is not None
            part = run.workers[0].step(plan.step, plan.lanes[0], plan.freed_rows[0], plan.turn)
            took.append(sum(row.count for row in plan.lanes[0]))
            run.take(run.core.commit(StepResult(plan.epoch, plan.step, (part,))))
        longest.append(max(took))
    assert longest == [16, 40, 64, 7]  # and one row that goes on by itself
    run.run()
    for i, prompt in enumerate(prompts):
        assert run.tokens[str(i)] == hash_tokens(prompt, 0, 20, VOCAB)


def test_lanes_share_the_work_and_their_order_outlives_a_change_of_their_number() -> None:
    """Requests go to the lane with the least; a lane with nothing to do has an empty part in every plan; a lost request
    is served in the order it came, whichever lane it is dealt to."""
    run = make(lanes=3, seqs=2)
    for i in range(2):
        run.take(run.core.admit(request(f"r{i}", [i, 1, 2], 12, seed=i)))
    plan = run.core.plan(0.0)
    assert plan is not None and [len(rows) for rows in plan.lanes] == [1, 1, 0] and plan.freed_rows == ((), (), ())
    run.flight.append((plan, run.compute(plan)))
    for i in range(2, 9):
        run.take(run.core.admit(request(f"r{i}", [i, 1, 2], 12, seed=i)))
    assert sorted(len(lane.entries) for lane in run.core.lanes) == [3, 3, 3]
    for lanes in (1, 2, 3):
        for _ in range(3):
            run.step()
        run.restart(lanes)
        assert [r.id for r in run.core.snapshot()] == [f"r{i}" for i in range(9)]
        assert len(run.core.lanes) == lanes and run.core.stats().waiting == 9
        for lane in run.core.lanes:  # dealt evenly, the first first
            assert len(lane.entries) == 9 // lanes + (lane is run.core.lanes[0] and 9 % lanes)
    run.run()
    assert all(run.tokens[f"r{i}"] == hash_tokens([i, 1, 2], i, 12, VOCAB) for i in range(9))
    all_free(run)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_that_draft_need_fewer_steps_for_the_same_tokens(depth: int) -> None:
    steps = {}
    for drafts in (0, 4):
        run = make(depth=depth, drafts=drafts)
        for i in range(3):
            run.take(run.core.admit(request(f"r{i}", [i, 1, 2], 40, seed=i)))
        run.run()
        assert all(run.tokens[f"r{i}"] == hash_tokens([i, 1, 2], i, 40, VOCAB) for i in range(3))
        all_free(run)
        steps[drafts] = run.core.committed
    assert steps[4] < 0.7 * steps[0]


@pytest.mark.parametrize("drafts", [1, 3])
def test_what_refused_drafts_leave_is_in_no_shared_block(drafts: int) -> None:
    """Another request that goes through the same history, with blocks that the first one filled."""
    run = make(block_size=2, drafts=drafts)
    run.take(run.core.admit(request("a", [1, 2, 3], 30, seed=7)))
    run.run()
    history = [1, 2, 3, *run.tokens["a"]]
    run.take(run.core.admit(request("b", history, 6, seed=9)))
    run.run()
    assert run.cached["b"] >= 2 * ((len(history) - 1) // 2) - 2
    assert run.tokens["b"] == hash_tokens(history, 9, 6, VOCAB)


def test_a_stop_among_several_tokens_ends_the_request_there() -> None:
    tokens = hash_tokens([1, 2], 3, 30, VOCAB)
    for stop in dict.fromkeys(tokens):
        run = make(drafts=4)
        run.take(run.core.admit(request("a", [1, 2], 30, 3, stop_token_ids=(stop,))))
        run.run()
        assert run.tokens["a"] == tokens[: tokens.index(stop) + 1] and run.finish["a"] is FinishReason.STOP
        all_free(run)


def test_prompt_tokens_count_when_they_are_computed() -> None:
    """Step by step, and not those that the cache has; how long a request waited is said with its first token."""
    run = make(budget=16, depth=1)
    run.take(run.core.admit(request("a", list(range(40)), 3)))
    assert run.core.stats().prompt_tokens == 0
    counted = []
    while run.step():
        counted.append(run.core.stats().prompt_tokens)
    assert counted[:3] == [16, 32, 40] and counted[-1] == 40
    run.take(run.core.admit(request("again", list(range(40)), 3)))
    run.run()
    assert run.core.stats().prompt_tokens == 80 - run.cached["again"] and run.cached["again"] > 0
    before = run.core.stats().prompt_tokens
    run.take(run.core.admit(request("replayed", [7] * 20, 8)))
    while len(run.tokens.get("replayed", ())) < 3:
        run.step()
    run.restart()
    run.run()
    assert run.core.stats().prompt_tokens == before + 20
    late = request("late", [1, 2, 3], 2)
    late.arrival = 5.0
    run.take(run.core.admit(late))
    plan = run.core.plan(7.5)
    assert plan is not None
    (delta,) = run.core.commit(run.compute(plan))
    assert delta.queued == 2.5
