"""Two engines behind one server, on real processes: every stream has the tokens it would have had, whatever becomes of
the engines meanwhile. The worker's tokens depend on the whole history."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from planaria.processes import titled_processes
from tests.proc.servers import PATIENCE, PATIENT, Server, alive, needs_smollm2, planaria, titled, wait_until
from tests.proc.test_engine_death import HASH, Outcome, client_of, counting, expected, health, run  # noqa: F401

pytestmark = needs_smollm2

LONG = 6  # streams


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("smollm2", *HASH, "-dp", "2") as server:
        yield server


def fleet(server: Server) -> dict[str, Any]:
    body: dict[str, Any] = httpx2.get(server.url + "/admin/fleet", timeout=30).json()
    return body


def states(server: Server) -> list[str]:
    return [engine["state"] for engine in fleet(server)["engines"]]


def all_ready(server: Server, size: int = 2) -> None:
    wait_until(f"{size} engines", lambda: states(server) == ["ready"] * size, 60)


def scale(server: Server, size: int, *more: str) -> str:
    done = planaria("scale", "--dp", str(size), "--url", server.url, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def at(count: int, harm: Callable[[], None]) -> Callable[[int], None]:
    """Do this when so many tokens have come."""
    return lambda tokens: harm() if tokens == count else None


def long_streams(server: Server, then: Callable[[], None]) -> list[list[int]]:
    """Tokens of some streams that go on for seconds; `then` is called when each has begun."""
    begun = threading.Barrier(LONG, then)

    def one(i: int) -> list[int]:
        stream = client_of(server).completions.create(
            model="smollm2", prompt=f"Story number {i}", max_tokens=480, seed=i, stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        tokens: list[int] = []
        for chunk in stream:
            first, tokens = not tokens, tokens + chunk.choices[0].token_ids  # type: ignore[attr-defined]
            if first:
                begun.wait(60)
        return tokens

    with concurrent.futures.ThreadPoolExecutor(LONG) as pool:
        return list(pool.map(one, range(LONG)))


def test_both_engines_work_and_every_process_is_shown(server: Server, expected: list[Outcome]) -> None:  # noqa: F811
    metrics = httpx2.get(server.url + "/metrics").text
    queries = [f'vllm:prefix_cache_queries_total{{engine="{i}",model_name="smollm2"}}' for i in (0, 1)]
    taken = [float(line.split()[-1]) for name in queries for line in metrics.splitlines() if line.startswith(name)]
    assert len(taken) == 2 and min(taken) > 0.2 * sum(taken)
    listed = httpx2.get(server.url + "/admin/processes").json()["processes"]
    assert Counter(row["role"] for row in listed) == {"server": 1, "engine": 2}
    assert [row["coordinates"].get("dp") for row in listed] == [None, 0, 1]
    assert {row["pid"] for row in listed[1:]} == set(server.engine_pids())
    body = fleet(server)
    assert body["size"] == 2 and [engine["engine"] for engine in body["engines"]] == [0, 1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_is_lost_while_streams_run(server: Server, expected: list[Outcome], how: signal.Signals) -> None:  # noqa: F811
    victim = fleet(server)["engines"][1]["pid"]
    before = health(server)["engine_restarts"]
    assert run(server, at(200, lambda: os.kill(victim, how))) == expected
    assert not alive(victim)
    wait_until("it is replaced", lambda: health(server)["engine_restarts"] == before + 1)
    body = health(server)
    assert body["live"] and body["ready"] and body["last_fault"]["engine"] == 1
    all_ready(server)


def test_both_are_lost(server: Server, expected: list[Outcome]) -> None:  # noqa: F811
    def harm() -> None:
        for engine in fleet(server)["engines"]:
            os.kill(engine["pid"], signal.SIGKILL)

    assert run(server, at(200, harm)) == expected
    all_ready(server)


def test_an_engine_that_is_told_to_end_is_replaced(server: Server, expected: list[Outcome]) -> None:  # noqa: F811
    """Nothing has failed, so no fault is counted."""
    first = fleet(server)["engines"][0]["pid"]
    before = health(server)["engine_restarts"]
    assert run(server, at(150, lambda: os.kill(first, signal.SIGTERM))) == expected
    wait_until("another", lambda: first not in [engine["pid"] for engine in fleet(server)["engines"]])
    all_ready(server)
    assert not alive(first) and health(server)["engine_restarts"] == before


def test_scaling_while_streams_run(server: Server, expected: list[Outcome]) -> None:  # noqa: F811
    """Down by moving what runs, up again, and down by waiting; the first engine stays."""
    first = fleet(server)["engines"][0]["pid"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked: list[concurrent.futures.Future[dict[str, Any]]] = []

        def begin(size: int, drain_timeout: float) -> None:
            body = {"new_data_parallel_size": size, "drain_timeout": drain_timeout}
            path = server.url + "/scale_elastic_ep"

            def ask() -> dict[str, Any]:
                """Of an engine that is to leave at once streams are still open when it is asked."""
                with counting() if size == 1 and not drain_timeout else contextlib.nullcontext():
                    answer: dict[str, Any] = httpx2.post(path, json=body, timeout=120).json()
                return answer

            asked.append(pool.submit(ask))

        lasting = long_streams(server, lambda: None)
        assert long_streams(server, lambda: begin(1, 0)) == lasting
        moved = asked[-1].result()
        assert moved["state"] == "committed" and moved["moved"] > 0
        assert server.engine_pids() == [first] and states(server) == ["ready"]
        begin(2, 0)
        while not asked[-1].done():
            assert run(server) == expected
        assert asked[-1].result()["start"] == [1] and len(server.engine_pids()) == 2
        assert long_streams(server, lambda: begin(1, 60)) == lasting
        waited = asked[-1].result()
        assert waited["state"] == "committed" and waited["moved"] == 0 and waited["phases"]["drain"] > 0
    assert "1 -> 1 engines, committed" in scale(server, 1)
    said = scale(server, 2, "--id", "again")
    assert "1 -> 2 engines, committed (id again): start " in said
    assert scale(server, 2, "--id", "again") == said  # not done twice
    assert len(server.engine_pids()) == 2


def test_what_cant_be_is_refused_and_changes_nothing(server: Server) -> None:
    before = server.engine_pids()
    cases = (0, "ask for 1 or more"), (4000, "engines don't fit: each needs"), (2_000_000_000, "ask for 4096 at most")
    for size, words in cases:
        done = planaria("scale", "--dp", str(size), "--url", server.url)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    answer = httpx2.post(server.url + "/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert answer.status_code == 200 and answer.json()["message"] == "Scaled to 2 data parallel engines"
    done = planaria("scale", "--dp", "2", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1 and "no server answers" in done.stderr
    assert server.engine_pids() == before


def test_sigterm_ends_all_and_loses_nothing(expected: list[Outcome]) -> None:  # noqa: F811
    """To the whole process group, as from a terminal or a service manager."""
    with Server("smollm2", *HASH, *PATIENT, "-dp", "2", prefix=("setsid",)) as server:
        pids = server.engine_pids()
        assert run(server, begun=lambda: os.killpg(server.pid, signal.SIGTERM)) == expected
        assert server.process.wait(PATIENCE) == 0
        wait_until("no engine is left", lambda: not any(alive(pid) for pid in pids))
    assert not {pid for pid, _, _ in titled_processes()} & set(pids)


@pytest.mark.long
@pytest.mark.parametrize("layout", [["-tp", "2"], ["-pp", "2"]], ids=" ".join)
def test_engines_of_several_ranks(expected: list[Outcome], layout: list[str]) -> None:  # noqa: F811
    """A rank's loss: its engine's requests go on in the other at once. Resizes take and give whole engines."""
    with Server("smollm2", *HASH, *layout, "-dp", "2") as server:
        listed = httpx2.get(server.url + "/admin/processes").json()["processes"]
        workers = {row["coordinates"]["dp"]: row["pid"] for row in listed if row["role"] == "worker"}
        assert sum(row["role"] == "worker" for row in listed) == 4 and set(workers) == {0, 1}
        assert run(server, at(200, lambda: os.kill(workers[1], signal.SIGKILL))) == expected
        wait_until("ranks are together again", lambda: fleet(server)["engines"][1]["epoch"] == 1)
        all_ready(server)
        assert health(server)["last_fault"]["engine"] == 1 and health(server)["last_fault"]["part"] == "rank"
        body = {"new_data_parallel_size": 1, "drain_timeout": 0}
        path = server.url + "/scale_elastic_ep"
        assert run(server, at(150, lambda: httpx2.post(path, json=body, timeout=120).raise_for_status())) == expected
        assert len(titled(server.pid, "worker")) == 2 and states(server) == ["ready"]
        scale(server, 2)
        assert len(titled(server.pid, "worker")) == 4 and run(server) == expected
