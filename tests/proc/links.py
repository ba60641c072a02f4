"""A link of any kind with its ranks as processes. Ended by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from planaria.executor.link.address import Address
from planaria.executor.link.joined import JoinedLink
from planaria.executor.link.shm import ShmLink
from planaria.executor.link.tcp import TcpLink
from planaria.node import process_state
from planaria.protocol import Call, Command, Exit, Reply
from tests.forks import CONTEXT
from tests.proc import link_rank
from tests.proc.servers import wait_until

LIMIT = 60.0  # seconds that anything may take on a busy machine
HEARTBEAT = 2.0  # where a test is about it; elsewhere nobody is lost for having been slow
KINDS = ["shm", "tcp", "joined"]


def make(kind: str, num_ranks: int, **options: Any) -> Any:
    """joined: shared memory to even ranks, TCP to odd ones."""
    if kind == "shm":
        return ShmLink(num_ranks, **options)
    if kind == "tcp":
        return TcpLink(num_ranks, heartbeat=LIMIT, **options)
    near, far = range(0, num_ranks, 2), range(1, num_ranks, 2)
    return JoinedLink([(make("shm", len(near), **options), near), (make("tcp", len(far), **options), far)])


def start_rank(rank: int, address: Address, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """prefix: of its command."""
    process = subprocess.Popen([*prefix, sys.executable, "-m", "tests.proc.link_rank"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.msgpack.encode((rank, address)))
    process.stdin.close()
    return process


class Rank:
    """A process like that of `start_rank`, forked from one that has imported all that it needs."""

    def __init__(self, rank: int, address: Address) -> None:
        self._process = CONTEXT.Process(target=link_rank.run, args=(rank, msgspec.msgpack.encode(address)), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit code; below 0: the signal that ended it."""
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"rank's process {self.pid} is still there after {timeout:g} s"
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Nothing of it is left."""
        self.send_signal(signal.SIGCONT)
        self.kill()
        self.wait(LIMIT)
        self._process.close()


class Ranks:
    """A link and `num_ranks` processes at it."""

    def __init__(self, kind: str, num_ranks: int, start: Any = Rank, **options: Any) -> None:
        self.link = make(kind, num_ranks, **options)
        self.processes = [start(rank, self.link.address_of(rank)) for rank in range(num_ranks)]
        self.number = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.link.close()
        for process in self.processes:
            process.close()

    def part(self, rank: int) -> tuple[Any, int]:
        """The link that `rank` is at, and its place there."""
        return self.link.place[rank] if isinstance(self.link, JoinedLink) else (self.link, rank)

    def send(self, command: Command) -> int:
        self.number += 1
        self.link.send(self.number, command)
        return self.number

    def ask(self, method: str, *args: Any) -> dict[int, Any]:
        """Values by rank."""
        return {rank: getattr(reply, "value", reply) for rank, reply in self.all(Call(method, args)).items()}

    def all(self, command: Command) -> dict[int, Reply]:
        """Replies by rank, with nothing else under way."""
        number = self.send(command)
        replies: dict[int, Reply] = {}
        while len(replies) < len(self.processes):
            got = self.link.receive(LIMIT)
            assert got is not None, f"no reply from {set(range(len(self.processes))) - set(replies)}"
            assert got[1] == number and got[0] not in replies
            replies[got[0]] = got[2]
        return replies

    def ended(self) -> list[int]:
        """Exit codes, once all have ended."""
        return [process.wait(LIMIT) for process in self.processes]

    def stop(self, rank: int) -> None:
        """SIGSTOP, and wait until it is in force."""
        self.processes[rank].send_signal(signal.SIGSTOP)
        wait_until("it has stopped", lambda: process_state(self.processes[rank].pid) == "T")

    @contextmanager
    def when_full(self, rank: int, act: Any) -> Iterator[None]:
        """`act()` in a thread, once the driver waits for `rank` to make room; must happen before the block ends."""
        link, _ = self.part(rank)
        waits, wait = threading.Event(), link._wait_for_room

        def told(*args: Any) -> None:
            waits.set()
            wait(*args)

        def watch() -> None:
            assert waits.wait(LIMIT), "the driver never waited"
            act()

        link._wait_for_room = told
        watcher = threading.Thread(target=watch)
        watcher.start()
        yield
        watcher.join(LIMIT)
        assert waits.is_set()

    def exit(self) -> None:
        self.all(Exit())
        assert self.ended() == [0] * len(self.processes)


class Gate:
    """What ranks wait at until the test opens it, by name."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "gate")
        os.mkfifo(self.path)

    def open(self) -> None:
        """For a rank that is there, or that comes."""
        os.close(os.open(self.path, os.O_WRONLY))


def within(seconds: float, since: float) -> None:
    took = time.monotonic() - since
    assert took < seconds, f"took {took:.1f} s, allowed {seconds:g}"
