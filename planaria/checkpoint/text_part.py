"""Models of texts and pictures whose part for texts is a family by itself: that part alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from planaria.checkpoint.spec import TensorInfo

# its architecture, and what a configuration leaves out where it is as in the smallest model of that kind
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
         "max_position_embeddings": 131072},
    ),
}  # fmt: skip
OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
PREFIXES = ("language_model.model.", "model.language_model.")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the part for texts, or as it is."""
    named, inner = config.get("architectures"), config.get("text_config")
    known = [PARTS[a] for a in named if isinstance(a, str) and a in PARTS] if isinstance(named, list) else []
    if not known or not isinstance(inner, dict):
        return config
    architecture, missing = known[0]
    outer = {field: config[field] for field in OUTER if config.get(field) is not None}
    return {**missing, **outer, **inner, "architectures": [architecture]}


def text_tensors(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Those of the part for texts, named as if there were no other."""
    found = []
    for tensor in tensors:
        prefix = next((each for each in PREFIXES if tensor.name.startswith(each)), None)
        if prefix is not None:
            found.append(replace(tensor, name=f"model.{tensor.name.removeprefix(prefix)}"))
        elif "lm_head." in tensor.name:
            found.append(replace(tensor, name=f"lm_head.{tensor.name.partition('lm_head.')[2]}"))
    return found
