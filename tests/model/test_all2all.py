"""What any way to exchange tokens between lanes must do, for those that run here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from planaria.config.all2all import EXCHANGES
from planaria.mesh.all2all import All2All, Shapes, make
from planaria.mesh.comm import Array, CollectiveAborted, Comm
from planaria.mesh.nccl import NcclComm
from tests.model.tensors import array
from tests.model.test_mesh import Group

HIDDEN, CHOICES, MOST, SLOTS = 48, 2, 40, 8
STEPS = [(3, 5), (0, 1), (7, 0), (0, 0), (MOST, MOST), (1, 1)]  # tokens of the lanes
NAMES = [name for name, way in EXCHANGES.items() if not way.library]
WAYS = [(name, dealt) for name in NAMES for dealt in (False, True)]


def tokens(lane: int, step: int, layer: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * layer + lane)
    hidden = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    slots = torch.randint(0, SLOTS, (count, CHOICES), generator=generator, dtype=torch.int32)
    return [hidden, slots, torch.rand(count, CHOICES, generator=generator)]


def made_of(rank: int, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A rank's experts."""
    return hidden.float() * (rank + 1) + weights.sum(-1, keepdim=True) * 10.0**rank


def of(comm: Comm, parts: list[torch.Tensor]) -> list[Array]:
    """What a rank has of a group's kind: tensors only on a device."""
    return list(parts) if isinstance(comm, NcclComm) else [array(part) for part in parts]


def all_steps(exchange: All2All, comm: Comm, width: int, in_order: bool = True) -> None:
    lane = comm.rank // width
    for step, counts in enumerate(STEPS):
        assert exchange.begin(counts[lane]) == sum(counts)
        for layer in range(3):
            mine = tokens(lane, step, layer, counts[lane])
            into = [part.new_empty(sum(counts), *part.shape[1:]) for part in mine]
            exchange.dispatch(of(comm, mine), of(comm, into))
            every = [torch.cat(both) for both in zip(*(tokens(i, step, layer, counts[i]) for i in (0, 1)), strict=True)]
            for found, expected in zip(into, every, strict=True):
                assert torch.equal(found, expected)
            out = torch.full((counts[lane], HIDDEN), 7.0)
            exchange.combine(*of(comm, [made_of(comm.rank, into[0], into[2]), out]))
            expected = torch.zeros_like(out)
            for rank in range(comm.size):
                expected = expected + made_of(rank, mine[0], mine[2])
            if not in_order:
                torch.testing.assert_close(out, expected)
            else:
                assert torch.equal(out, expected), "not added up in the order of ranks"


def shapes(width: int) -> Shapes:
    return Shapes(max_tokens=MOST, width=width, num_slots=SLOTS, top_k=CHOICES, hidden_size=HIDDEN)


@pytest.mark.parametrize("kind", ["shared", "gloo", "nccl"])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(("name", "dealt"), WAYS)
@pytest.mark.row("P9")
def test_tokens_go_to_all_ranks_and_their_sums_come_back(kind: str, width: int, name: str, dealt: bool) -> None:
    group = Group(kind, 2 * width)
    try:
        group.run(
            lambda comm: all_steps(make(name, comm, shapes(width), dealt=dealt), comm, width, in_order=name != "naive")
        )
    finally:
        group.close()


class Heard:
    """The rank of a group, which notes how many rows it is told by whom."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.rows = rank, size, list[tuple[int, int]]()

    def broadcast(self, x: Array, source: int) -> None:
        self.rows.append((source, len(x)))


@pytest.mark.parametrize(("dealt", "told"), [(False, [(0, 5), (2, 4)]), (True, [(0, 2), (1, 3), (2, 2), (3, 2)])])
@pytest.mark.row("P23")
def test_each_token_is_told_once_by_the_tensor_ranks_that_share_them(dealt: bool, told: list[tuple[int, int]]) -> None:
    heard = Heard(1, 4)
    exchange = make("naive", heard, shapes(2), dealt=dealt)  # type: ignore[arg-type]
    assert exchange.count([5, 4]) == 9
    exchange.dispatch([np.ones((5, HIDDEN))], [np.zeros((9, HIDDEN))])
    assert heard.rows == told


@pytest.mark.parametrize("kind", ["shared", "gloo"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", ["begin", "dispatch"])
def test_a_wait_for_a_lane_that_is_gone_ends(kind: str, name: str, after: str) -> None:
    group, done = Group(kind, 2), threading.Barrier(2)

    def work(comm: Comm) -> Callable[[], Any] | None:
        exchange = make(name, comm, shapes(1))
        exchange.begin(3)
        mine = of(comm, tokens(comm.rank, 0, 0, 3))
        into = [np.empty((6, *part.shape[1:]), part.dtype) for part in mine]
        if after == "dispatch":
            exchange.dispatch(mine, into)
        done.wait(60)  # what is sent may still be on its way, and an abort would end that
        if comm.rank == 1:
            comm.abort("it has failed")
            return None
        with pytest.raises(CollectiveAborted):
            if after == "begin":
                exchange.dispatch(mine, into)
            exchange.combine(np.zeros((6, HIDDEN), np.float32), np.zeros((3, HIDDEN), np.float32))
            exchange.begin(3)
        return None

    try:
        group.run(work)
    finally:
        group.close()


def test_a_way_that_is_not_here() -> None:
    with pytest.raises(ValueError, match="carrier pigeons"):
        group = Group("gloo", 2)
        try:
            make("carrier pigeons", group.comms[0], shapes(1))
        finally:
            group.close()
