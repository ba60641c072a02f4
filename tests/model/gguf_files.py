"""Small GGUF files for tests, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

TINY = {
    "block_count": 2, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip


def write_gguf(
    path: Path,
    arch: str = "llama",
    meta: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    **values: Any,
) -> Path:
    """`values` replace or add `{arch}.*` integers (dots as __), `meta` whole keys; None leaves a key out.

    `tensors` maps GGUF names to float arrays or to (raw bytes, element type).
    """
    writer = GGUFWriter(str(path), arch)
    for key, value in {**TINY, **{k.replace("__", "."): v for k, v in values.items()}}.items():
        if value is not None:
            _add(writer, f"{arch}.{key}", value)
    defaults: dict[str, Any] = {f"{arch}.attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in {**defaults, **(meta or {})}.items():
        if value is not None:
            _add(writer, key, value)
    if tensors is None:
        tensors = {"token_embd.weight": np.zeros((32, 64), np.float32)}
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value and isinstance(value[0], float):
        writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=GGUFValueType.FLOAT32)
    else:
        writer.add_array(key, value)
