"""Is a GGUF file of each architecture, and of each way to cut a text, read as llama.cpp reads it?

    python -m benchmarks.gguf_families --llama-cpp-python /tmp/peers/llama-cpp/bin/python

Small files with random weights, in float32 and with a KV cache in float32 on both sides: logits of 300 positions, and
ids of 1,500 texts by a vocabulary made of this project's pages. Prints a table and writes
benchmarks/out/gguf_families.json. Wanted differences: GPT-OSS's rotary embedding rounds no limit here, as in the
model's own code (llama.cpp rounds, so positions differ slightly); Qwen2's tokenizer composes characters first
(NFC), as Hugging Face's does; o200k, Tekken and DeepSeek's follow their published patterns where llama.cpp has others
that come near (combining marks, title case, spaces above U+0800), and DeepSeek-LLM's takes digits one by one, as its
vocabulary does.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks import report
from benchmarks.packed import OUT, PEER, divergence, logits
from planaria.checkpoint import resolve_checkpoint
from planaria.checkpoint.gguf_file import read_header
from planaria.checkpoint.gguf_tokenizer import PRE, convert_tokenizer
from tests.model.gguf_files import write_gguf

HIDDEN, INNER, HEADS, KEYS, VOCAB, EXPERTS, WIDTH = 128, 192, 4, 2, 320, 8, 64
POSITIONS = 300
Tensors = dict[str, npt.NDArray[np.float32]]
Meta = dict[str, Any]


class Weights:
    """Random tensors under GGUF's names."""

    def __init__(self, seed: int = 0) -> None:
        self.tensors: Tensors = {}
        self.draw = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int, scale: float = 1.5) -> None:
        values = self.draw.standard_normal(shape) * scale * shape[-1] ** -0.5
        self.tensors[f"{name}.weight"] = values.astype(np.float32)

    def vector(self, name: str, *shape: int, around: float = 0.0) -> None:
        self.tensors[name] = (around + 0.3 * self.draw.standard_normal(shape)).astype(np.float32)


def decoder(
    *, layers: int = 4, dim: int = 32, keys: int = KEYS, bias: str = "", head_norms: str = "", norms: str = "two",
    mlp: str = "gated", tied: bool = True, embedding: float = 8.0, shared: int = 0,
) -> Tensors:  # fmt: skip
    """bias: "qkv" or "all"; head_norms: "each" or "whole"; norms: "two", "four" or "after"; mlp: "gated", "plain",
    "fused" (q, k and v, too) or "experts"."""
    w = Weights()
    w.matrix("token_embd", VOCAB, HIDDEN, scale=embedding)
    w.vector("output_norm.weight", HIDDEN, around=1)
    if not tied:
        w.matrix("output", VOCAB, HIDDEN)
    if bias == "all":
        w.vector("output_norm.bias", HIDDEN)
    for name in (f"blk.{i}." for i in range(layers)):
        before, after = ("attn_norm", "ffn_norm"), ("post_attention_norm", "post_ffw_norm")
        for norm in {"two": before, "four": before + after, "after": after}[norms]:
            w.vector(f"{name}{norm}.weight", HIDDEN, around=1)
            if bias == "all":
                w.vector(f"{name}{norm}.bias", HIDDEN)
        rows = {"attn_q": HEADS * dim, "attn_k": keys * dim, "attn_v": keys * dim}
        for each, size in {"attn_qkv": sum(rows.values())}.items() if mlp == "fused" else rows.items():
            w.matrix(f"{name}{each}", size, HIDDEN)
            if bias:
                w.vector(f"{name}{each}.bias", size)
        for each in ("attn_q", "attn_k") if head_norms else ():
            w.vector(f"{name}{each}_norm.weight", dim if head_norms == "each" else rows[each], around=1)
        w.matrix(f"{name}attn_output", HIDDEN, HEADS * dim)
        if bias == "all":
            w.vector(f"{name}attn_output.bias", HIDDEN)
        if mlp == "experts":
            w.matrix(f"{name}ffn_gate_inp", EXPERTS, HIDDEN, scale=4)
            w.matrix(f"{name}ffn_gate_exps", EXPERTS, WIDTH, HIDDEN)
            w.matrix(f"{name}ffn_up_exps", EXPERTS, WIDTH, HIDDEN)
            w.matrix(f"{name}ffn_down_exps", EXPERTS, HIDDEN, WIDTH)
        else:
            w.matrix(f"{name}ffn_up", INNER * (1 + (mlp == "fused")), HIDDEN)
            w.matrix(f"{name}ffn_down", HIDDEN, INNER)
            if bias == "all":
                w.vector(f"{name}ffn_up.bias", INNER)
                w.vector(f"{name}ffn_down.bias", HIDDEN)
        if mlp == "gated":
            w.matrix(f"{name}ffn_gate", INNER, HIDDEN)
        if shared:
            for each, shape in (("gate", (shared, HIDDEN)), ("up", (shared, HIDDEN)), ("down", (HIDDEN, shared))):
                w.matrix(f"{name}ffn_{each}_shexp", *shape)
            w.vector(f"{name}ffn_gate_inp_shexp.weight", HIDDEN)
    return w.tensors


