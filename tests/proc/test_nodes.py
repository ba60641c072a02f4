"""Several nodes without Ray: the same command on each. Here two on this machine, and two with networks of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from planaria import LLM, AsyncLLM, SamplingParams
from planaria.config.options import ParallelConfig
from planaria.config.secret import deployment_secret
from planaria.errors import CapacityError, ConfigError, EngineDead, RanksDiffer
from planaria.executor import new_weights
from planaria.executor.launcher.nodes import NodesLauncher, placement_of
from planaria.executor.node_messages import Here
from planaria.topology import Layout
from tests.forked import begin
from tests.model import checkpoints
from tests.proc import networks
from tests.proc.servers import PATIENCE, SOON, TINY, alive, needs_smollm2, planaria, wait_until
from tests.proc.sockets import free_port
from tests.proc.test_shared_weights import parts

pytestmark = needs_smollm2

SECRET = b"a secret of at least thirty-two bytes, for tests"
SHARED = {"PLANARIA_SECRET": SECRET.decode()}
EQUAL = {"model": "the same"}
NULL = ["smollm2", "--max-model-len", "1024", "--dtype", "float32", "--null-worker"]
PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15]]


class Command:
    """A `planaria` command in the background; `text()` is all that it has printed."""

    def __init__(self, *args: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> None:
        self.process = begin(["planaria", *args], env, together=True) if not prefix else subprocess.Popen(
            [*prefix, sys.executable, "-m", "planaria", *args],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.lines: list[str] = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True)
        self.reader.start()

    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, words: str, seconds: float = 180.0) -> None:
        """Until it has printed them."""
        end = time.monotonic() + seconds
        while words not in self.text():
            assert time.monotonic() < end and self.process.poll() is None, self.text()
            time.sleep(0.02)

    def wait(self, seconds: float = 120.0) -> int:
        code = self.process.wait(seconds)
        self.reader.join(5)
        return code

    def ranks(self) -> list[int]:
        """Pids of workers below it, with a title already or not yet."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [p.pid for p in found if "worker" in " ".join(p.cmdline())]

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def agent(port: int, *more: str, nnodes: int = 2, env: dict[str, str] | None = None) -> Command:
    """Node 1 on this machine. Its ranks compute nothing."""
    nodes = ["--nnodes", str(nnodes), "--node-rank", "1", "--master-port", str(port)]
    return Command("serve", *NULL, "-pp", str(nnodes), *nodes, *more, env=env)


def engine(port: int, **more: object) -> LLM:
    """Whose ranks compute nothing, and which ends with the first loss."""
    return LLM(
        "smollm2", max_model_len=1024, dtype="float32", null_worker=True, nnodes=2,
        pipeline_parallel_size=2, master_port=port, recovery_limit=0, **more,
    )  # fmt: skip


