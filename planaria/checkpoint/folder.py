"""A folder in Hugging Face's layout: configuration files and the index of its safetensors files.

Only headers are read. Each is checked against its file's length, so that a download cut short is found before a
process starts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from planaria.checkpoint.files import opened
from planaria.checkpoint.fused import unfused
from planaria.checkpoint.quantised import method_of, together
from planaria.checkpoint.sentence import read_sentence
from planaria.checkpoint.spec import Checkpoint, TensorInfo
from planaria.checkpoint.text_part import text_config, text_tensors
from planaria.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format

# safetensors dtype -> our kind and bytes per element
KINDS = {
    "F64": ("f64", 8), "F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2),
    "I64": ("i64", 8), "I32": ("i32", 4), "I16": ("i16", 2), "I8": ("i8", 1), "U8": ("u8", 1), "BOOL": ("bool", 1),
    "F8_E4M3": ("f8_e4m3", 1), "F8_E5M2": ("f8_e5m2", 1),
}  # fmt: skip


def read_folder(name: str, folder: Path) -> Checkpoint:
    """The checkpoint in a folder with config.json and safetensors. Raises ModelError naming the file at fault."""
    whole = read_json(folder / "config.json", missing="a model folder needs it; is this the right folder?")
    config = text_config(whole)
    method_of(str(folder), config)
    generation = folder / "generation_config.json"
    files = weight_files(folder)
    tensors: list[TensorInfo] = []
    for i, file in enumerate(files):
        tensors += read_safetensors_header(file, i)
    _check_index(folder, files, tensors)
    if config is not whole:
        tensors = text_tensors(tensors)

    def read(tensor: TensorInfo) -> bytes:
        with opened(files[tensor.file]) as f:
            f.seek(tensor.offset)
            return f.read(tensor.nbytes)

    tensors = for_model(str(folder), config, tensors, read)
    return Checkpoint(
        name=name,
        path=str(folder),
        format="safetensors",
        config=config,
        generation_config=read_json(generation) if generation.exists() else {},
        tokenizer_dir=str(folder) if has_tokenizer(folder) else None,
        chat_template=chat_template(folder),
        files=tuple(map(str, files)),
        tensors=tuple(tensors),
        sentence=read_sentence(folder),
    )


def for_model(
    place: str, config: dict[str, Any], tensors: list[TensorInfo], read: Callable[[TensorInfo], bytes]
) -> list[TensorInfo]:  # fmt: skip
    """What files hold, as the model asks for it. read: a small tensor's bytes. Raises ModelError."""
    return unfused(place, config, together(place, config, _prefixed(tensors), read))


def _prefixed(tensors: list[TensorInfo]) -> list[TensorInfo]:
    """Named as in a whole model, also where the file is of the model under a head alone (Qwen3Model, say)."""
    if not any(t.name == "embed_tokens.weight" for t in tensors):
        return tensors
    heads = ("lm_head.", "score.", "model.")
    return [t if t.name.startswith(heads) else msgspec.structs.replace(t, name=f"model.{t.name}") for t in tensors]


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def read_json(path: Path, missing: str = "get the model again") -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming file and place."""
    try:
        with opened(path) as file:
            data = file.read()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; {missing}") from None
    except OSError as e:
        raise ModelError(f"{path}: can't be read: {e.strerror or e}") from None
    return json_object(path, data)


def json_object(path: Path, data: bytes) -> dict[str, Any]:
    """What is in such a file. Raises ModelError naming it."""
    try:
        value = json.loads(data)  # takes NaN and Infinity, which such files do have
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not valid JSON ({e}); get the file again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object; get the file again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in the order of their names."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        names = sorted(set(_weight_map(folder).values()))
        missing = [n for n in names if not os.path.exists(folder / n)]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"{folder / missing[0]}{more}: no such file, but {INDEX} names it; get the missing files")
        return [folder / n for n in names]
    others = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter")))
    if len(others) == 1 and "-of-" not in others[0].name:
        return others
    if others:
        raise ModelError(f"{folder / INDEX}: no such file, but there are {len(others)} safetensors files; get it")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(f"{folder}: has weights only as pickle files (.bin, .pt); convert them to safetensors")
    raise ModelError(f"{folder}: no {SINGLE}, {INDEX} or .gguf file; get the model's weights")


def read_safetensors_header(path: Path, file: int) -> list[TensorInfo]:
    """Tensors of one safetensors file; `file` is its index in the checkpoint. Raises ModelError if it is damaged."""
    try:
        with opened(path) as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            head = length.to_bytes(8, "little") + f.read(max(0, min(length, size, MAX_HEADER)))
    except OSError as e:
        raise ModelError(f"{path}: can't be read: {e.strerror or e}") from None
    return safetensors_header(path, head, size, file)


def safetensors_header(path: Path | str, head: bytes, size: int, file: int) -> list[TensorInfo]:
    """Tensors of such a file, of which `head` is the beginning; `size`: its bytes. Raises ModelError."""
    length = int.from_bytes(head[:8], "little")
    try:
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ModelError(f"{path}: damaged or truncated ({size} bytes, header of {length}); get the file again")
        header = json.loads(head[8 : 8 + length])
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: damaged: its header is not valid JSON; get the file again") from None
    start = 8 + length
    out = []
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            kind, width = KINDS.get(entry["dtype"], (str(entry["dtype"]).lower(), 0))
            shape = tuple(int(n) for n in entry["shape"])
            begin, end = entry["data_offsets"]
            if not all(type(number) is int for number in (*entry["shape"], begin, end)):
                raise ValueError
            wanted = math.prod(shape) * width if width else end - begin
            if not 0 <= begin <= end or min(shape, default=0) < 0 or end - begin != wanted:
                raise ModelError(f"{path}: damaged: tensor {name} {list(shape)} has {end - begin} bytes; get it again")
            if start + end > size:
                raise ModelError(
                    f"{path}: truncated: tensor {name} ends at byte {start + end} of {size}; get the file again"
                )
            out.append(TensorInfo(name, kind, shape, file, start + begin, end - begin))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{path}: damaged: its header is not a safetensors header; get the file again") from None
    return out


def chat_template(folder: Path) -> str | None:
    """The chat template of a folder: chat_template.jinja, chat_template.json, or in tokenizer_config.json."""
    plain = folder / "chat_template.jinja"
    if plain.exists():
        try:
            with opened(plain) as file:
                return file.read().decode().replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError) as e:
            raise ModelError(f"{plain}: can't be read: {e}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        if not path.exists():
            continue
        value = read_json(path).get("chat_template")
        if isinstance(value, list):  # named templates
            named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
            value = named.get("default")
        if isinstance(value, str):
            return value
    return None


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    value = read_json(path).get("weight_map")
    if not isinstance(value, dict) or not value or not all(isinstance(v, str) for v in value.values()):
        raise ModelError(f"{path}: no weight_map in it; get the file again")
    if any("/" in v or v.startswith(".") for v in value.values()):
        raise ModelError(f"{path}: names a file outside the folder; get the file again")
    return value


def _check_index(folder: Path, files: list[Path], tensors: list[TensorInfo]) -> None:
    names = {t.name for t in tensors}
    if len(names) != len(tensors):
        raise ModelError(f"{folder}: a tensor is in two files; get the model's files again")
    if files != [folder / SINGLE] and (folder / INDEX).exists():
        missing = next((n for n in _weight_map(folder) if n not in names), None)
        if missing is not None:
            raise ModelError(f"{folder}: tensor {missing} is in {INDEX} but in no file; get the model's files again")
