"""A rank that dies, stops or fails while requests run: they go on, with the same tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest

from planaria import LLM, SamplingParams
from planaria.errors import ConfigError, EngineDead
from planaria.protocol import StepPlan
from planaria.wire import FromEngine, Processes, Recovery, Report
from tests.proc.servers import SMALL, Server, alive, needs_smollm2, titled, wait_until

pytestmark = needs_smollm2

OPTIONS = {"kv_cache_memory": "128MiB", "max_model_len": 1024, "dtype": "float32"}
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
PROMPTS = ["Once upon a time", "The capital of France is", "1 2 3 4", "def f(n):"]


class Watched:
    """An LLM, and what it was told of recoveries."""

    def __init__(self, **options: Any) -> None:
        self.llm = LLM("smollm2", **OPTIONS, **options)
        self.expected = self.run()
        self.heard: list[Recovery] = []
        self.processes: list[Processes] = []
        hear = self.llm._loop.emit

        def listen(message: FromEngine) -> None:
            if isinstance(message, Recovery):
                self.heard.append(message)
            if isinstance(message, Processes):
                self.processes.append(message)
            hear(message)

        self.llm._loop.emit = listen

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.llm._loop.crew.members]

    @property
    def done(self) -> list[Recovery]:
        return [message for message in self.heard if message.seconds]

    def run(self, at: int = 0, harm: Any = None) -> list[list[int]]:
        """All prompts; `harm` is called once, when more than `at` tokens have come."""
        count, left = 0, [harm] if harm is not None else []

        def count_up(done: int, tokens: int) -> None:
            nonlocal count
            count += tokens
            if count > at and left:
                left.pop()()

        outputs = self.llm.generate(PROMPTS, PARAMS, on_tokens=count_up)
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=["tp", "pp"])
def two(request: pytest.FixtureRequest) -> Iterator[Watched]:
    size = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}[request.param]
    watched = Watched(**{size: 2})
    yield watched
    watched.llm.close()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_with_the_same_tokens(two: Watched, victim: int, how: signal.Signals) -> None:
    before = two.pids
    two.heard.clear()
    assert two.run(100, lambda: os.kill(before[victim], how)) == two.expected
    (done,) = two.done
    assert done.ranks == [victim] and done.phase == "step" and done.pids == two.pids
    assert ("signal 9" if how == signal.SIGKILL else "stopped") in done.cause
    other = 1 - victim
    assert two.pids[other] == before[other] and two.pids[victim] != before[victim]
    assert not alive(before[victim])  # for certain, also when it was only stopped


def test_a_rank_that_dies_while_idle_is_replaced(two: Watched) -> None:
    before = two.pids
    two.heard.clear()
    os.kill(before[0], signal.SIGKILL)
    assert two.run() == two.expected
    assert len(two.done) == 1 and two.pids[1] == before[1]


def test_an_exception_costs_an_epoch_and_no_process(two: Watched) -> None:
    """A plan that a rank finds wrong, which is what a mistake in a kernel looks like."""
    before = two.pids
    two.heard.clear()
    core = two.llm._loop.core
    assert core is not None

    plan = core.plan
    spoilt: list[int] = []

    def spoil(now: float) -> StepPlan | None:
        right = plan(now)
        if right is None or spoilt or core.committed < 20:
            return right
        spoilt.append(right.step)
        return msgspec.structs.replace(right, step=right.step + 7)

    core.plan = spoil  # type: ignore[method-assign]
    assert two.run() == two.expected and spoilt
    (done,) = two.done
    assert "plan for step" in done.cause and "Traceback" in done.traceback
    assert two.pids == before


def test_a_spare_takes_over_and_another_is_made() -> None:
    watched = Watched(tensor_parallel_size=2, spare_workers=1)
    try:
        launcher: Any = watched.llm._loop.crew.launcher
        (spare,) = launcher.spares
        before = watched.pids
        watched.llm._loop.handle(Report())
        assert [(p.role, p.pid) for p in watched.processes[-1].processes if p.role == "spare"] == [("spare", spare.pid)]
        assert watched.run(100, lambda: os.kill(before[1], signal.SIGKILL)) == watched.expected
        assert watched.pids == [before[0], spare.pid]
        assert [other.pid for other in launcher.spares] not in ([], [spare.pid])
    finally:
        watched.llm.close()
    assert not alive(launcher.spares[0].pid if launcher.spares else spare.pid)


def test_losses_that_lead_nowhere_end_the_engine() -> None:
    """A rank that dies each time before a token comes."""
    watched = Watched(distributed_executor_backend="mp", recovery_limit=2)
    loop: Any = watched.llm._loop
    try:
        plan = loop.core.plan

        def plan_and_kill(now: float) -> StepPlan | None:
            os.kill(watched.pids[0], signal.SIGKILL)
            return plan(now)

        loop.core.plan = plan_and_kill
        with pytest.raises(EngineDead, match=r"rank 0 failed in (step|idle): "):
            watched.run()
        assert len(watched.done) == 2
    finally:
        watched.llm.close()


def get(server: Server) -> dict[str, Any]:
    health: dict[str, Any] = httpx2.get(server.url + "/health").json()
    return health


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_notices_while_it_has_nothing_to_do(how: signal.Signals) -> None:
    """No request asks for the rank: another takes its place all the same, and the next request finds it."""
    with Server("smollm2", *SMALL, "-tp", "2") as server:
        engine = server.engine_pid()
        before = titled(engine, "worker")
        os.kill(before[1], how)
        wait_until("it is replaced", lambda: len(after := titled(engine, "worker")) == 2 and after[1] != before[1])
        wait_until("it says so", lambda: (get(server)["last_fault"] or {}).get("recovered"))
        health = get(server)
        assert titled(engine, "worker")[0] == before[0] and not alive(before[1])
        assert health["epoch"] == 1 and health["last_fault"]["ranks"] == [1] and health["last_fault"]["recovered"]
        body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx2.post(server.url + "/v1/completions", json=body, timeout=60).json()
        assert "Paris" in answer["choices"][0]["text"]


def test_spares_are_refused_where_nothing_can_keep_them() -> None:
    with pytest.raises(ConfigError, match="--spare-workers 1: spares are processes of one node"):
        LLM("smollm2", spare_workers=1)
