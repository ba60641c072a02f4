"""What `--speculative-config` says: whether and how tokens are drafted."""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.checkpoint import resolve_checkpoint
from planaria.checkpoint.resolve import Hub
from planaria.config.options import DraftSource, SpeculativeConfig
from planaria.errors import ConfigError
from planaria.models import model_config
from planaria.models.config import ModelConfig

FLAG = "--speculative-config"
METHODS = ("ngram", "suffix", "draft_model")
MOST_DRAFTS = 64
DEFAULT_DRAFTS = {"ngram": 8, "suffix": 24, "draft_model": 4}
LATER = {"eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "deepseek_mtp"}  # others', not here yet
FIX = f"choose one of {', '.join(METHODS)}"
EXAMPLE = """write '{"method": "ngram", "num_speculative_tokens": 8}'"""


def speculative_config(given: str | dict[str, Any] | None) -> SpeculativeConfig | None:
    """From JSON, or what it says. Raises ConfigError for a field that is unknown, of another type, or out of range."""
    if given is None:
        return None
    shown = repr(given) if isinstance(given, str) else given
    try:
        said = msgspec.json.decode(given) if isinstance(given, str) else given
        if isinstance(said, dict) and said.get("method") in LATER:
            raise ConfigError(
                f"{FLAG} method", said["method"], "is not here yet", f"choose one of {', '.join(METHODS)}"
            )
        config = msgspec.convert(said, SpeculativeConfig)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        fix = f"{EXAMPLE}; fields: {', '.join(SpeculativeConfig.__struct_fields__)}"
        raise ConfigError(FLAG, shown, f"can't be read: {e}", fix) from None
    if not config.method:
        config = msgspec.structs.replace(config, method="draft_model" if config.model else "ngram")
    if config.method not in METHODS:
        raise ConfigError(f"{FLAG} method", config.method, "is unknown", FIX)
    if (config.method == "draft_model") != bool(config.model):
        rule = "names a model that drafts" if config.model else "wants a model that drafts, and `model` is left out"
        raise ConfigError(f"{FLAG} method", config.method, rule, '"method": "draft_model", "model": "smollm2"')
    if config.draft_tensor_parallel_size != 1:
        rule = "must be 1: the rank that draws tokens drafts by itself"
        raise ConfigError(f"{FLAG} draft_tensor_parallel_size", config.draft_tensor_parallel_size, rule, "leave it out")
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


def draft_source(config: SpeculativeConfig | None, served: ModelConfig, hub: Hub, dtype: str) -> DraftSource | None:
    """The model that drafts, if one does. dtype: that is computed in. Raises ConfigError, ModelError."""
    if config is None or not config.model:
        return None
    checkpoint = resolve_checkpoint(config.model, hub._replace(revision=None))
    model = model_config(checkpoint.config, checkpoint.generation_config)
    if model.vocab_size != served.vocab_size:
        raise ConfigError(
            f"{FLAG} model", config.model,
            f"has {model.vocab_size} tokens, and the model that is served {served.vocab_size}",
            "both must have the same",
        )  # fmt: skip
    if model.moe is not None:
        raise ConfigError(f"{FLAG} model", config.model, "has experts", "use a dense one")
    packed = checkpoint.packed and dtype == "bfloat16"
    return DraftSource(
        model=model, checkpoint=msgspec.to_builtins(checkpoint), quantization="keep" if packed else "none"
    )
