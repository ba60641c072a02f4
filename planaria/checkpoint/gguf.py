"""A GGUF file as a Checkpoint. What is converted is made once per content of the header and kept in the cache.

The key is the SHA-256 of the header's bytes (and of rope's factors): all that is converted comes from there, and
hashing the weights would cost seconds per gigabyte. Which header a file has is remembered by path, size, inode and
times, so that a second start reads none of it. A file split in parts (-00001-of-00003.gguf) is one checkpoint,
whichever part was named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from functools import cache
from pathlib import Path

import msgspec

from planaria.cache import cached_folder, keep_file, kept_file
from planaria.checkpoint.files import opened
from planaria.checkpoint.gguf_convert import convert_config, convert_generation_config, convert_tensors
from planaria.checkpoint.gguf_file import GGUFHeader, read_header
from planaria.checkpoint.gguf_tokenizer import convert_tokenizer, convert_tokenizer_config
from planaria.checkpoint.spec import Checkpoint
from planaria.env import cache_dir
from planaria.errors import ModelError

CHECKPOINT = "checkpoint.json"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf(name: str, path: Path) -> Checkpoint:
    """Raises ModelError if the file is damaged, truncated or of an unsupported kind."""
    parts = split_parts(path.absolute())
    memo = hashlib.sha256("\0".join([_version(), *map(_identity, parts)]).encode()).hexdigest()
    read = cache(lambda: [read_header(str(part)) for part in parts])

    def fill(folder: Path) -> None:
        try:
            _convert(read(), parts[0], folder)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, struct.error) as e:
            raise ModelError(f"{parts[0]}: damaged GGUF metadata ({e!r}); get the file again") from None

    seen = cache_dir() / "gguf-seen" / memo
    key = kept_file(seen).decode()
    if not key:
        key = _content(parts, read())
        keep_file(seen, key.encode())
    folder = cached_folder("gguf", key, fill)
    try:
        kept = _kept(folder)
    except (OSError, msgspec.DecodeError):  # as long as the manifest says but other content: somebody edited it
        shutil.rmtree(folder, ignore_errors=True)
        folder = cached_folder("gguf", key, fill)
        kept = _kept(folder)
    return msgspec.structs.replace(
        kept,
        name=name,
        path=str(parts[0]),
        files=tuple(map(str, parts)),
        tokenizer_dir=str(folder) if (folder / "tokenizer.json").exists() else None,
    )


def split_parts(path: Path) -> list[Path]:
    """All files of a checkpoint of which `path` is one: mostly just that. Raises ModelError if a part is missing."""
    match = PART.fullmatch(path.name)
    if not match:
        return [path]
    part_number, count = int(match[2]), int(match[3])
    if not 1 <= part_number <= count:
        raise ModelError(f"{path}: named as part {part_number} of {count}; give the file its own name back")
    parts = []
    for i in range(1, count + 1):
        part = path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf")
        if not part.exists():
            raise ModelError(f"{part}: no such file; the checkpoint has {count} parts, get them all")
        parts.append(part)
    return parts


def _identity(path: Path) -> str:
    try:
        s = os.stat(path)
    except OSError as e:
        raise ModelError(f"{path}: can't be read: {e.strerror or e}") from None
    return f"{path} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino} {s.st_dev}"


def _content(parts: list[Path], headers: list[GGUFHeader]) -> str:
    digest = hashlib.sha256(_version().encode())
    for part, header in zip(parts, headers, strict=True):
        with opened(part) as f:
            digest.update(f.read(header.data_start))
        for name, data in sorted(header.rope.items()):
            digest.update(name.encode() + data)
    return digest.hexdigest()


def _convert(headers: list[GGUFHeader], path: Path, folder: Path) -> None:
    meta = headers[0].metadata
    every = GGUFHeader(
        meta,
        [t for h in headers for t in h.tensors],
        headers[0].data_start,
        {name: data for h in headers for name, data in h.rope.items()},
    )
    config = convert_config(every, str(path))
    tokenizer = convert_tokenizer(meta, str(path))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
        names = convert_tokenizer_config(meta)
        (folder / "tokenizer_config.json").write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    template = meta.get("tokenizer.chat_template")
    checkpoint = Checkpoint(
        name="",
        path="",
        format="gguf",
        config=config,
        generation_config=convert_generation_config(every),
        chat_template=template if isinstance(template, str) else None,
        tensors=tuple(t for i, h in enumerate(headers) for t in convert_tensors(h, meta, config, i)),
    )
    (folder / CHECKPOINT).write_bytes(msgspec.json.encode(checkpoint))


def _kept(folder: Path) -> Checkpoint:
    return msgspec.json.decode((folder / CHECKPOINT).read_bytes(), type=Checkpoint)


@cache
def _version() -> str:
    """Changes whenever the code that converts does: an old conversion is never taken for a new one."""
    digest = hashlib.sha256()
    for module in ("gguf", "gguf_file", "gguf_families", "gguf_convert", "gguf_tokenizer", "fused", "spec"):
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    return digest.hexdigest()
