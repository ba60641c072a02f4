"""A rank's life from epoch to epoch, without a process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from planaria.executor.link.faults import Fenced
from planaria.worker import main
from tests.proc.servers import PATIENCE


class Told:
    """A worker that notes what it is told. What ends an epoch takes its time, as on a busy machine: it waits to see
    whether the next one begins meanwhile."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.entered = threading.Event()

    def abort(self, reason: str) -> None:
        self.entered.wait(0.3)
        self.order.append("abort")

    def enter(self, boot: Any) -> None:
        self.order.append("enter")
        self.entered.set()


class Boot:
    rank, link = 0, None


def test_what_ends_an_epoch_never_ends_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boot of an epoch comes in another thread than the one that enters it."""
    worker, life = Told(), main.Life()
    begun = threading.Event()

    def serve(boot: Any) -> None:
        """The first epoch is fenced, the second ends with Exit."""
        if not begun.is_set():
            begun.set()
            raise Fenced("epoch 0 is over")

    monkeypatch.setattr(main, "make_rank", lambda boot: worker)
    monkeypatch.setattr(life, "_serve", serve)
    boots: Any = [Boot(), Boot()]
    life.boot(boots[0])
    rank = threading.Thread(target=life.run)
    rank.start()
    assert begun.wait(PATIENCE)
    life.boot(boots[1])
    rank.join(PATIENCE)
    assert not rank.is_alive() and worker.order == ["abort", "enter"]
