"""Direct calls to ranks of this process: no serialisation.

With `threaded` the rank runs in a thread of its own, so that the next step is planned while one runs; without, a
command is carried out inside `send`, except a Call, which has a thread for itself: who waits for its answer may stop
waiting. What is sent meanwhile waits until it has ended, and is carried out inside `receive`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

from planaria.executor.launcher.inline import Handler
from planaria.executor.link.address import Address, Inside
from planaria.executor.link.later import answers
from planaria.executor.reply_ledger import RankReply
from planaria.protocol import Call, Command, Failed, Reply


class DirectLink:
    """`ranks` may be filled until the first command is sent."""

    name = "direct"

    def __init__(self, ranks: Sequence[Handler], *, threaded: bool = False) -> None:
        self.ranks, self.threaded = ranks, threaded
        self.answers: queue.SimpleQueue[RankReply] = queue.SimpleQueue()
        self.inboxes: list[queue.SimpleQueue[tuple[int, Command] | None]] = []
        self.threads: list[threading.Thread] = []
        self._calling = self._called = False  # a Call is on its way, in a thread of its own; has been since a step
        self._waiting: deque[tuple[int, Command]] = deque()  # until it has ended

    def address_of(self, rank: int) -> Address:
        return Inside()

    def pulses(self) -> list[tuple[int, int]]:
        """None: these ranks live and die with this process."""
        return []

    def _start(self) -> None:
        for rank, handler in enumerate(self.ranks):
            inbox: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(rank, handler, inbox), daemon=True)
            thread.start()
            self.inboxes.append(inbox)
            self.threads.append(thread)

    def _serve(self, rank: int, handler: Any, inbox: queue.SimpleQueue[tuple[int, Command] | None]) -> None:
        def receive(timeout: float | None) -> tuple[int, Command] | None:
            try:
                item = inbox.get(timeout=timeout)
            except queue.Empty:
                return None
            if item is None:
                raise EOFError
            return item

        handler.ahead = True
        with contextlib.suppress(EOFError):
            for number, _, reply in answers(receive, handler.handle):
                self.answers.put((rank, number, reply))

    def send(self, number: int, command: Command) -> None:
        """To every rank."""
        if self.threaded and not self.inboxes:
            self._start()
        if self.inboxes:
            for inbox in self.inboxes:
                inbox.put((number, command))
        elif self._calling or self._waiting:
            self._waiting.append((number, command))
        else:
            self._begin(number, command)

    def _begin(self, number: int, command: Command) -> None:
        if isinstance(command, Call):
            self._calling = self._called = True
            self.threads = [threading.Thread(target=self._call, args=(number, command), name="call", daemon=True)]
            self.threads[0].start()
            return
        anew, self._called = self._called, False  # with how many threads to compute may be another matter now
        for rank, handler in enumerate(self.ranks):
            self.answers.put((rank, number, _answer(rank, handler, command, anew=anew)))

    def _call(self, number: int, command: Call) -> None:
        ranks = enumerate(self.ranks)
        answers = [(rank, number, _answer(rank, handler, command, anew=True)) for rank, handler in ranks]
        self._calling = False
        for answer in answers:
            self.answers.put(answer)

    def receive(self, timeout: float | None) -> RankReply | None:
        """The next answer, or None after `timeout` seconds."""
        while self._waiting and not self._calling:
            self._begin(*self._waiting.popleft())
        try:
            return self.answers.get(timeout=timeout) if timeout != 0 else self.answers.get_nowait()
        except queue.Empty:
            return None

    def fence(self) -> None:
        """Whoever closes this link hears nothing more of it."""

    def wake(self) -> None:
        """Nothing waits for anyone else's end here."""

    def close(self) -> None:
        """End the threads, if any, and wait for a Call that is on its way. Idempotent."""
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:
            thread.join(timeout=10)
        self.inboxes, self.threads = [], []


def _answer(rank: int, handler: Handler, command: Command, *, anew: bool) -> Reply:
    """anew: this thread has not computed before; a rank with a model is to do so in it from now on."""
    try:
        if anew:
            getattr(handler, "take_thread", lambda: None)()
    except Exception as e:
        return Failed(rank, "take_thread", f"{type(e).__name__}: {e}", traceback.format_exc())
    return handler.handle(command)
