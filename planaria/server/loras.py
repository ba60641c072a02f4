"""The adapters of a front end: which names there are, and which bytes each stands for now.

Rule: a name is looked up once, when a request is admitted; from then on the request has the digest. Bytes are read
once, and an engine that begins anew is given those: what has happened to the folder since changes nothing. An adapter
whose name was taken away, or given to other bytes, stays for a while for those who still have it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from planaria.checkpoint.adapter import Adapter, read_adapter
from planaria.config.json_option import json_option
from planaria.config.options import EngineConfig, LoRAConfig
from planaria.env import path_of
from planaria.errors import ConfigError, ModelError, RequestError
from planaria.models.config import ModelConfig
from planaria.wire import LoadLora, ToEngine, UnloadLora

if TYPE_CHECKING:
    from planaria.server.engine import Engine

MAX_NAME = 256  # characters


class NamedLora(msgspec.Struct, frozen=True):
    """created: seconds since 1970."""

    name: str
    digest: str
    created: int


async def _nobody() -> None: ...


class LoraRegistry:
    """names: of the model itself, which no adapter may have. engines: to be told of adapters; changed: awaited when
    there are other names, before who asked for it is told."""

    def __init__(self, config: LoRAConfig, model: ModelConfig, names: Sequence[str] = ()) -> None:
        self.config, self.model, self.names = config, model, names
        self.named: dict[str, NamedLora] = {}
        self.kept: dict[str, Adapter] = {}
        self.unnamed: OrderedDict[str, None] = OrderedDict()  # of what is kept, the longest first
        self.engines: Callable[[], Iterable[Engine]] = tuple
        self.changed: Callable[[], Awaitable[None]] = _nobody
        self.taken: Callable[[str], bool] = lambda name: False  # has another model of the server this name?

    @classmethod
    def of(cls, config: EngineConfig) -> LoraRegistry | None:
        """None: there are no adapters."""
        return None if config.lora is None else cls(config.lora, config.model, (config.served_model_name,))

    def check(self, name: str) -> None:
        """Raises RequestError for a name that can't be given."""
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise RequestError(
                f"an adapter's name has 1 to {MAX_NAME} characters that can be printed", param="lora_name"
            )
        if self.taken(name):
            raise RequestError(
                f"{name!r} is the name of another model, or its adapter's; take another", param="lora_name"
            )
        if name in self.names:
            raise RequestError(f"{name!r} is the model's own name; take another", param="lora_name")
        if name not in self.named and len(self.named) >= self.config.max_cpu_loras:
            raise RequestError(
                f"{len(self.named)} adapters are loaded, as many as --max-cpu-loras allows; unload one",
                param="lora_name", code="too_many_adapters",
            )  # fmt: skip

    def read(self, path: str) -> Adapter:
        """Takes tens of milliseconds. Raises RequestError."""
        try:
            return read_adapter(path_of(path), self.model, self.config.max_lora_rank)
        except ModelError as e:
            raise RequestError(str(e), param="lora_path", code="adapter_refused") from None

    def add(self, name: str, adapter: Adapter) -> bool:
        """Requests that come from now on and name it get this one. False: they did before. Raises RequestError."""
        self.check(name)
        digest, before = adapter.digest, self.named.get(name)
        if before is not None and before.digest == digest:
            return False
        if digest not in self.kept:
            self.kept[digest] = adapter
            for message in _messages(adapter):
                self.tell(message)
        self.unnamed.pop(digest, None)
        self.named[name] = NamedLora(name, digest, int(time.time()))
        if before is not None:
            self._unname(before.digest)
        return True

    def remove(self, name: str) -> None:
        """Requests that have it end with it. Raises RequestError."""
        if name not in self.named:
            raise RequestError(
                f"no adapter {name[:MAX_NAME]!r} is loaded", param="lora_name", code="adapter_not_found", status=404
            )
        self._unname(self.named.pop(name).digest)

    def _unname(self, digest: str) -> None:
        if any(each.digest == digest for each in self.named.values()):
            return
        self.unnamed[digest] = None
        self.tell(UnloadLora(digest))
        while len(self.unnamed) > self.config.max_cpu_loras:
            del self.kept[self.unnamed.popitem(last=False)[0]]

    def tell(self, message: ToEngine) -> None:
        """Those that are up; who comes up gets `messages`."""
        for engine in self.engines():
            if engine.up:
                engine.send(message)

    def messages(self) -> Iterator[ToEngine]:
        """What an engine that has come up is given before anything else."""
        for adapter in self.kept.values():
            yield from _messages(adapter)


def _messages(adapter: Adapter) -> Iterator[ToEngine]:
    count = len(adapter.parts)
    return (LoadLora(adapter.digest, number, count, part) for number, part in enumerate(adapter.parts))


def named_paths(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Of `--lora-modules`: NAME=FOLDER, or vLLM's JSON of one. Raises ConfigError."""
    for given in modules:
        name, found, path = given.partition("=")
        if given.lstrip().startswith("{"):
            said = json_option("--lora-modules", given, dict[str, str | None], "write NAME=FOLDER")
            name, path = said.get("name") or "", said.get("path") or ""
            found = path
        if not name or not found or not path:
            raise ConfigError("--lora-modules", given, "names no adapter and its folder", "write NAME=FOLDER")
        yield name, path


def load_modules(registry: LoraRegistry | None, modules: Sequence[str]) -> None:
    """Those of the command line, before a process is started. Raises ConfigError."""
    for name, path in named_paths(modules):
        if registry is None:
            raise ConfigError("--lora-modules", f"{name}={path}", "there are no adapters", "give --enable-lora too")
        try:
            registry.add(name, registry.read(path))
        except RequestError as e:
            raise ConfigError("--lora-modules", f"{name}={path}", str(e)) from None
