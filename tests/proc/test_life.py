"""A rank's life from epoch to epoch, without a process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from planaria.executor.link.address import ShmAddress, TcpAddress
from planaria.executor.link.faults import DRIVER, ConnectionLost, Fenced
from planaria.protocol import Exit
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


class Stuck:
    """A worker in a step that ends when it is aborted, and its port, whose driver is out of reach."""

    rank = 0

    def __init__(self) -> None:
        self.aborted, self.handled = threading.Event(), list[Any]()

    def handle(self, command: Any) -> Any:
        self.handled.append(command)
        if not isinstance(command, Exit):
            assert self.aborted.wait(PATIENCE), "nobody ended its wait"

    def abort(self, reason: str) -> None:
        self.aborted.set()

    def receive(self, timeout: float | None) -> Any:
        return 1, "a step"

    def beat(self) -> None:
        raise ConnectionLost("the network is gone", DRIVER)

    def reply(self, number: int, reply: Any) -> None:
        self.beat()

    def close(self) -> None:
        pass


FAR, HERE = TcpAddress(b""), ShmAddress(None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("link", [FAR, HERE], ids=["far", "here"])
def test_a_rank_whose_driver_is_out_of_reach_ends(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    """Also one that waits for others in the midst of a step: no fence, boot or signal can come any more."""
    worker, life, boot = Stuck(), main.Life(), Boot()
    boot.link = link
    for name, value in (("make_rank", lambda boot: worker), ("open_port", lambda link: worker)):
        monkeypatch.setattr(main, name, value)
    monkeypatch.setattr(main, "PULSE", 0.01)
    monkeypatch.setattr(main, "NEXT_EPOCH", -1.0)  # nobody may wait that long
    monkeypatch.setattr(main, "ALONE", 0.01 if link.__class__ is TcpAddress else PATIENCE)
    monkeypatch.setattr(main.os, "_exit", lambda code: None)  # its own end is quick, on a busy machine not that quick
    life.boot(boot)  # type: ignore[arg-type]
    assert life.run() == 1
    assert worker.aborted.is_set() and isinstance(worker.handled[-1], Exit) and len(worker.handled) == 2
