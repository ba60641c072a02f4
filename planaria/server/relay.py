"""The front end of a node whose engine has its server on another: what is sent to this node's port goes to that
server as it came (TLS too), and its answers come back.

It decides nothing, so the gate, limits and keys are that server's. Where that server isn't there, connections end at
once, which is how a balancer hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from asyncio import StreamReader, StreamWriter

from planaria.config.secret import is_loopback
from planaria.errors import ConfigError
from planaria.node import resolve_host
from planaria.server.config import ServerConfig
from planaria.server.connections import connection_bound
from planaria.server.serve import bind, url_of

logger = logging.getLogger("planaria.server")

CONNECT = 5.0  # seconds of an attempt to reach the server
PIECE = 64 << 10  # bytes taken at a time: what a slow reader makes this process hold


class Relay:
    """config: of the server there, whose port it has; first: the address of its node. Raises ConfigError: its own
    address can't be had, or strangers would come from the server's own machine, whose users it trusts."""

    def __init__(self, config: ServerConfig, first: str) -> None:
        self.config, self.first = config, resolve_host(first)
        if is_loopback(self.first):
            raise ConfigError(
                "--data-parallel-address", first, "is this machine, and a server trusts who comes from its own",
                "give an address that the other nodes have, too",
            )  # fmt: skip
        self.sock = bind(config)
        self._open = 0

    def start(self) -> None:
        """Accept until the process ends, in a thread."""
        self.most = min(self.config.max_connections, connection_bound(2 * self.config.max_connections) // 2)
        threading.Thread(target=lambda: asyncio.run(self._accept()), daemon=True, name="relay").start()
        logger.info("serving at %s what node 0 (%s) serves", url_of(self.sock, self.config), self.first)

    async def _accept(self) -> None:
        async with await asyncio.start_server(self._pass, sock=self.sock, limit=PIECE) as server:
            await server.serve_forever()

    async def _pass(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._open += 1
        there = None
        try:
            if self._open > self.most:
                return
            address = asyncio.open_connection(self.first, self.config.port, limit=PIECE)
            answers, there = await asyncio.wait_for(address, CONNECT)
            for end in (writer, there):
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, there))
                both.create_task(_copy(answers, writer))
        except* (OSError, TimeoutError):
            pass  # whoever is left hears it by the end of the connection
        finally:
            self._open -= 1
            for end in (writer, *([there] if there is not None else [])):
                end.transport.abort()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    """To the end of what comes. Raises OSError."""
    while piece := await reader.read(PIECE):
        writer.write(piece)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
