"""One rank in a process of its own: it is sent its boot, then commands, and answers each.

Importing this imports what a rank needs, so that a process that was forked after that begins at once.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import planaria.kernels.cpu.ops
import planaria.layers.build
import planaria.worker.runner
import planaria.worker.sampler  # noqa: F401
from planaria.worker.worker import Worker


def serve(commands: Connection) -> None:
    worker = Worker(commands.recv())
    while True:
        try:
            command = commands.recv()
        except EOFError:
            return
        commands.send(worker.handle(command))
