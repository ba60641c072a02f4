"""Reading config.json: every field is checked when it is read, and a refusal names the field. No torch.

Rule: a value that would crash or give wrong numbers later is a ModelError here.
"""

from __future__ import annotations

import math
from typing import Any

from planaria.config import RopeConfig
from planaria.errors import ModelError

HF = dict[str, Any]
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_ACTIVATIONS = ("silu", "swish")


def refuse(field: str, value: object, rule: str) -> ModelError:
    """The error for a field of config.json."""
    return ModelError(f"config.json: {field} {value!r}: {rule}")


def size(hf: HF, field: str, default: int | None = None) -> int:
    """A positive integer; `default` where the field is missing or null."""
    value = hf.get(field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise refuse(field, value, "must be a positive integer")
    return value


def number(hf: HF, field: str, default: float | None = None, *, least: float = 0.0, where: str = "") -> float:
    """A finite number, at least `least` and not 0."""
    name, value = where + field, hf.get(field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refuse(name, value, "must be a number")
    if value < least or value == 0:
        raise refuse(name, value, f"must be at least {least:g}" if least else "must be more than 0")
    return float(value)


def flag(hf: HF, field: str, default: bool = False) -> bool:
    """true or false."""
    value = hf.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(field, value, "must be true or false")
    return value


def token_ids(hf: HF, field: str) -> tuple[int, ...]:
    """A token id, a list of them, or nothing."""
    value = hf.get(field)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise refuse(field, value, "must be a token id or a list of token ids")
    return tuple(ids)


def common(hf: HF, generation: HF, *, head_dim: int | None = None) -> HF:
    """The fields that all families read alike, as arguments of ModelConfig. `head_dim`: where the field is missing."""
    activation = hf.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise refuse("hidden_act", activation, "is not supported; supported: silu")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise refuse("quantization_config", method, "weights quantised this way can't be read; use GGUF or plain weights")
    hidden, heads = size(hf, "hidden_size"), size(hf, "num_attention_heads")
    kv_heads = size(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"does not divide num_attention_heads {heads}")
    if hf.get("head_dim") is None and head_dim is None and hidden % heads:
        raise refuse("hidden_size", hidden, f"is not a multiple of num_attention_heads {heads}, and head_dim is missing")
    dim = size(hf, "head_dim", head_dim or hidden // heads)
    eos = token_ids(generation, "eos_token_id") or token_ids(hf, "eos_token_id")
    bos = token_ids(hf, "bos_token_id")
    rope, max_position = rotary(hf, dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": size(hf, "intermediate_size"),
        "num_layers": size(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": size(hf, "vocab_size"),
        "max_position": max_position,
        "norm_eps": number(hf, "rms_norm_eps", 1e-6),
        "rope": rope,
        "tie_word_embeddings": flag(hf, "tie_word_embeddings"),
        "eos_ids": eos,
        "bos_id": bos[0] if bos else None,
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch."),
    }


def windows(hf: HF) -> tuple[int | None, ...]:
    """Qwen's sliding windows per layer: `layer_types`, or every layer from `max_window_layers` on; empty for none."""
    layers = size(hf, "num_hidden_layers")
    window = size(hf, "sliding_window", 4096) if flag(hf, "use_sliding_window") else None
    if hf.get("use_sliding_window") and "sliding_window" in hf and hf["sliding_window"] is None:
        window = None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise refuse("max_window_layers", first, "must be an integer, 0 or more")
        types = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise refuse("layer_types", types, f"must be a list of {layers} entries, one a layer")
    unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
    if unknown:
        raise refuse("layer_types", unknown[0], "is not supported; supported: full_attention, sliding_attention")
    if "sliding_attention" not in types:
        return ()
    if window is None:
        raise refuse("layer_types", "sliding_attention", "needs use_sliding_window and sliding_window")
    return tuple(window if t == "sliding_attention" else None for t in types)


def rotary(hf: HF, head_dim: int) -> tuple[RopeConfig, int]:
    """The rotary embedding and the longest text it reaches, in tokens.

    Reads `rope_parameters` (Transformers 5) or `rope_scaling` and `rope_theta` (before). The trained length is put
    among the parameters, so that tables need nothing else of the configuration.
    """
    trained = size(hf, "max_position_embeddings")
    field = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = hf.get(field) or {}
    if not isinstance(given, dict):
        raise refuse(field, given, "must be an object")
    kind = given.get("rope_type", given.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_KINDS or any(isinstance(v, dict) for v in given.values()):
        shown = kind if kind not in ROPE_KINDS else "by layer type"
        raise refuse(f"{field}.rope_type", shown, f"is not supported; supported: {', '.join(ROPE_KINDS)}")
    where = f"{field}."
    theta = number({**hf, **given}, "rope_theta", 10000.0)
    part = number({**hf, **given}, "partial_rotary_factor", 1.0)
    dim = int(head_dim * part)
    if dim % 2 or not 2 <= dim <= head_dim:
        raise refuse("head_dim", head_dim, f"gives {dim} rotated dimensions; they must be even and at most head_dim")
    params = {k: v for k, v in given.items() if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")}
    params["max_position_embeddings"] = trained
    reach = trained
    if kind in ("yarn", "llama3", "longrope"):
        original = hf.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
        params["original_max_position_embeddings"] = size({"v": original, **params}, "v", trained) if original else trained
        _check_number(params, "attention_factor", where)
    if kind in ("linear", "dynamic", "llama3"):
        params["factor"] = number(params, "factor", least=1.0, where=where)
    elif kind in ("yarn", "longrope") and params.get("factor") is not None:
        params["factor"] = number(params, "factor", least=1.0, where=where)
    if kind in ("linear", "dynamic"):
        reach = int(trained * params["factor"])
    if kind == "dynamic" and dim == 2:
        raise refuse("head_dim", head_dim, "is too small for dynamic rope scaling")
    if kind == "llama3":
        low = number(params, "low_freq_factor", where=where)
        if number(params, "high_freq_factor", where=where) <= low:
            raise refuse(f"{where}high_freq_factor", params["high_freq_factor"], f"must be more than low_freq_factor {low:g}")
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            _check_number(params, name, where)
        reach = max(trained, int(params["original_max_position_embeddings"] * (params.get("factor") or 1)))
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = params.get(name)
            if not isinstance(factors, list) or len(factors) != dim // 2:
                raise refuse(f"{where}{name}", factors, f"must be a list of {dim // 2} numbers")
            for factor in factors:
                number({name: factor}, name, where=where)
    default = kind == "default"
    return RopeConfig(theta=theta, kind=kind, params={} if default else params, dim=None if dim == head_dim else dim), reach


def _check_number(params: HF, name: str, where: str) -> None:
    if params.get(name) is not None:
        number(params, name, where=where)
