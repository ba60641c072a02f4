"""A rank in a process of its own: `python -m planaria.worker.main FD RANK PARENT`, its configuration on standard input.

FD is the shared memory of its link. Every command is answered; the process ends with `Exit`, with its link or with
its parent.
"""

from __future__ import annotations

import logging
import sys

import msgspec

from planaria.config.options import EngineConfig
from planaria.env import log_level
from planaria.executor.link.faults import LinkError
from planaria.executor.link.shm import ShmPort
from planaria.logs import setup_logging
from planaria.mesh.boot import MeshBoot
from planaria.processes import die_with_parent, leave_signals_to_parent
from planaria.protocol import Exit
from planaria.worker.worker import make_rank

logger = logging.getLogger("planaria.worker")


def main() -> int:
    """Exit code 0 after Exit, 1 when the link ended."""
    fd, rank, parent = (int(text) for text in sys.argv[1:4])
    die_with_parent(parent)
    leave_signals_to_parent()
    setup_logging(log_level())
    config, boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[EngineConfig, MeshBoot])
    port = ShmPort.attach(fd, rank)
    worker = make_rank(config, rank, boot=boot)
    try:
        while True:
            item = port.receive(None)
            assert item is not None
            number, command = item
            port.reply(number, worker.handle(command))
            if isinstance(command, Exit):
                return 0
    except LinkError as e:
        logger.debug("rank %d ends: %s", rank, e)
        worker.handle(Exit())
        return 1
    finally:
        port.close()


if __name__ == "__main__":
    sys.exit(main())
