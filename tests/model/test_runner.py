"""The runner with a fake model: what reaches the batch, and that one request's mistake stays with it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.core.engine import EngineCore
from planaria.kernels.ops import Batch
from planaria.protocol import Fresh, Row, StepResult
from planaria.types import Delta, FinishReason, Request, SamplingParams
from planaria.worker.runner import Runner
from planaria.worker.sampler import Sampler

VOCAB, SIZE, ROWS = 64, 16, 8


class FakeModel:
    """The next token is (the sum of all tokens seen through the block table) mod VOCAB: reads KV as a model would."""

    def __init__(self, batch: Batch, num_blocks: int) -> None:
        self.batch, self.cells = batch, np.full(num_blocks * SIZE, -1, np.int64)

    def __call__(self) -> npt.NDArray[np.float32]:
        b = self.batch
        tokens, sequences, samples, *_ = b.counts.tolist()
        self.cells[b.slots[:tokens]] = b.tokens[:tokens]
        logits = np.zeros((samples, VOCAB), np.float32)
        sequence_of = np.searchsorted(b.seq_start[: sequences + 1], b.sample_index[:samples], side="right") - 1
        for line, (seq, index) in enumerate(zip(sequence_of, b.sample_index[:samples], strict=True)):
            position = b.positions[index]
            table = b.block_table[b.seq_row[seq]]
            slots = [int(table[p // SIZE]) * SIZE + p % SIZE for p in range(position + 1)]
            assert (self.cells[slots] >= 0).all(), "a position was read before it was written"
            logits[line, self.cells[slots].sum() % VOCAB] = 5.0
        return logits


def definition(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(sum(history) % VOCAB)
    return history[len(prompt) :]


def make(
    num_blocks: int = 32, budget: int = 24, depth: int = 1, micro_steps: int = 1
) -> tuple[EngineCore, Runner]:  # fmt: skip
    scheduler = SchedulerConfig(
        max_num_seqs=ROWS, max_num_batched_tokens=budget, max_model_len=256, depth=depth, micro_steps=micro_steps,
        max_logit_rows=ROWS + 16,
    )  # fmt: skip
    batch = Batch(budget, ROWS, 256 // SIZE + 1, ROWS + 16)
    runner = Runner(batch, FakeModel(batch, num_blocks), Sampler(ROWS, VOCAB, plain=True), scheduler, SIZE)
    return EngineCore(scheduler, CacheConfig(block_size=SIZE), num_blocks), runner


def run(core: EngineCore, runner: Runner, depth: int) -> list[Delta]:
    deltas: list[Delta] = []
    flight: list[StepResult] = []
    while True:
        while len(flight) < depth and (plan := core.plan(0.0)) is not None:
            part = runner.step(plan.step, plan.lanes[0], plan.freed_rows[0], plan.turn)
            flight.append(StepResult(plan.epoch, plan.step, (part,)))
        if not flight:
            return deltas
        deltas += core.commit(flight.pop(0))


def request(id: str, prompt: list[int], count: int, **params: object) -> Request:
    return Request(id, prompt, SamplingParams(temperature=0, **params), 0, max_tokens=count)  # type: ignore[arg-type]


def tokens_of(deltas: list[Delta], id: str) -> list[int]:
    return [token for delta in deltas if delta.request_id == id for token in delta.tokens]


def test_chunks_rows_and_blocks() -> None:
    """Prompts cut into chunks beside rows that go on by themselves, with steps in flight, of one row or in turns."""
    for depth, micro_steps in ((1, 1), (2, 1), (2, 2), (3, 3)):
        core, runner = make(depth=depth, micro_steps=micro_steps)
        prompts = [[(i * 7 + j) % VOCAB for j in range(5 + 13 * i)] for i in range(6)]
        for i, prompt in enumerate(prompts):
            core.admit(request(f"r{i}", prompt, 20 + i))
        deltas = run(core, runner, depth)
        for i, prompt in enumerate(prompts):
            assert tokens_of(deltas, f"r{i}") == definition(prompt, 20 + i)


class Foreknowing(Sampler):
    """Knows what rows with an even number of tokens draw, before there are logits."""

    model: FakeModel

    def known(self, rows: list[int]) -> dict[int, int]:
        b, found = self.model.batch, {}
        for i, row in enumerate(rows):
            positions = range(int(b.seq_len[i]))
            if len(positions) % 2 == 0:
                slots = [int(b.block_table[row, p // SIZE]) * SIZE + p % SIZE for p in positions]
                self.model.cells[slots[-1]] = b.tokens[i]
                found[i] = int(self.model.cells[slots].sum() % VOCAB)
        return found


def test_no_logits_are_computed_of_what_is_known() -> None:
    """Beside chunks of prompts, with prompts' log-probabilities, and where no logits at all are wanted."""
    for depth, logprobs in ((1, None), (2, None), (1, 2)):
        core, runner = make(depth=depth)
        runner.sampler = Foreknowing(ROWS, VOCAB, plain=True)
        runner.sampler.model = model = runner.stage.forward  # type: ignore[assignment]
        assert isinstance(model, FakeModel)
        lines, forward = [], model.__call__
        runner.stage.forward = lambda: lines.append(int(model.batch.counts[2])) or forward()  # type: ignore[func-returns-value]  # noqa: B023
        prompts = [[(i * 7 + j) % VOCAB for j in range(5 + 13 * i)] for i in range(6)]
        for i, prompt in enumerate(prompts):
            core.admit(request(f"r{i}", prompt, 20 + i, prompt_logprobs=logprobs))
        deltas = run(core, runner, depth)
        for i, prompt in enumerate(prompts):
            assert tokens_of(deltas, f"r{i}") == definition(prompt, 20 + i)
        of_prompts = sum(map(len, prompts)) if logprobs is not None else 0
        drawn = sum(20 + i for i in range(6))
        assert 0 in lines and sum(lines) < of_prompts + drawn * 0.7


def test_prompt_logprobs_come_whole() -> None:
    core, runner = make()
    prompt = [i % 11 for i in range(50)]
    core.admit(request("p", prompt, 3, prompt_logprobs=2))
    core.admit(request("q", [1, 2, 3], 30))
    first = next(delta for delta in run(core, runner, 1) if delta.request_id == "p")
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert [given.token for given in first.prompt_logprobs[1:] if given is not None] == prompt[1:]


def test_a_request_that_cannot_enter_costs_nobody() -> None:
    """A history outside the vocabulary is refused by the sampler's penalties: that request ends, the other goes on."""
    for depth in (1, 2):
        core, runner = make(depth=depth)
        core.admit(request("bad", [VOCAB + 5] * 40, 5, presence_penalty=1.0))
        core.admit(request("good", [1, 2, 3], 12))
        deltas = run(core, runner, depth)
        last = [delta for delta in deltas if delta.request_id == "bad"]
        assert [delta.finish for delta in last] == [FinishReason.ERROR] and "vocabulary" in (last[0].error or "")
        assert tokens_of(deltas, "good") == definition([1, 2, 3], 12)
        lane = core.lanes[0]
        assert lane.pool.num_free == lane.num_blocks and len(lane.free_rows) == ROWS


def test_a_plan_out_of_order_is_refused() -> None:
    _, runner = make()
    fresh = Fresh((1, 2), 2, SamplingParams(temperature=0), 0)
    runner.step(1, (Row(0, 0, 2, (0,), True, fresh),), ())
    for step in (1, 3):
        try:
            runner.step(step, (), ())
        except ValueError as e:
            assert "after step 1" in str(e)
        else:
            raise AssertionError("accepted")
