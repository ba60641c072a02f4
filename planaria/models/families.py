"""The families: what each says in its config.json beside what all say alike. No torch.

A family is a function here, under its name in config.json ("architectures"), that gives the arguments of ModelConfig.
"""

from __future__ import annotations

from collections.abc import Callable

from planaria.models.common import common, windows
from planaria.models.config import ModelConfig
from planaria.models.experts import dense_layers, mixture
from planaria.models.fields import HF, MOST_LAYERS, flag, refuse, size
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
    types = set(hf.get("layer_types") or ())
    if len(types) > 1:
        raise refuse("layer_types", sorted(types), "a Mistral model has the same attention in all layers")
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
    if hf.get("clip_qkv") is not None:
        raise refuse("clip_qkv", hf["clip_qkv"], "clipping q, k and v is not supported")
    moe = mixture(
        hf, count="num_experts", width="intermediate_size", default_k=8, renormalize=flag(hf, "norm_topk_prob")
    )
    return {**common(hf, generation), **biases(hf), "wide_qk_norm": True, "moe": moe}


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


def biases(hf: HF) -> HF:
    """On q, k, v and o together."""
    bias = flag(hf, "attention_bias")
    return {"attention_bias": bias, "output_bias": bias}


def one_window(hf: HF, default: int | None = None) -> tuple[int | None, ...]:
    """The same in all layers, `default` where the field is missing; empty for none."""
    if hf.get("sliding_window", default) is None:
        return ()
    return (size(hf, "sliding_window", default),) * size(hf, "num_hidden_layers", most=MOST_LAYERS)
