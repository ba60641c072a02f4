"""An engine that is reached over a network: the connection is encrypted, both ends know the other by its key, and its
break is the engine's end.
"""

from __future__ import annotations

import asyncio
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from planaria.executor.link.gatekeeper import introduce, keep_alive
from planaria.executor.link.keys import Keys, Pair
from planaria.server.engine_client import EngineHandle


class FarEngine(EngineHandle):
    """Who derives from this says how it is started and how it ended."""

    local = False
    ends_with_connection = False  # once it was told to end, nothing else shows that it has
    _monitor: asyncio.Task[None] | None = None
    _events: Any = None  # of the connection

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
