"""Drafts by a smaller model that has the same tokens.

Its keys and values lie in blocks of the same numbers as the rows' own, so it needs no books of its own; a position of
its cache is true or not by what was computed there last. A row is computed from its beginning when it enters, some of
it in each step, and drafts from when that is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from planaria.checkpoint import Checkpoint
from planaria.config.options import EngineConfig
from planaria.kernels.ops import Batch, Ops
from planaria.mesh.mesh import Mesh
from planaria.worker.device import make_ops

TOKENS = 128  # of histories that are computed in one step, beside a token of each row


class DraftWeights:
    """The model, loaded once for all epochs."""

    def __init__(self, config: EngineConfig, threads: int) -> None:
        from planaria.layers.build import build
        from planaria.loader import WeightSource

        assert config.draft is not None
        self.ops: Ops = make_ops(config, threads)
        self.model: Any = build(
            config.draft.model, WeightSource(msgspec.convert(config.draft.checkpoint, Checkpoint)), self.ops,
            quantization=config.draft.quantization, max_positions=config.scheduler.max_model_len,
        )  # fmt: skip

    def close(self) -> None:
        self.ops.close()


class RankDraft:
    """The model that drafts of one rank, loaded when it is to draw tokens; it stays for all epochs."""

    def __init__(self) -> None:
        self._weights: DraftWeights | None = None

    def of(self, config: EngineConfig, mesh: Mesh, threads: int) -> DraftWeights | None:
        """None: no model drafts, or not on this rank, or a class of the user's does instead."""
        if config.draft is None or not mesh.samples or config.parallel.sd_worker_cls != "auto":
            return None
        self._weights = self._weights or DraftWeights(config, threads)
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
    """A Drafter. whole: the batch of the model that is served, whose block tables are used."""

    def __init__(self, config: EngineConfig, weights: DraftWeights, whole: Batch, num_blocks: int) -> None:
        self.size = config.cache.block_size
        rows = config.scheduler.max_num_seqs
        weights.model.make_kv(num_blocks, self.size)
        self.whole = whole
        self.batch = Batch(TOKENS + rows, rows, whole.block_table.shape[1], rows)
        self.batch.block_table = whole.block_table
        self.forward = weights.ops.compile(weights.model.forward, self.batch)
        self.histories: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}  # row -> positions whose keys and values are of its history
        self.guesses: dict[int, tuple[int, list[int]]] = {}  # row -> position of the first, drafts of the last step

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

    def leave(self, row: int) -> None:
        self.histories.pop(row, None)
        self.done.pop(row, None)
        self.guesses.pop(row, None)

    def draft(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """See Drafter. One forward pass for each place."""
        work: list[tuple[int, int, list[int]]] = []  # row, position, tokens
        left = TOKENS
        ready = []
        for row in wanted:
            history, done = self.histories[row], self.done[row]
            room = int(self.whole.row_blocks[row]) * self.size
            count = min(len(history) - done, left + 1, room - done)
            if count > 0:
                left -= count - 1
                work.append((row, done, history[done : done + count]))
                self.done[row] = done + count
                if self.done[row] == len(history):
                    ready.append(row)
        drafts: dict[int, list[int]] = {row: [] for row in ready}
        while work:
            following = []
            for (row, position, tokens), token in zip(work, self._run(work), strict=True):
                if row not in drafts:
                    continue
                drafts[row].append(token)
                end = position + len(tokens)
                if len(drafts[row]) < wanted[row] and end < int(self.whole.row_blocks[row]) * self.size:
                    following.append((row, end, [token]))
            work = following
        self.guesses.update({row: (len(self.histories[row]), made) for row, made in drafts.items()})
        return drafts

    def _run(self, work: Sequence[tuple[int, int, list[int]]]) -> list[int]:
        """The likeliest token after each of these."""
        batch, first = self.batch, 0
        for i, (row, position, tokens) in enumerate(work):
            end = first + len(tokens)
            positions = np.arange(position, position + len(tokens), dtype=np.int32)
            batch.tokens[first:end] = tokens
            batch.positions[first:end] = positions
            blocks = batch.block_table[row, positions // self.size].astype(np.int64)
            batch.slots[first:end] = blocks * self.size + positions % self.size
            batch.seq_start[i], batch.seq_len[i], batch.seq_row[i] = first, position + len(tokens), row
            batch.sample_index[i] = end - 1
            first = end
        batch.seq_start[len(work)] = first
        batch.counts[:3] = first, len(work), len(work)
        likeliest: list[int] = self.forward().argmax(-1).tolist()
        return likeliest

    def close(self) -> None:
        """What is loaded stays for the next epoch."""
        self.histories.clear()
