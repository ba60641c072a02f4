"""Lanes: data-parallel ranks of one gang. With a dense model, whose lanes have nothing to tell each other."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from planaria.wire import ResizeEngine
from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, ask_for, texts

ASKED = texts(131, [(5, 30), (70, 24), (1, 40), (33, 30), (20, 10), (9, 30), (3, 60)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("dense"), "llama"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    with Engine(model, distributed_executor_backend="uni") as one:
        return one.run(ASKED)


@pytest.fixture(scope="module")
def lanes(model: str) -> Iterator[Engine]:
    with Engine(model, parallel={"lanes": 2}) as engine:
        yield engine


def test_the_same_tokens_and_every_lane_works(lanes: Engine, expected: list[list[int]]) -> None:
    assert lanes.run(ASKED) == expected
    assert lanes.facts.layout == "dp=2 tp=1 pp=1" and len(set(lanes.pids)) == 2
    assert lanes.run(ASKED[:1]) == expected[:1]  # the other lane has nothing to do


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_of_one_lane_dies_and_all_lanes_go_on(lanes: Engine, expected: list[list[int]], victim: int) -> None:
    before = lanes.pids
    assert lanes.run(ASKED, 40, lambda: lanes.kill(victim, signal.SIGKILL)) == expected
    assert lanes.recoveries[-1].ranks == [victim] and lanes.recoveries[-1].layout == "dp=2 tp=1 pp=1"
    assert lanes.pids[1 - victim] == before[1 - victim] and lanes.pids[victim] != before[victim]


def test_lanes_come_and_go_while_requests_run(lanes: Engine, expected: list[list[int]]) -> None:
    for id, dp in (("fewer", 1), ("more", 3), ("as before", 2)):
        before = lanes.pids
        assert lanes.run(ASKED, 30, lambda dp=dp, id=id: ask_for(lanes.loop, ResizeEngine(id, 1, 1, dp))) == expected
        assert (lanes.resized[-1].id, lanes.resized[-1].error) == (id, "")
        assert len(lanes.pids) == dp and lanes.pids[: len(before)] == before[:dp]


@pytest.mark.long
def test_lanes_of_several_ranks(model: str, expected: list[list[int]]) -> None:
    with Engine(model, parallel={"lanes": 2}, pipeline_parallel_size=2) as engine:
        assert engine.run(ASKED, 40, lambda: engine.kill(2, signal.SIGKILL)) == expected
        assert engine.recoveries[-1].ranks == [2] and engine.facts.layout == "dp=2 tp=1 pp=2"
