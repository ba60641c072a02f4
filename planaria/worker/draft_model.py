"""Drafts by a smaller model that has the same tokens, and by a head on the hidden states of the one that is served.

Keys and values lie in blocks of the same numbers as the rows' own, so there are no books of its own; a position of that
cache is true or not by what was computed there last. A model computes a row from its beginning when it enters, some of
it in each step, and drafts from when that is done. A head computes what the served model does, where that was computed;
what a row found in KV, whoever was there before has left to it.

Either is on the rank that draws tokens alone, or dealt to all tensor ranks of its stage. Then the others are told what
was drawn and who is to draft, and each place's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from planaria.checkpoint import Checkpoint
from planaria.config.options import EngineConfig
from planaria.kernels.numbers import main_memory
from planaria.kernels.ops import Batch, Ops
from planaria.mesh.comm import Comm, Solo
from planaria.mesh.mesh import Mesh
from planaria.models.deal import deal_tensor
from planaria.worker.device import make_ops

TOKENS = 128  # of histories that are computed in one step, beside a token of each row
PENDING = 32  # hidden states of a row that wait until it is to draft, or there are more
Hidden = npt.NDArray[np.float32]  # [n, H]


class DraftPart(NamedTuple):
    """Tokens of a row from a position on; of a head, the hidden states that they are brought together with."""

    row: int
    position: int
    tokens: list[int]
    hidden: Hidden | None = None


class DraftWeights:
    """The model, or this rank's part of it, loaded once for all epochs that have the same."""

    def __init__(self, config: EngineConfig, threads: int, rank: int, size: int) -> None:
        from planaria.layers.build import build
        from planaria.layers.decoder import Model
        from planaria.layers.head import DraftingHead
        from planaria.loader import WeightSource

        assert config.draft is not None and config.speculative is not None
        self.part = rank, size
        self.ops: Ops = make_ops(config, threads)
        self.model: Any = build(
            config.draft.model, WeightSource(msgspec.convert(config.draft.checkpoint, Checkpoint)), self.ops,
            quantization=config.draft.quantization, max_positions=config.scheduler.max_model_len,
            shard=deal_tensor(config.draft.model, size)[rank],
            kind=DraftingHead if config.speculative.method == "eagle" else Model,
        )  # fmt: skip

    def close(self) -> None:
        self.ops.close()


