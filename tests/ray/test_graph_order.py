"""Steps go through a graph and other commands by a queue, and ranks carry them out in the order they were sent. No Ray
here: the graph and the queue only note what reaches them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from planaria.executor.link.codec import decode_command
from planaria.executor.link.faults import ConnectionLost
from planaria.executor.link.ray_graph import RayGraphLink
from planaria.protocol import Call, Command, Done, Exit, PlaceExperts, StepPlan, StepResult
from planaria.topology import Layout

LAYOUT = Layout(dp=2)


class Ways:
    """Both: what has gone out, in order, and what comes back."""

    name = "queue"

    def __init__(self) -> None:
        self.out: list[Command] = []
        self.back: deque[Any] = deque()
        self.refuses = False

    def execute(self, data: bytes) -> None:
        if self.refuses:
            raise RuntimeError("an actor has ended")
        self.out.append(decode_command(data))

    def send(self, number: int, command: Command) -> None:
        self.out.append(command)

    def receive(self, timeout: float | None) -> Any:
        return self.back.popleft() if self.back else None


@pytest.fixture
def ways() -> Ways:
    return Ways()


@pytest.fixture
def link(ways: Ways) -> Iterator[RayGraphLink]:
    link = RayGraphLink(ways, [None, None], LAYOUT, 2)
    link._graph = ways
    yield link
    link._graph = None


def step(number: int) -> StepPlan:
    return StepPlan(0, number, ((), ()), ((), ()))


def answer(link: RayGraphLink, ways: Ways, number: int, rank: int) -> None:
    """To the command of this number, which is heard."""
    if isinstance(COMMANDS[number], StepPlan):
        link._heard.append((rank, number, StepResult(0, number, ())))
    else:
        ways.back.append((rank, number, Done(rank)))
    found = link.receive(0.0)
    assert found is not None and found[:2] == (rank, number)


COMMANDS: list[Command] = [step(0), step(1), Call("expert_load"), PlaceExperts(1, ()), step(4), step(5)]


@pytest.mark.row("X4")
def test_commands_of_the_other_way_wait_for_all_answers(link: RayGraphLink, ways: Ways) -> None:
    for number, command in enumerate(COMMANDS):
        link.send(number, command)
    assert ways.out == COMMANDS[:2], "a command that a rank may carry out before a step that was sent first"
    for number in (0, 1):
        for rank in (0, 1):
            assert ways.out == COMMANDS[:2]
            answer(link, ways, number, rank)
    assert ways.out == COMMANDS[:4], "those of one way go out together"
    for number, rank in ((2, 0), (3, 0), (2, 1)):
        answer(link, ways, number, rank)
    assert ways.out == COMMANDS[:4], "a step would find a rank that has not arranged its experts"
    answer(link, ways, 3, 1)
    assert ways.out == COMMANDS


def test_with_nothing_under_way_nothing_waits(link: RayGraphLink, ways: Ways) -> None:
    for number, command in enumerate(COMMANDS):
        link.send(number, command)
        assert ways.out == COMMANDS[: number + 1]
        for rank in (0, 1):
            answer(link, ways, number, rank)


def test_the_end_does_not_wait(link: RayGraphLink, ways: Ways) -> None:
    link.send(0, COMMANDS[0])
    link.send(1, COMMANDS[2])
    link.teardown = lambda: None  # type: ignore[method-assign]
    link.send(2, Exit())
    assert ways.out == [COMMANDS[0], Exit()]


@pytest.mark.row("X4")
def test_a_step_that_waited_tells_of_a_graph_that_is_gone(link: RayGraphLink, ways: Ways) -> None:
    link.send(0, Call("expert_load"))
    link.send(1, step(1))
    ways.back += [(0, 0, Done(0)), (1, 0, Done(1))]
    ways.refuses = True
    assert link.receive(0.0) is not None
    with pytest.raises(ConnectionLost, match="left the graph"):
        link.receive(0.0)
