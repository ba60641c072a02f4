"""Balancing experts as a state machine: whatever comes between, ranks hold what the maps in force say."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.config.options import EPLBConfig, ParallelConfig
from planaria.core.eplb.balance import ASK, LEAST_GAIN, ExpertBalance
from planaria.core.eplb.policy import balance, balancedness
from planaria.executor.balancing import Balancing
from planaria.protocol import Command, PlaceExperts, SendExperts
from planaria.topology import Layout
from planaria.topology.experts import ExpertMap

BYTES = 100  # of an expert


class Ranks:
    """What all ranks together hold, by slot; a command counts when it is answered. Tokens choose by `odds`."""

    def __init__(self, state: ExpertBalance, odds: list[list[int]]) -> None:
        self.state, self.odds = state, odds
        self.slots = [list(placed.slots) for placed in state.maps]
        self.aside: dict[tuple[int, int], int] = {}
        self.prepared = 0
        self.steps = 0  # whose load was not told
        self.waiting: list[Command] = []
        self.seen: list[Command] = []

    def send(self, commands: list[Command]) -> None:
        self.waiting += commands
        self.seen += commands
        assert sum(not isinstance(command, type(ASK)) for command in self.waiting) <= 1

    def step(self) -> None:
        self.steps += 1
        self.send(self.state.stepped(self.prepared))

    def load(self) -> bytes:
        flat = [count * self.steps for layer in self.odds for count in layer]
        self.steps = 0
        return struct.pack(f"<{len(flat)}q", *flat)

    def answer(self) -> None:
        """The oldest command's."""
        command = self.waiting.pop(0)
        if isinstance(command, SendExperts):
            for move in command.moves:
                placed = self.state.maps[move.layer]
                assert move.source is not None and move.expert in placed.of(move.source)
                assert placed.rank_of(move.slot) == move.target
                self.aside[move.layer, move.slot] = move.expert
            if command.aside:
                return
            self.prepared = command.version
            self.send(self.state.received())
        elif isinstance(command, PlaceExperts):
            assert command.version == self.prepared
            for (layer, slot), expert in self.aside.items():
                self.slots[layer][slot] = expert
            assert all(tuple(self.slots[layer]) == slots for layer, slots in command.maps)
            self.aside.clear()
            self.state.arranged()
            assert [tuple(slots) for slots in self.slots] == [placed.slots for placed in self.state.maps]
        else:
            self.state.loaded([self.load(), bytes(8 * sum(map(len, self.odds)))])  # another lane had nothing to do

    def receive(self) -> None:
        """What comes beside steps is there."""
        if self.aside and not any(isinstance(command, SendExperts) for command in self.waiting):
            self.prepared = self.state.version

    def lost(self, maps: tuple[ExpertMap, ...]) -> None:
        self.waiting.clear()
        self.aside.clear()
        self.prepared, self.steps = 0, 0
        self.state.formed(maps)
        self.slots = [list(placed.slots) for placed in maps]


