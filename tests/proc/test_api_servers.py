"""Several API processes in front of the same engines, on real processes: clients can't tell, whatever is lost. The
worker's tokens depend on the whole history, so a lost, repeated or foreign token changes all that follow."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.proc.custom import POISON
from tests.proc.servers import (
    PATIENCE,
    PATIENT,
    SOON,
    Server,
    alive,
    needs_smollm2,
    planaria,
    titled,
    wait_until,
)
from tests.proc.test_engine_death import HASH, Outcome, counting, expected, health, run  # noqa: F401
from tests.proc.test_fleet import all_ready, at, fleet, states

pytestmark = needs_smollm2

TOKENS = 120


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two engines behind two API processes, in a process group of its own."""
    with Server("smollm2", *HASH, *PATIENT, "-dp", "2", "--api-server-count", "2", prefix=("setsid",)) as server:
        yield server


@pytest.fixture(scope="module")
def one_engine() -> Iterator[Server]:
    """Two API processes in front of one engine."""
    with Server("smollm2", *HASH, "--api-server-count", "2") as server:
        yield server


class Line:
    """A connection, and the API process that has accepted it."""

    def __init__(self, server: Server) -> None:
        self.connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
        self.connection.connect()
        port = self.connection.sock.getsockname()[1]
        apis = titled(server.pid, "api")
        found: list[int] = []

        def accepted() -> bool:
            for pid in apis:
                if any(c.raddr and c.raddr.port == port for c in psutil.Process(pid).net_connections("tcp")):
                    found.append(pid)
            return bool(found)

        wait_until("somebody accepts", accepted)
        self.pid = found[0]

    def stream(self, prompt: list[int], on_token: Any = None, count: int = TOKENS) -> tuple[list[int], str]:
        """Tokens and finish reason; raises RuntimeError for an error that is said, ConnectionError where it breaks."""
        body = {
            "model": "smollm2", "prompt": prompt, "max_tokens": count, "seed": 1, "stream": True, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        self.connection.request("POST", "/v1/completions", json.dumps(body))
        tokens: list[int] = []
        finish = ""
        try:
            answer = self.connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode())
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    answer.read()  # the end, so that the connection can be used again
                    return tokens, finish
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    (choice,) = event["choices"]
                    tokens += choice["token_ids"]
                    finish = choice["finish_reason"] or finish
                    if on_token is not None:
                        on_token(len(tokens))
        except http.client.HTTPException as e:
            raise ConnectionError(str(e)) from e
        raise ConnectionError("the stream ended before its end")


def lines(server: Server, each: int) -> dict[int, list[Line]]:
    """So many connections to each API process."""
    found: dict[int, list[Line]] = {pid: [] for pid in titled(server.pid, "api")}
    for _ in range(200):
        line = Line(server)
        found[line.pid].append(line)
        if min(map(len, found.values())) >= each:
            return {pid: some[:each] for pid, some in found.items()}
    raise AssertionError(f"of 200 connections: { ({pid: len(some) for pid, some in found.items()}) }")


def metric(server: Server, name: str) -> float:
    lines = httpx2.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def apis(server: Server) -> list[int]:
    return titled(server.pid, "api")


def serving(server: Server) -> list[int]:
    """Of these, who takes connections."""
    rows = httpx2.get(server.url + "/admin/processes", timeout=30).json()["processes"]
    return [row["pid"] for row in rows if row["role"] == "api" and row["state"] == "ready"]


@pytest.mark.row("P21")
def test_all_serve_and_the_sums_are_right(server: Server, expected: list[Outcome]) -> None:  # noqa: F811
    before = metric(server, "vllm:request_success_total"), metric(server, "vllm:generation_tokens_total")
    both = lines(server, 3)
    prompt = [5, 6, 7]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(lambda line: line.stream(prompt), [line for some in both.values() for line in some]))
    assert len(set(map(str, outcomes))) == 1 and len(outcomes[0][0]) == TOKENS

    def counted() -> tuple[float, float]:
        """Since then. What one process has told is known to the others a moment later."""
        now = metric(server, "vllm:request_success_total"), metric(server, "vllm:generation_tokens_total")
        return now[0] - before[0], now[1] - before[1]

    wait_until("all are counted", lambda: counted() == (6, 6 * TOKENS))
    first = "vllm:time_to_first_token_seconds_count"
    assert metric(server, first) == metric(server, "vllm:request_success_total")
    listed = httpx2.get(server.url + "/admin/processes").json()["processes"]
    assert Counter(row["role"] for row in listed) == {"server": 1, "api": 2, "engine": 2}
    assert {row["pid"] for row in listed if row["role"] == "api"} == set(apis(server))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_an_engine_is_lost_while_streams_run(server: Server, expected: list[Outcome], how: signal.Signals) -> None:  # noqa: F811
    """One fault, whoever is asked, with what it has cost all API processes together."""
    victim = fleet(server)["engines"][1]["pid"]
    before = health(server)["engine_restarts"]
    assert run(server, at(200, lambda: os.kill(victim, how))) == expected
    assert not alive(victim)
    all_ready(server)
    for some in lines(server, 1).values():
        some[0].connection.request("GET", "/health")
        body = json.loads(some[0].connection.getresponse().read())
        assert body["engine_restarts"] == before + 1 and body["last_fault"]["engine"] == 1
        assert body["last_fault"]["phase"] in ("step", "idle") and body["ready"]  # it may have answered all that it had


