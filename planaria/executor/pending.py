"""An answer that is on its way: `result` waits for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from planaria.errors import CallFailed, UserError
from planaria.executor.reply_ledger import Ticket
from planaria.protocol import Call, Failed


class Pending:
    """What every rank answers to a Call. `wait(ticket, deadline)` carries the engine on meanwhile."""

    def __init__(self, ticket: Ticket, wait: Callable[[Ticket, float | None], None]) -> None:
        self._ticket, self._wait = ticket, wait

    def done(self) -> bool:
        return self._ticket.closed

    def result(self, timeout: float | None = None) -> list[Any]:
        """The answers in rank order. Raises TimeoutError after `timeout` seconds (the call goes on, and may be waited
        for again), CallFailed where it failed on a rank, UserError where the ranks have no such method, EngineDead."""
        if not self._ticket.closed:
            self._wait(self._ticket, None if timeout is None else time.monotonic() + timeout)
        command = self._ticket.command
        assert isinstance(command, Call)
        if not self._ticket.closed:
            raise TimeoutError(f"{command.method} was not done on every rank in {timeout:g} s")
        failed = self._ticket.failed
        if failed is not None:
            raise _error(command.method, failed)
        return [getattr(reply, "value", None) for reply in self._ticket.in_order()]


class PendingCalls:
    """Calls whose answers nobody waits for in this thread: who asked hears of each when every rank has answered, or has
    ended with its epoch. call: see EngineLoop."""

    def __init__(self, call: Callable[..., Pending]) -> None:
        self.call = call
        self.open: deque[tuple[Pending, Callable[[Pending], object]]] = deque()

    def ask(self, hear: Callable[[Pending], object], *called: Any) -> None:
        """Raises as `call`."""
        self.open.append((self.call(*called), hear))

    def answer(self) -> None:
        while self.open and self.open[0][0].done():
            pending, hear = self.open.popleft()
            hear(pending)


def _error(method: str, failed: Failed) -> CallFailed | UserError:
    if failed.kind == "user":
        return UserError(failed.message)
    if failed.kind == "fenced":
        return CallFailed(f"{method} did not finish: {failed.message}")
    return CallFailed(f"{method} failed on rank {failed.rank}: {failed.message}", failed.traceback)
