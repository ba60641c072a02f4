"""Micro-batches in a whole engine: the tokens of one rank, and a rank that dies in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from planaria.wire import ResizeEngine
from tests.model.engines import Engine, ask_for
from tests.proc.experts import ASKED, EP

SPLIT = {
    **EP, "data_parallel_size": 2, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 4,
    "worker_extension_cls": "tests.proc.extensions.MicroBatched",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), **SPLIT, enable_dbo=True) as made:
        yield made


def ask(engine: Engine, method: str, *args: Any) -> list[Any]:
    return list(engine.loop.call(method, args).result(300))


def in_turn(places: Sequence[int], count: int) -> bool:
    """Were some steps computed in so many micro-batches? They take turns."""
    return any(list(places[i : i + 2 * count]) == [*range(count)] * 2 for i in range(len(places)))


@pytest.mark.row("P12")
def test_the_tokens_are_those_of_one_rank(engine: Engine, expected: list[list[int]]) -> None:
    ask(engine, "look_on")
    assert engine.run(ASKED) == expected
    (first, threads), (second, _) = ask(engine, "done")
    assert first == second and in_turn(first, 2), "all lanes split the same steps"
    assert engine.run(ASKED[:1]) == expected[:1]  # the other lane has nothing to do
    assert len(threads) == 1


@pytest.mark.parametrize("place", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_dies_in_a_micro_batch_is_replaced(engine: Engine, expected: list[list[int]], place: int) -> None:
    """The other rank's threads end, each in its own exchange or waiting for its turn, and it goes on."""
    before, known = engine.pids, len(engine.recoveries)
    assert engine.run(ASKED, 20, lambda: ask(engine, "die", place, place)) == expected
    assert len(engine.recoveries) == known + 1 and engine.recoveries[-1].ranks == [place]
    assert engine.pids[1 - place] == before[1 - place] and engine.pids[place] != before[place]
    ask(engine, "look_on")
    assert engine.run(ASKED[:2]) == expected[:2]
    for places, threads in ask(engine, "done"):
        assert in_turn(places, 2) and len(threads) == 1, "a thread of the epoch before is left"


OTHERS: list[dict[str, Any]] = [
    {"ubatch_size": 3, "tensor_parallel_size": 2, "kernels": "torch"},
    {"enable_dbo": True, "tensor_parallel_size": 2, "all2all_backend": "naive"},
    {"enable_dbo": True, "pipeline_parallel_size": 2, "disable_custom_all_reduce": True},
    {"enable_dbo": True, "enable_eplb": True,
     "eplb_config": {"num_redundant_experts": 2, "window_size": 4, "step_interval": 6, "use_async": True}},
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_other_layouts_and_exchanges(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    with Engine(str(folder), **SPLIT, **options) as engine:
        ask(engine, "look_on")
        assert engine.run(ASKED) == expected
        for places, _ in ask(engine, "done"):
            assert in_turn(places, options.get("ubatch_size", 2))
        assert "enable_eplb" not in options or engine.loop.balancing.stats.bytes_moved > 0


SHARED: list[Any] = [
    {"tensor_parallel_size": 2, "data_parallel_size": 1, "prefill_context_parallel_size": 2,
     "decode_context_parallel_size": 2, "ubatch_size": 3, "enable_dbo": False},
    {"data_parallel_size": 1, "prefill_context_parallel_size": 2},
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"data_parallel_size": 1, "prefill_context_parallel_size": 2, "pipeline_parallel_size": 2},
    {"prefill_context_parallel_size": 2, "kernels": "torch", "disable_custom_all_reduce": True},
    {"data_parallel_size": 1, "prefill_context_parallel_size": 3, "ubatch_size": 4, "enable_dbo": False},
]  # fmt: skip


@pytest.mark.row("P19", "P20")
@pytest.mark.parametrize(
    "options", [SHARED[0], *(pytest.param(each, marks=pytest.mark.long) for each in SHARED[1:])], ids=str
)
def test_context_ranks(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    """Who shares the tokens of a sequence, or of a step: each micro-batch is of all of them, and a part of it dies."""
    with Engine(str(folder), **{**SPLIT, "enable_dbo": True, **options}) as engine:
        for harm in (None, lambda: ask(engine, "die", 1, 1)):
            ask(engine, "look_on")
            assert engine.run(ASKED, 20, harm) == expected
        assert [recovery.ranks for recovery in engine.recoveries] == [[1]]
        ask(engine, "look_on")
        assert engine.run(ASKED[:2]) == expected[:2]
        for places, _ in ask(engine, "done"):
            assert in_turn(places, options.get("ubatch_size", 2))


@pytest.mark.long
def test_lanes_come_and_go(engine: Engine, expected: list[list[int]]) -> None:
    """With one lane nothing is exchanged, and nothing is split."""
    for id, dp in (("fewer", 1), ("more", 2)):
        assert engine.run(ASKED, 30, lambda dp=dp, id=id: ask_for(engine.loop, ResizeEngine(id, 1, 1, dp))) == expected
        assert (engine.resized[-1].id, engine.resized[-1].error) == (id, "")
    ask(engine, "look_on")
    assert engine.run(ASKED) == expected
    assert in_turn(ask(engine, "done")[0][0], 2)
