"""Groups over NCCL: tensors on CUDA devices go from device to device, what is in main memory goes over gloo.

Rule: as for every group, and: an operation on the device is queued on the caller's stream, so the caller meets a
failure when it next uses the group or reads the result; what it read after an abort is worth nothing. NCCL carries
hidden states, sums and logits; drawn tokens are in main memory, so that a stage which runs ahead with its sends doesn't
keep the tokens that it waits for behind them.

NCCL wants a device for each rank and picks its own network interface (NCCL_SOCKET_IFNAME). A rank that doesn't come
within the deadline ends the process: torch's watchdog does that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store

from planaria.mesh.comm import DEADLINE, flat
from planaria.mesh.gloo import IN_FLIGHT, GlooComm


def available() -> bool:
    """Does this torch have NCCL?"""
    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())


class NcclComm:
    """As GlooComm. The caller's current CUDA device is the rank's own, now and in every operation."""

    device = "cuda"

    def __init__(
        self, store: Store, name: str, rank: int, members: Sequence[int], *, host: str = "127.0.0.1",
        deadline: float = DEADLINE, in_flight: int = IN_FLIGHT,
    ) -> None:  # fmt: skip
        self.in_flight = in_flight
        self.rank, self.size, self.members, self.port = rank, len(members), tuple(members), 0
        self.main = GlooComm(store, f"{name}/main", rank, members, host=host, deadline=deadline)
        self._columns: dict[int, list[range]] = {}  # of all ranks, by the width of the whole
        self._sent: deque[tuple[Any, torch.Tensor, int]] = deque()
        self._group: Any = self.main.attempt(lambda: self._open(PrefixStore(f"{name}/device", store), deadline))

    def _open(self, store: Store, deadline: float) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline)
        group = ProcessGroupNCCL(store, self.rank, self.size, options)
        group._set_sequence_number_for_group()
        group.eager_connect_single_device(torch.device(self.device, torch.cuda.current_device()))
        return group

    def _on_device(self, x: torch.Tensor) -> bool:
        return x.device.type == torch.device(self.device).type

    def all_reduce(self, x: torch.Tensor) -> None:
        if self._on_device(x):
            self.main.attempt(lambda: self._group.allreduce([x]).wait())
        else:
            self.main.all_reduce(x)

    def gather_columns(self, x: torch.Tensor, columns: range, size: int) -> torch.Tensor:
        if not self._on_device(x):
            return self.main.gather_columns(x, columns, size)
        out = torch.empty(x.shape[0], size, device=x.device)
        if size not in self._columns:
            self._columns[size] = self._all_columns(columns)
        if self.rank:
            self.send(x.contiguous(), 0)
            return out
        for rank, part in enumerate(self._columns[size]):
            if rank == 0:
                out[:, part.start : part.stop] = x
            else:
                found = torch.empty(x.shape[0], len(part), device=x.device)
                self.receive(found, rank)
                out[:, part.start : part.stop] = found
        return out

    def _all_columns(self, own: range) -> list[range]:
        """Each rank's, on rank 0; once for a matrix, since they don't change."""
        bounds = torch.tensor([own.start, own.stop])
        if self.rank:
            self.main.send(bounds, 0)
            return []
        found = [own]
        for rank in range(1, self.size):
            self.main.receive(bounds, rank)
            found.append(range(*bounds.tolist()))
        return found

    def send(self, x: torch.Tensor, to: int) -> None:
        """The host waits for nobody; the device may, for a receiver that is `in_flight` messages behind."""
        if not self._on_device(x):
            self.main.send(x, to)
            return
        if x.numel() == 0:
            return
        copy = flat(x).clone()
        self._sent.append((self.main.attempt(lambda: self._group.send([copy], to, 0), to), copy, to))
        while len(self._sent) > self.in_flight:
            work, _, whose = self._sent.popleft()
            self.main.attempt(work.wait, whose)

    def receive(self, x: torch.Tensor, source: int) -> None:
        if not self._on_device(x):
            self.main.receive(x, source)
        elif x.numel():
            self.main.attempt(lambda: self._group.recv([flat(x)], source, 0).wait(), source)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        if not self._on_device(x):
            self.main.broadcast(x, source)
            return
        options = BroadcastOptions()
        options.rootRank = source
        self.main.attempt(lambda: self._group.broadcast([x], options).wait())

    def abort(self, reason: str) -> None:
        self.main.abort(reason)
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """What was sent and nobody has received is dropped. Idempotent."""
        self.abort("the group is closed")
        self.main.close()
        self._sent.clear()
        self._group = None
