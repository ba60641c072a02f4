"""Beam search over `LLM`, with vLLM's words: of every length the best `beam_width` continuations are kept, by the sum
of their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from planaria.errors import RequestError
from planaria.types import MAX_LOGPROBS, SamplingParams


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """length_penalty: a beam counts as its log-probability / its tokens ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


@dataclass(frozen=True)
class BeamSearchSequence:
    """A beam. tokens: the prompt's, too; logprobs: of what was generated, as in a completion."""

    tokens: list[int]
    logprobs: list[Any] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """Of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


Generate = Callable[[list[list[int]], SamplingParams], Sequence[Any]]  # RequestOutputs


def beam_search(
    prompts: Sequence[list[int]], params: BeamSearchParams, generate: Generate, eos_ids: Sequence[int], most: int
) -> list[list[BeamSearchSequence]]:
    """Of each prompt the best `beam_width` sequences. generate: one token for each of these histories, with
    log-probabilities; most: tokens of a history. Raises RequestError."""
    width = params.beam_width
    if not 1 <= width <= MAX_LOGPROBS // 2 or params.max_tokens < 1:
        rule = f"beam_width must be 1 to {MAX_LOGPROBS // 2} and max_tokens at least 1"
        raise RequestError(f"{rule}, got {width} and {params.max_tokens}", param="params", code="invalid_value")
    step = SamplingParams(max_tokens=1, logprobs=2 * width, temperature=params.temperature, ignore_eos=True)
    ends = frozenset() if params.ignore_eos else frozenset(eos_ids)
    beams = [[BeamSearchSequence(list(prompt))] for prompt in prompts]
    done: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        live = [beam for each in beams for beam in each if len(beam.tokens) < most]
        if not live:
            break
        outputs = iter(generate([beam.tokens for beam in live], step))
        for index, each in enumerate(beams):
            if each and len(each[0].tokens) >= most:  # all of a prompt's have one length
                continue
            grown = []
            for beam in each:
                position = (next(outputs).outputs[0].logprobs or [])[0]
                for token, logprob in position.top:
                    longer = replace(
                        beam, tokens=[*beam.tokens, token], logprobs=[*beam.logprobs, position],
                        cum_logprob=beam.cum_logprob + logprob,
                    )  # fmt: skip
                    if token not in ends:
                        grown.append(longer)
                        continue
                    shown = longer.tokens if params.include_stop_str_in_output else beam.tokens
                    done[index].append(replace(longer, tokens=shown, finish_reason="stop", stop_reason=token))
            beams[index] = sorted(grown, key=lambda beam: -beam.cum_logprob)[:width]

    def score(beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / float(len(beam.tokens) ** params.length_penalty)

    ended = [[replace(beam, finish_reason="length") for beam in each] for each in beams]
    return [sorted(d + e, key=score, reverse=True)[:width] for d, e in zip(done, ended, strict=True)]
