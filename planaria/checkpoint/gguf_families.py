"""What each GGUF architecture is in Hugging Face's vocabulary: names of tensors, fields of config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Config = dict[str, Any]
Get = Callable[..., Any]  # (key, default) -> the architecture's own value

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EACH = "*"  # an expert's number
FOUR_NORMS = {
    **LAYER, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
POST_NORMS = {**FOUR_NORMS, "attn_norm": "-", "ffn_norm": "-"}
FUSED = {**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
PLAIN_MLP = {**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


def _experts(block: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Of layers with experts. EACH: one tensor has all of them, [experts, ...]."""
    names = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {**LAYER, "ffn_gate_inp": f"{block}.{router}"} | {
        theirs: f"{block}.experts.{EACH}.{ours}" for theirs, ours in names.items()
    }


EXPERTS = _experts("mlp", "gate", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERT = {
    **EXPERTS, "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
LATENT = {
    **EXPERTS, "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b",
    "attn_v_b": "self_attn.v_b", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction",
}  # fmt: skip
SINKS = {
    **_experts("mlp", "router", "gate_proj", "up_proj", "down_proj"), "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip


class GGUFFamily(NamedTuple):
    """rotated: q and k rows are stored with rotary pairs adjacent. fields(get, config): beside those that all have."""

    architecture: str
    model_type: str
    layer: dict[str, str] = LAYER
    rotated: bool = False
    fields: Callable[[Get, Config], Config] = lambda get, config: {}


def _gemma(get: Get, config: Config) -> Config:
    """1 is added to norms' weights when such a file is written."""
    return {"hidden_activation": "gelu_pytorch_tanh", "plain_norms": True}


def _gemma2(get: Get, config: Config) -> Config:
    """The file doesn't say what scores are divided by: the largest model of each generation has its own."""
    largest = config["num_hidden_layers"] in (46, 62)
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {
        **_gemma(get, config), "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get("final_logit_softcapping", 30.0),
    }  # fmt: skip


def _gemma3(get: Get, config: Config) -> Config:
    return {
        **_gemma2(get, config), "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "rope_local_base_freq": get("rope.freq_base_swa", 10000.0),
    }  # fmt: skip


def _granite(get: Get, config: Config) -> Config:
    return {
        "embedding_multiplier": get("embedding_scale", 1.0), "residual_multiplier": get("residual_scale", 1.0),
        "attention_multiplier": get("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": get("logit_scale", 1.0),
    }  # fmt: skip


def _starcoder2(get: Get, config: Config) -> Config:
    return {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": get("attention.layer_norm_epsilon", 1e-5),
        "use_bias": config["attention_bias"],
    }  # fmt: skip


def _mixture(get: Get, config: Config) -> Config:
    return {"num_experts": get("expert_count"), "num_experts_per_tok": get("expert_used_count")}


def _mixtral(get: Get, config: Config) -> Config:
    return {"num_local_experts": get("expert_count"), "num_experts_per_tok": get("expert_used_count")}


def _qwen_moe(get: Get, config: Config) -> Config:
    return {**_mixture(get, config), "moe_intermediate_size": get("expert_feed_forward_length")}


def _qwen2_moe(get: Get, config: Config) -> Config:
    shared = get("expert_shared_feed_forward_length")
    bias = config["attention_bias"]
    return {**_qwen_moe(get, config), "shared_expert_intermediate_size": shared, "qkv_bias": bias}


def _gpt_oss(get: Get, config: Config) -> Config:
    """Gate and up are two tensors here; its rotary embedding rounds no limit."""
    scaling = config["rope_scaling"]
    return {
        **_mixtral(get, config), "intermediate_size": get("expert_feed_forward_length"), "gate_and_up_apart": True,
        "rope_scaling": {**scaling, "truncate": False} if scaling else None,
    }  # fmt: skip


def _deepseek(get: Get, config: Config) -> Config:
    """Keys' and values' lengths are those of a head in older files, of what is cached in newer ones."""
    rotated, scaling, sigmoid = get("rope.dimension_count"), config["rope_scaling"], get("expert_gating_func", 1) == 2
    key = get("attention.key_length_mla") or get("attention.key_length")
    if scaling and scaling["rope_type"] == "yarn":
        stretch = 10 * get("rope.scaling.yarn_log_multiplier", 0.0)
        scaling = {**scaling, "mscale": stretch, "mscale_all_dim": stretch}
    found: Config = {
        "q_lora_rank": get("attention.q_lora_rank"), "kv_lora_rank": get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated,
        "v_head_dim": get("attention.value_length_mla") or get("attention.value_length"),
        "num_key_value_heads": config["num_attention_heads"], "partial_rotary_factor": 1.0, "rope_scaling": scaling,
        "moe_intermediate_size": get("expert_feed_forward_length"), "n_routed_experts": get("expert_count"),
        "n_shared_experts": get("expert_shared_count"), "num_experts_per_tok": get("expert_used_count"),
        "first_k_dense_replace": get("leading_dense_block_count", 0), "attention_bias": False,
        "routed_scaling_factor": get("expert_weights_scale", 1.0), "norm_topk_prob": get("expert_weights_norm", False),
    }  # fmt: skip
    groups = {"n_group": get("expert_group_count", 1), "topk_group": get("expert_group_used_count", 1)}
    if sigmoid:
        return {**found, **groups, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return {**found, **groups, "topk_method": "greedy" if groups["n_group"] == 1 else "group_limited_greedy"}


FAMILIES = {  # Mistral's files say "llama"
    "llama": GGUFFamily("LlamaForCausalLM", "llama", rotated=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
    "gemma": GGUFFamily("GemmaForCausalLM", "gemma", fields=_gemma),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", FOUR_NORMS, fields=_gemma2),
    "gemma3": GGUFFamily("Gemma3ForCausalLM", "gemma3_text", FOUR_NORMS, fields=_gemma3),
    "phi3": GGUFFamily("Phi3ForCausalLM", "phi3", FUSED),
    "granite": GGUFFamily("GraniteForCausalLM", "granite", rotated=True, fields=_granite),
    "granitemoe": GGUFFamily(
        "GraniteMoeForCausalLM",
        "granitemoe",
        _experts("block_sparse_moe", "router.layer", "gate_proj", "up_proj", "down_proj"),
        rotated=True,
        fields=lambda get, config: {**_granite(get, config), **_mixtral(get, config)},
    ),
    "starcoder2": GGUFFamily("Starcoder2ForCausalLM", "starcoder2", PLAIN_MLP, fields=_starcoder2),
    "smollm3": GGUFFamily("SmolLM3ForCausalLM", "smollm3", rotated=True),
    "olmo2": GGUFFamily("Olmo2ForCausalLM", "olmo2", POST_NORMS),
    "qwen2moe": GGUFFamily("Qwen2MoeForCausalLM", "qwen2_moe", SHARED_EXPERT, fields=_qwen2_moe),
    "qwen3moe": GGUFFamily(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        EXPERTS,
        fields=lambda get, config: {**_qwen_moe(get, config), "norm_topk_prob": True},
    ),
    "deepseek2": GGUFFamily("DeepseekV2ForCausalLM", "deepseek_v2", LATENT, fields=_deepseek),
    "olmoe": GGUFFamily("OlmoeForCausalLM", "olmoe", EXPERTS, fields=_mixture),
    "gpt-oss": GGUFFamily("GptOssForCausalLM", "gpt_oss", SINKS, fields=_gpt_oss),
}
MIXTRAL = GGUFFamily(
    "MixtralForCausalLM", "mixtral", _experts("block_sparse_moe", "gate", "w1", "w3", "w2"), rotated=True,
    fields=_mixtral,
)  # fmt: skip


def family_of(metadata: Config) -> GGUFFamily | None:
    """None: not known here."""
    arch = str(metadata.get("general.architecture", ""))
    return MIXTRAL if arch == "llama" and metadata.get("llama.expert_count") else FAMILIES.get(arch)
