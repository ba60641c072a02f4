"""Under an outer launcher every process runs the same engine: the same tokens, the same plans, one end for all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from planaria import LLM
from planaria.config.options import EngineOptions
from planaria.config.resolve import resolve
from planaria.errors import CapacityError, EngineDead, RanksDiffer
from planaria.executor.launcher.external import ExternalLauncher
from planaria.executor.link.circle import Circle
from planaria.executor.link.faults import LinkError
from planaria.executor.link.spmd import SpmdLink
from planaria.executor.loop import EngineLoop
from planaria.mesh import meeting
from planaria.preload import GLOO
from planaria.protocol import StepPlan
from planaria.topology.outer import OuterLauncher
from planaria.types import SamplingParams
from planaria.wire import Cancel, Output, Submit
from planaria.worker.null import NullRank
from tests.forked import SERVER, begin
from tests.proc.servers import needs_smollm2, planaria, wait_until
from tests.proc.sockets import free_port
from tests.proc.test_nodes import PROMPTS, generate, lines_of, one_process

__all__ = ["generate", "one_process"]  # fixtures

pytestmark = needs_smollm2

SMALL = {"kv_cache_memory": "8MiB", "max_model_len": 1024, "dtype": "float32", "skip_tokenizer_init": True}
NULL = {"null_worker": True, "max_model_len": 1024}
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}


# -- in threads: rounds, and engines over them


class Board:
    """A Meeting in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.circles: list[Circle] = []
        self.changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout)
            return self.values[key]


def in_threads(size: int, program: Callable[[int, Board], Any]) -> list[Any]:
    """What `program(rank, board)` returns, or raises, for each rank."""
    board, found = Board(), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = program(rank, board)
        except Exception as e:
            found[rank] = e  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for circle in board.circles:
        circle.close()
    assert not any(thread.is_alive() for thread in threads)
    return found


def joined(rank: int, board: Board, size: int = 3) -> Circle:
    circle = Circle.open(rank, size, lambda: board, "127.0.0.1", heartbeat=5.0)
    board.circles.append(circle)
    return circle


@pytest.mark.row("P25")
def test_a_round_gives_everybodys_part_to_everybody() -> None:
    def program(rank: int, board: Board) -> list[object]:
        circle = joined(rank, board)
        found: list[object] = [circle.round("x", b"same", b"%d of round %d" % (rank, i), 30) for i in range(50)]
        found.append(circle.round("last", b"", b"x" * 5_000_000, 30))
        circle.round("bye", b"", b"", 30)
        circle.close()
        return found

    found = in_threads(3, program)
    assert found[0] == found[1] == found[2], found
    assert found[0][:-1] == [[b"%d of round %d" % (rank, i) for rank in range(3)] for i in range(50)]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_programs_that_come_apart_are_named_to_all(odd: int) -> None:
    def program(rank: int, board: Board) -> list[bytes]:
        circle = joined(rank, board)
        circle.round("step 1", b"same", b"", 30)
        return circle.round("step 2", b"other" if rank == odd else b"same", b"", 30)

    for error in in_threads(3, program):
        assert isinstance(error, LinkError)
        assert f"rank {odd or 1} differs from rank 0: it has another step 2, rank 0 has step 2" in str(error)


@pytest.mark.parametrize("leaver", [0, 2])
def test_who_leaves_is_named_to_all(leaver: int) -> None:
    def program(rank: int, board: Board) -> list[bytes]:
        circle = joined(rank, board)
        circle.round("step 1", b"same", b"", 30)
        if rank == leaver:
            circle.close()
            return []
        return circle.round("step 2", b"same", b"", 30)

    for rank, error in enumerate(in_threads(3, program)):
        if rank != leaver:
            assert isinstance(error, LinkError) and f"rank {leaver} has left" in str(error), error


class Spy(NullRank):
    """Notes its plans; one that is `slow` takes its time, at no fixed rhythm."""

    def __init__(self, boot: Any, slow: bool) -> None:
        super().__init__(boot)
        self.plans: list[StepPlan] = []
        self.slow = slow

    def handle(self, command: Any) -> Any:
        if isinstance(command, StepPlan):
            self.plans.append(command)
            if self.slow:
                time.sleep((command.step * 7 % 5) / 1000)
        return super().handle(command)


def engine(rank: int, board: Board, world: int, *, slow: bool = False, depth: int = 1, **more: Any) -> Any:
    """(loop, its rank's spy, what it emits), started; as one of `world` processes has it."""
    outer = OuterLauncher(rank=rank, world_size=world, local_world_size=world)
    options = {**NULL, "async_scheduling": depth > 1, "max_num_seqs": 4, **more}
    config = resolve(EngineOptions(model="smollm2", **options))  # type: ignore[arg-type]
    config = replace(config, parallel=replace(config.parallel, tensor_parallel_size=world))
    heard: list[Any] = []
    launcher = ExternalLauncher(outer, lambda boot: Spy(boot, slow), lambda address: joined(rank, board, world))

    def link_for(places: Any, epoch: int) -> SpmdLink:
        assert launcher.circle is not None
        link = SpmdLink(launcher.circle, launcher.ranks, lambda why: None)
        loop.clock, loop.agree = link.clock, link.agree
        return link

    loop = EngineLoop(config, launcher, link_for, heard.append)  # type: ignore[arg-type]
    loop.start()
    return loop, launcher.ranks[0], heard


