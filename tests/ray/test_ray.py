"""Ranks as Ray actors on one node: the same answers over both links, what a death looks like, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from planaria import LLM, AsyncLLM, SamplingParams
from planaria.errors import CallFailed, ConfigError, EngineDead
from planaria.executor import new_weights
from tests.model.checkpoints import write_checkpoint
from tests.proc.servers import PATIENCE, SOON, alive, wait_until
from tests.ray.clusters import live_actors, live_groups

SMALL = {
    "skip_tokenizer_init": True, "kv_cache_memory": "16MiB", "max_model_len": 256, "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
}  # fmt: skip
PROMPTS = [[(7 + 13 * i + 17 * j * j) % 131 for j in range(length)] for i, length in enumerate((5, 70, 1, 33, 20))]
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2)}
NAMES = {
    "tp2": ["tp0-e0", "tp1-e0"], "pp2": ["pp0-e0", "pp1-e0"],
    "tp2pp2": ["tp0-pp0-e0", "tp0-pp1-e0", "tp1-pp0-e0", "tp1-pp1-e0"],
}  # fmt: skip


def ray_options(layout: str = "tp2", link: str = "queue") -> dict[str, Any]:
    tp, pp = LAYOUTS[layout]
    return {
        "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "distributed_executor_backend": "ray",
        "ray_link": link,
    }  # fmt: skip


def answers(llm: LLM, prompts: list[Any], count: int, on_tokens: Any = None) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1)
    found = []
    for output in llm.generate(prompts, params, on_tokens=on_tokens):
        (choice,) = output.outputs
        assert choice.logprobs is not None
        found.append((choice.token_ids, [given.logprob for given in choice.logprobs]))
    return found


def check(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    pairs = [pair for (_, a), (_, b) in zip(found, expected, strict=True) for pair in zip(a, b, strict=True)]
    assert max(abs(a - b) for a, b in pairs) < 1e-3


@pytest.fixture(scope="module")
def expected(small: Path) -> Any:
    with LLM(str(small), **SMALL) as llm:
        return answers(llm, PROMPTS, 12)


def strike(llm: LLM, victim: int, how: signal.Signals) -> float:
    """Send a signal to a rank in the middle of a generation, which ends by an error that names it; seconds it took."""
    calls, sent = 0, 0.0

    def send(done: int, tokens: int) -> None:
        nonlocal calls, sent
        calls += 1
        if calls == 5:
            sent = time.monotonic()
            os.kill(llm.facts.ranks[victim], how)

    with pytest.raises(EngineDead, match=rf"rank {victim} failed in (step|idle)"):
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=240, temperature=0, ignore_eos=True), on_tokens=send)
    return time.monotonic() - sent


@pytest.mark.parametrize(
    ("layout", "link", "end"),
    [
        ("pp2", "queue", (0, signal.SIGKILL)), ("tp2", "compiled-graph", (1, signal.SIGSTOP)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (
            ("tp2", "queue", None), ("tp2pp2", "queue", (2, signal.SIGSTOP)),
            ("pp2", "compiled-graph", (1, signal.SIGKILL)), ("tp2pp2", "compiled-graph", None),
        )),
    ],
)  # fmt: skip
@pytest.mark.row("X3", "R14")
def test_the_same_answers_and_nothing_left(
    local_ray: Any, small: Path, expected: Any, layout: str, link: str, end: tuple[int, signal.Signals] | None
) -> None:
    """And whatever ends it: a rank killed is named at once, one stopped within the heartbeat's limit."""
    with LLM(str(small), **SMALL, **ray_options(layout, link), recovery_limit=0) as llm:
        assert llm.facts.executor == "ray" and llm.facts.link == {"queue": "shm"}.get(link, "ray-graph+shm")
        pids = llm.facts.ranks
        assert len(set(pids)) == LAYOUTS[layout][0] * LAYOUTS[layout][1]
        names = [name for name in live_actors(local_ray) if name]
        assert sorted(name.split("-", 2)[2] for name in names) == NAMES[layout]
        check(answers(llm, PROMPTS, 12), expected)
        check(answers(llm, PROMPTS, 12), expected)
        assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids), "nothing needs torch"
        if end is not None:
            took = strike(llm, *end)
            assert took < (SOON if end[1] is signal.SIGKILL else PATIENCE)
        began = time.monotonic()
    assert time.monotonic() - began < 2 * SOON
    assert not any(alive(pid) for pid in pids)
    wait_until("no actor is left", lambda: not live_actors(local_ray))
    wait_until("no placement group is left", lambda: not live_groups())


