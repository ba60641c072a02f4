"""MODEL as typed -> Checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk. `config` is in Hugging Face's vocabulary also for a GGUF file."""

    name: str  # MODEL as typed
    path: str  # folder, or the .gguf file
    format: str  # "safetensors" | "gguf"
    config: dict[str, Any]
    generation_config: dict[str, Any] = {}
    tokenizer_dir: str | None = None  # a folder with tokenizer.json (or other files transformers reads)
    chat_template: str | None = None


def resolve_checkpoint(model: str) -> Checkpoint:
    raise NotImplementedError
