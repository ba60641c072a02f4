"""The values a request is made of. Pure: no torch, clock or randomness.

A request is its token history (`prompt + output`) and one cursor, `computed`: how many of those tokens
have their keys and values in the cache. Every event of its life (chunked prefill, prefix hit, preemption,
loss of a worker) only moves the cursor.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, get_origin, get_type_hints

import msgspec

from planaria.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP = 16
MAX_STOP_LENGTH = 512  # characters of each
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_LENGTH = 8192  # characters of all of them
SEED_LIMIT = 2**63


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    LENT = "lent"  # of no request: it goes on in another engine, with what this one has computed


@dataclass(frozen=True)
class Within:
    """The bounds of a sampling parameter, said beside its field: checked by `verify`, and told in the API's schema.
    asked: what the API says of a request's field of this name; None: none is made of it."""

    rule: str  # that a value must be ...
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    asked: str | None = None

    def hold(self, value: float) -> bool:
        return (
            (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)
        )  # fmt: skip


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an output must be: exactly one of `FORMS`. Names are vLLM's.

    json, structural_tag: as JSON, or what is read from it. whitespace_pattern: a regular expression of what may stand
    between the parts of JSON, in place of `planaria.structured.spec.WHITESPACE`. disable_fallback: no effect, nothing
    falls back.
    """

    json: str | dict[str, Any] | bool | None = None  # a JSON Schema
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark, or EBNF in the form of GBNF
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            self.choice = tuple(self.choice)

    @property
    def form(self) -> str:
        """The one that is given. Raises RequestError."""
        check_types(self, "structured_outputs.")
        given = [name for name in FORMS if getattr(self, name) is not None]
        given = [name for name in given if name != "json_object" or self.json_object]
        if len(given) != 1:
            found = ", ".join(given) or "none of them"
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(FORMS)}; it has {found}",
                param="structured_outputs", code="invalid_value",
            )  # fmt: skip
        return given[0]


# Of which positions' hidden states a vector is made. All but the last need every position to be computed for it.
POOLINGS = ("last", "mean", "cls")
FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to choose the next tokens of one request. Field meanings are those of the OpenAI API where it has them.

    Call `verify(vocab_size)` before use; it raises RequestError naming the field.
    """

    n: Annotated[int, Within(f"between 1 and {MAX_N}", ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int | None, Within("at least 1", ge=1)] = 16  # None: up to the model's length
    min_tokens: Annotated[int, Within("0 or more", ge=0)] = 0
    temperature: Annotated[
        float, Within("between 0 and 100", ge=0.0, le=100.0, asked="0 is greedy; default: the model's, else 1.")
    ] = 1.0
    top_k: Annotated[int, Within("-1 (off), 0 (off) or more", ge=-1)] = 0  # 0 or -1: off
    top_p: Annotated[float, Within("in (0, 1]", gt=0.0, le=1.0, asked="Left out, like top_k: the model's default.")] = (
        1.0
    )
    min_p: Annotated[float, Within("in [0, 1]", ge=0.0, le=1.0, asked="")] = 0.0
    presence_penalty: Annotated[float, Within("in [-2, 2]", ge=-2.0, le=2.0, asked="")] = 0.0
    frequency_penalty: Annotated[float, Within("in [-2, 2]", ge=-2.0, le=2.0, asked="")] = 0.0
    repetition_penalty: Annotated[float, Within("in (0, 100]", gt=0.0, le=100.0, asked="")] = 1.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # filled in by the front end from bad_words
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: Annotated[int | None, Within("a 64-bit integer", ge=-SEED_LIMIT, lt=SEED_LIMIT)] = None
    logprobs: Annotated[int | None, Within(f"between 0 and {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, Within(f"between 0 and {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS)] = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None  # no other is drawn
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None  # its older name
    grammar: str = ""  # filled in by the front end from structured_outputs
    pooling: str = ""  # filled in by the front end: no token is drawn; a vector is made, by one of POOLINGS
    spaces_between_special_tokens: bool = True  # no effect: tokenizers' own words for them are taken
    # vLLM's, that ask for what isn't here: None
    best_of: Any = None
    extra_args: Any = None
    flat_logprobs: Any = None
    logits_processors: Any = None
    output_kind: Any = None
    skip_reading_prefix_cache: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None

    def __post_init__(self) -> None:
        if self.structured_outputs is None and self.guided_decoding is not None:
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if isinstance(self.structured_outputs, dict):
            try:
                self.structured_outputs = msgspec.convert(self.structured_outputs, StructuredOutputsParams)
            except msgspec.ValidationError as e:
                raise RequestError(
                    f"structured_outputs: {e}", param="structured_outputs", code="invalid_value"
                ) from None
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, or a dict of its fields, got "
                f"{self.structured_outputs!r:.60}", param="structured_outputs", code="invalid_type",
            )  # fmt: skip
        if self.logit_bias is not None and not all(type(token) is int for token in self.logit_bias):
            try:  # ids as text, as JSON has them
                self.logit_bias = {int(token): bias for token, bias in self.logit_bias.items()}
            except (AttributeError, TypeError, ValueError) as e:
                raise RequestError(
                    f"logit_bias: a key is no token id: {e}", param="logit_bias", code="invalid_value"
                ) from None
        for name, default in _defaults():
            if getattr(self, name) is None:
                setattr(self, name, default)
        for name in _TUPLES:  # one string is one, not one for each of its letters
            value = getattr(self, name)
            if not isinstance(value, tuple | None) and isinstance(value, Iterable):
                setattr(self, name, (value,) if isinstance(value, str) else tuple(value))

    def verify(self, vocab_size: int | None = None) -> None:
        """Raise RequestError for the first field that is out of range."""

        def refuse(param: str, message: str) -> NoReturn:
            raise RequestError(message, param=param, code="invalid_value")

        def need(ok: bool, param: str, rule: str) -> None:
            if not ok:
                refuse(param, f"{param} must be {rule}, got {getattr(self, param)!r}")

        check_types(self)
        for name, bounds in bounds_of(type(self)).items():
            value = getattr(self, name)
            if value is not None and not bounds.hold(value):
                need(False, name, bounds.rule if math.isfinite(value) else "a finite number")
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        need(fits, "min_tokens", f"at most max_tokens ({self.max_tokens})")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_LENGTH:
            refuse("stop", f"stop has a string of {longest} characters; each may have {MAX_STOP_LENGTH}")
        need(len(self.stop) <= MAX_STOP and all(self.stop), "stop", f"at most {MAX_STOP} strings, none empty")
        need(all(self.bad_words), "bad_words", "a list of strings, none empty")
        length = sum(map(len, self.bad_words))
        if len(self.bad_words) > MAX_BAD_WORDS or length > MAX_BAD_WORDS_LENGTH:
            found = f"bad_words has {len(self.bad_words)} strings of {length} characters"
            refuse("bad_words", f"{found}; at most {MAX_BAD_WORDS} of {MAX_BAD_WORDS_LENGTH} in all")
        of_vocabulary = f"of the vocabulary ({vocab_size} tokens)"
        for token, bias in (self.logit_bias or {}).items():
            need(math.isfinite(bias) and -100.0 <= bias <= 100.0, "logit_bias", "values in [-100, 100]")
            known = token >= 0 and (vocab_size is None or token < vocab_size)
            need(known, "logit_bias", f"a map from token ids {of_vocabulary}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name) or (0,)  # there may be as many as in the vocabulary
            need(min(ids) >= 0 and (vocab_size is None or max(ids) < vocab_size), name, f"token ids {of_vocabulary}")
        need(self.allowed_token_ids != (), "allowed_token_ids", "at least one token id")
        if self.structured_outputs is not None:
            _ = self.structured_outputs.form
        for name in _ABSENT:
            if getattr(self, name):
                refuse(name, f"{name} is not supported yet; leave it out")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def reads_prompt(self) -> bool:
        """Is something told of every position of the prompt, so that none can come from KV?"""
        return self.prompt_logprobs is not None or self.pooling not in ("", "last")


def check_types(params: msgspec.Struct, place: str = "") -> None:
    """Raise RequestError for a field that is of another type than is declared. Numbers of NumPy and the like become
    Python's own. place: before the field's name."""
    for last in (False, True):
        try:
            msgspec.convert(msgspec.structs.asdict(params), type(params))
            return
        except msgspec.ValidationError as e:
            said = str(e)
        if last:
            name = said.rpartition("`$.")[2].rstrip("`")
            raise RequestError(
                f"{place}{name}: {said.partition(' - at')[0]}", param=f"{place}{name}", code="invalid_type"
            )
        for name, value in msgspec.structs.asdict(params).items():
            if hasattr(value, "item"):
                setattr(params, name, value.item())


_TUPLES = ("stop", "bad_words", "stop_token_ids", "allowed_token_ids")
_ABSENT = (
    "best_of", "extra_args", "flat_logprobs", "logits_processors", "output_kind", "skip_reading_prefix_cache",
    "thinking_token_budget", "truncate_prompt_tokens",
)  # fmt: skip


@functools.cache
def _defaults() -> tuple[tuple[str, Any], ...]:
    """Of fields that None stands for."""
    fields = msgspec.structs.fields(SamplingParams)
    return tuple(
        (field.name, field.default) for field in fields if field.default is not None and field.name != "max_tokens"
    )


@functools.cache
def bounds_of(params: type[SamplingParams]) -> dict[str, Within]:
    """By field."""
    hints = get_type_hints(params, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


class PoolingParams(msgspec.Struct, kw_only=True):
    """What a vector, or scores of labels, are to be. Names are vLLM's; None: as the model has it.

    truncate_prompt_tokens: only so many first tokens of a text; -1: as many as the model takes.
    """

    dimensions: int | None = None  # only so many first numbers
    normalize: bool | None = None  # to length 1
    activation: bool | None = None  # scores as probabilities
    use_activation: bool | None = None  # another name of it, as is softmax
    softmax: bool | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def activates(self) -> bool:
        """Are scores told as probabilities?"""
        return False not in (self.activation, self.use_activation, self.softmax)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one position: the chosen token's own (`logprob`, `rank` from 1), then the likeliest."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def entries(self) -> Iterator[tuple[int, float, int]]:
        """(token, logprob, rank) of the chosen token, then of the likeliest but it."""
        yield self.token, self.logprob, self.rank
        for rank, (token, logprob) in enumerate(self.top, 1):
            if token != self.token:
                yield token, logprob, rank


class KVLease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """Blocks of an engine that hold the beginning of a history, kept for who goes on with it (planaria.core.transfer).
    id: of the lease; number: of the KV, and so of the engine's process and epoch; blocks: from the history's first on;
    memory: the file they are in, as planaria.node.Shared."""

    id: int
    number: int
    blocks: tuple[int, ...]
    memory: tuple[int, int, int]


class KVLayout(msgspec.Struct, frozen=True, array_like=True):
    """What of a history's KV each rank of an engine has. layers: of each stage; dcp, pcp, interleave: see
    topology.stripes; block_size: tokens of a block, on all context ranks together."""

    tp: int
    layers: tuple[int, ...]
    block_size: int
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1


class KVOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Copies of blocks that an engine of another server has taken of a history, for who goes on with it: whoever knows
    a block's key may fetch it (planaria.worker.kv_peers). id: of the lease; blocks: their places in the history; host,
    port: of that engine's first rank; layout: that engine's, None: as who asks. at: where each rank is, where not at
    the next ports."""

    id: str
    blocks: tuple[int, ...]
    host: str
    port: int
    layout: KVLayout | None = None
    at: tuple[str, ...] = ()


class Request:
    """The only durable thing in the engine. `history = prompt + output`; `computed` says how much of it is in KV."""

    __slots__ = (
        "adapter", "arrival", "computed", "eos_ids", "id", "lane", "lease", "lends", "max_tokens", "offers", "output",
        "params", "pause", "persist", "priority", "prompt", "salt", "seed",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        *,
        max_tokens: int,
        eos_ids: tuple[int, ...] = (),
        arrival: float = 0.0,
        priority: int = 0,
        output: list[int] | None = None,
        salt: str = "",
        persist: bool = False,
        lends: bool = False,
        lease: KVLease | KVOffer | None = None,
        adapter: str = "",
        offers: bool = False,
        pause: float = 0.0,
    ) -> None:
        self.id, self.prompt, self.params, self.seed = id, prompt, params, seed
        self.max_tokens, self.eos_ids, self.arrival, self.priority = max_tokens, eos_ids, arrival, priority
        self.output: list[int] = output if output is not None else []
        self.salt, self.persist = salt, persist  # whose KV it may share; is its own wanted again?
        self.lends, self.lease = lends, lease  # after its first token; what another engine has lent to it, or offers
        self.offers = offers  # its blocks to other servers
        self.pause = pause  # seconds that a step with a part of its prompt takes at most; 0: as long as it does
        self.adapter = adapter  # digest of the adapter it is computed with; empty: none
        self.computed = 0
        self.lane: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def span(self, first: int, end: int) -> list[int]:
        """Of the history, without a copy of the rest."""
        known = len(self.prompt)
        if first >= known:
            return self.output[first - known : end - known]
        return self.prompt[first:end] + self.output[max(first - known, 0) : max(end - known, 0)]

    @property
    def most_tokens(self) -> int:
        """That it can come to."""
        return len(self.prompt) + (0 if self.params.pooling else self.max_tokens)

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, prompt {len(self.prompt)}, output {len(self.output)}/{self.max_tokens}, "
            f"computed {self.computed})"
        )


class Delta(msgspec.Struct, array_like=True, gc=False):  # it is in no circle
    """What one step added to one request: `tokens` start at output index `index`. The last one carries `finish`."""

    request_id: str
    index: int
    tokens: list[int]
    finish: FinishReason | None = None
    stop_reason: int | str | None = None  # the token or string that stopped it
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached: int = 0  # prompt tokens that came from the prefix cache (known at the first delta)
    queued: float = 0.0  # seconds until its first step was planned (known at the first delta)
    error: str | None = None
    lease: KVLease | KVOffer | None = None  # with finish "lent"
    pooled: bytes | None = None  # in place of tokens: a vector, float32
    weights: int = 0  # the number of those that drew the tokens
