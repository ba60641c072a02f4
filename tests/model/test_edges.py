"""Hidden states along a graph's edges: what was sent is what is received, in steps without rows too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planaria.mesh.comm import CollectiveAborted
from planaria.mesh.edges import EdgeComm


def stage(rank: int) -> EdgeComm:
    base: Any = SimpleNamespace(rank=rank, size=2, members=(4, 7))
    return EdgeComm(base)


@pytest.mark.parametrize("rows", [3, 1, 0])
def test_what_a_stage_sends_is_what_the_next_receives(rows: int) -> None:
    first, second = stage(0), stage(1)
    hidden, into = np.random.default_rng(1).normal(size=(rows, 5)), np.full((rows, 5), 9.0)
    first.send(hidden, 1)
    second.give(first.take())
    second.receive(into, 0)
    assert (into == hidden).all() and first.take() == b""


def test_another_number_of_rows_than_were_due_is_the_stage_befores_fault() -> None:
    first, second = stage(0), stage(1)
    first.send(np.ones((2, 5), np.float32), 1)
    second.give(first.take())
    with pytest.raises(CollectiveAborted, match="rank 4 handed on 40 bytes, 20 were due"):
        second.receive(np.empty((1, 5), np.float32), 0)
