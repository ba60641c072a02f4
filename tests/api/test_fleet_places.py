"""Engines on other nodes: one that loses its place is given up, and comes back when there is a place again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest

from planaria.errors import CapacityError, PlanariaError
from planaria.server import fleet as fleet_module
from planaria.server.fleet import Fleet
from planaria.topology import LaneGroup
from planaria.topology.table import CameUp
from planaria.types import FinishReason
from tests.api.scripted_process import Config, ScriptedProcess
from tests.api.test_fleet import Crowd, settle

END = FinishReason.LENGTH


class Hosts:
    """Room for so many engines; those that can't be started say why."""

    def __init__(self, room: int) -> None:
        self.places, self.held = room, set[int]()
        self.broken: list[str] = []  # of the next starts

    def open(self, size: int) -> None:
        self.grow(range(size))

    def grow(self, engines: Iterable[int]) -> None:
        for engine in engines:
            if engine not in self.held and len(self.held) == self.places:
                raise CapacityError(f"no place for engine {engine}")
            self.held.add(engine)

    def room(self, engine: int) -> bool:
        return len(self.held) < self.places

    def release(self, engine: int) -> None:
        self.held.discard(engine)

    def close(self) -> None:
        self.held.clear()

    def differences(self, engine: int, places: Sequence[CameUp]) -> list[str]:
        return []


class Placed(Crowd):
    def __init__(self, size: int = 2) -> None:
        super().__init__(size)
        self.hosts = Hosts(size)
        config: Any = Config.of(data_parallel_size=size, recovery_limit=3)
        self.fleet = Fleet(config, make=self._make, hosts=self.hosts)
        self.fleet.dispatcher.on_recovery = self.heard.append

    def _make(self, config: Any, hear: Any) -> Any:
        process = ScriptedProcess(config, hear)

        async def start() -> None:
            if self.hosts.broken:
                raise PlanariaError(self.hosts.broken.pop())
            self.hosts.grow([process.index])
            self.processes.setdefault(process.index, []).append(process)

        process.start = start  # type: ignore[method-assign]
        return process

    async def lose_node(self, index: int) -> None:
        """Of an engine; and there is no other place."""
        self.hosts.places -= 1
        self.hosts.held.discard(index)
        await self.fall(index)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    @property
    def states(self) -> list[str]:
        return [engine.state for engine in self.fleet.dispatcher.engines()]


@pytest.fixture
async def placed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Placed]:
    monkeypatch.setattr(fleet_module, "LOOK", 0.001)
    made = Placed()
    await made.start()
    yield made
    await made.fleet.close()


async def test_an_engine_without_a_place_comes_back_when_there_is_one(placed: Placed) -> None:
    placed.submit(*"abcd")
    placed.give(*"abcd")
    await placed.lose_node(1)
    assert placed.states == ["ready", "ended"] and placed.fleet.dispatcher.dead is None
    assert "no place for engine 1" in placed.fleet.members[1].engine.dead.message  # type: ignore[union-attr]
    placed.give(*"abcd")  # all in the other
    placed.hosts.places += 1
    await placed.until(lambda: placed.states == ["ready", "loading"])
    await placed.until(lambda: len(placed.processes[1]) == 2)
    placed[1].become_ready()
    assert placed.states == ["ready", "ready"] and placed.heard[-1].seconds["total"] > 0
    placed.submit(*"efghij")
    assert {1} in [set(placed.where(id)) for id in "efghij"]
    placed.give(*"abcdefghij", finish=END)
    assert not placed.errors() and all(placed.tokens(id) == [100, 101, 102] for id in "abcd")


async def test_a_resize_may_leave_it_out_or_wait_for_its_place(placed: Placed) -> None:
    await placed.lose_node(1)
    refused = await placed.fleet.resizer.resize("x", 3, 0)
    assert refused.state == "rolled back" and "no place for engine" in refused.reason
    assert (await placed.fleet.resizer.resize("y", 1, 0)).state == "committed"
    placed.hosts.places += 1
    await asyncio.sleep(0.05)  # several looks
    assert placed.states == ["ready"] and len(placed.processes[1]) == 1


async def test_a_start_that_fails_is_tried_again_as_often_as_ends_are_allowed(placed: Placed) -> None:
    placed.hosts.broken = ["its node went away"] * 2
    await placed.fall(1)
    await placed.until(lambda: len(placed.processes[1]) == 2)
    placed[1].become_ready()
    assert placed.states == ["ready", "ready"]
    placed.submit("a", "b")
    placed.give("a", "b")  # it got somewhere
    placed.hosts.broken = ["its node went away"] * 9
    placed[1].die()
    await placed.until(lambda: placed.states == ["ready", "ended"])
    await settle()
    assert "did not come up: its node went away" in placed.fleet.members[1].engine.dead.message  # type: ignore[union-attr]
    await asyncio.sleep(0.05)  # several looks, if there were any
    assert placed.states == ["ready", "ended"]


async def test_without_any_place_the_server_ends(placed: Placed) -> None:
    placed.submit("a")
    await placed.lose_node(1)
    await placed.lose_node(0)
    await placed.until(lambda: placed.fleet.dispatcher.dead is not None)
    assert "there is no place for another engine" in placed.errors()["a"]


class Lanes(Hosts):
    """Places for lanes of one engine, and a Ray that has gone."""

    def __init__(self) -> None:
        super().__init__(1)
        self.lanes = 1

    def lend(self, lanes: int) -> tuple[LaneGroup, ...]:
        raise RuntimeError("Ray has gone")

    def take_back(self, lanes: int) -> None:
        self.lanes = lanes


async def test_lanes_that_can_not_be_had_for_whatever_reason_are_no_change_that_never_ends() -> None:
    placed = Placed(1)
    parallel = msgspec.structs.replace(placed.fleet.config.parallel, enable_expert_parallel=True)
    placed.fleet.config = msgspec.structs.replace(placed.fleet.config, parallel=parallel)
    placed.fleet.hosts = Lanes()
    await placed.start()
    for id in ("once", "again"):
        done = await placed.fleet.resizer.resize(id, 2, 0.0)
        assert (done.state, done.reason) == ("rolled back", "RuntimeError: Ray has gone")
        assert not placed.fleet.resizer.busy and placed.fleet.hosts.lanes == 1
    async with asyncio.timeout(60):
        await placed.fleet.resizer.idle()
        await placed.fleet.close()
