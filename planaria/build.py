"""The composition root: the only module that may import everything."""

from __future__ import annotations

from planaria.config.options import EngineConfig
from planaria.executor.launcher.inline import InlineLauncher
from planaria.executor.link.direct import DirectLink
from planaria.executor.loop import Emit, EngineLoop
from planaria.wire import Progress


def build_loop(config: EngineConfig, emit: Emit) -> EngineLoop:
    """An engine that isn't started yet; `emit` hears all it says."""
    from planaria.worker.worker import make_rank

    def progress(part: str, fraction: float) -> None:
        emit(Progress(part, fraction))

    launcher = InlineLauncher(lambda: make_rank(config, 0, progress))
    return EngineLoop(
        config, launcher, lambda ranks: DirectLink(ranks, threaded=config.scheduler.depth > 1), emit
    )
