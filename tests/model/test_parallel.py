"""Ranks with parts of a model, as processes given the same plans, against one rank with the whole of it."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from planaria.config.options import EngineConfig, EngineOptions
from planaria.config.resolve import resolve
from planaria.core.engine import EngineCore
from planaria.errors import ModelError
from planaria.mesh.segment import fence_segment
from planaria.node import Shared
from planaria.protocol import Allocate, Failed, Fresh, Load, Probe, Row, StepPlan, StepResult
from planaria.types import Request, SamplingParams, TokenLogprobs
from planaria.worker.worker import Worker
from tests.model.checkpoints import write_checkpoint
from tests.model.ranks import Ranks, boot_of
from tests.tiers import representatives

BLOCKS = 96


def long(*values: Any) -> Any:
    """Of the default run's cases the others have what this one has."""
    return pytest.param(*values, marks=pytest.mark.long)


LAYOUTS = [long(2, 1), (3, 1), long(1, 2), long(2, 2)]
Found = dict[str, tuple[list[int], list[TokenLogprobs], list[TokenLogprobs | None]]]


def config_for(model: str, kernels: str = "native", dtype: str = "float32", threads: int = 1) -> EngineConfig:
    return resolve(
        EngineOptions(
            model=model,
            dtype=dtype,
            kernels=kernels,
            threads=threads,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            device="cpu",
            quantization="none",
        )  # fmt: skip
    )


def requests(vocab: int) -> list[Request]:
    """Prompts of several lengths, greedy and drawn; one wants the prompt's logprobs."""
    out = []
    for i, (length, count) in enumerate([(5, 12), (70, 9), (1, 14), (33, 6), (20, 10)]):
        prompt = [(7 + 131 * i + 17 * j * j) % vocab for j in range(length)]
        params = SamplingParams(
            temperature=0 if i != 4 else 0.9, logprobs=2, prompt_logprobs=2 if i == 3 else None, ignore_eos=True
        )
        out.append(Request(f"r{i}", prompt, params, 11 + i, max_tokens=count))
    return out


def drive(core: EngineCore, wanted: list[Request], send: Any, result: Any, depth: int) -> Found:
    """Run requests to their end with up to `depth` plans on their way."""
    found: Found = {request.id: ([], [], []) for request in wanted}
    for request in wanted:
        assert core.admit(request) == []
    flight: deque[int] = deque()
    while True:
        while len(flight) < depth and (plan := core.plan(0.0)) is not None:
            send(plan)
            flight.append(plan.step)
        if not flight:
            return found
        flight.popleft()
        for delta in core.commit(result()):
            assert delta.error is None
            tokens, logprobs, prompt_logprobs = found[delta.request_id]
            tokens += delta.tokens
            logprobs += delta.logprobs or []
            prompt_logprobs += delta.prompt_logprobs or []


def alone(config: EngineConfig, wanted: list[Request]) -> Found:
    """The same with one rank, in this process."""
    worker = Worker(boot_of(config))
    for command in (Load(), Probe(), Allocate(BLOCKS)):
        reply = worker.handle(command)
        assert not isinstance(reply, Failed), reply
    replies: deque[Any] = deque()
    core = EngineCore(config.scheduler, config.cache, BLOCKS)
    found = drive(core, wanted, lambda plan: replies.append(worker.handle(plan)), replies.popleft, 1)
    worker._exit()
    return found


def start(ranks: Ranks) -> None:
    for command in (Load(), Probe(), Allocate(BLOCKS)):
        for reply in ranks.ask(command):
            assert not isinstance(reply, Failed), reply


def together(ranks: Ranks, config: EngineConfig, wanted: list[Request], depth: int) -> Found:
    """With ranks in processes; only the drawing rank's results count, all answer."""

    def result() -> StepResult:
        replies = [ranks.answer(rank) for rank in range(ranks.size)]
        for rank, reply in enumerate(replies):
            assert isinstance(reply, StepResult), reply
            assert rank == ranks.drawing or not reply.lanes[0].rows
        reply = replies[ranks.drawing]
        assert isinstance(reply, StepResult)
        return reply

    core = EngineCore(config.scheduler, config.cache, BLOCKS)
    return drive(core, wanted, ranks.send, result, depth)


def assert_same(found: Found, expected: Found, tolerance: float = 1e-3) -> None:
    for name, (tokens, logprobs, prompt_logprobs) in expected.items():
        assert found[name][0] == tokens, name
        pairs = zip([*found[name][1], *found[name][2]], [*logprobs, *prompt_logprobs], strict=True)
        for one, other in pairs:
            if one is None or other is None:
                assert one is other
                continue
            assert one.token == other.token and abs(one.logprob - other.logprob) < tolerance


