"""A Model from a configuration and a checkpoint's tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from planaria.kernels.ops import Ops
from planaria.layers.decoder import Model
from planaria.layers.weights import OnWeights, Packings, Source, WeightLoader
from planaria.models.config import ModelConfig, RopeConfig
from planaria.models.shard import Shard

log = logging.getLogger(__name__)


def build(
    config: ModelConfig, weights: Source, ops: Ops, *, quantization: str, progress: OnWeights | None = None,
    max_positions: int | None = None, shard: Shard | None = None, packings: Packings | None = None,
    kind: type[Model] = Model,
) -> Model:  # fmt: skip
    """Read a checkpoint into `ops`. The source is not kept.

    quantization: "keep" leaves weights that the file packs as they are; "none" unpacks them to the
    activation dtype; "q8_0", "q4_1" pack every matrix now (the embedding and the output head at q8_0 at
    least), never norms and biases. progress(read, all) counts weights. max_positions: length of the rotary
    tables (the longest text served), default the model's longest. shard: the part to read, default all. packings: of
    the part, if it is shared. kind: of model.
    Raises ModelError, one line, for a missing tensor or one of another shape, before anything is read, PartDiffers.
    """
    shard = shard or Shard.full(config)
    there = packings is not None and packings.whole
    num_weights = 0 if there else _check(config, weights, quantization, shard, kind)
    load = WeightLoader(weights, ops, quantization, None if there else progress, num_weights, packings)
    length, local = max_positions or config.max_position, config.local_rope
    rope = load.rope(config.rope, config.head_dim, length)
    ropes = [rope, rope if local is None else load.rope(local, config.head_dim, length)]
    if config.without_positions:
        ropes.append(load.rope(RopeConfig(kind="none", dim=config.rope.dim), config.head_dim, length))
    return kind(config, load, shard, tuple(ropes), ops)


def _check(config: ModelConfig, weights: Source, quantization: str, shard: Shard, kind: type[Model]) -> int:
    """How many weights the shard has. Raises ModelError."""
    # First the whole model, so that a damaged checkpoint fails on every rank before minutes of reading.
    if extra := unused(config, weights, kind):
        shown = ", ".join(extra[:5]) + (", ..." if len(extra) > 5 else "")
        log.warning("%d tensors of the checkpoint are not part of %s and are ignored: %s",
                    len(extra), config.architecture, shown)  # fmt: skip
    checked = WeightLoader(weights, None, quantization)
    kind(config, checked, shard, (None,) * 3, None)
    return checked.num_weights


def read_experts(
    model: Model, weights: Source, ops: Ops, quantization: str, reads: Mapping[int, Sequence[int]], *,
    packings: Packings | None = None, heard: Callable[[float], None] = lambda fraction: None,
) -> None:  # fmt: skip
    """More experts from the checkpoint, by number of the layer among those with experts; slices are placed, too.
    packings: of these, if they are shared. heard: of progress."""
    load = WeightLoader(weights, ops, quantization, packings=packings)
    for number, block in enumerate(model.blocks, 1):
        for expert in reads.get(block.number, ()):
            block.held.pop(expert, None)  # where it was written, or of a part that differs
        block.read(load, reads.get(block.number, ()))
        if model.shard.apart:
            block.experts = load.group([block.held[expert] for expert in model.shard.held_experts])
        heard(number / len(model.blocks))


def unused(config: ModelConfig, weights: Source, kind: type[Model] = Model) -> list[str]:
    """Tensors that the model doesn't ask for. Raises ModelError, one line, for one that is missing or has another
    shape; nothing is read."""
    load = WeightLoader(weights, None, "keep")
    kind(config, load, Shard.full(config), (None,) * 3, None)

    def ignored(name: str) -> bool:
        unused_head = config.tie_word_embeddings or not config.has_logits
        return name.endswith("rotary_emb.inv_freq") or (unused_head and name == "lm_head.weight")

    return load.unused(ignored)