def gpt_oss() -> Tensors:
    tensors, w = decoder(mlp="experts", dim=64, bias="qkv", tied=False), Weights(1)
    for name in (f"blk.{i}." for i in range(4)):
        tensors[f"{name}post_attention_norm.weight"] = tensors.pop(f"{name}ffn_norm.weight")
        shapes = {"attn_output": (HIDDEN,), "ffn_gate_inp": (EXPERTS,), "ffn_gate_exps": (EXPERTS, WIDTH),
                  "ffn_up_exps": (EXPERTS, WIDTH), "ffn_down_exps": (EXPERTS, HIDDEN)}  # fmt: skip
        for each, shape in shapes.items():
            w.vector(f"{name}{each}.bias", *shape)
        w.vector(f"{name}attn_sinks.weight", HEADS)
    return tensors | w.tensors


def deepseek(*, rank: int = 0, together: bool = False, scores: bool = False) -> Tensors:
    """A dense layer, then experts and a shared one. rank: of queries, 0 for none; together: keys and values of a head
    are made by one tensor, as in older files; scores: a bias of each expert's."""
    w, nope, rope, value, latent = Weights(), 48, 16, 32, 64
    w.matrix("token_embd", VOCAB, HIDDEN, scale=8)
    w.matrix("output", VOCAB, HIDDEN)
    w.vector("output_norm.weight", HIDDEN, around=1)
    for i in range(3 if rank else 27):  # llama.cpp knows by 27 that queries have no latent
        name = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm"):
            w.vector(f"{name}{norm}.weight", HIDDEN, around=1)
        if rank:
            w.matrix(f"{name}attn_q_a", rank, HIDDEN)
            w.vector(f"{name}attn_q_a_norm.weight", rank, around=1)
        w.matrix(f"{name}attn_q_b" if rank else f"{name}attn_q", HEADS * (nope + rope), rank or HIDDEN)
        w.matrix(f"{name}attn_kv_a_mqa", latent + rope, HIDDEN)
        w.vector(f"{name}attn_kv_a_norm.weight", latent, around=1)
        if together:
            w.matrix(f"{name}attn_kv_b", HEADS * (nope + value), latent)
        else:
            w.matrix(f"{name}attn_k_b", HEADS, latent, nope)
            w.matrix(f"{name}attn_v_b", HEADS, value, latent)
        w.matrix(f"{name}attn_output", HIDDEN, HEADS * value)
        if not i:
            for each, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                w.matrix(f"{name}ffn_{each}", *shape)
            continue
        w.matrix(f"{name}ffn_gate_inp", EXPERTS, HIDDEN, scale=4)
        if scores:
            w.vector(f"{name}exp_probs_b.bias", EXPERTS)
        for end, count in (("exps", (EXPERTS,)), ("shexp", ())):
            for each, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
                w.matrix(f"{name}ffn_{each}_{end}", *count, *shape)
    return w.tensors


def factors(**named: tuple[float, float]) -> Tensors:
    """Of rotary frequencies, between these two."""
    return {f"rope_{name}.weight": np.linspace(*ends, 16).astype(np.float32) for name, ends in named.items()}


def scaled(kind: str, **more: Any) -> Meta:
    return {"rope.scaling.type": kind, **{f"rope.scaling.{name}": value for name, value in more.items()}}


WIDE = {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64}
MIXED = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": WIDTH}
YARN = scaled("yarn", factor=4.0, original_context_length=1024)
MULTIPLIERS = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.3, "logit_scale": 0.5}
LATENT = {
    **MIXED, "attention.kv_lora_rank": 64, "rope.dimension_count": 16, "leading_dense_block_count": 1,
    "expert_shared_count": 1, "attention.head_count_kv": 1, "attention.key_length": 80, "attention.value_length": 64,
    "attention.key_length_mla": 64, "attention.value_length_mla": 32, "expert_weights_scale": 1.0,
}  # fmt: skip
OLDER = {**LATENT, "attention.head_count_kv": HEADS, "attention.key_length": 64, "attention.value_length": 32,
         "attention.key_length_mla": None, "attention.value_length_mla": None}  # fmt: skip
