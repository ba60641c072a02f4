"""From a prompt and SamplingParams to what an engine is asked: checks, limits, seeds. Used by `LLM` and the server.

Nothing reaches an engine that this module hasn't accepted, so one bad request costs no other anything.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from planaria.errors import RequestError
from planaria.structured.check import GrammarCheck, Vocabulary
from planaria.types import SEED_LIMIT, SamplingParams
from planaria.wire import EngineFacts, Submit

if TYPE_CHECKING:
    from planaria.server.tokenise import Tokenizer

MAX_BAD_WORD_TOKENS = 64  # of each
MAX_REPEATED = 1 << 20  # tokens of prompts in one answer
MAX_PROMPT_LOGPROBS = 1 << 19  # entries of one answer; 100 bytes of JSON and of memory each


class Encoder(Protocol):
    """The part of a tokenizer needed here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


def draw_seed() -> int:
    """A seed for a request that brought none."""
    return secrets.randbelow(SEED_LIMIT)


def child_seed(seed: int, child: int) -> int:
    """The seed of choice `child` of a request: its own for the first, a hash of it and the index for the others.

    Every prompt of a batch starts from the request's seed, so a prompt's choices don't depend on its neighbours.
    """
    if child == 0:
        return seed % SEED_LIMIT
    digest = hashlib.blake2b(b"%d/%d" % (seed, child), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT


def spell_bad_words(params: SamplingParams, tokenizer: Encoder | None) -> SamplingParams:
    """`params` with the token sequences that spell its bad words, at the start of a text and after a space, in their
    place; once for all prompts and choices of a request. Raises RequestError."""
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise _needs_tokenizer("bad_words")
    found = dict.fromkeys(params.bad_words_ids)
    for word in params.bad_words:
        bare = word.lstrip()
        for text in (bare, " " + bare):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words: {word[:40]!r} is {len(ids)} tokens; at most {MAX_BAD_WORD_TOKENS}",
                    param="bad_words", code="invalid_value",
                )  # fmt: skip
            if ids:
                found[ids] = None
    return msgspec.structs.replace(params, bad_words=(), bad_words_ids=tuple(found))


def grammar_check(tokenizer: Tokenizer | None, facts: Callable[[], EngineFacts | None]) -> GrammarCheck:
    """Of a model's grammars; facts: known when the first one comes."""

    def vocabulary() -> Vocabulary:
        known = facts()
        if tokenizer is None or known is None:
            raise RequestError(
                "structured outputs need a tokenizer, and this engine runs without one", param="structured_outputs",
                code="unsupported_parameter",
            )  # fmt: skip
        if not tokenizer.eos_ids:
            raise RequestError(
                "structured outputs need a token that ends an output, and this model has none",
                param="structured_outputs", code="unsupported_parameter",
            )  # fmt: skip
        return Vocabulary(tokenizer.backend.to_str(), known.vocab_size, tokenizer.eos_ids[0])

    return GrammarCheck(vocabulary)


def check_logprobs(prompts: Iterable[int], params: SamplingParams) -> None:
    """Raise RequestError where prompts of so many tokens ask for more log-probabilities than one answer may have."""
    if params.prompt_logprobs is None:
        return
    count = sum(prompts) * (params.prompt_logprobs + 1) * params.n
    if count > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs (or echo with logprobs) asks for {count} log-probabilities, prompt tokens x (k + 1) x n; "
            f"at most {MAX_PROMPT_LOGPROBS} in one request", param="prompt_logprobs", code="invalid_value",
        )  # fmt: skip


def _needs_tokenizer(param: str) -> RequestError:
    return RequestError(
        "stop strings and bad words need a tokenizer, and this engine runs without one; use stop_token_ids",
        param=param, code="unsupported_parameter",
    )  # fmt: skip


