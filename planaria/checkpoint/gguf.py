"""A GGUF file as a Checkpoint. What is converted is made once per content of the header and kept in the cache.

The key is the SHA-256 of the header's bytes: everything converted comes from there, and hashing the weights would
cost seconds per gigabyte. Which header a file has is remembered by path, size, inode and times, so that a second
start reads neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from functools import cache
from pathlib import Path

import msgspec

from planaria.checkpoint.cache import cached_folder, recall, remember
from planaria.checkpoint.gguf_convert import convert_config, convert_generation_config, convert_tensors
from planaria.checkpoint.gguf_file import GGUFHeader, read_header
from planaria.checkpoint.gguf_tokenizer import convert_tokenizer, convert_tokenizer_config
from planaria.checkpoint.spec import Checkpoint
from planaria.errors import ModelError

CHECKPOINT = "checkpoint.json"


def read_gguf(name: str, path: Path) -> Checkpoint:
    """Raises ModelError if the file is damaged, truncated or of an unsupported kind."""
    path = path.absolute()
    try:
        stat = os.stat(path)
    except OSError as e:
        raise ModelError(f"{path}: can't be read: {e.strerror or e}") from None
    identity = "\0".join(
        map(str, (path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev, _version()))
    )
    memo = hashlib.sha256(identity.encode()).hexdigest()
    key = recall("gguf-seen", memo)
    header: list[GGUFHeader] = []

    def fill(folder: Path) -> None:
        if not header:
            header.append(read_header(str(path)))
        _convert(header[0], path, folder)

    if key is None or len(key) != 64:
        header.append(read_header(str(path)))
        digest = hashlib.sha256(f"{_version()} {stat.st_size} ".encode())
        with path.open("rb") as f:
            digest.update(f.read(header[0].data_start))
        key = digest.hexdigest()
        remember("gguf-seen", memo, key)
    folder = cached_folder("gguf", key, fill)
    try:
        kept = msgspec.json.decode((folder / CHECKPOINT).read_bytes(), type=Checkpoint)
    except (OSError, msgspec.DecodeError):
        # same sizes as the manifest says but other content: somebody edited it
        shutil.rmtree(folder, ignore_errors=True)
        folder = cached_folder("gguf", key, fill)
        kept = msgspec.json.decode((folder / CHECKPOINT).read_bytes(), type=Checkpoint)
    has_tokenizer = (folder / "tokenizer.json").exists()
    return msgspec.structs.replace(
        kept,
        name=name,
        path=str(path),
        files=(str(path),),
        tokenizer_dir=str(folder) if has_tokenizer else None,
    )


def _convert(header: GGUFHeader, path: Path, folder: Path) -> None:
    config = convert_config(header, str(path))
    tokenizer = convert_tokenizer(header.metadata, str(path))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
        (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(convert_tokenizer_config(header.metadata)))
    template = header.metadata.get("tokenizer.chat_template")
    checkpoint = Checkpoint(
        name="",
        path="",
        format="gguf",
        config=config,
        generation_config=convert_generation_config(header),
        chat_template=template if isinstance(template, str) else None,
        tensors=convert_tensors(header, config),
    )
    (folder / CHECKPOINT).write_bytes(msgspec.json.encode(checkpoint))


@cache
def _version() -> str:
    """Changes whenever the code that converts does, so that an old conversion is never taken for a new one."""
    digest = hashlib.sha256()
    for module in ("gguf", "gguf_file", "gguf_convert", "gguf_tokenizer", "spec"):
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    return digest.hexdigest()[:16]
