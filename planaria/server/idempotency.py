"""`Idempotency-Key`: a POST that is sent again gets the answer of the first, and nothing runs twice.

The request that brings a key first runs with its answer recorded, and is the recording's first reader. Whoever brings
the same key, path and body meanwhile or later reads it too, from its beginning, at a pace of its own: nobody waits for
another reader. The run ends early when nobody reads any more. What went well is kept for `AGE`, within `MAX_BYTES`.

A recording that is too large, or that makes room, is forgotten: the next request with its key runs. While it still
runs, no more of it is held than its readers have still to read.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planaria.server.admission import Admission, client_left
from planaria.server.config import ServerConfig
from planaria.server.failure import failure, last_event

HEADER = b"idempotency-key"
MAX_KEY = 255  # bytes
AGE = 3600.0  # seconds from its end that an answer is kept
MAX_ANSWER = 16 << 20  # bytes of one that is kept, and of what one reader leaves unread of one that isn't
MAX_BYTES = 64 << 20  # of all answers that are kept or are being recorded
LEAST = 8 << 10  # bytes that an answer counts for, however short
CHUNK = 64 << 10  # bytes that a reader is given at a time
LONG_BODY = 1 << 20  # bytes from which a body is hashed in a thread
# Refusals that another moment may not bring, for which clients send a request again by themselves; and 422: another
# request has the key, which another server knows.
PASSING = (404, 408, 409, 422, 429)
_KEY = re.compile(rb"[^\x00-\x1f\x7f]{1,%d}\Z" % MAX_KEY)


def owner_of(scope: Scope, config: ServerConfig) -> str:
    """Whose request it is: a digest of its API key; "" where the server has none."""
    if not config.api_keys:
        return ""
    key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")[2].strip()
    return hashlib.sha256(b"planaria\0" + key).hexdigest()


class Recording:
    """An answer, as far as there is one: written by a run, read by any number of clients."""

    def __init__(self, store: Idempotency, scope: Scope, owner: str, key: bytes, digest: bytes, body: Message) -> None:
        self.store, self.info, self.owner, self.key, self.digest = store, scope["planaria"], owner, key, digest
        self.body: Message | None = body
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.data = bytearray()
        self.dropped = 0  # bytes before `data`
        self.readers: dict[asyncio.Task[None], int] = {}  # how far each is
        self.left = asyncio.Event()  # by all of them, before the end
        self.more = asyncio.Event()  # replaced each time that it is set
        self.over = self.whole = False  # it has ended; and with all there was to say
        self.size = 0  # what `store` counts it for; 0: it is forgotten
        self.timer: asyncio.TimerHandle | None = None

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self.receive, self.send)
        finally:
            self.over = True
            # An error within a stream has a status of 200, and is known to the line of the log.
            well = self.status < 500 and (self.status >= 400 or self.info.error is None)
            if self.whole and well and self.status not in PASSING and self.size:
                self.timer = asyncio.get_running_loop().call_later(AGE, self.store.forget, self)
            else:
                self.store.forget(self)
            self._wake()

    async def receive(self) -> Message:
        body, self.body = self.body, None
        if body is not None:
            return body
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = self.info.status = message["status"]
            self.headers = list(message.get("headers", ()))
        else:
            self.data += message.get("body", b"")
            self.whole = not message.get("more_body", False)
            self.store.count(self)
            if not self.size and not self.whole:
                self._trim()
        self._wake()

    def _wake(self) -> None:
        self.more.set()
        self.more = asyncio.Event()

    def _trim(self) -> None:
        """Hold what somebody has still to read, and leave behind who is too slow."""
        while self.readers:
            slowest = min(self.readers, key=self.readers.__getitem__)
            passed = self.readers[slowest] - self.dropped
            del self.data[:passed]
            self.dropped += passed
            if len(self.data) <= MAX_ANSWER:
                return
            self._leave(slowest)

    def _leave(self, reader: asyncio.Task[None]) -> None:
        reader.cancel()
        if self.readers.pop(reader, None) is not None and not self.readers and not self.over:
            self.left.set()
            self.store.forget(self)

    async def follow(self, scope: Scope, receive: Receive, send: Send, *marks: tuple[bytes, bytes]) -> None:
        """Give the whole answer to a client, until it leaves. marks: headers for it alone."""
        reading = asyncio.create_task(self._read(send, marks))
        leaving = asyncio.create_task(client_left(receive))
        self.readers[reading] = 0
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if reading not in self.readers:
                said = f"the client left {MAX_ANSWER >> 20} MiB of the answer unread", "client_too_slow"
                scope["planaria"].error = (said[1], None, said[0])
                await send({"type": "http.response.body", "body": last_event(scope["path"], said[0], 503, said[1])})
            elif reading.done():
                reading.result()
        finally:
            leaving.cancel()
            self._leave(reading)

    async def _read(self, send: Send, marks: tuple[tuple[bytes, bytes], ...]) -> None:
        me = asyncio.current_task()
        assert me is not None
        begun = False
        while True:
            more, at = self.more, self.readers[me] - self.dropped
            chunk = bytes(self.data[at : at + CHUNK])
            if len(chunk) == CHUNK and (end := chunk.rfind(b"\n\n")) > 0:
                chunk = chunk[: end + 2]  # whole events
            last = self.over and at + len(chunk) == len(self.data)
            if self.status and not begun:
                begun = True
                headers = [*self.headers, *marks]
                await send({"type": "http.response.start", "status": self.status, "headers": headers})
            if last and not self.whole:
                raise RuntimeError(f"request {self.info.id}, whose answer this was to be, has failed")
            self.readers[me] += len(chunk)
            if chunk or last:
                await send({"type": "http.response.body", "body": chunk, "more_body": not last})
            if last:
                return
            if not chunk:
                await more.wait()


class Idempotency:
    """Answers by who sent the key (`owner_of`) and by the key."""

    def __init__(self, app: ASGIApp, service: Admission) -> None:
        self.app, self.service = app, service
        self.known: dict[str, dict[bytes, Recording]] = {}
        self.sizes: Counter[str] = Counter()
        self.size = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a POST that has the header."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        key, body = headers[HEADER], await receive()
        if not _KEY.match(key):
            wrong = f"Idempotency-Key takes 1 to {MAX_KEY} bytes, none of them a control character; it has {len(key)}"
            await failure(wrong, param="Idempotency-Key", code="invalid_value")(scope, receive, send)
            return
        owner, neighbours = owner_of(scope, self.service.config), self.service.neighbours
        if neighbours is not None and (rank := neighbours.of_key(scope["path"], owner, key)) != neighbours.rank:
            await neighbours.pass_on(rank, scope, body["body"], receive, send)
            return

        def work() -> bytes:
            return hashlib.sha256(scope["path"].encode() + b"\0" + body["body"]).digest()

        digest = work() if len(body["body"]) < LONG_BODY else await self.service.in_thread(work)
        recording = self.known.get(owner, {}).get(key)
        if recording is None:
            recording = Recording(self, scope, owner, key, digest, body)
            self.known.setdefault(owner, {})[key] = recording
            self.count(recording)
            running = asyncio.create_task(recording.run(self.app, scope))
            try:
                await recording.follow(scope, receive, send)
            finally:
                await running  # others may still read; what it holds and what is said of it are this request's
        elif recording.digest != digest:
            other = "Idempotency-Key was sent before with another body or path: a key stands for one request"
            await failure(other, 422, param="Idempotency-Key", code="idempotency_key_reused")(scope, receive, send)
        else:
            await recording.follow(scope, receive, send, (b"idempotent-replayed", b"true"))
            info = scope["planaria"]
            info.status = info.status or 499  # it left before there was anything
            info.log(f": the answer of {recording.info.id}")

    def count(self, recording: Recording) -> None:
        """It is new, or has grown: have all be within the bounds."""
        if self.known.get(recording.owner, {}).get(recording.key) is not recording:
            return
        self._charge(recording, max(LEAST, len(recording.data)))
        if recording.size > MAX_ANSWER:
            self.forget(recording)
        while self.size > MAX_BYTES:  # who has most makes room, with what is over before what runs
            own = self.known[max(self.sizes, key=self.sizes.__getitem__)].values()
            self.forget(next((one for one in own if one.over), next(iter(own))))

    def forget(self, recording: Recording) -> None:
        if recording.timer is not None:
            recording.timer.cancel()
        if recording.size:
            self._charge(recording, 0)
            own = self.known[recording.owner]
            del own[recording.key]
            if not own:
                del self.known[recording.owner], self.sizes[recording.owner]

    def _charge(self, recording: Recording, size: int) -> None:
        self.sizes[recording.owner] += size - recording.size
        self.size += size - recording.size
        recording.size = size
