"""Kernels for GPUs, carried out by Triton's interpreter on the CPU, against plain torch. Not run on hardware."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

HERE = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="Triton is not installed: there is none for this platform")


def interpreted(*cases: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.gpu_cases", *cases], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [*cases], done.stderr[-4000:]


def test_every_kernel_once() -> None:
    interpreted("attention", "norms", "ropes", "gates", "packed", "drawing", "graphs")


@pytest.mark.long
@pytest.mark.parametrize("case", ["attention", "packed", "model", "norms", "ropes", "gates", "drawing"])
def test_in_all_dtypes_and_odd_shapes(case: str) -> None:
    interpreted(f"{case}_many")
