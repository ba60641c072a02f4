"""What configuration finds out about Ray, and what people see of Ray's workers."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from planaria import LLM
from planaria.config.machine import in_placement_group
from planaria.config.options import EngineOptions
from planaria.llm import make_options
from planaria.processes import read_title

pytest.importorskip("ray")


def chosen() -> str:
    """OrderDone out on Ray: the executor for one rank there."""
    from planaria.config.machine import look
    from planaria.config.parallel import resolve_parallel

    return resolve_parallel(EngineOptions(model="m"), look(None), "cpu")[0].distributed_executor_backend


def test_inside_a_placement_group_ray_is_the_executor(local_ray: Any) -> None:
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    assert not in_placement_group()  # initialised, but not inside one
    group = placement_group([{"planaria_slot": 1}])
    try:
        local_ray.get(group.ready(), timeout=30)
        task = local_ray.remote(num_cpus=0)(chosen)
        strategy = PlacementGroupSchedulingStrategy(placement_group=group)
        found = [task.options(scheduling_strategy=strategy, resources={"planaria_slot": 0.1}), task]
        assert local_ray.get([each.remote() for each in found], timeout=60) == ["ray", "uni"]
        # Ray's object is taken for its id
        options = make_options("m", {"placement_group": group})
        assert options.placement_group == group.id.hex()
    finally:
        remove_placement_group(group)


def test_rays_workers_carry_titles(local_ray: Any, weightless: str) -> None:
    options = {"null_worker": True, "skip_tokenizer_init": True, "distributed_executor_backend": "ray"}
    with LLM(weightless, tensor_parallel_size=2, **options) as llm:
        titles = [read_title(" ".join(psutil.Process(pid).cmdline())) for pid in llm.facts.ranks]
    assert titles == [
        ("worker", {"rank": str(rank), "tp": str(rank), "pp": "0", "epoch": "0"}) for rank in range(2)
    ]  # fmt: skip
