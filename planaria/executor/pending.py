"""An answer that is on its way: `result` waits for it."""

from __future__ import annotations

import time
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


def _error(method: str, failed: Failed) -> CallFailed | UserError:
    if failed.kind == "user":
        return UserError(failed.message)
    if failed.kind == "fenced":
        return CallFailed(f"{method} did not finish: {failed.message}")
    return CallFailed(f"{method} failed on rank {failed.rank}: {failed.message}", failed.traceback)
