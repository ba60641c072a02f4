"""The rows' sampling state, and one step's choice over them. What a choice is, `sampling` defines.

The rule: a row's state is its request's history and what follows from it, so `enter` with a history puts a row
where it was; and an error of one row stays with it.

Logits are in main memory (of those on a device `torch_sampler` chooses). NumPy chooses for greedy rows, compiled
kernels for others. These load in the background when a request first needs them: until they are there the definition
does the work, slower, to the same tokens.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planaria.kernels.sampling_library import BANNED, BROKEN, OK, SamplingKernels, Scratch, load
from planaria.protocol import Fresh
from planaria.structured.constraint import Constraint, Constraints, Draw
from planaria.types import TokenLogprobs
from planaria.worker import sampling
from planaria.worker.rng import draw_bits

if TYPE_CHECKING:
    from planaria.kernels.gpu.draw import Drawer

_log = logging.getLogger(__name__)

_SEED_MASK = 2**64 - 1
_LINES_WORTH_A_THREAD = 8  # handing work to a thread costs as much as a few lines

_SAID = {OK: "", BROKEN: sampling.BROKEN, BANNED: sampling.BANNED}  # by flag

_Ids = npt.NDArray[np.int64]
_NO_IDS: _Ids = np.zeros(0, np.int64)
_NO_VALUES: npt.NDArray[np.float32] = np.zeros(0, np.float32)


class Seen:
    """The distinct tokens of a history and how often each came out: what penalties touch, and no more."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        self._slots: dict[int, int] = {}
        self._ids: npt.NDArray[np.int64] = np.zeros(256, np.int64)
        self._counts: npt.NDArray[np.float32] = np.zeros(256, np.float32)
        for token in dict.fromkeys(tokens[:num_prompt]):
            self._slot(token)
        for token in tokens[num_prompt:]:
            self.add(token)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
        return slot

    def add(self, token: int) -> None:
        """`token` came out once more."""
        slot = self._slot(token)
        self._counts[slot] += 1

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The distinct tokens and their counts; views, valid until the next `add`."""
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]


@lru_cache(maxsize=32)
def _banned_after(words: tuple[tuple[int, ...], ...], vocab_size: int) -> dict[int, dict[tuple[int, ...], _Ids]]:
    """From a length to what may come before a word's last token, of that length, to those last tokens.

    Found by a look for each length, however many words there are; the rows of one request share it. A tokenizer may
    know tokens that the model has no logit for: those can't be drawn anyway.
    """
    found: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for word in words:
        if word and 0 <= word[-1] < vocab_size:
            found.setdefault(len(word) - 1, {}).setdefault(word[:-1], []).append(word[-1])
    return {n: {before: np.array(last, np.int64) for before, last in ends.items()} for n, ends in found.items()}


class _Row:
    """One request's state. `edits`: its logits may be changed before the choice; then it keeps its `history`. special:
    there is more to it than a draw: edits, a constraint, log-probabilities."""

    __slots__ = (
        "bans", "bias", "bias_ids", "constraint", "edits", "history", "last_ban", "params", "penalties", "seed", "seen",
        "special", "stops", "words",
    )  # fmt: skip

    def __init__(self, fresh: Fresh, vocab_size: int) -> None:
        self.params = params = fresh.params
        self.seed = fresh.seed
        self.words = _banned_after(params.bad_words_ids, vocab_size)
        stops = dict.fromkeys(fresh.eos_ids + params.stop_token_ids)
        self.stops = np.array([t for t in stops if 0 <= t < vocab_size], np.int64)
        self.bans: _Ids | None = None  # for good
        if params.allowed_token_ids is not None:
            others = np.ones(vocab_size, np.bool_)
            others[[t for t in params.allowed_token_ids if 0 <= t < vocab_size]] = False
            self.bans = np.flatnonzero(others)
        self.last_ban = fresh.num_prompt + params.min_tokens  # stops are banned while the history is shorter
        bias = {t: b for t, b in (params.logit_bias or {}).items() if 0 <= t < vocab_size}
        self.bias_ids = np.array(list(bias), np.int64)
        self.bias = np.array(list(bias.values()), np.float32)
        self.penalties = tuple(
            np.array([params.repetition_penalty, params.frequency_penalty, params.presence_penalty], np.float32)
        )
        self.constraint: Constraint | None = None
        self.seen: Seen | None = None
        if self.penalties != (1.0, 0.0, 0.0):
            if fresh.tokens and not (min(fresh.tokens) >= 0 and max(fresh.tokens) < vocab_size):
                raise ValueError(f"the history has token ids outside the vocabulary of {vocab_size}")
            self.seen = Seen(fresh.tokens, fresh.num_prompt)
        self.edits = bool(self.words or params.min_tokens or bias or self.seen is not None or self.bans is not None)
        self.history = list(fresh.tokens) if self.edits else []
        self.special = self.edits or bool(params.grammar) or params.logprobs is not None

    def changes(self) -> tuple[Any, ...]:
        """What `sampling.edit` and its kernel are told."""
        history = self.history
        banned = [self.stops] if len(history) < self.last_ban else []
        if self.bans is not None:
            banned.append(self.bans)
        for n, ends in self.words.items():
            last = ends.get(tuple(history[-n:]) if n else ())
            if last is not None:
                banned.append(last)
        bans = np.concatenate(banned) if banned else _NO_IDS
        ids, counts = self.seen.arrays() if self.seen is not None else (_NO_IDS, _NO_VALUES)
        return bans, self.bias_ids, self.bias, ids, counts, *self.penalties


class _StepRows(NamedTuple):
    """Rows that are drawn for together, as indices and by their state; by line those of them of which log-probabilities
    are asked for, whose logits are changed, and that are bound."""

    at: _Ids
    states: list[_Row]
    wanted: list[int]
    edited: list[int]
    bound: list[tuple[int, Constraint]]


class RowsDrawn(NamedTuple):
    """Rows are drawn for. ready: would `read` not wait? read, once: tokens, in order, and errors by row."""

    ready: Callable[[], bool]
    read: Callable[[], tuple[_Ids, dict[int, str]]]


class Sampler:
    """Draws tokens for `max_rows` rows over `vocab_size` tokens.

    `cache_dir`: where compiled kernels are kept (default ~/.cache/planaria); `threads`: to use; `plain`: the
    definition, and no kernels; `constraints`: what follows grammars.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        cache_dir: Path | None = None,
        *,
        threads: int = 1,
        plain: bool = False,
        constraints: Constraints | None = None,
    ) -> None:
        self.constraints = constraints
        self.max_rows, self.vocab_size, self.threads, self.plain = max_rows, vocab_size, threads, plain
        self._rows: dict[int, _Row] = {}
        self._cache_dir = cache_dir
        self._kernels: _Kernels | None = None
        self._loading: threading.Thread | None = None
        self._copies: Any = np.empty((0, vocab_size), np.float32)
        self._drawing: set[int] = set()  # rows that are not greedy
        self._special: set[int] = set()  # see _Row
        self._drew: list[int] = []  # rows, in the last step; until one of them is another
        self._found = _StepRows(_NO_IDS, [], [], [], [])  # of those
        self._logits: Any = None  # that were right, in the last step: mostly they are in the same place
        # By row, in the form the kernels read.
        self._scales = np.zeros(max_rows, np.float32)  # log2(e) / temperature, 0 for greedy
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float64)
        self._limits = np.zeros(max_rows, np.float32)  # -log2(min_p)
        self._seeds = np.zeros(max_rows, np.uint64)
        self._positions = np.zeros(max_rows, np.int64)
        self._position_of = self._positions.data  # far quicker for one, where caches are cold

    def warm_up(self) -> None:
        """Load the kernels now (a few ms; the first time on a machine they are compiled, seconds). May be left out."""
        if self._loading is not None:
            self._loading.join()
        self._load(aside=False)

    def _load(self, aside: bool) -> None:
        if self._kernels is None and not self.plain:
            tables: list[npt.NDArray[Any]] = [
                self._scales, self._top_k, self._top_p, self._limits, self._seeds, self._positions
            ]  # fmt: skip
            self._kernels = _Kernels(self.vocab_size, self.threads, load(self._cache_dir, aside=aside), tables)

    def close(self) -> None:
        """End the threads, if any, except one that still loads kernels: it ends by itself, and with the process."""
        if self._kernels is not None:
            self._kernels.close()
        if self.constraints is not None:
            self.constraints.close()

    def enter(self, row: int, fresh: Fresh) -> None:
        """A request (re)enters `row`, whoever was there before. ValueError when it can't."""
        if not 0 <= row < self.max_rows:
            raise ValueError(f"row {row} of {self.max_rows}")
        params = fresh.params
        self._rows[row] = state = _Row(fresh, self.vocab_size)
        self._drew = []
        if params.grammar:
            if self.constraints is None:
                raise ValueError("this sampler follows no grammars")
            output = fresh.tokens[fresh.num_prompt :]
            state.constraint = self.constraints.enter(
                params.grammar, fresh.eos_ids, output, goes_on=params.ignore_eos,
                greedy=params.greedy and not self.plain,
            )  # fmt: skip
        (self._special.add if state.special else self._special.discard)(row)
        self._scales[row] = 0.0 if params.greedy else sampling.LOG2E / params.temperature
        (self._drawing.discard if params.greedy else self._drawing.add)(row)
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._limits[row] = -math.log2(params.min_p) if params.min_p > 0 else math.inf
        self._seeds[row] = fresh.seed & _SEED_MASK
        self._positions[row] = len(fresh.tokens)
        wants = (params.logprobs, params.prompt_logprobs) != (None, None)
        idle = self._kernels is None and self._loading is None and not self.plain
        if idle and (wants or state.edits or params.grammar or not params.greedy):
            self._loading = threading.Thread(target=self._load_behind, name="sampler-kernels", daemon=True)
            self._loading.start()

    def _of(self, rows: list[int]) -> _StepRows:
        """Mostly those of the step before."""
        if rows != self._drew:
            states = [self._rows[row] for row in rows]
            special = [(i, state) for i, state in enumerate(states) if state.special]
            self._drew, self._found = list(rows), _StepRows(
                np.array(rows), states,
                [i for i, state in special if state.params.logprobs is not None],
                [i for i, state in special if state.edits],
                [(i, state.constraint) for i, state in special if state.constraint is not None],
            )  # fmt: skip
        return self._found

    def prepare(self, rows: list[int]) -> None:
        """These are drawn for next, line by line: said before their logits are computed."""

    def follows(self, rows: list[int]) -> bool:
        """Can these be drawn for before the host knows what the last step drew? Then `begin` does."""
        return False

    @property
    def tells(self) -> bool:
        """Do the devices of other ranks get the tokens of rows that follow? Then nobody need tell them."""
        return False

    def begin(self, logits: Any, rows: list[int]) -> RowsDrawn:
        """`sample` of rows that follow."""
        raise NotImplementedError

    def known(self, rows: list[int]) -> dict[int, int]:
        """By their index, tokens of those to which a grammar leaves no choice, as if `sample` had drawn them: said
        before their logits are computed, which nobody needs."""
        if self.constraints is None or self.plain or self._special.isdisjoint(rows):
            return {}
        states = enumerate(map(self._rows.__getitem__, rows))
        bound = [(i, s.constraint) for i, s in states if s.constraint and not s.edits and s.params.logprobs is None]
        found = self.constraints.forced(bound)
        for i in found:
            self._position_of[rows[i]] += 1
        return found

    def leave(self, row: int) -> None:
        """Forget `row`; it may be empty."""
        self._rows.pop(row, None)
        self._drew = []
        self._drawing.discard(row)
        self._special.discard(row)

    def sample(
        self, logits: Any, rows: list[int], lines: list[int] | None = None
    ) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
        """Draw the next token of each row, which is a part of the row's history from now on.

        logits float32 [S, vocab_size], line i, or lines[i], of `rows[i]`, no row twice; they may be overwritten.
        Returns the tokens, in order; the log-probabilities by row where asked for; errors by row. A row with an error
        gets token 0 (so that its history is as long as the cache expects), and no other row notices. An error that is
        empty: the row is late, now and until it enters again.
        """
        logits = self._checked(logits, len(rows) if lines is None else len(logits))
        if not rows:
            return [], {}, {}
        if lines is not None and (self.plain or not (self._special | self._drawing).isdisjoint(rows)):
            logits, lines = logits[lines], None
        _, states, wanted, edited, bound = self._of(rows)
        raw = logits if wanted and not edited and not bound and len(wanted) == len(rows) else None
        if wanted and raw is None:
            raw = self._copy(logits, wanted)
        if edited:
            self._edit(logits, {i: states[i].changes() for i in edited})
        if bound:
            tokens, failed = self._choose_bound(logits, rows, states, bound)
        elif lines is None:
            tokens, failed = self._choose(logits, rows, states)
        else:
            tokens, failed = sampling.greedy(logits, lines)  # a copy would take longer than all they are looked at for
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            counts = [states[i].params.logprobs or 0 for i in wanted]
            entries = self.prompt_logprobs(raw, [tokens[i] for i in wanted], max(counts))
            for i, count, entry in zip(wanted, counts, entries, strict=True):
                if i not in failed:
                    logprobs[rows[i]] = TokenLogprobs(entry.token, entry.logprob, entry.rank, entry.top[:count])
        for row in rows:
            self._position_of[row] += 1
        for i in edited:
            states[i].history.append(tokens[i])
            if (seen := states[i].seen) is not None:
                seen.add(tokens[i])
        return tokens, logprobs, {rows[i]: message for i, message in failed.items()}

    def prompt_logprobs(self, logits: Any, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens and of the `k` likeliest; NaN, rank 0 and none where logits are broken.

        logits float32 [n, vocab_size], left as they are; `targets[i]` is the token that follows position i.
        """
        logits = self._checked(logits, len(targets))
        if not targets:
            return []
        if not (min(targets) >= 0 and max(targets) < self.vocab_size):
            raise ValueError(f"token ids outside the vocabulary of {self.vocab_size}")
        return self._logprobs(logits, targets, min(k, self.vocab_size))

    def _choose_bound(
        self, logits: Any, rows: list[int], states: list[_Row], bound: list[tuple[int, Constraint]]
    ) -> tuple[list[int], dict[int, str]]:
        """`_choose`, where constraints bind some of the lines. They move on by what was drawn."""
        constraints = self.constraints
        assert constraints is not None
        refused, clear = self._bind(logits, rows, bound)
        for i in refused:
            if not refused[i]:
                states[i].constraint = constraints.late  # its own may be another row's by the next step
                self._drew = []
        if len(clear) == len(rows):
            return [clear[i] for i in range(len(rows))], {}
        tokens, failed = self._choose(logits, rows, states, clear)
        failed.update(refused)
        for i in refused:
            tokens[i] = 0
        constraints.take([(constraint, tokens[i]) for i, constraint in bound if i not in failed and i not in clear])
        return tokens, failed

    # What is done with logits, once they are checked. `TorchSampler` has other ways.

    def _edit(self, logits: Any, changes: dict[int, tuple[Any, ...]]) -> None:
        """Change some lines, in place."""
        kernels = self._kernels
        for i, change in changes.items():
            if kernels is not None:
                kernels.edit(logits, i, *change)
            else:
                sampling.edit(logits[i], *change)

    def _bind(
        self, logits: Any, rows: list[int], bound: list[tuple[int, Constraint]]
    ) -> tuple[dict[int, str], dict[int, int]]:
        """Draw for these lines, or ban what grammars don't allow, in place. Returns errors by line, and the tokens that
        are drawn."""
        assert self.constraints is not None
        kernels = self._kernels
        draw = None if kernels is None else lambda part: kernels.allowed(logits, rows, part)
        return self.constraints.bind(bound, logits, draw)

    def _choose(
        self, logits: Any, rows: list[int], states: list[_Row], clear: Mapping[int, int] | None = None
    ) -> tuple[list[int], dict[int, str]]:
        """Tokens and errors, both by line. clear: tokens of lines that needn't be looked at."""
        clear = clear or {}
        kernels, greedy = self._kernels, not self.plain and self._drawing.isdisjoint(rows)
        if greedy and not clear:
            return sampling.greedy(logits)
        if kernels is not None and not greedy:
            return kernels.choose(logits, np.array(rows, np.int64), clear)
        left = [i for i in range(len(rows)) if i not in clear]
        some = [states[i] for i in left]
        if greedy:
            tokens, failed = sampling.greedy(logits, left)
        else:
            bits = self._random_bits([rows[i] for i in left], some)
            tokens, failed = sampling.choose(logits[left], [state.params for state in some], bits)
        found = {**clear, **dict(zip(left, tokens, strict=True))}
        return [found[i] for i in range(len(rows))], {left[at]: why for at, why in failed.items()}

    def _random_bits(self, rows: list[int], states: list[_Row]) -> list[int]:
        """What each row's next token is drawn with."""
        return [draw_bits(state.seed, int(self._positions[row])) for row, state in zip(rows, states, strict=True)]

    def _logprobs(self, logits: Any, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
        of = sampling.raw_logprobs if self._kernels is None else self._kernels.logprobs
        return of(logits, targets, k)

    def _copy(self, logits: Any, lines: list[int]) -> Any:
        """Those lines, valid until the next copy. Fresh memory for them would cost more than the copying."""
        if len(self._copies) < len(lines):
            self._copies = np.empty((len(lines), self.vocab_size), np.float32)
        return np.take(logits, lines, axis=0, out=self._copies[: len(lines)], mode="clip")

    def _checked(self, logits: Any, lines: int) -> Any:
        if logits is not self._logits or len(logits) != lines:
            self._check(logits, lines, logits.dtype == np.float32)
            self._logits = np.ascontiguousarray(logits)
        return self._logits

    def _check(self, logits: Any, lines: int, single: bool) -> None:
        if not single or logits.shape != (lines, self.vocab_size):
            need = f"float32 {(lines, self.vocab_size)}"
            raise ValueError(f"logits must be {need}, are {logits.dtype} {tuple(logits.shape)}")

    def _load_behind(self) -> None:
        try:
            self._load(aside=True)
        except Exception as e:
            _log.warning("sampling goes on without its kernels, slower: %s: %s", type(e).__name__, e)


class Follower:
    """The sampler of ranks that draw nothing: it refuses exactly the requests that `Sampler` refuses, so
    that all ranks go on with the same rows, and keeps which are special. told: where the device gets what another one
    drew; None: it doesn't."""

    def __init__(self, max_rows: int, vocab_size: int, told: Drawer | None = None) -> None:
        self.max_rows, self.vocab_size, self._told = max_rows, vocab_size, told
        self._special: set[int] = set()

    def enter(self, row: int, fresh: Fresh) -> None:
        """ValueError when the request can't enter."""
        if not 0 <= row < self.max_rows:
            raise ValueError(f"row {row} of {self.max_rows}")
        (self._special.add if _Row(fresh, self.vocab_size).special else self._special.discard)(row)

    def leave(self, row: int) -> None:
        self._special.discard(row)

    def follows(self, rows: list[int]) -> bool:
        """Does the device get what is drawn for these?"""
        return self._told is not None and self._special.isdisjoint(rows)

    def begin(self, rows: list[int]) -> RowsDrawn:
        """What is drawn for rows that follow, on its way."""
        assert self._told is not None
        came = self._told.send(len(rows))
        return RowsDrawn(came.ready, lambda: (came.read()[0], {}))

    def close(self) -> None:
        pass


class _Kernels:
    """The compiled functions for one vocabulary, with memory for each of `threads`.

    `tables`: scales, top_k, top_p, limits, seeds and positions by row, as `sample_lines` reads them.
    """

    def __init__(self, vocab_size: int, threads: int, library: SamplingKernels, tables: list[npt.NDArray[Any]]) -> None:
        self._library = library
        self._scratch = [Scratch(vocab_size) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads - 1, "sampler") if threads > 1 else None
        self._tables = tables
        self._addresses = [table.ctypes.data for table in tables]
        self._logits: Any = None  # and where those are; to ask an array takes long where caches are cold
        self._address = 0
        self.edit = self._library.edit

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def choose(
        self, lines: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], clear: Mapping[int, int]
    ) -> tuple[list[int], dict[int, str]]:
        """`sampling.choose`. clear: tokens of lines that needn't be looked at."""
        n = len(rows)
        out = np.empty((2, n), np.int64)
        if clear:
            at = list(clear)
            rows[at], out[0, at], out[1, at] = -1, list(clear.values()), OK
        addresses = [out[0].ctypes.data, out[1].ctypes.data]
        settings = [rows.ctypes.data, *self._addresses]
        self._split(n, lambda begin, end, s: self._library.sample(lines, begin, end, s, settings, addresses))
        failed = {}
        if out[1].any():
            failed = {i: _SAID[flag] for i, flag in enumerate(out[1].tolist()) if flag}
        return out[0].tolist(), failed

    def allowed(self, logits: npt.NDArray[np.float32], rows: list[int], part: int) -> Draw:
        """part: of the threads, each of which has its own."""
        while len(self._scratch) <= part:
            self._scratch.append(Scratch(logits.shape[1]))
        if logits is not self._logits:
            self._logits, self._address = logits, logits.ctypes.data
        scratch, address, size, settings = self._scratch[part], self._address, logits.shape[1], self._addresses

        def draw(line: int, allowed: int) -> tuple[int, str]:
            token, flag = self._library.allowed(address, size, line, rows[line], allowed, settings, scratch)
            return token, _SAID[flag]

        return draw

    def logprobs(self, lines: npt.NDArray[np.float32], targets: Sequence[int], k: int) -> list[TokenLogprobs]:
        """`sampling.raw_logprobs`."""
        n, ids = len(targets), np.array(targets, np.int64)
        tops, masses, ranks = np.empty(n, np.float32), np.empty(n, np.int64), np.empty(n, np.int64)
        best = np.zeros((n, k), np.int64)
        out = [array.ctypes.data for array in (tops, masses, ranks, best)]
        self._split(n, lambda begin, end, s: self._library.logprobs(lines, begin, end, k, ids, s, out))
        return sampling.entries(
            targets,
            lines[np.arange(n), ids].tolist(),
            ranks.tolist(),
            tops.tolist(),
            masses.tolist(),
            best.tolist(),
            np.take_along_axis(lines, best, 1).tolist(),
        )

    def _split(self, n: int, work: Callable[[int, int, Scratch], None]) -> None:
        """Run `work(begin, end, scratch)` over n lines, on the pool too where it is worth it."""
        parts = 1 if self._pool is None else max(1, min(len(self._scratch), n // _LINES_WORTH_A_THREAD))
        bounds = [n * part // parts for part in range(parts + 1)]
        futures = [
            self._pool.submit(work, bounds[part], bounds[part + 1], self._scratch[part])
            for part in range(1, parts)
            if self._pool is not None
        ]
        work(0, bounds[1], self._scratch[0])
        for future in futures:
            future.result()
