"""The composition root: the only module that may import everything."""

from __future__ import annotations

import msgspec

from planaria.config.options import EngineConfig
from planaria.executor.launcher.inline import InlineLauncher
from planaria.executor.launcher.process import ProcessLauncher
from planaria.executor.link.direct import DirectLink
from planaria.executor.link.shm import ShmLink
from planaria.executor.loop import Emit, EngineLoop
from planaria.wire import Progress


def build_loop(config: EngineConfig, emit: Emit) -> EngineLoop:
    """An engine that isn't started yet; `emit` hears all it says."""
    if config.parallel.distributed_executor_backend == "mp":
        return _processes(config, emit)
    from planaria.worker.worker import make_rank

    def progress(part: str, fraction: float) -> None:
        emit(Progress(part, fraction))

    launcher = InlineLauncher(lambda: make_rank(config, 0, progress))
    return EngineLoop(
        config, launcher, lambda ranks: DirectLink(ranks, threaded=config.scheduler.depth > 1), emit
    )


def _processes(config: EngineConfig, emit: Emit) -> EngineLoop:
    """A process per rank on this node, commands through shared memory."""
    world = config.parallel.world_size
    link = ShmLink.create(world)
    (fd,) = link.fds_to_pass()
    launcher = ProcessLauncher("planaria.worker.main", msgspec.msgpack.encode(config), world, fd)
    return EngineLoop(config, launcher, lambda ranks: link, emit)
