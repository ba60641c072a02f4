"""Engines of two kinds: those that compute prompts, and those that go on from there, so that no stream waits for
another's prompt. Which kind a sequence is for, and what it takes along.

A prompt's engine ends with its first token, and lends what it has computed (planaria.core.transfer); the dispatcher
moves the sequence like any other, with the lease, which is given back as soon as anything is heard of it from there. A
kind is what the dispatcher makes of an engine, no more: without engines of one kind those of the other do all, and an
engine's kind can be changed at any time.

A prompt whose first token would come sooner from an engine with streams is computed there, in parts that are so short
that no stream waits for long: so neither kind has time left while the other is what everybody waits for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from planaria.core.resize import DECODE, PREFILL
from planaria.core.router import Router
from planaria.server.engine import Engine
from planaria.server.stream import Stream
from planaria.types import KVLease, KVOffer
from planaria.wire import Release

if TYPE_CHECKING:
    from planaria.server.dispatcher import Dispatcher

FIRST = 64  # tokens of a prompt that is handed over, before anything is measured
LEAST, MOST = 32, 1024  # bounds of what is measured
WEIGHT = 0.1  # of the latest one in a mean
PAUSE = 0.08  # seconds of a step with streams, at most, as far as prompts are what it takes
AGAIN = 10.0  # seconds without a hand-over after which one is tried: what it takes may have been long for a moment only
BESIDE = 2.0  # times as long a prompt takes beside streams, before anything is measured


class Mean:
    def __init__(self) -> None:
        self.value = 0.0

    def take(self, new: float) -> None:
        """Zero: it is not known."""
        if new:
            self.value += WEIGHT * (new - self.value) if self.value else new


class HandOvers:
    """Of a dispatcher's sequences. `transfer`: seconds from a prompt's first token to the next one, elsewhere; `token`:
    to compute one of a prompt; `beside`: the same where streams are."""

    def __init__(self, dispatcher: Dispatcher, router: Router) -> None:
        self.dispatcher, self.router = dispatcher, router
        self.transfer, self.token, self.beside = Mean(), Mean(), Mean()
        self.measured = -AGAIN  # time.monotonic() of the last transfer's end

    @property
    def threshold(self) -> int:
        """Tokens to be computed from which on a prompt is handed over: fewer are computed in the time that takes. A
        hand-over costs one stream that time; computing costs it all that an engine for them has."""
        if not self.token.value or self.unknown:
            return FIRST
        found = [engine.stats.running for engine in self.dispatcher.members.values() if engine.kind == DECODE]
        streams = 1 + sum(found) / max(1, len(found))
        return round(max(LEAST, min(MOST, self.transfer.value / self.token.value / streams)))

    @property
    def unknown(self) -> bool:
        """Has none been measured of late?"""
        return time.monotonic() - self.measured >= AGAIN

    @property
    def both(self) -> bool:
        """Is there one of each kind that can admit?"""
        return self.router.is_open(PREFILL) and self.router.is_open(DECODE)

    def set_kinds(self, kinds: Mapping[int, str]) -> None:
        """What engines are for from now on, by number. What they have goes on."""
        members = self.dispatcher.members
        others = [index for index, kind in kinds.items() if index in members and members[index].kind != kind]
        for index in others:
            members[index].kind = kinds[index]
            if self.dispatcher.joined(index):
                self.router.set_kind(index, kinds[index])
        if others:
            self.dispatcher.on_changed()

    def kinds(self, stream: Stream) -> tuple[str, ...]:
        """For which kind it is, then where else it may go."""
        prompt_alone = bool(stream.submit.params.pooling)
        return (PREFILL, DECODE, "") if prompt_alone or self._for_prefill(stream) else (DECODE, PREFILL, "")

    def _for_prefill(self, stream: Stream) -> bool:
        submit = stream.submit
        if not self.both or not may_leave(stream) or len(submit.prompt) < self.threshold:
            return False
        left = len(submit.prompt) - self.router.cached(submit.prompt, submit.shared_by, DECODE)
        return left >= self.threshold and not self._sooner_beside(len(submit.prompt), left)

    def _sooner_beside(self, tokens: int, left: int) -> bool:
        """Would the first token of a prompt come sooner from an engine with streams, which has `left` to compute? How
        fast one for prompts is shows only if it gets some."""
        if self.unknown and not self.router.coming(PREFILL):
            return False
        alone = self.token.value or 1.0
        beside = self.beside.value or BESIDE * alone
        return beside * (self.router.coming(DECODE) + left) < alone * (self.router.coming(PREFILL) + tokens)

    def sent(self, stream: Stream, engine: Engine) -> None:
        """It goes to this engine now."""
        stream.stays.append((time.perf_counter(), engine))
        stream.lends = engine.kind == PREFILL and may_leave(stream) and self.router.is_open(DECODE)
        stream.pause = PAUSE if engine.kind == DECODE and not stream.tokens else 0.0

    def lent(self, stream: Stream, engine: Engine, lease: KVLease | KVOffer | None) -> None:
        """Its prompt is computed and its first token told: it goes on elsewhere, if it goes on."""
        self.token.take(engine.stats.token_seconds)
        if self.dispatcher.open.get(stream.id) is not stream:
            release(engine, lease)
            return
        stream.lease = (engine, lease) if lease is not None else None
        stream.lent = time.monotonic()
        other = self.dispatcher.best(stream) or self.dispatcher.least_busy()
        if other is None:
            stream.tell(stream.fail("no engine is left to go on with it; try again", cancel=False))
        else:
            self.dispatcher.move(stream, other)

    def heard(self, stream: Stream) -> None:
        """It goes on, or has ended: nobody needs what was lent."""
        if stream.lent:
            if self.unknown:
                self.transfer = Mean()
            self.measured = time.monotonic()
            self.transfer.take(self.measured - stream.lent)
            stream.lent = 0.0
        if stream.pause and stream.tokens:
            self.beside.take(stream.engine.stats.token_seconds)
            stream.pause = 0.0
        if stream.lease is not None:
            release(*stream.lease)
            stream.lease = None


def may_leave(stream: Stream) -> bool:
    """Can it go on elsewhere after its prompt? Log-probabilities of a prompt are made where it is computed, and one
    token is all of it."""
    submit = stream.submit
    return not stream.tokens and submit.max_tokens > 1 and submit.params.prompt_logprobs is None


def release(engine: Engine, lease: KVLease | KVOffer | None) -> None:
    """Of a process that has ended there is nothing to be released; what is offered ends when it was fetched, or by
    itself."""
    if isinstance(lease, KVLease) and engine.up:
        engine.send(Release(lease.number, lease.id))
