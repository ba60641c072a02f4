"""A rank that meets others as ranks of one device do: tensors go by way of main memory, in steps. On the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from planaria.kernels import reference
from planaria.kernels.ops import Array
from planaria.mesh.boot import open_mesh
from planaria.mesh.staged import StagedComm
from planaria.worker import groups
from planaria.worker.worker import Worker


class StagedOps(reference.TorchOps):
    """Gives groups tensors, as on a device."""

    _stepping = False

    def begin(self, batch: Any, places: Any) -> Any:
        self._stepping = True
        return super().begin(batch, places)

    def settle(self) -> None:
        self._stepping = False

    def _shared(self, x: Any) -> Array:
        return x if self._stepping else super()._shared(x)


class StagedRank(Worker):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        setattr(groups, "open_mesh", partial(_on_devices, open_mesh))  # noqa: B010
        reference.TorchOps = StagedOps  # type: ignore[misc]  # of this process


def _on_devices(own: Any, *args: Any, **named: Any) -> Any:
    mesh = own(*args, **{**named, "collective": "NCCL"})
    assert any(isinstance(group, StagedComm) for group in (mesh.tp, mesh.ep))
    return mesh
