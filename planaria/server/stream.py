"""A sequence from its client to its engine and back: what was asked for, the tokens that its client has been told and
their text, where it is and how often it has moved. An engine may end at any moment; what is in here is all that another
needs to go on. `LLM` uses the same, with an engine of its own.

Three rules are kept here. Tokens are written down before anybody hears of them, each at its index: what came before is
dropped, a gap is an engine's fault. Each stay in an engine has a name of its own, so nothing that one has still to say
of a sequence that has left it is ever taken for news. And what goes wrong with a sequence's text ends that sequence,
and is nobody else's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import msgspec

from planaria.errors import PlanariaError
from planaria.server.detokenise import Detokenizer
from planaria.server.records import drawn
from planaria.server.tokenise import Tokenizer
from planaria.types import Delta, FinishReason, KVLease, KVOffer, SamplingParams, TokenLogprobs
from planaria.wire import Submit

if TYPE_CHECKING:
    from planaria.server.dispatcher import Dispatcher
    from planaria.server.engine import Engine

logger = logging.getLogger("planaria")

PROMPT_TAIL = 8  # tokens of the prompt a detokeniser looks at


class Gap(PlanariaError):
    """Tokens between those that are written down and those that came are missing."""


class Piece(msgspec.Struct, eq=False, gc=False):  # it is in no circle
    """What one delta added to one choice. `text` may be empty: bytes of a character or of a stop string are held back.

    `offsets`: where in the choice's text each token with log-probabilities begins, in characters.
    `finish` is set on the last piece; `error` says why if it is "error" or "abort". `cancel`: the engine still runs the
    sequence (a stop string is seen here, not there) and is to be told. `first`: the index of its first token;
    `weights`: the number of those that drew the last.
    """

    choice: int
    text: str
    tokens: list[int]
    first: int = 0
    weights: int = 0
    logprobs: list[TokenLogprobs] | None = None
    offsets: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cancel: bool = False

    def join(self, later: Piece) -> None:
        """Have this be both, as one step would have brought them."""
        self.text += later.text
        self.tokens += later.tokens
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
            self.offsets = (self.offsets or []) + (later.offsets or [])
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finish, self.stop_reason = later.finish, later.stop_reason
        self.weights = later.weights


class Stream:
    """choice: its index in the answer; tokenizer: None: no text is made; sink: gets every piece, in order.

    Where it is: `dispatcher`: of several engines, hears how it goes on. `name`: what its engine calls it; `sent`: the
    engine of now has it; `leaving`: and was told to give it back; `lost`: an engine was lost with it; `tried`: how many
    tokens it had when it was moved away from one that was, -1 if that never was so; `goes_on`: called once when it is
    heard of next, or ends; `lends`: its engine is to end with its first token; `pause`: see wire.Submit;
    `lease`: what an engine has lent, and `lent`: time.monotonic() when that was; `stays`:
    time.perf_counter() when it was sent to an engine, and which."""

    __slots__ = (
        "_detokenizer", "_eos", "_feed", "_keep_stop", "choice", "dispatcher", "engine", "error", "finish", "goes_on",
        "id", "lease", "leaving", "lends", "lent", "logprobs", "lost", "moves", "name", "num_cached", "pause", "pooled",
        "prompt_logprobs", "queued", "sent", "sink", "stays", "stop_reason", "submit", "text_length", "text_parts",
        "tokens", "tried", "versions",
    )  # fmt: skip

    def __init__(
        self, submit: Submit, sink: Sink | None = None, choice: int = 0, tokenizer: Tokenizer | None = None
    ) -> None:
        params = submit.params
        self.submit, self.choice, self.sink = submit, choice, sink
        self.id = self.name = submit.id
        self.tokens = list(submit.output)
        self.text_parts: list[str] = []
        self.text_length = 0
        self.logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_cached, self.queued = 0, 0.0
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.versions: list[tuple[int, int]] = []  # of weights, see records.version_runs
        self.pooled: bytes | None = None  # a vector, in place of tokens
        self._keep_stop = params.include_stop_str_in_output
        self._eos = frozenset(submit.eos_ids) - frozenset(params.stop_token_ids)
        self._detokenizer = detokenizer = make_detokenizer(tokenizer, params, submit.prompt)
        self._feed = detokenizer.feed if detokenizer is not None else None
        self.dispatcher: Dispatcher | None = None
        self.engine: Engine
        self.sent = self.leaving = self.lost = False
        self.moves, self.tried = 0, -1
        self.goes_on: Callable[[], None] | None = None
        self.lends, self.pause, self.lent = False, 0.0, 0.0
        self.stays: list[tuple[float, Engine]] = []
        self.lease: tuple[Engine, KVLease | KVOffer] | None = None

    # -- where it is

    @property
    def stuck(self) -> bool:
        """It has got no token since an engine was lost with it, so it may be what engines die of."""
        return self.tried == len(self.tokens)

    def history(self) -> list[int]:
        """Its tokens so far, prompt and output."""
        return [*self.submit.prompt, *self.tokens]

    def resubmit(self) -> Submit:
        """What an engine is told so that it goes on from here: the same request, with the tokens it has."""
        there = self.name == self.submit.id and len(self.tokens) == len(self.submit.output)
        if there and not self.lends and not self.pause:
            return self.submit
        lease = self.lease[1] if self.lease is not None else None
        return msgspec.structs.replace(
            self.submit, id=self.name, output=list(self.tokens), lends=self.lends, lease=lease, pause=self.pause
        )

    def rename(self) -> None:
        """It goes on elsewhere, under another name."""
        if self.lost:  # one that only waited there can't be what was in the way
            self.tried = len(self.tokens)
        self.moves += 1
        self.name = f"{self.id}~{self.moves}"
        self.sent = self.leaving = self.lost = False

    # -- what comes of it

    @property
    def offsets(self) -> list[int]:
        """Where each token begins in the text, in characters; kept when log-probabilities are asked for."""
        known = self._detokenizer.offsets if self._detokenizer is not None else None
        known = known or []
        return known[: len(self.tokens)] + [self.text_length] * (len(self.tokens) - len(known))

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    def take(self, delta: Delta) -> Piece | None:
        """Write down what a delta adds. None when it brings nothing new: a repeated one, or one after the end. Raises
        Gap."""
        if self.finish is not None:
            return None
        have, finish = len(self.tokens), delta.finish
        if finish is not None and finish in (FinishReason.ERROR, FinishReason.ABORT):  # None first: see Engine.deliver
            return self.fail(delta.error or "the engine dropped the request", finish, cancel=False)
        if delta.index != have:
            if delta.index > have:
                raise Gap(f"the engine skipped tokens {have} to {delta.index - 1} of {self.name}")
            if have - delta.index >= len(delta.tokens) and finish is None:
                return None
            logprobs = delta.logprobs[have - delta.index :] if delta.logprobs else delta.logprobs
            delta = msgspec.structs.replace(
                delta, index=have, tokens=delta.tokens[have - delta.index :], logprobs=logprobs
            )
        try:
            return self._take(delta)
        except Exception as e:
            logger.exception("%s: its text can't be made", self.id)
            return self.fail(f"its text can't be made: {type(e).__name__}: {e}")

    def _take(self, delta: Delta) -> Piece:
        tokens, logprobs, finish = delta.tokens, delta.logprobs, delta.finish
        stop_reason = delta.stop_reason
        text = ""
        offsets: list[int] | None = None
        cancel = False
        detokenizer, have = self._detokenizer, len(self.tokens)
        if finish is None and self._feed is not None:
            text = self._feed(tokens)
            self.text_length += len(text)
        elif detokenizer is not None:
            # The token that stopped a sequence is counted, but is no part of the text unless that was asked for.
            ended = finish is not None and finish is FinishReason.STOP
            shown = tokens[:-1] if ended and not self._keep_stop else tokens
            text = detokenizer.push(shown)
            if detokenizer.stop_reason is None and finish is not None:
                text += detokenizer.finish()
            if detokenizer.stop_reason is not None:
                cancel = finish is None
                finish, stop_reason = FinishReason.STOP, detokenizer.stop_reason
                tokens = tokens[: detokenizer.num_tokens - have]
                logprobs = logprobs[: len(tokens)] if logprobs else logprobs
            self.text_length += len(text)
            if detokenizer.offsets is not None:
                offsets = detokenizer.offsets[have:]
                offsets += [self.text_length] * (len(tokens) - len(offsets))
        if (delta.weights or self.versions) and tokens:
            drawn(self.versions, have, delta.weights)
        piece = Piece(self.choice, text, tokens, have, self.versions[-1][1] if self.versions else 0)
        self.tokens += tokens
        if text:
            self.text_parts.append(text)
        if self.logprobs is not None and logprobs:
            self.logprobs += logprobs
            piece.logprobs, piece.offsets = logprobs, offsets
        if delta.num_cached:
            self.num_cached = delta.num_cached
        if delta.queued:
            self.queued = delta.queued
        self.pooled = delta.pooled
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs = delta.prompt_logprobs
        if finish is not None:
            if stop_reason in self._eos:
                stop_reason = None  # the model's own end is no stop condition of the request
            self.finish = piece.finish = finish
            self.stop_reason = piece.stop_reason = stop_reason
            piece.cancel = cancel
        return piece

    def fail(self, message: str, finish: FinishReason = FinishReason.ERROR, *, cancel: bool = True) -> Piece:
        """End the sequence with an error. `cancel`: the engine may still run it."""
        piece = Piece(self.choice, "", [], len(self.tokens), self.versions[-1][1] if self.versions else 0)
        self.finish = piece.finish = finish
        self.error = piece.error = message
        piece.cancel = cancel
        return piece

    def tell(self, piece: Piece) -> None:
        """To whom it concerns."""
        if self.goes_on is not None:
            self.heard()
        if self.dispatcher is not None:
            self.dispatcher.progressed(self, piece)
        if self.sink is not None:
            self.sink(self, piece)

    def push(self, delta: Delta) -> None:
        """Take in, and tell."""
        piece = self.take(delta)
        if piece is not None:
            self.tell(piece)

    def heard(self) -> None:
        """Something came of it, or it has ended."""
        if self.goes_on is not None:
            self.goes_on()
            self.goes_on = None


Sink = Callable[[Stream, Piece], None]


class Choices:
    """The sequences of one prompt. `first_choice`: the index of its first choice in the answer; `note`: is told of each
    delta before it is taken in."""

    note: Callable[[Delta], None] | None = None

    def __init__(self, prompt: list[int], submits: Seq[Submit], tokenizer: Tokenizer | None, first_choice: int = 0):
        self.prompt = prompt
        self.sequences = [Stream(s, None, first_choice + i, tokenizer) for i, s in enumerate(submits)]
        self._by_id = {sequence.id: sequence for sequence in self.sequences}

    def take(self, delta: Delta) -> Piece | None:
        """Take in a delta of any of the sequences; None when it brings nothing new."""
        stream = self._by_id[delta.request_id]
        if self.note is not None:
            self.note(delta)
        try:
            return stream.take(delta)
        except Gap as e:  # of the only engine there is
            return stream.fail(str(e))

    @property
    def done(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far by all choices, the one that ended each included."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, for the choice that found least."""
        return min(sequence.num_cached for sequence in self.sequences)


def make_detokenizer(tokenizer: Tokenizer | None, params: SamplingParams, prompt: list[int]) -> Detokenizer | None:
    """What turns the tokens of a sequence into text, or None where no text is wanted."""
    if tokenizer is None or not params.detokenize:
        return None
    return Detokenizer(tokenizer, prompt[-PROMPT_TAIL:], params)
