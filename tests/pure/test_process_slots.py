"""Which of a node's places ranks and spares are started in. No process is started here."""

from __future__ import annotations

import os
from typing import Any

import pytest

from planaria.executor.boot import Place, RankBoot
from planaria.executor.launcher.process import ProcessLauncher
from planaria.topology import Layout

BOOT: Any = RankBoot(None, Place(-1, "home", "node"), None, 1, 1, False)  # type: ignore[arg-type]


class Started:
    """In place of a process."""

    def __init__(self, slot: int) -> None:
        self.slot, self.pid, self.code, self.prepared = slot, os.getpid(), None, False
        self.code: int | None

    @property
    def ready(self) -> bool:
        return self.prepared and self.code is None

    def tell(self, boot: RankBoot) -> None: ...

    def kill(self) -> None:
        self.code = -9

    def end(self, timeout: float) -> None: ...


def launcher(monkeypatch: pytest.MonkeyPatch, ranks: int, *devices: str) -> Any:
    monkeypatch.setattr("planaria.executor.launcher.process.accelerator_ids", lambda: list(devices))
    made: Any = ProcessLauncher("none", range(ranks))
    made._start = Started
    made.start()
    return made


def test_one_that_ended_before_it_was_ready_is_no_promise_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = launcher(monkeypatch, 1), Layout(dp=3)
    assert one.room_for(three)
    one.prepare(three, BOOT)
    one.spares[0].prepared = True
    assert one.room_for(three)
    one.spares[1].code = 1
    assert not one.room_for(three)
    one.prepare(three, BOOT)
    for spare in one.spares:
        spare.prepared = True
    assert one.room_for(three), "they are there"


def test_two_are_never_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One becomes a rank in a place that was given up, before it has proved well."""
    two = launcher(monkeypatch, 2, "0", "1")
    two.give_up([1])
    two.end([1])
    two._try_at = 0.0
    two.get_ready(2, BOOT)
    assert [spare.slot for spare in two.spares] == [1]
    two.arrange(range(2))
    two._try_at = 0.0
    two.get_ready(3, BOOT)
    slots = [process.slot for process in [*two.processes.values(), *two.spares]]
    assert sorted(slots) == [0, 1]
