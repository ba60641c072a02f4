"""Sums of few numbers between devices that reach each other's memory, by torch's symmetric memory: one kernel reads all
ranks' parts, where NCCL's hands them on. Not run on hardware.

Rule: every rank adds in the order of ranks, so all get the same bits. Kernels of ranks wait for each other's signals,
each 0 or 1, in memory that all of them write: a put waits until it is 0, a wait until it is 1. Whoever gives up writes
what its own kernels wait for, until they are through; what was summed then is worth nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 512 << 10  # bytes; with more NCCL is as fast
TRIAL = 5.0  # seconds
RELEASE = 2.0


def available() -> bool:
    """Has this torch such sums for a device?"""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("symm_mem::one_shot_all_reduce_out", "CUDA"))


class SymmetricSums:
    """Of a group, on the current device; all ranks make theirs together. name: by which torch finds its process group,
    where the ranks meet. Raises RuntimeError: there is none here."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.buffer, self.signals = self._open()  # own part; of each rank int32 [blocks, ranks]

    def _open(self) -> tuple[Tensor, list[Tensor]]:
        from torch._C._distributed_c10d import _SymmetricMemory

        self._device = torch.device("cuda", torch.cuda.current_device())
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        buffer = _SymmetricMemory.empty_strided_p2p((MOST // 4,), (1,), torch.float32, self._device, self.name)
        memory = _SymmetricMemory.rendezvous(buffer, self.name)
        shape = memory.signal_pad_size // 4 // self.size, self.size
        return buffer, [memory.get_signal_pad(rank, shape, torch.int32) for rank in range(self.size)]

    def takes(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 and 0 < x.numel() <= len(self.buffer) and x.numel() % 4 == 0

    def all_reduce(self, x: Tensor) -> None:
        """See Comm. Queued, as everything on a device."""
        there = self.buffer[: x.numel()].view(x.shape)
        there.copy_(x)
        self._sum(there, x)

    def _sum(self, there: Tensor, out: Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(there, "sum", self.name, out)

    def refusal(self) -> str:
        """What a trial says against it; empty: it gives what it should."""
        x = torch.arange(self.rank, self.rank + 64, dtype=torch.float32, device=self.buffer.device)
        wanted = torch.arange(64, dtype=torch.float32) * self.size + self.size * (self.size - 1) // 2
        self.all_reduce(x)
        done, until = self._queued(), time.monotonic() + TRIAL
        while not done():
            if time.monotonic() > until:
                self.release()
                return f"a trial did not end in {TRIAL:.0f} s"
            time.sleep(0.001)
        return "" if torch.equal(x.cpu(), wanted) else "a trial gave another sum"

    def _queued(self) -> Callable[[], bool]:
        """Is all that was queued so far done?"""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))
        return event.query

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def release(self) -> None:
        """End what this rank's device waits for, from any thread."""
        done, until = self._queued(), time.monotonic() + RELEASE
        others = [rank for rank in range(self.size) if rank != self.rank]
        while not done() and time.monotonic() < until:
            with self._beside():
                for other in others:
                    self.signals[self.rank][:, other].fill_(1)
                    self.signals[other][:, self.rank].zero_()
