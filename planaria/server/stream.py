"""A sequence that a server has open, from its router to its client: what was asked for, the tokens that its client has
been told, where it is and how often it has moved. An engine may end at any moment; what is in here is all that another
needs to go on.

Two rules are kept here. Tokens are written down before anybody hears of them, each at its index: what came before is
dropped, a gap is an engine's fault. And each stay in an engine has a name of its own, so nothing that one has still to
say of a sequence that has left it is ever taken for news.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from planaria.errors import PlanariaError
from planaria.types import Delta
from planaria.wire import Sink, Submit

if TYPE_CHECKING:
    from planaria.server.dispatcher import Dispatcher
    from planaria.server.engine import Engine


class Gap(PlanariaError):
    """Tokens between those that are written down and those that came are missing."""


class Stream:
    """dispatcher: of several engines, hears how it goes on. `name`: what its engine calls it; `sent`: the engine of now
    has it; `leaving`: and was told to give it back; `lost`: an engine was lost with it; `tried`: how many tokens it had
    when it was moved away from one that was, -1 if that never was so; `goes_on`: called once when it is heard of next,
    or ends."""

    __slots__ = (
        "dispatcher", "engine", "goes_on", "id", "leaving", "lost", "moves", "name", "sent", "sink", "submit", "tokens",
        "tried",
    )  # fmt: skip

    def __init__(self, submit: Submit, sink: Sink, dispatcher: Dispatcher | None = None) -> None:
        self.submit, self.sink, self.dispatcher = submit, sink, dispatcher
        self.id = self.name = submit.id
        self.tokens = list(submit.output)
        self.engine: Engine
        self.sent = self.leaving = self.lost = False
        self.moves, self.tried = 0, -1
        self.goes_on: Callable[[], None] | None = None

    @property
    def stuck(self) -> bool:
        """It has got no token since an engine was lost with it, so it may be what engines die of."""
        return self.tried == len(self.tokens)

    def history(self) -> list[int]:
        """Its tokens so far, prompt and output."""
        return [*self.submit.prompt, *self.tokens]

    def resubmit(self) -> Submit:
        """What an engine is told so that it goes on from here: the same request, with the tokens it has."""
        if self.name == self.submit.id and len(self.tokens) == len(self.submit.output):
            return self.submit
        return msgspec.structs.replace(self.submit, id=self.name, output=list(self.tokens))

    def rename(self) -> None:
        """It goes on elsewhere, under another name."""
        if self.lost:  # one that only waited there can't be what was in the way
            self.tried = len(self.tokens)
        self.moves += 1
        self.name = f"{self.id}~{self.moves}"
        self.sent = self.leaving = self.lost = False

    def take(self, delta: Delta) -> Delta | None:
        """Write down what a delta adds; what is left of it to tell, or None. Raises Gap."""
        have = len(self.tokens)
        if delta.index > have:
            raise Gap(f"the engine skipped tokens {have} to {delta.index - 1} of {self.name}")
        known = have - delta.index
        if known:
            if known >= len(delta.tokens) and delta.finish is None:
                return None
            logprobs = delta.logprobs[known:] if delta.logprobs is not None else None
            delta = msgspec.structs.replace(delta, index=have, tokens=delta.tokens[known:], logprobs=logprobs)
        self.tokens += delta.tokens
        return delta

    def tell(self, delta: Delta) -> None:
        """To whom it concerns, what `take` has left of it."""
        self.heard()
        if self.dispatcher is not None:
            self.dispatcher.progressed(self, delta)
        delta.request_id = self.id
        self.sink(delta)

    def heard(self) -> None:
        """Something came of it, or it has ended."""
        if self.goes_on is not None:
            self.goes_on()
            self.goes_on = None