@pytest.mark.parametrize(("world", "depth"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.row("P25")
def test_engines_plan_alike(world: int, depth: int) -> None:
    """Whatever time ranks take, and with seeds that each process draws for itself: rank 0's hold."""

    def program(rank: int, board: Board) -> tuple[list[StepPlan], list[Any], list[int]]:
        loop, spy, heard = engine(rank, board, world, slow=rank == 1, depth=depth)
        for i in range(12):
            prompt = [1 + i] * (3 + 20 * i)
            loop.handle(Submit(f"r{i}", prompt, SamplingParams(), seed=1000 * rank + i, max_tokens=5 + i))
            if i % 3 == 2:
                loop.step()
        loop.handle(Cancel("r4"))
        end = time.monotonic() + 60
        while loop.busy():
            assert time.monotonic() < end, "it is busy for ever"
            loop.step()
        loop.close()
        deltas = [delta for message in heard if isinstance(message, Output) for delta in message.deltas]
        seeds = [row.fresh.seed for plan in spy.plans for row in plan.lanes[0] if row.fresh is not None]
        return spy.plans, [(d.request_id, d.index, d.tokens, d.finish) for d in deltas], seeds

    found = in_threads(world, program)
    assert not any(isinstance(each, Exception) for each in found), found
    assert all(each == found[0] for each in found)
    plans, deltas, seeds = found[0]
    assert len(plans) > 20 and len(deltas) > 20
    assert set(seeds) <= set(range(12))  # rank 0's


def test_programs_that_ask_for_different_things_are_told_so() -> None:
    def program(rank: int, board: Board) -> None:
        loop, *_ = engine(rank, board, 2)
        try:
            loop.handle(Submit("r0", [1, 2, 3 + rank], SamplingParams(), seed=1, max_tokens=5))
        finally:
            loop.close()

    for error in in_threads(2, program):
        assert isinstance(error, EngineDead)
        assert "rank 1 differs from rank 0: it has another request r0, rank 0 has request r0" in str(error)


def test_configurations_that_differ_are_refused_by_field() -> None:
    for error in in_threads(2, lambda rank, board: engine(rank, board, 2, max_num_seqs=4 + rank)):
        assert isinstance(error, RanksDiffer), error
        assert "rank 1" in str(error) and "differs in configuration scheduler.max_" in str(error)


# -- in processes


WITH_GLOO = (*SERVER, *GLOO, "planaria.llm")


class Program:
    """tests.proc.spmd_program in `size` processes that an outer launcher would have started."""

    def __init__(
        self, folder: Path, size: int, model: str, params: list[dict[str, Any]], options: dict[str, Any], **more: Any
    ) -> None:
        self.folder, self.size = folder, size
        folder.mkdir(exist_ok=True)
        text = json.dumps({"model": model, "prompts": PROMPTS, "params": params, "options": options, **more})
        port = str(free_port())
        env = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = ["tests.proc.spmd_program", str(folder), text]
        self.processes = [
            begin(command, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, together=True, modules=WITH_GLOO)
            for rank in range(size)
        ]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)

    def wait_begun(self) -> None:
        """Until every rank has tokens."""
        files = [self.folder / f"begun {rank}" for rank in range(self.size)]
        wait_until(f"tokens on every rank: {self.output()}", lambda: all(file.exists() for file in files), limit=240)

    def output(self) -> list[str]:
        return [str(p.stdout.read()) for p in self.processes if p.poll() is not None and p.stdout is not None]

    def wait(self, *ranks: int, seconds: float = 300.0) -> list[dict[str, Any]]:
        """What these ranks (none named: all) saw."""
        found = []
        for rank in ranks or range(self.size):
            output, _ = self.processes[rank].communicate(timeout=seconds)
            assert (self.folder / f"{rank}.json").exists(), output
            found.append(json.loads((self.folder / f"{rank}.json").read_text()))
        return found


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    """`planaria` as two processes of it."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         "-m", "planaria", *words, "--distributed-executor-backend", "external_launcher"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.row("P26", "X5")
def test_torchrun_gives_the_same_tokens_and_one_process_prints(generate: list[str], one_process: list[object]) -> None:
    run = torchrun(*generate, "-tp", "2")
    lines = lines_of(run.stdout)
    assert [line["token_ids"] for line in lines] == one_process, run.stderr
    assert (lines[0]["executor"], lines[0]["link"], lines[0]["layout"]) == ("external_launcher", "spmd", "tp=2 pp=1")


@pytest.mark.row("P26", "P2")
def test_torchrun_starts_engines_of_a_dense_model(generate: list[str], one_process: list[object]) -> None:
    """Each has a part of the prompts, and prints it."""
    run = torchrun(*generate, "-dp", "2")
    lines = sorted(lines_of(run.stdout), key=lambda line: line["index"])
    assert [line["token_ids"] for line in lines] == one_process, run.stderr
    assert {line["layout"] for line in lines} == {"tp=1 pp=1"}
    assert {tuple(line["ranks"]) for line in lines[::2]}.isdisjoint(tuple(line["ranks"]) for line in lines[1::2])


def test_an_engine_of_one_process_needs_none_of_the_others(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    """The first may have ended before it began."""
    monkeypatch.setattr(meeting, "TIMEOUT", 0.1)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    options = {**NULL, "data_parallel_size": 2, "skip_tokenizer_init": True}
    with LLM(str(small), distributed_executor_backend="external_launcher", **options) as llm:
        assert len(llm.facts.ranks) == 1


def test_where_nobody_serves_the_store_it_is_said_who_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the first engine's program is over before the second has come."""
    monkeypatch.setattr(meeting, "TIMEOUT", 0.1)
    second = OuterLauncher(
        rank=0, world_size=2, replica=1, replicas=2, master_addr="127.0.0.1", master_port=free_port()
    )
    with pytest.raises(CapacityError, match="RANK 0 serves it, and has not come, or has ended"):
        meeting.OuterStore(second)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
@pytest.mark.row("P26", "X5")
def test_what_is_started_again_goes_on_from_the_journal(tmp_path: Path, small: Path, victim: int) -> None:
    """A rank is killed in the middle of a step, in which the others wait for it: its name is everybody's error. The
    outer launcher starts all processes again; what had come is not computed again."""
    journal = tmp_path / "journal"
    long = {**LONG, "max_tokens": 300}
    options = {**SMALL, "tensor_parallel_size": 2}
    with Program(tmp_path / "before", 2, str(small), [long, *[LONG] * 9], options, journal=str(journal)) as program:
        program.wait_begun()
        wait_until("tokens are noted", lambda: len(journal.read_bytes().splitlines()) > 50)
        program.processes[victim].kill()
        killed = time.monotonic()
        (error,) = program.wait(1 - victim, seconds=60)
        assert time.monotonic() - killed < 30.0
    assert f"EngineDead: rank {victim} failed in step" in error["error"], error["error"]
    with Program(tmp_path / "after", 2, str(small), [long, long], options, journal=str(journal)) as program:
        seen = program.wait()
    for each in seen:
        assert each["tokens"][0] == each["tokens"][1], each.get("error")
        assert 0 < each["came"][0] <= each["came"][1] - 40


def test_a_program_sees_the_same_in_every_process(tmp_path: Path, small: Path, one_process: list[object]) -> None:
    """Stages; greedy, and sampled with seeds that nobody gave."""
    sampled = {"temperature": 1.0, "max_tokens": 12, "n": 2}
    options = {**SMALL, "pipeline_parallel_size": 2}
    with Program(tmp_path, 2, str(small), [GREEDY, sampled], options) as program:
        seen = program.wait()
        assert [process.returncode for process in program.processes] == [0, 0]
    assert seen[0]["tokens"] == seen[1]["tokens"] and seen[0]["hashes"] == seen[1]["hashes"]
    assert len(seen[0]["hashes"]) > 20
    assert seen[0]["pids"] == seen[1]["pids"] == [seen[0]["pid"], seen[1]["pid"]]
    assert [tokens for (tokens,) in seen[0]["tokens"][0]] == one_process


def test_a_stopped_ranks_name_is_everybodys_error(tmp_path: Path) -> None:
    options = {**NULL, "tensor_parallel_size": 3, "heartbeat_timeout": 2.0}
    with Program(tmp_path, 3, "smollm2", [LONG] * 2000, options) as program:
        program.wait_begun()
        program.processes[1].send_signal(signal.SIGSTOP)
        for seen in program.wait(0, 2, seconds=60):
            assert "rank 1 failed in step" in seen["error"], seen["error"]


def test_what_is_refused() -> None:
    """Without an outer launcher; a server."""
    backend = ["-tp", "2", "--distributed-executor-backend", "external_launcher"]
    run = planaria("generate", "smollm2", "-p", "x", *backend)
    assert run.returncode == 2 and "RANK is not set in the environment; start it with torchrun" in run.stderr
    run = planaria("serve", "smollm2", *backend, env={"RANK": "0", "WORLD_SIZE": "2"})
    assert run.returncode == 2 and "which planaria serve is not" in run.stderr
