"""What a folder says in sentence-transformers' files: how a text's hidden states become one vector.

`modules.json` lists what follows one another: the transformer, a pooling, a normalisation. What else there can be (a
projection, other poolings) would change vectors, so it is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planaria.checkpoint.files import opened
from planaria.errors import ModelError
from planaria.models.fields import flag, size

MODULES = "modules.json"
FILES = (MODULES, "sentence_bert_config.json", "*_Pooling/config.json")
POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def read_sentence(folder: Path) -> dict[str, Any]:
    """Empty where there is no modules.json; else pooling (last, mean, cls), normalize, and max_length where one is
    said. Raises ModelError."""
    path = folder / MODULES
    if not path.exists():
        return {}
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path}: not a list of modules; get the file again")
    found: dict[str, Any] = {"pooling": "mean", "normalize": False}  # mean is sentence-transformers' own default
    for module in modules:
        kind, where = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Pooling":
            if Path(where).is_absolute() or ".." in Path(where).parts:
                raise ModelError(f"{path}: names a folder outside the model: {where}")
            found["pooling"] = _pooling(folder / where / "config.json")
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            raise ModelError(
                f"{path}: module {kind} ({where}) is not supported; there are Transformer, Pooling, Normalize"
            )
    limits = folder / "sentence_bert_config.json"
    said = _object(limits) if limits.exists() else {}
    if said.get("max_seq_length") is not None:
        found["max_length"] = size(said, "max_seq_length", where=f"{limits.name}: ", least=2)
    if flag(said, "do_lower_case"):
        raise ModelError(f"{limits}: do_lower_case: texts are tokenised as they are")
    return found


def _pooling(path: Path) -> str:
    said = _object(path)
    chosen = [name for name, value in said.items() if name.startswith("pooling_mode_") and value is True]
    mode = said.get("pooling_mode")
    if isinstance(mode, str):  # as newer files have it
        chosen = [f"pooling_mode_{mode if mode == 'lasttoken' else f'{mode}_token' + ('s' if mode == 'mean' else '')}"]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        shown = ", ".join(chosen) or "none"
        raise ModelError(f"{path}: pooling {shown} is not supported; exactly one of {', '.join(POOLINGS)}")
    return POOLINGS[chosen[0]]


def _object(path: Path) -> dict[str, Any]:
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object; get the file again")
    return value


def _read(path: Path) -> Any:
    try:
        with opened(path) as file:
            return json.loads(file.read())
    except OSError as e:
        raise ModelError(f"{path}: can't be read: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not valid JSON ({e}); get the file again") from None
