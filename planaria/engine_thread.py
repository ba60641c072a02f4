"""An engine that runs in a thread of this process, and what waits for it: `AsyncLLM`'s other half.

Rule: a thread holds nothing of who uses it. An `AsyncLLM` that nobody has any more is collected, and its engine ends.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from planaria.errors import EngineDead
from planaria.executor.loop import EngineLoop
from planaria.executor.pending import Pending
from planaria.server.stream import Choices, Piece
from planaria.types import Delta, FinishReason
from planaria.wire import Cancel, EngineFacts, ToEngine

logger = logging.getLogger("planaria")

LOOK = 1.0  # seconds between an idle engine's looks at its ranks
OnFailure = Callable[[EngineDead], object]


@dataclass(eq=False)
class Waiting:
    """Who reads a request's choices, in an event loop of its own."""

    stream: Choices
    pieces: asyncio.Queue[Piece] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)


class EngineThread:
    """Runs `loop`. inbox: what it is told, or is to do; "look" has it look at its ranks, None ends it. waiting: by
    request. answers: that somebody waits for. ended: why nothing will come any more."""

    def __init__(self, loop: EngineLoop, answers: dict[str, Future[Any]]) -> None:
        self.loop, self.answers, self.ended = loop, answers, ""
        self.inbox: queue.SimpleQueue[ToEngine | Callable[[], object] | str | None] = queue.SimpleQueue()
        self.waiting: dict[str, Waiting] = {}
        self.failure: EngineDead | None = None
        self._lock = threading.Lock()
        self._callbacks: list[OnFailure] = []
        self._facts: EngineFacts | BaseException | None = None
        self._started = threading.Event()
        loop.on_loss = lambda: self.inbox.put("look")
        self._thread = threading.Thread(target=self._run, name="planaria-engine", daemon=True)

    def start(self) -> EngineFacts:
        """Raises whatever kept the engine from starting."""
        self._thread.start()
        self._started.wait()
        if not isinstance(self._facts, EngineFacts):
            assert self._facts is not None
            raise self._facts
        return self._facts

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def on_failure(self, callback: OnFailure) -> None:
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        self._call(callback, self.failure)

    def _run(self) -> None:
        try:
            self._facts = self.loop.start()
        except BaseException as e:  # whatever it was, `start` raises it
            self._facts = e
            return
        finally:
            self._started.set()
        try:
            self._turns()
            if self.loop.dead is not None:
                self._fail(self.loop.dead.message)
            self.loop.close()
        except Exception as e:
            logger.exception("the engine's thread failed")
            if self.failure is None:
                self._fail(f"the engine's thread failed: {type(e).__name__}: {e}")
        self.ended = self.ended or "the engine was closed"
        for id, target in list(self.waiting.items()):
            self._tell(target, Delta(id, 0, [], FinishReason.ERROR, error=self.ended))
        for answer in list(self.answers.values()):
            answer.set_exception(EngineDead(self.ended))

    def _turns(self) -> None:
        # A rank's end ends the wait for messages; that one is stopped shows only to who looks.
        idle = LOOK if self.loop.watches() else None
        while not self.loop.stopping:
            while True:
                try:
                    message = self.inbox.get(block=not self.loop.busy(), timeout=idle)
                except queue.Empty:
                    break
                if message is None:
                    return
                if isinstance(message, str):
                    break
                message() if callable(message) else self.loop.handle(message)
            if not self.loop.step():
                self.loop.check()

    def ask_ranks(self, id: str, *called: Any) -> Future[Any]:
        """What all answer to a method, see `EngineLoop.call`; from any thread."""
        future = self.answers[id] = Future[Any]()
        future.set_running_or_notify_cancel()

        def hear(pending: Pending) -> None:
            try:
                answer = pending.result()
            except Exception as e:
                self.answers.pop(id).set_exception(e)
            else:
                self.answers.pop(id).set_result(answer)

        def ask() -> None:
            try:
                self.loop.pending.ask(hear, *called)
            except Exception as e:
                self.answers.pop(id).set_exception(e)

        self.inbox.put(ask)
        return future

    def _fail(self, why: str) -> None:
        self.ended = why
        with self._lock:
            self.failure, callbacks = EngineDead(why), self._callbacks
            self._callbacks = []
        for callback in callbacks:
            self._call(callback, self.failure)

    @staticmethod
    def _call(callback: OnFailure, failure: EngineDead) -> None:
        try:
            callback(failure)
        except Exception:
            logger.exception("a callback for the engine's failure failed itself")

    # -- what is said to who waits

    def deliver(self, delta: Delta) -> None:
        """In the engine's thread: to the event loop of its request."""
        target = self.waiting.get(delta.request_id)
        if target is not None:
            self._tell(target, delta)

    def _tell(self, target: Waiting, delta: Delta) -> None:
        try:
            target.loop.call_soon_threadsafe(self._push, target, delta)
        except RuntimeError:  # that event loop was closed with the stream still open
            self.forget(delta.request_id)

    def _push(self, target: Waiting, delta: Delta) -> None:
        piece = target.stream.take(delta)
        if piece is None:
            return
        if piece.finish is not None:
            self.waiting.pop(delta.request_id, None)
        if piece.cancel:
            self.inbox.put(Cancel(delta.request_id))
        target.pieces.put_nowait(piece)

    def forget(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        if self.waiting.pop(request_id, None) is not None:
            self.inbox.put(Cancel(request_id))

    def close(self) -> None:
        """End it, and wait until it has. Idempotent."""
        if self._thread.is_alive():
            self.inbox.put(None)
            if self._thread is not threading.current_thread():  # who uses it may be collected in any thread
                self._thread.join()
