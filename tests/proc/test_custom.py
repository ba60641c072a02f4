"""collective_rpc on every rank, and classes by import path: launcher, worker, extension."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria import LLM, AsyncLLM, SamplingParams
from planaria.errors import CallFailed, EngineDead, PlanariaError, UserError
from planaria.executor import status
from planaria.wire import Report
from tests.proc import custom
from tests.proc.servers import SMALL, alive, needs_smollm2, planaria, wait_until

pytestmark = needs_smollm2

HERE = custom.__name__
OPTIONS: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_model_len": 512, "skip_tokenizer_init": True}
PROMPT = [5, 6, 7]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def two(small: Path) -> Iterator[LLM]:
    """Two tensor ranks made by a custom launcher, of a custom worker class with an extension."""
    with LLM(
        str(small), tensor_parallel_size=2, distributed_executor_backend=custom.NiceLauncher,
        worker_cls=f"{HERE}.CountingWorker", worker_extension_cls=f"{HERE}.Extension", **OPTIONS,
    ) as llm:  # fmt: skip
        yield llm


@pytest.mark.row("P17", "X9")
def test_every_rank_answers_in_rank_order(two: LLM) -> None:
    pids = two.facts.ranks
    assert two.collective_rpc("where") == [[0, pids[0], 2], [1, pids[1], 2]]
    assert two.collective_rpc("where", kwargs={"add": 5}) == [[5, pids[0], 2], [6, pids[1], 2]]
    assert os.getpid() not in pids


@pytest.mark.row("X6")
def test_the_launcher_is_the_custom_one(two: LLM) -> None:
    assert two.facts.executor == "nice"
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in two.facts.ranks] == [5, 5]


@pytest.mark.row("P17", "X6")
def test_the_worker_is_the_custom_one(two: LLM) -> None:
    two.generate([PROMPT], GREEDY)
    for commands in two.collective_rpc("what_came"):
        assert commands[:3] == ["Join", "Regroup", "Load"] and "StepPlan" in commands and commands[-1] == "Call"


@pytest.mark.row("X9")
def test_a_call_is_ordered_with_the_steps_in_flight(two: LLM) -> None:
    """From inside a generation: it is done between two steps, on both ranks after the same one."""
    seen: list[list[list[str]]] = []

    def ask(done: int, tokens: int) -> None:
        if tokens and not done:
            seen.append(two.collective_rpc("what_came"))

    alone = two.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    assert two.generate([PROMPT], GREEDY, on_tokens=ask)[0].outputs[0].token_ids == alone
    assert len(seen) >= 3
    for first, second in seen:
        assert first == second and first[-2:] == ["StepPlan", "Call"]


def test_a_failure_names_the_rank_and_the_engine_goes_on(two: LLM) -> None:
    for rank in (0, 1):
        with pytest.raises(CallFailed, match=f"fail_on failed on rank {rank}: ValueError: as asked") as e:
            two.collective_rpc("fail_on", args=(rank,))
        assert "in fail_on" in e.value.traceback
    assert two.collective_rpc("fail_on", args=(2,)) == ["fine", "fine"]
    assert len(two.generate([PROMPT], GREEDY)[0].outputs[0].token_ids) == 8


@pytest.mark.row("X7")
def test_a_timeout_leaves_the_call_running(two: LLM, tmp_path: Path) -> None:
    path = tmp_path / "go"
    pending = two._loop.call("wait_for", (str(path),))
    with pytest.raises(TimeoutError, match="wait_for was not done"):
        pending.result(timeout=0.05)
    assert not pending.done()
    with pytest.raises(TimeoutError):
        two.collective_rpc("where", timeout=0.05)  # it waits behind the other
    path.touch()
    assert pending.result(timeout=60) == ["done", "done"] and pending.done()
    assert pending.result() == ["done", "done"]
    assert [answer[0] for answer in two.collective_rpc("where")] == [0, 1]


@pytest.mark.row("X7")
def test_a_timeout_on_a_rank_of_this_process(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "go"
    with LLM(
        str(small), distributed_executor_backend="uni", worker_extension_cls=f"{HERE}.Extension", **OPTIONS
    ) as llm:
        with pytest.raises(TimeoutError, match="wait_for was not done"):
            llm.collective_rpc("wait_for", timeout=0.05, args=(str(path),))
        path.touch()
        assert len(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids) == 8, "after the call, and not beside it"
        assert llm.collective_rpc("fail_on", timeout=60, args=(2,)) == ["fine"]


@pytest.mark.parametrize(
    ("method", "args", "says"),
    [
        ("nothing", (), "no method 'nothing'"),
        ("_exit", (), "no method '_exit'"),  # the worker's own
        ("rank", (), "no method 'rank'"),
        ("something", (), "must give back plain data"),
        ("where", (object(),), "no message can hold a object"),
    ],
)
def test_refused_calls(two: LLM, method: str, args: tuple[Any, ...], says: str) -> None:
    with pytest.raises(PlanariaError, match=says):
        two.collective_rpc(method, args=args)
    assert len(two.collective_rpc("where")) == 2


def test_ranks_that_cannot_be_looked_into_say_their_memory(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of another node; asked after the steps that are on their way."""
    heard: list[Any] = []
    monkeypatch.setattr(status, "here", lambda member: False)
    monkeypatch.setattr(two._loop, "emit", heard.append)
    two._loop.handle(Report())
    assert not heard
    wait_until("they have said it", lambda: (two._loop.step(), heard)[1])
    (answer,) = heard
    assert [row.pid for row in answer.processes[1:]] == two.facts.ranks
    assert all(row.resident > 10 << 20 and row.state == "idle" for row in answer.processes)


