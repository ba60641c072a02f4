"""Mistakes in a fleet, its layouts and its health; see `mutations.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from planaria.core.router import Router
from planaria.executor.layout_change import LayoutChanger
from planaria.executor.loop import EngineLoop
from planaria.executor.reply_ledger import Ticket
from planaria.server.dispatcher import Dispatcher
from planaria.server.engine_client import EngineHandle
from planaria.server.faults import FaultLog
from planaria.server.keeper import EngineKeeper
from planaria.server.stream import Stream
from planaria.wire import Submit


@contextmanager
def keep_the_answering_rank() -> Iterator[None]:
    """Tokens are taken from the rank that drew them in the first layout."""
    complete = EngineLoop.complete

    def believe(self: EngineLoop, ticket: Ticket) -> None:
        now, self.gang.layout = self.gang.layout, self.config.parallel.layout
        try:
            complete(self, ticket)
        finally:
            self.gang.layout = now

    with patch.object(EngineLoop, "complete", believe):
        yield


@contextmanager
def lose_a_request_at_a_layout_change() -> Iterator[None]:
    change = EngineLoop._change

    def lose(self: EngineLoop, layout: Any, why: str) -> None:
        assert self.core is not None
        for request in self.core.snapshot()[:1]:
            self.core.cancel(request.id)  # and nobody is told
        change(self, layout, why)

    with patch.object(EngineLoop, "_change", lose):
        yield


@contextmanager
def mix_up_the_lanes() -> Iterator[None]:
    """What one lane drew is taken for another's."""
    commit = EngineLoop._commit

    def turn_round(self: EngineLoop, plan: Any, parts: Any) -> None:
        commit(self, plan, parts[::-1])

    with patch.object(EngineLoop, "_commit", turn_round):
        yield


@contextmanager
def never_grow() -> Iterator[None]:
    with patch.object(LayoutChanger, "look_for_room", lambda self, spares: None):
        yield


@contextmanager
def route_to_an_engine_that_left() -> Iterator[None]:
    """Who was once open to new work stays so."""
    settle = Router._settle

    def stay(self: Router, engine: Any) -> None:
        if engine.up and not engine.draining:
            settle(self, engine)

    with patch.object(Router, "_settle", stay):
        yield


@contextmanager
def move_with_the_tokens_as_a_prompt() -> Iterator[None]:
    """What has been told counts as asked: the other engine numbers its tokens from 0."""

    def ask(self: Stream) -> Submit:
        return msgspec.structs.replace(self.submit, id=self.name, prompt=self.history(), output=[])

    with patch.object(Stream, "resubmit", ask):
        yield


@contextmanager
def leave_them_there() -> Iterator[None]:
    """What an engine has stays there, whatever becomes of it."""
    with patch.object(Dispatcher, "rescue", lambda self, engine, *, certainly=False: None):
        yield


@contextmanager
def always_healthy() -> Iterator[None]:
    with patch.object(FaultLog, "recovering", property(lambda self: False)):
        yield


@contextmanager
def trust_silence() -> Iterator[None]:
    """An engine's process is lost only when it has ended."""
    ended = EngineHandle.ended

    async def patient(self: EngineHandle, most_silent: Any) -> Any:
        return await ended(self, lambda: None)

    with patch.object(EngineHandle, "ended", patient):
        yield


@contextmanager
def dawdle_before_another() -> Iterator[None]:
    """An engine's end is noticed, and another is started two minutes later."""

    begin = EngineKeeper._begin

    async def dawdle(self: EngineKeeper, handle: EngineHandle) -> None:
        if self.number:
            await asyncio.sleep(120.0)
        await begin(self, handle)

    with patch.object(EngineKeeper, "_begin", dawdle):
        yield


@contextmanager
def count_no_fault_of_who_leaves() -> Iterator[None]:
    """What an engine was recovering from is forgotten when it leaves."""
    settled = FaultLog.settled

    def forget(self: FaultLog, index: int) -> None:
        self.faults["engine"] -= index in self.open
        settled(self, index)

    with patch.object(FaultLog, "settled", forget):
        yield
