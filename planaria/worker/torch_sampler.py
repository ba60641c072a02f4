"""The rows' sampling over logits on a device, which stay there: `sampler.Sampler` with the definition in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from planaria.structured.constraint import Constraint, Constraints
from planaria.types import TokenLogprobs
from planaria.worker import torch_sampling
from planaria.worker.sampler import Sampler, random_bits


class TorchSampler(Sampler):
    """Draws tokens for `max_rows` rows over `vocab_size` tokens. Logits are tensors; there are no kernels."""

    def __init__(self, max_rows: int, vocab_size: int, constraints: Constraints | None = None) -> None:
        super().__init__(max_rows, vocab_size, plain=True, constraints=constraints)
        self._copies = torch.empty(0, vocab_size)

    @torch.inference_mode()
    def _edit(self, logits: Any, changes: dict[int, tuple[Any, ...]]) -> None:
        for i, change in changes.items():
            torch_sampling.edit(logits[i], *change)

    @torch.inference_mode()
    def _bind(self, logits: Any, bound: list[tuple[int, Constraint]]) -> dict[int, str]:
        return super()._bind(logits, bound)

    @torch.inference_mode()
    def _choose(self, logits: Any, rows: list[int], states: list[Any]) -> tuple[list[int], dict[int, str]]:
        return torch_sampling.choose(logits, [state.params for state in states], random_bits(states))

    @torch.inference_mode()
    def _logprobs(self, logits: Any, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
        return torch_sampling.raw_logprobs(logits, targets, k)

    @torch.inference_mode()
    def _copy(self, logits: Any, lines: list[int]) -> Any:
        if self._copies.shape[0] < len(lines) or self._copies.device != logits.device:
            self._copies = logits.new_empty((len(lines), self.vocab_size))
        return torch.index_select(logits, 0, torch.tensor(lines, device=logits.device), out=self._copies[: len(lines)])

    def _checked(self, logits: Any, lines: int) -> Any:
        self._check(logits, lines, logits.dtype == torch.float32)
        return logits.contiguous()
