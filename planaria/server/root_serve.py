"""A server of several processes: this one, the root, owns the engines and the API processes, and answers what concerns
them all. It accepts no connection itself.

The order at the end is that of `serve.py`: the API processes finish what is open and end, and only then the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator

from planaria.errors import EngineDead
from planaria.server.api_processes import ApiProcess, ApiProcesses
from planaria.server.app import create_app
from planaria.server.background import Background
from planaria.server.config import ServerConfig
from planaria.server.counts import put
from planaria.server.fleet import Fleet
from planaria.server.forward import answer
from planaria.server.root import RootEngines
from planaria.server.root_messages import Question, Replayed, ToRoot
from planaria.server.serve import ENGINE_LAST_WORDS, LAST_ANSWERS, heard, url_of
from planaria.server.service import Service

logger = logging.getLogger("planaria.server")

TICK = 0.25  # seconds between looks at the engines
FRESH = 0.1  # seconds that API processes' numbers stand for those of now
MARGIN = 5.0  # seconds an API process gets to end after its last answer
_PREFIX = "planaria-root-"


@contextlib.contextmanager
def folder_of_names() -> Iterator[str]:
    """A folder for engines' sockets, which only this user may enter; those of roots that were killed are removed. It is
    locked itself as long as its root lives; nothing in one is opened, whatever somebody may have put there."""
    for entry in os.scandir(tempfile.gettempdir()):
        if entry.name.startswith(_PREFIX):
            with contextlib.suppress(OSError):  # another user's, no folder, or its root is alive
                lock = _locked(entry.path, fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)
    folder, lock = _own_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _own_folder() -> tuple[str, int]:
    """And its lock. Another root that starts may have found it before it was locked, and removed it."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)  # mode 0700
        with contextlib.suppress(FileNotFoundError):
            lock = _locked(folder)
            if os.path.exists(folder) and os.path.samestat(os.lstat(folder), os.fstat(lock)):
                return folder, lock
            os.close(lock)


def _locked(folder: str, how: int = 0) -> int:
    """A descriptor that holds the lock. Raises OSError where there is no such folder, or, with LOCK_NB, while another
    process has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | how)
    except OSError:
        os.close(fd)
        raise
    return fd


async def serve_from_root(
    fleet: Fleet, settings: ServerConfig, sock: socket.socket, announce: Callable[[str], None], *, tokenizer: bool,
    started: float,
) -> int:  # fmt: skip
    """Serve until a signal or the engines' death; exit codes and exceptions as of `planaria.server.serve.serve`. fleet:
    was started, with a folder of names; sock: bound; tokenizer: whether there is one; announce: gets the line that says
    it is ready, when it is."""
    with sock:
        apis = ApiProcesses(fleet.config, settings, tokenizer, sock)
        root = Root(fleet, apis, settings)
        root.engines.publish()
        try:
            await apis.start(fleet.config.parallel.api_server_count)
            with heard(root.on_signal):
                return await root.run(lambda: announce(
                    f"Planaria serving {root.service.model_names[0]} at {url_of(sock, settings)} "
                    f"(ready in {time.monotonic() - started:.1f} s)"
                ))  # fmt: skip
        finally:
            await apis.ended(0.0)


class Root:
    """The root's life, from the start of its processes to the exit code."""

    def __init__(self, fleet: Fleet, apis: ApiProcesses, settings: ServerConfig) -> None:
        self.client, self.apis = fleet.dispatcher, apis
        self.engines = RootEngines(fleet, apis)
        self.app = create_app(fleet.dispatcher, None, settings)
        self.service: Service = self.app.state.service
        if (traces := self.service.traces) is not None:
            self.engines.recoveries, traces.on_recovered = traces.recovered, self.engines.publish
        self.code = 0
        self._told = asyncio.Event()  # a signal has come
        self._counting, self._counted = asyncio.Lock(), -FRESH
        self._answering = Background()
        apis.hear = self._hear

    async def run(self, announce: Callable[[], None]) -> int:
        """Until the end has come and the API processes have ended."""
        starting = asyncio.create_task(self._start(announce))
        told = asyncio.create_task(self._told.wait())
        try:
            while not (self._told.is_set() or self._over(starting)):
                pending = {told} if starting.done() else {told, starting}
                await asyncio.wait(pending, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                if self.service.history.due(time.monotonic()):
                    await self._count()
                    self.service.sample()
            await self.apis.ended(
                ENGINE_LAST_WORDS + MARGIN if self.code == 1
                else self.service.config.shutdown_timeout + LAST_ANSWERS + MARGIN
            )  # fmt: skip
            if starting.done() and not starting.cancelled():
                starting.result()
            return self.code
        finally:
            starting.cancel()
            told.cancel()
            self.service.close()

    async def _start(self, announce: Callable[[], None]) -> None:
        await self.client.ready()
        await self.apis.serving()
        if not self.apis.failure:
            announce()

    def _over(self, starting: asyncio.Task[None]) -> bool:
        """Can nothing be served any more?"""
        dead, failure = self.client.dead, self.apis.failure
        if starting.done() and starting.exception() is not None:
            self.service.drain(f"the engine could not start: {starting.exception()}")
            self.apis.stop()
            self.code = 1
        elif dead is not None and self.client.facts is not None:
            self.service.end(dead)
            self.apis.stopping = True  # they see it too, answer what is open and end
            self.code = 1
        elif failure:
            self.service.drain(failure)
            self.apis.stop()
            raise EngineDead(failure)
        return bool(self.code)

    def on_signal(self, number: int) -> None:
        """The first drains; the second aborts what is open."""
        if self._told.is_set():
            self.code = 128 + number
        else:
            self.service.drain("the server is shutting down")
            logger.info("%s: no new requests", signal.Signals(number).name)
            self._told.set()
        self.apis.stop()

    # -- what the API processes say

    def _hear(self, api: ApiProcess, message: ToRoot) -> None:
        if isinstance(message, Question):
            self._answering.start(self._answer(api, message))
        elif isinstance(message, Replayed):
            self.service.faults.replayed(message.engine, message.requests, message.tokens)
        else:
            self.engines.hear(api, message)

    async def _answer(self, api: ApiProcess, question: Question) -> None:
        """From the application that every server has; its numbers are those of all API processes."""
        await self._count()
        api.channel.send(await answer(self.app, question))

    async def _count(self) -> None:
        """Have the service's numbers be those of all API processes, as they were `FRESH` seconds ago at most: whoever
        asks for them, and however often, each process hears one question at a time."""
        async with self._counting:
            if time.monotonic() >= self._counted + FRESH:
                await self.apis.count()
                self.client.elsewhere = self.apis.totals
                put(self.apis.totals, self.service)
                self._counted = time.monotonic()
