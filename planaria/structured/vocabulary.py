"""The tokens of a model as grammars see them, and the bounds within which grammars are compiled and followed.

Made once a process, when a request first brings a grammar: a third of a second, and 60 MB for 49,152 tokens.
"""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import llguidance

from planaria.errors import ModelError

# What one grammar may cost, whoever compiles or follows it; the library counts, so that it is the same everywhere.
MAX_FUEL = 1_000_000  # for making a grammar's lexer; 50,000 of it are a millisecond
MAX_STEP_FUEL = 200_000  # for one token's mask; 14,000 are a millisecond
# Of the parser, for one token's mask; each takes the longer the more there are at once. An object with 120 properties
# that may be left out has as many, in 1 ms; ambiguous grammars that were made for it take 60 ms.
MAX_STEP_ITEMS = 10_000
MAX_STATES = 50_000  # of a lexer; 1 to 2 kB each
MAX_SYMBOLS = 100_000  # of a grammar

_lock = threading.Lock()


def limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=MAX_FUEL, step_lexer_fuel=MAX_STEP_FUEL, step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_STATES, max_grammar_size=MAX_SYMBOLS, verbose_errors=False,
    )  # fmt: skip


def tokenizer_json(folder: str) -> str:
    """A model's tokenizer as `tokenizers` has it. Raises ModelError."""
    path = Path(folder) / "tokenizer.json"
    if path.exists():
        return path.read_text(encoding="utf-8")
    try:
        from transformers import AutoTokenizer

        return str(AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer.to_str())
    except Exception as e:
        raise ModelError(f"{folder}: no tokenizer that structured outputs can use: {e}") from None


def make_vocabulary(tokenizer: str, vocab_size: int, eos_id: int) -> llguidance.LLTokenizer:
    """Of a tokenizer as JSON. eos_id: the token that stands for the end of an output. Raises ModelError."""
    value: dict[str, Any] = json.loads(tokenizer)
    if value.get("truncation") is not None or value.get("padding") is not None:
        tokenizer = json.dumps({**value, "truncation": None, "padding": None})
    own = [token["id"] for token in value.get("added_tokens") or ()] + list(_ids(value.get("model", {}).get("vocab")))
    try:
        return llguidance.LLTokenizer(tokenizer, n_vocab=max(vocab_size, max(own, default=0) + 1), eos_token=eos_id)
    except Exception as e:  # a decoder that it can't take apart
        raise ModelError(f"structured outputs don't work with this model's tokenizer: {e}") from None


def _ids(vocab: Any) -> list[int]:
    """Of a model's vocabulary: a map to ids, or a list of pieces in their order."""
    return list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1] if vocab else []


@functools.cache
def _of_folder(folder: str, vocab_size: int, eos_id: int) -> llguidance.LLTokenizer:
    return make_vocabulary(tokenizer_json(folder), vocab_size, eos_id)


def vocabulary_of(folder: str, vocab_size: int, eos_id: int) -> llguidance.LLTokenizer:
    """That of the model whose tokenizer's files are in `folder`. Any thread."""
    with _lock:
        return _of_folder(folder, vocab_size, eos_id)
