"""Turns a lane's plan into one forward pass and its sampled tokens.

Rows live in arrays: `cursor` is the position of a row's next token, `last` the token it sampled, `turns` says which go
on by themselves. A step costs a few array operations for those and a little Python for each that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from planaria.config.options import SchedulerConfig
from planaria.kernels.ops import Array, Batch
from planaria.protocol import Fresh, LanePlan, LaneResult, Row
from planaria.topology.stripes import Stripes
from planaria.types import TokenLogprobs
from planaria.worker.pooling import Pooling
from planaria.worker.sampler import Follower, RowsDrawn, Sampler
from planaria.worker.stage import Stage

if TYPE_CHECKING:
    from planaria.worker.loras import RowSlots
    from planaria.worker.speculation import Speculation


class StepUnderWay:
    """Its tokens are read when somebody asks for the result: of one step after the other, before the one after the next
    begins. ready: would that not wait?"""

    def __init__(self, runner: Runner, ready: Callable[[], bool], read: Callable[[], LaneResult]) -> None:
        self.ready, self._runner, self._read = ready, runner, read
        self._found: LaneResult | None = None

    def result(self) -> LaneResult:
        if self._found is None:
            self._found = self._read()
            if self._runner._open is self:
                self._runner._open = None
        return self._found


class RowTurns:
    """of: in whose steps a row goes on by itself; -1: in none."""

    def __init__(self, rows: int) -> None:
        self.of = np.full(rows, -1, np.int32)
        self._rows: dict[int, tuple[npt.NDArray[np.int64], list[int]]] = {}  # of each turn, until one comes or leaves

    def put(self, row: int, turn: int) -> None:
        self.of[row] = turn
        self._rows.clear()

    def rows(self, turn: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """That go on in its steps, twice the same. Both stay as they are."""
        if turn not in self._rows:
            rows = np.flatnonzero(self.of == turn)
            self._rows[turn] = rows, rows.tolist()
        return self._rows[turn]


class Runner:
    """`forward` runs the model on what `batch` holds and returns logits [S, vocabulary] float32.

    On a rank with a part of the model `stage` runs that part, and only the rank that draws tokens has a result; the
    others keep the same rows. A row that drew in a step goes on in the next step of its turn. meets: other lanes' ranks
    are met in every step, also in one in which this lane has nothing to do. stripes: the tokens that this rank has keys
    and values of, where it hasn't all; a block of `block_size` tokens is then one of fewer here.
    """

    def __init__(
        self, batch: Batch, forward: Callable[[], Array], sampler: Sampler | Follower,
        scheduler: SchedulerConfig, block_size: int, stage: Stage | None = None, *, meets: bool = False,
        speculation: Speculation | None = None, pooling: Pooling | None = None, stripes: Stripes | None = None,
        adapters: RowSlots | None = None,
    ) -> None:  # fmt: skip
        self.batch, self.sampler, self.meets, self.speculation = batch, sampler, meets, speculation
        self.adapters = adapters
        self.pooling = pooling or Pooling(lambda: forward)
        self.stage = stage or Stage(batch, forward)
        self.block_size, self.stripes = block_size, stripes
        rows = scheduler.max_num_seqs
        self.step_number = 0
        # Of each row; `_drawn_at`: of one that drew in the step whose tokens are open, the line
        self.cursor, self.last, self._drawn_at = np.zeros((3, rows), np.int32)
        self.turns = RowTurns(rows)
        self.prompts: dict[int, Sequence[int]] = {}  # histories of rows that are not through them yet
        self.logprobs_wanted: dict[int, int] = {}  # row -> k, prompt logprobs
        self.refused: dict[int, str] = {}  # rows whose request could not enter, until they are freed
        self._alone = not meets and speculation is None and self.stage.mesh.cp.size == 1  # in choosing its lines
        self._open: StepUnderWay | None = None  # whose tokens the host hasn't read

    def step(self, step: int, plan: LanePlan, freed: tuple[int, ...], turn: int = 0) -> LaneResult:
        """Raises ValueError when the plan doesn't follow the last one."""
        found = self.begin(step, plan, freed, turn)
        return found if isinstance(found, LaneResult) else found.result()

    def begin(
        self, step: int, plan: LanePlan, freed: tuple[int, ...], turn: int = 0, *, ahead: bool = False
    ) -> LaneResult | StepUnderWay:
        """The same. ahead: what the device draws may be read later, when it has been given the next step."""
        if step != self.step_number + 1:
            raise ValueError(f"plan for step {step} after step {self.step_number}")
        self.step_number = step
        for row in freed:
            self._leave(row)
        chunks = [change for change in plan if self._enter(change)]
        refused = {c.row: self.refused[c.row] for c in plan if c.row in self.refused} if self.refused else {}
        self.stage.take_tokens(turn, self._hear)
        rows, samples = self.turns.rows(turn)
        if self.adapters is not None:
            rows = self.adapters.together(rows)
        if chunks or self.adapters is not None:
            samples = rows.tolist()
        taken = None  # of each row's drafts
        if self.speculation is not None:
            room = [self.batch.row_blocks.item(row) * self.block_size - self.cursor.item(row) for row in samples]
            if min(room, default=1) <= 0:  # one whose blocks are full does nothing
                rows, samples, room = _with_room(samples, room)
            taken = self.speculation.taken(samples, room, alone=not chunks)
        starts = self._fill_auto(rows, taken)
        lines: list[int] = starts.tolist() if chunks or self.speculation is not None else []  # logits rows to draw from
        prompt_parts: list[tuple[Row, int]] = []  # (chunk, first of its logits rows)
        pooled: list[tuple[Row, int]] = []  # the same, of rows that end with a vector
        num_seqs = len(samples)
        num_samples = num_tokens = num_seqs if taken is None else num_seqs + int(taken.sum())
        sampler = self.sampler if isinstance(self.sampler, Sampler) else None
        known = sampler.known(samples) if sampler is not None and self._alone else {}
        if known:
            lines = _leave_out(self.batch, num_seqs, known)
            num_samples = len(lines)
        for chunk in chunks:
            first = num_tokens
            num_tokens = self._fill_chunk(chunk, num_seqs, num_tokens)
            num_seqs += 1
            pools = chunk.row in self.pooling.kinds
            if pools and (chunk.sample or self.pooling.reads_all(chunk.row)):
                pooled.append((chunk, num_samples))
            if chunk.row in self.logprobs_wanted:
                prompt_parts.append((chunk, num_samples))
            if chunk.row in self.logprobs_wanted or self.pooling.reads_all(chunk.row):
                self.batch.sample_index[num_samples : num_samples + chunk.count] = np.arange(first, num_tokens)
                num_samples += chunk.count
            elif chunk.sample:
                self.batch.sample_index[num_samples] = num_tokens - 1
                num_samples += 1
            if chunk.sample and not pools:
                lines.append(num_samples - 1)
                samples.append(chunk.row)
        self.batch.seq_start[num_seqs] = num_tokens
        self.batch.prefill = bool(chunks)
        self.batch.counts[:3] = (num_tokens, num_seqs, num_samples)
        if self.adapters is not None:
            self.batch.adapted = bool((self.batch.loras[:num_tokens] >= 0).any())
        if not num_tokens and not self.meets:
            return LaneResult([], [], errors=refused)
        if sampler is not None:
            sampler.prepare(samples if self.speculation is None and not chunks else [])
        logits, vectors, failed = self.pooling.run(self.stage, pooled)
        refused |= failed
        prompt_logprobs = {}
        if logits is not None and sampler is not None:
            for chunk, line in prompt_parts:
                history, k = self.prompts[chunk.row], self.logprobs_wanted[chunk.row]
                prompt_logprobs[chunk.row] = _prompt_logprobs(sampler, history, chunk, k, logits, line)
        for chunk in chunks:
            if chunk.sample:
                self.turns.put(chunk.row, turn if chunk.row not in self.pooling.kinds else -1)
                self.prompts.pop(chunk.row, None)
                self.logprobs_wanted.pop(chunk.row, None)
        others = LaneResult([], [], prompt_logprobs=prompt_logprobs, errors=refused, pooled=vectors)
        if not samples:
            return others
        if logits is None or sampler is None:
            if isinstance(self.sampler, Follower) and self.sampler.follows(samples):
                return self._begun(samples, self.sampler.begin(samples), others, ahead=ahead)
            self.stage.drew(turn, samples, None)
            if self.speculation is not None and self.speculation.follow():
                self.stage.take_tokens(turn, self._hear)
            return others
        if self.speculation is not None:
            drawn = self._draw_further(sampler, logits, samples, lines, taken, turn, alone=not chunks)
            errors, late = _told_apart(drawn.errors)
            return msgspec.structs.replace(
                drawn, prompt_logprobs=prompt_logprobs, errors={**refused, **errors}, late=late, pooled=vectors
            )  # fmt: skip
        if prompt_parts or pooled:
            logits = logits[lines]
        if sampler.follows(samples):
            begun = sampler.begin(logits, samples)
            if ahead or sampler.tells:
                return self._begun(samples, begun, others, ahead=ahead)
            _read(self._open)
            (found, errors), logprobs = begun.read(), None
            new = found.tolist()
        else:
            _read(self._open)
            new, logprobs, errors = _sample(sampler, logits, samples, known)
        self.stage.drew(turn, samples, [[token] for token in new])
        return self._drew(samples, new, errors, others, logprobs)

    def _begun(
        self, samples: list[int], begun: RowsDrawn, others: LaneResult, *, ahead: bool
    ) -> LaneResult | StepUnderWay:
        """`samples` are drawn for on the device, where the next step finds it."""
        _read(None if ahead else self._open)
        self._open = StepUnderWay(self, begun.ready, lambda: self._drew(samples, *begun.read(), others))
        self._drawn_at[samples] = self.batch.counting[: len(samples)]
        return self._open if ahead else self._open.result()

    def _drew(
        self, samples: list[int], drawn: list[int] | npt.NDArray[np.int64], errors: dict[int, str], others: LaneResult,
        logprobs: dict[int, TokenLogprobs] | None = None,
    ) -> LaneResult:  # fmt: skip
        """`samples` drew these. others: what else came of the step."""
        tokens: list[int] = drawn if isinstance(drawn, list) else drawn.tolist()
        for row, token in zip(samples, tokens, strict=True):
            self.last[row] = token
        if not self.stage.samples:
            return others
        if errors:
            kept = [i for i, row in enumerate(samples) if row not in errors]
            samples, tokens = [samples[i] for i in kept], [tokens[i] for i in kept]
        errors, late = _told_apart(errors)
        each = {row: [entry] for row, entry in (logprobs or {}).items()}
        return LaneResult(
            samples, tokens, each, others.prompt_logprobs, {**others.errors, **errors}, late=late, pooled=others.pooled
        )

    def _draw_further(
        self, sampler: Sampler, logits: Array, samples: list[int], lines: list[int],
        taken: npt.NDArray[np.int32] | None, turn: int, *, alone: bool,
    ) -> LaneResult:  # fmt: skip
        """Where rows draft. taken: of the rows that go on by themselves, the first of `samples`; None: none."""
        assert self.speculation is not None
        drafts = [0] * len(samples) if taken is None else taken.tolist() + [0] * (len(samples) - len(taken))
        drawn, logprobs, errors = self.speculation.draw(sampler, logits, samples, lines, drafts)
        told = self.speculation.go_on(samples, drawn, drafts, alone=alone)
        self._hear(turn, samples, told)
        self.stage.drew(turn, samples, told)
        each = {row: tokens for row, tokens in zip(samples, drawn, strict=True) if tokens}
        drafted = {row: count for row, count in zip(samples, drafts, strict=True) if count and row in each}
        more = {row: tokens[1:] for row, tokens in each.items() if len(tokens) > 1}
        return LaneResult(
            list(each), [tokens[0] for tokens in each.values()], logprobs, errors=errors, more=more, drafted=drafted
        )

    def drain(self) -> None:
        """Take in what is still on its way, before another runner uses the same mesh."""
        _read(self._open)
        self.stage.drain(self._hear)

    def _hear(self, turn: int, rows: list[int], told: npt.NDArray[np.int32] | list[list[int]]) -> None:
        """What these rows, which drew in a step of this turn, go on with."""
        for row, line in zip(rows, told if isinstance(told, list) else told.tolist(), strict=True):
            if self.speculation is None:
                self.last[row] = line[0]
            elif self.turns.of.item(row) == turn:  # not who has left, nor who came to the row since
                self.cursor[row] += line[0] - 1
                self.last[row] = line[1]
                self.speculation.hear(row, line)

    def _leave(self, row: int) -> None:
        self.turns.put(row, -1)
        for told in (self.prompts, self.logprobs_wanted, self.refused):
            told.pop(row, None)
        for part in (self.sampler, self.pooling, self.adapters, self.speculation):
            if part is not None:
                part.leave(row)

    def _enter(self, change: Row) -> bool:
        """Take in a row's change. True when its tokens are a chunk of its history (not the row's own next token)."""
        row, fresh = change.row, change.fresh
        if row in self.refused and fresh is None:
            return False
        if fresh is not None:
            self.turns.put(row, -1)
            self.batch.row_blocks[row] = 0
            self.prompts[row] = fresh.tokens
            if fresh.params.prompt_logprobs is not None:
                self.logprobs_wanted[row] = fresh.params.prompt_logprobs
            self.refused.pop(row, None)
            self.pooling.leave(row)
            try:
                if self.adapters is not None:
                    self.adapters.enter(row, fresh.adapter)
                elif fresh.adapter:
                    raise ValueError("this rank has no adapters")
                self._begin(row, fresh)
            except Exception as e:  # this request's mistake; the others go on
                self.refused[row] = f"the request can't be run: {e}"
                return False
        if change.blocks:
            have, more = self.batch.row_blocks.item(row), len(change.blocks)
            into = have if more == 1 else slice(have, have + more)  # one alone is a third of the time
            self.batch.block_table[row, into] = change.blocks[0] if more == 1 else change.blocks
            self.batch.row_blocks[row] = have + more
        if self.turns.of.item(row) < 0:
            return True
        if change.start != -1 and change.start != self.cursor.item(row):
            raise ValueError(f"row {row} is at {self.cursor[row]}, the plan says {change.start}")
        return False

    def _begin(self, row: int, fresh: Fresh) -> None:
        """Of who draws, or pools, the state of a row. Raises what is wrong with the request."""
        if fresh.params.pooling:
            self.pooling.enter(row, fresh.params.pooling)
            return
        if self.pooling.alone:
            raise ValueError("this model gives vectors and draws no tokens")
        self.sampler.enter(row, fresh)
        if self.speculation is not None:
            self.speculation.enter(row, fresh)

    def _fill_auto(self, rows: npt.NDArray[np.int64], taken: npt.NDArray[np.int32] | None) -> npt.NDArray[Any]:
        """Of each row that goes on by itself its next token, and the drafts taken, first in the batch. Returns the
        logits row of each one's token."""
        batch, n, size = self.batch, len(rows), self.block_size
        positions = self.cursor[rows]
        if taken is None:
            starts: npt.NDArray[Any] = batch.counting[:n]
            of, of_positions = rows, positions
            batch.tokens[:n] = self.last[rows]
            batch.seq_len[:n] = positions + 1
        else:
            assert self.speculation is not None
            of, within, starts = self.speculation.spread(rows, taken)
            of_positions = self.cursor[of] + within
            guessed = self.speculation.drafts[of, np.maximum(within - 1, 0)]
            batch.tokens[: len(of)] = np.where(within == 0, self.last[of], guessed)
            batch.seq_len[:n] = positions + 1 + taken
        total = len(of)
        batch.positions[:total] = of_positions
        batch.slots[:total] = _slots(batch, of, of_positions, size, self.stripes)
        batch.seq_start[:n] = starts
        batch.seq_start[n] = total
        batch.sample_index[:total] = batch.counting[:total]
        batch.seq_row[:n] = rows
        if self.adapters is not None:
            batch.loras[:total] = self.adapters.of[of]
        self.cursor[rows] = positions + 1
        batch.follows = self._open is not None
        if batch.follows:
            batch.drawn_at[:n], batch.drawn_at[n:] = self._drawn_at[rows], -1
        return starts

    def _fill_chunk(self, chunk: Row, seq: int, first: int) -> int:
        """A part of a history, at token `first`. Returns the number of tokens so far."""
        batch, size = self.batch, self.block_size
        end = first + chunk.count
        positions = np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int32)
        batch.tokens[first:end] = self.prompts[chunk.row][chunk.start : chunk.start + chunk.count]
        batch.positions[first:end] = positions
        batch.slots[first:end] = _slots(batch, chunk.row, positions, size, self.stripes)
        if self.adapters is not None:
            batch.loras[first:end] = self.adapters.of[chunk.row]
        batch.seq_start[seq] = first
        batch.seq_len[seq] = chunk.start + chunk.count
        batch.seq_row[seq] = chunk.row
        self.cursor[chunk.row] = chunk.start + chunk.count
        return end


