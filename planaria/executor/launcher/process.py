"""Ranks as processes of this node: `mp`. What runs in them is named by a module, so nothing of it is imported here.

Each process has a thread that waits for its end, so that a death is known at once, also when nothing is being sent. It
also has a slot, which is an accelerator where the node has some. A slot whose processes end again and again is not
used any more until one that was started in it, as a spare, says that it is ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from planaria.config.machine import accelerator_ids, usable_cores
from planaria.errors import CapacityError
from planaria.executor.boot import Place, RankBoot, Room
from planaria.node import home, node_name, process_state, readable
from planaria.topology import Cluster, Infeasible, Layout, Node, shrink

logger = logging.getLogger("planaria.engine")

EXIT_TIMEOUT = 5.0  # seconds ranks get to end by themselves
KILL_TIMEOUT = 10.0  # seconds a killed process gets to be gone
SETTLE = 0.5  # seconds between a process's end, as others notice it, and its code
TRY_AGAIN = 5.0  # seconds before a slot that is no good is tried; then ever more
LONGEST_TRY = 300.0


def how_it_ended(code: int) -> str:
    """A process's return code in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class ProcessLauncher:
    """Runs `python -m MODULE PARENT READY` for each of `ranks`; its boots go to its standard input, which stays open.

    address: by which other nodes reach this one. spares: processes that get ready to replace one; each writes a byte to
    the descriptor READY when it is. `on_exit`, set by the owner, is called from a watcher's thread.
    """

    name = "mp"
    link, uses_ray, replaces = "queue", False, True
    followed = False
    leaving: Sequence[int] = ()

    def __init__(self, module: str, ranks: Sequence[int], address: str = "127.0.0.1", *, spares: int = 0) -> None:
        self.module, self.ranks, self.address, self.num_spares = module, tuple(ranks), address, spares
        self.on_exit: Callable[[], None] = lambda: None
        self.processes: dict[int, Rank] = {}
        self.spares: list[Rank] = []
        self.devices = accelerator_ids()
        self.num_slots = max(len(self.devices), len(self.ranks) + spares)
        self.bad: set[int] = set()  # slots
        self._slots: dict[int, int] = {}  # of each rank, the last one
        self._try_at, self._pause = 0.0, TRY_AGAIN  # when a bad slot may be tried
        self._tries: Counter[int] = Counter()  # of each slot: one that stays bad does not keep others from it
        self._spare_at, self._spare_pause = 0.0, TRY_AGAIN  # when another spare may be started, if some never got ready
        self._closing = False

    def start(self) -> list[Place]:
        """Start all processes. Called from a thread that outlives them."""
        for rank in self.ranks:
            self._put(rank)
        return self._places()

    def _start(self, slot: int) -> Rank:
        return Rank([sys.executable, "-m", self.module, str(os.getpid())], self._ended, slot)

    def _put(self, rank: int) -> None:
        """A spare, or a new process, becomes this rank."""
        self._count_spares()
        slot = self._slots[rank] = self.spares[0].slot if self.spares else self._free_slots()[0]
        self.processes[rank] = self.spares.pop(0) if self.spares else self._start(slot)

    def _free_slots(self) -> list[int]:
        used = {process.slot for process in [*self.processes.values(), *self.spares]} | self.bad
        return [slot for slot in range(self.num_slots) if slot not in used]

    def _places(self) -> list[Place]:
        cores = usable_cores()
        return [
            Place(rank, home(), node_name(), self.address, process.pid, cores, self._devices(process))
            for rank, process in sorted(self.processes.items())
        ]

    def _devices(self, process: Rank) -> tuple[int, ...]:
        return tuple(self.devices[process.slot : process.slot + 1])

    def run(self, boots: Sequence[RankBoot]) -> None:
        """Tell each rank what it is; those that ended already are found by their watchers."""
        for boot in boots:
            self.processes[boot.rank].tell(boot)

    def replace(self, ranks: Sequence[int], layout: Layout) -> list[Place]:
        """See Launcher. From the thread that called `start`."""
        self.end(ranks)
        self.more_slots(layout.size)
        room = self.capacity().good
        if room < layout.size:
            why = f"{layout} needs {layout.size} processes, there is room for {room} on this node"
            raise Infeasible(why, shrink(Cluster((Node.of("", room),)), layout), layout.size, room)
        return self.arrange(range(layout.size))

    def more_slots(self, ranks: int) -> None:
        """Without accelerators there are as many as the most ranks so far ask for."""
        if not self.devices:
            self.num_slots = max(self.num_slots, ranks + self.num_spares)

    def capacity(self) -> Room:
        self._count_spares()
        good = len(self.processes) + len(self.spares) + len(self._free_slots())
        living = sum(process.code is None for process in self.processes.values())
        ready = living + sum(spare.ready for spare in self.spares)
        return Room(self.num_slots, good, ready, time.monotonic() < self._spare_at)

    def end(self, ranks: Sequence[int]) -> None:
        """End these for certain, and forget them. Where the kernel doesn't let go of one its slot is not used again."""
        ending = [self.processes.pop(rank) for rank in ranks if rank in self.processes]
        for process in ending:
            process.kill()
        for process in ending:
            self._end(process)

    def _end(self, process: Rank) -> None:
        process.kill()
        try:
            process.end(KILL_TIMEOUT)
        except CapacityError as e:
            logger.error("%s", e)
            self.bad.add(process.slot)

    def arrange(self, ranks: Sequence[int]) -> list[Place]:
        """Have exactly these: who lives keeps its number, or takes one that nobody has, or ends. Raises OSError."""
        moving = [self.processes.pop(rank) for rank in sorted(self.processes) if rank not in ranks]
        for rank in ranks:
            if rank not in self.processes and moving:
                self.processes[rank] = moving.pop(0)
                self._slots[rank] = self.processes[rank].slot
            elif rank not in self.processes:
                self._put(rank)
        for process in moving:
            self._end(process)
        return self._places()

    def give_up(self, ranks: Sequence[int]) -> None:
        """See Launcher. Spares take their places before it comes to that."""
        self.bad.update(self._slots[rank] for rank in ranks if rank in self._slots)
        self._try_at = time.monotonic() + self._pause

    def stand_by(self, boot: RankBoot) -> None:
        """Start the spares that are missing; each gets ready by itself."""
        self._count_spares()
        if time.monotonic() >= self._spare_at:
            self._fill(self.num_spares, self._free_slots(), boot)

    def prepare(self, layout: Layout, boot: RankBoot) -> Layout | None:
        """See Launcher."""
        self.more_slots(layout.size)
        self.get_ready(layout.size, boot)
        return shrink(Cluster((Node.of("", self.capacity().ready),)), layout)

    def room_for(self, layout: Layout) -> bool:
        """See Launcher."""
        self.more_slots(layout.size)
        room = self.capacity()
        return room.ready >= layout.size or (room.good >= layout.size and not room.failing)

    def get_ready(self, ranks: int, boot: RankBoot) -> None:
        """Have spares for what is missing to so many ranks. Slots that were given up are tried now and then."""
        self._count_spares()
        now, wanted = time.monotonic(), self.num_spares + ranks - len(self.processes)
        slots = self._free_slots()
        if self.bad and now >= self._try_at:
            tried = {process.slot for process in [*self.processes.values(), *self.spares]}
            slots += sorted(self.bad - tried, key=lambda slot: (self._tries[slot], slot))
            self._try_at, self._pause = now + self._pause, min(LONGEST_TRY, 2 * self._pause)
        with contextlib.suppress(OSError):  # not now
            self._fill(wanted, slots, boot)
        for spare in self.spares:
            if spare.ready:
                self.bad.discard(spare.slot)
                self._pause = TRY_AGAIN

    def _fill(self, wanted: int, slots: list[int], boot: RankBoot) -> None:
        while len(self.spares) < wanted and slots:
            self._tries[slots[0]] += 1
            spare = self._start(slots.pop(0))
            place = msgspec.structs.replace(boot.place, devices=self._devices(spare))
            spare.tell(msgspec.structs.replace(boot, place=place))
            self.spares.append(spare)

    def _count_spares(self) -> None:
        """Forget those that have ended, or were stopped and are of no use. Those that are ready come first."""
        there = [spare for spare in self.spares if spare.code is None and process_state(spare.pid) not in ("T", "t")]
        for spare in self.spares:
            if spare in there:
                continue
            logger.warning("a spare %s", how_it_ended(spare.code) if spare.code is not None else "is stopped: killed")
            if spare.prepared:
                self._spare_at, self._spare_pause = 0.0, TRY_AGAIN
            else:  # the next may fare no better
                self._spare_at = time.monotonic() + self._spare_pause
                self._spare_pause = min(LONGEST_TRY, 2 * self._spare_pause)
            self._end(spare)
        self.spares = sorted(there, key=lambda spare: not spare.ready)

    def _ended(self) -> None:
        if not self._closing:
            self.on_exit()

    def spare_pids(self) -> list[int]:
        return [spare.pid for spare in self.spares]

    def settle(self, ranks: Sequence[int]) -> None:
        """Wait a moment until it is known how these ended."""
        for rank in ranks:
            if rank in self.processes:
                self.processes[rank].settle()

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended though nobody asked, and how."""
        if self._closing:
            return {}
        return {rank: how_it_ended(p.code) for rank, p in sorted(self.processes.items()) if p.code is not None}

    def closing(self) -> None:
        """From now on an end is no loss."""
        self._closing = True

    def close(self) -> None:
        """Wait for the ranks' end; those that don't end are killed. Idempotent."""
        self._closing = True
        for spare in self.spares:
            spare.kill()
        for process in [*self.processes.values(), *self.spares]:
            try:
                process.end(EXIT_TIMEOUT)
            except CapacityError as e:
                logger.warning("%s", e)
        self.processes, self.spares = {}, []

    def kill(self) -> None:
        """End all ranks for certain, stopped ones too."""
        self._closing = True
        for process in self.processes.values():
            process.kill()
        self.close()


class Rank:
    """A process for a rank. `code` is its return code once it has ended; then `ended` is called, in a thread."""

    def __init__(self, command: list[str], ended: Callable[[], None], slot: int) -> None:
        self._ready, ready = os.pipe()
        try:
            command = [*command, str(ready)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, pass_fds=(ready,))
        except OSError:
            os.close(self._ready)
            raise
        finally:
            os.close(ready)
        self.pid, self.code, self._told, self.slot, self._prepared = self._process.pid, None, ended, slot, False
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{self.pid}", daemon=True)
        self._watcher.start()

    code: int | None

    def _watch(self) -> None:
        self.code = self._process.wait()
        self._told()

    @property
    def prepared(self) -> bool:
        """As a spare: has it said that it is ready?"""
        if not self._prepared and readable(self._ready):
            self._prepared = bool(os.read(self._ready, 1))
        return self._prepared

    @property
    def ready(self) -> bool:
        """As a spare: is it there, and prepared?"""
        return self.prepared and self.code is None

    def tell(self, boot: RankBoot) -> None:
        """Hand it a boot; it may have ended."""
        assert self._process.stdin is not None
        data = boot.encode()
        with contextlib.suppress(OSError):
            self._process.stdin.write(len(data).to_bytes(8, "little") + data)

    def settle(self) -> None:
        """It has ended, or is about to: wait a moment for its code."""
        self._watcher.join(SETTLE)

    def kill(self) -> None:
        self._process.kill()

    def end(self, timeout: float) -> None:
        """Wait for its end, for `timeout` seconds before it is killed. Raises CapacityError if it stays even so."""
        self._watcher.join(timeout)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join(KILL_TIMEOUT)
            if self._watcher.is_alive():
                raise CapacityError(f"process {self.pid} was killed and is still there: its device can't be used again")
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._ready)
