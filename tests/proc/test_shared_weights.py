"""Weights once a node: a replacement, another layout, another engine and an engine's next process map what is there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from planaria.hosts.weights import HEADER, PART
from planaria.wire import ResizeEngine
from tests.model.engines import Engine, ask_for, texts
from tests.proc.servers import TINY, Server, wait_until
from tests.proc.test_fleet import all_ready

ASKED = texts(131, [(5, 8), (30, 8)])
NAME = "/memfd:planaria-weights"


def parts(pid: int) -> set[int]:
    """Those that a process has mapped, by where they begin in the file. It can't write to them."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if NAME in line and (offset := int(line.split()[2], 16)) >= HEADER:
            assert line.split()[1] == "r--s"
            found.add(offset // PART)
    return found


def held(pid: int) -> int:
    """Bytes of the file, of the process that owns it."""
    owned = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if NAME in os.path.realpath(fd)]
    return max(fd.stat().st_blocks for fd in owned) * 512


def test_a_replacement_maps_what_is_there_and_another_layout_lets_go_of_it(small: Path) -> None:
    with Engine(str(small), tensor_parallel_size=2, threads=1) as engine:
        expected = engine.run(ASKED)
        before, size = [parts(pid) for pid in engine.pids], held(os.getpid())
        assert [len(each) for each in before] == [1, 1] and before[0] != before[1]
        assert engine.run(ASKED, 4, lambda: engine.kill(1, signal.SIGKILL)) == expected
        assert [parts(pid) for pid in engine.pids] == before and held(os.getpid()) == size
        assert engine.recoveries[0].tokens == 0
        ask_for(engine.loop, ResizeEngine("smaller", 1, 1))
        assert engine.run(ASKED) == expected and engine.resized[0].error == ""
        (rank,) = engine.pids
        (whole,) = parts(rank)
        assert whole not in set.union(*before)
        # The whole takes as much as both parts did, or, in huge pages, as one.
        wait_until("the parts of two ranks are given back", lambda: held(os.getpid()) <= size + HEADER)
        ask_for(engine.loop, ResizeEngine("larger", 2, 1))
        assert engine.run(ASKED) == expected and engine.resized[1].error == ""
        again = [parts(pid) for pid in engine.pids]  # of which one got ready as a spare
        assert [len(each) for each in again] == [1, 1] and again[0] != again[1]
        wait_until("the whole is given back", lambda: held(os.getpid()) == size)


def test_engines_share_and_the_next_process_finds_it(small: Path) -> None:
    with Server(str(small), *TINY, "-dp", "2") as server:
        first, second = server.engine_pids()
        mapped, size = parts(first), held(server.pid)
        assert len(mapped) == 1 and parts(second) == mapped
        os.kill(first, signal.SIGKILL)
        wait_until("another engine", lambda: len(server.engine_pids()) == 2 and first not in server.engine_pids())
        all_ready(server)
        assert [parts(pid) for pid in server.engine_pids()] == [mapped, mapped] and held(server.pid) == size