def lines_of(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def generate(small: Path) -> list[str]:
    """A command."""
    words = [word for prompt in PROMPTS for word in ("--prompt-token-ids", ",".join(map(str, prompt)))]
    return ["generate", str(small), *TINY, *words, "--max-tokens", "16", "--ignore-eos", "--json"]


@pytest.fixture(scope="module")
def one_process(generate: list[str]) -> list[object]:
    """Tokens of the plain run."""
    return [line["token_ids"] for line in lines_of(planaria(*generate, timeout=300).stdout)]


# -- ranks that compute


@pytest.mark.row("P18")
@pytest.mark.parametrize("axis", ["-pp", pytest.param("-pcp", marks=pytest.mark.long)])
def test_two_nodes_on_one_machine_give_the_same_tokens(
    generate: list[str], one_process: list[object], axis: str
) -> None:
    args = [*generate, axis, "2", "--nnodes", "2", "--master-port", str(free_port())]
    with Command(*args, "--node-rank", "1") as other:
        run = planaria(*args, timeout=300)
        assert other.wait() == 0, other.text()
    lines = lines_of(run.stdout)
    assert [line["token_ids"] for line in lines] == one_process, run.stderr
    assert lines[0]["executor"] == "mp" and len(set(lines[0]["ranks"])) == 2  # type: ignore[arg-type]
    assert not lines_of(other.text())  # one node prints
    assert "waiting for node 1 of 2" in run.stderr and "node 0 has ended: so does this one" in other.text()


@pytest.fixture
def two_networks() -> Iterator[list[tuple[str, ...]]]:
    """How to run a command in each of two network namespaces, 10.93.0.1 and 10.93.0.2. Needs root."""
    try:
        with networks.two_networks() as made:
            yield made.prefixes
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces can't be made here: {getattr(e, 'stderr', '') or e}")


def test_networks_and_what_runs_there_end_with_the_tests(two_networks: list[tuple[str, ...]]) -> None:
    """Also with a run of them that is killed."""
    makes = """
import subprocess, sys, time
from tests.proc.networks import several_networks
with several_networks(1) as networks:
    run = subprocess.Popen([*networks.prefixes[0], "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
    run.stdout.readline()  # it runs there now
    print(networks.spaces[0], run.pid, flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", makes], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        space, pid = tests.stdout.readline().split()
        tests.kill()
    wait_until("it has ended", lambda: not alive(int(pid)), PATIENCE)
    wait_until("nothing is left", lambda: not any(Path(f, space).exists() for f in ("/run/netns", "/etc/netns")))


@pytest.mark.parametrize("layout", ["-pp", pytest.param("-tp", marks=pytest.mark.long)])
@pytest.mark.row("X2")
def test_two_networks_give_the_same_tokens(
    layout: str, generate: list[str], one_process: list[object], two_networks: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Own addresses, TCP for commands, for hidden states and for each layer's sums, a secret in a file."""
    (tmp_path / "secret").write_bytes(SECRET)
    args = [*generate, layout, "2", "--nnodes", "2"]
    args += ["--master-addr", "10.93.0.1", "--secret-file", str(tmp_path / "secret")]
    with (
        Command(*args, "--node-rank", "1", prefix=two_networks[1]) as other,
        Command(*args, prefix=two_networks[0]) as head,
    ):
        assert head.wait(300) == 0, head.text() + other.text()
        assert other.wait() == 0, other.text()
    lines = lines_of(head.text())
    assert [line["token_ids"] for line in lines] == one_process
    assert lines[0]["link"] == "shm+tcp"
    assert ("of one tensor group are on several nodes" in head.text()) == (layout == "-tp")


# -- faults; ranks that compute nothing


def endless(llm: LLM, then: object) -> str:
    """Generate until something breaks; `then()` is called when the first tokens are there."""
    called = False

    def once(done: int, tokens: int) -> None:
        nonlocal called
        if tokens and not called:
            called = True
            then()  # type: ignore[operator]

    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    with pytest.raises(EngineDead) as e:
        while True:
            llm.generate([[1, 2, 3]] * 8, params, on_tokens=once)
    return str(e.value)


def test_a_rank_that_dies_on_the_other_node_is_named() -> None:
    port = free_port()
    with agent(port) as other, engine(port) as llm:
        (victim,) = other.ranks()
        assert victim == llm.facts.ranks[1]
        killed = 0.0

        def kill() -> None:
            nonlocal killed
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)

        assert re.search(r"rank 1 failed in step", endless(llm, kill))
        assert time.monotonic() - killed < SOON
        llm.close()
        assert other.wait() == 0 and "rank 1 was killed by signal 9" in other.text()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_of_any_node_is_replaced(small: Path, one_process: list[object], victim: int) -> None:
    """Its agent, or the engine, makes another in its place; requests go on with the same tokens."""
    port = free_port()
    options = {"kv_cache_memory": "8MiB", "max_model_len": 1024, "dtype": "float32", "skip_tokenizer_init": True}
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    args = ["serve", str(small), *TINY, "-pp", "2", "--nnodes", "2", "--master-port", str(port), "--node-rank", "1"]
    with Command(*args) as other:
        with LLM(str(small), pipeline_parallel_size=2, nnodes=2, master_port=port, **options) as llm:
            before = [member.pid for member in llm._loop.gang.members]
            weights = [parts(pid) for pid in before]
            killed: list[int] = []

            def kill(done: int, tokens: int) -> None:
                if tokens and not killed:
                    killed.append(before[victim])
                    os.kill(before[victim], signal.SIGKILL)

            outputs = llm.generate(PROMPTS, greedy, on_tokens=kill)
            assert [output.outputs[0].token_ids for output in outputs] == one_process and killed
            after = [member.pid for member in llm._loop.gang.members]
            assert after[1 - victim] == before[1 - victim] and after[victim] != before[victim]
            core = llm._loop.core
            assert core is not None and core.replayed_tokens == 0, "each node keeps what its ranks had computed"
            assert [parts(pid) for pid in after] == weights and all(weights), "and weights"
        assert other.wait() == 0, other.text()


