"""What of a configuration shapes the computation, as hashes: ranks that differ must not meet in a collective.

A field counts unless its option says otherwise, or it is marked UNHASHED. Degrees don't, because they change with
epochs: the layout in force is given to `compute_hash` instead.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any, get_type_hints

import msgspec

from planaria.config.declared import options_of, unhashed
from planaria.config.options import EngineConfig, EngineOptions

# Of the checkpoint, which travels as plain values: a node's own paths, and what only front ends use.
_PATHS = ("name", "path", "files", "tokenizer_dir", "chat_template", "generation_config", "updated")


def _not_hashed() -> Iterator[str]:
    """Dotted names: of options that say so, under the name they keep in a part, and of fields marked UNHASHED."""
    options = options_of(EngineOptions)
    own = {name for name, declared in options.items() if not declared.option.hashed}
    for name, part in get_type_hints(EngineConfig).items():
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            fields = own.intersection(part.__struct_fields__).union(unhashed(part))
            yield from (f"{name}.{field}" for field in fields)
        elif name in own:
            yield name
    yield from (f"checkpoint.{field}" for field in _PATHS)


NOT_HASHED = frozenset(_not_hashed())

# Of a part's packed weights, besides the model's. The length is that of rotary tables.
_PACKING = ("device.dtype", "device.quantization", "scheduler.max_model_len")

LIBRARIES = ("planaria", "torch", "numpy", "numba", "msgspec", "transformers")


def hash_fields(config: EngineConfig) -> dict[str, str]:
    """A digest of every field that shapes the computation, by its dotted name."""
    return {name: _digest(value) for name, value in _leaves(config) if name not in NOT_HASHED}


def packing_fields(config: EngineConfig) -> dict[str, str]:
    """What says which bytes are in a part of the model's packed weights."""
    fields = hash_fields(config).items()
    found = {name: value for name, value in fields if name in _PACKING or name.startswith(("model.", "checkpoint."))}
    return found | {"planaria": _version("planaria")}


def compute_hash(config: EngineConfig, layout: str = "") -> str:
    """One digest of them all, joined with the layout in force. Equal configurations give equal hashes anywhere."""
    return _digest([layout, *sorted(hash_fields(config).items())])


def compared(config: EngineConfig) -> dict[str, str]:
    """What else must be the same on every rank, in words: the all-reduce, worker classes, library versions."""
    parallel = config.parallel
    return {
        "all-reduce": "plain" if parallel.disable_custom_all_reduce else "fast",
        "worker class": parallel.worker_cls,
        "worker extension class": parallel.worker_extension_cls or "none",
        "python": ".".join(python_version().split(".")[:2]),
        **{name: _version(name) for name in LIBRARIES},
    }


def _leaves(config: EngineConfig) -> Iterator[tuple[str, Any]]:
    """Fields of the parts of a configuration as part.field; what isn't made of fields as it is."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            yield from ((f"{name}.{field}", getattr(value, field)) for field in value.__struct_fields__)
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", part) for key, part in value.items())
        else:
            yield name, value


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]


@functools.cache  # a rank says it again in every epoch, and reads no file for that
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