@st.composite
def started(draw: st.DrawFn) -> Ranks:
    experts, ranks, layers = draw(st.integers(2, 8)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    redundant = draw(st.integers(0, 3))
    config = EPLBConfig(
        window_size=draw(st.integers(1, 6)), step_interval=draw(st.integers(1, 6)), num_redundant_experts=redundant,
        use_async=draw(st.booleans()), log_balancedness=draw(st.booleans()),
    )  # fmt: skip
    maps = (ExpertMap.linear(experts, ranks, redundant),) * layers
    odds = draw(st.lists(st.lists(st.integers(0, 99), min_size=experts, max_size=experts), min_size=3, max_size=3))
    return Ranks(ExpertBalance(config, maps, BYTES, step_bytes=draw(st.integers(0, 3)) * BYTES), odds[:layers])


@given(started(), st.lists(st.sampled_from(["step", "step", "answer", "receive", "lost", "drift"]), max_size=60))
def test_ranks_hold_what_the_maps_in_force_say(ranks: Ranks, events: list[str]) -> None:
    state = ranks.state
    for event in events:
        before = state.maps
        match event:
            case "step":
                ranks.step()
            case "answer" if ranks.waiting:
                ranks.answer()
            case "receive":
                ranks.receive()
            case "drift":
                ranks.odds = [layer[::-1] for layer in ranks.odds]
            case "lost":
                maps = state.maps
                ranks.lost(maps)
                assert state.maps == maps and not state.rearranging
            case _:
                pass
        gave_commit = isinstance(ranks.waiting[-1], PlaceExperts) if ranks.waiting else False
        assert state.maps == before or gave_commit  # in force from the commit on, and from nothing else
    versions = [command.version for command in ranks.seen if isinstance(command, SendExperts)]
    assert versions == sorted(set(versions))  # nobody can take one for another


@settings(max_examples=20)
@given(started())
def test_left_alone_it_comes_to_maps_that_can_hardly_be_better(ranks: Ranks) -> None:
    state = ranks.state

    def turns(number: int) -> None:
        for _ in range(number):
            ranks.step()
            while ranks.waiting:
                ranks.answer()
                ranks.receive()

    turns(80)
    load, slots = state.window.total(), len(state.maps[0].slots)
    best = balance(load, slots, state.num_ranks)
    for layer, placed, found in zip(load, state.maps, best, strict=True):
        assert balancedness([layer], [placed]) >= balancedness([layer], [found]) - LEAST_GAIN
    assert state.bytes_moved >= state.bytes_needed
    moved, done = state.bytes_moved, state.rearrangements
    turns(20)
    assert (state.bytes_moved, state.rearrangements) == (moved, done)  # the load is as it was: nothing is gained


def two_ranks(**config: object) -> Ranks:
    """All load is on the first of two ranks."""
    maps = (ExpertMap.linear(4, 2),)
    return Ranks(ExpertBalance(EPLBConfig(**config), maps, BYTES), [[8, 8, 0, 0]])  # type: ignore[arg-type]


@pytest.mark.row("E2")
def test_load_is_asked_for_now_and_then_and_looked_at_every_interval() -> None:
    ranks = two_ranks(window_size=32, step_interval=64)
    for number in range(1, 64):
        ranks.step()
        assert bool(ranks.waiting) == (number % 2 == 0)
        while ranks.waiting:
            ranks.answer()
    assert ranks.state.window.steps == 32 and ranks.state.window.total() == [[256, 256, 0, 0]]
    assert ranks.state.balancedness == 0.5 and not ranks.state.rearranging
    ranks.step()
    ranks.answer()
    assert ranks.state.rearranging


@pytest.mark.row("E5")
def test_a_commit_waits_for_every_rank_and_beside_steps_for_what_they_tell() -> None:
    for use_async in (False, True):
        ranks = two_ranks(window_size=1, step_interval=1, use_async=use_async)
        before = ranks.state.maps
        while not any(isinstance(command, SendExperts) for command in ranks.waiting):
            ranks.step()
            while ranks.waiting and ranks.waiting[0] is ASK:
                ranks.answer()
        ranks.step()
        assert ranks.state.maps == before
        ranks.answer()
        assert (ranks.state.maps == before) == use_async
        if use_async:
            ranks.step()
            assert ranks.state.maps == before
            ranks.receive()
            ranks.step()
            assert ranks.state.maps != before
        while ranks.waiting:
            ranks.answer()
        assert ranks.state.rearrangements == 1 and ranks.state.bytes_moved == ranks.state.bytes_needed == 2 * BYTES
        assert ranks.state.balancedness == 1.0


def test_the_nodes_are_those_of_the_ranks_there_are() -> None:
    """Groups of experts are kept on nodes, and another number of ranks may be on other ones."""
    parallel = msgspec.structs.replace(ParallelConfig(), enable_eplb=True)
    moe = SimpleNamespace(num_groups=2, intermediate_size=8)
    config: Any = SimpleNamespace(
        parallel=parallel, model=SimpleNamespace(moe=moe, hidden_size=8),
        device=SimpleNamespace(quantization="none", dtype="float32"),
    )  # fmt: skip
    gang: Any = SimpleNamespace()
    balancing = Balancing(config, gang, lambda: None)
    for homes, nodes in (("ab", 2), ("aabb", 2), ("a", 1), ("aab", 1), ("abc", 3)):
        gang.places = [SimpleNamespace(home=home) for home in homes]
        gang.layout, gang.maps = Layout(dp=len(homes)), (ExpertMap.linear(8, len(homes)),)
        balancing.formed()
        assert balancing.state is not None and balancing.state.num_nodes == nodes
        assert balancing.state.num_ranks == len(homes)
