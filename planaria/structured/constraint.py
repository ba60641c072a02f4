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
WORTH_A_THREAD = 8  # rows: handing work to a thread costs as much as a few
PATIENCE = 0.01  # seconds in which a step waits for what isn't ready, in all
EACH = 0.005  # seconds of a processor that a row's tokens may take, each
AT_FIRST = 0.5  # and so many more, in all

TOO_COMPLEX = "the grammar of structured_outputs is too complex"

VocabularyOf = Callable[[int], "llguidance.LLTokenizer"]  # by the token that stands for the end
Ban = Callable[[Any, int, int], None]  # of logits, a line, and where a bit for each token allowed is in memory
Key = tuple[str, tuple[int, ...], tuple[int, ...], bool]  # grammar, ends, output, goes_on


class Constraint:
    """What one row may draw next, once it is settled: the tokens whose bits are set in `allowed`; or its `error`.
    Between two tokens caches hold weights, and nothing of this: the less is touched, the better.

    eos_ids: end the output. goes_on: not while anything else is allowed. `must_end`: nothing but them is allowed.
    `drawn`: the last token, that hasn't been looked at. `over`: the output has ended, and what is still drawn is
    nobody's. `late`: it was not ready when its row was to draw. `spent`: seconds of a processor. `key`: what it was
    made of, until a token is drawn.
    """

    __slots__ = (
        "address", "allowed", "drawn", "ends", "eos_ids", "error", "goes_on", "key", "late", "looks", "mask_bytes",
        "matcher", "must_end", "over", "ready", "size", "spent",
    )  # fmt: skip

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], *, goes_on: bool) -> None:
        self.size, self.goes_on = vocab_size, goes_on
        self.key: Key | None = None
        self.allowed, self.address, self.mask_bytes = bytearray(), 0, 0
        self.eos_ids = np.array([token for token in eos_ids if 0 <= token < vocab_size], np.int64)
        self.ends = frozenset(self.eos_ids.tolist())
        self.matcher: llguidance.LLMatcher | None = None
        self.ready: Future[None] | None = None
        self.error = ""
        self.over = self.late = self.must_end = False
        self.drawn: int | None = None
        self.looks, self.spent = 0, 0.0

    def begin(self, matcher: llguidance.LLMatcher, tokens: int, output: Sequence[int]) -> None:
        """With what came out already. tokens: of the matcher's vocabulary."""
        self.matcher = matcher
        self.mask_bytes = (tokens + 31) // 32 * 4
        self.allowed = bytearray(-(-max(self.size, self.mask_bytes * 8) // 64) * 8)
        self.address = np.frombuffer(self.allowed, np.uint8).ctypes.data
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
        self.must_end = False
        if self.error or self.over:
            return
        if matcher.is_stopped() and not matcher.is_error():
            self.must_end = True
            return
        matcher.unsafe_compute_mask_ptr(self.address, self.mask_bytes)
        if matcher.is_error():
            self._fail(TOO_COMPLEX)
        elif self._allows(int(self.eos_ids[0])):  # the one that the matcher knows
            for token in self.ends:
                self.allowed[token >> 3] |= 1 << (token & 7)
                self.allowed[token >> 3] ^= self.goes_on << (token & 7)
            self.must_end = self.goes_on and bool(self._banned().all())

    def _allows(self, token: int) -> bool:
        return bool(self.allowed[token >> 3] >> (token & 7) & 1)

    def _banned(self) -> npt.NDArray[np.bool_]:
        """Of each token."""
        allowed = np.frombuffer(self.allowed, np.uint8)
        return np.unpackbits(~allowed, count=self.size, bitorder="little").view(np.bool_)

    def ban(self, logits: Any, line: int, kernel: Ban | None = None) -> str:
        """Set what is not allowed to -inf, in a line of logits (an array, or a tensor on any device). kernel: that does
        it, for an array. Returns the row's error, "": none. A row that must end does, whatever else was banned."""
        if self.error or self.over:
            return self.error
        if self.must_end:
            logits[line] = -np.inf
            logits[line, self.eos_ids] = 0.0
        elif kernel is not None:
            kernel(logits, line, self.address)
        else:
            banned = self._banned()
            logits[line, banned if isinstance(logits, np.ndarray) else _like(logits, banned)] = -np.inf
        return ""


def _settle(constraints: list[Constraint]) -> None:
    for constraint in constraints:
        constraint.settle()


def _like(logits: Any, array: Any) -> Any:
    import torch

    return torch.from_numpy(array).to(logits.device)


class Constraints:
    """Makes the rows' constraints and moves them on. vocabulary: as grammars need it, made when first asked for;
    threads: that compute; ahead: they have nothing to do while the model computes."""

    def __init__(self, vocab_size: int, vocabulary: VocabularyOf, threads: int = 1, *, ahead: bool = False) -> None:
        self.size, self.threads, self.ahead, self._vocabulary = vocab_size, threads, ahead, vocabulary
        self._compiled: OrderedDict[tuple[str, int], llguidance.LLMatcher] = OrderedDict()
        self.late = Constraint(vocab_size, (), goes_on=False)  # of rows that are late, until they enter again
        self.late.late = True
        self._late: dict[Key, list[Constraint]] = {}
        self._compiling: ThreadPoolExecutor | None = None
        self._following: ThreadPoolExecutor | None = None

    def enter(self, grammar: str, eos_ids: Sequence[int], output: Sequence[int], *, goes_on: bool) -> Constraint:
        """Of a row with this output so far; or one that was late, of this or another row: its work goes on."""
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
        if self.ahead and drawn:
            ready = self._threads()[1].submit(_settle, [constraint for constraint, _ in drawn])
            for constraint, _ in drawn:
                constraint.ready = ready

    def bind(self, bound: Sequence[tuple[int, Constraint]], logits: Any, kernel: Ban | None = None) -> dict[int, str]:
        """Ban what may not be drawn from these lines of logits. kernel: see `Constraint.ban`. Returns errors by line;
        one that is empty is of a row that is late, and has `late` from now on."""
        deadline = 0.0
        for _, constraint in bound:
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

        def banned(lines: list[tuple[int, Constraint]]) -> dict[int, str]:
            _settle([constraint for _, constraint in lines])
            return {line: error for line, constraint in lines if (error := constraint.ban(logits, line, kernel))}

        there = [(line, constraint) for line, constraint in bound if not constraint.late]
        parts = 1 if self.ahead else max(1, min(self.threads, len(there) // WORTH_A_THREAD))
        others = [self._threads()[1].submit(banned, there[part::parts]) for part in range(1, parts)]
        errors = banned(there[::parts])
        for other in others:
            errors |= other.result()
        return errors | {line: "" for line, constraint in bound if constraint.late}

    def _keep(self, constraint: Constraint) -> None:
        """For its request, when that enters again, if nothing was drawn since it began."""
        if constraint.key is None:
            return
        self._late.setdefault(constraint.key, []).append(constraint)
        while len(self._late) > LATE:
            del self._late[next(iter(self._late))]

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
