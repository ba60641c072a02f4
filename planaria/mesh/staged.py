"""A group that takes tensors on devices by way of main memory: what there is where two ranks compute on one device, and
for groups that no library of devices carries.

Rule: as of the group that it is made of. A step that meets others in it can't be recorded: its sums are the host's.
"""

from __future__ import annotations

from typing import Any

import torch

from planaria.mesh.comm import Array, Comm


class StagedComm:
    """base: in main memory. With an array there it does what that one does."""

    device = "cpu"

    def __init__(self, base: Comm) -> None:
        self.base = base
        self.rank, self.size, self.members, self.port = base.rank, base.size, base.members, 0

    def all_reduce(self, x: Array) -> None:
        here = _here(x)
        self.base.all_reduce(here)
        _put(here, x)

    def gather_columns(self, x: Array, columns: range, size: int) -> Array:
        out = self.base.gather_columns(_here(x), columns, size)
        return torch.from_numpy(out).to(x.device) if isinstance(x, torch.Tensor) else out

    def send(self, x: Array, to: int) -> None:
        self.base.send(_here(x), to)

    def receive(self, x: Array, source: int) -> None:
        into = _room(x)
        self.base.receive(into, source)
        _put(into, x)

    def broadcast(self, x: Array, source: int = 0) -> None:
        here = _here(x) if self.rank == source else _room(x)
        self.base.broadcast(here, source)
        if self.rank != source:
            _put(here, x)

    def abort(self, reason: str) -> None:
        self.base.abort(reason)

    def close(self) -> None:
        self.base.close()


def _bits(x: torch.Tensor) -> torch.Tensor:
    """NumPy has no bfloat16."""
    return x.view(torch.uint16) if x.dtype == torch.bfloat16 else x


def _here(x: Array) -> Any:
    return _bits(x).to("cpu", copy=True).numpy() if isinstance(x, torch.Tensor) else x


def _room(x: Array) -> Any:
    """Where what comes for `x` may go."""
    return torch.empty(x.shape, dtype=_bits(x).dtype).numpy() if isinstance(x, torch.Tensor) else x


def _put(here: Any, x: Array) -> None:
    if isinstance(x, torch.Tensor):
        _bits(x).copy_(torch.from_numpy(here))
