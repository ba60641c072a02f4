"""Products of a model on a CPU by this package's kernels, with weights in the order in which these read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planaria.kernels.cpu.direct import DirectOps, DirectProduct


class PackedWeight(nn.Module):
    """`product` in place of a weight, which code that asks for it gets in its old order, copied."""

    product: DirectProduct
    dtype: torch.dtype

    def __getattr__(self, name: str) -> Any:
        if name != "weight":
            return super().__getattr__(name)
        return torch.from_numpy(self.product.unpacked()).view(self.dtype)


class PackedLinear(PackedWeight, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != self.dtype:
            return F.linear(input, self.weight, self.bias)
        x, product, (rows, columns) = input.contiguous(), self.product, self.product.weight.shape
        out = x.new_empty(*x.shape[:-1], product.columns)
        product(x.data_ptr(), out.data_ptr(), x.numel() // columns)
        return out if product.columns == rows else out[..., :rows]


class PackedEmbedding(PackedWeight, nn.Embedding):
    """Of a weight that a product has, too."""

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = torch.from_numpy(self.product.words)[input >> 4, :, input & 15]
        return found.view(self.dtype)


def packing(net: nn.Module, kernels: DirectOps) -> Iterator[None]:
    """Packs the weights of all linear layers that no other module has but an embedding, one layer at a time."""
    owners: dict[int, list[nn.Module]] = {}
    for module in net.modules():
        for tensor in module.parameters(recurse=False):
            owners.setdefault(tensor.data_ptr(), []).append(module)
    dtype = getattr(torch, kernels.dtype)
    for module in net.modules():
        if type(module) is not nn.Linear or module.weight.dtype != dtype or module.weight.shape[1] % 16:
            continue
        same = owners[module.weight.data_ptr()]
        others = [each for each in same if each is not module]
        if len(same) - len(others) == 1 and all(_looks_up(each, module.weight) for each in others):
            product = kernels.product(_array(module.weight), None if module.bias is None else _array(module.bias))
            for each in same:
                del each.weight
                each.__class__ = PackedLinear if each is module else PackedEmbedding
                vars(each).update(product=product, dtype=dtype)
            yield


def _looks_up(module: nn.Module, weight: Tensor) -> bool:
    """Does it take rows of this weight, as they are?"""
    return type(module) is nn.Embedding and module.max_norm is None and module.weight.shape == weight.shape


def _array(tensor: Tensor) -> Any:
    """bfloat16 as its bits."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
