"""The actor that an engine of a fleet lives in. Light until `run`; it only says where it came up, and listens.

As with ranks, what goes in and out is plain data or bytes that we encoded, and `run` has a thread of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
import time
from typing import Any

from planaria.executor.ray.actor import RANK_GROUP, RankActor

LOOK = 0.5  # seconds between looks at the raylet
ALONE = 20.0  # seconds without a word after which an engine whose raylet is gone ends


class EngineActor:
    """entry: `package.module:class` with `listen` and `run` (planaria.engine_process.RemoteEngine)."""

    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.engine: Any = None
        self.parent = os.getppid()  # the raylet
        signal.signal(signal.SIGTERM, lambda number, frame: self.leave())  # Ray's own handler ends it in mid-step

    def leave(self) -> None:
        """It is to end: its front end takes what is open elsewhere, and then says so."""
        if self.engine is not None:
            self.engine.leave()

    def where(self, resource: str, names: list[str]) -> bytes:
        """As RankActor.where."""
        return RankActor().where(resource, names)

    def listen(self, host: str, keys: bytes, heartbeat: float, environment: dict[str, str]) -> str:
        """The address where front ends find it. The environment is complete before anything large is imported."""
        os.environ.update(environment)
        with contextlib.suppress(OSError):  # Ray's workers are niced as batch work; an engine serves
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        module, _, kind = self.entry.partition(":")
        self.engine = getattr(importlib.import_module(module), kind)()
        return str(self.engine.listen(host, keys, heartbeat))

    def run(self, config: bytes, level: str) -> int:
        """Be the engine until it ends; its exit code."""
        threading.Thread(target=self._look, name="planaria-raylet", daemon=True).start()
        code = int(self.engine.run(config, level))
        if os.getppid() != self.parent:  # the raylet is gone, and nobody else would end this process
            os._exit(code)
        return code

    def _look(self) -> None:
        """While the raylet is there, it ends this process."""
        while os.getppid() == self.parent or self.engine.silent < ALONE:
            time.sleep(LOOK)
        os._exit(1)  # its front end has gone on without it


def remote_engine(ray: Any) -> Any:
    """EngineActor for Ray."""
    ray.method(concurrency_group=RANK_GROUP)(EngineActor.run)
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={RANK_GROUP: 1})(EngineActor)
