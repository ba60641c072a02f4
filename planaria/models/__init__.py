"""A model's shape: what its family's config.json means, and how it is dealt to ranks. Pure.

A family is a function of families.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.errors import ModelError
from planaria.models.config import ModelConfig
from planaria.models.families import FAMILIES
from planaria.models.fields import refuse, size

SUPPORTED = tuple(sorted(FAMILIES))
HEADS = {"ForCausalLM": "vocabulary", "ForSequenceClassification": "labels", "Model": ""}
MAX_LABELS = 1 << 16


def is_native(hf: dict[str, Any]) -> bool:
    """Is one of its architectures among the families?"""
    named = hf.get("architectures")
    return isinstance(named, list) and any(_family(name) for name in named)


def _family(architecture: object) -> tuple[str, str] | None:
    """Name of the family, and its head; None for one that isn't known."""
    for end, head in HEADS.items():
        if isinstance(architecture, str) and architecture.endswith(end):
            family = architecture.removesuffix(end) + "ForCausalLM"
            if family in FAMILIES:
                return family, head
    return None


def model_config(hf: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """From config.json (and generation_config.json, which knows the end tokens better).

    Raises ModelError for an unsupported architecture or a field that makes no sense, naming it.
    """
    named = hf.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(a, str) for a in named):
        raise ModelError(f"config.json: architectures {named!r}: must be a list of names")
    for architecture in named:
        if (known := _family(architecture)) is not None:
            return _headed(FAMILIES[known[0]](hf, generation or {}), architecture, known[1], hf)
    found = ", ".join(named) or "none named in config.json (architectures)"
    raise ModelError(f"architecture {found} is not supported; supported: {', '.join(SUPPORTED)}")


def _headed(config: ModelConfig, architecture: str, head: str, hf: dict[str, Any]) -> ModelConfig:
    """A family's model with another head, or none."""
    for name, needed in (("is_causal", True), ("use_bidirectional_attention", False)):
        if hf.get(name) not in (None, needed):
            raise refuse(name, hf[name], "attention in both directions is not supported")
    if head == "vocabulary":
        return config
    labels = 0
    if head == "labels":
        named = hf.get("id2label")
        if named is not None and not isinstance(named, dict):
            raise refuse("id2label", named, "must be an object")
        labels = size(hf, "num_labels", len(named) if named else 2, most=MAX_LABELS)
    return msgspec.structs.replace(config, architecture=architecture, head=head, num_labels=labels)


__all__ = ["FAMILIES", "SUPPORTED", "is_native", "model_config"]
