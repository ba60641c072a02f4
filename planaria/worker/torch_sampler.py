"""The rows' sampling over logits on a device, which stay there: `sampler.Sampler` by kernels for GPUs, or by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from planaria.protocol import Fresh
from planaria.structured.constraint import Constraint, Constraints
from planaria.types import TokenLogprobs
from planaria.worker import torch_sampling
from planaria.worker.sampler import RowsDrawn, Sampler
from planaria.worker.sampling import BANNED, BROKEN

if TYPE_CHECKING:
    from planaria.kernels.gpu.draw import Drawer

_SAID = {1: BROKEN, 2: BANNED}


class TorchSampler(Sampler):
    """Draws tokens for `max_rows` rows over `vocab_size` tokens. Logits are tensors. drawer: by which tokens are drawn,
    maybe in a recorded step; None: by torch."""

    def __init__(
        self, max_rows: int, vocab_size: int, constraints: Constraints | None = None, drawer: Drawer | None = None
    ) -> None:
        super().__init__(max_rows, vocab_size, plain=True, constraints=constraints)
        self._copies = torch.empty(0, vocab_size)
        self.drawer = drawer
        self._entered = True  # has a request since tokens were drawn last?
        self._changed: set[int] = set()  # rows whose logits may be changed before the choice

    def enter(self, row: int, fresh: Fresh) -> None:
        super().enter(row, fresh)
        state, self._entered = self._rows[row], True
        (self._changed.add if state.edits or state.constraint is not None else self._changed.discard)(row)

    def prepare(self, rows: list[int]) -> None:
        if self.drawer is None:
            return
        self.drawer.rows = None
        if rows and (not self._changed or self._changed.isdisjoint(rows)):
            self._stage(self.drawer, rows)

    def _stage(self, drawer: Drawer, rows: list[int]) -> None:
        settings = self._scales, self._limits, self._top_k, self._top_p, self._seeds, self._positions
        drawer.stage(rows, self._of(rows).at, settings, again=not self._entered)
        self._entered = False

    @torch.inference_mode()
    def _edit(self, logits: Any, changes: dict[int, tuple[Any, ...]]) -> None:
        for i, change in changes.items():
            torch_sampling.edit(logits[i], *change)

    @torch.inference_mode()
    def _bind(
        self, logits: Any, rows: list[int], bound: list[tuple[int, Constraint]]
    ) -> tuple[dict[int, str], dict[int, int]]:
        return super()._bind(logits, rows, bound)

    def _choose(
        self, logits: Any, rows: list[int], states: list[Any], clear: Mapping[int, int] | None = None
    ) -> tuple[list[int], dict[int, str]]:
        if self.drawer is None:
            with torch.inference_mode():
                bits = self._random_bits(rows, states)
                return torch_sampling.choose(logits, [state.params for state in states], bits)
        self._draw(self.drawer, logits, rows)
        drawn, flags = self.drawer.send(len(rows), told=False).read()
        tokens: list[int] = drawn.tolist()
        return tokens, {i: _SAID[flag] for i, flag in flags.items()}

    def _draw(self, drawer: Drawer, logits: Any, rows: list[int]) -> None:
        if not (drawer.drawn and drawer.rows == rows):
            if drawer.rows != rows:
                self._stage(drawer, rows)
            with torch.inference_mode():
                drawer.draw(logits)
        drawer.rows, drawer.drawn = None, False

    def follows(self, rows: list[int]) -> bool:
        return self.drawer is not None and (not self._special or self._special.isdisjoint(rows))

    @property
    def tells(self) -> bool:
        return self.drawer is not None and self.drawer.others is not None

    def sample(
        self, logits: Any, rows: list[int], lines: list[int] | None = None
    ) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
        if lines is not None or not rows or not self.follows(rows):
            return super().sample(logits, rows, lines)
        drawn, errors = self.begin(logits, rows).read()
        tokens: list[int] = drawn.tolist()
        return tokens, {}, errors

    def begin(self, logits: Any, rows: list[int]) -> RowsDrawn:
        assert self.drawer is not None
        logits = self._checked(logits, len(rows))
        at = self._of(rows).at
        self._draw(self.drawer, logits, rows)
        drawn = self.drawer.send(len(rows))
        self._positions[at] += 1

        def read() -> tuple[npt.NDArray[np.int64], dict[int, str]]:
            tokens, flags = drawn.read()
            return tokens, {rows[i]: _SAID[flag] for i, flag in flags.items()}

        return RowsDrawn(drawn.ready, read)

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
