"""The kernels of tests/model/gpu_cases.py on a device: there they are what Triton makes of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CASES = (
    "attention", "norms_many", "ropes_many", "gates_many", "packed", "adapters_many", "drawing_many", "model_many",
    "real",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_they_give_what_their_definitions_do(cuda: str, case: str) -> None:
    """Each in a process of its own: a fault of one leaves the device to the others."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.gpu_cases", cuda, case], capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.stdout.split() == [case], done.stderr[-4000:]
