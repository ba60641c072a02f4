"""What an engine's deltas become: text, stop strings, log-probabilities, counts. Used by `LLM` and the server.

A `RequestStream` owns the n sequences of one prompt. It is pure: deltas go in, pieces come out, one for each
delta, and it says which sequences the engine should be told to drop (a stop string is seen here, not there).
Tokens carry their index, so a delta that comes twice adds nothing and a gap is an error, never a wrong text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from planaria.server.detokenise import Detokenizer
from planaria.server.tokenise import Tokenizer
from planaria.types import Delta, FinishReason, SamplingParams, TokenLogprobs
from planaria.wire import Submit

logger = logging.getLogger("planaria")

PROMPT_TAIL = 8  # tokens of the prompt a detokeniser looks at


class Piece:
    """What one delta added to one choice. `text` may be empty: bytes of a character or of a stop string are held back.

    `offsets`: where in the choice's text each token with log-probabilities begins, in characters.
    `finish` is set on the last piece; `error` says why if it is "error" or "abort". `cancel`: the engine still
    runs the sequence and is to be told.
    """

    __slots__ = (
        "cancel", "choice", "error", "finish", "logprobs", "offsets", "prompt_logprobs", "stop_reason", "text",
        "tokens",
    )  # fmt: skip

    def __init__(self, choice: int, text: str, tokens: list[int]) -> None:
        self.choice, self.text, self.tokens = choice, text, tokens
        self.logprobs: list[TokenLogprobs] | None = None
        self.offsets: list[int] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.cancel = False

    def join(self, later: Piece) -> None:
        """Have this be both, as one step would have brought them."""
        self.text += later.text
        self.tokens += later.tokens
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
            self.offsets = (self.offsets or []) + (later.offsets or [])
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finish, self.stop_reason = later.finish, later.stop_reason


class Sequence:
    """One choice: its tokens and text so far."""

    __slots__ = (
        "_detokenizer", "_eos", "_keep_stop", "choice", "error", "finish", "id", "logprobs", "num_cached",
        "prompt_logprobs", "stop_reason", "submit", "text_length", "text_parts", "tokens",
    )  # fmt: skip

    def __init__(self, submit: Submit, choice: int, tokenizer: Tokenizer | None) -> None:
        params = submit.params
        self.submit, self.choice, self.id = submit, choice, submit.id
        self.tokens: list[int] = []
        self.text_parts: list[str] = []
        self.text_length = 0
        self.logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_cached = 0
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._keep_stop = params.include_stop_str_in_output
        self._eos = frozenset(submit.eos_ids) - frozenset(params.stop_token_ids)
        self._detokenizer = make_detokenizer(tokenizer, params, submit.prompt)

    @property
    def offsets(self) -> list[int]:
        """Where each token begins in the text, in characters; kept when log-probabilities are asked for."""
        known = self._detokenizer.offsets if self._detokenizer is not None else None
        known = known or []
        return known[: len(self.tokens)] + [self.text_length] * (len(self.tokens) - len(known))

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    def push(self, delta: Delta) -> Piece | None:
        """Take in a delta. None when it brings nothing new: a repeated one, or one after the end. What goes wrong with
        its text or its stop rule ends this sequence, and is nobody else's."""
        if self.finish is not None:
            return None
        try:
            return self._take(delta)
        except Exception as e:
            logger.exception("%s: its text can't be made", self.id)
            return self.fail(f"its text can't be made: {type(e).__name__}: {e}")

    def _take(self, delta: Delta) -> Piece | None:
        finish = delta.finish
        if finish is FinishReason.ERROR or finish is FinishReason.ABORT:
            return self.fail(delta.error or "the engine dropped the request", finish, cancel=False)
        tokens, logprobs = delta.tokens, delta.logprobs
        have = len(self.tokens)
        if delta.index != have:
            if delta.index > have:
                return self.fail(f"tokens {have} to {delta.index - 1} of {self.id} never came")
            tokens = tokens[have - delta.index :]
            logprobs = logprobs[have - delta.index :] if logprobs else logprobs
            if not tokens and finish is None:
                return None
        stop_reason = delta.stop_reason
        text = ""
        offsets: list[int] | None = None
        cancel = False
        detokenizer = self._detokenizer
        if detokenizer is not None:
            # The token that stopped a sequence is counted, but is no part of the text unless that was asked for.
            shown = tokens[:-1] if finish is FinishReason.STOP and not self._keep_stop else tokens
            text = detokenizer.push(shown)
            if detokenizer.stop_reason is None and finish is not None:
                text += detokenizer.finish()
            if detokenizer.stop_reason is not None:
                cancel = finish is None
                finish, stop_reason = FinishReason.STOP, detokenizer.stop_reason
                tokens = tokens[: detokenizer.num_tokens - len(self.tokens)]
                logprobs = logprobs[: len(tokens)] if logprobs else logprobs
            self.text_length += len(text)
            if detokenizer.offsets is not None:
                offsets = detokenizer.offsets[len(self.tokens) :]
                offsets += [self.text_length] * (len(tokens) - len(offsets))
        piece = Piece(self.choice, text, tokens)
        self.tokens += tokens
        if text:
            self.text_parts.append(text)
        if self.logprobs is not None and logprobs:
            self.logprobs += logprobs
            piece.logprobs, piece.offsets = logprobs, offsets
        if delta.num_cached:
            self.num_cached = delta.num_cached
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
        piece = Piece(self.choice, "", [])
        self.finish = piece.finish = finish
        self.error = piece.error = message
        piece.cancel = cancel
        return piece


class RequestStream:
    """The sequences of one prompt. `first_choice`: the index of its first choice in the answer."""

    def __init__(self, prompt: list[int], submits: Seq[Submit], tokenizer: Tokenizer | None, first_choice: int = 0):
        self.prompt = prompt
        self.sequences = [Sequence(s, first_choice + i, tokenizer) for i, s in enumerate(submits)]
        self._by_id = {sequence.id: sequence for sequence in self.sequences}

    def push(self, delta: Delta) -> Piece | None:
        """Take in a delta of any of the sequences; None when it brings nothing new."""
        return self._by_id[delta.request_id].push(delta)

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


def make_detokenizer(
    tokenizer: Tokenizer | None, params: SamplingParams, prompt: list[int]
) -> Detokenizer | None:
    """What turns the tokens of a sequence into text, or None where no text is wanted."""
    if tokenizer is None or not params.detokenize:
        return None
    return Detokenizer(tokenizer, prompt[-PROMPT_TAIL:], params)
