"""Groups over NCCL: tensors on CUDA devices go from device to device, what is in main memory goes over gloo.

Rule: as for every group, and: an operation on the device is queued on the caller's stream, so the caller meets a
failure when it next uses the group or reads the result; what it read after an abort is worth nothing. NCCL carries
hidden states, sums and logits; drawn tokens are in main memory, so that a stage which runs ahead with its sends doesn't
keep the tokens that it waits for behind them.

NCCL wants a device for each rank and picks its own network interface (NCCL_SOCKET_IFNAME). A rank that doesn't come
within the deadline ends the process: torch's watchdog does that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    Store,
    _register_process_group,
    _unregister_process_group,
)

from planaria.mesh.comm import DEADLINE, Array
from planaria.mesh.gloo import IN_FLIGHT, GlooComm, as_bytes
from planaria.mesh.symmetric import SymmetricSums
from planaria.mesh.symmetric import available as symmetric_available

logger = logging.getLogger("planaria.mesh")


def available() -> bool:
    """Does this torch have NCCL?"""
    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())


class NcclComm(GlooComm):
    """As GlooComm. The caller's current CUDA device is the rank's own, now and in every operation. The host waits for
    nobody when it sends; the device may, for a receiver that is `in_flight` messages behind. custom: few numbers are
    added up by `sums`, where the devices can do that."""

    device = "cuda"
    sums: SymmetricSums | None = None
    _named: ProcessGroup | None = None  # torch's, that is found by its name

    def __init__(
        self, store: Store, name: str, rank: int, members: Sequence[int], *, host: str = "127.0.0.1",
        deadline: float = DEADLINE, in_flight: int = IN_FLIGHT, custom: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(store, f"{name}/main", rank, members, host=host, deadline=deadline, in_flight=in_flight)
        self._on_devices: Any = None
        self._on_devices = self.attempt(lambda: self._open(PrefixStore(f"{name}/device", store), deadline))
        self.sums = self._agreed(PrefixStore(f"{name}/sums", store), f"{name}/sums") if custom else None

    def _open(self, store: Store, deadline: float) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline)
        group = ProcessGroupNCCL(store, self.rank, self.size, options)
        group._set_sequence_number_for_group()
        group.eager_connect_single_device(torch.device(self.device, torch.cuda.current_device()))
        return group

    def _agreed(self, store: Store, name: str) -> SymmetricSums | None:
        """What adds up few numbers, where all ranks have it and it does what it should."""
        if not self._all(symmetric_available()):
            return None
        sums, why = None, ""
        try:
            sums = self._open_sums(store, name)
        except RuntimeError as e:
            why = str(e).splitlines()[0] if str(e) else type(e).__name__
        if self._all(sums is not None) and sums is not None:
            why = sums.refusal()
            if self._all(not why):
                return sums
        logger.info("sums of ranks %s are NCCL's: %s", self.members, why or "another rank refused the other way")
        return None

    def _open_sums(self, store: Store, name: str) -> SymmetricSums:
        made: Any = self._process_group(store)
        made._set_group_name(name)
        _register_process_group(made.group_name, made)
        self._named = made
        return SymmetricSums(name, self.rank, self.size)

    def _all(self, right: bool) -> bool:
        """Is it so on all ranks?"""
        wrong = np.array([not right], np.float32)
        super().all_reduce(wrong)
        return not wrong[0]

    def all_reduce(self, x: Array) -> None:
        if self.sums is None or isinstance(x, np.ndarray) or not self.sums.takes(x):
            super().all_reduce(x)
            return
        sums = self.sums
        self.attempt(lambda: sums.all_reduce(x))

    def gather_columns(self, x: Array, columns: range, size: int) -> Array:
        """Rank 0's is new memory. All ranks' are as wide as the widest: nothing is told, so it can be recorded."""
        tensor = torch.as_tensor(x)
        carrier = self._carrier(tensor)
        if carrier is self._group:
            return super().gather_columns(x, columns, size)
        if size not in self._columns:
            self._columns[size] = self._all_columns(columns)
        bounds = self._columns[size]
        widest = max(map(len, bounds))
        own = torch.nn.functional.pad(tensor, (0, widest - len(columns))).contiguous()
        every = own.new_empty(self.size * len(own), widest)
        self.attempt(lambda: carrier._allgather_base(every, own).wait())
        parts = every.view(self.size, *own.shape)
        return torch.cat([parts[rank, :, : len(part)] for rank, part in enumerate(bounds)], 1)

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
        if self.sums is not None:
            self.sums.release()

    def close(self) -> None:
        super().close()
        if self._named is not None:
            _unregister_process_group(self._named.group_name)
        self._on_devices = self.sums = self._named = None
