"""Connections: how many there may be, and how long each may do nothing. uvicorn's protocol, with bounds that it lacks.

A connection that says nothing is closed, one that says half a header is told so.
At the bound the connection that has waited longest for its next request makes room for a new one; where all are at work
the new one is answered 503. Without descriptors or memory for another nothing is accepted for a second.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from planaria.server.failure import RETRY_AFTER, error_body

logger = logging.getLogger("planaria.server")

BACKLOG = 2048  # connections that may wait to be accepted
ACCEPT_AT_ONCE = 64
MAX_LINES = 64  # of what comes at once in a chunked request, and one more for every CHUNK_BYTES bytes
CHUNK_BYTES = 64
READ_AT_ONCE = 16 << 10  # bytes
RESERVE = 256  # descriptors left to everything that is no connection, or half of all where there are few
TURNED_AWAY = 32  # connections beyond the bound that are being told so
LINGER = 1.0  # seconds in which who is turned away reads why
ACCEPT_PAUSE = 1.0  # seconds without accepting, once there were no descriptors
SAY_AGAIN = 60.0  # seconds between log lines about the bound


def connection_bound(wanted: int) -> int:
    """How many connections this process may have, of those wanted, so that descriptors remain for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - min(RESERVE, soft // 2) - TURNED_AWAY))


class HttpConnection(H11Protocol):
    """One connection."""

    def __init__(self, listener: Listener, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.listener = listener
        self._made = self._away = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made = True
        if hasattr(transport, "max_size"):  # asyncio's own attribute; without it what comes at once is 256 KiB
            transport.max_size = READ_AT_ONCE
        if self.listener.room():
            self._watch()
        else:
            self._turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.listener.closed(self)

    def data_received(self, data: bytes) -> None:
        if self._away:
            return
        if self._crumbs(data):
            self._say(400, "Bad Request", "the body's chunks are too small", "invalid_http")
            self.transport.close()
            return
        super().data_received(data)
        self._watch()

    def _crumbs(self, data: bytes) -> bool:
        """Are these chunks of so few bytes that taking them apart would hold up everybody else?"""
        if data.count(b"\r\n") <= MAX_LINES + len(data) // CHUNK_BYTES:
            return False
        if self.conn.their_state is h11.SEND_BODY:
            return any(name == b"transfer-encoding" for name, _ in self.headers)
        return b"chunked" in data.lower()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Set or clear the deadline: what comes in drops doesn't put it off."""
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        asked = self.cycle is not None and not self.cycle.response_complete and state is not h11.IDLE
        quiet = state is h11.IDLE and not self.conn.trailing_data[0]
        self.listener.waits(self, quiet)
        if asked or (quiet and self.timeout_keep_alive_task is not None):
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.listener.header_timeout, self._late)

    def _late(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"the request's header did not come within {self.listener.header_timeout:g} s"
            self._say(408, "Request Timeout", message, "request_timeout")
        self.transport.close()

    def _turn_away(self) -> None:
        self._away = True
        self.connections.discard(self)
        self._say(503, "Service Unavailable", "too many connections; try again", "too_many_connections")
        if self.transport.can_write_eof():  # closed at once, what the client is sending would cost it the answer
            self.transport.write_eof()
            self._deadline = self.loop.call_later(LINGER, self.transport.abort)
        else:
            self.transport.close()

    def _say(self, status: int, phrase: str, message: str, code: str) -> None:
        body = msgspec.json.encode(error_body(message, status, None, code))
        retry = f"retry-after: {RETRY_AFTER}\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)

    def send_400_response(self, msg: str) -> None:
        """To bytes that are no HTTP. In the midst of an answer nothing more can be said."""
        if self.cycle is None or self.cycle.response_complete:
            self._say(400, "Bad Request", "not a valid HTTP request", "invalid_http")
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # there is nothing to upgrade to

    def close_idle(self) -> None:
        """Make room for another."""
        self.timeout_keep_alive_handler()


class Listener:
    """Accepts the connections of one socket; in place of an asyncio server, whose `close` and `wait_closed` it has.

    `most`: connections at a time. `header_timeout`: seconds for a request's header to come, and for what is left of a
    body whose answer was sent already. `shared`: other processes accept from the socket too, so that one at a time is
    taken, or the first to look would take all. `make(listener)`: a connection's protocol.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[Listener], HttpConnection],
        *,
        most: int,
        header_timeout: float,
        tls: ssl.SSLContext | None = None,
        shared: bool = False,
    ) -> None:
        self.sock, self.make, self.most, self.tls = sock, make, most, tls
        self.header_timeout = header_timeout
        self.open = 0  # those that are turned away, and those that still shake hands, too
        self._at_once = 1 if shared else ACCEPT_AT_ONCE
        self._waiting: dict[HttpConnection, None] = {}  # for a request, longest first
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | bool = False  # until a time, or until a connection closes
        self._said = -SAY_AGAIN
        self._ended = False
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._loop.add_reader(sock, self._accept)

    # -- what connections tell

    def room(self) -> bool:
        """Is there room for one that was just made? Room is made if there can be."""
        if self.open <= self.most:
            return True
        longest = next(iter(self._waiting), None)
        if longest is not None:
            longest.close_idle()
            del self._waiting[longest]
            return True
        self._say("%d connections are open, and all at work: others are answered 503", self.most)
        return False

    def waits(self, connection: HttpConnection, quiet: bool) -> None:
        """Whether it waits for its next request; asked again it keeps its place."""
        if quiet:
            self._waiting.setdefault(connection)
        else:
            self._waiting.pop(connection, None)

    def closed(self, connection: HttpConnection | None) -> None:
        if connection is not None:
            self._waiting.pop(connection, None)
        self.open -= 1
        if self._paused is True:
            self._resume()

    # -- accepting

    def _accept(self) -> None:
        for _ in range(self._at_once):
            if self.open >= self.most + TURNED_AWAY:
                self._pause(True)
                return
            try:
                conn, _ = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:  # no descriptors, no memory
                self._say("can't accept connections: %s", e.strerror or e)
                self._pause(self._loop.call_later(ACCEPT_PAUSE, self._resume))
                return
            self._open(conn)

    def _open(self, conn: socket.socket) -> None:
        self.open += 1
        task = self._loop.create_task(self._shake_hands(conn))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _shake_hands(self, conn: socket.socket) -> None:
        connection: HttpConnection | None = None
        try:
            connection = protocol = self.make(self)
            conn.setblocking(False)
            await self._loop.connect_accepted_socket(
                lambda: protocol, conn, ssl=self.tls, ssl_handshake_timeout=self.header_timeout if self.tls else None
            )
        except Exception as e:
            logger.debug("a connection could not be made: %s", e)
            conn.close()
            if connection is None or not connection._made:
                self.closed(None)

    def _pause(self, until: asyncio.TimerHandle | bool) -> None:
        self._loop.remove_reader(self.sock)
        self._paused = until

    def _resume(self) -> None:
        self._paused = False
        if not self._ended:
            self._loop.add_reader(self.sock, self._accept)

    def _say(self, line: str, value: object) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_AGAIN:
            self._said = now
            logger.warning(line, value)

    def pass_on(self, give: Callable[[socket.socket], bool]) -> None:
        """Give away connections that wait for a request, and whose clients have all that they were sent."""
        for connection in list(self._waiting):
            transport = connection.transport
            able = not transport.is_closing() and not transport.get_write_buffer_size()
            if able and give(transport.get_extra_info("socket")):
                transport.abort()  # here alone: nothing is said on it

    def adopt(self, conn: socket.socket) -> None:
        """One that another process has accepted."""
        if self._ended or self.tls is not None:
            conn.close()
        else:
            self._open(conn)

    def accept_again(self) -> None:
        """After `close`."""
        self._ended = self._paused = False
        self._loop.add_reader(self.sock, self._accept)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self.sock)
            if isinstance(self._paused, asyncio.TimerHandle):
                self._paused.cancel()

    async def wait_closed(self) -> None:
        for task in self._opening:
            task.cancel()
