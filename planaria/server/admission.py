"""What is open at a server's port, and whether anything is let in there: the same for a server of one model and of
several.

The rule kept here: from the moment of `drain` nothing new is admitted, and `idle` is set once nothing is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from planaria.errors import RequestError
from planaria.server.config import ServerConfig
from planaria.wire import Dead

if TYPE_CHECKING:
    from planaria.server.neighbours import Neighbours
    from planaria.server.traces import Traces

T = TypeVar("T")


async def client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Admission:
    """Of one port. Who has engines behind it says the rest."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.traces: Traces | None = None
        self.neighbours: Neighbours | None = None  # other API processes of this server
        self.draining = ""  # the reason, for those who are turned away
        self.leaving = False  # another process has taken over: a connection ends with its next answer, if it is here
        self.reading: dict[asyncio.Timeout, None] = {}  # of requests whose body is still coming
        self.requests = 0  # HTTP requests being answered
        self.outer: Admission | None = None  # of the port, where several models are behind it
        self._texts = ThreadPoolExecutor(1, "planaria-text")
        self.idle = asyncio.Event()
        self.idle.set()

    # -- of its engines

    @property
    def title(self) -> str:
        """What is served, for a line."""
        raise NotImplementedError

    @property
    def coming(self) -> bool:
        """Is it still loaded for the first time?"""
        raise NotImplementedError

    async def ready(self) -> None:
        """Wait until it can be used. Raises UserError, CapacityError or EngineDead if it never will be."""
        raise NotImplementedError

    def begin(self) -> None:
        """It is said to be ready."""
        raise NotImplementedError

    def look(self) -> Dead | None:
        """Some times a second: note how things are. Why nothing will come any more, if so."""
        raise NotImplementedError

    @property
    def runs(self) -> bool:
        """Does something that nobody need be connected to?"""
        raise NotImplementedError

    def end(self, dead: Dead) -> None:
        """The last engine has ended: nothing will come any more."""
        raise NotImplementedError

    def abort_all(self, message: str, status: int = 503, code: str = "aborted") -> int:
        """Answer everything open with an error; returns how many requests that were."""
        raise NotImplementedError

    # -- what is open

    def enter(self) -> None:
        """An HTTP request begins to be answered."""
        self.requests += 1
        self.idle.clear()
        if self.outer is not None:
            self.outer.enter()

    def leave(self) -> None:
        self.requests -= 1
        if not self.requests:
            self.idle.set()
        if self.outer is not None:
            self.outer.leave()

    def drain(self, reason: str) -> None:
        """Admit nothing from now on, nor wait for what has come in half."""
        self.draining = self.draining or reason
        for clock in self.reading:
            if not clock.expired():
                clock.reschedule(0)

    async def in_thread(self, work: Callable[[], T], gone: Receive | None = None, thread: Executor | None = None) -> T:
        """Run a long piece of text work beside the event loop.

        One thread for all of it: it must not take the cores the engine computes with; `thread`: another. `gone`: the
        request's `receive`, once its body was read; work whose client leaves before it began isn't done, and
        RequestError is raised.
        """
        doing = asyncio.get_running_loop().run_in_executor(thread or self._texts, work)
        if gone is None:
            return await doing
        leaving = asyncio.ensure_future(client_left(gone))
        either: set[asyncio.Future[Any]] = {doing, leaving}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise RequestError("the client is gone", status=499, code="aborted")
            return doing.result()
        finally:
            doing.cancel()
            leaving.cancel()

    def close(self) -> None:
        """Let go of the threads."""
        if self.traces is not None:
            self.traces.close()
        self._texts.shutdown(wait=False, cancel_futures=True)
