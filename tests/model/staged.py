"""Ranks that meet others as ranks of one device do: tensors go by way of main memory, in steps. On the CPU."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from planaria.kernels import reference
from planaria.kernels.ops import Array
from planaria.mesh.boot import open_mesh
from planaria.mesh.staged import StagedComm
from planaria.worker import groups
from planaria.worker.worker import Worker


def staged(own: Any) -> Any:
    """Such operations as give groups tensors, as on a device."""

    class Staged(own):  # type: ignore[misc]
        stepping = False

        def compile(self, *args: Any, **named: Any) -> Any:
            run = super().compile(*args, **named)

            def step() -> Any:
                Staged.stepping = True
                try:
                    found = run()
                finally:
                    Staged.stepping = False
                return tuple(map(self._shared, found)) if isinstance(found, tuple) else self._shared(found)

            return step

        def _shared(self, x: Any) -> Array:
            return x if Staged.stepping else super()._shared(x)

    return Staged


class StagedRank(Worker):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        setattr(groups, "open_mesh", partial(_on_devices, open_mesh))  # noqa: B010
        reference.TorchOps = staged(self.operations())  # type: ignore[misc]  # of this process

    def operations(self) -> Any:
        return reference.TorchOps


class InterpretedRank(StagedRank):
    """With kernels for GPUs, which Triton's interpreter carries out."""

    def operations(self) -> Any:
        os.environ["TRITON_INTERPRET"] = "1"
        from planaria.kernels.gpu.ops import GpuOps

        return GpuOps


def _on_devices(own: Any, *args: Any, **named: Any) -> Any:
    mesh = own(*args, **{**named, "collective": "NCCL"})
    assert any(isinstance(group, StagedComm) for group in (mesh.cp, mesh.ep))
    return mesh
