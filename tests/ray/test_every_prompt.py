"""As tests/proc/test_every_prompt.py, on Ray by both links. In the default run a small model does on Ray what it does
in one process (test_ray.py), and the real one across two networks (test_networks.py)."""

from __future__ import annotations

from typing import Any

import pytest

from planaria import LLM
from tests.proc.servers import needs_smollm2
from tests.proc.test_every_prompt import LAYOUTS, OPTIONS, Answers, answers, check, expected  # noqa: F401

pytestmark = [needs_smollm2, pytest.mark.long]


@pytest.mark.parametrize("link", ["queue", "compiled-graph"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ray(local_ray: Any, expected: Answers, layout: str, link: str) -> None:  # noqa: F811
    with LLM("smollm2", **OPTIONS, **LAYOUTS[layout], distributed_executor_backend="ray", ray_link=link) as llm:
        check(answers(llm), expected)
