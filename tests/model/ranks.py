"""Ranks as processes, all given the same commands: what an executor does, without its links."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import msgspec

from planaria.config.options import EngineConfig
from planaria.executor.boot import RankBoot
from planaria.executor.link.address import Inside
from planaria.hosts.host import Place
from planaria.node import home
from planaria.protocol import Command, Hello, Join, Ready, Regroup, Reply
from planaria.topology import Layout
from tests.forks import CONTEXT
from tests.model.rank_main import serve

LIMIT = 240.0  # seconds for an answer


def boot_of(config: EngineConfig, rank: int = 0, size: int = 1) -> RankBoot:
    """Of a rank that nobody links to."""
    threads = config.device.threads
    crowded = size * threads > len(os.sched_getaffinity(0))
    return RankBoot(config, Place(rank, home(), "here"), Inside(), threads, threads, crowded)


class Ranks:
    """`tp` x `pcp` x `pp` workers with `config`. Use as a context: at its end every process is gone."""

    def __init__(
        self, config: EngineConfig, tp: int, pp: int, *, pcp: int = 1, gloo: bool = False, deadline: float = 60.0
    ) -> None:
        self.tp, self.pp, self.size = tp, pp, tp * pp * pcp
        layout = Layout(tp=tp, pp=pp, pcp=pcp)
        self.drawing = layout.drawing[0]  # the rank whose results have tokens
        config = config.with_layout(layout)
        parallel = msgspec.structs.replace(config.parallel, disable_custom_all_reduce=gloo)
        config = msgspec.structs.replace(config, parallel=parallel)
        self.procs: list[ForkServerProcess] = []
        self.ends: list[Connection] = []
        for rank in range(self.size):
            own, theirs = CONTEXT.Pipe()
            proc = CONTEXT.Process(target=serve, args=(theirs,), daemon=True)
            proc.start()
            theirs.close()
            self.procs.append(proc)
            self.ends.append(own)
            own.send(boot_of(config, rank, self.size))
        hellos = self.ask(Join(0, layout))
        self.members = tuple(hello for hello in hellos if isinstance(hello, Hello))
        for reply in self.ask(Regroup(0, layout, self.members, deadline)):
            assert isinstance(reply, Ready), reply

    def send(self, command: Command, ranks: list[int] | None = None) -> None:
        """Give the command to all ranks, or to some."""
        for rank in ranks if ranks is not None else range(self.size):
            self.ends[rank].send(command)

    def answer(self, rank: int) -> Reply:
        """The rank's next reply."""
        assert self.ends[rank].poll(LIMIT), f"rank {rank} says nothing"
        reply: Reply = self.ends[rank].recv()
        return reply

    def ask(self, command: Command) -> list[Reply]:
        self.send(command)
        return [self.answer(rank) for rank in range(self.size)]

    def pid(self, rank: int) -> int:
        pid = self.procs[rank].pid
        assert pid is not None
        return pid

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for proc in self.procs:
            proc.kill()
        for proc, end in zip(self.procs, self.ends, strict=True):
            proc.join(LIMIT)
            end.close()
