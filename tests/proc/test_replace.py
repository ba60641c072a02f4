"""A new process takes the place of a server while requests stream: each goes on with the same tokens, and ends in the
process that it began in. Whichever of the two is killed, what the other has to do goes on. The worker's tokens depend
on the whole history, and it is never far ahead of the clients; one test has the real model."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.proc import custom
from tests.proc.servers import PATIENCE, SMALL, Server, needs_smollm2
from tests.proc.test_engine_death import HASH, SEEN, TOKENS, client_of, run

pytestmark = needs_smollm2

ENV = {custom.SEEN: str(SEEN)}
STREAMS, AT = 4, 40  # tokens that clients have when a successor comes


def successor(server: Server, *args: str) -> Server:
    port = int(server.url.rsplit(":", 1)[1])
    return Server("smollm2", *(args or HASH), "--replace", env=ENV, port=port)


def test_all_of_it_goes_on_in_another_process(tmp_path: Path) -> None:
    journal = ["--journal", str(tmp_path / "journal")]
    body: dict[str, Any] = {"model": "smollm2", "input": "A story", "max_output_tokens": TOKENS}
    with Server("smollm2", *HASH, *journal, env=ENV) as first:
        waits = http.client.HTTPConnection("127.0.0.1", int(first.url.rsplit(":", 1)[1]), timeout=PATIENCE)
        assert status(waits) == 200
        waits.auto_open = 0
        expected = run(first, streams=STREAMS)
        kept = client_of(first).responses.create(**body)
        second: list[Server] = []
        asked: list[str] = []

        def replace(count: int) -> None:
            if count == AT:
                background = client_of(first).responses.create(**body, background=True, extra_body={"ignore_eos": True})
                asked.append(background.id)
                second.append(successor(first, *HASH, *journal, "--shutdown-timeout", "40"))
                first.wait_for("serves now")

        assert run(first, replace, STREAMS) == expected
        with second[0] as new:
            assert new.url == first.url
            assert first.ended(PATIENCE) == 0, "".join(first.log)
            assert status(waits) == 200  # on the connection that there was
            waits.close()
            client = client_of(new)
            again = client.responses.create(**body, previous_response_id=kept.id)
            assert again.status in ("completed", "incomplete")
            usage = client.responses.retrieve(asked[0]).usage
            assert usage is not None and usage.output_tokens == TOKENS


def status(waits: http.client.HTTPConnection) -> int:
    waits.request("GET", "/health")
    answer = waits.getresponse()
    answer.read()
    return answer.status


def test_either_may_be_killed() -> None:
    with Server("smollm2", *HASH, env=ENV) as first:
        expected = run(first, streams=STREAMS)

        def killed_when(words: str) -> Callable[[int], None]:
            def replace(count: int) -> None:
                if count == AT:
                    victim = successor(first)
                    first.wait_for(words)
                    victim.process.kill()
                    victim.ended()
                    first.wait_for(f"process {victim.pid} has ended: this server goes on")

            return replace

        assert run(first, killed_when("starts engines in place"), STREAMS) == expected
        assert run(first, killed_when("serves now"), STREAMS) == expected
        assert run(first, streams=1) == expected[:1]  # the port is its own again
        second: list[Server] = []

        def first_killed(count: int) -> None:
            if count == AT:
                second.append(successor(first))
                first.wait_for("serves now")
                first.process.kill()

        with pytest.raises(openai.APIConnectionError):  # its streams end, which nobody else knows
            run(first, first_killed, STREAMS)
        with second[0] as new:
            assert run(new, streams=STREAMS) == expected


def test_what_was_computed_is_not_computed_again() -> None:
    asked = {"model": "smollm2", "prompt": list(range(1000, 1100)), "max_tokens": 4, "temperature": 0}
    with Server("smollm2", *SMALL) as first:
        before = httpx2.post(first.url + "/v1/completions", json=asked).json()
        with successor(first, *SMALL) as new:
            after = httpx2.post(new.url + "/v1/completions", json=asked).json()
            assert after["choices"] == before["choices"]
            assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