def test_other_weights_are_those_of_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node prepares its ranks' part; who comes later there has them, too."""
    folders = [str(checkpoints.write_checkpoint(tmp_path / f"{seed}", "llama", seed)) for seed in (1, 2)]
    options = {"kv_cache_memory": "8MiB", "max_model_len": 256, "dtype": "float32", "skip_tokenizer_init": True}
    greedy, prompt = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), list(range(40))
    with LLM(folders[1], **options) as llm:
        expected = llm.generate([prompt], greedy)[0].outputs[0].token_ids
    port, prepare, children = free_port(), new_weights.beside, list[Any]()

    def beside(*asked: Any) -> Any:
        children.extend(prepare(*asked))
        return children

    monkeypatch.setattr(new_weights, "beside", beside)
    words = ["serve", folders[0], *TINY, "-pp", "2", "--nnodes", "2", "--master-port", str(port), "--node-rank", "1"]
    words[words.index("1024")] = "256"

    async def main() -> list[list[int]]:
        engine, found = AsyncLLM(folders[0], pipeline_parallel_size=2, nnodes=2, master_port=port, **options), []
        await engine.update_weights(folders[1])
        assert [child.said for child in children] == ["ready", "ready"]
        for again in (False, True):
            if again:
                os.kill(engine._loop.gang.members[1].pid, signal.SIGKILL)
            found.append([token async for piece in engine.generate(prompt, greedy) for token in piece.token_ids])
        engine.close()
        return found

    with Command(*words) as other:
        assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == [expected, expected]
        assert other.wait() == 0, other.text()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_agents_end_is_its_ranks_end(how: signal.Signals) -> None:
    port = free_port()
    with agent(port) as other, engine(port) as llm:
        (rank,) = other.ranks()
        error = endless(llm, lambda: other.process.send_signal(how))
        assert "rank 1 failed" in error
        assert other.wait() == (0 if how == signal.SIGTERM else -9)
        wait_until("its rank ends", lambda: not alive(rank), limit=SOON)
        own = llm.facts.ranks[0]
        llm.close()
        assert not alive(own)


def test_a_node_has_one_agent() -> None:
    port = free_port()
    nodes = launcher(port, same_as(port), timeout=60)
    with agent(port, env=SHARED) as first:
        first.wait_for("waiting for node 0")
        starting = threading.Thread(target=nodes.start)
        starting.start()
        first.wait_for("joined node 0")
        starting.join(PATIENCE)
        try:
            with agent(port, "--heartbeat-timeout", "2", env=SHARED) as second:
                assert second.wait() == 1
                assert "another process is node 1 already" in second.text()
        finally:
            nodes.kill()
        assert first.wait() == 0


@pytest.mark.row("P24")
def test_nodes_that_differ_are_refused_by_field() -> None:
    port = free_port()
    with agent(port, "--max-num-seqs", "17") as other:
        with pytest.raises(RanksDiffer, match=r"node 1 .* differs in configuration scheduler\.max_logit_rows; run"):
            engine(port)
        assert other.wait() == 1 and "differs in" in other.text()


# -- the launcher by itself


def parallel_of(port: int, nnodes: int = 2) -> ParallelConfig:
    return ParallelConfig(
        pipeline_parallel_size=nnodes, nnodes=nnodes, master_port=port, distributed_executor_backend="mp"
    )  # fmt: skip


def launcher(port: int, same: dict[str, str], *, timeout: float = 60.0, secret: bytes = SECRET) -> NodesLauncher:
    return NodesLauncher(parallel_of(port), "planaria.worker.main", secret, same, join_timeout=timeout)


def same_as(port: int) -> dict[str, str]:
    """What an agent started by `agent` says of itself."""
    from planaria.config.options import EngineOptions
    from planaria.config.resolve import resolve
    from planaria.executor.launcher.nodes import what_must_agree

    options = EngineOptions(
        model="smollm2", max_model_len=1024, dtype="float32", null_worker=True, nnodes=2,
        pipeline_parallel_size=2, master_port=port,
    )  # fmt: skip
    return what_must_agree(resolve(options))


