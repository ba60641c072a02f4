"""Checkpoints of heads that draft, in EAGLE's format: a layer or more, `fc`, and maybe an embedding. What they lack is
the served model's."""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.checkpoint.spec import Checkpoint, TensorInfo
from planaria.errors import ModelError

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def headed(head: Checkpoint, served: Checkpoint) -> Checkpoint:
    """The head with the output head of the model that is served, and its embedding where it has none. Raises ModelError
    for what is no such head."""
    own = {named.name: named for named in map(_named, head.tensors)}
    if "fc.weight" not in own:
        raise ModelError(f"{head.path}: no tensor fc.weight, so it is no head that drafts in EAGLE's format")
    theirs = {tensor.name: tensor for tensor in served.tensors}
    shift = len(head.files)
    for name, source in ((EMBEDDING, EMBEDDING), (OUTPUT, OUTPUT if OUTPUT in theirs else EMBEDDING)):
        if (name == OUTPUT or name not in own) and source in theirs:
            own[name] = msgspec.structs.replace(_moved(theirs[source], shift), name=name)
    return msgspec.structs.replace(
        head, config=_config(head.config), files=head.files + served.files, tensors=tuple(own.values())
    )


def _config(config: dict[str, Any]) -> dict[str, Any]:
    """As of a model: some wrap it in `model`, and name the architecture after the head."""
    inner = config.get("model")
    config = {**config, **inner} if isinstance(inner, dict) else config
    named = [str(name).replace("Eagle", "") for name in config.get("architectures") or ()]
    return {**config, "architectures": named}


def _named(tensor: TensorInfo) -> TensorInfo:
    name = tensor.name.removeprefix("model.")
    return msgspec.structs.replace(tensor, name=name if name.startswith(("fc.", "lm_head.")) else f"model.{name}")


def _moved(tensor: TensorInfo, shift: int) -> TensorInfo:
    """In files that come after so many others."""
    parts = tuple(_moved(part, shift) for part in tensor.parts)
    return msgspec.structs.replace(tensor, file=tensor.file + shift, parts=parts)