BOTH = factors(factors_short=(1, 3), factors_long=(1, 30))
CASES: dict[str, tuple[str, Callable[[], Tensors], Meta]] = {  # architecture, tensors, header
    "llama": ("llama", decoder, {}),
    "llama, factors": ("llama", lambda: decoder() | factors(freqs=(1, 8)), {}),
    "llama, linear": ("llama", decoder, scaled("linear", factor=4.0)),
    "llama, YaRN": ("llama", decoder, YARN),
    "llama, experts (Mixtral)": ("llama", lambda: decoder(mlp="experts"), {**MIXED, "feed_forward_length": WIDTH}),
    "qwen2": ("qwen2", lambda: decoder(bias="qkv"), {}),
    "qwen2, YaRN": ("qwen2", lambda: decoder(bias="qkv"), YARN),
    "qwen2moe": ("qwen2moe", lambda: decoder(mlp="experts", bias="qkv", tied=False, shared=96),
                 {**MIXED, "expert_shared_feed_forward_length": 96}),
    "qwen3": ("qwen3", lambda: decoder(dim=64, head_norms="each"), WIDE),
    "qwen3moe": ("qwen3moe", lambda: decoder(dim=64, head_norms="each", mlp="experts", tied=False), WIDE | MIXED),
    "gemma": ("gemma", lambda: decoder(dim=64, embedding=0.8), WIDE),
    "gemma2": ("gemma2", lambda: decoder(dim=64, norms="four", embedding=0.8), {
        **WIDE, "attention.sliding_window": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3", lambda: decoder(layers=7, dim=64, norms="four", head_norms="each", embedding=0.8), {
        **WIDE, "attention.sliding_window": 64, "rope.freq_base": 1e6, **scaled("linear", factor=8.0)}),
    "phi3": ("phi3", lambda: decoder(mlp="fused", tied=False), scaled("none", original_context_length=2048)),
    "phi3, short factors": ("phi3", lambda: decoder(mlp="fused", tied=False) | BOTH, {
        "context_length": 8192, **scaled("none", original_context_length=2048, attn_factor=1.19)}),
    "phi3, long factors": ("phi3", lambda: decoder(mlp="fused", tied=False) | BOTH, {
        "context_length": 8192, **scaled("none", original_context_length=128, attn_factor=1.19)}),
    "granite": ("granite", lambda: decoder(embedding=0.4), MULTIPLIERS),
    "granitemoe": ("granitemoe", lambda: decoder(embedding=0.4, mlp="experts"),
                   {**MULTIPLIERS, **MIXED, "feed_forward_length": WIDTH}),
    "starcoder2": ("starcoder2", lambda: decoder(mlp="plain", bias="all"), {"attention.layer_norm_epsilon": 1e-5}),
    "smollm3": ("smollm3", decoder, {}),
    "olmo2": ("olmo2", lambda: decoder(norms="after", head_norms="whole", tied=False), {}),
    "olmoe": ("olmoe", lambda: decoder(mlp="experts", head_norms="whole", keys=HEADS, tied=False),
              {**MIXED, "attention.head_count_kv": HEADS, "feed_forward_length": WIDTH}),
    "deepseek2": ("deepseek2", deepseek, LATENT),
    "deepseek2, YaRN": ("deepseek2", deepseek, {**LATENT, **scaled(
        "yarn", factor=4.0, original_context_length=512, yarn_log_multiplier=0.0707)}),
    "deepseek2, older": ("deepseek2", lambda: deepseek(together=True), OLDER),
    "deepseek2, as V3": ("deepseek2", lambda: deepseek(rank=48, scores=True), {
        **LATENT, "attention.q_lora_rank": 48, "expert_gating_func": 2, "expert_weights_norm": True,
        "expert_weights_scale": 2.5}),
    "gpt-oss": ("gpt-oss", gpt_oss, {**WIDE, **MIXED, "attention.sliding_window": 128, "rope.freq_base": 150000.0,
                                     **scaled("yarn", factor=32.0, original_context_length=4096)}),
}  # fmt: skip
NO_VOCABULARY = {"tokenizer.ggml.model": "no_vocab"}


