"""Calls to ranks of this process: who waits for an answer may stop waiting."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from planaria.executor.link.direct import DirectLink
from planaria.protocol import Call, Command, Done, Failed, Probe, Reply

LIMIT = 60.0


class Slow:
    """A call ends when it is told to. Notes which thread carried out what."""

    def __init__(self) -> None:
        self.go, self.took, self.done = threading.Event(), list[int](), list[tuple[str, int]]()

    def take_thread(self) -> None:
        self.took.append(threading.get_ident())

    def handle(self, command: Command) -> Reply:
        if isinstance(command, Call):
            assert self.go.wait(LIMIT)
        self.done.append((type(command).__name__, threading.get_ident()))
        return Done(0, len(self.done))


def test_a_call_is_left_alone_and_what_follows_waits_for_it() -> None:
    rank, own = Slow(), threading.get_ident()
    link = DirectLink([rank])
    link.send(0, Call("any"))
    assert link.receive(0.01) is None
    for number in (1, 2):
        link.send(number, Probe())
    link.send(3, Call("any"))
    assert link.receive(0) is None and not rank.done, "neither overtakes the call, nor does anybody wait for it"
    rank.go.set()
    assert [link.receive(LIMIT) for _ in range(4)] == [(0, n, Done(0, n + 1)) for n in range(4)]
    assert [name for name, _ in rank.done] == ["Call", "Probe", "Probe", "Call"]
    called, first, second, _ = (thread for _, thread in rank.done)
    assert first == second == own != called
    assert rank.took[:2] == [called, own], "each thread is made one that computes, once"
    link.close()


@pytest.mark.row("X1")
def test_without_a_call_nothing_is_handed_over() -> None:
    rank = Slow()
    link = DirectLink([rank])
    link.send(0, Probe())
    assert rank.done == [("Probe", threading.get_ident())] and not rank.took
    assert link.receive(0) == (0, 0, Done(0, 1))
    link.close()
    assert not link.threads


def test_a_thread_in_which_a_rank_cannot_compute_fails_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = Slow()
    link = DirectLink([rank])

    def fails() -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(rank, "take_thread", fails)
    link.send(0, Call("any"))
    answer = link.receive(LIMIT)
    assert answer is not None and isinstance(answer[2], Failed) and not rank.done
    assert answer[2].message == "RuntimeError: no such device" and "Traceback" in answer[2].traceback
    link.close()
