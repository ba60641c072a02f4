"""Objects are files. `silent://` never answers, `broken://` can't be opened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch


class Connector:
    meta_fmt = 1

    def __init__(self, url: str, backend: Any) -> None:
        self.silent, self.folder, self.backend = url.startswith("silent:"), Path(urlparse(url).path), backend
        if url.startswith("broken:"):
            raise ConnectionRefusedError("nobody is there")

    def getWrappedConnector(self) -> Connector:
        return self

    def path(self, key: Any) -> Path:
        return self.folder / key.to_string()

    async def exists(self, key: Any) -> bool:
        if self.silent:
            await asyncio.sleep(3600)
        return self.path(key).exists()

    async def get(self, key: Any) -> Any:
        if not await self.exists(key):
            return None
        data = self.path(key).read_bytes()
        found = self.backend.allocate([torch.Size([1, 1, 1, len(data)])], [torch.uint8], self.meta_fmt)
        if found is not None:
            memoryview(found.byte_array).cast("B")[:] = data
        return found

    async def put(self, key: Any, memory_obj: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        work = self.path(key).with_suffix(".tmp")
        work.write_bytes(memory_obj.byte_array)
        work.rename(self.path(key))

    async def list(self) -> list[str] | None:
        return [path.name for path in self.folder.iterdir()] if self.folder.exists() else []


def CreateConnector(url: str, loop: Any, local_cpu_backend: Any, config: Any, metadata: Any) -> Connector:
    return Connector(url, local_cpu_backend)