def check_prompt(prompt: list[int], facts: EngineFacts, param: str = "prompt", *, generates: bool = True) -> None:
    """Raise RequestError for a prompt that is empty, too long or has ids outside the vocabulary."""
    if not prompt:
        raise RequestError("prompt is empty: it needs at least one token", param=param, code="invalid_value")
    limit = facts.max_model_len if generates else room(facts)
    if not generates and len(prompt) > limit:
        raise RequestError(
            f"{param} has {len(prompt)} tokens; at most {limit} (truncate_prompt_tokens: -1 takes the first of them)",
            param=param, code="context_length_exceeded",
        )  # fmt: skip
    if generates and len(prompt) >= limit:
        raise RequestError(
            f"prompt has {len(prompt)} tokens; with at least one token to generate, this model's length of {limit} "
            "tokens is exceeded",
            param=param,
            code="context_length_exceeded",
        )
    check_vocabulary(prompt, facts, param)


def check_vocabulary(ids: list[int], facts: EngineFacts, param: str) -> None:
    """Raise RequestError for ids (at least one) that are no tokens of the model."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= facts.vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"{param} has token id {_number(wrong)}; ids of this model are 0 to {facts.vocab_size - 1}",
            param=param,
            code="invalid_value",
        )


def room(facts: EngineFacts) -> int:
    """Tokens that a prompt and its output may have together."""
    return min(facts.max_model_len, facts.num_blocks * facts.block_size or facts.max_model_len)


def resolve_max_tokens(prompt: list[int], params: SamplingParams, facts: EngineFacts, param: str = "prompt") -> int:
    """How many tokens a choice may have at most; raises RequestError if there is no room for them."""
    limit = room(facts)
    what = "this model's length" if limit == facts.max_model_len else "the KV cache of this engine"
    left = limit - len(prompt)
    if left < 1:
        raise RequestError(
            f"prompt has {len(prompt)} tokens; {what} is {limit} tokens",
            param=param,
            code="context_length_exceeded",
        )
    wanted = params.max_tokens if params.max_tokens is not None else left
    if wanted > left:
        raise RequestError(
            f"prompt ({len(prompt)} tokens) and max_tokens ({wanted}) are {len(prompt) + wanted} tokens; "
            f"{what} is {limit} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if params.min_tokens > wanted:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) is more than the {wanted} tokens there is room for",
            param="min_tokens",
            code="invalid_value",
        )
    return wanted


def submissions(
    request_id: str,
    prompt: list[int],
    params: SamplingParams,
    facts: EngineFacts,
    *,
    eos_ids: tuple[int, ...],
    tokenizer: Encoder | None,
    seed: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    adapter: str = "",
    param: str = "prompt",
) -> list[Submit]:
    """One Submit for each of the request's `n` choices; their ids are `request_id` and "-" and the choice. The prompt's
    log-probabilities come with the first. params: verified.

    `seed` stands in for `params.seed` where that is None (None too: one is drawn). `param` names the field an
    error about the prompt is said to be in. Raises RequestError.
    """
    check_prompt(prompt, facts, param)
    if tokenizer is None and params.stop:
        raise _needs_tokenizer("stop")
    if params.stop and not params.detokenize:
        raise RequestError(
            "stop strings are looked for in the text, of which detokenize=False makes none; use stop_token_ids",
            param="stop", code="invalid_value",
        )  # fmt: skip
    params = spell_bad_words(params, tokenizer)
    max_tokens = resolve_max_tokens(prompt, params, facts, param)
    base = params.seed if params.seed is not None else seed if seed is not None else draw_seed()
    first = msgspec.structs.replace(params, n=1) if params.n > 1 else params
    # What is said of the prompt is the same for all choices: the first one brings it.
    other = msgspec.structs.replace(first, prompt_logprobs=None) if params.prompt_logprobs is not None else first
    return [
        Submit(
            id=f"{request_id}-{index}",
            prompt=prompt,
            params=other if index else first,
            seed=child_seed(base, index),
            max_tokens=max_tokens,
            eos_ids=() if params.ignore_eos and not params.grammar else eos_ids,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        for index in range(params.n)
    ]


def _number(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "of more than 20 digits"
