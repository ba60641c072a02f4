"""Runs a Model step by step with a `Batch` filled by hand: sequences in blocks dealt in shuffled order."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planaria.kernels.ops import Batch


class Driver:
    """Sequences by number; `step` feeds each some tokens and returns the logits of all of them."""

    def __init__(self, model: Any, ops: Any, *, block_size: int = 4, num_blocks: int = 256, seed: int = 0) -> None:
        self.block_size = block_size
        self.batch = Batch(max_tokens=512, max_seqs=16, max_blocks=num_blocks, max_samples=512)
        model.make_kv(num_blocks, block_size)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.lengths: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.adapters: dict[int, int] = {}  # slots of sequences that have one
        self.run = ops.compile(model.forward, self.batch)

    def step(self, feed: dict[int, list[int]], *, wanted: list[int] | None = None) -> dict[int, Tensor]:
        """Logits [tokens, vocabulary] of each sequence's tokens; `wanted`: sequences they are asked for."""
        b, at, samples = self.batch, 0, list[int]()
        for i, (sequence, tokens) in enumerate(feed.items()):
            start = self.lengths.get(sequence, 0)
            end = start + len(tokens)
            blocks = self.blocks.setdefault(sequence, [])
            while len(blocks) * self.block_size < end:
                blocks.append(self.free.pop())
            positions = np.arange(start, end)
            span = slice(at, at + len(tokens))
            b.tokens[span], b.positions[span] = tokens, positions
            b.slots[span] = np.array(blocks)[positions // self.block_size] * self.block_size
            b.slots[span] += positions % self.block_size
            b.loras[span] = self.adapters.get(sequence, -1)
            b.seq_start[i : i + 2] = at, at + len(tokens)
            b.seq_len[i], b.seq_row[i] = end, sequence
            b.block_table[sequence, : len(blocks)] = blocks
            if wanted is None or sequence in wanted:
                samples += range(at, at + len(tokens))
            self.lengths[sequence], at = end, at + len(tokens)
        b.counts[:3], b.adapted = (at, len(feed), len(samples)), bool((b.loras[:at] >= 0).any())
        b.sample_index[: len(samples)] = samples
        logits = torch.as_tensor(self.run()).clone().float().cpu()
        sizes = [len(t) for s, t in feed.items() if wanted is None or s in wanted]
        named = [s for s in feed if wanted is None or s in wanted]
        return dict(zip(named, logits.split(sizes), strict=True)) if sizes else {-1: logits}

    def whole(self, sequence: int, tokens: list[int], chunk: int = 512) -> Tensor:
        """Logits of a whole text, fed in chunks."""
        parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return torch.cat([self.step({sequence: part})[sequence] for part in parts])
