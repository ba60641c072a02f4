"""Groups over NCCL: tensors on CUDA devices go from device to device, what is in main memory goes over gloo.

Rule: as for every group, and: an operation on the device is queued on the caller's stream, so the caller meets a
failure when it next uses the group or reads the result; what it read after an abort is worth nothing. NCCL carries
hidden states, sums and logits; drawn tokens are in main memory, so that a stage which runs ahead with its sends doesn't
keep the tokens that it waits for behind them.

NCCL wants a device for each rank and picks its own network interface (NCCL_SOCKET_IFNAME). A rank that doesn't come
within the deadline ends the process: torch's watchdog does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroup, Store

from planaria.mesh.comm import DEADLINE, Array
from planaria.mesh.gloo import IN_FLIGHT, GlooComm, as_bytes


def available() -> bool:
    """Does this torch have NCCL?"""
    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())


class NcclComm(GlooComm):
    """As GlooComm. The caller's current CUDA device is the rank's own, now and in every operation. The host waits for
    nobody when it sends; the device may, for a receiver that is `in_flight` messages behind."""

    device = "cuda"

    def __init__(
        self, store: Store, name: str, rank: int, members: Sequence[int], *, host: str = "127.0.0.1",
        deadline: float = DEADLINE, in_flight: int = IN_FLIGHT,
    ) -> None:  # fmt: skip
        super().__init__(store, f"{name}/main", rank, members, host=host, deadline=deadline, in_flight=in_flight)
        self._on_devices: Any = None
        self._on_devices = self.attempt(lambda: self._open(PrefixStore(f"{name}/device", store), deadline))

    def _open(self, store: Store, deadline: float) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline)
        group = ProcessGroupNCCL(store, self.rank, self.size, options)
        group._set_sequence_number_for_group()
        group.eager_connect_single_device(torch.device(self.device, torch.cuda.current_device()))
        return group

    def _backends(self) -> list[tuple[str, Any, Any]]:
        return [*super()._backends(), (self.device, ProcessGroup.BackendType.NCCL, self._on_devices)]

    def _carrier(self, x: torch.Tensor) -> Any:
        return self._on_devices if x.device.type == torch.device(self.device).type else self._group

    def broadcast(self, x: Array, source: int = 0) -> None:
        data = as_bytes(x)
        carrier = self._carrier(data)
        if carrier is self._group:
            super().broadcast(x, source)
            return
        options = BroadcastOptions()
        options.rootRank = source
        self.attempt(lambda: carrier.broadcast([data], options).wait())

    def abort(self, reason: str) -> None:
        super().abort(reason)
        if self._on_devices is not None:
            self._on_devices.abort()

    def close(self) -> None:
        super().close()
        self._on_devices = None
