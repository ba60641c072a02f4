"""Mistral: no biases; one sliding window for all layers (4096 if the field is missing, none if null)."""

from __future__ import annotations

from planaria.models.common import common
from planaria.models.config import ModelConfig
from planaria.models.fields import HF, refuse, size

ARCHITECTURE = "MistralForCausalLM"


def config(hf: HF, generation: HF) -> ModelConfig:
    fields = common(hf, generation)
    types = set(hf.get("layer_types") or ())
    if len(types) > 1:
        raise refuse("layer_types", sorted(types), "a Mistral model has the same attention in all layers")
    window = None if hf.get("sliding_window", 0) is None else size(hf, "sliding_window", 4096)
    return ModelConfig(
        architecture=ARCHITECTURE, **fields,
        windows=(window,) * fields["num_layers"] if window else (),
    )  # fmt: skip
