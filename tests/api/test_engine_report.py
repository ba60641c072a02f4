"""What a client says of an engine's processes when the engine itself can't."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.server import engine_client
from planaria.server.engine_client import ProcessEngineClient
from planaria.wire import Dead, Processes, ProcessInfo
from tests.api.fake_engine import facts

ROW = ProcessInfo("engine", None, {}, 1, "here", 0, "idle", 1)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ProcessEngineClient:
    made = ProcessEngineClient(config=None)  # type: ignore[arg-type]
    made.process = SimpleNamespace(pid=os.getpid())  # type: ignore[assignment]
    sent: list[Any] = []
    monkeypatch.setattr(made, "_send", sent.append)
    made.sent = sent  # type: ignore[attr-defined]
    return made


async def test_an_engine_that_loads_or_has_ended_is_not_asked(client: Any) -> None:
    for change, state in ((lambda: None, "loading"), (lambda: setattr(client, "dead", Dead("error", "x")), "ended")):
        change()
        (row,) = await client.report()
        assert (row.role, row.pid, row.state) == ("engine", os.getpid(), state) and row.resident > 0
    assert client.sent == []


async def test_all_who_ask_hear_the_answer(client: Any) -> None:
    client.facts = facts()
    asked = [asyncio.create_task(client.report()) for _ in range(2)]
    while len(client.sent) < 2:
        await asyncio.sleep(0)
    client._on_processes(Processes([ROW]))
    assert await asyncio.gather(*asked) == [[ROW], [ROW]]
    client._on_processes(Processes([ROW]))  # the second question's answer: nobody waits


async def test_a_silent_engine_is_said_to_be(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "REPORT_TIMEOUT", 0.01)
    client.facts = facts()
    (row,) = await client.report()
    assert row.state == "silent for 0.01 s" and client._reports == []
