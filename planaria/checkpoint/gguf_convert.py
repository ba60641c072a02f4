"""A GGUF header in Hugging Face's vocabulary: configuration, generation configuration, tensor names."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from msgspec.structs import replace

from planaria.checkpoint.fused import divided, unfused
from planaria.checkpoint.gguf_families import EACH, FAMILIES, LAYER, TOP, family_of
from planaria.checkpoint.gguf_file import ROPE, ROPE_FREQS, GGUFHeader, GGUFTensor
from planaria.checkpoint.spec import TensorInfo
from planaria.errors import ModelError

ENDS = (  # of an answer, by their names: a file says one or two of them
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "<|return|>", "<|call|>",
)  # fmt: skip
MESSAGE_END, ANSWER_END = "<|end|>", "<|return|>"  # where there are both the first ends a part of an answer
CONTROL, USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type: older files have ends of turns as either


def hf_name(name: str, layer: dict[str, str] = LAYER) -> str | None:
    """Hugging Face's name of a GGUF tensor, or None for one that isn't a weight of these architectures."""
    stem, _, suffix = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in layer:
        return f"model.layers.{match[1]}.{layer[match[2]]}.{suffix}"
    return None


def convert_config(header: GGUFHeader, path: str) -> dict[str, Any]:
    """config.json of the same model. Raises ModelError for an architecture or a feature that isn't supported."""
    meta = header.metadata
    arch = str(meta.get("general.architecture", ""))
    family = family_of(meta)
    if family is None:
        raise ModelError(
            f"{path}: GGUF architecture {arch or '(none)'} is not supported; these are: {', '.join(FAMILIES)}"
        )
    tensors = {t.name: t for t in header.tensors}

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{key}", default)

    def size(key: str) -> int:
        value = get(key)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if not isinstance(value, int) or value <= 0:
            raise ModelError(f"{path}: {arch}.{key} must be a positive number, got {value!r}; get the file again")
        return value

    if get("expert_count", 0) and f"{EACH}." not in "".join(family.layer.values()):
        raise ModelError(f"{path}: {arch} with experts is not supported in a GGUF file; use the safetensors checkpoint")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path}: no token_embd.weight matrix; the file is incomplete, get it again")
    heads, hidden = size("attention.head_count"), size("embedding_length")
    kv_heads = size("attention.head_count_kv") if get("attention.head_count_kv") is not None else heads
    head_dim = size("attention.key_length") if get("attention.key_length") is not None else hidden // heads
    latent = get("attention.kv_lora_rank") is not None
    if get("attention.value_length", head_dim) != head_dim and not latent:
        raise ModelError(f"{path}: values of another size than keys are not supported")
    mlp = "feed_forward_length" if get("feed_forward_length") is not None else "expert_feed_forward_length"
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": size(mlp),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, arch, path),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "dtype": {"f32": "float32", "f16": "float16"}.get(_main_kind(header.tensors), "bfloat16"),
    }
    rotary = get("rope.dimension_count", head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    window = get("attention.sliding_window")
    if window:
        config["sliding_window"] = window
        config["use_sliding_window"] = True
    for name in ("bos", "eos", "pad"):
        key = "padding" if name == "pad" else name
        value = meta.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config[f"{name}_token_id"] = value
    return {**config, **family.fields(get, config)}


def convert_generation_config(header: GGUFHeader) -> dict[str, Any]:
    """generation_config.json: `eos_token_id` is every id that ends a turn."""
    meta = header.metadata
    eos = [
        meta[f"tokenizer.ggml.{name}_token_id"]
        for name in ("eos", "eot", "eom")
        if f"tokenizer.ggml.{name}_token_id" in meta
    ]
    tokens: list[str] = meta.get("tokenizer.ggml.tokens", [])
    types: list[int] = meta.get("tokenizer.ggml.token_type", [])
    if "tokenizer.chat_template" in meta:
        pairs, unknown = enumerate(zip(tokens, types, strict=False)), meta.get("tokenizer.ggml.unknown_token_id")
        named = {token: i for i, (token, kind) in pairs if kind in (CONTROL, USER_DEFINED) and i != unknown}
        names = [name for name in ENDS if not (name == MESSAGE_END and ANSWER_END in named)]
        eos += [named[name] for name in names if name in named]
    return {"eos_token_id": list(dict.fromkeys(eos))} if eos else {}


def convert_tensors(
    header: GGUFHeader, meta: dict[str, Any], config: dict[str, Any], file: int
) -> tuple[TensorInfo, ...]:
    """One file's tensor index under Hugging Face's names; what isn't a weight (factors of rope) is left out."""
    family = family_of(meta)
    assert family is not None
    out: list[TensorInfo] = []
    for t in header.tensors:
        if t.name in ROPE:
            continue
        name = hf_name(t.name, family.layer) or t.name
        heads = 0
        if family.rotated and ".q_proj." in name:
            heads = config["num_attention_heads"]
        elif family.rotated and ".k_proj." in name:
            heads = config["num_key_value_heads"]
        info = TensorInfo(name, t.kind, t.shape, file, t.offset, t.nbytes, heads)
        every = divided(info, t.shape[0], t.shape[1:]) if EACH in name else [info]
        out += (_weight(replace(part, name=part.name.replace(EACH, str(i)))) for i, part in enumerate(every))
    return tuple(unfused("GGUF", config, _with_latents(out)))


def _with_latents(tensors: list[TensorInfo]) -> list[TensorInfo]:
    """What makes a head's keys of a latent, [heads, rank, key], and its values, [heads, value, rank], as one."""
    values = {t.name.removesuffix(".v_b.weight"): t for t in tensors if t.name.endswith(".v_b.weight")}
    found = [t for t in tensors if t.name.removesuffix(".v_b.weight") not in values]
    for i, t in enumerate(found):
        pair = values.get(t.name.removesuffix(".k_b.weight"))
        if pair is None or len(t.shape) != 3 or len(pair.shape) != 3:
            continue
        parts = tuple(replace(each, shape=(each.shape[0] * each.shape[1], each.shape[2])) for each in (t, pair))
        rows = t.shape[0] * (t.shape[2] + pair.shape[1])
        found[i] = replace(
            t, name=t.name.replace(".k_b.", ".kv_b_proj."), kind=f"latent:{t.shape[0]}", shape=(rows, t.shape[1]),
            nbytes=t.nbytes + pair.nbytes, parts=parts,
        )  # fmt: skip
    return found


def _weight(info: TensorInfo) -> TensorInfo:
    """As the model's own checkpoint has it."""
    if info.name.endswith(".sinks.weight"):
        return replace(info, name=info.name.removesuffix(".weight"))
    if info.name.endswith(".e_score_correction.bias"):
        return replace(info, name=info.name.replace("correction.bias", "correction_bias"))
    if info.name.endswith("_gate.weight") and len(info.shape) == 1:
        return replace(info, shape=(1, *info.shape))
    if info.kind == "mxfp4" and len(info.shape) == 2:  # a byte of scale, 16 of codes
        blocks = replace(info, kind="u8", shape=(info.shape[0], info.shape[1] // 32, 17))
        return replace(info, kind="mxfp4:blocks", parts=(blocks,))
    return info


def _main_kind(tensors: list[GGUFTensor]) -> str:
    return max(tensors, key=lambda t: t.nbytes).kind


def _rope_scaling(header: GGUFHeader, arch: str, path: str) -> dict[str, Any] | None:
    meta = header.metadata
    factors = {name: list(struct.unpack(f"<{len(data) // 4}f", data)) for name, data in header.rope.items()}
    if ROPE_FREQS in factors:
        return _frequency_factors(factors[ROPE_FREQS], meta, arch)
    if factors:
        return _factors_by_length(factors, meta, arch, path)
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    factor = meta.get(f"{arch}.rope.scaling.factor", 0.0) or meta.get(f"{arch}.rope.scale_linear", 0.0)
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{path}: rope scaling {kind} is not supported in a GGUF file; use the safetensors checkpoint")
    scaling: dict[str, Any] = {"rope_type": "yarn" if kind == "yarn" else "linear", "factor": factor}
    original = meta.get(f"{arch}.rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _factors_by_length(
    factors: dict[str, list[float]], meta: dict[str, Any], arch: str, path: str
) -> dict[str, Any]:  # fmt: skip
    """Phi-3's, and what scores gain by them."""
    _, short, long = ROPE
    if set(factors) != {short, long}:
        raise ModelError(f"{path}: {short} and {long} must both be there; get the file again")
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": factors[short], "long_factor": factors[long]}
    for theirs, ours in (
        ("attn_factor", "attention_factor"), ("original_context_length", "original_max_position_embeddings")
    ):  # fmt: skip
        if (value := meta.get(f"{arch}.rope.scaling.{theirs}")) is not None:
            scaling[ours] = value
    return scaling


def _frequency_factors(factors: list[float], meta: dict[str, Any], arch: str) -> dict[str, Any]:
    """Per-dimension divisors of the rotary frequencies. A GGUF file keeps these instead of Llama 3's four parameters.

    The parameters are recovered where they give these factors; else the factors are said the way longrope has them.
    """
    base = meta.get(f"{arch}.rope.freq_base", 10000.0)
    factor, low, high, original = round(max(factors), 3), 1.0, 4.0, 8192
    dim = 2 * len(factors)
    for i, value in enumerate(factors):
        wavelength = 2 * math.pi * base ** (2 * i / dim)
        if wavelength < original / high:
            wanted = 1.0
        elif wavelength > original / low:
            wanted = factor
        else:
            smooth = (original / wavelength - low) / (high - low)
            wanted = 1 / ((1 - smooth) / factor + smooth)
        if abs(value - wanted) > 1e-4 * wanted:
            context = meta.get(f"{arch}.context_length", original)
            return {
                "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
                "factor": 1.0, "original_max_position_embeddings": context,
            }  # fmt: skip
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
