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
FOUR_NORMS = {
    **LAYER, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
FUSED = {**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
PLAIN_MLP = {**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}


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


FAMILIES = {  # Mistral's files say "llama"
    "llama": GGUFFamily("LlamaForCausalLM", "llama", rotated=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
    "gemma": GGUFFamily("GemmaForCausalLM", "gemma", fields=_gemma),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", FOUR_NORMS, fields=_gemma2),
    "gemma3": GGUFFamily("Gemma3ForCausalLM", "gemma3_text", FOUR_NORMS, fields=_gemma3),
    "phi3": GGUFFamily("Phi3ForCausalLM", "phi3", FUSED),
    "granite": GGUFFamily("GraniteForCausalLM", "granite", rotated=True, fields=_granite),
    "starcoder2": GGUFFamily("Starcoder2ForCausalLM", "starcoder2", PLAIN_MLP, fields=_starcoder2),
}