def test_an_engine_that_is_told_to_end_is_replaced(server: Server, expected: list[Outcome]) -> None:  # noqa: F811
    """Nothing has failed, so no fault is counted."""
    first = fleet(server)["engines"][0]["pid"]
    before = health(server)["engine_restarts"]
    assert run(server, at(150, lambda: os.kill(first, signal.SIGTERM))) == expected
    wait_until("another", lambda: first not in [engine["pid"] for engine in fleet(server)["engines"]])
    all_ready(server)
    assert not alive(first) and health(server)["engine_restarts"] == before


def test_scaling_while_streams_run(server: Server) -> None:
    """The size is asked of one of them, sequences are moved by both."""
    first = fleet(server)["engines"][0]["pid"]
    all_lines = [line for some in lines(server, 3).values() for line in some]
    with concurrent.futures.ThreadPoolExecutor(7) as pool:

        def streams(size: int = 0, drain_timeout: float = 0.0) -> tuple[list[Any], dict[str, Any]]:
            """Their outcomes; when all have begun, the fleet is asked for another size."""
            begun = [threading.Event() for _ in all_lines]
            opened = [
                pool.submit(line.stream, [30, 31, i], lambda tokens, i=i: begun[i].set(), 400)
                for i, line in enumerate(all_lines)
            ]
            answer = {}
            if size:
                assert all(event.wait(60) for event in begun)
                body = {"new_data_parallel_size": size, "drain_timeout": drain_timeout}
                with counting() if size == 1 and not drain_timeout else contextlib.nullcontext():  # some are still open
                    answer = httpx2.post(server.url + "/scale_elastic_ep", json=body, timeout=120).json()
                assert answer.get("state") == "committed", answer
            return [future.result(180) for future in opened], answer

        expected, _ = streams()
        outcomes, answer = streams(1)
        assert outcomes == expected and answer["moved"] > 0
        assert server.engine_pids() == [first] and states(server) == ["ready"]
        outcomes, answer = streams(2)
        assert outcomes == expected and answer["start"] == [1] and len(server.engine_pids()) == 2
        outcomes, answer = streams(1, 60)
        assert outcomes == expected and answer["moved"] == 0 and answer["phases"]["drain"] > 0
    done = planaria("scale", "--dp", "2", "--url", server.url)
    assert done.returncode == 0 and "1 -> 2 engines, committed" in done.stdout


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_an_api_process_is_lost(one_engine: Server, how: signal.Signals) -> None:
    """Its own requests end, in the engine too; those of the other go on, and a third comes."""
    server = one_engine
    both = lines(server, 2)
    victim, other = both
    alone = both[other][0].stream([9, 10, 11])
    with counting() as told, concurrent.futures.ThreadPoolExecutor(4) as pool:
        killed, lock, got = [False], threading.Lock(), [0] * 4

        def on_token(stream: int, tokens: int) -> None:
            with lock:
                got[stream] = tokens
                told(sum(got))
                if stream < 2 and tokens == 20 and not killed[0]:
                    killed[0] = True
                    os.kill(victim, how)

        opened = [
            pool.submit(line.stream, [9, 10, 11], functools.partial(on_token, i))
            for i, line in enumerate([*both[victim], *both[other]])
        ]
        lost, kept = opened[:2], opened[2:]
        assert [future.result() for future in kept] == [alone, alone]
        for future in lost:
            with pytest.raises((ConnectionError, OSError)):
                future.result()
    wait_until("the engine has nothing any more", lambda: fleet(server)["engines"][0]["running"] == 0)
    body = health(server)
    assert body["ready"] and body["engine_restarts"] == 0
    wait_until("another serves", lambda: len(now := serving(server)) == 2 and victim not in now)
    for some in lines(server, 1).values():
        assert some[0].stream([9, 10, 11]) == alone
    wait_until("all are counted, of the lost one too", lambda: metric(server, "vllm:request_success_total") >= 5)


