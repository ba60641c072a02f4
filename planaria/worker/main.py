"""A rank's life, in whatever process a launcher gave it: in each epoch it opens its end of the link and answers every
command. What it has loaded stays from one epoch to the next.

As a process of its own it is told encoded RankBoots; a spare that is prepared says so. Its parent's end is the rank's.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from planaria.executor.boot import READY, SPARE, RankBoot
from planaria.executor.link.address import ShmAddress, open_port
from planaria.executor.link.faults import ConnectionLost, LinkError, RankPort
from planaria.executor.link.later import Later, answers
from planaria.hosts import child
from planaria.logs import setup_logging
from planaria.node import ProcessGone
from planaria.processes import leave_signals_to_parent, set_title
from planaria.protocol import Command, Exit, Failed, Join, Reply
from planaria.worker.guard import is_device_fault
from planaria.worker.worker import make_rank

logger = logging.getLogger("planaria.worker")

PULSE = 1.0  # seconds between signs of life
LONGEST_LINE = 1000  # characters
NEXT_EPOCH = 120.0  # seconds that a rank whose epoch is over waits for the next
ALONE = 10.0  # seconds that one whose driver is out of reach does, and that it gets to end what it is in


class Life:
    """A rank through its epochs. `boot` may be called from any thread: for the first time before `run`, and whenever an
    epoch is over; what the rank waits for inside the old one ends then.

    made: gets the worker, for who brings it steps by another way. say: hears of a spare that is ready.
    """

    def __init__(
        self, made: Callable[[Any], None] = lambda worker: None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.made, self.say = made, say
        self.worker: Any = None
        self._boots: queue.SimpleQueue[RankBoot] = queue.SimpleQueue()

    def hear(self, message: bytes) -> None:
        """An encoded boot."""
        boot = RankBoot.decode(message)
        setup_logging(boot.log_level)
        self.boot(boot)

    def boot(self, boot: RankBoot) -> None:
        self._abort("its epoch is over")
        self._boots.put(boot)  # last: with it the rank enters the epoch that must not be aborted

    def _abort(self, reason: str) -> None:
        if (abort := getattr(self.worker, "abort", None)) is not None:
            abort(reason)

    def run(self) -> int:
        """Until Exit (0), or until no other epoch begins (1)."""
        boot = self._boots.get()
        while True:
            if self.worker is None:
                self.worker = make_rank(boot)
                self.made(self.worker)
            elif hasattr(self.worker, "enter"):
                self.worker.enter(boot)
            if boot.rank == SPARE:
                set_title("spare", **({"weights": boot.config.weights_number} if boot.beside else {}))
                failed = self.worker.prepare()
                why = f"{failed.kind} {failed.message}".replace("\n", " ") if failed is not None else READY
                self.say(why[:LONGEST_LINE])
                boot = self._boots.get()
                continue
            limit = NEXT_EPOCH
            try:
                self._serve(boot)
                return 0
            except (LinkError, ProcessGone) as e:
                logger.debug("rank %d: %s", boot.rank, e)
                if isinstance(e, ConnectionLost):
                    if isinstance(boot.link, ShmAddress):  # the driver has ended
                        break
                    limit = ALONE  # it has, or the network has, and nobody else may be there to end this rank
            try:
                boot = self._boots.get(timeout=limit)
                while not self._boots.empty():
                    boot = self._boots.get()
            except queue.Empty:
                break
        self.worker.handle(Exit())
        return 1

    def _serve(self, boot: RankBoot) -> None:
        """One epoch, until Exit. Raises LinkError when it is over, Gone when it is before this rank came."""
        port = open_port(boot.link)
        ended = threading.Event()
        pulse = threading.Thread(target=self._pulse, args=(port, ended), name="planaria-pulse", daemon=True)
        pulse.start()
        try:
            self.worker.ahead = True
            for number, command, reply in answers(port.receive, partial(self._handle, boot.rank)):
                if isinstance(reply, Failed) and is_device_fault(reply):
                    self.worker.kv.distrust()
                    logger.error("rank %d ends, for its device failed: %s", boot.rank, reply.message)
                    os._exit(1)  # its device can't be asked to finish anything
                port.reply(number, reply)
                if isinstance(command, Exit):
                    return
        finally:
            ended.set()
            pulse.join()  # what it ends must not be of the next epoch
            port.close()

    def _handle(self, rank: int, command: Command) -> Reply | Later:
        if isinstance(command, Join):
            at = command.layout.coords(rank)
            lane = {"dp": at.dp} if command.layout.dp > 1 else {}
            lane |= {"pcp": at.pcp} if command.layout.pcp > 1 else {}
            set_title("worker", rank=rank, **lane, tp=at.tp, pp=at.pp, epoch=command.epoch)
        reply: Reply | Later = self.worker.handle(command)
        return reply

    def _pulse(self, port: RankPort, ended: threading.Event) -> None:
        """Signs of life. Without a driver nobody would end what this rank waits for in a step."""
        try:
            while not ended.wait(PULSE):
                port.beat()
        except ConnectionLost as e:
            self._abort(str(e))
            if not ended.wait(ALONE):
                os._exit(1)
        except (LinkError, ValueError):  # closed meanwhile
            pass


def _listen(life: Life) -> None:
    """Boots; their end is the parent's death, where that one's signal doesn't come (it is bound to one thread, and to
    Linux)."""
    for data in child.hear():
        life.hear(data)
    os._exit(1)


def main() -> int:
    child.begin()
    leave_signals_to_parent()
    life = Life(say=child.say)
    threading.Thread(target=_listen, args=(life,), name="planaria-boots", daemon=True).start()
    return life.run()


if __name__ == "__main__":
    sys.exit(main())
