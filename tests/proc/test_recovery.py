"""A rank that dies, stops or fails while requests run: they go on, with the same tokens. The model is the real one
where what it computes or holds is looked at; else a small one, or none, where it is how ranks are kept."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from planaria import LLM, AsyncLLM, SamplingParams
from planaria.errors import ConfigError, EngineDead
from planaria.executor import loop as loop_module
from planaria.executor.recovery import is_replayed
from planaria.protocol import StepPlan
from planaria.server.detokenise import Detokenizer
from planaria.wire import FromEngine, Processes, Recovery, Report
from tests.model.engines import texts
from tests.proc import custom
from tests.proc.servers import PATIENCE, Server, alive, needs_smollm2, titled, wait_until

pytestmark = needs_smollm2

OPTIONS = {"kv_cache_memory": "128MiB", "max_model_len": 1024, "dtype": "float32"}
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, seed=5)
SLACK = 4096  # bytes: a page
FAULT = 65536  # bytes, as the kernel does it by default
PROMPTS = ["Once upon a time", "The capital of France is", "1 2 3 4", "def f(n):"]
NO_MODEL = {**custom.HASHED, "kv_cache_memory": None}


class Watched:
    """An LLM, and what it was told of recoveries."""

    def __init__(self, model: str = "smollm2", prompts: Sequence[str | list[int]] = PROMPTS, **options: Any) -> None:
        self.llm, self.prompts = LLM(model, **{**OPTIONS, **options}), prompts
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
        return [member.pid for member in self.llm._loop.gang.members]

    @property
    def done(self) -> list[Recovery]:
        return [message for message in self.heard if message.seconds and not is_replayed(message)]

    @property
    def replayed(self) -> list[Recovery]:
        return [message for message in self.heard if is_replayed(message)]

    def run(self, at: int = 0, harm: Any = None) -> list[list[int]]:
        """All prompts; `harm` is called once, when more than `at` tokens have come."""
        count, left = 0, [harm] if harm is not None else []

        def count_up(done: int, tokens: int) -> None:
            nonlocal count
            count += tokens
            if count > at and left:
                left.pop()()

        outputs = self.llm.generate(self.prompts, PARAMS, on_tokens=count_up)
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
        return [output.outputs[0].token_ids for output in outputs]


def watched_small(small: Path, **options: Any) -> Watched:
    """Of a random model of two layers, with all that ranks do with one."""
    prompts = [prompt for prompt, _ in texts(131, [(5, 0), (30, 0), (1, 0), (12, 0)])]
    few = {"kv_cache_memory": "8MiB", "max_model_len": 256, "max_num_seqs": 8, "skip_tokenizer_init": True}
    return Watched(str(small), prompts, **few, **options)


@contextlib.contextmanager
def each_once(make: Callable[[str], Watched]) -> Iterator[Callable[[str], Watched]]:
    """Engines by name, each from when it is first asked for to the end of the block."""
    made: dict[str, Watched] = {}

    def engine(name: str) -> Watched:
        if name not in made:
            made[name] = make(name)
        return made[name]

    try:
        yield engine
    finally:
        for each in made.values():
            each.llm.close()


@pytest.fixture(scope="module")
def engines(small: Path) -> Iterator[Callable[[str], Watched]]:
    def make(name: str) -> Watched:
        size = SIZES[name.split()[-1]]
        return watched_small(small, **size) if name.startswith("small") else Watched(**size)

    with each_once(make) as engine:
        yield engine


@pytest.fixture
def two(request: pytest.FixtureRequest, engines: Callable[[str], Watched]) -> Watched:
    """Two ranks."""
    return engines(request.param)


SIZES = {"tp": {"tensor_parallel_size": 2}, "pp": {"pipeline_parallel_size": 2}}
NAMES = ("tp", "pp", "small pp")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
DEFAULT = {("tp", 0, KILL), ("small pp", 1, STOP)}
CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.long)
    for case in itertools.product(NAMES, (0, 1), (KILL, STOP))
]


def on(default: str) -> pytest.MarkDecorator:
    """This one, and the others where long tests are asked for."""
    names = [name if name == default else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
    return pytest.mark.parametrize("two", names, indirect=True)


on_real = pytest.mark.parametrize("two", ["tp", pytest.param("pp", marks=pytest.mark.long)], indirect=True)


@pytest.mark.parametrize(("two", "victim", "how"), CASES, indirect=["two"])
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


class Reads:
    """What a process has read so far. calls: bytes, from files and pipes alike. storage: bytes that files had to be
    fetched for. faults: pages touched for the first time; each brings in at most FAULT bytes of a mapped file. mapped:
    bytes of files in its memory."""

    def __init__(self, pid: int) -> None:
        io, status = (
            dict(line.split(":", 1) for line in Path(f"/proc/{pid}/{name}").read_text().splitlines() if ":" in line)
            for name in ("io", "status")
        )
        self.calls, self.storage = int(io["rchar"]), int(io["read_bytes"])
        self.mapped = int(status["RssFile"].split()[0]) * 1024
        self.faults = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


@on_real
def test_survivors_keep_their_weights_and_read_no_file(two: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was committed is computed again. What a rank reads in a recovery is its boot, from the engine's
    pipe, and how much memory is free. It maps no part of the checkpoint again, nor does it touch one that was still
    mapped."""
    launcher: Any = two.llm._loop.gang.launcher
    boots: list[int] = []
    run = launcher.run
    monkeypatch.setattr(launcher, "run", lambda made: (boots.append(8 + len(made[0].encode())), run(made)))
    weights = two.llm.facts.weight_bytes
    survivor, victim = two.pids
    before = Reads(survivor)
    two.heard.clear()
    assert two.run(100, lambda: os.kill(victim, signal.SIGKILL)) == two.expected
    after = Reads(survivor)
    assert two.pids[0] == survivor and len(boots) == 1
    assert [(done.requests, done.tokens) for done in two.done] == [(len(PROMPTS), 0)]
    assert 0 <= after.calls - before.calls - boots[0] <= len(Path("/proc/meminfo").read_bytes()) + SLACK
    assert after.storage - before.storage <= SLACK and after.mapped - before.mapped < weights // 20
    assert (after.faults - before.faults) * FAULT < weights // 4  # a rank has half of them
    new = Reads(two.pids[1])
    assert new.calls > 10 * (after.calls - before.calls)  # which a rank that begins can't do without