def _leave_out(batch: Batch, num_seqs: int, known: dict[int, int]) -> list[int]:
    """Of so many sequences of one token, no logits of these. Returns the logits rows of the others."""
    left = [i for i in range(num_seqs) if i not in known]
    batch.sample_index[: len(left)] = left
    return list(range(len(left)))


def _sample(
    sampler: Sampler, logits: Array, rows: list[int], known: dict[int, int]
) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
    """See `Sampler.sample`. known: tokens by the row's index, of which there are no logits."""
    if not known:
        return sampler.sample(logits, rows)
    left = [row for i, row in enumerate(rows) if i not in known]
    tokens, logprobs, errors = sampler.sample(logits, left) if left else ([], {}, {})
    others = iter(tokens)
    return [known[i] if i in known else next(others) for i in range(len(rows))], logprobs, errors


def _with_room(rows: list[int], room: list[int]) -> tuple[npt.NDArray[np.int64], list[int], list[int]]:
    """Those that have some: as indices, as numbers, and how much."""
    some = [(row, free) for row, free in zip(rows, room, strict=True) if free > 0]
    return np.array([row for row, _ in some], np.int64), [row for row, _ in some], [free for _, free in some]


def _slots(
    batch: Batch, rows: npt.NDArray[np.int64] | int, positions: npt.NDArray[Any], size: int, stripes: Stripes | None
) -> npt.NDArray[np.int64]:
    """Where keys and values of these rows' tokens at these positions go; -1: to another context rank."""
    table, column = batch.block_table, positions // size
    blocks = table.ravel().take(rows * table.shape[1] + column)  # in half the time of two indices
    slots: npt.NDArray[np.int64] = blocks.astype(np.int64)
    if stripes is None:
        slots -= column
        slots *= size
        slots += positions
        return slots
    size //= stripes.size
    slots *= size
    slots += stripes.local(positions) % size
    slots[~stripes.here(positions)] = -1
    return slots


def _prompt_logprobs(
    sampler: Sampler, history: Sequence[int], chunk: Row, k: int, logits: Array, line: int
) -> list[TokenLogprobs]:
    """Of the history's tokens after this chunk's positions, as far as they are the prompt's."""
    targets = history[chunk.start + 1 : chunk.start + chunk.count + 1]
    return sampler.prompt_logprobs(logits[line : line + len(targets)], targets, k)


def _read(step: StepUnderWay | None) -> None:
    if step is not None:
        step.result()


def _told_apart(errors: dict[int, str]) -> tuple[dict[int, str], tuple[int, ...]]:
    """Of a sampler's errors by row: those that are, and the rows that are late."""
    late = tuple(row for row, message in errors.items() if not message)
    return {row: message for row, message in errors.items() if message} if late else errors, late
