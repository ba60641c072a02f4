"""Which engine of a fleet has which sequence: routed to one, gone on elsewhere when that one ends, begins anew or is to
leave, always with the tokens they have.

A sequence is one engine's at a time. It goes on in another once without having got a token: the request may be what
kills engines, and then it stays where that can be found out. One that is moved on purpose does so without a pause that
its client would notice: first the other engine computes what it has so far, which its prefix cache keeps, and only then
is it moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from planaria.core.resize import PREFILL
from planaria.core.router import Router
from planaria.errors import PlanariaError
from planaria.server.background import Background
from planaria.server.engine import Engine, added, error_of
from planaria.server.placed import Check
from planaria.server.prefill import HandOvers
from planaria.server.root_messages import Counts
from planaria.server.stream import Piece, Stream
from planaria.types import SamplingParams
from planaria.wire import Dead, EngineFacts, EngineState, EngineStats, Recovery, Submit

if TYPE_CHECKING:
    from planaria.server.fleet import Fleet
    from planaria.server.loras import LoraRegistry

_numbers = itertools.count()
WARM_UP = 60.0  # seconds the other engine gets to compute what a sequence has
GOES_ON = 1.0  # seconds in which a sequence that was moved is alone with its engine's attention


class Dispatcher:
    """How a front end uses engines, wherever they run: called in one event loop, in which sinks are called too. Who
    keeps the engines says which there are (`add`, `admit`, `leave`, `forget`); on_changed hears when one is another,
    on_recovery of every fault and its end, on_settled of every engine that is ready, was given up or has left. facts:
    None until ready, of several engines what they have in common. warm: engines have prefix caches; control: who has
    their number and layout changed, None: in another process; loras: adapters."""

    def __init__(self, warm: bool, control: Fleet | None = None, loras: LoraRegistry | None = None) -> None:
        self.warm, self.control, self.loras = warm, control, loras
        self.router = Router()
        self.hand_overs = HandOvers(self, self.router)
        self.members: dict[int, Engine] = {}  # by number
        if loras is not None:
            loras.engines = self.members.values
        self.facts: EngineFacts | None = None
        self.dead: Dead | None = None
        self.check = Check()
        self.on_recovery: Callable[[Recovery], None] = lambda message: None
        self.on_settled: Callable[[int], None] = lambda index: None
        self.on_changed: Callable[[], None] = lambda: None
        self.elsewhere: Counts | None = None  # where API processes have the sequences: what they have
        self.open: dict[str, Stream] = {}
        self.taken = Counter[int]()  # sequences that came to an engine from another
        self._before = EngineStats()  # what the engines that have left have counted
        self._ready = asyncio.Event()
        self._left = asyncio.Event()  # an engine that leaves has a sequence less
        self._background = Background()

    # -- engines

    def add(self, engine: Engine) -> None:
        """Another. It gets work once it is up and `admit` was called."""
        engine.on_change = functools.partial(self._changed, engine)
        engine.on_step = lambda: self.router.snapshot(engine.index, engine.stats)
        if self.loras is not None:
            engine.given = self.loras.messages
        self.members[engine.index] = engine

    def admit(self, engine: Engine) -> None:
        """From now on this one gets work."""
        capacity = engine.facts.num_blocks * engine.facts.block_size if engine.facts is not None else None
        self.router.join(engine.index, capacity, engine.kind)
        self.router.set_up(engine.index, engine.state == "ready")
        self.tell_facts()
        if engine.state == "ready":
            self.rescue_all()
        self._ready.set()
        self.on_changed()

    def joined(self, index: int) -> bool:
        """Has this engine been given to the router?"""
        return index in self.router

    def close_to_new_work(self, indices: Iterable[int], closed: bool = True) -> None:
        """Or (False) open them again."""
        for index in indices:
            if index in self.members:
                self.members[index].leaving = closed
            if self.joined(index):
                self.router.drain(index, closed)
        self.on_changed()

    async def leave(self, engine: Engine) -> None:
        """One that is about to end: what it has goes on elsewhere."""
        engine.ending = True
        self.rescue(engine, certainly=True)

    def forget(self, engine: Engine) -> None:
        """It has ended."""
        if self.joined(engine.index):
            self.router.leave(engine.index)
        self._before = _sum([self._before, engine.stats])
        self.on_settled(engine.index)
        del self.members[engine.index]
        self.check.forget(engine.index)
        self._end_with_the_last()
        self.tell_facts()
        self.on_changed()

    def _changed(self, engine: Engine) -> None:
        """An engine's state is another: what waits for one that is not up may go on in one that is."""
        if self.joined(engine.index):  # else it has not joined yet, or has left
            if engine.state in ("ready", "ended"):
                self.on_settled(engine.index)
            was_up = self.router.is_up(engine.index)
            self.router.set_up(engine.index, engine.state == "ready")
            if was_up and engine.state != "ready":
                for stream in self.of(engine):
                    stream.lost = engine.had(stream) and not engine.on_purpose and engine.asleep is None
            if engine.state == "ready":
                self.tell_facts()
                if not was_up:
                    self._background.start(self.take_share(engine))  # of what is open here
            self.rescue_all()
            self._end_with_the_last()
        self.on_changed()

    def _end_with_the_last(self) -> None:
        """Without an engine there is nobody who could go on."""
        causes = [engine.dead for engine in self.members.values()]
        if causes and causes[-1] is not None and None not in causes:
            self.die(causes[-1])

    def die(self, dead: Dead) -> None:
        """There will be no engine."""
        self.dead = self.dead or dead
        self._ready.set()

    def tell_facts(self) -> None:
        known = {index: engine.facts for index, engine in sorted(self.members.items()) if engine.facts is not None}
        for index, facts in known.items():
            self.check.look(index, facts)
        if known:
            self.facts = _in_common(list(known.values()))

    def close(self) -> None:
        self._background.cancel()

    # -- for people

    async def ready(self) -> EngineFacts:
        """Wait until the engines can admit. Raises ModelError, CapacityError or EngineDead if they can't."""
        await self._ready.wait()
        if self.dead is not None:
            raise error_of(self.dead)
        assert self.facts is not None
        return self.facts

    @property
    def stats(self) -> EngineStats:
        """Of all engines together: counters never fall, `epoch` is the highest."""
        engines = list(self.members.values())
        total = _sum([self._before, *(engine.stats for engine in engines)])
        usage = sum(engine.stats.kv_usage for engine in engines) / max(1, len(engines))
        return msgspec.structs.replace(total, kv_usage=usage)

    @property
    def last_progress(self) -> float:
        """time.monotonic() of the last new step, or idle state, of the engine that has not moved for the longest."""
        if self.elsewhere is not None:
            return self.elsewhere.moved or time.monotonic()
        return min((e.last_progress for e in self.members.values() if e.works), default=time.monotonic())

    def engines(self) -> list[EngineState]:
        """Each engine, by number."""
        loads = self.router.loads()
        return [_shown(self, engine, loads.get(index, 0)) for index, engine in sorted(self.members.items())]

    # -- sequences

    def submit(self, stream: Stream) -> None:
        """Start a sequence; its sink gets what comes of it in order, the last piece with `finish` set."""
        if self.dead is not None:
            stream.tell(stream.fail(self.dead.message, cancel=False))
            return
        engine = self.best(stream) or self.least_busy()
        if engine is None:  # the others were given up while the last one leaves
            error = "no engine is left to go on with it: all were given up, but for those that are leaving; try again"
            stream.tell(stream.fail(error, cancel=False))
            return
        stream.dispatcher = self
        self.open[stream.id] = stream
        self._send(stream, engine)

    def best(self, stream: Stream) -> Engine | None:
        """The best of those that can admit."""
        history = stream.history() if stream.tokens else stream.submit.prompt
        left, salt = stream.submit.max_tokens - len(stream.tokens), stream.submit.shared_by
        for kind in self.hand_overs.kinds(stream):
            if (index := self.router.choose(history, left, salt, kind)) is not None:
                return self.members[int(index)]
        return None

    def least_busy(self) -> Engine | None:
        """Nobody is up: who will have the least to do when it is. One that has not joined yet must, if all others were
        given up; one that is to leave, if there is no other at all: then it can't."""

        def cost(engine: Engine) -> tuple[bool, bool, int]:
            return engine.leaving, not self.joined(engine.index), len(engine.streams)

        able = [engine for engine in self.members.values() if engine.dead is None and not engine.ending]
        found = min(able, key=cost, default=None)
        if found is not None and not self.joined(found.index):
            self.admit(found)
        return found

    def _send(self, stream: Stream, engine: Engine) -> None:
        submit, known = stream.submit, len(stream.tokens)
        self.hand_overs.sent(stream, engine)
        ahead = 1 if stream.lends else submit.max_tokens - known
        self.router.sent(stream.id, engine.index, len(submit.prompt) + known, ahead)
        engine.submit(stream)

    def cancel(self, request_id: str) -> None:
        """Stop a sequence; its sink hears nothing more. Unknown ids are ignored."""
        stream = self.open.get(request_id)
        if stream is not None:
            self._ended(stream)
            stream.engine.cancel(stream.name)

    def progressed(self, stream: Stream, piece: Piece) -> None:
        """Hears of every piece before its client does."""
        if piece.finish is not None:
            self._ended(stream)
            return
        self.router.progressed(stream.id, len(piece.tokens))
        if stream.lent or stream.pause or stream.lease is not None:
            self.hand_overs.heard(stream)

    def _ended(self, stream: Stream) -> None:
        self.open.pop(stream.id, None)
        stream.heard()
        self.hand_overs.heard(stream)
        self.router.ended(stream.id)
        if stream.engine.leaving:
            self._left.set()

    def of(self, engine: Engine) -> list[Stream]:
        """An engine's open sequences, the oldest first."""
        return [self.open[id] for id in self.router.requests(engine.index)] if self.joined(engine.index) else []

    # -- elsewhere

    def best_for(self, stream: Stream) -> Engine | None:
        """Another engine that can go on with it now."""
        other = self.best(stream)
        return other if other is not stream.engine else None

    def rescue_all(self) -> None:
        """What waits for an engine that is not up may go on in one that is."""
        for engine in self.members.values():
            if engine.state != "ready":
                self.rescue(engine)

    def rescue(self, engine: Engine, *, certainly: bool = False) -> None:
        """An engine is not up: what it has goes on elsewhere, if it may and can. certainly: there is no way back."""
        certainly = certainly or engine.dead is not None
        for stream in self.of(engine):
            if stream.stuck and engine.state != "ready":
                continue
            other = self.best_for(stream) or (self.least_busy() if certainly else None)
            if other is not None and other is not engine:
                self.move(stream, other)

    def move(self, stream: Stream, engine: Engine) -> None:
        """Have another engine go on with a sequence."""
        stream.engine.cancel(stream.name)
        stream.rename()
        self.taken[engine.index] += 1
        self._send(stream, engine)
        self._left.set()

    async def hand_over_all(self, engine: Engine) -> int:
        """Move everything an engine has to others, one after the other, so that each pauses for a step or two. Returns
        how many. Raises PlanariaError when nobody can take over."""
        moved = 0
        while opened := self.of(engine):
            other = self.best_for(opened[0])
            if other is None:
                many = f"{len(opened)} sequences of engine {engine.index}"
                raise PlanariaError(f"no other engine is up to go on with {many}")
            moved += await self._hand_over(opened[0], other)
        return moved

    async def take_share(self, engine: Engine) -> int:
        """Move sequences to an engine that has come up, until no other has two more than it. Returns how many."""
        moved = 0
        while engine.state == "ready" and not engine.leaving and engine.kind != PREFILL:
            others = [other for other in self.members.values() if other.state == "ready" and self.joined(other.index)]
            busiest = max(others, key=lambda other: len(self.of(other)))
            movable = [stream for stream in self.of(busiest) if not stream.stuck and not stream.lends]
            if len(self.of(busiest)) - len(self.of(engine)) < 2 or not movable:
                break
            moved += await self._hand_over(min(movable, key=lambda stream: len(stream.history())), engine)
        return moved

    async def _hand_over(self, stream: Stream, other: Engine) -> bool:
        """Move one, if it is still there when the other engine has its history in its prefix cache. Ends when it goes
        on there: what is computed for the next one would only make it wait."""
        engine = stream.engine
        if self.warm and engine.state == "ready" and not stream.submit.params.pooling:
            await _warm_up(other, stream)
        if stream.engine is not engine or self.open.get(stream.id) is not stream or other.state != "ready":
            return False
        goes_on = asyncio.Event()
        stream.goes_on = goes_on.set
        self.move(stream, other)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOES_ON):
                await goes_on.wait()
        return True

    async def emptied(self, indices: Iterable[int], timeout: float) -> None:
        """Wait until engines that leave have no sequence any more, for so many seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while any(self.of(self.members[index]) for index in indices):
                    self._left.clear()
                    await self._left.wait()


def _shown(dispatcher: Dispatcher, engine: Engine, load: int) -> EngineState:
    index, facts, elsewhere = engine.index, engine.facts, dispatcher.elsewhere
    opened = len(engine.streams)
    taken = dispatcher.taken[index]
    if elsewhere is not None:
        (opened, load), taken = elsewhere.open.get(index, (0, 0)), elsewhere.taken.get(index, 0)
    return EngineState(
        index, engine.state, engine.connection.pid if engine.connection is not None else 0,
        facts.layout if facts is not None else "", facts.ranks if facts is not None else [], engine.stats, opened,
        load, engine.leaving, taken, dispatcher.check.found.get(index, []), engine.kind,
    )  # fmt: skip


def _sum(parts: Iterable[EngineStats]) -> EngineStats:
    """Added up; of epochs the highest; kv_usage of the last."""
    total = EngineStats()
    for stats in parts:
        total = msgspec.structs.replace(
            added(total, stats), running=total.running + stats.running, waiting=total.waiting + stats.waiting,
            epoch=max(total.epoch, stats.epoch),
        )  # fmt: skip
    return total


def _in_common(known: list[EngineFacts]) -> EngineFacts:
    """Of engines that differ in size alone, if at all."""
    first = known[0]
    return msgspec.structs.replace(
        first, num_blocks=min(facts.num_blocks for facts in known),
        layout=f"dp={len(known)} {first.layout}" if len(known) > 1 else first.layout,
        ranks=[pid for facts in known for pid in facts.ranks],
        places=[place for facts in known for place in facts.places],
    )  # fmt: skip


async def _warm_up(engine: Engine, stream: Stream) -> None:
    """Have an engine compute what a sequence has, which its prefix cache keeps."""
    done = asyncio.Event()
    id = f"{stream.id}~warm{next(_numbers)}"
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    submit = stream.submit
    warm = Submit(
        id, stream.history(), params, seed=0, max_tokens=1, priority=submit.priority,
        cache_salt=submit.cache_salt, adapter=submit.adapter,
    )  # fmt: skip
    engine.submit(Stream(warm, lambda stream, piece: done.set() if piece.finish is not None else None))
    try:
        async with asyncio.timeout(WARM_UP):
            await done.wait()
    except TimeoutError:
        engine.cancel(id)
