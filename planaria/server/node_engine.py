"""An engine of a fleet on another node, where the node's agent keeps its process: the same front end's end as for a
process of this machine, over an encrypted connection. While its node is away it waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.executor.launcher.peers import NodeChild, NodePeer
from planaria.executor.link.keys import Keys
from planaria.executor.link.tcp_socket import bracketed
from planaria.logs import current_level
from planaria.server.engine_client import ENGINE
from planaria.server.far_engine import FarEngine, listed
from planaria.server.node_hosts import NodeHosts
from planaria.wire import FromEngine

COME_UP = 600.0  # seconds for a process that has not ended to come up and listen
LET_GO = 10.0  # seconds after which one that was killed counts as gone: what it says reaches nobody


class NodeEngine(FarEngine):
    """On `peer`."""

    def __init__(
        self, hosts: NodeHosts, peer: NodePeer, config: EngineConfig, hear: Callable[[FromEngine], None]
    ) -> None:  # fmt: skip
        super().__init__(config, hear)
        self.hosts, self.peer, self.index = hosts, peer, config.parallel.data_parallel_index
        self.child: NodeChild | None = None
        self._loop = asyncio.get_running_loop()
        self._killed = False
        self._changed = asyncio.Event()
        self._ended: asyncio.Future[tuple[str, bool]] = self._loop.create_future()
        hosts.watchers.append(self._news)

    async def start(self) -> None:
        """Wait for its node; start it there, and connect."""
        keys = Keys.generate(1)
        while not self._ended.done():
            self._changed.clear()
            if self.child is None and self.peer.takes_processes:
                with contextlib.suppress(OSError):  # it has just gone
                    self.child = self._begin(keys)
            if self.child is not None and self.child.said:
                self.pid = self.child.place.pid
                await self._connect_far(self.child.said, keys)
                return
            try:
                await asyncio.wait_for(self._changed.wait(), COME_UP if self.child is not None else None)
            except TimeoutError:
                self._has_ended(f"did not come up on {self.peer} within {COME_UP:g} s", False)

    def _begin(self, keys: Keys) -> NodeChild:
        """Raises OSError."""
        here = self.peer.here
        if here is None:
            raise OSError(f"{self.peer} is gone")
        parallel = msgspec.structs.replace(self.config.parallel, master_addr=here.address)
        config = msgspec.structs.replace(self.config, parallel=parallel)
        self.hosts.share(self.index, config)
        again = ["again"] if self.again else []
        args = f"tcp://{bracketed(here.address)}:*", current_level(), *again
        return self.hosts.spawn(self.peer, self.index, ENGINE, args, config, self._news, listed(keys))

    def _news(self, news: Any) -> None:
        """Its process has said something or ended, or a node has come or gone. Any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self.child is not None and self.child.ended:
            self._has_ended(self.child.ended, self.child.code > 0)
        self._changed.set()

    async def _wait(self) -> tuple[str, bool]:
        return await self._ended

    def _has_ended(self, how: str, spoke: bool) -> None:
        if not self._ended.done():
            self._ended.set_result((how, spoke))

    def kill(self) -> None:
        """Also a stopped one."""
        if self._killed:
            return
        self._killed = True
        if self.child is not None and not self.child.ended:
            self.child.kill()
            self._loop.call_later(LET_GO, self._has_ended, "was given up", False)
        else:
            self._has_ended("was given up", False)
        self._changed.set()

    def _close(self) -> None:
        super()._close()
        with contextlib.suppress(ValueError):
            self.hosts.watchers.remove(self._news)
