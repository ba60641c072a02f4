"""The back ends a model test runs on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Where torch computes in the test's own process: other tests, which run at the same time, have the other cores."""
    torch.set_num_threads(1)


@pytest.fixture(params=["torch", "cpu"])
def make_ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function dtype -> Ops of one back end; closed at the end."""
    made: list[Any] = []

    def make(dtype: str = "float32") -> Any:
        if request.param == "torch":
            from planaria.kernels.reference import TorchOps

            made.append(TorchOps("cpu", dtype))
        else:
            try:
                from planaria.kernels.cpu.ops import CpuOps
            except ImportError as e:
                pytest.skip(f"CPU kernels can't be imported: {e}")
            made.append(CpuOps(dtype, 2))
        return made[-1]

    yield make
    for ops in made:
        ops.close()
