"""Imports collect nothing, and afterwards nobody looks through what they made."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config.options import ParallelConfig
from planaria.preload import GLOO, importing, of_a_rank


def test_nothing_is_collected_while_something_is_imported() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()
        made, before = [[]], gc.get_freeze_count()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > before and made not in gc.get_objects(0)


@pytest.mark.parametrize(
    ("parallel", "meets"),
    [
        ({}, False), ({"tensor_parallel_size": 2}, False), ({"disable_custom_all_reduce": True}, False),
        ({"tensor_parallel_size": 2, "disable_custom_all_reduce": True}, True),
        ({"lanes": 2, "disable_custom_all_reduce": True}, True), ({"pipeline_parallel_size": 2, "nnodes": 2}, True),
        ({"pipeline_parallel_size": 2, "nnodes": 2, "worker_cls": "a.B"}, False),
    ],
)  # fmt: skip
def test_ranks_that_meet_by_gloo_are_forked_with_it(parallel: dict[str, Any], meets: bool) -> None:
    """Each would take a second to import torch, also one that takes another's place."""
    device, model = SimpleNamespace(kernels="native"), SimpleNamespace(foreign=None)
    config: Any = SimpleNamespace(parallel=ParallelConfig(**parallel), device=device, model=model, null_worker=False)
    assert (GLOO[0] in of_a_rank(config)) == meets
