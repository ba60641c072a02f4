"""The grammars of the rows that tokens are drawn for.

The rule: which tokens a row may have is a function of its grammar and its output, so a row that enters with a history
is where it was. Work is done ahead, in threads that run while the model does: a grammar is compiled from the moment its
row enters, and the tokens after one are looked for from the moment that one is drawn. Whoever draws waits for them.

Whatever goes wrong with a grammar is an error of its row alone, at its next token: rows of ranks that draw nothing,
which have no grammars, stay the same as those of the rank that does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import llguidance

STACK = 64 << 20  # bytes of the threads that compile and follow grammars: more than where they were checked
COMPILED = 32  # grammars that are kept
FEW = 512  # tokens that are put back one by one

DEAD_END = "the grammar of structured_outputs allows no token here"

Vocabulary = Callable[[int], "llguidance.LLTokenizer"]  # by the token that stands for the end
Bools = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]


class Constraint:
    """What one row may draw next, once `ready` is done: `few` tokens or all but `banned`; or its `error`.

    eos_ids: end the output. goes_on: not while anything else is allowed. `over`: the output has ended, and what is
    still drawn is nobody's.
    """

    __slots__ = ("banned", "eos_ids", "error", "few", "goes_on", "matcher", "over", "ready", "size")

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], *, goes_on: bool) -> None:
        self.size, self.goes_on = vocab_size, goes_on
        self.eos_ids = np.array([token for token in eos_ids if 0 <= token < vocab_size], np.int64)
        self.matcher: llguidance.LLMatcher | None = None
        self.ready: Future[None]
        self.error = ""
        self.over = False
        self.few: Ids | None = None
        self.banned: Bools | None = None

    def begin(self, matcher: llguidance.LLMatcher, output: Sequence[int]) -> None:
        """With what came out already."""
        self.matcher = matcher
        ends = self.eos_ids.tolist()
        for at, token in enumerate(output):
            if token in ends:
                self.over = True
                return
            self._take(token, at)
        self._look()

    def take(self, token: int) -> None:
        """`token` was drawn."""
        if self.over or self.error:
            return
        if token in self.eos_ids.tolist():
            self.over = True
            return
        self._take(token, -1)
        self._look()

    def _take(self, token: int, at: int) -> None:
        assert self.matcher is not None
        if not self.error and not self.matcher.consume_token(token):
            where = f"token {token} of the output" if at < 0 else f"token {token} at {at} of the output"
            self.error = f"{where} does not follow the grammar of structured_outputs: {self.matcher.get_error()}"

    def _look(self) -> None:
        """For what may come next."""
        matcher, size = self.matcher, self.size
        assert matcher is not None
        self.few = self.banned = None
        if self.error:
            return
        if matcher.is_stopped() and not matcher.is_error():
            self.few = self.eos_ids
            return
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            self.error = f"the grammar of structured_outputs is too complex: {matcher.get_error().splitlines()[0]}"
            return
        allowed = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        if matcher.is_accepting():
            allowed[self.eos_ids] = not self.goes_on
        count = np.count_nonzero(allowed)
        if not count:
            self.few = self.eos_ids if matcher.is_accepting() else None
            self.error = "" if matcher.is_accepting() else DEAD_END
        elif count <= FEW:
            self.few = np.flatnonzero(allowed)
        else:
            self.banned = np.logical_not(allowed, out=allowed)

    @property
    def must_end(self) -> bool:
        """Nothing but the end is allowed."""
        return self.few is self.eos_ids

    def ban(self, line: Any) -> str:
        """Set what is not allowed to -inf, in a line of logits (an array, or a tensor on any device). Returns the row's
        error, "": none. A row that must end does, whatever else was banned."""
        self.ready.result()
        if self.error or self.over:
            return self.error
        if self.few is not None:
            kept = 0.0 if self.must_end else line[self.few]
            line[:] = -np.inf
            line[self.few] = kept
        elif self.banned is not None:
            line[self.banned if isinstance(line, np.ndarray) else _like(line, self.banned)] = -np.inf
        return ""


def _like(line: Any, array: Any) -> Any:
    import torch

    return torch.from_numpy(array).to(line.device)


class Constraints:
    """Makes the rows' constraints and moves them on. vocabulary: as grammars need it, made when first asked for."""

    def __init__(self, vocab_size: int, vocabulary: Vocabulary) -> None:
        self.size, self._vocabulary = vocab_size, vocabulary
        self._compiled: OrderedDict[tuple[str, int], llguidance.LLMatcher] = OrderedDict()
        self._compiling: ThreadPoolExecutor | None = None
        self._following: ThreadPoolExecutor | None = None

    def enter(self, grammar: str, eos_ids: Sequence[int], output: Sequence[int], *, goes_on: bool) -> Constraint:
        """Of a row with this output so far."""
        constraint = Constraint(self.size, eos_ids, goes_on=goes_on)
        constraint.ready = self._threads()[0].submit(self._begin, constraint, grammar, output)
        return constraint

    def take(self, drawn: Sequence[tuple[Constraint, int]]) -> None:
        """These tokens were drawn."""

        def work() -> None:
            for constraint, token in drawn:
                try:
                    constraint.take(token)
                except Exception as e:
                    constraint.error = f"the grammar of structured_outputs failed: {type(e).__name__}: {e}"

        ready = self._threads()[1].submit(work)
        for constraint, _ in drawn:
            constraint.ready = ready

    def _begin(self, constraint: Constraint, grammar: str, output: Sequence[int]) -> None:
        try:
            if not len(constraint.eos_ids):
                constraint.error = "structured_outputs need a token that ends an output, and this model has none"
                return
            constraint.begin(self._matcher(grammar, int(constraint.eos_ids[0])), output)
        except Exception as e:
            constraint.error = f"the grammar of structured_outputs can't be used: {type(e).__name__}: {e}"

    def _matcher(self, grammar: str, eos_id: int) -> llguidance.LLMatcher:
        import llguidance

        from planaria.structured.vocabulary import limits

        key = (grammar, eos_id)
        made = self._compiled.get(key)
        if made is None:
            made = llguidance.LLMatcher(self._vocabulary(eos_id), grammar, log_level=0, limits=limits())
            if made.is_error():
                raise ValueError(made.get_error())
            self._compiled[key] = made
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return made.deep_copy()

    def _threads(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """That compiles, and that follows."""
        if self._compiling is None:
            before = threading.stack_size(STACK)
            try:
                self._compiling, self._following = ThreadPoolExecutor(1, "grammars"), ThreadPoolExecutor(1, "masks")
                for pool in (self._compiling, self._following):
                    pool.submit(int).result()  # its thread is there now
            finally:
                threading.stack_size(before)
        assert self._following is not None
        return self._compiling, self._following

    def close(self) -> None:
        for pool in (self._compiling, self._following):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
