"""Adapters to libraries that exchange tokens between GPUs, against stand-ins for these (`fake_libraries`): what they
are called with, and that each token's sum comes back. None of it was run on hardware."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from planaria.config.all2all import EXCHANGES
from planaria.mesh.all2all import All2All, Shapes, make
from planaria.mesh.comm import Comm
from tests.model.fake_libraries import World, install
from tests.model.test_mesh import Group

HIDDEN, CHOICES, MOST, SLOTS = 16, 3, 7, 8
STEPS = [(3, 5), (0, 1), (MOST, 0), (0, 0), (MOST, MOST)]  # tokens of the lanes


def tokens(lane: int, step: int, count: int) -> list[torch.Tensor]:
    """Small whole numbers and powers of two: sums are exact in bfloat16."""
    generator = torch.Generator().manual_seed(10 * step + lane)
    hidden = torch.randint(-2, 3, (count, HIDDEN), generator=generator).bfloat16()
    slots = torch.rand(count, SLOTS, generator=generator).argsort(1)[:, :CHOICES].contiguous()
    return [hidden, slots, torch.randint(1, 3, (count, CHOICES), generator=generator) / 2]


def experts(rows: list[torch.Tensor], own: range) -> torch.Tensor:
    """What a rank makes of rows: its own experts' part, weighed."""
    hidden, slots, weights = rows
    mine = (slots >= own.start) & (slots < own.stop)
    factor = torch.where(mine, weights * (slots + 1), 0.0).sum(1, keepdim=True)
    return torch.where(mine.any(1, keepdim=True), hidden.float(), 0.0) * factor


def all_steps(exchange: All2All, comm: Comm, width: int) -> None:
    lane, local = comm.rank // width, SLOTS // comm.size
    own = range(comm.rank * local, (comm.rank + 1) * local)
    assert exchange.lanes == 2
    for step, counts in enumerate(STEPS):
        mine = tokens(lane, step, counts[lane])
        rows = exchange.begin(counts[lane])
        into = [part.new_empty(rows, *part.shape[1:]) for part in mine]
        exchange.dispatch(mine, into)
        assert ((into[1] >= 0) & (into[1] < SLOTS)).all() and not into[2].isnan().any()
        out = torch.full((counts[lane], HIDDEN), 7.0)
        exchange.combine(experts(into, own), out)
        assert torch.equal(out, experts(mine, range(SLOTS)))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", [way for way in EXCHANGES if EXCHANGES[way].library])
@pytest.mark.row("P9")
def test_every_token_gets_its_experts_sum(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2 * width)
    install(functools.partial(monkeypatch.setitem, sys.modules), world)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * width)
    shapes = Shapes(num_slots=SLOTS, top_k=CHOICES, hidden_size=HIDDEN, max_tokens=MOST, width=width)
    group = Group("gloo", 2 * width)
    try:
        group.run(lambda comm: all_steps(make(name, comm, shapes), comm, width))
    finally:
        group.close()
    for rank in range(world.size):
        mine = [what for at, what in world.calls if at == rank and what != "nvshmem_init"]
        assert mine == ["dispatch", "combine"] * len(STEPS)  # idle lanes too
