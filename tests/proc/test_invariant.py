"""`--batch-invariant`: a request's tokens and log-probabilities, to the last bit, whatever runs beside it, however its
prompt is cut into steps, and whether or not a rank was killed meanwhile. The real model, 64 seeded requests at once."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from planaria import LLM, SamplingParams
from planaria.errors import ConfigError
from tests.model.test_exact import PROMPTS
from tests.proc.servers import needs_smollm2

pytestmark = needs_smollm2

OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": "512MiB", "batch_invariant": True}
LONG = max(PROMPTS, key=len)
SIXTY_FOUR = [LONG if i % 16 == 8 else PROMPTS[i * 7 % len(PROMPTS)][-400:] for i in range(64)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "uni": {}, "mp": {"distributed_executor_backend": "mp"}, "tp=2": {"tensor_parallel_size": 2},
    "pp=2": {"pipeline_parallel_size": 2},
}  # fmt: skip
Answers = list[tuple[list[int], list[float]]]


def params(i: int) -> SamplingParams:
    """Every other one is drawn with a seed of its own."""
    return SamplingParams(temperature=float(i % 2), seed=i, max_tokens=16, ignore_eos=True, logprobs=1)


def answers(llm: LLM, which: range, on_tokens: Any = None) -> Answers:
    found = []
    for output in llm.generate([SIXTY_FOUR[i] for i in which], [params(i) for i in which], on_tokens=on_tokens):
        (choice,) = output.outputs
        assert choice.logprobs is not None and choice.error is None
        found.append((choice.token_ids, [given.logprob for given in choice.logprobs]))
    return found


DEFAULT = {("bfloat16", "tp=2")}
CASES = [
    pytest.param(dtype, layout, marks=() if (dtype, layout) in DEFAULT else pytest.mark.long)
    for dtype in ("float32", "bfloat16")
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("dtype", "layout"), CASES)
def test_nothing_but_the_request_counts(dtype: str, layout: str) -> None:
    options = {**OPTIONS, **LAYOUTS[layout], "dtype": dtype, "quantization": "none"}
    every = range(12 if (dtype, layout) in DEFAULT else 64)
    with LLM("smollm2", **options) as llm:
        together = answers(llm, every)
        assert answers(llm, range(5, 6)) + answers(llm, range(8, 9)) == [together[5], together[8]]  # alone
        if layout != "uni":
            harmed, count = [], 0

            def harm(done: int, tokens: int) -> None:
                nonlocal count
                count += tokens
                if count > 100 and not harmed:
                    harmed.append(llm._loop.gang.members[-1].pid)
                    os.kill(harmed[0], signal.SIGKILL)

            assert answers(llm, every, on_tokens=harm) == together
            assert harmed and llm._loop.gang.epoch == 1
    if layout == "uni":
        other = {"max_num_batched_tokens": 96, "max_num_seqs": 24, "enable_prefix_caching": False, "block_size": 32}
        with LLM("smollm2", **options, **other) as llm:
            assert answers(llm, every) == together


def test_it_is_refused_where_it_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match="--batch-invariant True: only this package's CPU kernels"):
        LLM("smollm2", batch_invariant=True, kernels="torch")
