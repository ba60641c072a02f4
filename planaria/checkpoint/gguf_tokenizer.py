"""tokenizer.json of a GGUF file's vocabulary, as the `tokenizers` library reads it.

The rule to keep: the same text gives the same ids as the model's original tokenizer. What decides is the split before
BPE, which a GGUF file only names (`tokenizer.ggml.pre`); a name that isn't known here is refused, because a wrong
split gives plausible but wrong ids.
"""

from __future__ import annotations

import re
from typing import Any

from planaria.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# letters with case, as DeepSeek's tokenizers list them
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ"
    "-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
IDEOGRAPHS = "[一-龥ࠀ-一가-퟿]+"
SPLITS = {  # one after the other, where there are several
    "default": [  # llama.cpp's own, of files that name no model's
        r"[\p{P}$+<=>^~|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ],
    "llama3": rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{SYMBOLS}",
    "qwen2": rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{SYMBOLS}",
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTION}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTION}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}"],
    "deepseek3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek": ["[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", IDEOGRAPHS, r"\p{N}"],
}
# tokenizer.ggml.pre -> kind of split
PRE = {
    "default": "default", "gpt-2": "gpt2", "gpt2": "gpt2", "phi-2": "gpt2", "olmo": "gpt2",
    "smollm": "digits", "starcoder": "digits", "refact": "digits", "codeshell": "digits",
    "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3", "falcon3": "llama3", "pixtral": "llama3",
    "dbrx": "llama3", "smaug-bpe": "llama3",
    "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2",
    "tekken": "tekken", "gpt-4o": "o200k", "deepseek-coder": "coder", "deepseek-llm": "deepseek",
    "deepseek-v3": "deepseek3", "megrez": "qwen2",
}  # fmt: skip
# these take a word that is in the vocabulary as it is, and begin a text with BOS where the file doesn't say
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")


def convert_tokenizer(meta: dict[str, Any], path: str) -> dict[str, Any] | None:
    """The content of tokenizer.json; None if the file has no vocabulary. Raises ModelError for an unknown kind."""
    kind = meta.get("tokenizer.ggml.model")
    tokens = meta.get("tokenizer.ggml.tokens")
    if kind is None or kind in ("none", "no_vocab") or not tokens:
        return None
    types: list[int] = meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path}: {len(types)} token types for {len(tokens)} tokens; get the file again")
    if kind == "gpt2":
        out = _byte_level(meta, tokens, types, path)
    elif kind == "llama":
        out = _sentencepiece(meta, tokens, types, path)
    else:
        raise ModelError(f"{path}: tokenizer model {kind} is not supported; these are: gpt2, llama")
    special = (CONTROL, UNKNOWN)
    out["added_tokens"] = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[i] in special}
        for i, token in enumerate(tokens) if types[i] in (*special, USER_DEFINED)
    ]  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, **out}


def convert_tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: names of the special tokens."""
    tokens = meta.get("tokenizer.ggml.tokens") or []
    out: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = meta.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            out[f"{ours}_token"] = tokens[index]
    return out


def _byte_level(meta: dict[str, Any], tokens: list[str], types: list[int], path: str) -> dict[str, Any]:
    pre = str(meta.get("tokenizer.ggml.pre", "default"))
    if pre not in PRE:
        raise ModelError(f"{path}: pre-tokenizer {pre} is not known; known are: {', '.join(PRE)}")
    split = PRE[pre]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if split == "gpt2":
        pre_tokenizer: dict[str, Any] = {**level, "use_regex": True}
    elif split == "digits":
        pre_tokenizer = _sequence(
            "pretokenizers", {"type": "Digits", "individual_digits": True}, {**level, "use_regex": True}
        )
    else:
        patterns = SPLITS[split]
        cuts = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in ([patterns] if isinstance(patterns, str) else patterns)
        ]
        pre_tokenizer = _sequence("pretokenizers", *cuts, {**level, "use_regex": False})
    merges = [[left, right] for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    whole_words = pre in WHOLE_WORDS
    return {
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(meta, tokens, bos_default=whole_words, byte_level=True),
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": whole_words,
            "vocab": _vocab(tokens, types), "merges": merges,
        },
    }  # fmt: skip


def _sentencepiece(meta: dict[str, Any], tokens: list[str], types: list[int], path: str) -> dict[str, Any]:
    scores = meta.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(f"{path}: the llama tokenizer needs one score per token; get the file again")
    vocab = _vocab(tokens, types)
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": _sequence("normalizers", *normalizers),
        "pre_tokenizer": None,
        "post_processor": _post_processor(meta, tokens, bos_default=True, byte_level=False),
        "decoder": _sequence("decoders", *decoders),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": _merges_from_scores(tokens, types, scores, vocab),
        },
    }  # fmt: skip


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[list[str]]:
    """SentencePiece joins the neighbours whose joint piece scores best: every way to cut a piece in two pieces is a
    merge, ranked by the piece's score."""
    out: list[tuple[float, int, int, str, str]] = []
    for i, token in enumerate(tokens):
        if types[i] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                out.append((-scores[i], left, right, token[:cut], token[cut:]))
    out.sort()
    return [[left, right] for *_, left, right in out]


def _vocab(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Unused entries ([PAD151646], there to fill up the embedding) aren't tokens."""
    return {
        token: i
        for i, token in enumerate(tokens)
        if types[i] != UNUSED and not (token.startswith("[PAD") and re.fullmatch(r"\[PAD\d+\]", token))
    }


def _post_processor(
    meta: dict[str, Any], tokens: list[str], *, bos_default: bool, byte_level: bool
) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if byte_level:
        steps.append({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True})
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [{"Sequence": {"id": "B", "type_id": 1}}]
    special = {}
    for name, before, default in (("bos", True, bos_default), ("eos", False, False)):
        index = meta.get(f"tokenizer.ggml.{name}_token_id")
        if index is None or not meta.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        token = tokens[index]
        special[token] = {"id": token, "ids": [index], "tokens": [token]}
        for part, type_id in ((template, 0), (pair, 1)):
            part.insert(0 if before else len(part), {"SpecialToken": {"id": token, "type_id": type_id}})
    if special:
        steps.append(
            {"type": "TemplateProcessing", "single": template, "pair": template + pair, "special_tokens": special}
        )
    if len(steps) < 2:
        return steps[0] if steps else None
    return _sequence("processors", *steps)


def _sequence(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(parts)}
