"""The choice of tokens on a device, without a wait: the definition is `planaria.worker.sampling`, to the bit.

Rule: what is recorded reads each line's settings at addresses that stay, and leaves its token at one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.kernels.gpu.fused import power
from planaria.kernels.gpu.step import until

BLOCK = 4096  # logits of a program
FOLLOWED = 256  # tokens of one
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}


class Others(Protocol):
    """Ranks of a group on devices, of which the first draws."""

    def broadcast(self, x: Tensor) -> None:
        """See Comm."""

    def check(self) -> None:
        """Raise CollectiveAborted if it was aborted."""


class DrawnTokens:
    """Of a step, on their way to the host. host: [2, lines], tokens and flags, int64. others: ranks that got them."""

    def __init__(
        self, host: npt.NDArray[np.int64], lines: int, came: Any, others: Others | None = None
    ) -> None:  # fmt: skip
        self._host, self._lines, self._came, self._others = host, lines, came, others

    def ready(self) -> bool:
        """Would `read` not wait?"""
        return self._came is None or bool(self._came.query())

    def read(self) -> tuple[npt.NDArray[np.int64], dict[int, int]]:
        """Tokens, and flags of lines that have one (see `pick`): the one wait of a step. They stay until two more steps
        were sent. Raises CollectiveAborted: the wait ended with the group, and they are worth nothing."""
        if self._came is not None:
            self._came.synchronize()
        if self._others is not None:
            self._others.check()
        tokens = self._host[0, : self._lines]
        flags = self._host[1, : self._lines]
        return tokens, {i: int(flags[i]) for i in np.flatnonzero(flags).tolist()} if flags.any() else {}


class Drawer:
    """For up to `lines` lines of `size` logits. rows: whose settings are staged, in order of lines; None: nobody's.
    drawn: has a recording drawn for them? others: whose devices get what the first one's drew; None: nobody's."""

    def __init__(self, lines: int, size: int, device: torch.device, others: Others | None = None) -> None:
        self.lines, self.size, self.device, self.others = lines, size, device, others
        self.rows: list[int] | None = None
        self._last: list[int] | None = None  # that were staged last
        self.drawn = self.cuts = False
        pinned = device.type == "cuda"
        self._host = torch.zeros(6, lines, dtype=torch.int64, pin_memory=pinned)
        self._here = torch.zeros(6, lines, dtype=torch.int64, device=device)
        self._out = torch.zeros(2, lines, dtype=torch.int64, device=device)
        backs = [torch.zeros(2, lines, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._backs = [(each, each.numpy()) for each in backs]
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        whole: Any = self._host.numpy()
        self._into = [
            whole[0].view(np.float64),
            whole[1].view(np.float64),
            whole[2],
            whole[3].view(np.float64),
            *whole[4:],
        ]

    def spare(self) -> Drawer:
        """Another of its kind, for a trial."""
        return Drawer(self.lines, self.size, self.device)

    def stage(
        self, rows: list[int], at: npt.NDArray[np.int64], tables: Sequence[npt.NDArray[Any]], *, again: bool = False
    ) -> None:
        """at: the rows; tables, by row: scales, limits, top_k, top_p, seeds, positions (see `Sampler`). again: nobody
        entered since the last time, so that the same rows have other positions only."""
        until(self._copied)  # of the step before, which may not have begun
        if not again or rows != self._last:
            for into, table in zip(self._into, tables[:5], strict=False):
                into[: len(rows)] = table[at] if table.dtype != np.uint64 else table[at].view(np.int64)
            self.cuts = bool((tables[2][at] > 0).any() or (tables[3][at] < 1.0).any())
        np.take(tables[5], at, out=self._into[5][: len(rows)], mode="clip")  # else it goes by way of a copy
        self.rows, self._last, self.drawn = rows, rows, False
        self._here.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def follow(self, tokens: Tensor, drawn_at: Tensor) -> None:
        """Put into int32 [T] tokens what lines `drawn_at` drew last, where these are not below 0. Waits for nothing."""
        from planaria.kernels.gpu.draw_kernels import follow

        if len(tokens):
            follow[(-(-len(tokens) // FOLLOWED),)](tokens, drawn_at, self._out, len(tokens), block=FOLLOWED)

    def draw(self, logits: Tensor, *, cuts: bool | None = None) -> None:
        """Of float32 logits [S, size], contiguous, line i of the i-th staged row. cuts: as in a recording for such.
        Waits for nothing."""
        from planaria.kernels.gpu.draw_kernels import masses, pick, tops

        lines, size = len(logits), self.size
        blocks, device = -(-size // BLOCK), logits.device
        sizes: dict[str, Any] = {"block": min(BLOCK, power(size)), "blocks_p": power(blocks)}
        block, own = sizes["block"], self._here[:, :lines]
        scales, limits = own[0].view(torch.float64).float(), own[1].view(torch.float64).float()
        top = torch.empty(lines, blocks, device=device)
        tops[lines, blocks](logits, top, size, block=block)
        least, last = torch.full_like(scales, -math.inf), torch.full_like(own[2], size)
        if self.cuts if cuts is None else cuts:
            least, last = self._cut(logits, top, scales, limits, own, sizes)
        mass = torch.empty(lines, blocks, dtype=torch.int64, device=device)
        settings = scales, limits, least, last
        masses[lines, blocks](logits, top, *settings, mass, size, blocks, **sizes, **_EXACT)
        pick[(lines,)](
            logits, top, mass, *settings, own[4], own[5], self._out, size, blocks, self.lines, **sizes, **_EXACT
        )  # fmt: skip

    def _cut(
        self, logits: Tensor, top: Tensor, scales: Tensor, limits: Tensor, own: Tensor, sizes: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """By top_k, then top_p: of each line the last logit that is kept, and the last id of its equals."""
        from planaria.kernels.gpu.draw_kernels import weights

        lines, size, blocks = len(logits), self.size, top.shape[1]
        w = torch.empty(lines, size, dtype=torch.int64, device=logits.device)
        weights[lines, blocks](logits, top, scales, limits, w, size, blocks, **sizes, **_EXACT)
        order = (logits + 0.0).sort(dim=-1, descending=True, stable=True).indices
        ranked, k = w.gather(-1, order), own[2][:, None]
        within = torch.arange(size, device=logits.device) < torch.where(k > 0, k, size)
        ranked = torch.where(within, ranked, 0)
        mass, share = ranked.cumsum(-1), own[3].view(torch.float64)[:, None]
        total = mass[:, -1:]
        goal = torch.where(share < 1.0, (share * total.double()).ceil().to(torch.int64), total)
        kept = within & (mass - ranked < goal)
        last = order.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))
        return logits.gather(-1, last)[:, 0], last[:, 0].contiguous()

    def send(self, lines: int, *, told: bool = True) -> DrawnTokens:
        """What so many lines drew, on its way, and, unless it isn't `told`, to the others' devices: all ranks call it
        together. Of two steps at most nobody has read it."""
        others = self.others if told else None
        if others is not None:
            others.broadcast(self._out)
        back, host = self._backs[0]
        self._backs.reverse()
        back.copy_(self._out, non_blocking=True)
        came = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if came is not None:
            came.record()
        return DrawnTokens(host, lines, came, others)
