"""Back ends that take and give tensors, for tests that compute in torch what they expect of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.kernels import quant, reference
from planaria.kernels.blocks import KINDS
from planaria.kernels.cpu import ops
from planaria.kernels.ops import Quantized


def tensor(array: npt.NDArray[Any]) -> Tensor:
    """Of the same memory; bits of bfloat16 are bfloat16 again."""
    found = torch.from_numpy(array)
    return found.view(torch.bfloat16) if array.dtype == np.uint16 else found


def array(x: Tensor) -> npt.NDArray[Any]:
    """Of the same memory; bfloat16 as its bits."""
    found: npt.NDArray[Any] = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def quantise(values: Tensor, kind: str) -> Quantized:
    return quant.quantise(array(values), kind)


def random_blocks(kind: str, n: int, k: int, *, skip: int = 0, seed: int = 0) -> Quantized:
    """Random codes and scales of a weight [n, k] as a GGUF file packs them. skip: of its first block, cut off."""
    rng, form = np.random.default_rng(seed), KINDS[kind]
    blocks = -(-(skip + k) // form.elements)
    data = rng.integers(0, 256, (n, blocks, form.nbytes), np.uint8)
    scale = (rng.random((n, blocks, 1)) * 0.01 + 0.001) * 8 / 2**form.bits
    places = [form.scale] if form.minimum is None else [form.scale, form.minimum]
    for at, factor in zip(places, (1, 7.3 if form.small else -7.3), strict=False):
        data[..., at : at + 2] = (factor * scale).astype(np.float16).view(np.uint8)
    return Quantized(kind, data.reshape(n, -1), (n, k), skip)


def dequantise(weight: Quantized) -> Tensor:
    return tensor(quant.dequantise(weight))


def given(x: Any) -> Any:
    return array(x.detach()) if isinstance(x, Tensor) else x


class Tensors:
    """A back end whose weights and results are tensors."""

    def pack(self, weight: Tensor | Quantized, bias: Tensor | None = None) -> Any:
        return super().pack(given(weight), given(bias))  # type: ignore[misc]

    def vector(self, values: Tensor) -> Any:
        return super().vector(given(values))  # type: ignore[misc]

    def rope_table(self, cos: Tensor, sin: Tensor) -> Any:
        return super().rope_table(given(cos), given(sin))  # type: ignore[misc]

    def compile(self, forward: Callable[[Any], Any], *args: Any) -> Callable[[], Tensor]:
        run = super().compile(forward, *args)  # type: ignore[misc]
        return lambda: tensor(run())


class CpuOps(Tensors, ops.CpuOps):  # type: ignore[misc]
    pass


class TorchOps(Tensors, reference.TorchOps):  # type: ignore[misc]
    pass
