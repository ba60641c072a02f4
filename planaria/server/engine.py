"""One engine as a dispatcher has it: whether it can admit, what it has of sequences and what waits for it, whatever
becomes of its processes. Who keeps those (`keeper.py`; for an API process, the root) says when one has ended.

A sequence that was there at several deaths is run alone, and answered with an error if that kills its engine too
(`planaria.core.quarantine`): a dead engine can't keep that account. Of several servers that use an engine each keeps
its own, and asks for exclusive use to run one alone (`planaria.core.quarantine`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec

from planaria.core.quarantine import ExclusiveUse, Quarantine
from planaria.errors import CapacityError, EngineDead, ModelError, PlanariaError, UserError
from planaria.executor.recovery import Replay
from planaria.server.engine_client import EngineConnection
from planaria.server.root_messages import LetGo, Wants
from planaria.server.stream import Stream
from planaria.types import Delta, FinishReason
from planaria.wire import (
    Cancel,
    Dead,
    EngineFacts,
    EngineStats,
    ExpertStats,
    FromEngine,
    Output,
    Recovery,
    Slept,
    ToEngine,
)

COMING_UP = 3600.0  # seconds without a word while it loads, or while its ranks begin anew
MARGIN = 30.0  # seconds: an engine that looks after its ranks' steps says so before it is given up itself


def error_of(dead: Dead) -> PlanariaError:
    """The exception that a message of the engine's end stands for."""
    kinds: dict[str, type[PlanariaError]] = {"model": ModelError, "user": UserError, "capacity": CapacityError}
    return kinds.get(dead.kind, EngineDead)(dead.message)


