"""The class a rank is made of: Planaria's worker, a user's in its place, and a user's methods mixed in.

A rank whose class can't be made says so in answer to every command, so that the error reaches the user by its name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from planaria.config.machine import load_class
from planaria.config.options import ParallelConfig
from planaria.errors import ConfigError, UserError
from planaria.protocol import Call, Command, Done, Exit, Failed, Reply


class Unmade:
    """In place of a rank that could not be made."""

    def __init__(self, rank: int, error: Exception) -> None:
        mistake = isinstance(error, ConfigError)
        self.failed = Failed(
            rank, "launch", str(error) if mistake else f"{type(error).__name__}: {error}",
            "" if mistake else "".join(traceback.format_exception(error)), "user" if mistake else "error",
        )  # fmt: skip

    def handle(self, command: Command) -> Reply:
        return Done(self.failed.rank) if isinstance(command, Exit) else self.failed


def names_of(extension: type) -> list[str]:
    """What a class brings along, special methods aside."""
    own = (name for base in extension.__mro__ if base is not object for name in vars(base))
    return sorted({name for name in own if not (name.startswith("__") and name.endswith("__"))})


def rank_class(parallel: ParallelConfig, default: type) -> type:
    """Raises ConfigError for a class that isn't there, can't be a rank, or has a name the worker has."""
    base = default
    if parallel.worker_cls != "auto":
        base = load_class("--worker-cls", parallel.worker_cls)
        if not callable(getattr(base, "handle", None)):
            raise ConfigError(
                "--worker-cls", parallel.worker_cls, "has no method handle(command)",
                "derive it from planaria.worker.worker.Worker",
            )  # fmt: skip
    if not parallel.worker_extension_cls:
        return base
    extension = load_class("--worker-extension-cls", parallel.worker_extension_cls)
    if clash := [name for name in names_of(extension) if hasattr(base, name)]:
        raise _clash(parallel, clash, base)
    return type(f"{base.__name__}With{extension.__name__}", (base, extension), {})


def make(parallel: ParallelConfig, default: type, rank: int, create: Callable[[type], Any]) -> Any:
    """`create(class)`, or an Unmade that tells why not. The extension's own __init__ is not called."""
    try:
        made = rank_class(parallel, default)
        worker = create(made)
        if parallel.worker_extension_cls:
            base, extension = made.__bases__
            if clash := [name for name in names_of(extension) if name in vars(worker)]:
                raise _clash(parallel, clash, base)
        return worker
    except Exception as e:
        return Unmade(rank, e)


def _clash(parallel: ParallelConfig, names: list[str], base: type) -> ConfigError:
    return ConfigError(
        "--worker-extension-cls", parallel.worker_extension_cls, f"{base.__name__} has {', '.join(names)} already",
        "give them other names",
    )  # fmt: skip


def call(worker: Any, command: Call) -> Any:
    """The answer of a worker's method, as plain data: the same whether or not it travels. Of a function, which does not
    travel, what it gives back. Raises UserError."""
    if callable(command.method):
        return command.method(worker, *command.args, **command.kwargs)
    method = None if command.method.startswith("_") else getattr(worker, command.method, None)
    if not callable(method):
        raise UserError(f"the worker has no method {command.method!r}; --worker-extension-cls adds methods")
    answer = method(*command.args, **command.kwargs)
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer))
    except TypeError as e:
        raise UserError(f"{command.method} must give back plain data (numbers, text, lists, dicts): {e}") from None
