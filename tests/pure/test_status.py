"""What `planaria ps` says of each process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from planaria.executor.status import process_rows
from planaria.node import home, node_name
from planaria.protocol import Hello
from planaria.topology import Layout


def hello(rank: int, pid: int, where: str = home()) -> Hello:
    return Hello(rank, pid, where, node_name() if where == home() else "elsewhere", "127.0.0.1")


def test_ranks_here_are_looked_at_and_others_asked() -> None:
    # In a child that waits for its input to end: a process of this node that is neither this one nor gone.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        members = [hello(0, child.pid), hello(1, 4711, "another node"), hello(2, 4712, "another node")]
        engine, first, second, third = process_rows(members, Layout(tp=3), 5, [1], {1: 123}, "busy")
        assert child.stdin is not None
        child.stdin.close()
    assert (engine.role, engine.rank, engine.coordinates, engine.pid) == ("engine", None, {}, os.getpid())
    assert (engine.state, engine.epoch, engine.node) == ("busy", 5, node_name()) and engine.resident > 1 << 20
    assert (first.role, first.rank, first.coordinates) == ("worker", 0, {"tp": 0, "pp": 0})
    assert (first.state, first.node) == ("idle", node_name()) and first.resident > 0
    assert (second.state, second.node, second.resident, second.coordinates) == (
        "busy", "elsewhere", 123, {"tp": 1, "pp": 0},
    )  # fmt: skip
    assert (third.state, third.resident, third.uptime) == ("idle", 0, None)
    assert engine.uptime is not None and first.uptime is not None and engine.uptime >= first.uptime >= 0


def test_a_rank_inside_the_engine_is_the_engines_row() -> None:
    (row,) = process_rows([hello(0, os.getpid())], Layout(), 0, [], {}, "idle")
    assert (row.role, row.rank, row.coordinates) == ("engine", 0, {"tp": 0, "pp": 0})


def test_the_same_pid_on_another_node_is_another_process() -> None:
    assert [row.role for row in process_rows([hello(0, os.getpid(), "another node")], Layout(), 0, [], {}, "idle")] == [
        "engine",
        "worker",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_process_that_has_ended_is_said_to_have() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    _, row = process_rows([hello(0, ended.pid)], Layout(), 0, [0], {}, "idle")
    assert (row.state, row.resident) == ("ended", 0)
