"""Shares the helpers of tests/model, and skips everything here where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible to torch")
    return "cuda"
