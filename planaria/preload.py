"""What takes processes long to import: those that are forked have it at once."""

from __future__ import annotations

from planaria.config.options import EngineConfig

ENGINE = "planaria.engine_process"


def of_a_rank(config: EngineConfig) -> list[str]:
    if config.null_worker:
        return []
    cpu = ["planaria.kernels.cpu.ops"] if config.device.device == "cpu" else []
    return ["planaria.worker.runner", "planaria.layers.build", "planaria.loader.source", "zmq", *cpu]


def of_an_engine(config: EngineConfig) -> list[str]:
    """And of the ranks that it starts here, or is."""
    here = config.parallel.distributed_executor_backend in ("uni", "mp")
    return [ENGINE, "planaria.worker.main", *(of_a_rank(config) if here else [])]
