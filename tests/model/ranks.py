"""Ranks as processes, all given the same commands: what an executor does, without its links."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planaria.mesh.boot import MeshBoot
from planaria.mesh.mesh import pp_members, tp_members
from planaria.mesh.shared import create_segment
from planaria.protocol import Command, Reply
from tests.model.rank_main import decode, encode


class Ranks:
    """`tp` x `pp` workers with `config`. Use as a context: at its end every process is gone."""

    def __init__(self, config: Any, tp: int, pp: int, *, gloo: bool = False, deadline: float = 60.0) -> None:
        self.tp, self.pp, self.size = tp, pp, tp * pp
        self.fds: dict[tuple[str, int], int] = {}
        self.store = None
        address = None
        if gloo:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = ("127.0.0.1", probe.getsockname()[1])
            self.store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)
        crowded = self.size * config.device.threads > len(os.sched_getaffinity(0))
        self.procs: list[subprocess.Popen[str]] = []
        for rank in range(self.size):
            fds = {
                axis: None if gloo or len(members) == 1 else self._segment(axis, members[0])
                for axis, members in (("tp", tp_members(rank, tp)), ("pp", pp_members(rank, tp, pp)))
            }
            boot = MeshBoot(
                rank, tp, pp, tp_fd=fds["tp"], pp_fd=fds["pp"], store=address, lanes=config.device.threads,
                crowded=crowded, deadline=deadline,
            )  # fmt: skip
            proc = subprocess.Popen(
                [sys.executable, "-m", "tests.model.rank_main"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, pass_fds=[fd for fd in fds.values() if fd is not None],
                cwd=Path(__file__).parents[2],
            )  # fmt: skip
            self.procs.append(proc)
            self._write(proc, (config, boot))

    def _segment(self, axis: str, first: int) -> int:
        if (axis, first) not in self.fds:
            self.fds[axis, first] = create_segment()
        return self.fds[axis, first]

    @staticmethod
    def _write(proc: subprocess.Popen[str], value: Any) -> None:
        assert proc.stdin is not None
        proc.stdin.write(encode(value) + "\n")
        proc.stdin.flush()

    def send(self, command: Command, ranks: list[int] | None = None) -> None:
        """Give the command to all ranks, or to some."""
        for rank in ranks if ranks is not None else range(self.size):
            self._write(self.procs[rank], command)

    def answer(self, rank: int) -> Reply:
        """The rank's next reply."""
        stdout = self.procs[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise EOFError(f"rank {rank} ended with {self.procs[rank].wait()}")
        reply: Reply = decode(line)
        return reply

    def ask(self, command: Command) -> list[Reply]:
        self.send(command)
        return [self.answer(rank) for rank in range(self.size)]

    @property
    def drawing(self) -> int:
        """The rank whose results have tokens."""
        return self.size - self.tp

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for proc in self.procs:
            proc.kill()
        for proc in self.procs:
            proc.wait()
            for stream in (proc.stdin, proc.stdout):
                assert stream is not None
                stream.close()
        for fd in self.fds.values():
            os.close(fd)