def test_another_secret_never_joins_and_a_stopped_rank_is_killed() -> None:
    """The wait says what it waits for, and that somebody came with another secret."""
    port = free_port()
    with agent(port, env={"PLANARIA_SECRET": "x" * 40}) as stranger:
        stranger.wait_for("waiting for node 0")
        nodes = launcher(port, same_as(port), timeout=6)
        with pytest.raises(CapacityError, match=r"gave up waiting for node 1 of 2 .*had another secret"):
            nodes.start()
        nodes.kill()
        assert stranger.process.poll() is None and stranger.ranks() == []
    port = free_port()
    with agent(port, env=SHARED) as other:
        nodes = launcher(port, same_as(port))
        try:
            places = nodes.start()
            assert [place.rank for place in places] == [0, 1] and {place.address for place in places} == {"127.0.0.1"}
            assert other.ranks() == [places[1].pid]
            os.kill(places[1].pid, signal.SIGSTOP)
        finally:
            nodes.kill()
        assert not any(alive(place.pid) for place in places)
        nodes.kill()  # again: nothing to do
        assert other.wait() == 0


@pytest.mark.row("P3")
def test_a_port_in_use_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        nodes = launcher(taken.getsockname()[1], EQUAL)
        with pytest.raises(CapacityError, match=r"can't listen on 127\.0\.0\.1 port .*--master-port"):
            nodes.start()
        nodes.kill()


def test_ranks_are_dealt_evenly() -> None:
    config = ParallelConfig(
        tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=2, distributed_executor_backend="mp"
    )  # fmt: skip
    placement = placement_of(config)
    assert [[slot.rank for slot in placement.on(node)] for node in "01"] == [[0, 1, 4], [2, 3, 5]]
    assert [[slot.rank for slot in group] for group in placement.spanning()] == [[4, 5]]


def test_room_for_ranks_is_no_promise_where_one_ended_on_the_way() -> None:
    nodes = launcher(free_port(), {})
    (peer,) = nodes.host.peers.all
    peer.here = Here(1, "other", "127.0.0.1", 1, {})
    assert nodes.room_for(Layout(pp=2))
    nodes.pool._back_off("1").failed(time.monotonic())
    assert not nodes.room_for(Layout(pp=2))


# -- the secret


def test_a_network_needs_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PLANARIA_SECRET", "PLANARIA_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    away = ParallelConfig(nnodes=2, pipeline_parallel_size=2, master_addr="10.0.0.1")
    with pytest.raises(ConfigError, match=r"--nnodes 2: over the network \(10.0.0.1\) needs a secret .* --secret-file"):
        deployment_secret(away)
    with pytest.raises(ConfigError, match="--nnodes 2: over the network"):  # at the door
        LLM("smollm2", nnodes=2, pipeline_parallel_size=2, master_addr="10.0.0.1", null_worker=True)
    monkeypatch.setenv("PLANARIA_SECRET", "short")
    with pytest.raises(ConfigError, match=r"\$PLANARIA_SECRET \*\*\*: holds 5 bytes"):
        deployment_secret(away)
    monkeypatch.setenv("PLANARIA_SECRET", "s" * 32)
    assert deployment_secret(away) == b"s" * 32
    path = tmp_path / "secret"
    monkeypatch.setenv("PLANARIA_SECRET_FILE", str(path))
    with pytest.raises(ConfigError, match=r"\$PLANARIA_SECRET_FILE .*can't be read"):
        deployment_secret(away)
    path.write_bytes(SECRET + b"\n")
    assert deployment_secret(away) == SECRET
    other = tmp_path / "other"
    other.write_bytes(b"o" * 40)
    named = ParallelConfig(nnodes=2, pipeline_parallel_size=2, master_addr="10.0.0.1", secret_file=str(other))
    assert deployment_secret(named) == b"o" * 40


def test_on_loopback_this_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PLANARIA_SECRET", "PLANARIA_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path))
    first = deployment_secret(parallel_of(1))
    assert len(first) >= 32 and deployment_secret(parallel_of(2)) == first
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        deployment_secret(parallel_of(1))


def test_an_engine_on_another_node_than_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--node-rank 1: .*node 0"):
        LLM("smollm2", nnodes=2, node_rank=1, pipeline_parallel_size=2, null_worker=True)