@on("small pp")
def test_a_rank_that_is_stopped_while_another_dies_keeps_nobody_waiting(two: Watched) -> None:
    """Both are told of the next epoch, which is more than the pipe to one that reads nothing takes."""
    before, launcher = two.pids, two.llm._loop.gang.launcher
    two.heard.clear()
    for child in launcher.pool.ranks.values():  # type: ignore[attr-defined]
        fcntl.fcntl(child.stdin, fcntl.F_SETPIPE_SZ, 4096)

    def harm() -> None:
        os.kill(before[1], signal.SIGSTOP)
        os.kill(before[0], signal.SIGKILL)

    assert two.run(100, harm) == two.expected
    assert not {*before} & {*two.pids} and not any(map(alive, before))


@on("small pp")
def test_a_rank_that_dies_while_idle_is_replaced(two: Watched) -> None:
    before = two.pids
    two.heard.clear()
    os.kill(before[0], signal.SIGKILL)
    assert two.run() == two.expected
    assert len(two.done) == 1 and two.pids[1] == before[1]


@on("tp")
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


@on_real
def test_what_is_wrong_with_a_request_is_its_own_matter(two: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may draw no token at all, one's stop rule raises: each fails by itself. No epoch ends, no rank notices."""
    two.heard.clear()
    before = two.pids
    vocabulary = two.llm.facts.vocab_size
    choiceless = msgspec.structs.replace(PARAMS, bad_words_ids=tuple((token,) for token in range(vocabulary)))
    stopping = msgspec.structs.replace(PARAMS, stop=("no such text",))
    push = Detokenizer.push

    def raises(self: Detokenizer, tokens: list[int]) -> str:
        if self._stops is not None:
            raise ValueError("a rule of its own")
        return push(self, tokens)

    monkeypatch.setattr(Detokenizer, "push", raises)
    outputs = two.llm.generate(["one", "two", *PROMPTS], [choiceless, stopping, *[PARAMS] * len(PROMPTS)])
    first, second, *others = [output.outputs[0] for output in outputs]
    assert first.finish_reason == second.finish_reason == "error"
    assert "every token is banned" in (first.error or "") and "ValueError: a rule of its own" in (second.error or "")
    assert [output.token_ids for output in others] == two.expected
    assert two.heard == [] and two.pids == before


def test_a_spare_takes_over_and_another_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "SPARES_AFTER", 10 * PATIENCE)  # however long the replay takes here
    watched = Watched(**NO_MODEL, tensor_parallel_size=2, spare_workers=1)
    try:
        launcher: Any = watched.llm._loop.gang.launcher
        (spare,) = launcher.pool.spares
        before = watched.pids
        watched.llm._loop.handle(Report())
        listed = [(p.role, p.pid) for p in watched.processes[-1].processes if p.role == "spare"]
        assert listed == [("spare", spare.place.pid)]
        loop, others = watched.llm._loop, list[tuple[bool, int]]()
        hear = loop.emit

        def listen(message: FromEngine) -> None:
            if isinstance(message, Recovery) and message.seconds:
                others.append(("replay" in message.seconds, len(launcher.pool.spares)))
            hear(message)

        loop.emit = listen
        assert watched.run(100, lambda: os.kill(before[1], signal.SIGKILL)) == watched.expected
        assert others == [(False, 0), (True, 0)], "the cores were not left to the replay"
        assert watched.pids == [before[0], spare.place.pid]
        assert [other.place.pid for other in launcher.pool.spares] not in ([], [spare.place.pid])
    finally:
        watched.llm.close()
    assert not alive((launcher.pool.spares[0] if launcher.pool.spares else spare).place.pid)


