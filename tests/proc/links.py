"""A link of either kind with its ranks as processes. Ended by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

from planaria.executor.link.shm import ShmLink
from planaria.executor.link.tcp import TcpLink
from planaria.protocol import Call, Command, Exit, Reply

LIMIT = 60.0  # seconds that anything may take on a busy machine


def make(kind: str, num_ranks: int, **options: Any) -> ShmLink | TcpLink:
    if kind == "shm":
        return ShmLink.create(num_ranks, **options)
    return TcpLink.create(num_ranks, heartbeat=2.0, **options)


def start_rank(link: ShmLink | TcpLink, rank: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.proc.link_rank"]
    if isinstance(link, ShmLink):
        (fd,) = link.fds_to_pass()
        return subprocess.Popen([*command, "shm", str(fd), str(rank)], pass_fds=(fd,))
    process = subprocess.Popen([*command, "tcp"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(link.invitation(rank).encode())
    process.stdin.close()
    return process


class Ranks:
    """A link and `num_ranks` processes at it."""

    def __init__(self, kind: str, num_ranks: int, **options: Any) -> None:
        self.link = make(kind, num_ranks, **options)
        self.processes = [start_rank(self.link, rank) for rank in range(num_ranks)]
        self.number = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.link.close()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(LIMIT)

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
        os.waitpid(self.processes[rank].pid, os.WUNTRACED)

    def exit(self) -> None:
        self.all(Exit())
        assert self.ended() == [0] * len(self.processes)


def within(seconds: float, since: float) -> None:
    took = time.monotonic() - since
    assert took < seconds, f"took {took:.1f} s, allowed {seconds:g}"
