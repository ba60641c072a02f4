"""One HTTP request's open sequences: between the engine's sinks and the ASGI connection.

Deltas arrive in the event loop and become bytes (streaming) or are gathered (not streaming) right there; the
request's task is woken only to write. Whatever way it ends (done, error, client gone, server stopping), `close`
runs and the engine is told of every sequence that still runs.

While a client doesn't read, its connection takes nothing more: what comes meanwhile waits as one piece for each
choice, so it is no more than the text itself, and is written as one event when the client goes on. At `UNREAD` bytes
the request ends with an error; a client that takes nothing at all is hung up on by the kernel (`serve.STUCK`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from planaria.errors import RequestError
from planaria.server.failure import failure
from planaria.server.gate import RequestInfo
from planaria.server.service import Service, logger
from planaria.server.stream import Choices, Piece, Stream
from planaria.types import FinishReason

AT_ONCE = 16  # prompts of a request between two turns of the event loop
CLIENT_GONE = 499  # the status of a request whose client left before it had an answer
UNREAD = 16 << 20  # bytes, about, of an answer that its client doesn't read
_TOKEN, _LOGPROB = 40, 100  # bytes, about, of one in a piece
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ModelPlace(Protocol):
    """Of a model among several: is it loaded?"""

    def admits(self) -> bool:
        """Now, so that sequences can be submitted before anything else happens?"""

    async def enter(self) -> None:
        """Wait until it does. A `Generation` that is open counts as running from then on. Raises RequestError."""


class Writer(Protocol):
    """The shape of an endpoint's answer. heavy: `whole` takes long, and belongs into a thread."""

    @property
    def heavy(self) -> bool: ...

    def event(self, piece: Piece) -> bytes | Callable[[], bytes]:
        """Server-sent events for a piece: one, and before a choice's first whatever introduces it. What takes long to
        write is a function, to be called in a thread."""

    def tail(self) -> bytes:
        """Events after the last piece of all choices, whatever ends a stream included."""

    def failed(self, message: str, status: int, code: str) -> bytes:
        """The last of a stream that ends with an error, likewise."""

    def whole(self) -> bytes:
        """The complete answer, as JSON."""


