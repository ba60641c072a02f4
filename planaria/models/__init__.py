"""Model families: what their config.json means, and building one from a checkpoint.

No torch until `build` is called: the server reads configurations with this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planaria.config import ModelConfig
from planaria.errors import ModelError
from planaria.models import deepseek_v2, deepseek_v3, llama, mistral, mixtral, olmoe, qwen2, qwen2_moe, qwen3, qwen3_moe

if TYPE_CHECKING:
    from planaria.kernels.ops import Ops
    from planaria.layers.decoder import Model
    from planaria.layers.shard import Shard
    from planaria.layers.weights import Source

FAMILIES = {
    family.ARCHITECTURE: family
    for family in (deepseek_v2, deepseek_v3, llama, mistral, mixtral, olmoe, qwen2, qwen2_moe, qwen3, qwen3_moe)
}
SUPPORTED = tuple(sorted(FAMILIES))


def model_config(hf: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """From config.json (and generation_config.json, which knows the end tokens better).

    Raises ModelError for an unsupported architecture or a field that makes no sense, naming it.
    """
    named = hf.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(a, str) for a in named):
        raise ModelError(f"config.json: architectures {named!r}: must be a list of names")
    for architecture in named:
        if architecture in FAMILIES:
            config: ModelConfig = FAMILIES[architecture].config(hf, generation or {})
            return config
    found = ", ".join(named) or "none named in config.json (architectures)"
    raise ModelError(f"architecture {found} is not supported; supported: {', '.join(SUPPORTED)}")


def build(
    config: ModelConfig, weights: Source, ops: Ops, *, quantization: str,
    progress: Callable[[int, int], None] | None = None, max_positions: int | None = None,
    shard: Shard | None = None,
) -> Model:  # fmt: skip
    """Read a checkpoint into `ops`. The source is not kept.

    quantization: "keep" leaves weights that the file packs as they are; "none" unpacks them to the
    activation dtype; "q8_0", "q4_1" pack every matrix now (the embedding and the output head at q8_0 at
    least), never norms and biases. progress(read, all) counts weights. max_positions: length of the rotary
    tables (the longest text served), default the model's longest. shard: the part to read, default all.
    Raises ModelError, one line, for a missing tensor or one of another shape, before anything is read.
    """
    from planaria.layers.build import build_model

    return build_model(
        config, weights, ops, quantization=quantization, progress=progress, max_positions=max_positions, shard=shard,
    )  # fmt: skip


__all__ = ["FAMILIES", "SUPPORTED", "build", "model_config"]
