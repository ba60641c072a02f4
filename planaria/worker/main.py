"""A rank's life, in whatever process a launcher gave it: open its end of the link, answer every command, end.

As a process of its own: `python -m planaria.worker.main PARENT`, an encoded RankBoot on standard input after its length
in 8 bytes. Standard input stays open as long as the parent lives: its end is the rank's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from planaria.executor.boot import RankBoot
from planaria.executor.link.address import open_port
from planaria.executor.link.faults import LinkError, Port
from planaria.logs import setup_logging
from planaria.processes import die_with_parent, leave_signals_to_parent, set_title
from planaria.protocol import Exit, Join
from planaria.worker.worker import make_rank

logger = logging.getLogger("planaria.worker")

PULSE = 1.0  # seconds between signs of life


def run_rank(boot: RankBoot, made: Callable[[Any], None] = lambda worker: None) -> int:
    """Until Exit (0), or until the link ends (1). Raises LinkError or Gone when there is no link to begin with.

    made: gets the worker, for who brings it steps by another way.
    """
    port = open_port(boot.link)
    ended = threading.Event()
    threading.Thread(target=_pulse, args=(port, ended), name="planaria-pulse", daemon=True).start()
    worker = make_rank(boot)
    made(worker)
    try:
        while True:
            item = port.receive(None)
            assert item is not None
            number, command = item
            if isinstance(command, Join):
                pp, tp = divmod(boot.rank, command.tp)
                set_title("worker", rank=boot.rank, tp=tp, pp=pp, epoch=command.epoch)
            port.reply(number, worker.handle(command))
            if isinstance(command, Exit):
                return 0
    except LinkError as e:
        logger.debug("rank %d ends: %s", boot.rank, e)
        worker.handle(Exit())
        return 1
    finally:
        ended.set()
        port.close()


def _pulse(port: Port, ended: threading.Event) -> None:
    with contextlib.suppress(LinkError, ValueError):  # closed meanwhile
        while not ended.wait(PULSE):
            port.beat()


def _end_with_input() -> None:
    """The parent's death, where its signal doesn't come (it is bound to one thread, and to Linux)."""
    while os.read(0, 4096):  # not through sys.stdin, whose lock would be held when the interpreter ends
        pass
    os._exit(1)


def main() -> int:
    parent = int(sys.argv[1])
    die_with_parent(parent)
    leave_signals_to_parent()
    size = sys.stdin.buffer.read(8)
    data = sys.stdin.buffer.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        return 1  # the parent ended before it said anything
    threading.Thread(target=_end_with_input, name="planaria-parent", daemon=True).start()
    boot = RankBoot.decode(data)
    setup_logging(boot.log_level)
    return run_rank(boot)


if __name__ == "__main__":
    sys.exit(main())
