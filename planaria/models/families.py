"""The families: what each says in its config.json beside what all say alike. No torch.

A family is a function here, under its name in config.json ("architectures"), that gives the arguments of ModelConfig.
"""

from __future__ import annotations

from collections.abc import Callable

from planaria.models.common import FULL, WINDOWED, by_type, common, patterned, rotary, windows
from planaria.models.config import ModelConfig
from planaria.models.experts import dense_layers, mixture
from planaria.models.fields import HF, MOST_LAYERS, flag, number, refuse, size
from planaria.models.latent import latent, shared_and_routed

FAMILIES: dict[str, Callable[[HF, HF], ModelConfig]] = {}  # (config.json, generation_config.json)


def family(architecture: str) -> Callable[[Callable[[HF, HF], HF]], Callable[[HF, HF], HF]]:
    def of(fields: Callable[[HF, HF], HF]) -> Callable[[HF, HF], HF]:
        FAMILIES[architecture] = lambda hf, generation: ModelConfig(architecture=architecture, **fields(hf, generation))
        return fields

    return of


@family("LlamaForCausalLM")
def llama(hf: HF, generation: HF) -> HF:
    """Llama, and what else calls itself so (SmolLM2, TinyLlama): optional biases everywhere."""
    return {**common(hf, generation), **biases(hf), "mlp_bias": flag(hf, "mlp_bias")}


@family("MistralForCausalLM")
def mistral(hf: HF, generation: HF) -> HF:
    """No biases; one sliding window for all layers (4096 if the field is missing, none if null)."""
    fields = common(hf, generation)
    types = hf.get("layer_types") or [FULL]
    if not isinstance(types, list) or types.count(types[0]) < len(types):
        raise refuse("layer_types", types, "a Mistral model has the same attention in all layers")
    return {**fields, "windows": one_window(hf, 4096)}


@family("MixtralForCausalLM")
def mixtral(hf: HF, generation: HF) -> HF:
    """Mistral with experts in every layer; a token's weights are a softmax over those it chose."""
    moe = mixture(
        hf, count="num_local_experts", width="intermediate_size", default_k=2, renormalize=True,
        block="block_sparse_moe", names=("w1", "w3", "w2"),
    )  # fmt: skip
    return {**common(hf, generation), "windows": one_window(hf), "moe": moe}


@family("OlmoeForCausalLM")
def olmoe(hf: HF, generation: HF) -> HF:
    """Experts in every layer; q and k are RMS-normalised over all heads together."""
    clip = 0.0 if hf.get("clip_qkv") is None else number(hf, "clip_qkv")
    moe = mixture(
        hf, count="num_experts", width="intermediate_size", default_k=8, renormalize=flag(hf, "norm_topk_prob")
    )
    return {**common(hf, generation), **biases(hf), "wide_qk_norm": True, "qkv_clip": clip, "moe": moe}


@family("Qwen2ForCausalLM")
def qwen2(hf: HF, generation: HF) -> HF:
    """And Qwen2.5: biases on q, k and v only; sliding windows in some layers if `use_sliding_window`."""
    return {**common(hf, generation), "attention_bias": True, "windows": windows(hf)}


@family("Qwen2MoeForCausalLM")
def qwen2_moe(hf: HF, generation: HF) -> HF:
    """Qwen2's attention; experts, and a gated expert that all tokens share; some layers may be dense."""
    shared = size(hf, "shared_expert_intermediate_size")
    moe = mixture(
        hf, count="num_experts", width="moe_intermediate_size", default_k=4, renormalize=flag(hf, "norm_topk_prob"),
        dense_layers=dense_layers(hf), shared_gate=True, shared_intermediate_size=shared,
    )  # fmt: skip
    bias = flag(hf, "qkv_bias", True)
    return {**common(hf, generation), "attention_bias": bias, "windows": windows(hf), "moe": moe}


@family("Qwen3ForCausalLM")
def qwen3(hf: HF, generation: HF) -> HF:
    """q and k RMS-normalised per head; its own head_dim (128 if missing); optional biases."""
    return {**common(hf, generation, head_dim=128), **biases(hf), "qk_norm": True, "windows": windows(hf)}


@family("Qwen3MoeForCausalLM")
def qwen3_moe(hf: HF, generation: HF) -> HF:
    """Qwen3's attention; experts without a shared one; one sliding window for all layers if there is any."""
    moe = mixture(
        hf, count="num_experts", width="moe_intermediate_size", default_k=8, renormalize=flag(hf, "norm_topk_prob"),
        dense_layers=dense_layers(hf),
    )  # fmt: skip
    window = one_window(hf, 4096) if flag(hf, "use_sliding_window") else ()
    return {**common(hf, generation), **biases(hf), "qk_norm": True, "windows": window, "moe": moe}


