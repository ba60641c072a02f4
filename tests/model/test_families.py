"""Families that differ from Llama in more than sizes, against Transformers: read from their files as they are written,
whole, in chunks and batches, on both back ends, and by several ranks."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from planaria import LLM, SamplingParams
from planaria.checkpoint import resolve_checkpoint
from planaria.checkpoint.gguf_families import FAMILIES as GGUF
from planaria.checkpoint.gguf_families import TOP, family_of
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.ops import Quantized
from planaria.kernels.quant import dequantise
from planaria.layers.build import build
from planaria.loader import WeightSource
from planaria.models import model_config
from tests.model.checkpoints import load_reference, write_checkpoint
from tests.model.driver import Driver
from tests.model.gguf_files import write_gguf
from tests.model.test_models import one_torch_thread  # noqa: F401
from tests.tiers import representatives

TOLERANCE = 1e-4  # of log-probabilities
TIED = {"tie_word_embeddings": True}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 3, **TIED}
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + 0.5 * i for i in range(6)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **LONG}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4,
    "logits_scaling": 0.3, "rms_norm_eps": 1e-2, **TIED,
}  # fmt: skip
NO_PAD = {"pad_token_id": None}
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9, "intermediate_size": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 32, **TIED}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "phi3": ("phi3", {"sliding_window": 9, "pad_token_id": None}),
    "phi4-mini": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "pad_token_id": None}),
    "granite": ("granite", GRANITE),
    "starcoder2": ("starcoder2", {"sliding_window": 9, **TIED, "norm_epsilon": 1e-2}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "olmo2": ("olmo2", {"pad_token_id": None}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "rope_parameters": {"rope_theta": 100.0}, **NO_PAD, **TIED}),
    "granite-moe": ("granitemoe", {**GRANITE, **FOUR, "intermediate_size": 64}),
    "olmoe-clipped": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.8, "pad_token_id": None}),
}  # fmt: skip
GREEDY = (
    "gemma2", "gemma3", "phi4-mini", "granite", "starcoder2", "gpt-oss", "olmoe-clipped", "olmo2", "smollm3",
    "granite-moe",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str, **more: Any) -> tuple[Path, Any]:
        key = name + repr(more)
        if key not in made:
            family, overrides = CASES[name]
            folder = write_checkpoint(tmp_path_factory.mktemp(name), family, **{**overrides, **more})
            made[key] = folder, load_reference(folder)
        return made[key]

    return get


def make_model(folder: Path, ops: Any) -> Any:
    found = resolve_checkpoint(str(folder))
    with WeightSource(found) as weights:
        return build(model_config(found.config), weights, ops, quantization="keep")


def distance(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return float((logits.log_softmax(-1) - reference.log_softmax(-1)).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, checkpoint: Any, make_ops: Any) -> None:
    folder, reference = checkpoint(name)
    ops = make_ops()
    model = make_model(folder, ops)
    draw = random.Random(name)
    prompts = [[draw.randrange(131) for _ in range(length)] for length in (1, 5, 18, 41)]
    with torch.no_grad():
        wanted = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    if name == "phi4-mini":  # its tables are those of the longest text that is served, Transformers' of each text's
        prompts, wanted = prompts[3:], wanted[3:]
    assert min(float(w.std()) for w in wanted) > 0.5  # else a wrong model could pass
    alone = Driver(model, ops, block_size=16)
    together = Driver(model, ops, block_size=16, seed=1)
    found = together.step(dict(enumerate(prompts)))
    for i, want in enumerate(wanted):
        assert distance(alone.whole(i, prompts[i], chunk=7), want) < TOLERANCE
        assert distance(found[i], want) < TOLERANCE


def said_by(reference: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """What Transformers would say after the prompt and each of the tokens: the same if it always says them."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0]
    chosen: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return chosen


OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kv_cache_memory": "32MiB"}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_equal_those_of_transformers(name: str, checkpoint: Any) -> None:
    """20 prompts at once through the engine, in chunks; each alone says the same."""
    folder, reference = checkpoint(name)
    draw = random.Random(name)
    prompts = [[draw.randrange(3, 131) for _ in range(draw.randrange(33, 60))] for _ in range(20)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, max_num_batched_tokens=96, max_num_seqs=32, **OPTIONS) as llm:
        results = llm.generate(prompts, params)
        alone = llm.generate(prompts[:1], params)
    for prompt, result in zip(prompts, results, strict=True):
        said = list(result.outputs[0].token_ids)
        assert said_by(reference, prompt, said) == said and len(said) == 12
    assert alone[0].outputs[0].token_ids == results[0].outputs[0].token_ids


UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "num_hidden_layers": 2}
RANKS = [
    ("gemma3", 2, 1), ("gemma2", 2, 2), ("starcoder2", 2, 1), ("gpt-oss", 2, 1), ("granite", 1, 2), ("phi3", 2, 1),
    ("olmo2", 2, 1), ("smollm3", 2, 1), ("granite-moe", 2, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tp", "pp"), representatives([*RANKS, ("gpt-oss", 2, 0)], ("gemma2", 2, 2), ("gpt-oss", 2, 0))
)
def test_ranks_say_the_same(name: str, tp: int, pp: int, checkpoint: Any) -> None:
    """Three KV heads on two ranks, layers on two stages; whole experts, with their biases, on each rank (0)."""
    types = {"layer_types": ["sliding_attention", "full_attention"]} if "gemma" in name else {}
    folder, reference = checkpoint(name, **UNEVEN, **types)
    draw = random.Random(name)
    prompts = [[draw.randrange(3, 131) for _ in range(draw.randrange(1, 40))] for _ in range(4)]
    with LLM(
        str(folder),
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp or 1,
        threads=1,
        enable_expert_parallel=pp == 0,
        **OPTIONS,
    ) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        said = list(result.outputs[0].token_ids)
        assert said_by(reference, prompt, said) == said and len(said) == 6


def to_mxfp4(values: Any) -> tuple[Any, Any, Any]:
    """[..., K] as (codes [..., K / 32, 16], exponents [..., K / 32], the values they say)."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    exponents = np.clip(np.ceil(np.log2(np.maximum(most, 1e-30) / 6)), -20, 15)
    halves = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    near = np.abs(np.abs(blocks / 2.0**exponents)[..., None] - halves).argmin(-1)
    codes = (near | (blocks < 0) * 8).astype(np.uint8)
    exact = np.where(blocks < 0, -1, 1) * halves[near] * 2.0**exponents
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed, (exponents[..., 0] + 127).astype(np.uint8), exact.reshape(values.shape).astype(np.float32)


@pytest.mark.parametrize("tp", [1, 2])
def test_mxfp4_experts_are_read_exactly(tp: int, checkpoint: Any, tmp_path: Path) -> None:
    """They stay packed, and say what Transformers says with the values that they stand for."""
    source, _ = checkpoint("gpt-oss")
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    tensors, exact = dict(load_file(source / "model.safetensors")), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        turned = np.ascontiguousarray(tensors.pop(name).transpose(0, 2, 1))
        blocks, scales, values = to_mxfp4(turned)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact[name] = np.ascontiguousarray(values.transpose(0, 2, 1))
    for folder, contents in ((plain, {**load_file(source / "model.safetensors"), **exact}), (packed, tensors)):
        folder.mkdir()
        save_file(contents, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        if folder == packed:
            config["quantization_config"] = {"quant_method": "mxfp4"}
        (folder / "config.json").write_text(json.dumps(config))
    found = resolve_checkpoint(str(packed))
    with WeightSource(found) as weights:
        expert = weights.get("model.layers.0.mlp.experts.1.gate_up_proj.weight")
        assert isinstance(expert, Quantized) and expert.kind == "q8_0"
        assert np.array_equal(dequantise(expert), exact["model.layers.0.mlp.experts.gate_up_proj"][1].T)
    reference, draw = load_reference(plain), random.Random(tp)
    prompts = [[draw.randrange(3, 131) for _ in range(20)] for _ in range(4)]
    with LLM(str(packed), skip_tokenizer_init=True, tensor_parallel_size=tp, threads=1, **OPTIONS) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        said = list(result.outputs[0].token_ids)
        assert said_by(reference, prompt, said) == said


def check(path: Path, reference: Any, seed: str) -> None:
    """The file's logits of a prompt are the reference's."""
    ops = CpuOps("float32", 2)
    driver, draw = Driver(make_model(path, ops), ops, block_size=16), random.Random(seed)
    prompt = [draw.randrange(131) for _ in range(41)]
    with torch.no_grad():
        wanted = reference(torch.tensor([prompt])).logits[0]
    assert distance(driver.whole(0, prompt), wanted) < TOLERANCE
    ops.close()


GGUF_META: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention.sliding_window": 9},
    "gemma3": {"attention.sliding_window": 9, "rope.freq_base": 1e6, "rope.freq_base_swa": 100.0,
               "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "phi3": {"attention.sliding_window": 9},
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.22, "attention.scale": 0.4, "logit_scale": 0.3},
    "starcoder2": {"attention.layer_norm_epsilon": 1e-2, "attention.sliding_window": 9},
    "olmo2": {}, "smollm3": {"rope.freq_base": 100.0},
    "phi4-mini": {"rope.dimension_count": 12, "rope.scaling.original_context_length": 32,
                  "rope.scaling.attn_factor": math.sqrt(1 + math.log(256 / 32) / math.log(32))},
}  # fmt: skip


GGUF_FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32, "layer_types": None},
    "gemma3": {"query_pre_attn_scalar": 32, "layer_types": None, "num_hidden_layers": 6},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("case", GGUF_META)
def test_gguf_files_of_these_families(case: str, checkpoint: Any, tmp_path: Path) -> None:
    """Written from a checkpoint as llama.cpp's converter does: names, 1 added to Gemma's norms, rows turned."""
    folder, reference = checkpoint(case, **GGUF_FIELDS.get(case, {}))
    arch = "phi3" if case == "phi4-mini" else case
    config = reference.config
    back = {value: key for key, value in GGUF[arch].layer.items()}
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if "norm.weight" in name and "gemma" in arch:
            values = values + np.float32(1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if GGUF[arch].rotated and heads:
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        stem, _, suffix = name.rpartition(".")
        top = {value: key for key, value in TOP.items()}.get(stem)
        _, _, layer, rest = [*stem.split(".", 3), "", "", ""][:4]
        tensors[f"{top or f'blk.{layer}.{back.get(rest)}'}.{suffix}"] = np.ascontiguousarray(values)
    sizes = {"block_count": config.num_hidden_layers, "attention.head_count": 4, "attention.head_count_kv": 2}
    if hasattr(config, "head_dim") and "gemma" in arch:
        sizes |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    meta = {f"{arch}.{key}": value for key, value in GGUF_META[case].items()}
    if case == "phi4-mini":
        tensors |= {f"rope_factors_{kind}.weight": np.float32(LONG[f"{kind}_factor"]) for kind in ("short", "long")}
    meta[f"{arch}.attention.layer_norm_rms_epsilon"] = getattr(config, "rms_norm_eps", 1e-5)
    path = write_gguf(tmp_path / "m.gguf", arch, meta, tensors, **{k.replace(".", "__"): v for k, v in sizes.items()})
    check(path, reference, arch)


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "topk_method": "greedy",
}  # fmt: skip
DEEPSEEK_META = {
    "attention.kv_lora_rank": 32, "rope.dimension_count": 16, "attention.key_length": 48, "attention.value_length": 32,
    "attention.key_length_mla": 32, "attention.value_length_mla": 16, "expert_feed_forward_length": 32,
    "expert_shared_count": 1, "leading_dense_block_count": 1, "feed_forward_length": 96,
}  # fmt: skip
GGUF_EXPERTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # Transformers' type, its fields, the header's
    "llama": ("mixtral", {**FOUR, "intermediate_size": 64}, {"feed_forward_length": 64}),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, **NO_PAD, "shared_expert_intermediate_size": 48, "norm_topk_prob": False}, {
        "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32}, {
        "expert_feed_forward_length": 32, "attention.key_length": 32, "attention.value_length": 32}),
    "olmoe": ("olmoe", {**EXPERTS, **NO_PAD, "intermediate_size": 64}, {"feed_forward_length": 64}),
    "granitemoe": ("granitemoe", {**GRANITE, **FOUR, "intermediate_size": 64}, {
        "feed_forward_length": 64, **GGUF_META["granite"]}),
    "deepseek2": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None}, DEEPSEEK_META),
    "deepseek2-v3": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 32, "norm_topk_prob": True}, {
        **DEEPSEEK_META, "attention.q_lora_rank": 32, "expert_gating_func": 2, "expert_weights_norm": True,
        "expert_weights_scale": 2.5}),
    "gpt-oss": ("gpt_oss", GPT_OSS, {
        "feed_forward_length": 64, "expert_feed_forward_length": 64, "attention.sliding_window": 9,
        "attention.key_length": 16, "attention.value_length": 16, "rope.scaling.factor": 32.0,
        "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 4096}),
}  # fmt: skip


def theta_of(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


def as_gguf(tensors: dict[str, Any], family: Any, heads: dict[str, int]) -> dict[str, Any]:
    """Tensors under Hugging Face's names as llama.cpp's converter writes them, experts together."""
    back = {value: key for key, value in family.layer.items()}
    found: dict[str, Any] = {}
    for name, values in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "sinks":
            stem, suffix = name, "weight"
        if family.rotated and (count := heads.get(stem.rpartition(".")[2])):
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if stem.endswith("shared_expert_gate"):
            values = values[0]
        if suffix == "e_score_correction_bias":
            stem, suffix = f"{stem}.e_score_correction", "bias"
        if stem.endswith("kv_b_proj"):
            each_head = values.reshape(heads["q_proj"], -1, values.shape[1])
            keys, latents = each_head[:, : heads["nope"]].swapaxes(1, 2), each_head[:, heads["nope"] :]
            turns = {stem.replace("kv_b_proj", "k_b"): keys, stem.replace("kv_b_proj", "v_b"): latents}
        elif name.endswith(f"gate_up_proj.{suffix}"):
            turns = {stem.replace("gate_up", part): values[i::2] for i, part in enumerate(("gate", "up"))}
        else:
            turns = {stem: values}
        for each, part in turns.items():
            _, _, layer, rest = [*each.split(".", 3), "", "", ""][:4]
            top = {value: key for key, value in TOP.items()}.get(each)
            of_layer = f"blk.{layer}.{back.get(re.sub('[.][0-9]+[.]', '.*.', rest))}"
            found.setdefault(f"{top or of_layer}.{suffix}", []).append(part)
    return {
        name: np.ascontiguousarray(np.stack(parts) if "_exps" in name else parts[0]) for name, parts in found.items()
    }


@pytest.mark.parametrize("arch", GGUF_EXPERTS)
def test_gguf_files_with_experts(arch: str, tmp_path: Path) -> None:
    kind, overrides, header = GGUF_EXPERTS[arch]
    arch = arch.removesuffix("-v3")
    folder = write_checkpoint(tmp_path / "checkpoint", kind, **overrides)
    reference, found = load_reference(folder), resolve_checkpoint(str(folder))
    with WeightSource(found) as source:
        names = sorted(
            source.names(), key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]
        )
        tensors = {name: np.array(source.get(name)) for name in names}
    config = reference.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads, "nope": 16}
    meta = {"expert_count": 4, "expert_used_count": 2, **header}
    meta |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": theta_of(config)}
    family = family_of({"general.architecture": arch, "llama.expert_count": 4})
    path = write_gguf(
        tmp_path / "m.gguf", arch, {f"{arch}.{key}": value for key, value in meta.items()},
        as_gguf(tensors, family, heads), attention__head_count_kv=config.num_key_value_heads, feed_forward_length=None,
    )  # fmt: skip
    check(path, reference, arch)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_part_for_texts_of_a_model_of_pictures(prefix: str, checkpoint: Any, tmp_path: Path) -> None:
    source, reference = checkpoint("gemma3")
    tensors = {
        name.replace("model.", prefix, 1): values for name, values in load_file(source / "model.safetensors").items()
    }
    save_file({**tensors, "vision_tower.weight": np.zeros((3, 3), np.float32)}, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    ops = CpuOps("float32", 2)
    prompt = list(range(3, 40))
    with torch.no_grad():
        wanted = reference(torch.tensor([prompt])).logits[0]
    assert distance(Driver(make_model(tmp_path, ops), ops, block_size=16).whole(0, prompt), wanted) < TOLERANCE
    ops.close()
