"""The real model in float32, prompts of tests/model/test_exact.py (all of them in the long tier): each layout on each
back end of one machine gives the tokens of a single process, and its log-probabilities within 1e-3. Ray's are in
tests/ray."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from planaria import LLM, SamplingParams
from tests.model.test_exact import PROMPTS
from tests.proc.servers import needs_smollm2
from tests.proc.sockets import free_port

pytestmark = needs_smollm2

OPTIONS = {"dtype": "float32", "quantization": "none", "max_model_len": 1024, "kv_cache_memory": "512MiB"}
COUNT = 24
TP, PP, PCP = "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"
TWO = {TP: 2, "decode_context_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": {TP: 2}, "tp=3": {TP: 3}, "pp=2": {PP: 2}, "tp=2 pp=2": {TP: 2, PP: 2},
    "tp=2 dcp=2": TWO, "pcp=2": {PCP: 2}, "tp=2 dcp=2 pcp=2": {**TWO, PCP: 2},
}  # fmt: skip
Answers = list[tuple[list[int], list[float]]]


def answers(llm: LLM, prompts: list[str] = PROMPTS) -> Answers:
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
    found = []
    for output in llm.generate(prompts, params):
        (choice,) = output.outputs
        assert choice.logprobs is not None
        found.append((choice.token_ids, [given.logprob for given in choice.logprobs]))
    return found


def check(found: Answers, expected: Answers) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    pairs = [pair for (_, a), (_, b) in zip(found, expected, strict=True) for pair in zip(a, b, strict=True)]
    assert len(pairs) == COUNT * len(expected) and max(abs(a - b) for a, b in pairs) < 1e-3


@pytest.fixture(scope="module")
def expected() -> Answers:
    with LLM("smollm2", **OPTIONS) as llm:
        return answers(llm)


def test_some_prompts_in_the_layout_that_has_what_the_others_have() -> None:
    some = PROMPTS[::8]
    with LLM("smollm2", **OPTIONS) as llm:
        alone = answers(llm, some)
    with LLM("smollm2", **OPTIONS, **TWO, pipeline_parallel_size=2) as llm:
        check(answers(llm, some), alone)


@pytest.mark.long
@pytest.mark.row("P1", "P19")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_processes(expected: Answers, layout: str) -> None:
    options = LAYOUTS[layout]
    ranks = math.prod(options.get(axis, 1) for axis in (TP, PP, PCP))
    with LLM("smollm2", **OPTIONS, **options) as llm:
        assert (llm.facts.executor, llm.facts.link, len(set(llm.facts.ranks))) == ("mp", "shm", ranks)
        check(answers(llm), expected)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp=2", "tp=2 pp=2"])
def test_an_outer_launcher(expected: Answers, layout: str) -> None:
    tp, pp = (LAYOUTS[layout].get(axis, 1) for axis in (TP, PP))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(tp * pp),
         "--master-port", str(free_port()), "-m", "planaria", "generate", "smollm2",
         *(word for prompt in PROMPTS for word in ("--prompt", prompt)),
         "--dtype", "float32", "--quantization", "none", "--max-model-len", "1024", "--kv-cache-memory", "512MiB",
         "--max-tokens", str(COUNT), "--ignore-eos", "--temperature", "0", "--logprobs", "1", "--json",
         "-tp", str(tp), "-pp", str(pp), "--distributed-executor-backend", "external_launcher"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(PROMPTS), run.stderr
    check([(line["token_ids"], [given["logprob"] for given in line["logprobs"]]) for line in lines], expected)
