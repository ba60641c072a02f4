"""An engine of a fleet on another node, where the node's agent keeps its process: the same front end's end as for a
process of this machine, over an encrypted connection. While its node is away it waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

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


class NodeEngine(FarEngine):
    """On `peer`."""

    def __init__(
        self, hosts: NodeHosts, peer: NodePeer, config: EngineConfig, hear: Callable[[FromEngine], None]
    ) -> None:  # fmt: skip
        super().__init__(config, hear)
        self.hosts, self.peer = hosts, peer
        hosts.watchers.append(self._news)

    async def start(self) -> None:
        """Wait for its node; start it there, and connect."""
        keys = Keys.generate(1)
        while not self._over.done():
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
        again = ["again"] if self.again else []
        args = f"tcp://{bracketed(here.address)}:*", current_level(), *again
        return self.hosts.spawn(self.peer, self.index, ENGINE, args, config, self._news, listed(keys))

    def _close(self) -> None:
        super()._close()
        with contextlib.suppress(ValueError):
            self.hosts.watchers.remove(self._news)
