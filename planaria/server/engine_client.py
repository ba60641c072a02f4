"""One engine, as a front end knows it: started, listened to, watched, ended. `keeper.py` starts another when it
ends. Here as a process of this machine; `ray_engine.py` has it as an actor.

Its socket is its own, so nothing of an engine that was given up is ever heard again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from planaria.config.options import EngineConfig
from planaria.executor.link.keys import Keys
from planaria.hosts.host import Child, Program
from planaria.hosts.local import HERE, LocalHost
from planaria.hosts.memory import KVMemory
from planaria.hosts.weights import WeightsMemory
from planaria.logs import current_level
from planaria.node import Memories, process_state
from planaria.wire import Dead, FromEngine, Shutdown, ToEngine

logger = logging.getLogger("planaria.server")

ENGINE = "planaria.engine_process"  # what an engine's process runs
LAST_WORDS = 0.5  # seconds the next message of an ended process may still take
# Seconds an engine gets to end by itself: it may be importing what joins ranks of nodes, and where it is killed the
# agents of other nodes wait for its successor.
EXIT_TIMEOUT = 20.0
LOOK = 0.25  # seconds between looks at a process that is not known to have ended
STOPPED = 2.0  # seconds a process may be stopped (SIGSTOP) before it counts as lost
ROOM = 64  # messages that wait here unread; more of them wait with the engine, which makes fewer of them
SOON_MS, LATER_MS = 2, 100  # between attempts to connect, at first and in the end
SLICE = 0.004  # seconds of an engine's messages after which others have their turn in the event loop


class Ended(msgspec.Struct, frozen=True):
    """How a process ended. `said`: what it said of that itself. Seconds: `detect` until it was sure that it had to end,
    `fence` until it had."""

    how: str
    said: Dead | None = None
    detect: float = 0.0
    fence: float = 0.0


class EngineConnection:
    """The front end's end of an engine's socket. `hear` gets every message; an exception of it counts as the engine's
    fault."""

    pid = 0

    def __init__(self, hear: Callable[[FromEngine], None]) -> None:
        self.hear = hear
        self.heard = 0  # messages
        self.silent = 0.0  # seconds without one, by looks: a server that was stopped itself doesn't count them
        self._said: asyncio.Future[Dead] = asyncio.get_running_loop().create_future()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.address = ""  # of the engine's socket, once it is known
        self.keys: Keys | None = None  # that who comes there needs, where it is open to other nodes
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._there: zmq.Socket[bytes] | None = None  # the same, to read what has come without a future for each
        self._listener: asyncio.Task[None] | None = None

    def connect(self, address: str, prepare: Callable[[zmq.Socket[Any]], None] = lambda socket: None) -> None:
        """prepare: sets options of the socket."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        options = (
            (zmq.SNDHWM, 0), (zmq.RCVHWM, ROOM), (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, SOON_MS), (zmq.RECONNECT_IVL_MAX, LATER_MS),  # its process may not listen yet
        )  # fmt: skip
        for option, value in options:
            self._socket.setsockopt(option, value)
        prepare(self._socket)
        self._socket.connect(address)
        self._there = zmq.Socket.shadow(self._socket.underlying)
        self._socket.send(b"")
        self._listener = asyncio.create_task(self._listen())
        self.address = address

    def send(self, message: ToEngine) -> None:
        assert self._socket is not None
        # With no high-water mark a send never waits, so the future is done at once.
        self._socket.send(self._encoder.encode(message))

    def give_up(self, why: str) -> None:
        """It can't be trusted any more: `ended` kills it."""
        if not self._broken.done():
            self._broken.set_result(why)

    def trouble(self, limit: float | None) -> str:
        """Looked at each LOOK seconds: why it is to be given up, or "". limit: seconds that it may be silent."""
        # Looks are counted and not seconds: a whole process group that was stopped for a while has done nothing.
        self.silent = self.silent + LOOK if limit is not None else 0.0
        if self._broken.done():
            return self._broken.result()
        return f"said nothing for {self.silent:.0f} s" if limit is not None and self.silent > limit else ""

    async def _listen(self) -> None:
        assert self._socket is not None
        try:
            while True:
                coming = asyncio.ensure_future(self._socket.recv())
                if coming.done():  # to wait for it would give nobody a turn
                    await asyncio.sleep(0)
                data, until = await coming, time.monotonic() + SLICE
                with contextlib.suppress(zmq.Again):
                    self._take(data)
                    while self._there is not None and time.monotonic() < until:
                        self._take(self._there.recv(zmq.NOBLOCK))
        except Exception as e:
            logger.debug("what the engine said could not be used", exc_info=True)
            self.give_up(f"said what can't be: {e}")

    def _take(self, data: bytes) -> None:
        message = self._decoder.decode(data)
        self.silent, self.heard = 0.0, self.heard + 1
        if isinstance(message, Dead) and not self._said.done():
            self._said.set_result(message)
        self.hear(message)

    async def last_words(self) -> None:
        """Hear an engine that has ended out: what it said before it said why is read first."""
        heard = -1
        while not self._said.done() and heard < self.heard:
            heard = self.heard
            await asyncio.wait({self._said}, timeout=LAST_WORDS)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        if self._socket is not None and self._context is not None:
            self._socket.close()
            self._context.term()