@pytest.mark.parametrize("link", ["queue", pytest.param("compiled-graph", marks=pytest.mark.long)])
def test_other_weights_are_prepared_by_an_actor_more(
    local_ray: Any, small: Path, tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes no place, and ends with the change."""
    other = write_checkpoint(tmp_path / "other", "llama", 2)
    with LLM(str(other), **SMALL) as llm:
        expected = answers(llm, PROMPTS[:1], 12)[0][0]
    prepare, children = new_weights.beside, list[Any]()

    def beside(*asked: Any) -> Any:
        children.extend(prepare(*asked))
        return children

    monkeypatch.setattr(new_weights, "beside", beside)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    async def main() -> list[int]:
        engine = AsyncLLM(str(small), **SMALL, **ray_options("tp2", link))
        await engine.update_weights(other)
        assert [child.said for child in children] == ["ready"]
        found = [token async for piece in engine.generate(PROMPTS[0], greedy) for token in piece.token_ids]
        wait_until("it has ended", lambda: sum(bool(name) for name in live_actors(local_ray)) == 2)
        engine.close()
        return found

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == expected
    wait_until("no actor is left", lambda: not live_actors(local_ray))


@pytest.mark.parametrize(
    ("layout", "link", "victim", "how"),
    [
        ("tp2", "compiled-graph", 0, signal.SIGKILL),
        pytest.param("tp2", "queue", 1, signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("pp2", "queue", 0, signal.SIGSTOP, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_an_actor_is_replaced_and_requests_go_on(
    local_ray: Any, small: Path, expected: Any, layout: str, link: str, victim: int, how: signal.Signals
) -> None:
    """Survivors stay, but where they sit inside the loop of a compiled graph. By the queue: test_fault_matrix.py."""
    with LLM(str(small), **SMALL, **ray_options(layout, link)) as llm:
        before = [member.pid for member in llm._loop.gang.members]
        harmed: list[int] = []

        def harm(done: int, tokens: int) -> None:
            if tokens and not harmed:
                harmed.append(before[victim])
                os.kill(before[victim], how)

        check(answers(llm, PROMPTS, 12, harm), expected)
        after = [member.pid for member in llm._loop.gang.members]
        assert harmed and llm._loop.gang.epoch == 1
        assert after[victim] != before[victim] and (link != "queue" or after[1 - victim] == before[1 - victim])
        check(answers(llm, PROMPTS, 12), expected)
    assert not any(alive(pid) for pid in [*before, *after])


@pytest.mark.row("P15")
def test_what_a_rank_is_given_and_what_listens(local_ray: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's variables, one that is read at start and one that isn't; the user's own runtime environment; none of
    Planaria's secrets. Every socket is this machine's own, and Ray asks for its token. An exception is answered."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("TORCH_TEST_GLOBAL", "from the driver")
    monkeypatch.setenv("PLANARIA_API_KEY", "secret")
    options = ray_options() | {"ray_runtime_env": {"env_vars": {"USERS_OWN": "1"}}}
    with LLM(str(small), **SMALL, **options, worker_extension_cls="tests.ray.extension.Environment") as llm:
        names = ["OMP_WAIT_POLICY", "TORCH_TEST_GLOBAL", "USERS_OWN", "PLANARIA_API_KEY"]
        for at_start, now in llm.collective_rpc("environment", args=[names]):
            assert at_start == {"OMP_WAIT_POLICY": "passive", "USERS_OWN": "1"}
            assert now == at_start | {"TORCH_TEST_GLOBAL": "from the driver"}
        with pytest.raises(CallFailed, match=r"rank \d: TypeError"):
            llm.collective_rpc("environment", args=[5])
        found = []
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                connections = process.net_connections("inet")
                found += [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]
    assert len(found) > 5 and set(found) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    assert is_token_auth_enabled() and os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_no_room_is_refused_at_once_where_nobody_adds_nodes(local_ray: Any, small: Path) -> None:
    from planaria.errors import CapacityError

    began = time.monotonic()
    with pytest.raises(CapacityError, match="needs 6 devices, the cluster has 4"):
        LLM(str(small), **SMALL, pipeline_parallel_size=2, tensor_parallel_size=3, distributed_executor_backend="ray")
    assert time.monotonic() - began < PATIENCE and not live_groups()


def test_the_command_line(weightless: str) -> None:
    """A cluster that Planaria starts and ends with itself, in a process of its own."""
    from tests.proc.servers import planaria

    args = ["generate", weightless, "--null-worker", "--skip-tokenizer-init", "--prompt-token-ids", "1,2,3"]
    args += ["--max-tokens", "8", "--ignore-eos", "--json", "-pp", "2"]
    result = planaria(*args, "--distributed-executor-backend", "ray", "--ray-link", "compiled-graph")
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout)
    assert line["executor"] == "ray" and line["link"] == "ray-graph+shm"
    assert not any(alive(pid) for pid in line["ranks"])


@pytest.mark.row("R1")
def test_ray_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from planaria.executor.ray.cluster import connect

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'planaria\[ray\]'"):
        connect(None, 1)
