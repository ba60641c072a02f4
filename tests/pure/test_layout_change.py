"""Ranks that a wider layout needs get ready first: which, and for how long they are waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.executor import layout_change as module
from planaria.executor.gang import START_TIMEOUT
from planaria.executor.layout_change import LayoutChanger
from planaria.protocol import Command
from planaria.topology import Layout
from planaria.wire import EngineResized, ResizeEngine


class Engine:
    """`room`: is there any for ranks that get ready; `ready`: are they."""

    def __init__(self, layout: Layout) -> None:
        self.layout = self.asked = layout
        self.room, self.ready = True, False
        self.now, self.epoch = 0.0, 0
        self.said: list[EngineResized] = []
        self.launcher = SimpleNamespace(name="mp", replaces=True, room_for=lambda layout: self.room)
        gang: Any = self
        self.layout_change = LayoutChanger(
            None, gang, self.said.append, lambda: self.now, self.change, self.prepare  # type: ignore[arg-type]
        )  # fmt: skip

    def placing(self, layout: Layout) -> None:
        return None

    def named(self, layout: Layout) -> str:
        return str(layout)

    def came(self, layout: Layout) -> bool:
        return self.ready

    def change(self, layout: Layout, why: str) -> None:
        self.layout = layout

    def prepare(self, command: Command) -> None:
        pytest.fail(f"nobody has anything to send, but {command}")

    def look_at(self, now: float) -> Layout:
        self.now = now
        self.layout_change.look(True)
        return self.layout


@pytest.fixture(autouse=True)
def nothing_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", lambda *args: "")


def test_ranks_that_load_are_waited_for_as_long_as_loading_may_take() -> None:
    engine = Engine(Layout(dp=2))
    engine.layout_change.ask(ResizeEngine("more", 1, 1, 3))
    assert engine.look_at(START_TIMEOUT - 1.0) == Layout(dp=2) and not engine.said
    engine.ready = True
    assert engine.look_at(START_TIMEOUT - 0.5) == Layout(dp=3)
    assert [said.id for said in engine.said] == ["more"]


def test_ranks_that_end_on_the_way_are_not_waited_for() -> None:
    engine = Engine(Layout(dp=2))
    engine.layout_change.ask(ResizeEngine("more", 1, 1, 3))
    assert engine.look_at(1.0) == Layout(dp=2)
    engine.room = False
    assert engine.look_at(2.0) == Layout(dp=3), "the change itself finds out"
    assert [said.id for said in engine.said] == ["more"]


@pytest.mark.parametrize("resize", [ResizeEngine("a", 2, 1), ResizeEngine("b", 1, 2), ResizeEngine("c", 2, 1, 3)])
def test_nobody_gets_ready_for_all_parts_of_another_layout(resize: ResizeEngine) -> None:
    """Each would hold the whole model until it knows which part is its own."""
    engine = Engine(Layout(dp=2))
    engine.layout_change.ask(resize)
    assert engine.layout_change.arrival is None and (engine.layout.tp, engine.layout.pp) == (resize.tp, resize.pp)
