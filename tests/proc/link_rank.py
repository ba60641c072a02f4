"""A rank for the tests of links: a process that carries out `Call`s by name. Its rank and its link's address come
through standard input."""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from typing import Any

import msgspec

from planaria.executor.link.address import Address, open_port
from planaria.executor.link.faults import ConnectionLost, Fenced, LinkClosed, MessageLost
from planaria.executor.link.shm import ShmLink, ShmPort
from planaria.executor.link.tcp_port import TcpPort
from planaria.protocol import Call, Command, Done, Exit, LaneResult, Reply, StepPlan, StepResult

MEGABYTE = bytes(1 << 20)
ENDED = {Fenced: 10, LinkClosed: 11, ConnectionLost: 12, MessageLost: 13}  # exit codes


def do(rank: int, command: Command) -> Reply:
    if isinstance(command, StepPlan):
        rows = [row.row for lane in command.lanes for row in lane]
        return StepResult(command.epoch, command.step, (LaneResult(rows, rows),))
    assert isinstance(command, Call), command
    args: tuple[Any, ...] = command.args
    match command.method:
        case "echo":
            return Done(rank, args[0])
        case "check":  # of bytes: length and checksum
            return Done(rank, [len(args[0]), zlib.crc32(args[0])])
        case "make":  # bytes of this length
            return Done(rank, bytes(args[0]))
        case "work":  # as many megabytes as given for this rank
            for _ in range(args[0][rank]):
                zlib.crc32(MEGABYTE)
            return Done(rank, None)
        case "gate":  # wait for the test, which holds these ranks up
            if rank in args[1]:
                os.close(os.open(args[0], os.O_RDONLY))
            return Done(rank, None)
        case "die":
            if rank in args[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return Done(rank, None)
        case "stop":
            if rank in args[0]:
                os.kill(os.getpid(), signal.SIGSTOP)
            return Done(rank, None)
        case "object":
            return Done(rank, object())
        case "cpu":  # seconds of CPU time used so far
            return Done(rank, time.process_time())
        case "descriptors":
            return Done(rank, sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]))
    raise AssertionError(command.method)


def lose(end: Any, rank: int = 0) -> None:
    """A message of this end (a port's, or a link's to `rank`) is counted as sent, but never arrives."""
    if isinstance(end, ShmLink | ShmPort):
        outlet = end._outlet
        outlet.head += 1
        outlet.words[outlet.head_word] = outlet.head
        outlet.ring()
    else:
        stream = end._stream if isinstance(end, TcpPort) else end._peers[rank].stream
        stream.sent += 1


def run(rank: int, encoded: bytes) -> None:
    """encoded: its link's address."""
    port: Any = open_port(msgspec.msgpack.decode(encoded, type=Address))
    try:
        while (got := port.receive(60.0)) is not None:
            number, command = got
            if isinstance(command, Exit):
                port.reply(number, Done(rank))
                port.close()
                return
            if isinstance(command, Call) and command.method == "lose":
                lose(port)
            else:
                port.reply(number, do(rank, command))
    except tuple(ENDED) as e:
        port.close()
        sys.exit(ENDED[type(e)])
    sys.exit(14)


if __name__ == "__main__":
    own, raw = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[int, msgspec.Raw])
    run(own, bytes(raw))
