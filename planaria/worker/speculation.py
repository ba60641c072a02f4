"""Rows that go on by several tokens: which drafts they check in a step, and what came of it.

All ranks of a lane put the same drafts into the same step. So the one that draws tells the others, with each row's
token, how many tokens the row drew and what it has as drafts now; what of those goes into a step follows from that
and from the plan, on each rank by itself. Each position is drawn by the sampler as if it were alone, after all before
it: so tokens are what they would be without drafts, whatever the request asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.config.options import EngineConfig
from planaria.kernels.ops import Batch
from planaria.mesh.mesh import Mesh
from planaria.protocol import Fresh
from planaria.types import TokenLogprobs
from planaria.worker.draft_model import DraftHead, DraftModel, DraftWeights
from planaria.worker.draft_sizes import DraftSizes
from planaria.worker.drafting import Drafter, ReadsHidden, SharedDrafter, make_drafter
from planaria.worker.sampler import Sampler

Rows = npt.NDArray[np.int64]
# Of each row as many: how many tokens it drew, the last of them, how many drafts, those, zeros
ToldRows = list[list[int]]
HEAD = 3
GUESSES = 4  # rows without drafts, in a step, of which one is looked up
Drawn = list[list[int]]


class Speculation:
    """Of a rank with `rows` rows of up to `most` drafts. drafter: where this rank draws tokens, or has a part in
    drafting them; tells: another one reads the hidden states of this one's share of a step."""

    def __init__(
        self, rows: int, most: int, vocab_size: int, batch: Batch, drafter: Drafter | None, *, tells: bool = False
    ) -> None:
        self.most, self.vocab_size, self.batch, self.drafter, self.tells = most, vocab_size, batch, drafter, tells
        self.sizes = DraftSizes()
        self.counts: npt.NDArray[np.int32] = np.zeros(rows, np.int32)  # of drafts
        self.drafts: npt.NDArray[np.int32] = np.zeros((rows, most), np.int32)
        self._having: set[int] = set()  # rows that have drafts
        self._since = self._drafting = 0.0  # when a step began; seconds that the last drafts took
        self._guesses: dict[int, int] = {}  # of rows without drafts: what one would have been
        self._turn = 0  # of rows whose next token is guessed
        self._looks_up: bool = getattr(drafter, "looks_up", False)

    @property
    def width(self) -> int:
        """Numbers that are told of a row."""
        return HEAD + self.most

    def enter(self, row: int, fresh: Fresh) -> None:
        self.counts[row] = 0
        self._having.discard(row)
        self._guesses.pop(row, None)
        if self.drafter is not None:
            self.drafter.enter(row, fresh.tokens, fresh.num_prompt)
            self.sizes.enter(row)

    def leave(self, row: int) -> None:
        self.counts[row] = 0
        self._having.discard(row)
        if self.drafter is not None:
            self.drafter.leave(row)
            self.sizes.leave(row)

    def hear(self, row: int, told: list[int]) -> None:
        """What the rank that draws says of this row."""
        self.counts[row] = count = told[2]
        if count:
            self._having.add(row)
            self.drafts[row] = told[HEAD:]
        else:
            self._having.discard(row)

    def taken(self, rows: list[int], room: list[int], *, alone: bool) -> npt.NDArray[np.int32] | None:
        """How many drafts of each row go into a step; None: none do. room: positions of its blocks from its next token
        on. alone: is nothing else in the step?"""
        self._since = time.perf_counter()
        if not alone or not self._having:
            return None
        taken = np.minimum(self.counts[rows], np.array(room, np.int32) - 1)
        return taken if taken.any() and len(rows) + int(taken.sum()) <= self._limit else None

    @property
    def _limit(self) -> int:
        return min(self.batch.max_tokens, self.batch.max_samples)

    def spread(self, rows: Rows, taken: npt.NDArray[np.int32]) -> tuple[Rows, npt.NDArray[np.int32], Rows]:
        """Of each token of these rows in a step: its row, which of the row's it is, and of each row its first."""
        num = 1 + taken
        starts = np.cumsum(num) - num
        of = np.repeat(rows, num)
        return of, (np.arange(len(of)) - np.repeat(starts, num)).astype(np.int32), starts

    def draw(
        self, sampler: Sampler, logits: Any, rows: list[int], lines: list[int], taken: Sequence[int]
    ) -> tuple[Drawn, dict[int, list[TokenLogprobs]], dict[int, str]]:
        """Tokens, log-probabilities and errors of rows; one with an error has the tokens before it. lines: of each the
        first of its logits; taken: its drafts, of which the logits follow."""
        drawn: Drawn = [[] for _ in rows]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        going, number = list(range(len(rows))), 0
        while going:
            some = [rows[i] for i in going]
            tokens, entries, wrong = sampler.sample(*_lines(logits, some, [lines[i] + number for i in going]))
            errors.update(wrong)
            right = []
            for i, row, token in zip(going, some, tokens, strict=True):
                if row in wrong:
                    continue
                drawn[i].append(token)
                if row in entries:
                    logprobs.setdefault(row, []).append(entries[row])
                if number < taken[i] and token == self.drafts[row, number]:
                    right.append(i)
            going, number = right, number + 1
        return drawn, logprobs, errors

    def go_on(self, rows: list[int], drawn: Drawn, taken: Sequence[int], *, alone: bool) -> ToldRows:
        """Draft for the next step. Returns what the other ranks are told."""
        assert self.drafter is not None
        sizes = self.sizes
        if alone:
            spent = time.perf_counter() - self._since
            sizes.times.saw(len(rows) + sum(taken), spent + (self._drafting if sum(taken) else 0.0))
        going: list[int] = []
        for row, tokens, count in zip(rows, drawn, taken, strict=True):
            if tokens:  # else it has ended with an error
                self.drafter.extend(row, tokens)
                sizes.checked(row, count, len(tokens) - 1)
                if (guess := self._guesses.pop(row, None)) is not None:
                    sizes.checked(row, 1, int(tokens[0] == guess))
                going.append(row)
        since = time.perf_counter()
        few = self._looks_up and len(going) <= GUESSES
        found = self.drafter.draft(dict.fromkeys(going, self.most if sizes.may_gain(going) else 1)) if few else {}
        dealt: dict[int, int] = {}
        guessed: list[int] = []
        if not few or any(found.values()):  # else there is nothing to be dealt: most steps, where nothing is repeated
            dealt = sizes.dealt(going, self.most, self._limit - len(rows))
            guessed = self._guessed([row for row in going if row not in dealt])
        if not few and (dealt or guessed or isinstance(self.drafter, SharedDrafter)):
            found = self.drafter.draft(dealt | dict.fromkeys(guessed, 1))
        drafts = {row: self._known(found.get(row, ())[:most]) for row, most in dealt.items()}
        self._guesses |= {row: found[row][0] for row in guessed if found.get(row)}
        self._drafting = time.perf_counter() - since
        told: ToldRows = []
        for row, tokens in zip(rows, drawn, strict=True):
            own = drafts.get(row, ())
            last = tokens[-1] if tokens else 0
            told.append([max(1, len(tokens)), last, len(own), *own, *[0] * (self.most - len(own))])
        return told

    def follow(self) -> bool:
        """Where another rank draws: have a part in drafting. True: what came of it is told next."""
        if self.drafter is None:
            return False
        assert isinstance(self.drafter, SharedDrafter)
        self.drafter.follow()
        return True

    @property
    def reads_hidden(self) -> bool:
        """Is a forward pass to give hidden states of all tokens, besides logits?"""
        return self.tells or isinstance(self.drafter, ReadsHidden)

    def reading(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        """Such a forward pass, as one that gives logits alone."""
        drafter = self.drafter
        if not isinstance(drafter, ReadsHidden):
            return lambda: forward()[0]

        def logits() -> Any:
            drafter.catch_up()
            made, hidden = forward()
            drafter.saw(hidden)
            return made

        return logits

    def _guessed(self, rows: Sequence[int]) -> list[int]:
        """Of rows without drafts those, in turn, of which a draft is looked up all the same: whether it would have been
        right tells what drafts are worth now, and costs no place in a step."""
        if not self._looks_up or not rows:
            return []
        self._turn += GUESSES
        return [rows[(self._turn + i) % len(rows)] for i in range(min(GUESSES, len(rows)))]

    def _known(self, drafts: Sequence[int]) -> Sequence[int]:
        """Up to the first that is no token: kernels look up whatever is asked for."""
        wrong = next((i for i, token in enumerate(drafts) if not 0 <= token < self.vocab_size), len(drafts))
        return drafts[:wrong]

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.close()


def make_speculation(
    config: EngineConfig, batch: Batch, num_blocks: int, weights: DraftWeights | None, mesh: Mesh
) -> Speculation:
    """Where rows draft. weights: of a model that drafts, where this rank has a part in it. Raises ConfigError."""
    drafter: Drafter | None = None
    if weights is not None:
        kind = DraftHead if config.speculative is not None and config.speculative.method == "eagle" else DraftModel
        drafter = kind(config, weights, batch, num_blocks, mesh.tp)
    elif mesh.samples:
        drafter = make_drafter(config)
    scheduler, last = config.scheduler, mesh.pp.rank == mesh.pp.size - 1
    tells = mesh.shares is not None and last and config.speculative is not None and config.speculative.method == "eagle"
    return Speculation(
        scheduler.max_num_seqs, scheduler.max_drafts, config.model.vocab_size, batch, drafter, tells=tells
    )


def _lines(logits: Any, rows: list[int], lines: list[int]) -> tuple[Any, list[int], list[int] | None]:
    """What `Sampler.sample` is told. lines: rising."""
    first, end = lines[0], lines[-1] + 1
    if end - first != len(lines):
        return logits, rows, lines
    return logits if end - first == len(logits) else logits[first:end], rows, None
