"""An engine of a fleet on another node, where the node's agent runs its process: the same front end's end as for a
process of this machine, over an encrypted connection. While its node is away it waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.executor.engine_messages import EndEngine, EngineEnded, Listening, StartEngine
from planaria.executor.link.keys import Keys
from planaria.server.far_engine import FarEngine, listed
from planaria.server.node_hosts import Host, NodeHosts
from planaria.wire import FromEngine

COME_UP = 600.0  # seconds for a process that has not ended to come up and listen
LET_GO = 10.0  # seconds after which one that was killed counts as gone: what it says reaches nobody


class NodeEngine(FarEngine):
    """On `host`."""

    def __init__(
        self, hosts: NodeHosts, host: Host, config: EngineConfig, hear: Callable[[FromEngine], None]
    ) -> None:  # fmt: skip
        super().__init__(config, hear)
        self.hosts, self.host, self.index = hosts, host, config.parallel.data_parallel_index
        loop = asyncio.get_running_loop()
        self.number = hosts.register(host, loop, self._on_news)
        self._times = 0  # that its node had come when it was started there
        self._killed = False
        self._changed = asyncio.Event()
        self._listening: Listening | None = None
        self._ended: asyncio.Future[tuple[str, bool]] = loop.create_future()

    async def start(self) -> None:
        """Wait for its node; start it there, and connect."""
        keys = Keys.generate(1)
        while not self._ended.done():
            self._changed.clear()
            if not self._times and self.host.takes_engines:
                self._begin(keys)
            if self._listening is not None:
                await self._connect_far(self._listening.address, keys)
                return
            try:
                await asyncio.wait_for(self._changed.wait(), COME_UP if self._times else None)
            except TimeoutError:
                self._has_ended(f"did not come up on {self.host} within {COME_UP:g} s", False)

    def _begin(self, keys: Keys) -> None:
        here = self.host.here
        assert here is not None
        self._times = self.host.times
        parallel = msgspec.structs.replace(self.config.parallel, master_addr=here.address)
        config = msgspec.structs.replace(self.config, parallel=parallel)
        self.hosts.share(self.index, config)
        seat = self.hosts.nodes.seat(self.index)
        data = msgspec.msgpack.encode(config)
        self.hosts.post(self.host, StartEngine(self.index, self.number, seat, data, listed(keys), self.again))

    def _on_news(self, news: Any) -> None:
        """From the node's agent; None: the node has come or gone."""
        if isinstance(news, Listening):
            self._listening, self.pid = news, news.pid
        elif isinstance(news, EngineEnded):
            self._has_ended(news.how, news.spoke)
        elif self._times and (self.host.here is None or self.host.times != self._times):
            self._has_ended(f"is out of reach: {self.host} is gone: {self.host.gone or 'it came anew'}", False)
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
        if self._times and self.host.here is not None:
            self.hosts.post(self.host, EndEngine(self.index, self.number))
            asyncio.get_running_loop().call_later(LET_GO, self._has_ended, "was given up", False)
        else:
            self._has_ended("was given up", False)
        self._changed.set()

    def _close(self) -> None:
        super()._close()
        self.hosts.forget(self.host, self.number)
