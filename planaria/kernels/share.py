"""What one rank computes of a step whose tokens are dealt to several (prefill context ranks, docs/adr/0053)."""

from __future__ import annotations

from planaria.kernels.ops import Batch


class BatchShare(Batch):
    """Share number `rank` of `size`: a step's T tokens from ceil(T * rank / size) on. Its own are `tokens`,
    `positions` and `loras`; of sequences, where tokens go and which are wanted it has all that `step` has. Samples are
    of who has the first share."""

    def __init__(self, step: Batch, rank: int, size: int) -> None:
        super().__init__(-(-step.max_tokens // size), step.max_seqs, 0, step.max_samples)
        self.step, self.rank, self.size = step, rank, size
        for name in ("slots", "seq_start", "seq_len", "seq_row", "block_table", "row_blocks", "sample_index"):
            setattr(self, name, getattr(step, name))

    def bounds(self) -> list[int]:
        """Where each share of the step begins, and the last one ends."""
        tokens = int(self.step.counts[0])
        return [-(-tokens * at // self.size) for at in range(self.size + 1)]

    def deal(self) -> int:
        return self.take(*self.bounds()[self.rank : self.rank + 2])

    def take(self, first: int, last: int) -> int:
        """Have these tokens of the step as one's share. How many there are."""
        step = self.step
        tokens, sequences, samples = map(int, step.counts[:3])
        for name in ("tokens", "positions", "loras"):
            getattr(self, name)[: last - first] = getattr(step, name)[first:last]
        self.counts[:3] = last - first, sequences, 0 if self.rank else samples
        self.counts[4:7] = tokens, samples, first
        self.adapted, self.prefill = step.adapted, step.prefill
        return last - first
