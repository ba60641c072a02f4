from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class LMCacheMetadata:
    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: Any
    kv_shape: tuple[int, int, int, int, int]
    chunk_size: int = 256

    def get_dtypes(self) -> list[Any]:
        return [self.kv_dtype]

    def get_shapes(self) -> list[torch.Size]:
        layers, kinds, _, heads, size = self.kv_shape
        return [torch.Size([kinds, layers, self.chunk_size, heads * size])]
