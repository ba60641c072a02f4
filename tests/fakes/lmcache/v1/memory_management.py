from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class MemoryObjMetadata:
    shape: Any
    dtype: Any
    address: int
    phy_size: int
    ref_count: int
    pin_count: int = 0
    fmt: Any = None
    shapes: Any = None
    dtypes: Any = None


class TensorMemoryObj:
    def __init__(self, raw_data: Any, metadata: MemoryObjMetadata, parent_allocator: None) -> None:
        self.raw_data, self.meta = raw_data, metadata

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.raw_data.numpy())
