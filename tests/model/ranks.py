"""Ranks as processes, all given the same commands: what an executor does, without its links."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.executor.boot import RankBoot
from planaria.executor.link.address import Inside
from planaria.hosts.host import Place
from planaria.node import home
from planaria.protocol import Command, Hello, Join, Ready, Regroup, Reply
from planaria.topology import Layout
from tests.model.rank_main import decode, encode


def boot_of(config: EngineConfig, rank: int = 0, size: int = 1) -> RankBoot:
    """Of a rank that nobody links to."""
    threads = config.device.threads
    crowded = size * threads > len(os.sched_getaffinity(0))
    return RankBoot(config, Place(rank, home(), "here"), Inside(), threads, threads, crowded)


class Ranks:
    """`tp` x `pp` workers with `config`. Use as a context: at its end every process is gone."""

    def __init__(
        self, config: EngineConfig, tp: int, pp: int, *, gloo: bool = False, deadline: float = 60.0
    ) -> None:
        self.tp, self.pp, self.size = tp, pp, tp * pp
        layout = Layout(tp=tp, pp=pp)
        parallel = msgspec.structs.replace(
            config.parallel, tensor_parallel_size=tp, pipeline_parallel_size=pp, disable_custom_all_reduce=gloo
        )
        config = msgspec.structs.replace(config, parallel=parallel)
        self.procs: list[subprocess.Popen[str]] = []
        for rank in range(self.size):
            proc = subprocess.Popen(
                [sys.executable, "-m", "tests.model.rank_main"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, cwd=Path(__file__).parents[2],
            )  # fmt: skip
            self.procs.append(proc)
            self._write(proc, boot_of(config, rank, self.size))
        hellos = self.ask(Join(0, layout))
        self.members = tuple(hello for hello in hellos if isinstance(hello, Hello))
        for reply in self.ask(Regroup(0, layout, self.members, deadline)):
            assert isinstance(reply, Ready), reply

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
