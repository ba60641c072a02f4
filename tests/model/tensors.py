"""Back ends that take and give tensors, for tests that compute in torch what they expect of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.kernels import reference
from planaria.kernels.cpu import ops


def tensor(array: npt.NDArray[Any]) -> Tensor:
    """Of the same memory; bits of bfloat16 are bfloat16 again."""
    found = torch.from_numpy(array)
    return found.view(torch.bfloat16) if array.dtype == np.uint16 else found


def array(x: Tensor) -> npt.NDArray[Any]:
    """Of the same memory; bfloat16 as its bits."""
    found: npt.NDArray[Any] = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


class Tensors:
    """A back end's results as tensors."""

    def compile(self, forward: Callable[[Any], Any], *args: Any) -> Callable[[], Tensor]:
        run = super().compile(forward, *args)  # type: ignore[misc]
        return lambda: tensor(run())


class CpuOps(Tensors, ops.CpuOps):  # type: ignore[misc]
    pass


class TorchOps(Tensors, reference.TorchOps):
    pass
