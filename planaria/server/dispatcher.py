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
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from planaria.errors import PlanariaError
from planaria.server.stream import Stream
from planaria.server.supervisor import SupervisedEngine
from planaria.types import Delta, FinishReason, SamplingParams
from planaria.wire import Sink, Submit

if TYPE_CHECKING:
    from planaria.server.fleet import Fleet

_numbers = itertools.count()
WARM_UP = 60.0  # seconds the other engine gets to compute what a sequence has
GOES_ON = 1.0  # seconds in which a sequence that was moved is alone with its engine's attention


class Dispatcher:
    """fleet: keeps the engines."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.router = fleet, fleet.router
        self.open: dict[str, Stream] = {}
        self.taken = Counter[int]()  # sequences that came to an engine from another
        self._left = asyncio.Event()  # an engine that leaves has a sequence less

    def submit(self, message: Submit, sink: Sink) -> None:
        dead = self.fleet.dead
        if dead is not None:
            sink(Delta(message.id, len(message.output), [], FinishReason.ERROR, error=dead.message))
            return
        stream = Stream(message, sink, self)
        engine = self._up(stream) or self._least_busy()
        if engine is None:  # the others were given up while the last one leaves
            error = "no engine is left to go on with it: all were given up, but for those that are leaving; try again"
            sink(Delta(message.id, len(message.output), [], FinishReason.ERROR, error=error))
            return
        self.open[message.id] = stream
        self._send(stream, engine)

    def _up(self, stream: Stream) -> SupervisedEngine | None:
        """The best of those that can admit."""
        history = stream.history() if stream.tokens else stream.submit.prompt
        index = self.router.choose(history, stream.submit.max_tokens - len(stream.tokens))
        return self.fleet.members[int(index)] if index is not None else None

    def _least_busy(self) -> SupervisedEngine | None:
        """Nobody is up: who will have the least to do when it is. One that has not joined yet must, if all others were
        given up; one that is to leave, if there is no other at all: then it can't."""
        fleet = self.fleet

        def cost(engine: SupervisedEngine) -> tuple[bool, bool, int]:
            return engine.index in fleet.leaving, not fleet.joined(engine.index), len(engine.queue)

        able = [engine for engine in fleet.members.values() if engine.dead is None and engine.index not in fleet.ending]
        found = min(able, key=cost, default=None)
        if found is not None and not fleet.joined(found.index):
            fleet.admit(found.index)
        return found

    def _send(self, stream: Stream, engine: SupervisedEngine) -> None:
        submit, known = stream.submit, len(stream.tokens)
        self.router.sent(stream.id, engine.index, len(submit.prompt) + known, submit.max_tokens - known)
        engine.take(stream)

    def cancel(self, request_id: str) -> None:
        stream = self.open.get(request_id)
        if stream is not None:
            self._ended(stream)
            stream.engine.cancel(stream.name)

    def progressed(self, stream: Stream, delta: Delta) -> None:
        """Hears every delta before its client does."""
        if delta.finish is not None:
            self._ended(stream)
        else:
            self.router.progressed(stream.id, len(delta.tokens))

    def _ended(self, stream: Stream) -> None:
        self.open.pop(stream.id, None)
        stream.heard()
        self.router.ended(stream.id)
        if stream.engine.index in self.fleet.leaving:
            self._left.set()

    def of(self, engine: SupervisedEngine) -> list[Stream]:
        """An engine's open sequences, the oldest first."""
        if not self.fleet.joined(engine.index):
            return []
        return [self.open[id] for id in self.router.requests(engine.index)]

    # -- elsewhere

    def best_for(self, stream: Stream) -> SupervisedEngine | None:
        """Another engine that can go on with it now."""
        other = self._up(stream)
        return other if other is not stream.engine else None

    def rescue_all(self) -> None:
        """What waits for an engine that is not up may go on in one that is."""
        for engine in self.fleet.members.values():
            if engine.state != "ready":
                self.rescue(engine)

    def rescue(self, engine: SupervisedEngine, *, certainly: bool = False) -> None:
        """An engine is not up: what it has goes on elsewhere, if it may and can. certainly: there is no way back."""
        certainly = certainly or engine.dead is not None
        for stream in self.of(engine):
            if stream.stuck and engine.state != "ready":
                continue
            other = self.best_for(stream) or (self._least_busy() if certainly else None)
            if other is not None and other is not engine:
                self.move(stream, other)

    def move(self, stream: Stream, engine: SupervisedEngine) -> None:
        """Have another engine go on with a sequence."""
        stream.engine.cancel(stream.name)
        stream.rename()
        self.taken[engine.index] += 1
        self._send(stream, engine)
        self._left.set()

    async def hand_over_all(self, engine: SupervisedEngine) -> int:
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

    async def take_share(self, engine: SupervisedEngine) -> int:
        """Move sequences to an engine that has come up, until no other has two more than it. Returns how many."""
        fleet, moved = self.fleet, 0
        while engine.state == "ready" and engine.index not in fleet.leaving:
            others = [other for other in fleet.members.values() if other.state == "ready" and fleet.joined(other.index)]
            busiest = max(others, key=lambda other: len(self.of(other)))
            movable = [stream for stream in self.of(busiest) if not stream.stuck]
            if len(self.of(busiest)) - len(self.of(engine)) < 2 or not movable:
                break
            moved += await self._hand_over(min(movable, key=lambda stream: len(stream.history())), engine)
        return moved

    async def _hand_over(self, stream: Stream, other: SupervisedEngine) -> bool:
        """Move one, if it is still there when the other engine has its history in its prefix cache. Ends when it goes
        on there: what is computed for the next one would only make it wait."""
        engine = stream.engine
        if self.fleet.config.cache.enable_prefix_caching and engine.state == "ready":
            done = asyncio.Event()
            id = f"{stream.id}~warm{next(_numbers)}"
            params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            warm = Submit(id, stream.history(), params, seed=0, max_tokens=1, priority=stream.submit.priority)
            other.submit(warm, lambda delta: done.set() if delta.finish is not None else None)
            try:
                async with asyncio.timeout(WARM_UP):
                    await done.wait()
            except TimeoutError:
                other.cancel(id)
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
                while any(self.of(self.fleet.members[index]) for index in indices):
                    self._left.clear()
                    await self._left.wait()
