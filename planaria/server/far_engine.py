"""An engine that is reached over a network: the connection is encrypted, both ends know the other by its key, and its
break is the engine's end. Its process is a host's child.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from planaria.config.options import EngineConfig
from planaria.executor.link.keys import Keys, Pair, introduce, keep_alive
from planaria.hosts.host import Child
from planaria.server.engine_client import EngineHandle
from planaria.wire import FromEngine

LET_GO = 10.0  # seconds after which one that was killed counts as gone: what it says reaches nobody


class FarEngine(EngineHandle):
    """Who derives from this starts its process, with `_news` for news of it."""

    local = False
    ends_with_connection = False  # once it was told to end, nothing else shows that it has

    def __init__(self, config: EngineConfig, hear: Callable[[FromEngine], None]) -> None:
        super().__init__(config, hear)
        self.index = config.parallel.data_parallel_index
        self.child: Child | None = None
        self._killed = False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._over: asyncio.Future[tuple[str, bool]] = self._loop.create_future()
        self._monitor: asyncio.Task[None] | None = None
        self._events: Any = None  # of the connection

    # -- its process

    def _news(self, news: Any) -> None:
        """Of it, or of its node. Any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self.child is not None and self.child.ended:
            self._has_ended(self.child.ended, self.child.code > 0)
        self._changed.set()

    def _has_ended(self, how: str, spoke: bool) -> None:
        if not self._over.done():
            self._over.set_result((how, spoke))

    async def _wait(self) -> tuple[str, bool]:
        return await self._over

    def kill(self) -> None:
        """Also a stopped one, on whatever node."""
        if self._killed:
            return
        self._killed = True
        if self.child is not None and not self.child.ended:
            self.child.kill()
            self._loop.call_later(LET_GO, self._has_ended, "was given up", False)
        else:
            self._has_ended("was given up", False)
        self._changed.set()

    # -- its connection

    async def _connect_far(self, address: str, keys: Keys) -> None:
        """keys: of which the engine knows the driver's whole and the rest in public."""
        self.keys = Keys(Pair(keys.driver.public, ""), keys.ranks)

        def prepare(socket: zmq.Socket[Any]) -> None:
            introduce(socket, keys.driver.public, keys.ranks[0])
            keep_alive(socket, self.config.parallel.heartbeat_timeout)
            self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._monitor = asyncio.create_task(self._watch_connection(self._events))

        self.connect(address, prepare)

    async def _watch_connection(self, monitor: Any) -> None:
        while True:
            await recv_monitor_message(monitor)
            self.broke()

    def broke(self) -> None:
        """Its connection did."""
        if self.ends_with_connection:
            self._has_ended("has left", False)
        self.give_up("can't be reached: its connection broke")

    def end(self, *, followed: bool = False) -> None:
        if self._monitor is not None and not self.ends_with_connection:
            self._monitor.cancel()  # it will leave
        super().end(followed=followed)

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.cancel()
        if self._socket is not None:
            self._socket.disable_monitor()
        if self._events is not None:
            self._events.close(0)  # else the context would wait for it
        super()._close()


def listed(keys: Keys) -> Keys:
    """What the engine gets to know of its keys: not the secrets of who comes."""
    return Keys(keys.driver, tuple(Pair(pair.public, "") for pair in keys.ranks))
