"""What `--speculative-config` says: whether and how tokens are drafted."""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.checkpoint import Checkpoint, resolve_checkpoint
from planaria.checkpoint.head import headed
from planaria.checkpoint.resolve import Hub
from planaria.config.json_option import json_option
from planaria.config.options import DraftSource, ParallelConfig, SpeculativeConfig
from planaria.errors import ConfigError
from planaria.models import model_config
from planaria.models.config import ModelConfig
from planaria.models.deal import deal_tensor

FLAG = "--speculative-config"
METHODS = ("ngram", "suffix", "draft_model", "eagle")
MOST_DRAFTS = 64
DEFAULT_DRAFTS = {"ngram": 8, "suffix": 24, "draft_model": 4, "eagle": 4}
WITH_MODEL = ("draft_model", "eagle")
LATER = {"eagle3", "medusa", "mlp_speculator", "mtp", "deepseek_mtp"}  # others', not here yet
FIX = f"choose one of {', '.join(METHODS)}"
EXAMPLE = """write '{"method": "ngram", "num_speculative_tokens": 8}'"""


def speculative_config(given: str | dict[str, Any] | None) -> SpeculativeConfig | None:
    """From JSON, or what it says. Raises ConfigError for a field that is unknown, of another type, or out of range."""
    if given is None:
        return None
    said = json_option(FLAG, given, Any)
    if isinstance(said, dict) and str(said.get("method")) in LATER:  # whose fields are others
        raise ConfigError(f"{FLAG} method", said["method"], "is not here yet", FIX)
    config: SpeculativeConfig = json_option(FLAG, said, SpeculativeConfig, EXAMPLE)
    if not config.method:
        config = msgspec.structs.replace(config, method="draft_model" if config.model else "ngram")
    if config.method not in METHODS:
        raise ConfigError(f"{FLAG} method", config.method, "is unknown", FIX)
    if (config.method in WITH_MODEL) != bool(config.model):
        rule = "names a model that drafts" if config.model else "wants a model that drafts, and `model` is left out"
        raise ConfigError(f"{FLAG} method", config.method, rule, '"method": "draft_model", "model": "smollm2"')
    lookup = config.prompt_lookup_max or max(config.prompt_lookup_min, 5)
    config = msgspec.structs.replace(
        config,
        num_speculative_tokens=config.num_speculative_tokens or DEFAULT_DRAFTS[config.method],
        prompt_lookup_max=lookup,
        prompt_lookup_min=config.prompt_lookup_min or min(2, lookup),
    )
    ranges: dict[str, tuple[float, float]] = {
        "num_speculative_tokens": (1, MOST_DRAFTS), "prompt_lookup_max": (1, 256),
        "prompt_lookup_min": (1, lookup), "suffix_decoding_max_tree_depth": (1, 256),
        "suffix_decoding_max_cached_requests": (0, 100_000), "suffix_decoding_max_spec_factor": (0.1, 64.0),
        "suffix_decoding_min_token_prob": (0.0, 1.0),
    }  # fmt: skip
    for name, (least, most) in ranges.items():
        value = getattr(config, name)
        if not least <= value <= most:
            raise ConfigError(f"{FLAG} {name}", value, f"must be from {least:g} to {most:g}")
    return config


def draft_source(
    config: SpeculativeConfig | None, target: Checkpoint, served: ModelConfig, parallel: ParallelConfig, hub: Hub,
    dtype: str,
) -> DraftSource | None:  # fmt: skip
    """The model that drafts, if one does, for one that is `served` from `target`. dtype: that is computed in. Raises
    ConfigError, ModelError."""
    if config is None:
        return None
    check_sharing(config, parallel)
    if not config.model:
        return None
    checkpoint = resolve_checkpoint(config.model, hub._replace(revision=None))
    if config.method == "eagle":
        checkpoint = headed(checkpoint, target)
        model = head_config(checkpoint)
    else:
        model = model_config(checkpoint.config, checkpoint.generation_config)
    check_drafting(config, model, served, parallel)
    packed = checkpoint.packed and dtype == "bfloat16"
    return DraftSource(
        model=model, checkpoint=msgspec.to_builtins(checkpoint), quantization="keep" if packed else "none"
    )


def head_config(head: Checkpoint) -> ModelConfig:
    """What `headed` gives, as a model: its norms before the first and after the last layer may be left out. Raises
    ModelError."""
    model, names = model_config(head.config), {tensor.name for tensor in head.tensors}
    absent = ("model.layers.0.input_layernorm", "model.norm")
    left_out = tuple(name for name in absent if f"{name}.weight" not in names)
    return msgspec.structs.replace(model, tie_word_embeddings=False, absent_norms=left_out)


def check_sharing(config: SpeculativeConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError for a number of ranks that can't share a drafting model's layers."""
    ranks, all_ranks = config.draft_tensor_parallel_size, parallel.tensor_parallel_size
    if ranks not in (1, all_ranks) or (ranks > 1 and not config.model):
        rule = f"must be 1, or, of a model that drafts, --tensor-parallel-size ({all_ranks})"
        raise ConfigError(f"{FLAG} draft_tensor_parallel_size", ranks, rule, "leave it out: 1")


def check_drafting(
    config: SpeculativeConfig, model: ModelConfig, served: ModelConfig, parallel: ParallelConfig
) -> None:
    """Raises ConfigError for a model that can't draft for the one that is served."""
    sizes = {"tokens": (model.vocab_size, served.vocab_size)}
    if config.method == "eagle":
        sizes["columns in a hidden state"] = model.hidden_size, served.hidden_size
    for what, (own, theirs) in sizes.items():
        if own != theirs:
            rule = f"has {own} {what}, and the model that is served {theirs}"
            raise ConfigError(f"{FLAG} model", config.model, rule, "both must have the same")
    if model.moe is not None:
        raise ConfigError(f"{FLAG} model", config.model, "has experts", "use a dense one")
    if config.method == "eagle" and parallel.num_micro_batches > 1:
        raise ConfigError(f"{FLAG} method", "eagle", "reads hidden states, which micro-batches don't hand out")
    if config.draft_tensor_parallel_size > 1:
        deal_tensor(model, config.draft_tensor_parallel_size)
