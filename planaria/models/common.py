"""What all families read alike from config.json: sizes, rotary embedding, Qwen's windows. No torch."""

from __future__ import annotations

from planaria.models.config import RopeConfig
from planaria.models.fields import HF, MOST_LAYERS, flag, number, refuse, size, token_ids

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
OPTIONAL = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
WINDOWED, FULL = "sliding_attention", "full_attention"
DTYPES = ("float32", "float16", "bfloat16")


def common(hf: HF, generation: HF, *, head_dim: int | None = None) -> HF:
    """Arguments of ModelConfig. `head_dim`: what the family takes where config.json has none."""
    activation = str(hf.get("hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise refuse("hidden_act", activation, f"is not supported; supported: {', '.join(ACTIVATIONS)}")
    hidden, heads = size(hf, "hidden_size"), size(hf, "num_attention_heads")
    kv_heads = size(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"does not divide num_attention_heads {heads}")
    if hf.get("head_dim") is None and head_dim is None and hidden % heads:
        raise refuse("hidden_size", hidden, f"num_attention_heads {heads} does not divide it; no head_dim given")
    dim = size(hf, "head_dim", head_dim or hidden // heads)
    vocabulary = size(hf, "vocab_size")
    eos = token_ids(generation, "eos_token_id") or token_ids(hf, "eos_token_id")
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise refuse("dtype", dtype, f"is not supported; supported: {', '.join(DTYPES)}")
    rope, reach = rotary(hf, dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": size(hf, "intermediate_size"),
        "num_layers": size(hf, "num_hidden_layers", most=MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocabulary,
        "max_position": reach,
        "norm_eps": number(hf, "rms_norm_eps", 1e-6),
        "rope": rope,
        "activation": ACTIVATIONS[activation],
        "tie_word_embeddings": flag(hf, "tie_word_embeddings"),
        "eos_ids": eos,
        "dtype": dtype,
    }


def windows(hf: HF) -> tuple[int | None, ...]:
    """Qwen's windows per layer: by `layer_types`, else from layer `max_window_layers` on; empty for none."""
    layers = size(hf, "num_hidden_layers", most=MOST_LAYERS)
    off = not flag(hf, "use_sliding_window") or hf.get("sliding_window", 0) is None
    window = None if off else size(hf, "sliding_window", 4096)
    types = hf.get("layer_types")
    if types is None:
        first = layers if window is None else size(hf, "max_window_layers", 28, least=0)
        types = [FULL if i < first else WINDOWED for i in range(layers)]
    return by_type(layers, types, window)


def by_type(layers: int, types: object, window: int | None) -> tuple[int | None, ...]:
    """The window of each layer by its type; empty for none."""
    if not isinstance(types, list) or len(types) != layers:
        raise refuse("layer_types", types, f"must be a list of {layers} names, one a layer")
    for kind in types:
        if kind not in (FULL, WINDOWED):
            raise refuse("layer_types", kind, f"is not supported; supported: {FULL}, {WINDOWED}")
    if WINDOWED not in types:
        return ()
    if window is None:
        raise refuse("layer_types", WINDOWED, "needs use_sliding_window and sliding_window")
    return tuple(window if kind == WINDOWED else None for kind in types)


def patterned(hf: HF, every: int, window: int) -> tuple[int | None, ...]:
    """Windows in all layers but each `every`-th where config.json has no `layer_types`; `window` where it has none."""
    layers = size(hf, "num_hidden_layers", most=MOST_LAYERS)
    types = hf.get("layer_types") or [WINDOWED if (i + 1) % every else FULL for i in range(layers)]
    return by_type(layers, types, size(hf, "sliding_window", window))


def rotary(hf: HF, head_dim: int) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the longest text it is made for, in tokens.

    Reads `rope_parameters` (Transformers 5) or `rope_scaling` with `rope_theta` beside it (before). What a
    table needs of other fields is put among the parameters.
    """
    trained = size(hf, "max_position_embeddings")
    field = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given, where = hf.get(field) or {}, f"{field}."
    if not isinstance(given, dict):
        raise refuse(field, given, "must be an object")
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if any(isinstance(value, dict) for value in given.values()):
        raise refuse(field, sorted(given), "one rotary embedding for each kind of layer is not supported")
    if kind not in ROPE_KINDS:
        raise refuse(f"{where}rope_type", kind, f"is not supported; supported: {', '.join(ROPE_KINDS)}")
    theta = number({**hf, **given}, "rope_theta", 10000.0)
    dim = int(head_dim * number({**hf, **given}, "partial_rotary_factor", 1.0))
    least = 4 if kind == "dynamic" else 2
    if dim % 2 or not least <= dim <= head_dim:
        raise refuse("head_dim", head_dim, f"{dim} of it are rotated: must be even, {least} to head_dim")
    rotated = None if dim == head_dim else dim
    if kind == "default":
        return RopeConfig(theta=theta, dim=rotated), trained
    known = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    p = {name: value for name, value in given.items() if name not in known}
    p["max_position_embeddings"] = trained
    _check_scaling(kind, p, hf, dim, where)
    config = RopeConfig(theta=theta, kind=kind, params=p, dim=rotated)
    if kind in ("linear", "dynamic"):
        return config, int(trained * p["factor"])
    if kind == "yarn":
        return config, max(trained, int(p["original_max_position_embeddings"] * (p.get("factor") or 1)))
    return config, trained


def _check_scaling(kind: str, p: HF, hf: HF, dim: int, where: str) -> None:
    """What a kind of rotary embedding needs: `p` are its parameters, `dim` the rotated columns of a head."""
    if kind in ("linear", "dynamic", "llama3"):
        number(p, "factor", least=1.0, where=where)
    if kind in ("yarn", "llama3", "longrope"):  # the context before: beside the parameters, among them, or the trained
        name = "original_max_position_embeddings"
        given = hf.get(name) is not None
        p[name] = size(hf, name) if given else size(p, name, int(p["max_position_embeddings"]), where=where)
    for name in OPTIONAL.get(kind, ()):
        if p.get(name) is not None:
            number(p, name, where=where, least=1.0 if name == "factor" else 0.0)
    if kind == "llama3":
        low = number(p, "low_freq_factor", where=where)
        if number(p, "high_freq_factor", where=where) <= low:
            rule = f"must be more than low_freq_factor {low:g}"
            raise refuse(f"{where}high_freq_factor", p["high_freq_factor"], rule)
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors = p.get(name)
        if not isinstance(factors, list) or len(factors) != dim // 2:
            raise refuse(f"{where}{name}", factors, f"must be a list of {dim // 2} numbers")
        for factor in factors:
            number({name: factor}, name, where=where)
