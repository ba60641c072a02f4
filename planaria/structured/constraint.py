"""The grammars of the rows that tokens are drawn for.

The rule: which tokens a row may have is a function of its grammar and its output, so a row that enters with a history
is where it was. A grammar is compiled from the moment its row enters, in a thread that runs while the model does. What
may follow a token is looked for when the next one is about to be drawn, by all threads that compute, or, where these
have nothing to do meanwhile, from the moment that token is drawn.

What is not ready in time is late: nobody waits for it, and its request enters again, as one does that lost its row.
Whatever goes wrong with a grammar is an error of its row alone, at its next token: rows of ranks that draw nothing,
which have no grammars, stay the same as those of the rank that does.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import llguidance

STACK = 64 << 20  # bytes of the threads that compile and follow grammars: more than where they were checked
COMPILED = 32  # grammars that are kept
LATE = 256  # keys of constraints that are kept for rows to enter again
FEW = 512  # tokens that are named one by one
WORTH_A_THREAD = 8  # rows: handing work to a thread costs as much as a few
PATIENCE = 0.01  # seconds in which a step waits for what isn't ready, in all
EACH = 0.005  # seconds of a processor that a row's tokens may take, each
AT_FIRST = 0.5  # and so many more, in all

TOO_COMPLEX = "the grammar of structured_outputs is too complex"
DEAD_END = "the grammar of structured_outputs allows no token here"

VocabularyOf = Callable[[int], "llguidance.LLTokenizer"]  # by the token that stands for the end
Bools = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Key = tuple[str, tuple[int, ...], tuple[int, ...], bool]  # grammar, ends, output, goes_on


class Constraint:
    """What one row may draw next, once it is settled: `few` tokens, or all but the tokens (or the mask) `banned`; or
    its `error`.

    eos_ids: end the output. goes_on: not while anything else is allowed. `drawn`: the last token, that hasn't been
    looked at. `over`: the output has ended, and what is still drawn is nobody's. `late`: it was not ready when its row
    was to draw. `spent`: seconds of a processor. `key`: what it was made of, until a
    token is drawn.
    """

    __slots__ = (
        "banned", "bits", "drawn", "ends", "eos_ids", "error", "few", "goes_on", "key", "late", "looks", "mask_bytes",
        "matcher", "over", "ready", "size", "spent",
    )  # fmt: skip

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], *, goes_on: bool) -> None:
        self.size, self.goes_on = vocab_size, goes_on
        self.key: Key | None = None
        self.bits, self.mask_bytes = np.zeros(0, np.uint64), 0
        self.eos_ids = np.array([token for token in eos_ids if 0 <= token < vocab_size], np.int64)
        self.ends = frozenset(self.eos_ids.tolist())
        self.matcher: llguidance.LLMatcher | None = None
        self.ready: Future[None] | None = None
        self.error = ""
        self.over = self.late = False
        self.drawn: int | None = None
        self.few: Ids | None = None
        self.banned: Ids | Bools | None = None
        self.looks, self.spent = 0, 0.0

    def begin(self, matcher: llguidance.LLMatcher, tokens: int, output: Sequence[int]) -> None:
        """With what came out already. tokens: of the matcher's vocabulary."""
        self.matcher = matcher
        self.mask_bytes = (tokens + 31) // 32 * 4
        self.bits = np.zeros(-(-max(self.size, self.mask_bytes * 8) // 64), np.uint64)
        for token in output:
            self._take(token, f"token {token} does not follow the grammar of structured_outputs")
        self._look()

    def settle(self) -> None:
        """Take in what was drawn."""
        token, self.drawn = self.drawn, None
        if token is None or self.error:
            return
        try:
            since = time.thread_time()
            self._take(token, TOO_COMPLEX)  # it was allowed
            self._look()
            self.looks += 1
            self.spent += time.thread_time() - since
        except Exception as e:
            self.error = f"the grammar of structured_outputs failed: {type(e).__name__}: {e}"
        if self.spent > AT_FIRST + EACH * self.looks:
            each = 1e3 * self.spent / self.looks
            self.error = f"the grammar of structured_outputs takes {each:.1f} ms a token; at most {1e3 * EACH:g}"

    def _take(self, token: int, why_not: str) -> None:
        """why_not: what it means when the grammar can't go on with it."""
        assert self.matcher is not None
        self.over = self.over or token in self.ends
        if not self.over and not self.error and not self.matcher.consume_token(token):
            self._fail(why_not)

    def _fail(self, why: str) -> None:
        assert self.matcher is not None
        self.error = f"{why}: {self.matcher.get_error().splitlines()[0]}"

    def _look(self) -> None:
        """For what may come next."""
        matcher = self.matcher
        assert matcher is not None
        self.few = self.banned = None
        if self.error or self.over:
            return
        if matcher.is_stopped() and not matcher.is_error():
            self.few = self.eos_ids
            return
        bits = self.bits
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, self.mask_bytes)
        if matcher.is_error():
            self._fail(TOO_COMPLEX)
            return
        self._allow(bits, accepting=matcher.is_accepting())

    def _allow(self, bits: Words, *, accepting: bool) -> None:
        """Those of a bit for each token, but for the ends, which are allowed where the grammar may end here."""
        if last := self.size & 63:
            bits[self.size >> 6] &= np.uint64((1 << last) - 1)
        bits[(self.size + 63) >> 6 :] = 0
        if accepting:
            octets = bits.view(np.uint8)
            for token in self.ends:
                octets[token >> 3] |= 1 << (token & 7)
                octets[token >> 3] ^= self.goes_on << (token & 7)
        count = int.from_bytes(bits.tobytes(), "little").bit_count()
        if not count:
            self.few = self.eos_ids if accepting else None
            self.error = "" if accepting else DEAD_END
        elif count <= FEW:
            self.few = _places(bits)
        elif count >= self.size - FEW:
            self.banned = _places(~bits)[: self.size - count]
        else:
            self.banned = np.unpackbits((~bits).view(np.uint8), count=self.size, bitorder="little").view(np.bool_)

    @property
    def must_end(self) -> bool:
        """Nothing but the end is allowed."""
        return self.few is self.eos_ids

    def ban(self, line: Any) -> str:
        """Set what is not allowed to -inf, in a line of logits (an array, or a tensor on any device). Returns the row's
        error, "": none. A row that must end does, whatever else was banned."""
        if self.error or self.over:
            return self.error
        if self.few is not None:
            kept = 0.0 if self.must_end else line[self.few]
            line[:] = -np.inf
            line[self.few] = kept
        elif self.banned is not None:
            line[self.banned if isinstance(line, np.ndarray) else _like(line, self.banned)] = -np.inf
        return ""


def _places(bits: Words) -> Ids:
    """Of a few that are set."""
    at = np.flatnonzero(bits)
    found: Ids = np.flatnonzero(np.unpackbits(bits[at].view(np.uint8), bitorder="little").view(np.bool_))
    places: Ids = at[found >> 6] * 64 + (found & 63)
    return places


def _like(line: Any, array: Any) -> Any:
    import torch

    return torch.from_numpy(array).to(line.device)


class Constraints:
    """Makes the rows' constraints and moves them on. vocabulary: as grammars need it, made when first asked for;
    threads: that compute; ahead: they have nothing to do while the model computes."""

    def __init__(self, vocab_size: int, vocabulary: VocabularyOf, threads: int = 1, *, ahead: bool = False) -> None:
        self.size, self.threads, self.ahead, self._vocabulary = vocab_size, threads, ahead, vocabulary
        self._compiled: OrderedDict[tuple[str, int], llguidance.LLMatcher] = OrderedDict()
        self._late: dict[Key, list[Constraint]] = {}
        self._compiling: ThreadPoolExecutor | None = None
        self._following: ThreadPoolExecutor | None = None

    def enter(self, grammar: str, eos_ids: Sequence[int], output: Sequence[int], *, goes_on: bool) -> Constraint:
        """Of a row with this output so far; the one that was late, where one was, whose work goes on."""
        key = grammar, tuple(eos_ids), tuple(output), goes_on
        if key in self._late:
            constraint = self._late[key].pop()
            constraint.late = False
            if not self._late[key]:
                del self._late[key]
            return constraint
        constraint = Constraint(self.size, eos_ids, goes_on=goes_on)
        constraint.key = key
        constraint.ready = self._threads()[0].submit(self._begin, constraint, grammar, output)
        return constraint

    def take(self, drawn: Sequence[tuple[Constraint, int]]) -> None:
        """These tokens were drawn."""
        for constraint, token in drawn:
            constraint.drawn, constraint.key = token, None
        if self.ahead:
            self._split([constraint for constraint, _ in drawn], 1)

    def settle(self, constraints: Sequence[Constraint]) -> None:
        """All of them know what may come next, but those that are late."""
        deadline = 0.0
        for constraint in constraints:
            if constraint.ready is None or constraint.late:
                continue
            if not constraint.ready.done():
                deadline = deadline or time.monotonic() + PATIENCE
                wait([constraint.ready], max(0.0, deadline - time.monotonic()))
            if constraint.ready.done():
                constraint.ready = None
            else:
                constraint.late = True
                self._keep(constraint)
        todo = [constraint for constraint in constraints if constraint.drawn is not None and not constraint.late]
        own = self._split(todo, min(self.threads, len(todo) // WORTH_A_THREAD) - 1)
        for constraint in own:
            constraint.settle()
        for constraint in todo:
            if constraint.ready is not None:
                constraint.ready.result()
                constraint.ready = None

    def _keep(self, constraint: Constraint) -> None:
        """For its request, when that enters again, if nothing was drawn since it began."""
        if constraint.key is None:
            return
        self._late.setdefault(constraint.key, []).append(constraint)
        while len(self._late) > LATE:
            del self._late[next(iter(self._late))]

    def _split(self, constraints: list[Constraint], others: int) -> list[Constraint]:
        """Hand them to so many other threads, each its part; returns what is left."""
        if others < 1:
            return constraints
        parts = others if self.ahead else others + 1

        def work(part: list[Constraint]) -> None:
            for constraint in part:
                constraint.settle()

        for i in range(others):
            part = constraints[i::parts]
            ready = self._threads()[1].submit(work, part)
            for constraint in part:
                constraint.ready = ready
        return constraints[others::parts] if not self.ahead else []

    def _begin(self, constraint: Constraint, grammar: str, output: Sequence[int]) -> None:
        try:
            if not len(constraint.eos_ids):
                constraint.error = "structured_outputs need a token that ends an output, and this model has none"
                return
            eos_id = int(constraint.eos_ids[0])
            constraint.begin(self._matcher(grammar, eos_id), self._vocabulary(eos_id).vocab_size, output)
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
        """That compiles, and those that follow."""
        if self._compiling is None:
            before, others = threading.stack_size(STACK), max(1, self.threads - 1)
            try:
                self._compiling, self._following = ThreadPoolExecutor(1, "grammar"), ThreadPoolExecutor(others, "mask")
                started = threading.Barrier(others + 2)
                for pool, threads in ((self._compiling, 1), (self._following, others)):
                    for _ in range(threads):
                        pool.submit(started.wait)
                started.wait()  # all are there now, with their stacks
            finally:
                threading.stack_size(before)
        assert self._following is not None
        return self._compiling, self._following

    def close(self) -> None:
        for pool in (self._compiling, self._following):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
