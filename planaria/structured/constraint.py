"""The grammars of the rows that tokens are drawn for.

The rule: which tokens a row may have is a function of its grammar and its output, so a row that enters with a history
is where it was. A grammar is compiled from the moment its row enters, in a thread that runs while the model does. What
may follow a token is looked for when the next one is about to be drawn, by all threads that compute, or, where these
have nothing to do meanwhile or the last one took long, from the moment that token is drawn, in a thread beside them.

What is not ready in time is late: nobody waits for it, and its request enters again, as one does that lost its row.
Whatever goes wrong with a grammar is an error of its row alone, at its next token: rows of ranks that draw nothing,
which have no grammars, stay the same as those of the rank that does.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from planaria.processes import LeftoverTime

if TYPE_CHECKING:
    import llguidance

STACK = 64 << 20  # bytes of the threads that compile and follow grammars: more than where they were checked
COMPILED = 32  # grammars that are kept
LATE = 256  # keys of constraints that are kept for rows to enter again
LATE_FOR = 10.0  # seconds that they are: a row enters again within steps, or its request has left
WORTH_A_THREAD = 8  # rows: handing work to a thread costs as much as a few
PATIENCE = 0.01  # seconds in which a step waits for what isn't ready, in all, where all its rows do
BESIDE = 0.001  # and where others are in it, who have waited for nobody so far
SUSPECT = 0.0003  # seconds that a token took, whatever else ran meanwhile, after which it is looked at what they take
SLOW = 0.001  # seconds of a processor that a token took, after which the next one is looked for aside
EACH = 0.005  # seconds of a processor that a row's tokens may take, each
NICE = 10  # of what is done beside, where others leave it nothing
AT_FIRST = 0.5  # and so many more, in all

COMPILING, FOLLOWING, ASIDE = range(3)  # what threads do

TOO_COMPLEX = "the grammar of structured_outputs is too complex"

VocabularyOf = Callable[[int], "llguidance.LLTokenizer"]  # by the token that stands for the end
# Of a line, and where a bit for each token allowed is in memory: a token of these, or an error.
Draw = Callable[[int, int], tuple[int, str]]
Key = tuple[str, tuple[int, ...], tuple[int, ...], bool]  # grammar, ends, output, goes_on


class Constraint:
    """What one row may draw next, once it is settled: the tokens whose bits are set in `allowed`; or its `error`.
    Between two tokens caches hold weights, and nothing of this: the less is touched, the better.

    eos_ids: end the output. goes_on: not while anything else is allowed. `must_end`: nothing but them is allowed.
    `greedy`: the greatest logit is drawn, where it may come, without a look at others.
    `drawn`: the last of the output, that hasn't been taken in. `looked`: `allowed` and `must_end` are of what was taken
    in. `forced`: the only token that may come, if there is one and it was asked for; `asked`: it was.
    `over`: the output has ended, and what is still drawn is nobody's. `late`: it was not ready when its row was to
    draw; `waited`: nor the time before, and who was in the step waited for it. `suspect`: is it counted what the next
    token takes? `took`: seconds that it did so far. `spent`: seconds of a processor that were; `slow`: many, for the
    last token. `share`: of the thread that works on it beside the steps.
    """

    __slots__ = (
        "address", "allowed", "asked", "drawn", "ends", "eos_ids", "error", "forced", "given", "goes_on", "greedy",
        "late", "looked", "mask_bytes", "matcher", "must_end", "output", "over", "ready", "share", "size", "slow",
        "spent", "suspect", "tokens", "took", "waited",
    )  # fmt: skip

    def __init__(
        self, vocab_size: int, eos_ids: Sequence[int], *, goes_on: bool, grammar: str = "", output: Sequence[int] = ()
    ) -> None:
        self.size, self.goes_on = vocab_size, goes_on
        self.given, self.output = (grammar, tuple(eos_ids)), list(output)
        self.allowed, self.address, self.mask_bytes = bytearray(), 0, 0
        self.eos_ids = np.array([token for token in eos_ids if 0 <= token < vocab_size], np.int64)
        self.ends = frozenset(self.eos_ids.tolist())
        self.matcher: llguidance.LLMatcher | None = None
        self.ready: Future[None] | None = None
        self.error = ""
        self.over = self.late = self.looked = self.must_end = self.slow = self.suspect = self.waited = False
        self.greedy = self.asked = False
        self.drawn: int | None = None
        self.forced: int | None = None
        self.tokens, self.took, self.spent = 0, 0.0, 0.0
        self.share: LeftoverTime | None = None

    @property
    def key(self) -> Key:
        """What it is a function of."""
        return (*self.given, tuple(self.output), self.goes_on)

    def begin(self, matcher: llguidance.LLMatcher, tokens: int) -> None:
        """With the output so far. tokens: of the matcher's vocabulary."""
        self.matcher = matcher
        self.mask_bytes = (tokens + 31) // 32 * 4
        self.allowed = bytearray(-(-max(self.size, self.mask_bytes * 8) // 64) * 8)
        self.address = np.frombuffer(self.allowed, np.uint8).ctypes.data
        for token in self.output:
            self._take(token, f"token {token} does not follow the grammar of structured_outputs")
        self._ask()
        self._look()

    def settle(self, logits: Any = None, line: int = 0, *, look: bool = True) -> int | None:
        """Take in what was drawn, and look for what may come next, unless it is clear without that what is drawn now:
        the only token that may come, or, of a greedy row, the greatest logit. That is taken in, too, and returned.
        logits, line: where the row's are, if it is drawn now. look: False: leave that to the next call."""
        if self.error or (self.looked and self.drawn is None):
            return None
        clock = time.thread_time if self.suspect else time.perf_counter  # a tenth of what the other takes
        since = clock()
        try:
            token, self.drawn = self.drawn, None
            if token is not None:
                self._take(token, TOO_COMPLEX)  # it was allowed
            found = self._follow(logits, line) if logits is not None else None
            if found is None and look:
                self._look()
            else:
                self._ask()
        except Exception as e:
            self.error, found = f"the grammar of structured_outputs failed: {type(e).__name__}: {e}", None
        took = clock() - since
        self.took += took
        if self.suspect:
            self.spent += took
        if found is None and not look:
            return None
        return None if self.count() else found

    def count(self) -> str:
        """One more token, and what it took. Returns the row's error, "": none."""
        self.tokens += 1
        if self.suspect:
            self.slow = self.took > SLOW
        self.suspect, self.took = self.took > SUSPECT, 0.0
        if self.spent > AT_FIRST + EACH * self.tokens:
            each = 1e3 * self.spent / self.tokens
            self.error = f"the grammar of structured_outputs takes {each:.1f} ms a token; at most {1e3 * EACH:g}"
        return self.error

    def _ask(self) -> None:
        """For the only token that may come, unless it was asked for."""
        matcher = self.matcher
        assert matcher is not None
        if self.asked or self.error or self.over or matcher.is_stopped():
            return
        self.asked = True
        if (forced := matcher.compute_ff_tokens()) and forced[0] not in self.ends:
            self.forced = forced[0]

    def _follow(self, logits: Any, line: int) -> int | None:
        """See `settle`. Far less than a mask takes: what a greedy row would say may nearly always come."""
        matcher = self.matcher
        assert matcher is not None
        if self.error or self.over or matcher.is_stopped():
            return None
        self._ask()
        if (token := self.forced) is None:
            if not self.greedy:
                return None
            token = int(logits[line].argmax())
        if token in self.ends or not math.isfinite(logits.item(line, token)) or not matcher.try_consume_tokens([token]):
            return None
        self.output.append(token)
        self.asked, self.forced = False, None
        return token

    def _take(self, token: int, why_not: str) -> None:
        """why_not: what it means when the grammar can't go on with it."""
        assert self.matcher is not None
        self.looked = self.asked = False
        self.forced = None
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
        self.must_end, self.looked = False, True
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

    def draw(self, logits: Any, line: int, draw: Draw | None = None) -> tuple[int | None, str]:
        """What is drawn from a line of logits, and the row's error, "": none. None: that is left to others, and what is
        not allowed is -inf from now on, in an array, or a tensor on any device. A row that must end does, whatever else
        was banned."""
        if self.error or self.over:
            return None, self.error
        if self.must_end:
            logits[line] = -np.inf
            logits[line, self.eos_ids] = 0.0
        elif draw is not None:
            return draw(line, self.address)
        else:
            banned = self._banned()
            logits[line, banned if isinstance(logits, np.ndarray) else _like(logits, banned)] = -np.inf
        return None, ""


def _yield_to_others() -> None:
    """Of a thread: what it does is no other row's hurry, and they compute meanwhile."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


@contextmanager
def _beside(constraint: Constraint) -> Iterator[None]:
    """What this thread does is for this one."""
    share = LeftoverTime(threading.get_native_id(), thread=True)
    share.begin()
    constraint.share = share
    try:
        yield
    finally:
        constraint.share = None


def _settle(constraints: list[Constraint]) -> None:
    for constraint in constraints:
        constraint.settle()


def _settle_beside(constraint: Constraint) -> None:
    with _beside(constraint):
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
        self._lock = threading.Lock()  # of those
        self.late = Constraint(vocab_size, (), goes_on=False)  # of rows that are late, until they enter again
        self.late.late = True
        self._late: dict[Key, list[Constraint]] = {}
        self._late_since: dict[Key, float] = {}  # in this order
        self._pools: tuple[ThreadPoolExecutor, ...] = ()

    def enter(
        self, grammar: str, eos_ids: Sequence[int], output: Sequence[int], *, goes_on: bool, greedy: bool = False
    ) -> Constraint:
        """Of a row with this output so far; or one that was late, of this or another row: its work goes on."""
        key = grammar, tuple(eos_ids), tuple(output), goes_on
        if key in self._late:
            constraint = self._late[key].pop()
            constraint.late, constraint.greedy = False, greedy
            if not self._late[key]:
                self._forget(key)
            return constraint
        self._forget_old()
        constraint = Constraint(self.size, eos_ids, goes_on=goes_on, grammar=grammar, output=output)
        constraint.greedy = greedy
        constraint.ready = self._threads()[COMPILING].submit(self._begin, constraint, grammar)
        return constraint

    def take(self, drawn: Sequence[tuple[Constraint, int]]) -> None:
        """These tokens were drawn."""
        for constraint, token in drawn:
            constraint.drawn = token
            constraint.output.append(token)
        if self.ahead and drawn:
            ready = self._threads()[FOLLOWING].submit(_settle, [constraint for constraint, _ in drawn])
            for constraint, _ in drawn:
                constraint.ready = ready
        elif not self.ahead:
            for constraint, _ in drawn:
                if not constraint.slow:
                    constraint.settle(look=False)  # what it touches is in the caches now, and won't be after a step
                self._aside(constraint)

    def forced(self, bound: Sequence[tuple[int, Constraint]]) -> dict[int, int]:
        """By line, tokens of those that may have no other: nobody need look at their logits. They are taken in."""
        if self.ahead:
            return {}
        found: dict[int, int] = {}
        for line, constraint in bound:
            ready = constraint.ready
            if (ready is None or ready.done()) and (token := constraint.forced) is not None and not constraint.error:
                found[line] = token
                constraint.count()
                self.take([(constraint, token)])
        return found

    def _aside(self, constraint: Constraint) -> None:
        """Look for what may come next from now on, where that is likely to take long."""
        if constraint.slow:
            constraint.ready = self._threads()[ASIDE].submit(_settle_beside, constraint)

    def bind(
        self, bound: Sequence[tuple[int, Constraint]], logits: Any, draw: Callable[[int], Draw] | None = None
    ) -> tuple[dict[int, str], dict[int, int]]:
        """Draw from these lines of logits, or ban what may not be drawn. draw: makes that of `Constraint.draw`, for
        each thread. Returns errors by line, of which one that is empty is of a row that is late, and has `late` from
        now on; and, by line, what is drawn, of which `take` isn't to be told."""
        waiting = [constraint for _, constraint in bound if constraint.ready is not None and not constraint.late]
        alone = self.ahead or len(waiting) == len(logits)
        deadline = time.monotonic() + (PATIENCE if alone else BESIDE) if waiting else 0.0
        for constraint in waiting:
            assert constraint.ready is not None
            if not constraint.ready.done() and (alone or not constraint.waited):
                wait([constraint.ready], max(0.0, deadline - time.monotonic()))
            if constraint.ready.done():
                constraint.ready = None
            else:
                constraint.late = True
                if (share := constraint.share) is not None:
                    share.look()
                self._keep(constraint)
            constraint.waited = constraint.late
        errors: dict[int, str] = {}
        drawn: dict[int, int] = {}
        masked: list[tuple[int, Constraint]] = []
        inline = self.ahead or self.threads == 1 or len(bound) < 2 * WORTH_A_THREAD
        for line, constraint in bound:
            if constraint.late:
                errors[line] = ""
                continue
            token = constraint.settle(None if self.ahead else logits, line, look=inline)
            if token is None:
                masked.append((line, constraint))
                continue
            drawn[line] = token
            self._aside(constraint)
        if not masked:
            return errors, drawn
        # Threads share the interpreter, so they have what takes long without it, and nothing else.
        parts = 1 if inline else max(1, min(self.threads, len(masked) // WORTH_A_THREAD))
        draws = [draw(part) if draw is not None else None for part in range(parts)]

        def work(part: int) -> list[tuple[int, Constraint, int | None, str]]:
            found = []
            for line, constraint in masked[part::parts]:
                if not inline:
                    constraint.settle()
                found.append((line, constraint, *constraint.draw(logits, line, draws[part])))
            return found

        others = [self._threads()[FOLLOWING].submit(work, part) for part in range(1, parts)]
        for line, constraint, token, error in [*work(0), *(one for other in others for one in other.result())]:
            if error:
                errors[line] = error
            elif token is not None:
                drawn[line] = token
                self.take([(constraint, token)])
        return errors, drawn

    def _keep(self, constraint: Constraint) -> None:
        """For its request, when that enters again."""
        self._forget_old()
        self._late.setdefault(constraint.key, []).append(constraint)
        self._late_since.setdefault(constraint.key, time.monotonic())
        if len(self._late) > LATE:
            self._forget(next(iter(self._late_since)))

    def _forget(self, key: Key) -> None:
        del self._late[key], self._late_since[key]

    def _forget_old(self) -> None:
        """Each may have tens of megabytes."""
        before = time.monotonic() - LATE_FOR
        for key in [key for key, since in self._late_since.items() if since < before]:
            self._forget(key)

    def _begin(self, constraint: Constraint, grammar: str) -> None:
        with _beside(constraint):
            self._compile(constraint, grammar)

    def _compile(self, constraint: Constraint, grammar: str) -> None:
        try:
            if not len(constraint.eos_ids):
                constraint.error = "structured_outputs need a token that ends an output, and this model has none"
                return
            eos_id = int(constraint.eos_ids[0])
            constraint.begin(self._matcher(grammar, eos_id), self._vocabulary(eos_id).vocab_size)
        except Exception as e:
            constraint.error = f"the grammar of structured_outputs can't be used: {type(e).__name__}: {e}"

    def _matcher(self, grammar: str, eos_id: int) -> llguidance.LLMatcher:
        import llguidance

        from planaria.structured.vocabulary import limits

        key = (grammar, eos_id)
        with self._lock:
            made = self._compiled.get(key)
        if made is None:
            made = llguidance.LLMatcher(self._vocabulary(eos_id), grammar, log_level=0, limits=limits())
            if made.is_error():
                raise ValueError(made.get_error())
        with self._lock:
            self._compiled[key] = made
            self._compiled.move_to_end(key)
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        return made.deep_copy()

    def _threads(self) -> tuple[ThreadPoolExecutor, ...]:
        """By what they do. Several compile, so that what takes long holds up nobody else's."""
        if not self._pools:
            counts = {COMPILING: 2, FOLLOWING: max(1, self.threads - 1), ASIDE: 1}
            before, started = threading.stack_size(STACK), threading.Barrier(sum(counts.values()) + 1)
            try:
                self._pools = tuple(
                    ThreadPoolExecutor(count, f"grammar-{kind}", None if kind == FOLLOWING else _yield_to_others)
                    for kind, count in counts.items()
                )
                for pool, count in zip(self._pools, counts.values(), strict=True):
                    for _ in range(count):
                        pool.submit(started.wait)
                started.wait()  # all are there now, with their stacks
            finally:
                threading.stack_size(before)
        return self._pools

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
