"""Small frozen configurations, one concern each. `resolve.resolve` makes an EngineConfig from options and facts."""

from planaria.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from planaria.config.options import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    EngineOptions,
    OuterLauncher,
    ParallelConfig,
    SchedulerConfig,
)

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "EngineOptions",
    "MLAConfig",
    "ModelConfig",
    "MoEConfig",
    "OuterLauncher",
    "ParallelConfig",
    "RopeConfig",
    "SchedulerConfig",
]