def test_losses_that_lead_nowhere_end_the_engine() -> None:
    """A rank that dies each time before a token comes."""
    watched = Watched(distributed_executor_backend="mp", recovery_limit=2, null_worker=True, kv_cache_memory=None)
    loop: Any = watched.llm._loop
    try:
        plan = loop.core.plan

        def plan_and_kill(now: float) -> StepPlan | None:
            with contextlib.suppress(ProcessLookupError):  # the one killed before may still be the rank's
                os.kill(watched.pids[0], signal.SIGKILL)
            return plan(now)

        loop.core.plan = plan_and_kill
        with pytest.raises(EngineDead, match=r"rank 0 failed in (step|idle): "):
            watched.run()
        assert len(watched.done) == 2
    finally:
        watched.llm.close()


def test_async_llm_looks_after_its_ranks_while_idle() -> None:
    """Nobody asks for anything: a rank is killed, then the other stopped, and each is replaced all the same."""
    llm = AsyncLLM("smollm2", **OPTIONS | NO_MODEL, tensor_parallel_size=2)

    def pids() -> list[int]:
        return [member.pid for member in llm._loop.gang.members]

    async def ask() -> list[int]:
        return [token async for piece in llm.generate(PROMPTS[1], PARAMS) for token in piece.token_ids]

    try:
        expected, before = asyncio.run(ask()), pids()
        os.kill(before[1], signal.SIGKILL)
        wait_until("the first is replaced", lambda: llm.stats.epoch == 1)
        os.kill(before[0], signal.SIGSTOP)
        wait_until("the second, too", lambda: llm.stats.epoch == 2)
        assert set(before).isdisjoint(pids()) and not any(map(alive, before))
        assert asyncio.run(ask()) == expected
    finally:
        llm.close()


def test_a_rank_out_of_memory_goes_on_with_less_kv() -> None:
    """Once: with as many blocks as before it would run out again."""
    size = 100  # bytes, and blocks: this worker's take one each
    watched = Watched(
        worker_cls=f"{custom.__name__}.Overcommitted", distributed_executor_backend="mp", max_model_len=512,
        kv_cache_memory=size,
    )  # fmt: skip
    try:
        before = watched.pids
        assert watched.llm._loop.gang.num_blocks == size
        assert watched.run() == watched.expected
        (done,) = watched.done
        assert done.cause == "out of memory while step" and watched.pids == before
        assert watched.llm._loop.gang.num_blocks == int(0.8 * size)
        assert watched.run() == watched.expected and len(watched.done) == 1
    finally:
        watched.llm.close()


def get(server: Server) -> dict[str, Any]:
    health: dict[str, Any] = httpx2.get(server.url + "/health").json()
    return health


def ask(server: Server) -> list[int]:
    body = {"model": "smollm2", "prompt": PROMPTS[1], "max_tokens": 20, "seed": 3, "return_token_ids": True}
    answer = httpx2.post(server.url + "/v1/completions", json=body, timeout=60).json()
    return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize("how", [pytest.param(KILL, marks=pytest.mark.long), STOP])
def test_a_server_notices_while_it_has_nothing_to_do(how: signal.Signals) -> None:
    """No request asks for the rank: another takes its place all the same, and the next request finds it."""
    options = ["--worker-cls", custom.HASHED["worker_cls"], "--max-model-len", "512", "-tp", "2"]
    with Server("smollm2", *options) as server:
        engine, expected = server.engine_pid(), ask(server)
        before = titled(engine, "worker")
        os.kill(before[1], how)
        wait_until("it is replaced", lambda: len(after := titled(engine, "worker")) == 2 and after[1] != before[1])
        wait_until("it says so", lambda: (get(server)["last_fault"] or {}).get("recovered"))
        health = get(server)
        assert titled(engine, "worker")[0] == before[0] and not alive(before[1])
        assert health["epoch"] == 1 and health["last_fault"]["ranks"] == [1] and health["last_fault"]["recovered"]
        assert ask(server) == expected


def test_spares_are_refused_where_nothing_can_keep_them() -> None:
    with pytest.raises(ConfigError, match="--spare-workers 1: spares are for ranks of mp and ray"):
        LLM("smollm2", spare_workers=1)
