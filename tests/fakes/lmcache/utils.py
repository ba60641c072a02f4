from __future__ import annotations

from typing import NamedTuple


class CacheEngineKey(NamedTuple):
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int
    dtype: object

    def to_string(self) -> str:
        return f"{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash:x}@uint8"
