"""As tests/proc/test_every_prompt.py, on Ray by both links. Some combinations are marked long."""

from __future__ import annotations

from typing import Any

import pytest

from planaria import LLM
from tests.proc.servers import needs_smollm2
from tests.proc.test_every_prompt import LAYOUTS, OPTIONS, Answers, answers, check, expected  # noqa: F401

pytestmark = needs_smollm2

DEFAULT = {("tp=2", "queue"), ("tp=2 pp=2", "compiled-graph")}
CASES = [
    pytest.param(layout, link, marks=() if (layout, link) in DEFAULT else pytest.mark.long)
    for layout in LAYOUTS
    for link in ("queue", "compiled-graph")
]


@pytest.mark.parametrize(("layout", "link"), CASES)
def test_ray(local_ray: Any, expected: Answers, layout: str, link: str) -> None:  # noqa: F811
    tp, pp = LAYOUTS[layout]
    options: dict[str, Any] = {
        "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "distributed_executor_backend": "ray",
        "ray_link": link,
    }  # fmt: skip
    with LLM("smollm2", **OPTIONS, **options) as llm:
        check(answers(llm), expected)
