"""What takes processes long to import: those that are forked have it at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planaria.config.options import EngineConfig

ENGINE, API = "planaria.engine_process", "planaria.server.api_process"
ENGINE_AND_RANKS = ENGINE, "planaria.worker.main"
# Of a server and of its engines.
OF_BOTH = (
    "planaria.config.resolve", "planaria.core.stats", "planaria.executor.startup", "planaria.hosts.weights",
    "planaria.hosts.local", "planaria.hosts.pool", "planaria.wire", "zmq.asyncio",
)  # fmt: skip
WORKER = (
    "planaria.layers.build", "planaria.loader.source", "planaria.worker.micro_batches", "planaria.worker.runner",
    "planaria.worker.sampler", "planaria.worker.stage", "zmq",
)  # fmt: skip
NATIVE = "planaria.kernels.cpu.ops", "llvmlite.binding"
FOREIGN = "planaria.hf.model", *NATIVE
PLAIN = "planaria.kernels.reference", "planaria.worker.torch_sampler"
GLOO = ("planaria.mesh.gloo",)  # and torch


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """What is made meanwhile stays, so nobody looks for what could go, then or later: that is an eighth of the time of
    imports, and forks go on sharing its pages. What is there already stays, too."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


def of_a_rank(config: EngineConfig) -> list[str]:
    if config.null_worker:
        return []
    foreign, parallel = FOREIGN if config.model.foreign is not None else (), config.parallel
    plain = parallel.disable_custom_all_reduce or parallel.nodes_per_engine > 1
    meets = plain and parallel.layout.size > 1 and parallel.worker_cls == "auto"  # a user's may not need torch
    kernels = NATIVE if config.device.kernels == "native" else PLAIN
    return [*WORKER, *kernels, *foreign, *(GLOO if meets else ())]


def of_an_engine(config: EngineConfig) -> list[str]:
    """And of the ranks that it starts here, or is."""
    here = config.parallel.distributed_executor_backend in ("uni", "mp")
    return [*ENGINE_AND_RANKS, *(of_a_rank(config) if here else [])]


def before_it_is_known() -> list[str]:
    """Of an engine of CPUs, which most likely is what will be asked for."""
    return [*ENGINE_AND_RANKS, *WORKER, *NATIVE]


def of_an_api_process() -> list[str]:
    return [API, "tokenizers", "uvicorn.lifespan.off"]