class EngineHandle(EngineConnection):
    """And one that started its process."""

    local = True  # it is a process of this machine
    shares_memory = False  # and takes memory for its KV and weights, of who keeps it

    def __init__(self, config: EngineConfig, hear: Callable[[FromEngine], None]) -> None:
        super().__init__(hear)
        self.config = config
        self.again = False  # another served before it; set before `start`
        self.shared_in: str | None = None  # a folder where the socket's name stays, for others who come
        self.memory: KVMemory | None = None  # that its KV is in, so that the process after it finds it
        self.weights: WeightsMemory | None = None  # of the node, and so of all engines that are here

    async def prepare(self) -> None:
        """Have all there that needs neither memory nor cores of an engine; `start` goes on from there."""

    async def start(self) -> None:
        """Start it and begin to listen."""
        raise NotImplementedError

    def connected(self) -> None:
        """Both ends are."""

    async def ended(self, most_silent: Callable[[], float | None]) -> Ended:
        """Wait for its end; one that is stopped, or silent for longer than it may be (in seconds; None: as long as it
        likes), is killed. Nothing is heard of it after this."""
        exit = asyncio.ensure_future(self._wait())
        stopped, detect, why = 0.0, 0.0, ""
        while not why:
            either: set[asyncio.Future[Any]] = {exit, self._broken}
            await asyncio.wait(either, timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
            if exit.done():
                break
            stopped = stopped + LOOK if self.local and process_state(self.pid) == "T" else 0.0
            why = self.trouble(most_silent())
            if not self._broken.done() and stopped >= STOPPED:
                why, detect = "was stopped", stopped
            elif why and not self._broken.done():
                detect = self.silent
        began = time.monotonic()
        if why:
            self.kill()
        how, spoke = await exit
        fence = time.monotonic() - began
        if not why and spoke:  # what it said before it ended is the better reason, and may not have been read yet
            await self.last_words()
        self._close()
        return Ended(why or how, self._said.result() if self._said.done() else None, detect, fence)

    async def _wait(self) -> tuple[str, bool]:
        """For its end: how it was, and whether it said why before."""
        raise NotImplementedError

    def _close(self) -> None:
        self.close()

    def end(self, *, followed: bool = False) -> None:
        """Ask it to, while it runs; `ended` says when it has. followed: by another process."""
        self.send(Shutdown(followed))

    def kill(self) -> None:
        """Also a stopped one."""
        raise NotImplementedError


class Ending:
    """A process's end, for who waits for it in this event loop."""

    def __init__(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()

    def news(self, child: Child) -> None:
        """Of its host."""
        if child.ended:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                self._loop.call_soon_threadsafe(self._over.set)

    async def wait(self) -> None:
        await self._over.wait()


class EngineProcess(EngineHandle):
    """A process of this machine, its socket in a folder that only this user may enter. host: keeps it."""

    shares_memory = True

    def __init__(self, config: EngineConfig, hear: Callable[[FromEngine], None], host: LocalHost | None = None) -> None:
        super().__init__(config, hear)
        self.host = host or LocalHost(devices=())
        self.child: Child | None = None
        self._end = Ending()
        self._folder = ""

    async def prepare(self) -> None:
        """Start the process, which imports and waits to be told what it is for. Raises OSError, with nothing left."""
        self._folder = tempfile.mkdtemp(prefix="planaria-", dir=self.shared_in)  # mode 0700
        try:
            args = (f"ipc://{self._folder}/engine", current_level(), *(["again"] if self.again else []))
            entry = Program(ENGINE, args, self.config.device.devices)
            spawn = functools.partial(self.host.spawn, (HERE, 0), entry, None, self._end.news)
            self.child = await asyncio.to_thread(spawn)  # the first may wait for imports
            self.pid = self.child.place.pid
        except BaseException:
            self.kill()
            self._close()
            raise

    async def start(self) -> None:
        """Start the process, if it isn't yet, and begin to listen. Raises OSError, with nothing left of it."""
        if self.child is None:
            await self.prepare()
        assert self.child is not None
        try:
            self.child.tell(msgspec.msgpack.encode((self.config, Memories.of(self.memory, self.weights))))
            self.connect(f"ipc://{self._folder}/engine")
        except BaseException:
            self.kill()
            self._close()
            raise

    def connected(self) -> None:
        """Both ends are, so nothing needs the socket's name: a kill leaves no folder behind."""
        if self.shared_in is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait(self) -> tuple[str, bool]:
        assert self.child is not None
        await self._end.wait()
        return self.child.ended, self.child.code > 0

    def kill(self) -> None:
        """Also a stopped one."""
        if self.child is not None:
            self.child.kill()

    def _close(self) -> None:
        super()._close()
        shutil.rmtree(self._folder, ignore_errors=True)
