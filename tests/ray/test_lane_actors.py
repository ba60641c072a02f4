"""Experts on the ranks of several lanes, each an actor of one cluster: a rank that dies, lanes that come and go, links
of both kinds, the same tokens."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from planaria.wire import ResizeEngine
from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine
from tests.proc.servers import alive, wait_until
from tests.ray.clusters import live_actors, live_groups
from tests.ray.test_lanes import ASKED, MODEL


@pytest.mark.long
@pytest.mark.parametrize("whole", [True, False], ids=["whole experts", "slices"])
def test_lanes_of_actors(local_ray: Any, tmp_path: Path, whole: bool) -> None:
    model = str(write_checkpoint(tmp_path, "qwen2_moe", **MODEL))
    with Engine(model, distributed_executor_backend="uni") as one:
        expected = one.run(ASKED)
    options = {"distributed_executor_backend": "ray", "enable_expert_parallel": whole, "data_parallel_size": 2}
    with Engine(model, **options) as engine:
        assert engine.facts.executor == "ray" and engine.facts.layout == "dp=2 tp=1 pp=1"
        assert sorted(name.split("-", 2)[2] for name in live_actors(local_ray) if name) == ["lane0-e0", "lane1-e0"]
        before = engine.pids
        assert engine.run(ASKED, 40, lambda: engine.kill(1, signal.SIGKILL)) == expected
        assert engine.recoveries[-1].ranks == [1] and engine.pids[0] == before[0]
        for id, dp in (("fewer", 1), ("more", 2)):
            wish = ResizeEngine(id, 1, 1, dp)
            assert engine.run(ASKED, 30, lambda wish=wish: engine.loop.handle(wish)) == expected
            while engine.loop.busy():  # experts that are still on their way
                engine.loop.step()
            assert (engine.resized[-1].id, engine.resized[-1].error) == (id, "") and len(engine.pids) == dp
            travel = engine.recoveries[-1].travel
            if whole:
                assert travel is not None and travel.read == 0 and travel.moved == travel.needed > 0
            else:  # each rank reads its own anew
                assert travel is None
        pids = engine.pids
    assert not any(alive(pid) for pid in pids)
    wait_until("no actor is left", lambda: not live_actors(local_ray))
    wait_until("no placement group is left", lambda: not live_groups())


@pytest.mark.long
@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2}], ids=["lanes", "lanes of stages"])
@pytest.mark.row("X4")
def test_lanes_through_a_compiled_graph(local_ray: Any, tmp_path: Path, layout: dict[str, int]) -> None:
    """Each lane's edges are its own; with another epoch all ranks are new, and so is the graph."""
    model = str(write_checkpoint(tmp_path, "qwen2_moe", **MODEL))
    with Engine(model, distributed_executor_backend="uni") as one:
        expected = one.run(ASKED)
    options = {"distributed_executor_backend": "ray", "ray_link": "compiled-graph", "enable_expert_parallel": True}
    with Engine(model, **options, data_parallel_size=2, **layout) as engine:
        assert engine.facts.link == "ray-graph+shm"
        assert engine.run(ASKED) == expected
        if not layout:
            assert engine.run(ASKED, 40, lambda: engine.kill(1, signal.SIGKILL)) == expected
            assert engine.run(ASKED, 30, lambda: engine.loop.handle(ResizeEngine("fewer", 1, 1, 1))) == expected
            assert (engine.resized[-1].error, len(engine.pids)) == ("", 1)


@pytest.mark.long
@pytest.mark.parametrize("use_async", [False, True], ids=["steps wait", "aside"])
@pytest.mark.parametrize("link", ["queue", "compiled-graph"])
@pytest.mark.row("D8")
def test_experts_move_between_actors_while_requests_run(
    local_ray: Any, tmp_path: Path, link: str, use_async: bool
) -> None:
    """Steps and what moves experts come to a rank by different ways where there is a graph, and in one order."""
    model = str(write_checkpoint(tmp_path, "qwen2_moe", **MODEL))
    with Engine(model, distributed_executor_backend="uni") as one:
        expected = one.run(ASKED)
    often = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2, "use_async": use_async}
    with Engine(
        model, distributed_executor_backend="ray", ray_link=link, enable_expert_parallel=True, data_parallel_size=2,
        enable_eplb=True, eplb_config=often,
    ) as engine:  # fmt: skip
        engine.loop.balancing.state.step_bytes = 1  # an expert at a time, as far as that can be
        for _ in range(3):
            assert engine.run(ASKED) == expected
        done, moved = engine.loop.balancing.stats.rearrangements, engine.loop.balancing.stats.bytes_moved
        assert done > 0 and moved > 0 and not engine.recoveries
        assert engine.run(ASKED, 40, lambda: engine.kill(1, signal.SIGKILL)) == expected
        while engine.loop.balancing.stats.rearrangements == done:  # it goes on
            assert engine.run(ASKED[:2]) == expected[:2]
