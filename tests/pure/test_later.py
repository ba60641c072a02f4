"""Answers to steps that are under way come in order, when the next has begun or there is nothing else to do."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest

from planaria.executor.link.later import LOOK, Later, answers
from planaria.protocol import Done, Failed, LaneResult, Probe, StepPlan, StepResult
from planaria.topology import Layout
from planaria.topology.platforms import CPU, CUDA, Platform
from planaria.worker.worker import Worker


class Rank:
    """Notes what it does. Steps are under way until they are read; `looks`: how often one isn't there yet."""

    def __init__(self, *commands: Any, looks: int = 0) -> None:
        self.commands, self.looks, self.did = iter(enumerate(commands)), looks, list[str]()

    def receive(self, timeout: float | None) -> Any:
        """None among the commands: for a while there was none."""
        number, command = next(self.commands)
        assert timeout == LOOK or command is not None, "waits without end, while a step is under way"
        self.did.append("waits" if timeout is None else "looks")
        return None if command is None else (number, command)

    def handle(self, command: Any) -> Any:
        if not isinstance(command, StepPlan):
            self.did.append("carries out")
            return Done(0)
        self.did.append(f"begins {command.step}")
        return Under(self, command.step)

    def found(self) -> Iterator[tuple[int, Any]]:
        try:
            for number, command, reply in answers(self.receive, self.handle):
                assert (command == Probe()) == isinstance(reply, Done)
                yield number, reply
        except RuntimeError:  # no more commands
            pass


class Under(Later):
    def __init__(self, rank: Rank, step: int) -> None:
        self.rank, self.step = rank, step

    def ready(self) -> bool:
        self.rank.looks -= 1
        return self.rank.looks < 0

    def reply(self) -> Any:
        self.rank.did.append(f"reads {self.step}")
        return f"step {self.step}"


def step(number: int) -> StepPlan:
    return StepPlan(0, number, ((),), ((),))


def test_the_next_step_begins_before_the_last_is_read() -> None:
    rank = Rank(step(1), step(2), step(3), None)
    assert list(rank.found()) == [(0, "step 1"), (1, "step 2"), (2, "step 3")]
    assert rank.did == [
        "waits", "begins 1", "looks", "begins 2", "reads 1", "looks", "begins 3", "reads 2", "looks", "reads 3"
    ]  # fmt: skip


def test_what_is_no_step_waits_for_the_last() -> None:
    rank = Rank(step(1), Probe(), step(2), Probe())
    assert [number for number, _ in rank.found()] == [0, 1, 2, 3]
    assert [did for did in rank.did if did not in ("waits", "looks")] == [
        "begins 1", "reads 1", "carries out", "begins 2", "reads 2", "carries out"
    ]  # fmt: skip


def test_one_that_is_not_there_yet_is_looked_at_again() -> None:
    rank = Rank(step(1), None, None, None, step(2), None, looks=2)
    assert list(rank.found()) == [(0, "step 1"), (4, "step 2")]
    assert rank.did == [
        "waits",
        "begins 1",
        "looks",
        "looks",
        "looks",
        "reads 1",
        "waits",
        "begins 2",
        "looks",
        "reads 2",
    ]


class Begins:
    """A rank's runner, and its KV, of which `busy` says that it wants steps done one after the other."""

    def __init__(self, *, busy: bool = False) -> None:
        self.busy, self.aheads, self.there = busy, list[bool](), False

    def begin(self, *plan: Any, ahead: bool = False) -> Any:
        self.aheads += [ahead] if len(plan) == 4 else []
        return self if ahead else LaneResult([], [])

    def ready(self) -> bool:
        return self.there

    def result(self) -> LaneResult:
        if not self.there:
            raise RuntimeError("the device failed")
        return LaneResult([0], [7])

    def finished(self, *_: Any) -> None:
        pass


def a_rank(
    begins: Begins, platform: Platform = CUDA, *, tp: int = 1, lanes: int = 1, link: str = "queue", pp: int = 1,
    by: str = "cpu", shares: bool = False,
) -> Any:  # fmt: skip
    """by: where its tensor ranks' group takes large arrays. shares: have prefill context ranks parts of steps?"""
    rank: Any = object.__new__(Worker)
    rank.rank, rank.experts, rank.ahead, rank.runner, rank.kv = 0, None, True, begins, begins
    rank.ops = types.SimpleNamespace(drawer_of=None)
    group = types.SimpleNamespace(size=tp, rank=0, device=by)
    cp = types.SimpleNamespace(size=2, rank=0, device=by) if shares else group
    mesh = types.SimpleNamespace(pp=types.SimpleNamespace(size=pp), tp=group, cp=cp, abort=lambda why: None)
    rank.groups = types.SimpleNamespace(mesh=mesh, exchanges=["way"] * (lanes - 1), layout=Layout())
    parallel, device = types.SimpleNamespace(ray_link=link), types.SimpleNamespace(platform=platform)
    rank.config = types.SimpleNamespace(parallel=parallel, device=device)
    return rank


def test_a_rank_on_a_device_answers_later() -> None:
    begins = Begins()
    found = a_rank(begins).handle(step(1))
    assert isinstance(found, Later) and not found.ready()
    failed = found.reply()
    assert isinstance(failed, Failed) and "the device failed" in failed.message
    begins.there = True
    assert found.ready() and isinstance(found.reply(), StepResult) and found.reply().lanes == (LaneResult([0], [7]),)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("busy", "told"),
    [
        (False, {"platform": CPU}), (True, {}), (False, {"tp": 2}), (False, {"lanes": 2}),
        (False, {"link": "compiled-graph"}), (False, {"tp": 2, "by": "cuda", "lanes": 2}), (False, {"pp": 2}),
        (False, {"tp": 2, "by": "cuda", "pp": 2}), (False, {"by": "cuda", "shares": True}),
    ],
)  # fmt: skip
def test_whose_tokens_others_want_answers_at_once(busy: bool, told: dict[str, Any]) -> None:
    begins = Begins(busy=busy)
    assert isinstance(a_rank(begins, **told).handle(step(1)), StepResult) and begins.aheads == [False]


def test_tensor_ranks_that_hand_tokens_on_from_device_to_device_answer_later() -> None:
    begins = Begins()
    assert isinstance(a_rank(begins, tp=2, by="cuda").handle(step(1)), Later) and begins.aheads == [True]


def test_who_is_asked_for_an_answer_at_once_gives_one() -> None:
    rank = a_rank(begins := Begins())
    rank.ahead = False
    assert isinstance(rank.handle(step(1)), StepResult) and begins.aheads == [False]
