"""The composition root: the only module that may import everything."""

from __future__ import annotations

import msgspec

from planaria.config.options import EngineConfig
from planaria.config.resolve import usable_cores
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
    """A process per rank on this node, commands through shared memory, and shared memory between the ranks."""
    from planaria.mesh.boot import MeshBoot
    from planaria.mesh.mesh import pp_members, tp_members
    from planaria.mesh.shared import create_segment

    tp, pp = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    link = ShmLink.create(tp * pp)
    (fd,) = link.fds_to_pass()
    segments: dict[tuple[str, tuple[int, ...]], int] = {}

    def segment(axis: str, members: tuple[int, ...]) -> int | None:
        if len(members) == 1:
            return None
        if (axis, members) not in segments:
            segments[axis, members] = create_segment()
        return segments[axis, members]

    threads = config.device.threads
    boots = [
        MeshBoot(
            rank, tp, pp, tp_fd=segment("tp", tp_members(rank, tp)), pp_fd=segment("pp", pp_members(rank, tp, pp)),
            lanes=threads, crowded=threads * tp * pp > usable_cores(),
        )
        for rank in range(tp * pp)
    ]  # fmt: skip
    launcher = ProcessLauncher(
        "planaria.worker.main",
        [msgspec.msgpack.encode((config, boot)) for boot in boots],
        fd,
        [[f for f in (boot.tp_fd, boot.pp_fd) if f is not None] for boot in boots],
    )
    return EngineLoop(config, launcher, lambda ranks: link, emit, answering=tp * (pp - 1))
