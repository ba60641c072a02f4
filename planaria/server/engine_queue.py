"""What one engine has of sequences, and what waits for it: its journal and its quarantine, whatever becomes of its
processes. `supervisor.py` keeps those.

A sequence that was there at several deaths is run alone, and answered with an error if that kills its engine too
(`planaria.core.quarantine`): a dead engine can't keep that account. Of several servers that use an engine each keeps
its own, and asks for a turn to run one alone (`planaria.core.turns`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from planaria.core.quarantine import Quarantine
from planaria.core.turns import Turn
from planaria.executor.replay import Replay
from planaria.server.root_messages import LetGo, Wants
from planaria.server.stream import Stream
from planaria.types import Delta, FinishReason
from planaria.wire import Cancel, Recovery, ToEngine


class EngineQueue:
    """send: to the engine's process of now; is_up: can it admit? on_replayed: hears when all go on that were open at a
    fault. server, tell: as one of several servers, this one's number and what tells the root; None: it is the only
    one."""

    def __init__(self, index: int, send: Callable[[ToEngine], None], is_up: Callable[[], bool]) -> None:
        self.index, self.send, self.is_up = index, send, is_up
        self.on_replayed: Callable[[Recovery], None] = lambda message: None
        self.streams: dict[str, Stream] = {}  # by the engine's names for them, the oldest first
        self.quarantine = Quarantine()
        self.tokens = 0  # that came from this process
        self.replay: Replay | None = None
        self.restarting = False  # the process ends because it was told to
        self.server = 0
        self.tell: Callable[[Wants | LetGo], None] | None = None
        self.turn: Turn | None = None
        self._wants = False
        self._let_go = 0  # in which turn it was said

    def __len__(self) -> int:
        return len(self.streams)

    def sent(self) -> list[Stream]:
        """Those that the process has, or had when it ended."""
        return [stream for stream in self.streams.values() if stream.sent]

    def begin_anew(self) -> None:
        """For another process nothing has been sent yet."""
        for stream in self.streams.values():
            stream.sent = stream.leaving = False
        self.restarting = False

    # -- in and out

    def put(self, stream: Stream) -> None:
        self.streams[stream.name] = stream
        if self.quarantine.faults or self.turn is not None:  # it must be held back, perhaps
            self.admit()
        elif self.is_up():
            self._send(stream)

    def remove(self, name: str) -> None:
        """Nothing more of it is heard. Unknown names are ignored."""
        stream = self.streams.pop(name, None)
        if stream is None:
            return
        if stream.sent and not stream.leaving and self.is_up():
            self.send(Cancel(name))
        self._clear(name)

    def had(self, stream: Stream) -> bool:
        """Was this sequence with the process that is there, or with the one that has just ended?"""
        return stream.sent or stream.name in self.quarantine.faults

    def end(self, name: str, reason: FinishReason, error: str) -> None:
        """Answer it."""
        stream = self.streams.pop(name, None)
        if stream is not None:
            self._clear(name)
            stream.tell(Delta(name, len(stream.tokens), [], reason, error=error))

    def end_all(self, error: str) -> None:
        for name in list(self.streams):
            self.end(name, FinishReason.ERROR, error)

    def fault(self) -> bool:
        """The process has ended. Did it get anywhere: a token came, or who is to blame is found?"""
        present = [stream.name for stream in self.sent()]
        if present != [self.quarantine.running]:
            self.quarantine.running = None  # it wasn't alone yet
        convict = self.quarantine.fault(present)
        if convict is not None:
            error = "the engine died again and again while it ran this request, and nothing else"
            self.end(convict, FinishReason.ERROR, error)
        progressed = self.tokens > 0 or convict is not None
        self.tokens = 0
        return progressed

    # -- who may be in the engine

    def take_turn(self, turn: Turn | None) -> None:
        """Whose turn it is to run something alone."""
        if turn != self.turn:
            self.turn = turn
            self.admit()

    def admit(self) -> None:
        """Give the engine what it may have now."""
        if self.tell is None:
            self._admit()
            return
        wants, turn = self.quarantine.suspects(), self.turn
        if wants != self._wants:
            self._wants = wants
            self.tell(Wants(self.index, wants))
        if turn is None:
            if not wants:
                self._admit()
            else:
                self._take_back(self.streams.values())
        elif turn.server == self.server:
            if turn.free:
                self._admit()
        elif not self._take_back(self.streams.values()) and self._let_go != turn.serial:
            self._let_go = turn.serial
            self.tell(LetGo(self.index, turn.serial))

    def _admit(self) -> None:
        """Everything open, the oldest first, or one suspect and nothing else."""
        if not self.is_up():
            return
        streams = list(self.streams.values())
        alone = self.quarantine.next(self.streams)
        if alone is not None:
            if self._take_back(stream for stream in streams if stream.name != alone):
                return  # the engine says when it has let go of them
            streams = [stream for stream in streams if stream.name == alone]
        for stream in streams:
            if not stream.sent:
                self._send(stream)

    def _take_back(self, streams: Iterable[Stream]) -> bool:
        """Have the engine let go of what it has of these. Is there anything that it must let go of first?"""
        sent = [stream for stream in streams if stream.sent] if self.is_up() else []
        for stream in sent:
            if not stream.leaving:
                stream.leaving = True
                self.send(Cancel(stream.name))
        return bool(sent)

    def _send(self, stream: Stream) -> None:
        stream.sent = True
        self.send(stream.resubmit())

    # -- what comes of it

    def deliver(self, delta: Delta) -> None:
        """From the engine. Raises Gap, which costs it its process."""
        name = delta.request_id
        stream = self.streams.get(name)
        if stream is None:
            return
        if stream.leaving and delta.finish is FinishReason.ABORT:  # the engine has let go of it
            stream.sent = stream.leaving = False
            self.admit()
            return
        # An engine that ends lets go of what it has: its successor goes on. The root's word of it may come later.
        if delta.finish is FinishReason.ABORT and (self.restarting or self.tell is not None):
            return
        told = stream.take(delta)
        if told is None:
            return
        self.tokens += len(told.tokens)
        if told.finish is not None:
            del self.streams[name]
        self._clear(name)
        stream.tell(told)
        if self.turn is not None:
            self.admit()

    def _clear(self, name: str) -> None:
        """A token, or its end, shows that a sequence is not what failed, and that it goes on."""
        if self.replay is not None and (told := self.replay.heard(name, time.monotonic())) is not None:
            self.replay = None
            self.on_replayed(told)
        if self.quarantine.faults:
            self.quarantine.cleared(name)
            self.admit()
