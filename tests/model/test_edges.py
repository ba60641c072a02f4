"""Hidden states along a graph's edges: what was sent is what is received, in steps without rows too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planaria.mesh.comm import CollectiveAborted
from planaria.mesh.edges import EdgeComm


def stage(rank: int) -> EdgeComm:
    base: Any = SimpleNamespace(rank=rank, size=2, members=(4, 7))
    return EdgeComm(base)


@pytest.mark.parametrize("rows", [3, 1, 0])
def test_what_a_stage_sends_is_what_the_next_receives(rows: int) -> None:
    first, second = stage(0), stage(1)
    hidden, into = torch.randn(rows, 5), torch.full((rows, 5), 9.0)
    first.send(hidden, 1)
    second.give(first.take())
    second.receive(into, 0)
    assert torch.equal(into, hidden) and first.take() == b""


def test_another_number_of_rows_than_were_due_is_the_stage_befores_fault() -> None:
    first, second = stage(0), stage(1)
    first.send(torch.randn(2, 5), 1)
    second.give(first.take())
    with pytest.raises(CollectiveAborted, match="rank 4 handed on 40 bytes, 20 were due"):
        second.receive(torch.empty(1, 5), 0)
