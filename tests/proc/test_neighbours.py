"""What one of several API processes keeps, whichever of them a client reaches, and when that one ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.proc.servers import Server, needs_smollm2, wait_until
from tests.proc.test_api_servers import TOKENS, Line, lines, metric, serving
from tests.proc.test_engine_death import HASH

pytestmark = needs_smollm2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("smollm2", *HASH, "--api-server-count", "2") as server:
        yield server


def keeper_and_other(server: Server) -> tuple[Line, Line]:
    """Connections to the process that keeps responses, and to another."""
    wait_until("both serve", lambda: len(serving(server)) == 2)
    one, other = (some[0] for _, some in sorted(lines(server, 1).items(), key=lambda at: api_rank(server, at[0])))
    return one, other


def api_rank(server: Server, pid: int) -> int:
    rows = httpx2.get(server.url + "/admin/processes", timeout=30).json()["processes"]
    return next(row["coordinates"]["api"] for row in rows if row["pid"] == pid)


def ask(line: Line, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any], Any]:
    line.connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = line.connection.getresponse()
    return answer.status, json.loads(answer.read()), answer.headers


def events_of(line: Line, method: str, path: str, body: Any = None, on_event: Any = None) -> list[dict[str, Any]]:
    """Of a stream, to its end."""
    line.connection.request(method, path, None if body is None else json.dumps(body))
    answer = line.connection.getresponse()
    assert answer.status == 200, answer.read()
    events = []
    for text in answer:
        if text.startswith(b"data: "):
            events.append(json.loads(text[6:]))
            if on_event is not None:
                on_event(len(events))
    return events


ASKED = {"model": "smollm2", "input": "Hello", "max_output_tokens": TOKENS, "seed": 1, "ignore_eos": True}


def test_any_process_answers_for_what_one_keeps(server: Server) -> None:
    keeper, other = keeper_and_other(server)
    for here, elsewhere in ((keeper, other), (other, keeper)):
        status, made, _ = ask(here, "POST", "/v1/responses", {**ASKED, "max_output_tokens": 9})
        assert (status, made["status"]) == (200, "incomplete") and made["store"]
        path = f"/v1/responses/{made['id']}"
        assert ask(elsewhere, "GET", path)[1] == ask(here, "GET", path)[1] == made
        more = {**ASKED, "max_output_tokens": 9, "previous_response_id": made["id"]}
        assert ask(elsewhere, "POST", "/v1/responses", more)[1]["previous_response_id"] == made["id"]
        assert ask(elsewhere, "GET", path + "/input_items")[1]["data"][0]["content"][0]["text"] == "Hello"
        status, refused, _ = ask(elsewhere, "POST", path + "/cancel")
        assert (status, refused["error"]["param"]) == (400, "response_id")
        assert metric(server, "planaria:responses{") >= 2
        assert ask(elsewhere, "DELETE", path)[0] == 200 and ask(here, "GET", path)[0] == 404
    status, alone, _ = ask(other, "POST", "/v1/responses", {**ASKED, "max_output_tokens": 9, "store": False})
    assert status == 200 and ask(keeper, "GET", f"/v1/responses/{alone['id']}")[0] == 404


def test_a_key_means_the_same_to_all_of_them(server: Server) -> None:
    both = keeper_and_other(server)
    body = {"model": "smollm2", "prompt": "Hello", "max_tokens": 5}
    for number in range(4):
        for path, asked in (("/v1/completions", body), ("/v1/responses", {**ASKED, "background": bool(number % 2)})):
            key = {"Idempotency-Key": f"{path} {number}"}
            (_, first, _), (status, again, headers) = (ask(line, "POST", path, asked, **key) for line in both)
            assert (status, again["id"], headers["idempotent-replayed"]) == (200, first["id"], "true")
            status, other, _ = ask(both[number % 2], "POST", path, {**asked, "seed": 2}, **key)
            assert (status, other["error"]["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize("streamed", [False, True])
def test_the_death_of_the_keeper_costs_a_background_response_nothing(server: Server, streamed: bool) -> None:
    asked = {**ASKED, "background": True, "stream": True}
    calm = events_of(Line(server), "POST", "/v1/responses", asked)
    keeper, other = keeper_and_other(server)

    def strike(count: int) -> None:
        if count == 20:
            os.kill(keeper.pid, signal.SIGKILL)

    if streamed:
        events = events_of(other, "POST", "/v1/responses", asked, strike)
    else:
        _, made, _ = ask(other, "POST", "/v1/responses", {**asked, "stream": False})
        events = events_of(other, "GET", f"/v1/responses/{made['id']}?stream=true", None, strike)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts = ["".join(e["delta"] for e in es if "delta" in e) for es in (events, calm)]
    assert texts[0] == texts[1] and events[-1]["type"] == calm[-1]["type"] == "response.incomplete"
    id = events[-1]["response"]["id"]
    assert ask(Line(server), "GET", f"/v1/responses/{id}")[1]["output"] == events[-1]["response"]["output"]
    wait_until("the keeper is replaced", lambda: len(serving(server)) == 2)
