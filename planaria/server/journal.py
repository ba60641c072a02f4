"""What a server has promised and what it has delivered: every open sequence with the tokens that its client has seen.

An engine may end at any moment; what is in here is all that another needs to go on. The rule kept here: tokens are
written down before anybody hears of them, each at its index. What came before is dropped, a gap is an engine's fault.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from planaria.errors import PlanariaError
from planaria.types import Delta
from planaria.wire import Sink, Submit


class Gap(PlanariaError):
    """Tokens between those that are written down and those that came are missing."""


class Entry:
    """An open sequence. `sent`: the engine of now has it; `leaving`: and was told to give it back."""

    __slots__ = ("leaving", "sent", "sink", "submit", "tokens")

    def __init__(self, submit: Submit, sink: Sink) -> None:
        self.submit, self.sink = submit, sink
        self.tokens = list(submit.output)
        self.sent = self.leaving = False

    @property
    def id(self) -> str:
        return self.submit.id

    def resubmit(self) -> Submit:
        """What an engine is told so that it goes on from here: the same request, with the tokens it has."""
        if len(self.tokens) == len(self.submit.output):
            return self.submit
        return msgspec.structs.replace(self.submit, output=list(self.tokens))

    def take(self, delta: Delta) -> Delta | None:
        """Write down what a delta adds; what is left of it to tell, or None. Raises Gap."""
        have = len(self.tokens)
        if delta.index > have:
            raise Gap(f"the engine skipped tokens {have} to {delta.index - 1} of {self.id}")
        known = have - delta.index
        if known:
            if known >= len(delta.tokens) and delta.finish is None:
                return None
            logprobs = delta.logprobs[known:] if delta.logprobs is not None else None
            delta = Delta(
                delta.request_id, have, delta.tokens[known:], delta.finish, delta.stop_reason, logprobs,
                delta.prompt_logprobs, delta.num_cached, delta.error,
            )  # fmt: skip
        self.tokens += delta.tokens
        return delta


class Journal:
    """Open sequences, the oldest first."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """The oldest first; over a copy, so that the loop's body may close some."""
        return iter(list(self._entries.values()))

    def get(self, id: str) -> Entry | None:
        return self._entries.get(id)

    def open(self, submit: Submit, sink: Sink) -> Entry:
        entry = self._entries[submit.id] = Entry(submit, sink)
        return entry

    def close(self, id: str) -> Entry | None:
        """It has ended, or nobody waits for it any more. None for an unknown one."""
        return self._entries.pop(id, None)