class Engine:
    """server, tell: as one of several servers, this one's number and what tells the root; None: it is the only one.
    on_news: what its process says of itself; on_change: of `state`, before anybody hears of an end; on_step: `stats`
    are new; on_replayed: hears when all go on that were open at a fault."""

    def __init__(self, index: int, server: int = 0, tell: Callable[[Wants | LetGo], None] | None = None) -> None:
        self.index, self.server, self.tell = index, server, tell
        self.kind = ""  # of two: see planaria.server.prefill
        self.connection: EngineConnection | None = None  # to the process of now
        self.facts: EngineFacts | None = None
        self.stats = EngineStats()
        self.before = EngineStats()  # what the processes before this one have counted
        self.last_progress = time.monotonic()
        self.dead: Dead | None = None
        self.up = False  # the process of now can admit
        self.regrouping = False  # its ranks begin anew
        self.on_purpose = False  # and not because of a fault
        self.restarting = False  # the process ends because it was told to
        self.asleep: int | None = None  # at which level
        self.leaving = False  # it gets no new work
        self.ending = False  # it leaves, and its process is told to end
        self.given: Callable[[], Iterable[ToEngine]] = tuple  # what a process that has come up is told first
        self.on_news: Callable[[FromEngine], None] = lambda message: None
        self.on_change: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None
        self.on_replayed: Callable[[Recovery], None] = lambda message: None
        self.streams: dict[str, Stream] = {}  # by the engine's names for them, the oldest first
        self.quarantine = Quarantine()
        self.tokens = 0  # that came from this process
        self.replay: Replay | None = None
        self.exclusive_use: ExclusiveUse | None = None
        self._settled = asyncio.Event()  # it is up, or there will be none
        self._wants = False
        self._let_go = 0  # for which use it was said

    @property
    def state(self) -> str:
        """loading, ready, recovering (its ranks begin anew), asleep or ended."""
        if self.dead is not None:
            return "ended"
        if not self.up:
            return "loading"
        if self.asleep is not None:
            return "asleep"
        return "recovering" if self.regrouping else "ready"

    @property
    def works(self) -> bool:
        """Is there something that it should get on with?"""
        return bool(self.streams) and self.asleep is None

    async def ready(self) -> EngineFacts:
        """Wait until it can admit. Raises ModelError, CapacityError or EngineDead if there will be none."""
        await self._settled.wait()
        if self.dead is not None:
            raise error_of(self.dead)
        assert self.facts is not None
        return self.facts

    def most_silent(self, step_timeout: float, asked: bool = False) -> float | None:
        """Seconds that its process may say nothing; None: as long as it likes. asked: somebody waits for an answer."""
        if not self.up or self.regrouping:
            return COMING_UP
        if self.asleep is not None and not asked:
            return None
        return step_timeout + MARGIN if self.streams or asked else None

    # -- its processes, one after the other

    def down(self, as_told: bool) -> bool:
        """The process of now has ended; nothing has been sent to the next. as_told: somebody told it to. Did it get
        anywhere?"""
        self.up = self.regrouping = self.on_purpose = self.restarting = False
        self.asleep = None
        self.replay = None
        progressed = as_told or self._fault()
        for stream in self.streams.values():
            stream.sent = stream.leaving = False
        self.before = self.stats
        return progressed

    def die(self, dead: Dead) -> None:
        """There will be no other: everybody is told."""
        if self.dead is None:
            self.dead, self.up = dead, False
            self._settled.set()
            self.on_change()
        for name in list(self.streams):
            self.end(name, dead.message)

    def revive(self) -> None:
        """There will be one after all."""
        self.dead = None
        self._settled.clear()
        self.on_change()

    def hear(self, message: FromEngine) -> None:
        """What the process of now says. Raises Gap, which costs it its life."""
        match message:
            case Output():
                stats = added(self.before, message.stats)
                if stats.step != self.stats.step or not self.streams:
                    self.last_progress = time.monotonic()
                self.stats = stats
                self.on_step()
                for delta in message.deltas:
                    self.deliver(delta)
            case EngineFacts():
                self.facts, self.up = message, True
                self.stats = added(self.before, EngineStats())  # it has done nothing yet, in epoch 0
                self.last_progress = time.monotonic()
                self._settled.set()
                for order in self.given():
                    self.send(order)
                self.admit()
                self.on_news(message)
                self.on_change()
            case Recovery():
                self.regrouping, self.on_purpose = not message.seconds, message.kind == "layout"
                if self.regrouping:
                    self.replay = None  # from now on it is the engine that tells how that goes
                if message.seconds and self.facts is not None:
                    self.facts = msgspec.structs.replace(
                        self.facts, layout=message.layout, ranks=message.pids, places=message.places
                    )
                self.on_news(message)
                self.on_change()
            case Slept():
                self.asleep, self.last_progress = message.level, time.monotonic()
                self.on_news(message)
                self.on_change()
            case Dead():
                # One that has served may lack room only for a while: memory that ranks before it have not let go of.
                passing = message.kind == "capacity" and self.facts is not None and not self.up
                if message.kind != "crash" and not passing:
                    self.die(message)
            case _:
                self.on_news(message)

    def send(self, message: ToEngine) -> None:
        """To the process of now."""
        assert self.connection is not None
        self.connection.send(message)

    # -- sequences

    def submit(self, stream: Stream) -> None:
        """Begin, or go on, with a sequence."""
        stream.engine = self
        if self.dead is not None:
            stream.tell(stream.fail(self.dead.message, cancel=False))
            return
        if not self.streams:
            self.last_progress = time.monotonic()
        self.streams[stream.name] = stream
        if self.quarantine.faults or self.exclusive_use is not None:  # it must be held back, perhaps
            self.admit()
        elif self.up:
            self._send(stream)

    def cancel(self, name: str) -> None:
        """Nothing more of it is heard. Unknown names are ignored."""
        stream = self.streams.pop(name, None)
        if stream is None:
            return
        if stream.sent and not stream.leaving and self.up:
            self.send(Cancel(name))
        self._clear(name)

    def sent(self) -> list[Stream]:
        """Those that the process has, or had when it ended."""
        return [stream for stream in self.streams.values() if stream.sent]

    def had(self, stream: Stream) -> bool:
        """Was this sequence with the process that is there, or with the one that has just ended?"""
        return stream.sent or stream.name in self.quarantine.faults

    def end(self, name: str, error: str) -> None:
        """Answer it."""
        stream = self.streams.pop(name, None)
        if stream is not None:
            self._clear(name)
            stream.tell(stream.fail(error, cancel=False))

    def _fault(self) -> bool:
        """The process has ended. Did it get anywhere: a token came, or who is to blame is found?"""
        present = [stream.name for stream in self.sent()]
        if present != [self.quarantine.running]:
            self.quarantine.running = None  # it wasn't alone yet
        convict = self.quarantine.fault(present)
        if convict is not None:
            error = "the engine died again and again while it ran this request, and nothing else"
            self.end(convict, error)
        progressed = self.tokens > 0 or convict is not None
        self.tokens = 0
        return progressed

    # -- who may be in the engine

    def set_exclusive_use(self, use: ExclusiveUse | None) -> None:
        """Who runs something alone in it; None: nobody."""
        if use != self.exclusive_use:
            self.exclusive_use = use
            self.admit()

    def admit(self) -> None:
        """Give the engine what it may have now."""
        if self.tell is None:
            self._admit()
            return
        wants, use = self.quarantine.suspects(), self.exclusive_use
        if wants != self._wants:
            self._wants = wants
            self.tell(Wants(self.index, wants))
        if use is None:
            if not wants:
                self._admit()
            else:
                self._take_back(self.streams.values())
        elif use.server == self.server:
            if use.free:
                self._admit()
        elif not self._take_back(self.streams.values()) and self._let_go != use.serial:
            self._let_go = use.serial
            self.tell(LetGo(self.index, use.serial))

    def _admit(self) -> None:
        """Everything open, the oldest first, or one suspect and nothing else."""
        if not self.up:
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
        sent = [stream for stream in streams if stream.sent] if self.up else []
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
        lent = False  # it has left this engine, and goes on elsewhere
        if delta.finish is not None:  # asked first: a member of an enumeration takes longer than all else here
            if delta.finish is FinishReason.ABORT:
                if stream.leaving:  # the engine has let go of it
                    stream.sent = stream.leaving = False
                    self.admit()
                    return
                # An engine that ends lets go of what it has: its successor goes on. The root's word may come later.
                if self.restarting or self.tell is not None:
                    return
            lent = delta.finish is FinishReason.LENT
        piece = stream.take(msgspec.structs.replace(delta, finish=None) if lent else delta)
        if piece is None:
            return
        self.tokens += len(piece.tokens)
        if piece.finish is not None or lent:
            del self.streams[name]
            if piece.cancel and not stream.leaving and not lent:
                self.send(Cancel(name))
        if self.replay is not None or self.quarantine.faults:
            self._clear(name)
        stream.tell(piece)
        if lent and stream.dispatcher is not None:
            stream.dispatcher.hand_overs.lent(stream, self, delta.lease)
        if self.exclusive_use is not None:
            self.admit()

    def _clear(self, name: str) -> None:
        """A token, or its end, shows that a sequence is not what failed, and that it goes on."""
        if self.replay is not None and (told := self.replay.heard(name, time.monotonic())) is not None:
            self.replay = None
            self.on_replayed(told)
        if self.quarantine.faults:
            self.quarantine.cleared(name)
            self.admit()


_COUNTERS = (
    "step", "prefix_queries", "prefix_hits", "preemptions", "prompt_tokens", "generation_tokens", "replayed_tokens",
)  # fmt: skip


def added(before: EngineStats, now: EngineStats) -> EngineStats:
    """Counters go on from one engine to the next; the rest is the present one's."""
    if not before.step:
        return now
    sums = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    drafts = before.drafts.added(now.drafts) if before.drafts and now.drafts else now.drafts or before.drafts
    transfers = now.transfers
    if before.transfers is not None and transfers is not None:
        transfers = before.transfers.added(transfers)
    experts = _experts_added(before.experts, now.experts)
    return msgspec.structs.replace(now, **sums, experts=experts, drafts=drafts, transfers=transfers)


def _experts_added(before: ExpertStats | None, now: ExpertStats | None) -> ExpertStats | None:
    if before is None or now is None:
        return now or before
    return msgspec.structs.replace(
        now,
        rearrangements=before.rearrangements + now.rearrangements,
        bytes_moved=before.bytes_moved + now.bytes_moved,
        rearranged_at=now.rearranged_at or before.rearranged_at,
    )