@family("DeepseekV2ForCausalLM")
def deepseek_v2(hf: HF, generation: HF) -> HF:
    """`norm_topk_prob` is not read: no published checkpoint sets it, and Transformers doesn't read it either."""
    method, groups = hf.get("topk_method", "greedy"), {}
    if method not in ("greedy", "group_limited_greedy"):
        raise refuse("topk_method", method, "is not supported; supported: greedy, group_limited_greedy")
    if method == "group_limited_greedy":
        groups = {"num_groups": size(hf, "n_group"), "top_groups": size(hf, "topk_group")}
    moe = shared_and_routed(hf, scaling=1.0, **groups)
    return {**latent(hf, generation), "mlp_bias": flag(hf, "mlp_bias"), "moe": moe}


@family("DeepseekV3ForCausalLM")
def deepseek_v3(hf: HF, generation: HF) -> HF:
    """V2's attention; experts chosen by the sigmoid of their scores and a learned bias. Layers that draft further
    tokens, which checkpoints have after the others, are not used."""
    moe = shared_and_routed(
        hf, scaling=2.5, scoring="sigmoid", renormalize=flag(hf, "norm_topk_prob", True), correction_bias=True,
        num_groups=size(hf, "n_group", 8), top_groups=size(hf, "topk_group", 4), group_score="sum2",
    )  # fmt: skip
    return {**latent(hf, generation, interleaved=flag(hf, "rope_interleave", True)), "moe": moe}


@family("Olmo2ForCausalLM")
def olmo2(hf: HF, generation: HF) -> HF:
    """Norms of what a block adds alone; q and k are RMS-normalised over all heads together."""
    absent = [f"model.layers.{i}.input_layernorm" for i in range(size(hf, "num_hidden_layers", most=MOST_LAYERS))]
    absent += [name.replace("input", "pre_feedforward") for name in absent]
    fields = common({"rms_norm_eps": 1e-5, **hf}, generation)
    return {**fields, **biases(hf), "wide_qk_norm": True, "branch_norms": True, "absent_norms": tuple(absent)}


@family("SmolLM3ForCausalLM")
def smollm3(hf: HF, generation: HF) -> HF:
    """Llama, with layers that know no positions: each fourth where `no_rope_layers` doesn't say."""
    fields = llama({"rope_theta": 2e6, "tie_word_embeddings": True, **hf}, generation)
    layers, every = fields["num_layers"], size(hf, "no_rope_layer_interval", 4)
    turned = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(turned, list) or len(turned) < layers or not all(turn in (0, 1) for turn in turned):
        raise refuse("no_rope_layers", turned, "must be a list of 0 and 1, one a layer")
    types = hf.get("layer_types")
    if types is None and flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None:
        types = [FULL if turned[i] else WINDOWED for i in range(layers)]
    window = None if hf.get("sliding_window") is None else size(hf, "sliding_window")
    return {
        **fields, "windows": by_type(layers, types, window) if types else (),
        "without_positions": tuple(i for i in range(layers) if not turned[i]),
    }  # fmt: skip


@family("GemmaForCausalLM")
def gemma(hf: HF, generation: HF) -> HF:
    """Embeddings times sqrt(hidden size), norms' weights around 0, GELU (also where config.json says "gelu")."""
    if flag(hf, "use_bidirectional_attention"):
        raise refuse("use_bidirectional_attention", True, "tokens that see later ones are not supported")
    own = {"tie_word_embeddings": True, **hf, "hidden_act": hf.get("hidden_activation") or "gelu_pytorch_tanh"}
    return {
        **common(own, generation, head_dim=256), **biases(hf), "norm_offset": 0.0 if flag(hf, "plain_norms") else 1.0,
        "embedding_scale": size(hf, "hidden_size") ** 0.5,
    }  # fmt: skip


@family("Gemma2ForCausalLM")
def gemma2(hf: HF, generation: HF) -> HF:
    """Gemma with four norms, windows in every other layer, soft caps on scores and logits."""
    caps = {"score_cap": cap(hf, "attn_logit_softcapping", 50.0), "logit_cap": cap(hf, "final_logit_softcapping", 30.0)}
    return {
        **gemma(hf, generation), **caps, "branch_norms": True, "windows": patterned(hf, 2, 4096),
        "attention_scale": number(hf, "query_pre_attn_scalar", 256) ** -0.5,
    }  # fmt: skip


