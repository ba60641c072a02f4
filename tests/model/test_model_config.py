"""config.json in, ModelConfig or one line that names the field out."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.errors import ModelError
from planaria.models import SUPPORTED, model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": 128,
}


def of(architecture: str, **fields: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **fields}


def test_defaults_are_those_of_the_format() -> None:
    config = model_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    assert (config.rope.theta, config.rope.kind, config.max_position) == (10000.0, "default", 128)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias or config.windows)


def test_both_spellings_of_the_rotary_parameters_mean_the_same() -> None:
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    assert model_config(old) == model_config(new)


def test_families_differ_where_they_should() -> None:
    llama = model_config({**LLAMA, "attention_bias": True})
    assert (llama.attention_bias, llama.output_bias, llama.mlp_bias) == (True, True, False)
    qwen2 = model_config(of("Qwen2ForCausalLM"))
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = model_config(of("Qwen3ForCausalLM"))
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_sliding_windows() -> None:
    assert model_config(of("MistralForCausalLM")).windows == (4096, 4096)
    assert model_config(of("MistralForCausalLM", sliding_window=None)).windows == ()
    assert model_config(of("MistralForCausalLM", sliding_window=8)).windows == (8, 8)
    assert model_config(of("Qwen2ForCausalLM", sliding_window=8, max_window_layers=0)).windows == ()
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert model_config(of("Qwen2ForCausalLM", **on, max_window_layers=1)).windows == (None, 8)
    assert model_config(of("Qwen2ForCausalLM", **on)).windows == ()
    types = ["sliding_attention", "full_attention"]
    assert model_config(of("Qwen3ForCausalLM", **on, layer_types=types)).windows == (8, None)


def test_end_tokens_come_from_the_generation_configuration_first() -> None:
    assert model_config({**LLAMA, "eos_token_id": 2}).eos_ids == (2,)
    assert model_config({**LLAMA, "eos_token_id": 2}, {"eos_token_id": [7, 9]}).eos_ids == (7, 9)


def test_parameters_are_counted() -> None:
    config = model_config({**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True})
    attention = 64 * 64 * 2 + 2 * 64 * 32
    assert config.num_parameters == 99 * 64 + 2 * (attention + 3 * 64 * 96 + 2 * 64) + 64


YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("hidden_size", {"hidden_size": None}),
    ("hidden_size", {"hidden_size": 0}),
    ("hidden_size", {"hidden_size": "64"}),
    ("hidden_size", {"hidden_size": 66}),
    ("intermediate_size", {"intermediate_size": -1}),
    ("num_hidden_layers", {"num_hidden_layers": 2.5}),
    ("num_hidden_layers", {"num_hidden_layers": 10**9}),
    ("num_attention_heads", {"num_attention_heads": True}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("num_key_value_heads", {"num_key_value_heads": 8}),
    ("head_dim", {"head_dim": 15}),
    ("head_dim", {"head_dim": -8}),
    ("vocab_size", {"vocab_size": 0}),
    ("max_position_embeddings", {"max_position_embeddings": None}),
    ("rms_norm_eps", {"rms_norm_eps": "small"}),
    ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
    ("eos_token_id", {"eos_token_id": "</s>"}),
    ("dtype", {"torch_dtype": "float64"}),
    ("rope_theta", {"rope_theta": 0}),
    ("rope_scaling", {"rope_scaling": "linear"}),
    ("rope_scaling.rope_type", {"rope_scaling": {"type": "mrope"}}),
    ("rope_scaling.factor", {"rope_scaling": {"type": "linear"}}),
    ("rope_scaling.factor", {"rope_scaling": {"type": "dynamic", "factor": 0.5}}),
    ("rope_parameters.beta_fast", {"rope_parameters": {**YARN, "beta_fast": "32"}}),
    ("rope_parameters.original_max", {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}),
    ("rope_parameters.low_freq_factor", {"rope_parameters": {"rope_type": "llama3", "factor": 8}}),
    (
        "rope_parameters.high_freq_factor",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
            }
        },
    ),
    (
        "rope_parameters.short_factor",
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 8}},
    ),
    ("rope_parameters", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    ("partial_rotary_factor", {"partial_rotary_factor": -1}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_nonsense_is_refused_by_name(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as refusal:
        model_config({**LLAMA, **fields})
    message = str(refusal.value)
    assert name in message and "\n" not in message and len(message) < 200


ANYTHING: list[Any] = [
    None, 0, -1, 1, 3, 2**31, 10**400, 1e308, -0.5, float("nan"), float("inf"), "x", "", True, [], [1], [{}], [[], 1],
    {}, {"rope_type": "yarn"}, {"type": "linear", "factor": "a"}, {"rope_type": "llama3", "factor": 10**400},
    {"factor": [1]}, {"full_attention": 5},
    {"rope_type": "longrope", "short_factor": [10**400] * 8, "long_factor": [1]},
]  # fmt: skip
READ = (
    "hidden_act", "hidden_activation", "head_dim", "eos_token_id", "dtype", "rope_scaling", "rope_parameters",
    "rope_theta", "partial_rotary_factor", "layer_types", "sliding_window", "sliding_window_pattern", "no_rope_layers",
    "attn_logit_softcapping", "query_pre_attn_scalar", "residual_multiplier", "logits_scaling", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "n_group", "topk_group",
    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "swiglu_limit", "clip_qkv", "norm_topk_prob", "rms_norm_eps",
)  # fmt: skip


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_anything_in_any_field_is_one_line_or_harmless(architecture: str) -> None:
    for field in (*LLAMA, *READ):
        for value in ANYTHING if field != "architectures" else ():
            try:
                assert model_config(of(architecture, **{field: value})).num_parameters > 0
            except ModelError as e:
                assert "\n" not in str(e) and len(str(e)) < 1000


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("layer_types", {"layer_types": ["full_attention"]}),
        ("layer_types", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("sliding_window", {"use_sliding_window": True, "sliding_window": -4}),
        ("max_window_layers", {"use_sliding_window": True, "max_window_layers": -1}),
        ("use_sliding_window", {"use_sliding_window": "true"}),
    ],
)
def test_nonsense_about_windows_is_refused_by_name(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=name):
        model_config(of("Qwen2ForCausalLM", **fields))


def test_a_mistral_with_two_kinds_of_layers_is_refused() -> None:
    types = ["sliding_attention", "full_attention"]
    with pytest.raises(ModelError, match="layer_types"):
        model_config(of("MistralForCausalLM", layer_types=types))


@pytest.mark.parametrize("named", [["GPT2LMHeadModel"], None, [], "LlamaForCausalLM"])
def test_an_unsupported_architecture_is_named_with_the_supported_ones(named: Any) -> None:
    with pytest.raises(ModelError) as refusal:
        model_config({**LLAMA, "architectures": named})
    message = str(refusal.value)
    if named != "LlamaForCausalLM":
        assert all(name in message for name in SUPPORTED)
    assert "architecture" in message and (not named or named[0] in message)
