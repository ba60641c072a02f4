"""An engine sleeps while requests run: memory is given back, and after it wakes every one of them goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from planaria.node import resident_bytes
from tests.proc.servers import PATIENCE, Server, needs_smollm2, wait_until
from tests.proc.test_engine_death import REAL, Outcome, run

pytestmark = needs_smollm2
STREAMS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("smollm2", *REAL, "-tp", "2") as server:
        yield server


@pytest.fixture(scope="module")
def awake(server: Server) -> list[Outcome]:
    return run(server, streams=STREAMS)


def told(server: Server, path: str) -> Any:
    answer = httpx2.post(server.url + path, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def levels(server: Server) -> list[int | None]:
    return [engine["level"] for engine in httpx2.get(server.url + "/is_sleeping").json()["engines"]]


def asleep(server: Server) -> None:
    """Nobody is served, and it says why."""
    body = {"model": "smollm2", "prompt": "no", "max_tokens": 1}
    answer = httpx2.post(server.url + "/v1/completions", json=body)
    assert answer.status_code == 503 and "wake_up" in answer.text
    health = httpx2.get(server.url + "/health")
    assert health.status_code == 503 and health.json()["live"] and "asleep" in health.text


def interrupted(server: Server, between: Any) -> list[Outcome]:
    """The same streams, with `between` carried out when they have begun, while they run."""
    failures: list[BaseException] = []

    def carry_out() -> None:
        try:
            between()
        except BaseException as e:  # the streams must end all the same
            failures.append(e)
            httpx2.post(server.url + "/wake_up", timeout=PATIENCE)

    thread = threading.Thread(target=carry_out)
    found = run(server, lambda tokens: thread.start() if tokens == 20 else None, streams=STREAMS)
    thread.join(2 * PATIENCE)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
    return found


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_runs_goes_on_after_it(server: Server, awake: list[Outcome], level: int) -> None:
    def between() -> None:
        before = sum(map(resident_bytes, server.rank_pids()))
        assert told(server, f"/sleep?level={level}")["is_sleeping"] and levels(server) == [level]
        asleep(server)
        held = sum(map(resident_bytes, server.rank_pids()))
        assert level == 0 or held < before - (10 << 20)
        assert level < 2 or held < before - (60 << 20)
        refused = httpx2.post(f"{server.url}/sleep?level=0").status_code
        assert refused == (409 if level else 200)
        assert not told(server, "/wake_up")["is_sleeping"] and levels(server) == [None]

    assert interrupted(server, between) == awake


def test_ranks_and_engines_that_die_meanwhile_are_replaced_and_sleep(server: Server, awake: list[Outcome]) -> None:
    def between() -> None:
        told(server, "/sleep?level=1")
        ranks, engine = server.rank_pids(), server.engine_pid()
        os.kill(ranks[1], signal.SIGKILL)
        wait_until("the rank is replaced", lambda: len(server.rank_pids()) == 2 and ranks[1] not in server.rank_pids())
        os.kill(engine, signal.SIGKILL)
        wait_until("there is another engine", lambda: server.engine_pids() not in ([], [engine]))
        wait_until("it sleeps, too", lambda: levels(server) == [1])
        asleep(server)
        told(server, "/wake_up")

    assert interrupted(server, between) == awake


def test_what_makes_no_sense_is_refused(server: Server) -> None:
    for path in ("/sleep?level=3", "/sleep?level=-1", "/wake_up?tags=all"):
        answer = httpx2.post(server.url + path)
        assert answer.status_code == 400, answer.text
    assert not told(server, "/wake_up")["is_sleeping"], "what is awake stays so"
    assert told(server, "/sleep?level=1")["is_sleeping"]
    assert told(server, "/wake_up?tags=weights")["is_sleeping"], "weights come with KV"
    assert not told(server, "/wake_up?tags=kv_cache")["is_sleeping"]