@family("Gemma3ForCausalLM")
def gemma3(hf: HF, generation: HF) -> HF:
    """Gemma 2 without caps, q and k normalised per head, five layers in six with a window and a rotary embedding of
    their own."""
    params, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    each = [params.get(kind) or {} for kind in (FULL, WINDOWED)] if isinstance(params, dict) else [params]
    if not all(isinstance(given, dict) for given in (scaling, *each)):
        raise refuse("rope_parameters", params, "must be an object, as must rope_scaling and what is in either")
    if FULL not in params and WINDOWED not in params:
        params = {
            FULL: {"rope_theta": hf.get("rope_theta") or 1e6, **params, **scaling},
            WINDOWED: {"rope_theta": hf.get("rope_local_base_freq") or 1e4},
        }
    whole, near = (
        {**hf, "rope_scaling": None, "rope_parameters": {"rope_theta": theta, **(params.get(kind) or {})}}
        for kind, theta in ((FULL, 1e6), (WINDOWED, 1e4))
    )
    fields = gemma2({"attn_logit_softcapping": None, "final_logit_softcapping": None, **whole}, generation)
    return {
        **fields, "qk_norm": True, "windows": patterned(hf, size(hf, "sliding_window_pattern", 6), 4096),
        "local_rope": rotary(near, fields["head_dim"])[0], "max_position": size(hf, "max_position_embeddings"),
    }  # fmt: skip


@family("Phi3ForCausalLM")
def phi3(hf: HF, generation: HF) -> HF:
    """And Phi-4. Checkpoints have q, k and v in one tensor, and gate and up (checkpoint/fused.py takes them apart)."""
    return {**common({"rms_norm_eps": 1e-5, **hf}, generation), "windows": one_window(hf)}


@family("GraniteForCausalLM")
def granite(hf: HF, generation: HF) -> HF:
    """Llama with multipliers. With h = r g, h + r f(norm(h)) is r (g + f(norm(g))) but for the norm's epsilon, which is
    r^2 times smaller: so the residual is kept divided by its multiplier r."""
    fields, residual = llama(hf, generation), number(hf, "residual_multiplier", 1.0)
    return {
        **fields, "norm_eps": fields["norm_eps"] / residual**2,
        "embedding_scale": number(hf, "embedding_multiplier", 1.0) / residual,
        "attention_scale": number(hf, "attention_multiplier", 1.0),
        "logit_scale": 1 / number(hf, "logits_scaling", 1.0),
    }  # fmt: skip


@family("GraniteMoeForCausalLM")
def granite_moe(hf: HF, generation: HF) -> HF:
    """Granite with experts in every layer; a token's weights are a softmax over those it chose."""
    moe = mixture(
        hf, count="num_local_experts", width="intermediate_size", default_k=2, renormalize=True,
        block="block_sparse_moe", router="router.layer",
    )  # fmt: skip
    return {**granite(hf, generation), "moe": moe}


@family("Starcoder2ForCausalLM")
def starcoder2(hf: HF, generation: HF) -> HF:
    """Layer norms, a plain MLP, biases everywhere."""
    own = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", **hf}
    own["rms_norm_eps"] = number(hf, "norm_epsilon", 1e-5)
    fields, bias = common(own, generation), flag(hf, "use_bias", True)
    if fields["activation"] != "gelu_tanh":
        raise refuse("hidden_act", hf["hidden_act"], "is not supported in a plain MLP; supported: gelu_pytorch_tanh")
    return {
        **fields, "attention_bias": bias, "output_bias": bias, "mlp_bias": bias, "mlp_names": ("c_fc", "c_proj"),
        "layer_norms": True, "windows": one_window(hf),
    }  # fmt: skip


@family("GptOssForCausalLM")
def gpt_oss(hf: HF, generation: HF) -> HF:
    """Experts with biases and a clamped gate, sinks, windows in every other layer."""
    for field, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if hf.get(field, value) != value:
            raise refuse(field, hf[field], f"must be {value}: the gate is made for that")
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    scaling = {} if hf.get("rope_scaling") or hf.get("rope_parameters") else {"rope_scaling": yarn}
    fields = common({"rope_theta": 150000.0, **hf, **scaling}, generation, head_dim=64)
    apart = flag(hf, "gate_and_up_apart")  # in a GGUF file
    moe = mixture(
        hf, count="num_local_experts", width="intermediate_size", default_k=4, renormalize=True, biases=True,
        router="router", names=("gate_proj", "up_proj", "down_proj") if apart else ("gate_up_proj", "down_proj"),
    )  # fmt: skip
    bias = flag(hf, "attention_bias", True)
    return {
        **fields, "attention_bias": bias, "output_bias": bias, "activation": "clamped", "sinks": True, "moe": moe,
        "windows": patterned(hf, 2, 128),
    }  # fmt: skip


def cap(hf: HF, field: str, default: float) -> float:
    """Of a soft cap: null is none."""
    return 0.0 if field in hf and hf[field] is None else number(hf, field, default)


def biases(hf: HF) -> HF:
    """On q, k, v and o together."""
    bias = flag(hf, "attention_bias")
    return {"attention_bias": bias, "output_bias": bias}


def one_window(hf: HF, default: int | None = None) -> tuple[int | None, ...]:
    """The same in all layers, `default` where the field is missing; empty for none."""
    if hf.get("sliding_window", default) is None:
        return ()
    return (size(hf, "sliding_window", default),) * size(hf, "num_hidden_layers", most=MOST_LAYERS)