class Generation:
    """The sequences of one request and what has come of them."""

    def __init__(self, service: Service, info: RequestInfo, streams: list[Choices], *, stream: bool) -> None:
        self.service, self.info, self.streams, self.streaming = service, info, streams, stream
        self.writer: Writer
        self.buffer: list[bytes | Callable[[], bytes]] = []
        self.writing = False  # a write waits for the client to read
        self._held: dict[int, Piece] = {}  # by choice, meanwhile
        self._unread = 0  # bytes of it, about
        self.left = sum(len(s.sequences) for s in streams)  # choices not yet complete
        self.error: tuple[str, int, str] | None = None  # message, status, code
        self.gone = ""  # why nobody wants it any more
        self.submitted = 0.0
        self.first_token: float | None = None
        self._last: dict[int, float] = {}  # by choice, the time of its last tokens
        self._waiter: asyncio.Future[None] | None = None

    # -- engine side

    async def start(self) -> None:
        """Submit everything, some at a time, once the model is loaded. Raises what the client raises."""
        self.submitted = time.perf_counter()
        self.service.opened(self)
        client, place = self.service.client, self.service.place
        if place is not None and not (self.info.admitted or place.admits()):
            await self._enter(place)
        for number, stream in enumerate(self.streams, 1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            for sequence in stream.sequences:
                if self.error is None and not self.gone:  # a dead engine answers from within `submit`
                    sequence.sink = self._hear
                    client.submit(sequence)

    async def _enter(self, place: ModelPlace) -> None:
        """Wait until the model is loaded, or nobody wants the answer any more."""
        entering = asyncio.ensure_future(place.enter())
        entering.add_done_callback(lambda entering: self._wake())
        try:
            while not (entering.done() or self.error is not None or self.gone):
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if entering.done():
                entering.result()
        except RequestError as e:
            self.fail(e.message, e.status, e.code or "not_ready")
        finally:
            entering.cancel()

    def _hear(self, sequence: Stream, piece: Piece) -> None:
        if self.error is not None or self.gone:
            return
        try:
            now, finish = time.perf_counter(), piece.finish
            if piece.tokens:
                self._count(sequence, piece, now)
            if finish is not None and not self._ended(sequence, piece, finish, now):
                return
            if self.writing:
                self._hold(piece)
            elif self.streaming:
                self.buffer.append(self.writer.event(piece))
            if finish is not None:
                self.left -= 1
            if self._waiter is not None and (self.streaming or not self.left):
                self._wake()
        except Exception:
            # A sink must not raise: the client would drop other requests' deltas.
            logger.exception("%s: failed to take in a delta", self.info.id)
            self.fail("internal error while making the answer", 500, "internal_error")

    def _count(self, sequence: Stream, piece: Piece, now: float) -> None:
        """Tokens of a piece, and the seconds before them."""
        metrics, last = self.service.metrics, self._last.get(piece.choice)
        metrics.generation_tokens += len(piece.tokens)
        self._last[piece.choice] = now
        if last is not None:
            metrics.itl.observe(now - last)
            return
        metrics.ttft.observe(now - self.info.arrival)
        self._began(sequence)
        if self.first_token is None:
            self.first_token = now

    def _began(self, sequence: Stream) -> None:
        metrics = self.service.metrics
        metrics.queue.observe(sequence.queued)
        metrics.prompt_tokens += len(sequence.submit.prompt)

    def _ended(self, sequence: Stream, piece: Piece, finish: FinishReason, now: float) -> bool:
        """The last piece of a choice has come. Is it part of an answer?"""
        metrics = self.service.metrics
        if not piece.tokens and sequence.pooled is not None:
            self._began(sequence)
        metrics.success[finish] += 1
        metrics.e2e.observe(now - self.info.arrival)
        if piece.error is not None:  # of one choice, but it is the request that can't be answered
            aborted = finish is FinishReason.ABORT
            self.fail(piece.error, 503 if aborted else 500, "aborted" if aborted else "engine_error")
            return False
        if sequence.submit.params.pooling and sequence.pooled is None:
            self.fail("the engine gave no vector", 500, "engine_error")
            return False
        return True

    def _hold(self, piece: Piece) -> None:
        held = self._held.get(piece.choice)
        if held is None:
            self._held[piece.choice] = piece
        else:
            held.join(piece)
        self._unread += len(piece.text) + _TOKEN * len(piece.tokens)
        self._unread += sum(_LOGPROB * (1 + len(position.top)) for position in piece.logprobs or ())
        if self._unread > UNREAD:
            self._held.clear()
            self.fail(f"the client left {UNREAD >> 20} MiB of the answer unread", 503, "client_too_slow")

    async def write(self, send: Send, message: dict[str, Any]) -> None:
        """Send a part of the answer; may wait for the client to read."""
        self.writing = True
        await send(message)
        self.writing = False
        if self._held:
            self.buffer += [self.writer.event(piece) for piece in self._held.values()]
            self._held, self._unread = {}, 0

    def fail(self, message: str, status: int, code: str) -> None:
        """End the request with an error; its client is told, the engine too."""
        if self.error is None and not self.finished:
            self.error = (message, status, code)
            self._stop()
        self._wake()

    def _stop(self) -> None:
        for stream in self.streams:
            for sequence in stream.sequences:
                if sequence.finish is None:
                    sequence.fail("aborted", FinishReason.ABORT)
                    self.service.metrics.success[FinishReason.ABORT] += 1
                    self.service.client.cancel(sequence.id)

    @property
    def finished(self) -> bool:
        return not self.left

    def close(self) -> None:
        """Tell the engine of everything that still runs. Idempotent."""
        self._stop()
        self.service.closed(self)

    # -- client side

    async def wait(self) -> None:
        """Until there is something to write, or the end, an error or the client's leaving."""
        while not (self.buffer or not self.left or self.error is not None or self.gone):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def watch(self, receive: Receive) -> None:
        """Free everything the moment the client is gone."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
        self.leave()

    def leave(self, why: str = "client disconnected") -> None:
        """Nobody wants it any more."""
        if self.left and self.error is None:
            self.gone = why
            self._stop()
            self._wake()

    def log(self) -> None:
        """The request's one line."""
        info = self.info
        prompt = sum(s.prompt_tokens for s in self.streams)
        output = sum(s.completion_tokens for s in self.streams)
        ttft = None if self.first_token is None else self.first_token - info.arrival
        if self.gone:
            reason = self.gone
            info.status = info.status or CLIENT_GONE
        elif self.error is not None:
            reason = "error"
            message, _, code = self.error
            info.error = (code, None, message)
        else:
            reason = "+".join(dict.fromkeys(str(q.finish) for s in self.streams for q in s.sequences))
        first = "-" if ttft is None else f"{ttft * 1e3:.0f} ms"
        info.log(
            f": {prompt} tokens in, {output} out, ttft {first}, {reason}", prompt_tokens=prompt,
            completion_tokens=output, ttft_seconds=ttft, finish=reason,
        )  # fmt: skip
        if info.span is not None and self.service.traces is not None:
            self.service.traces.generated(self)


class Answer(Response):
    """Runs a generation and writes its answer, streamed or whole."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self.generation
        watcher: asyncio.Task[None] | None = None
        try:
            watcher = asyncio.get_running_loop().create_task(generation.watch(receive))
            await generation.start()
            await generation.wait()
            if generation.error is not None and not generation.buffer:
                message, status, code = generation.error
                await failure(message, status, code=code)(scope, receive, send)
            elif generation.gone:
                return
            elif generation.streaming:
                await self._stream(send)
            else:
                writer = generation.writer
                body = await generation.service.in_thread(writer.whole) if writer.heavy else writer.whole()
                headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body})
        finally:
            generation.close()
            if watcher is not None:
                watcher.cancel()
            generation.log()

    async def _stream(self, send: Send) -> None:
        generation = self.generation
        buffer = generation.buffer
        await generation.write(send, {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        while not generation.gone:
            if buffer:
                parts = buffer[:]
                buffer.clear()
                in_thread = generation.service.in_thread
                chunk = b"".join([part if isinstance(part, bytes) else await in_thread(part) for part in parts])
                await generation.write(send, {"type": "http.response.body", "body": chunk, "more_body": True})
            elif generation.error is not None:
                await send({"type": "http.response.body", "body": generation.writer.failed(*generation.error)})
                return
            elif generation.finished:
                await send({"type": "http.response.body", "body": generation.writer.tail()})
                return
            else:
                await generation.wait()
