"""The same engine in every process of a program: each runs its own rank, and they exchange what their ranks answer.

A command goes to the own rank only, since every process sends it to its own. The answers of all ranks then arrive in
every process in the same order, so that all engines decide the same. Rule: a round's answers are to the same command,
compared by a hash of its bytes.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from planaria.executor.launcher.inline import Handler
from planaria.executor.link.address import Address, Inside
from planaria.executor.link.circle import Circle
from planaria.executor.link.codec import answer, encode_command, heard
from planaria.executor.link.faults import LinkError
from planaria.executor.reply_ledger import RankReply
from planaria.protocol import Command, Done, Exit, StepPlan
from planaria.wire import Submit, ToEngine

AGREE_TIMEOUT = 1800.0  # seconds for all programs to come to the same request
_CLOSE_TIMEOUT = 2.0

_message_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class SpmdLink:
    """`handlers`: one, this process's rank, when the first command is sent. abort(why): end what the rank waits for."""

    name = "spmd"

    def __init__(self, circle: Circle, handlers: Sequence[Handler], abort: Callable[[str], None]) -> None:
        self.circle, self.handlers, self.abort = circle, handlers, abort
        self._inbox: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._own: deque[tuple[int, bytes]] = deque()  # what the own rank answered, not given yet
        self._sent: deque[tuple[str, bytes]] = deque()  # commands whose answers were not given yet, and their hashes
        self._given = -1  # the ticket whose round is on
        self._heard: deque[RankReply] = deque()
        self._thread: threading.Thread | None = None
        self._exiting = False
        self._exited = threading.Event()

    def address_of(self, rank: int) -> Address:
        return Inside()

    def pulses(self) -> list[tuple[int, int]]:
        """None are needed: the connections between the processes notice silence."""
        return []

    def send(self, number: int, command: Command) -> None:
        """To the own rank. Raises CodecError."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="rank", daemon=True)
            self._thread.start()
        data = encode_command(command)
        self._exiting = isinstance(command, Exit)  # each process by itself
        if not self._exiting:
            self._sent.append((_words(command), digest(data)))
        self._inbox.put((number, command))

    def _serve(self) -> None:
        """The rank's thread."""
        (handler,) = self.handlers
        while (item := self._inbox.get()) is not None:
            number, command = item
            reply = handler.handle(command)
            if isinstance(command, Exit):
                self._heard.extend((rank, number, Done(rank)) for rank in range(self.circle.size))
                self._exited.set()
                return
            self._own.append((number, answer(self.circle.rank, reply)))
            self.circle.wake()

    def receive(self, timeout: float | None) -> RankReply | None:
        """The next answer of any rank, the same in every process; None after `timeout` seconds. Raises LinkError when a
        process ended, or its program has come apart from this one's."""
        until = None if timeout is None else time.monotonic() + timeout
        if self._exiting and not self._heard and not self._exited.wait(timeout):
            return None
        while not self._heard:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                if self._own and self._given < 0:
                    self._given, data = self._own.popleft()
                    self.circle.give(*self._sent.popleft(), data)
                parts = self.circle.take(left)
            except LinkError as e:
                self.abort(str(e))  # the own rank may wait for the one that is gone
                raise
            if parts is not None:
                number, self._given = self._given, -1
                self._heard.extend((rank, number, heard(data, rank)) for rank, data in enumerate(parts))
            elif left == 0 and not self._heard:
                return None
        return self._heard.popleft()

    def agree(self, message: ToEngine) -> ToEngine:
        """What a program asks of its engine, as rank 0 says it: a seed that was drawn is rank 0's. Raises LinkError
        where programs ask for different things."""
        same = msgspec.structs.replace(message, seed=0) if isinstance(message, Submit) else message
        what = f"request {message.id}" if isinstance(message, Submit) else type(message).__name__.lower()
        data = _message_encoder.encode(message) if self.circle.rank == 0 else b""
        parts = self.circle.round(what, digest(_message_encoder.encode(same)), data, AGREE_TIMEOUT)
        return _message_decoder.decode(parts[0])

    def share(self, data: bytes) -> tuple[int, list[bytes]]:
        """What each program says, by rank, and which of them this one is. Raises LinkError."""
        return self.circle.rank, self.circle.round("prompts", b"", data, AGREE_TIMEOUT)

    def clock(self) -> float:
        """Rank 0's, as of the last round."""
        return self.circle.clock

    def fence(self) -> None:
        """Nobody of these begins another epoch."""

    def wake(self) -> None:
        self.circle.wake()

    def close(self) -> None:
        """Idempotent."""
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT)
        self.circle.close()


def _words(command: Command) -> str:
    return f"step {command.step}" if isinstance(command, StepPlan) else type(command).__name__.lower()