@pytest.fixture(scope="module")
def real() -> tuple[EngineConfig, Found]:
    try:
        config = config_for("smollm2")
    except ModelError as e:
        pytest.skip(f"the demo model is not installed: {e}")
    torch.set_num_threads(1)
    return config, alone(config, requests(config.model.vocab_size))


def assert_ranks_give(ranks: Ranks, config: EngineConfig, expected: Found) -> None:
    """One plan at a time, and two on their way with rows in turn."""
    for depth, micro_steps in ((1, 1), (2, ranks.pp)):
        assert all(not isinstance(reply, Failed) for reply in ranks.ask(Allocate(BLOCKS)))  # from step 1 again
        scheduler = msgspec.structs.replace(config.scheduler, micro_steps=micro_steps)
        turns = msgspec.structs.replace(config, scheduler=scheduler)
        assert_same(together(ranks, turns, requests(config.model.vocab_size), depth), expected)


@pytest.mark.parametrize("tp, pp", LAYOUTS)
def test_the_real_model_gives_the_same_tokens(real: tuple[EngineConfig, Found], tp: int, pp: int) -> None:
    config, expected = real
    with Ranks(config, tp, pp) as ranks:
        start(ranks)
        assert_ranks_give(ranks, config, expected)


@pytest.mark.long
def test_two_threads_a_rank(real: tuple[EngineConfig, Found]) -> None:
    config = config_for("smollm2", threads=2)
    with Ranks(config, 2, 1) as ranks:
        start(ranks)
        assert_same(together(ranks, config, requests(config.model.vocab_size), 1), real[1])


def test_packed_weights_in_bfloat16(real: tuple[EngineConfig, Found]) -> None:
    """What is served by default: the file's blocks, cut along both sides. bfloat16 differs by rounding, so texts part;
    what each rank holds is right if the first tokens' log-probabilities are."""
    config = resolve(
        EngineOptions(
            model="smollm2", threads=1, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=48, device="cpu"
        )
    )
    assert (config.device.dtype, config.device.quantization) == ("bfloat16", "keep")
    expected = alone(config, requests(config.model.vocab_size))
    with Ranks(config, 2, 1) as ranks:
        start(ranks)
        found = together(ranks, config, requests(config.model.vocab_size), 1)
    for name, (_, logprobs, _) in expected.items():
        assert abs(found[name][1][0].top[0][1] - logprobs[0].top[0][1]) < 0.1


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "attention_bias": True}),
    ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 160}),
    ("mistral", {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16}),
]


FAMILY_CASES = [
    pytest.param(
        family, overrides, tp, pp, id=f"{family} tp={tp} pp={pp}", marks=pytest.mark.long if (tp + i) % 2 == 0 else ()
    )
    for i, (family, overrides) in enumerate(FAMILIES)
    for tp, pp in ((3, 1), (2, 2))
]


@pytest.mark.parametrize("family, overrides, tp, pp", FAMILY_CASES)
def test_families(tmp_path: Path, family: str, overrides: dict[str, Any], tp: int, pp: int) -> None:
    write_checkpoint(tmp_path, family, num_hidden_layers=3, **overrides)
    config = config_for(str(tmp_path))
    torch.set_num_threads(1)
    expected = alone(config, requests(config.model.vocab_size))
    with Ranks(config, tp, pp) as ranks:
        start(ranks)
        assert_ranks_give(ranks, config, expected)


@pytest.mark.parametrize("kernels, gloo", [("torch", False), long("torch", True), ("native", True)])
def test_torch_kernels_and_gloo(small: EngineConfig, kernels: str, gloo: bool) -> None:
    expected = alone(small, requests(small.model.vocab_size))
    config = msgspec.structs.replace(small, device=msgspec.structs.replace(small.device, kernels=kernels))
    with Ranks(config, 2, 2, gloo=gloo) as ranks:
        start(ranks)
        assert_same(together(ranks, config, requests(config.model.vocab_size), 2), expected)


@pytest.fixture
def small(tmp_path: Path) -> EngineConfig:
    write_checkpoint(tmp_path, "llama")
    return config_for(str(tmp_path))


def until_failed(ranks: Ranks, config: EngineConfig, stop: Any, at: int) -> list[Failed]:
    """Give plans one by one; call `stop` before the plan of step `at`; the failures of the ranks that still answer."""
    core = EngineCore(config.scheduler, config.cache, BLOCKS)
    for request in requests(config.model.vocab_size):
        core.admit(request)
    while True:
        plan = core.plan(0.0)
        assert plan is not None
        left = list(range(ranks.size))
        if plan.step == at:
            left.remove(stop())
        ranks.send(plan, left)
        replies = [ranks.answer(rank) for rank in left]
        if plan.step == at:
            return [reply for reply in replies if isinstance(reply, Failed)]
        drawn = replies[ranks.drawing]
        assert isinstance(drawn, StepResult)
        core.commit(drawn)


