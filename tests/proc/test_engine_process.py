"""An engine process that can't be trusted or says nothing is killed, and how it ended is known."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from planaria.config.resolve import resolve
from planaria.llm import make_options
from planaria.server import engine_client
from planaria.server.engine_client import EngineProcess
from planaria.server.stream import Gap
from planaria.types import SamplingParams
from planaria.wire import EngineFacts, Output, Submit
from tests.proc.servers import alive, needs_smollm2

pytestmark = needs_smollm2


async def end_of(
    monkeypatch: pytest.MonkeyPatch, harm: Callable[[EngineProcess], None], *, most_silent: float | None = None
) -> Any:
    """Start an engine, harm it when it is ready; how it ended."""
    monkeypatch.setattr(engine_client, "STOPPED", 0.5)
    up = False

    def hear(message: Any) -> None:
        nonlocal up
        if isinstance(message, EngineFacts):
            engine.connected()
            up = True
            harm(engine)
        if isinstance(message, Output):
            raise Gap("the engine skipped a token")

    engine = EngineProcess(resolve(make_options("smollm2", {"null_worker": True})), hear)
    await engine.start()
    async with asyncio.timeout(100):
        ended = await engine.ended(lambda: most_silent if up else None)
    assert up and not alive(engine.pid) and not os.path.exists(engine._folder)
    return ended


async def test_a_stopped_engine_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = await end_of(monkeypatch, lambda engine: os.kill(engine.pid, signal.SIGSTOP))
    assert ended.how == "was stopped" and ended.detect >= 0.5


async def test_an_engine_that_says_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = await end_of(monkeypatch, lambda engine: None, most_silent=0.4)
    assert ended.how.startswith("said nothing for ")


async def test_an_engine_that_says_what_cannot_be_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Submit("a", [1, 2, 3], SamplingParams(), 1, 5)
    ended = await end_of(monkeypatch, lambda engine: engine.send(submit))
    assert ended.how == "said what can't be: the engine skipped a token"
