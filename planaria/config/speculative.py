"""What `--speculative-config` says: whether and how tokens are drafted. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.config.options import SpeculativeConfig
from planaria.errors import ConfigError

FLAG = "--speculative-config"
METHODS = ("ngram", "suffix")
MOST_DRAFTS = 64
DEFAULT_DRAFTS = {"ngram": 8, "suffix": 24}
LATER = {"draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "deepseek_mtp"}  # others', not here yet
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
    if config.method not in METHODS:
        raise ConfigError(f"{FLAG} method", config.method, "is unknown", FIX)
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
