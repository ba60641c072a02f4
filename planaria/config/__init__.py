"""Small frozen configurations, one concern each. `resolve.resolve` makes an EngineConfig from options and facts."""

from planaria.config.options import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    EngineOptions,
    ParallelConfig,
    SchedulerConfig,
)
from planaria.models.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "EngineOptions",
    "MLAConfig",
    "ModelConfig",
    "MoEConfig",
    "ParallelConfig",
    "RopeConfig",
    "SchedulerConfig",
]
