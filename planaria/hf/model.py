"""A decoder that Transformers' own code computes, as a rank's model: see `planaria.layers.decoder.Model`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from planaria.checkpoint import Checkpoint
from planaria.errors import ModelError
from planaria.hf.attention import NAME, PagedAttention, register
from planaria.hf.cut import cut, divided, plan_of
from planaria.hf.look import configured, made
from planaria.hf.packed import packing
from planaria.kernels.cpu.direct import DirectOps
from planaria.kernels.reference import TorchOps
from planaria.layers.weights import Packings
from planaria.models.config import AttendingLayer, Foreign, ModelConfig
from planaria.models.shard import Shard


class TransformersModel:
    """`net` is Transformers' model, `foreign` what was found of it before. ranks: which tensor rank of how many."""

    def __init__(
        self, config: ModelConfig, net: Any, foreign: Foreign, shard: Shard, ops: TorchOps, ranks: tuple[int, int]
    ) -> None:
        self.config, self.net, self.shard, self._ops = config, net, shard, ops
        self.shapes = self._cut(foreign.layers, *ranks) if ranks[1] > 1 else foreign.layers
        self.layers = [PagedAttention(shape) for shape in self.shapes]
        self.kernels = DirectOps(str(ops.dtype).removeprefix("torch.")) if ops.device.type == "cpu" else None
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            net.get_submodule(shape.module).paged = layer
        self.blocks: Sequence[Any] = ()  # of experts that are dealt whole
        self.to_pack: Iterator[None] = iter(())  # a layer before each step
        tensors = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def _cut(self, layers: tuple[AttendingLayer, ...], rank: int, ranks: int) -> tuple[AttendingLayer, ...]:
        plan = plan_of(self.net)
        cut(self.net, plan, rank, ranks, self._ops.add_up)
        return tuple(
            structs.replace(layer, heads=layer.heads // ranks) if divided(layer.module, plan) else layer
            for layer in layers
        )

    def forward(self, ops: TorchOps) -> Tensor:
        """Logits [S, vocabulary] float32, or where the model has none, and on ranks that draw nothing, the hidden
        states [S, H]."""
        if not self.config.has_logits or self._ops.tp.rank:
            return self._hidden(ops)[ops.step.sample_index]
        return self._logits(ops, ops.step.sample_index)[0].float()

    def forward_both(self, ops: TorchOps) -> tuple[Tensor, Tensor]:
        """Logits, and the hidden states they are made of, [S, H]."""
        logits, hidden = self.forward_all(ops)
        return logits, hidden[ops.step.sample_index]

    def forward_all(self, ops: TorchOps) -> tuple[Tensor, Tensor]:
        """Logits, and the hidden states of all tokens, [T, H]."""
        found: list[Tensor] = []
        hook = self.net.base_model.register_forward_hook(lambda module, given, out: found.append(out[0]))
        try:
            logits = self.forward(ops)
        finally:
            hook.remove()
        return logits, found[0][0]

    def _hidden(self, ops: TorchOps) -> Tensor:
        """[T, H]."""
        hidden: Tensor = self.net.base_model(**self._inputs(ops))[0][0]
        return hidden

    def _logits(self, ops: TorchOps, wanted: Tensor) -> Tensor:
        logits: Tensor = self.net(**self._inputs(ops), logits_to_keep=wanted).logits
        return logits

    def _inputs(self, ops: TorchOps) -> dict[str, Any]:
        next(self.to_pack, None)
        if self.kernels is not None:
            self.kernels.use_threads(torch.get_num_threads())
        for layer in self.layers:
            layer.step = ops.step
        tokens = ops.step.tokens[None]
        return {
            "input_ids": tokens, "position_ids": ops.step.positions[None], "attention_mask": torch.ones_like(tokens),
            "use_cache": False,
        }  # fmt: skip

    def make_kv(self, num_blocks: int, block_size: int) -> None:
        """Give every layer a cache of `num_blocks` blocks of `block_size` tokens; an earlier one goes."""
        for layer in self.layers:
            layer.make_kv(self._ops, self.kernels, num_blocks, block_size)

    def kv_blocks(self) -> list[npt.NDArray[np.uint8]]:
        """The caches' memory on a CPU: of each one [blocks, bytes]."""
        return [cache for layer in self.layers for cache in layer.kv.blocks()]

    def drop_kv(self) -> None:
        """Let the caches' memory go; there is no step until `make_kv`."""
        for layer in self.layers:
            layer.drop_kv()

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        return sum(self._ops.kv_block_bytes(block_size, shape.heads, shape.width) for shape in self.shapes)


def read(
    config: ModelConfig, checkpoint: Checkpoint, ops: TorchOps, shard: Shard, ranks: tuple[int, int] = (0, 1),
    packings: Packings | None = None,
) -> TransformersModel:  # fmt: skip
    """ranks: see there. packings: of its tensors, if they are shared; where they are there already nothing is read, and
    its layers are packed one by one in the steps that follow. Raises ModelError where tensors are missing or of another
    shape, PartDiffers."""
    assert config.foreign is not None
    if packings is not None and packings.whole:
        net = made(configured(checkpoint.config), ops.dtype).train(False)
    else:
        net = _loaded(checkpoint, ops)
    model = TransformersModel(config, net, config.foreign, shard, ops, ranks)
    if packings is not None:
        _share(net, packings)
    if model.kernels is not None and (packings is None or packings.whole):
        model.to_pack = packing(net, model.kernels)
    if packings is None:
        deque(model.to_pack, maxlen=0)
    return model


def _share(net: Any, packings: Packings) -> None:
    """Put each tensor where others have it, too, or find it there; also what is neither parameter nor buffer."""
    where: dict[int, tuple[str, Tensor, list[tuple[dict[str, Any], str]]]] = {}
    for name, module in net.named_modules():
        for kept in (module._parameters, module._buffers, vars(module)):
            for key, value in kept.items():
                if isinstance(value, Tensor):
                    where.setdefault(id(value), (f"{name}.{key}", value, []))[2].append((kept, key))
    for own in list(where):
        name, tensor, places = where.pop(own)  # and with it what was read
        there, _ = packings.thing(f"{name} {tuple(tensor.shape)}", partial(_itself, tensor))
        if isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, requires_grad=False)
        for kept, key in places:
            kept[key] = there


def _itself(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor.nbytes


def _loaded(checkpoint: Checkpoint, ops: TorchOps) -> Any:
    register()
    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    made_by: Any = AutoModelForCausalLM
    net, told = made_by.from_pretrained(
        checkpoint.path, config=configured(checkpoint.config), attn_implementation=NAME, dtype=ops.dtype,
        use_safetensors=True, local_files_only=True, output_loading_info=True,
    )  # fmt: skip
    for what in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, told[what])):
            raise ModelError(f"{checkpoint.path}: {what.replace('_keys', '')} tensors: {', '.join(names[:5])}")
    return net.train(False).to(ops.device)