class RankDraft:
    """The model that drafts of one rank, loaded when it is to have a part in that; it stays for all epochs."""

    def __init__(self) -> None:
        self._weights: DraftWeights | None = None

    def of(self, config: EngineConfig, mesh: Mesh, threads: int) -> DraftWeights | None:
        """None: no model drafts, or not on this rank, or a class of the user's does instead."""
        speculative = config.speculative
        if config.draft is None or speculative is None or config.parallel.sd_worker_cls != "auto":
            return None
        shared = speculative.draft_tensor_parallel_size > 1
        drafts = mesh.samples or (shared and mesh.cp.rank < mesh.tp.size)  # with the first share of a step
        if mesh.pp.rank < mesh.pp.size - 1 or not drafts:
            return None
        part = (mesh.tp.rank, mesh.tp.size) if shared else (0, 1)
        if self._weights is not None and self._weights.part != part:  # the layout is another
            self.close()
        self._weights = self._weights or DraftWeights(config, threads, *part)
        return self._weights

    def use_threads(self, threads: int) -> None:
        if self._weights is not None:
            self._weights.ops.use_threads(threads)

    def free(self, *, weights: bool) -> None:
        """Give its KV back, and its weights if that is said."""
        if self._weights is not None:
            self._weights.model.drop_kv()
            if weights:
                self.close()

    def close(self) -> None:
        """Load it anew, should it be wanted again."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None


class DraftModel:
    """A Drafter. whole: the batch of the model that is served, whose block tables are used. tp: the ranks that share
    its layers."""

    def __init__(self, config: EngineConfig, weights: DraftWeights, whole: Batch, num_blocks: int, tp: Comm) -> None:
        self.size = config.cache.block_size
        self.tp: Comm = tp if weights.part[1] > 1 else Solo()
        rows = config.scheduler.max_num_seqs
        weights.ops.join(self.tp)
        weights.model.make_kv(num_blocks, self.size)
        self.whole = whole
        self.batch = Batch(self._most_tokens(config), rows, whole.block_table.shape[1], rows)
        self.batch.block_table = whole.block_table
        self.forward = weights.ops.compile(self._forward_of(weights.model), self.batch)
        self.histories: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}  # row -> positions whose keys and values are of its history
        self.guesses: dict[int, tuple[int, list[int]]] = {}  # row -> position of the first, drafts of the last step
        self._news: list[tuple[int, list[int]]] = []  # drawn since the other ranks were told

    def _most_tokens(self, config: EngineConfig) -> int:
        return TOKENS + config.scheduler.max_num_seqs

    def _forward_of(self, model: Any) -> Any:
        return model.forward

    def enter(self, row: int, tokens: Sequence[int], num_prompt: int) -> None:
        self.histories[row], self.done[row] = list(tokens), 0
        self.guesses.pop(row, None)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See Drafter. Drafts that were right are computed already, but for the last."""
        start, drafts = self.guesses.pop(row, (0, []))
        if drafts:
            right = next((i for i, both in enumerate(zip(drafts, tokens, strict=False)) if both[0] != both[1]), None)
            self.done[row] = start + min(len(drafts) - 1, len(tokens), right if right is not None else len(drafts))
        self.histories[row] += tokens
        if self.tp.size > 1 and self.tp.rank == 0:
            self._news.append((row, list(tokens)))

    def leave(self, row: int) -> None:
        self.histories.pop(row, None)
        self.done.pop(row, None)
        self.guesses.pop(row, None)

    def draft(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """See Drafter. One forward pass for each place."""
        if self.tp.size > 1:
            told = np.frombuffer(msgspec.msgpack.encode((self._news, list(wanted.items()))), np.uint8).copy()
            self.tp.broadcast(np.array([len(told)], np.int64))
            self.tp.broadcast(told)
            self._news = []
        return self._drafts(wanted)

    def follow(self) -> None:
        """See SharedDrafter."""
        length = np.zeros(1, np.int64)
        self.tp.broadcast(length)
        told = np.zeros(int(length[0]), np.uint8)
        self.tp.broadcast(told)
        news, wanted = msgspec.msgpack.decode(
            told.tobytes(), type=tuple[list[tuple[int, list[int]]], list[tuple[int, int]]]
        )
        for row, tokens in news:
            self.extend(row, tokens)
        self._drafts(dict(wanted))

    def _drafts(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        work, ready = self._begun(wanted)
        drafts: dict[int, list[int]] = {row: [] for row in ready}
        while work:
            following = []
            for part, (token, hidden) in zip(work, self._run(work), strict=True):
                row, end = part.row, part.position + len(part.tokens)
                if row not in drafts:
                    continue
                drafts[row].append(token)
                if len(drafts[row]) < wanted[row] and end < self._room(row):
                    following.append(DraftPart(row, end, [token], hidden))
            work = following
        self.guesses.update({row: (len(self.histories[row]), made) for row, made in drafts.items()})
        return drafts

    def _begun(self, wanted: Mapping[int, int]) -> tuple[list[DraftPart], list[int]]:
        """What these rows lack, and those of them that can draft then."""
        work: list[DraftPart] = []
        left = TOKENS
        ready = []
        for row in wanted:
            history, done = self.histories[row], self.done[row]
            count = min(len(history) - done, left + 1, self._room(row) - done)
            if count > 0:
                left -= count - 1
                work.append(DraftPart(row, done, history[done : done + count]))
                self.done[row] = done + count
                if self.done[row] == len(history):
                    ready.append(row)
        return work, ready

    def _room(self, row: int) -> int:
        """Positions in its blocks."""
        return int(self.whole.row_blocks[row]) * self.size

    def _run(self, work: Sequence[DraftPart]) -> list[tuple[int, Hidden | None]]:
        """The likeliest token after each of these, on all ranks, and what a head goes on with."""
        self._fill(work)
        likeliest, hidden = self._made(self.forward())
        if self.tp.size > 1:
            likeliest = np.ascontiguousarray(likeliest, np.int64)
            self.tp.broadcast(likeliest)
        lines = [None] * len(work) if hidden is None else [hidden[i : i + 1].copy() for i in range(len(work))]
        return list(zip(likeliest.tolist(), lines, strict=True))

    def _made(self, made: Any) -> tuple[Any, Hidden | None]:
        return made.argmax(-1), None

    def _fill(self, work: Sequence[DraftPart]) -> None:
        batch, first = self.batch, 0
        for i, (row, position, tokens, hidden) in enumerate(work):
            end = first + len(tokens)
            positions = np.arange(position, position + len(tokens), dtype=np.int32)
            batch.tokens[first:end] = tokens
            batch.positions[first:end] = positions
            if hidden is not None:
                batch.make_hidden(hidden.shape[1])[first:end, : hidden.shape[1]] = hidden
            blocks = batch.block_table[row, positions // self.size].astype(np.int64)
            batch.slots[first:end] = blocks * self.size + positions % self.size
            batch.seq_start[i], batch.seq_len[i], batch.seq_row[i] = first, position + len(tokens), row
            batch.sample_index[i] = end - 1
            first = end
        batch.seq_start[len(work)] = first
        batch.counts[:3] = first, len(work), len(work)

    def close(self) -> None:
        """What is loaded stays for the next epoch."""
        self.histories.clear()


class DraftHead(DraftModel):
    """A Drafter that goes on with hidden states (see layers.head): the head's token at a position is the history's next
    one. Hidden states wait in `pending` (row -> position of the first, and they) until their row drafts, or there are
    many; what it guessed meanwhile is computed anew from what the model made."""

    def __init__(self, config: EngineConfig, weights: DraftWeights, whole: Batch, num_blocks: int, tp: Comm) -> None:
        super().__init__(config, weights, whole, num_blocks, tp)
        self.scale = config.model.logit_scale  # of the hidden states that the model hands out
        self.pending: dict[int, tuple[int, Hidden]] = {}

    def _most_tokens(self, config: EngineConfig) -> int:
        return config.scheduler.max_num_batched_tokens + PENDING * config.scheduler.max_num_seqs

    def _forward_of(self, model: Any) -> Any:
        return model.forward_both

    def _made(self, made: Any) -> tuple[Any, Hidden | None]:
        logits, hidden = made
        return logits.argmax(-1), main_memory(hidden)

    def enter(self, row: int, tokens: Sequence[int], num_prompt: int) -> None:
        super().enter(row, tokens, num_prompt)
        self.pending.pop(row, None)

    def leave(self, row: int) -> None:
        super().leave(row)
        self.pending.pop(row, None)

    def saw(self, hidden: Any) -> None:
        """See ReadsHidden."""
        batch, lines = self.whole, main_memory(hidden)
        for row, first, last in _sequences(batch):
            if row not in self.histories:
                continue
            position, own = int(batch.positions[first]), lines[first:last] / np.float32(self.scale)
            start, before = self.pending.get(row, (position, own[:0]))
            if start <= position <= start + len(before):  # what was made of drafts that were wrong is written over
                start, own = start, np.concatenate([before[: position - start], own])
            else:
                start = position
            self.pending[row] = start, own

    def catch_up(self) -> None:
        """See ReadsHidden."""
        many = [row for row in self.pending if self._known(row) >= PENDING]
        if many:
            self._run([self._taken(row) for row in many])

    def _begun(self, wanted: Mapping[int, int]) -> tuple[list[DraftPart], list[int]]:
        there = [row for row in wanted if row in self.pending and self._known(row) > 0]
        ready = [row for row in there if self._next(row) == len(self.histories[row]) - 1]
        return [self._taken(row) for row in ready], ready

    def _known(self, row: int) -> int:
        """Its hidden states whose next tokens are known."""
        start, lines = self.pending[row]
        return min(len(lines), len(self.histories[row]) - 1 - start, self._room(row) - start)

    def _next(self, row: int) -> int:
        """Position after those."""
        return self.pending[row][0] + self._known(row)

    def _taken(self, row: int) -> DraftPart:
        start, lines = self.pending.pop(row)
        count = min(len(lines), len(self.histories[row]) - 1 - start, self._room(row) - start)
        if count < len(lines):
            self.pending[row] = start + count, lines[count:]
        return DraftPart(row, start, self.histories[row][start + 1 : start + 1 + count], lines[:count])


def _sequences(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Of each of a step: its row, its first token and the one after its last."""
    count = int(batch.counts[1])
    starts = batch.seq_start[: count + 1].tolist()
    return zip(batch.seq_row[:count].tolist(), starts, starts[1:], strict=False)