KILLED = [(*layout, gloo) for gloo in (False, True) for layout in ((2, 1, 1), (2, 1, 0), (1, 2, 0), (3, 1, 1))]


@pytest.mark.parametrize("tp, pp, victim, gloo", representatives(KILLED, *KILLED[:4], KILLED[-1]))
def test_a_killed_rank_is_named_by_the_others(small: EngineConfig, tp: int, pp: int, victim: int, gloo: bool) -> None:
    with Ranks(small, tp, pp, gloo=gloo, deadline=60) as ranks:
        start(ranks)

        def stop() -> int:
            ranks.procs[victim].kill()
            ranks.procs[victim].join(60)
            return victim

        since = time.monotonic()
        failures = until_failed(ranks, small, stop, 4)
        assert len(failures) == tp * pp - 1
        for failed in failures:
            assert failed.phase == "step" and failed.rank != victim
            # gloo does not say which of several it was, or names one that has failed before for the same reason
            assert ("is gone: its connection closed" if gloo else f"rank {victim}") in failed.message
            assert tp * pp > 2 or f"rank {victim}" in failed.message
        assert time.monotonic() - since < 30  # not by waiting for the deadline


def test_a_stopped_rank_is_named_at_the_deadline(small: EngineConfig) -> None:
    with Ranks(small, 3, 1, deadline=5) as ranks:
        start(ranks)

        def stop() -> int:
            os.kill(ranks.pid(2), signal.SIGSTOP)
            return 2

        since = time.monotonic()
        failures = until_failed(ranks, small, stop, 3)
        assert len(failures) == 2 and time.monotonic() - since < 30
        assert all("rank 2" in failed.message for failed in failures)


def test_a_fence_ends_a_wait(small: EngineConfig) -> None:
    with Ranks(small, 2, 1) as ranks:
        start(ranks)

        def stop() -> int:
            first = ranks.members[0]
            fd = Shared(first.pid, *first.segments["tp"]).open()
            fence_segment(fd)  # what an engine does when it hears of a loss first
            os.close(fd)
            return 1

        since = time.monotonic()
        failures = until_failed(ranks, small, stop, 3)
        assert len(failures) == 1 and "fenced" in failures[0].message and time.monotonic() - since < 30


def test_a_rank_that_fails_by_itself_is_named(small: EngineConfig) -> None:
    """A plan only one rank finds wrong: the other would wait for it."""
    with Ranks(small, 2, 1) as ranks:
        start(ranks)
        plan = EngineCore(small.scheduler, small.cache, BLOCKS)
        plan.admit(requests(small.model.vocab_size)[0])
        first = plan.plan(0.0)
        assert first is not None
        ranks.send(first, [0])
        ranks.send(msgspec.structs.replace(first, step=7), [1])
        replies = [ranks.answer(rank) for rank in (0, 1)]
        assert all(isinstance(reply, Failed) for reply in replies)
        assert "rank 1 gave up" in replies[0].message and "plan for step 7" in replies[1].message  # type: ignore[union-attr]


@pytest.mark.row("X8")
def test_micro_steps_of_several_rows_are_in_flight(small: EngineConfig) -> None:
    """Two rows in turn, all plans given before the first result is read: a stage has its next step before the other is
    done, and a row's token is there when the row goes on."""
    count, prompts = 12, ([3, 1, 4, 1, 5], [9, 2, 6])
    params = SamplingParams(temperature=0, ignore_eos=True)
    wanted = [Request(f"r{i}", prompt, params, 0, max_tokens=count) for i, prompt in enumerate(prompts)]
    expected = alone(small, wanted)
    plans = []
    for step in range(1, 2 * count + 1):
        lane: tuple[Row, ...] = ()
        if step <= 2:
            row, prompt = step - 1, tuple(prompts[step - 1])
            fresh = Fresh(prompt, len(prompt), params, 0)
            lane = (Row(row, 0, len(prompt), (2 * row, 2 * row + 1), True, fresh),)
        plans.append(StepPlan(0, step, (lane,), ((),), (step - 1) % 2))
    with Ranks(small, 2, 2) as ranks:
        start(ranks)
        for plan in plans:
            ranks.send(plan)
        drawn: dict[int, list[int]] = {0: [], 1: []}
        for plan in plans:
            replies = [ranks.answer(rank) for rank in range(ranks.size)]
            result = replies[ranks.drawing]
            assert isinstance(result, StepResult), result
            assert result.lanes[0].rows == [(plan.step - 1) % 2]
            drawn[result.lanes[0].rows[0]] += result.lanes[0].tokens
        assert [drawn[0], drawn[1]] == [expected["r0"][0], expected["r1"][0]]
