"""A model's shape: what its family's config.json means, and how it is dealt to ranks. Pure.

A family is a function of families.py.
"""

from __future__ import annotations

from typing import Any

from planaria.errors import ModelError
from planaria.models.config import ModelConfig
from planaria.models.families import FAMILIES

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
            return FAMILIES[architecture](hf, generation or {})
    found = ", ".join(named) or "none named in config.json (architectures)"
    raise ModelError(f"architecture {found} is not supported; supported: {', '.join(SUPPORTED)}")


__all__ = ["FAMILIES", "SUPPORTED", "model_config"]