def file_of(name: str) -> Path:
    arch, make, header = CASES[name]
    tensors = make()
    meta = {
        "block_count": sum(key.endswith("attn_output.weight") for key in tensors), "context_length": 2048,
        "embedding_length": HIDDEN, "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KEYS, "vocab_size": VOCAB, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0, "rope.dimension_count": 32, **header,
    }  # fmt: skip
    whole = {f"{arch}.{key}": value for key, value in meta.items()}
    return write_gguf(OUT / "family.gguf", arch, {**whole, **NO_VOCABULARY}, tensors, **dict.fromkeys(TINY_KEYS))


TINY_KEYS = (  # of the tests' files, which are said above
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention__head_count",
    "attention__head_count_kv",
)  # fmt: skip


def families(python: Path, only: str) -> dict[str, dict[str, float]]:
    """By case: KL of llama.cpp's logits and ours, nats, mean of positions; and how often both say the same."""
    ids = np.random.default_rng(1).integers(0, VOCAB, POSITIONS).astype(np.int32)
    np.save(OUT / "ids.npy", ids)
    found = {}
    for name in (name for name in CASES if name.startswith(only)):
        path = file_of(name)
        command = [str(python), str(PEER), "logits", str(path), str(OUT / "ids.npy"), str(OUT / "logits.npy"), "f32"]
        subprocess.run(command, check=True, capture_output=True)
        theirs, (ours, _) = (
            np.load(OUT / "logits.npy"),
            logits(resolve_checkpoint(str(path)), "none", "float32", None, ids),
        )
        same = float((ours.argmax(1) == theirs.argmax(1)).mean())
        found[name] = {"KL": divergence(theirs, ours), "same": same, "std": float(theirs.std())}
    return found


def texts() -> tuple[list[str], list[str]]:
    """Pages to make a vocabulary of, and odd texts."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((PEER.parents[2] / "docs").glob("*.md"))[:12]]
    draw = random.Random(0)
    characters = "aZ bC\n\t\r'sLl.,/1234567890中あアк é́🎉_-+=()  \u00a0\u2003²½٣ǅªﷺ'Re'VE"
    odd = ["".join(draw.choice(characters) for _ in range(draw.randint(1, 60))) for _ in range(1500)]
    return [page[i : i + 400] for page in pages for i in range(0, len(page), 400)] + odd[:500], odd


def tokenizers(python: Path) -> dict[str, int | None]:
    """By `tokenizer.ggml.pre`: texts with other ids than llama.cpp's; None where it doesn't know it. Merges cross any
    cut, so that each cut counts."""
    pages, odd = texts()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        pages, trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    (OUT / "texts.json").write_text(json.dumps(odd))
    found: dict[str, int | None] = {}
    for pre in PRE:
        header: Meta = {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*tokens, "<s>", "</s>"],
            "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3], "tokenizer.ggml.bos_token_id": len(tokens),
            "tokenizer.ggml.eos_token_id": len(tokens) + 1,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        }  # fmt: skip
        path = write_gguf(OUT / "vocabulary.gguf", meta=header)
        done = subprocess.run([python, PEER, "tokens", path, OUT / "texts.json"], capture_output=True, text=True)
        theirs = json.loads(done.stdout) if not done.returncode else None
        ours = Tokenizer.from_str(json.dumps(convert_tokenizer(read_header(str(path)).metadata, str(path))))
        differ = [ours.encode(text).ids != ids for text, ids in zip(odd, theirs or [], strict=False)]
        found[pre] = sum(differ) if theirs is not None else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp-python", type=Path, required=True)
    parser.add_argument("--only", default="", help="of the files those whose names begin so")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    found, cut = families(options.llama_cpp_python, options.only), tokenizers(options.llama_cpp_python)
    (OUT.parent / "gguf_families.json").write_text(json.dumps({"families": found, "tokenizers": cut}, indent=1))
    rows = [[name, f"{each['KL']:.1e}", f"{100 * each['same']:.1f} %"] for name, each in found.items()]
    cuts = [[pre, "not known there" if count is None else str(count)] for pre, count in cut.items()]
    print(report.as_text([
        report.Table("Logits beside llama.cpp's", ["file", "mean KL, nats", "both say the same"], rows),
        report.Table("Texts of 1,500 with other ids", ["tokenizer.ggml.pre", "texts"], cuts),
    ], []))  # fmt: skip


if __name__ == "__main__":
    main()
