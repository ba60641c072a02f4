"""Who waits for a few threads has its turn, whatever others have waiting."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from planaria.server.fair_queue import FairQueue, NoRoom


class _Held:
    """A queue whose one thread is kept busy until `go`. said: what was done, in order."""

    def __init__(self, most: int = 8) -> None:
        self.queue, self.said = FairQueue(1, "test", most), list[str]()
        self._busy, self._go = threading.Event(), threading.Event()
        self._first = self.queue.of("first").submit(self._hold)
        assert self._busy.wait(60)

    def _hold(self) -> None:
        self._busy.set()
        assert self._go.wait(60)

    def add(self, owner: str, what: str) -> Future[None]:
        return self.queue.of(owner).submit(self.said.append, what)

    def go(self) -> list[str]:
        """All that was done, once it is."""
        last = self.add("last", "")
        self._go.set()
        last.result(60)
        for _ in range(self.queue.most):
            self.queue.of("last").submit(int).result(60)
        self.queue.close()
        return [what for what in self.said if what]


def test_owners_have_turns() -> None:
    held = _Held()
    for owner, what in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        held.add(owner, what)
    assert held.go() == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_has_most_waiting_is_refused_first() -> None:
    held = _Held(most=4)
    a = [held.add("a", f"a{i}") for i in range(4)]
    b = held.add("b", "b0")
    with pytest.raises(NoRoom):
        a[3].result(60)
    with pytest.raises(NoRoom):
        held.add("a", "a4").result(60)
    more = held.add("b", "b1")  # each has two now
    with pytest.raises(NoRoom):
        a[2].result(60)
    with pytest.raises(NoRoom):
        held.add("b", "b2").result(60)
    more.cancel()  # and has no place any more
    held.queue.most += 1  # for what `go` waits for
    assert held.go() == ["a0", "b0", "a1"] and b.done()


def test_what_fails_is_told_and_others_go_on() -> None:
    held = _Held()
    failing = held.queue.of("a").submit(int, "x")
    held.add("a", "a1")
    assert held.go() == ["a1"]
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(60)


def test_what_waits_when_it_closes_is_not_done() -> None:
    held = _Held()
    waiting = held.add("a", "a1")
    held.queue.close()
    assert waiting.cancelled()
    held._go.set()
    held._first.result(60)
    assert not held.said
