"""A source that has every tensor it is asked to expect, at random: a model of any configuration without a file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from planaria.kernels.ops import Quantized
from planaria.kernels.quant import quantise


class RandomSource:
    """Float32 arrays drawn by name; `kind` packs the matrices."""

    def __init__(self, kind: str | None = None) -> None:
        self.kind = kind
        self.tensors: dict[str, npt.NDArray[np.float32] | Quantized] = {}

    def names(self) -> list[str]:
        return list(self.tensors)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self.tensors:
            assert self.tensors[name].shape == shape
            return
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        noise: npt.NDArray[np.float32] = torch.randn(shape, generator=generator).numpy()
        if len(shape) == 1:
            self.tensors[name] = np.float32(1) + 0.2 * noise if "norm" in name else 0.3 * noise
        else:
            matrix = 1.5 * noise / shape[-1] ** 0.5
            self.tensors[name] = matrix if self.kind is None else quantise(matrix, self.kind)

    def get(self, name: str, **options: Any) -> npt.NDArray[np.float32] | Quantized:
        assert not any(options.get(part) for part in ("rows", "cols"))
        return self.tensors[name]

    def forget(self, name: str) -> None:
        pass
