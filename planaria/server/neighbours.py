"""The API processes of one server, to each other. Stored responses are kept by one of them, and an answer that was
recorded for an `Idempotency-Key` is where it was recorded: what concerns these is passed on as it came, behind the
gate, over a socket in the root's folder, and the answer comes back as it is told.

A process that has ended has a successor with the same rank. It is waited for; a stream of a response's events goes on
from the last that was told, so its client sees a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import socket
from collections.abc import AsyncGenerator

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from planaria.server.admission import client_left
from planaria.server.failure import failure, last_event

KEEPER = 0  # rank of the one that keeps responses
WAIT = 20.0  # seconds for a process that has ended to have a successor
PAUSE = 0.05  # seconds between two tries
READ_AT_ONCE = 64 << 10  # bytes
RESPONSES = b"/v1/responses"
_NOT_PASSED = frozenset({
    b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"x-request-id", b"host",
})  # fmt: skip
_OWN = frozenset({b"connection", b"transfer-encoding", b"date", b"server", b"x-request-id"})
_SAYS_NUMBER = re.compile(rb'^data: \{"type":"[a-z._]+","sequence_number":(\d+)', re.M)
_SAYS_ID = re.compile(rb'"response":\{"id":"(resp_[0-9a-f]{32})"')


class Neighbours:
    """rank, count: of this process, and of all."""

    def __init__(self, folder: str, rank: int, count: int) -> None:
        self.folder, self.rank, self.count = folder, rank, count

    def path(self, rank: int) -> str:
        return os.path.join(self.folder, f"api-{rank}")

    def listen(self) -> socket.socket:
        """For what others pass on."""
        if os.path.lexists(self.path(self.rank)):  # of a process before this one
            os.unlink(self.path(self.rank))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(self.path(self.rank))
        return sock

    def of_key(self, path: str, owner: str, key: bytes) -> int:
        """Who records the answer."""
        if path.encode().startswith(RESPONSES):
            return KEEPER
        digest = hashlib.sha256(owner.encode() + b"\0" + key).digest()
        return int.from_bytes(digest[:8], "big") % self.count

    async def pass_on(self, rank: int, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Have another process answer, for as long as the client is there."""
        passing = asyncio.create_task(_Passed(self.path(rank), scope, body).go(scope, receive, send))
        leaving = asyncio.create_task(client_left(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            leaving.cancel()
            passing.cancel()


class PassedOn(Response):
    """Of a request that the keeper of responses answers."""

    def __init__(self, neighbours: Neighbours, body: bytes) -> None:
        super().__init__()
        self.neighbours, self.passed = neighbours, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.neighbours.pass_on(KEEPER, scope, self.passed, receive, send)


async def to_keeper(request: Request) -> PassedOn | None:
    """What answers a request about stored responses; None: this process does."""
    neighbours: Neighbours | None = request.app.state.service.neighbours
    if neighbours is None or neighbours.rank == KEEPER:
        return None
    return PassedOn(neighbours, await request.body())


class _Passed:
    """One request. begun: its answer has; goes_on: it is a stream that another process can go on with, from the last
    event that was told."""

    def __init__(self, path: str, scope: Scope, body: bytes) -> None:
        self.path, self.body = path, body
        self.method: str = scope["method"]
        query: bytes = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_PASSED]
        id = scope["planaria"].id.encode()
        self.headers = [*headers, (b"host", b"neighbour"), (b"connection", b"close"), (b"x-request-id", id)]
        self.reached = self.begun = self.goes_on = self.over = False
        self._events = False  # it is a stream of events
        self._id = b""  # of the response whose they are
        self._rest = b""  # of an event that has not come whole

    async def go(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + WAIT
        while not self.over and clock() < until:
            self.reached = False
            try:
                async with contextlib.aclosing(self._asked()) as heard:
                    async for event in heard:
                        await self._tell(event, send)
                        until = clock() + WAIT
            except (OSError, h11.ProtocolError):  # it has ended
                if self.reached and not (self.goes_on or (self.method != "POST" and not self.begun)):
                    break
                self._rest = b""
                await asyncio.sleep(PAUSE)
        if self.over:
            return
        why = "the process that answers this has ended; whether it did what was asked is not known"
        if self.begun:
            said = last_event(scope["path"], why, 503, "process_ended") if self._events else b""
            await send({"type": "http.response.body", "body": said})
        else:
            await failure(why, 503, code="process_ended")(scope, receive, send)

    async def _asked(self) -> AsyncGenerator[h11.Event, None]:
        """What the other says. Raises OSError, ProtocolError: it has ended."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            http = h11.Connection(h11.CLIENT)
            headers = [*self.headers, (b"content-length", b"%d" % len(self.body))]
            asked = h11.Request(method=self.method, target=self.target, headers=headers)
            self.reached = True
            for event in (asked, h11.Data(data=self.body), h11.EndOfMessage()):
                writer.write(http.send(event) or b"")
            await writer.drain()
            heard: h11.Event | type = h11.NEED_DATA
            while not isinstance(heard, h11.EndOfMessage):
                heard = http.next_event()
                if isinstance(heard, h11.ConnectionClosed):
                    raise ConnectionError("it closed the connection")
                if isinstance(heard, h11.Event):
                    yield heard
                else:
                    http.receive_data(await reader.read(READ_AT_ONCE))
        finally:
            writer.close()

    async def _tell(self, event: h11.Event, send: Send) -> None:
        match event:
            case h11.Response() if not self.begun:
                self.begun = True
                headers = [(name, value) for name, value in event.headers if name not in _OWN]
                self._events = dict(event.headers).get(b"content-type", b"").startswith(b"text/event-stream")
                await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            case h11.Response() if event.status_code != 200:
                self.goes_on = event.status_code == 503  # not yet; else the response is not there any more
                raise ConnectionError(f"answered {event.status_code}")
            case h11.Data():
                if data := self._whole(bytes(event.data)) if self._events else bytes(event.data):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            case h11.EndOfMessage():
                self.over = True
                await send({"type": "http.response.body", "body": self._rest})

    def _whole(self, data: bytes) -> bytes:
        """Of a stream as many events as have come whole: it can go on after the last of them."""
        self._rest += data
        end = self._rest.rfind(b"\n\n") + 2
        if end < 2:
            return b""
        whole, self._rest = self._rest[:end], self._rest[end:]
        if not self._id and (found := _SAYS_ID.search(whole)) is not None:
            self._id = found.group(1)
        if self._id and (numbers := _SAYS_NUMBER.findall(whole)):
            self.goes_on, self.method, self.body = True, "GET", b""
            self.target = b"%s/%s?stream=true&starting_after=%s" % (RESPONSES, self._id, numbers[-1])
        return whole
