"""What a model on disk is: the values that resolving gives and loading takes."""

from __future__ import annotations

from typing import Any

import msgspec


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor's bytes lie.

    `name` and `shape` are Hugging Face's ([out, in] for a matrix), `kind` is the element type in lower case (f32,
    f16, bf16, q4_1, ...), `file` an index into `Checkpoint.files`, `offset` and `nbytes` in bytes.
    `rotated_heads` > 0: the rows of each of so many heads are stored with rotary pairs adjacent (2i, 2i + 1), not
    as two halves (i, i + d/2) as in Hugging Face's layout; the loader puts them back. `parts`: of a tensor that is made
    of several, by its kind (planaria.loader.composed); then offset and file say nothing.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    rotated_heads: int = 0
    parts: tuple[TensorInfo, ...] = ()
    first: int = 0  # of the parts' rows, where this is some of them


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk. `config` is in Hugging Face's vocabulary also for a GGUF file. Plain values only, so that it
    travels as msgpack and comes back with `msgspec.convert(value, Checkpoint)`."""

    name: str  # MODEL as typed
    path: str  # folder, or the .gguf file
    format: str  # "safetensors" | "gguf"
    config: dict[str, Any]
    generation_config: dict[str, Any] = {}
    tokenizer_dir: str | None = None  # a folder with tokenizer.json (or other files transformers reads)
    chat_template: str | None = None
    sentence: dict[str, Any] = {}  # what sentence-transformers' files say, see checkpoint.sentence
    files: tuple[str, ...] = ()  # that hold tensors
    tensors: tuple[TensorInfo, ...] = ()
    updated: bool = False  # these are not the tensors that the engine began with

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def packed(self) -> bool:
        """Has it weights in fewer bits than they are computed in?"""
        return self.format == "gguf" or any(t.parts and t.kind != "turned" for t in self.tensors)

    @property
    def kind(self) -> str:
        """The element type that most bytes are in: "bf16", "q4_1", ... ("" without tensors)."""
        total: dict[str, int] = {}
        for t in self.tensors:
            total[t.kind] = total.get(t.kind, 0) + t.nbytes
        return max(total, key=lambda k: total[k], default="")