def test_a_rank_that_ends_during_a_call(small: Path) -> None:
    with LLM(str(small), tensor_parallel_size=2, worker_extension_cls=f"{HERE}.Extension", **OPTIONS) as llm:
        with pytest.raises(CallFailed, match="end did not finish: rank 1 failed in call: its process ended with exit"):
            llm.collective_rpc("end", args=(1,))
        pids = [pid for _, pid, _ in llm.collective_rpc("where", kwargs={"add": 0})]  # the next one works
        assert pids[0] == llm.facts.ranks[0] and pids[1] != llm.facts.ranks[1]
    assert not any(alive(pid) for pid in [*pids, *llm.facts.ranks])


def test_a_rank_that_was_killed_while_idle() -> None:
    options = {"null_worker": True, "skip_tokenizer_init": True, "worker_extension_cls": f"{HERE}.Extension"}
    with LLM("smollm2", tensor_parallel_size=2, recovery_limit=0, **options) as llm:
        os.kill(llm.facts.ranks[1], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"rank 1 failed in (call|idle): its process was killed by signal 9"):
            llm.collective_rpc("fail_on", args=(2,))


def test_ranks_are_asked_beside_streams_of_asyncio(small: Path, tmp_path: Path) -> None:
    """Between two steps; the event loop goes on meanwhile."""
    engine = AsyncLLM(str(small), tensor_parallel_size=2, worker_extension_cls=f"{HERE}.Extension", **OPTIONS)
    ask, path = engine.collective_rpc, tmp_path / "go"

    async def tokens() -> list[int]:
        return [token async for piece in engine.generate(PROMPT, GREEDY) for token in piece.token_ids]

    async def main() -> None:
        alone = await tokens()
        assert [await tokens(), [rank for rank, _, _ in await ask("where")]] == [alone, [0, 1]]
        with pytest.raises(TimeoutError, match=r"wait_for was not done on every rank in 0\.05 s"):
            await ask("wait_for", 0.05, [str(path)])
        after = [asyncio.create_task(each) for each in (ask("where", kwargs={"add": 5}), tokens())]
        path.touch()
        assert [rank for rank, _, _ in await after[0]] == [5, 6] and await after[1] == alone
        with pytest.raises(CallFailed, match="fail_on failed on rank 1: ValueError: as asked"):
            await ask("fail_on", args=(1,))
        with pytest.raises(PlanariaError, match="no message can hold a object"):
            await ask("where", args=(object(),))
        with pytest.raises(UserError, match="no method 'nothing'"):
            await ask("nothing")
        await engine.sleep()
        assert await ask("fail_on", args=(2,)) == ["fine", "fine"]
        await engine.wake_up()
        with pytest.raises(CallFailed, match="end did not finish: rank 1 failed in call"):
            await ask("end", args=(1,))
        assert await tokens() == alone
        engine.close()
        with pytest.raises(EngineDead, match="the engine was closed"):
            await ask("where")

    try:
        asyncio.run(asyncio.wait_for(main(), 120))
    finally:
        engine.close()


def test_a_launcher_may_hold_its_ranks_itself() -> None:
    options = {"null_worker": True, "skip_tokenizer_init": True}
    with LLM("smollm2", distributed_executor_backend=f"{HERE}.OwnLauncher", **options) as llm:
        assert (llm.facts.executor, llm.facts.link, llm.facts.ranks) == ("own", "direct", [os.getpid()])
        assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].finish_reason == "length"


def test_one_rank_in_process_answers_the_same_way(small: Path) -> None:
    with LLM(str(small), worker_extension_cls=f"{HERE}.Extension", **OPTIONS) as llm:
        assert llm.collective_rpc("where", None, (), {"add": 1}) == [[1, os.getpid(), 1]]
        with pytest.raises(UserError, match="plain data"):
            llm.collective_rpc("something")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"worker_extension_cls": f"{HERE}.ClashesWithMethod"}, "has handle already; give them other names"),
        ({"worker_extension_cls": f"{HERE}.ClashesWithField"}, "has model already; give them other names"),
        ({"worker_extension_cls": f"{HERE}.Nobody"}, "can't be imported"),
        ({"worker_cls": "nowhere.at.All"}, "can't be imported: No module named 'nowhere'; write package.module.Class"),
        ({"worker_cls": f"{HERE}.NotAWorker"}, "has no method handle"),
    ],
)
@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_class_that_cannot_be_a_worker_is_refused(options: dict[str, Any], says: str, backend: str) -> None:
    with pytest.raises(UserError, match=says):
        LLM("smollm2", distributed_executor_backend=backend, **options, **OPTIONS)


def test_a_worker_that_fails_to_begin_says_why() -> None:
    with pytest.raises(EngineDead, match="rank 0 failed in launch: RuntimeError: no licence"):
        LLM("smollm2", distributed_executor_backend="mp", worker_cls=f"{HERE}.FailsToBegin", **OPTIONS)


def test_the_command_line_refuses_in_one_line() -> None:
    """Also where the rank that says so is two processes away."""
    extension = ["--worker-extension-cls", f"{HERE}.ClashesWithMethod"]
    for command in (["generate", "smollm2", "--prompt", "x"], ["serve", "smollm2", "--port", "0"]):
        run = planaria(*command, *SMALL, *extension, "--distributed-executor-backend", "mp")
        assert run.returncode == 2, run.stderr
        assert run.stderr.strip().splitlines()[-1].startswith("planaria: --worker-extension-cls")
        assert "Traceback" not in run.stderr