@pytest.mark.parametrize("others_first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_poisonous_request_is_found_and_costs_no_other(one_engine: Server, others_first: bool) -> None:
    """It kills the engine with others and alone; requests of the other API process were there each time but alone."""
    server = one_engine
    both = lines(server, 3)
    first, second = both
    alone = both[first][0].stream([12, 13, 14])
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        if not others_first:
            poison = pool.submit(both[second][0].stream, [POISON, 1, 2])
        good = [pool.submit(line.stream, [12, 13, 14]) for line in (*both[first], *both[second][1:])]
        if others_first:
            poison = pool.submit(both[second][0].stream, [POISON, 1, 2])
        with pytest.raises(RuntimeError, match="the engine died again and again while it ran this request"):
            poison.result(180)
        assert [future.result(180) for future in good] == [alone] * 5
    assert health(server)["ready"]


@pytest.mark.long
def test_two_poisonous_requests_one_in_each(one_engine: Server) -> None:
    """Each is found in its process's turn."""
    server = one_engine
    both = lines(server, 2)
    first = next(iter(both))
    alone = both[first][1].stream([12, 13, 14])
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        bad = [pool.submit(both[pid][0].stream, [POISON, 1, 2]) for pid in both]
        good = [pool.submit(both[pid][1].stream, [12, 13, 14]) for pid in both]
        for future in bad:
            with pytest.raises(RuntimeError, match="the engine died again and again"):
                future.result(180)
        assert [future.result(180) for future in good] == [alone, alone]
    assert health(server)["ready"]


def test_what_no_process_can_serve_is_said(tmp_path: Path) -> None:
    """An engine that can't come up; a certificate that can't be used."""
    empty = tmp_path / "empty.pem"
    empty.touch()
    for more, words in (
        (["--kv-cache-memory", "900TiB"], "--kv-cache-memory asks for"),
        (["--ssl-certfile", str(empty)], f"--ssl-certfile {empty}: can't be used"),
    ):
        done = planaria("serve", "smollm2", "--null-worker", "--api-server-count", "2", "--port", "0", *more)
        assert done.returncode in (1, 2) and words in done.stderr.splitlines()[-1], done.stderr
        assert done.stderr.count(words) == 1


def test_when_no_engine_is_left_all_are_told() -> None:
    """The limit of restarts is the root's."""
    with Server("smollm2", *HASH, "--api-server-count", "2", "--recovery-limit", "0") as server:
        both = [line for some in lines(server, 1).values() for line in some]
        pids = apis(server)
        with counting(), concurrent.futures.ThreadPoolExecutor(2) as pool:
            begun = threading.Event()
            opened = [pool.submit(line.stream, [1, 2], lambda tokens: begun.set(), 400) for line in both]
            assert begun.wait(60)
            os.kill(server.engine_pid(), signal.SIGKILL)
            for future in opened:
                with pytest.raises((RuntimeError, ConnectionError)):
                    future.result(60)
        assert server.ended() == 1
        assert "was killed by signal 9" in "".join(server.log) and not any(alive(pid) for pid in pids)


def test_sigterm_ends_all_and_loses_nothing(server: Server, expected: list[Outcome]) -> None:  # noqa: F811
    """To the whole process group, as from a terminal or a service manager. The last test of this server."""
    pids = [*server.engine_pids(), *apis(server)]
    assert len(pids) == 4
    assert run(server, begun=lambda: os.killpg(server.pid, signal.SIGTERM)) == expected
    assert server.process.wait(PATIENCE) == 0
    assert not any(alive(pid) for pid in pids)


def test_a_second_sigterm_aborts_what_is_open() -> None:
    with Server("smollm2", *HASH, "--api-server-count", "2") as server:
        both = [line for some in lines(server, 1).values() for line in some]
        with counting(), concurrent.futures.ThreadPoolExecutor(2) as pool:
            begun = [threading.Event() for _ in both]
            opened = [
                pool.submit(line.stream, [1, 2], lambda tokens, i=i: begun[i].set(), 500) for i, line in enumerate(both)
            ]
            assert all(event.wait(60) for event in begun)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("no new requests")
            server.process.send_signal(signal.SIGTERM)
            for future in opened:
                with pytest.raises(RuntimeError, match="the server is shutting down; the request was aborted"):
                    future.result(60)
        assert server.process.wait(PATIENCE) == 143


def test_without_the_root_nobody_is_left(one_engine: Server) -> None:
    """The last test of this server."""
    server = one_engine
    pids = [*server.engine_pids(), *apis(server)]
    assert len(pids) == 3
    server.process.kill()
    wait_until("all are gone", lambda: not any(alive(pid) for pid in pids), SOON)
