"""Planaria in your own process: `LLM` for batches, `AsyncLLM` for streams. Same input checks and text as the server."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import operator
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from planaria import pooled
from planaria.beam import BeamSearchOutput, BeamSearchParams, beam_search
from planaria.build import build_loop
from planaria.checkpoint import Checkpoint
from planaria.checkpoint.adapter import CONFIG, WEIGHTS
from planaria.checkpoint.generation import sampling_defaults
from planaria.checkpoint.identity import weights_version
from planaria.checkpoint.shared import Named, SharedWeights
from planaria.config.declared import picked
from planaria.config.options import EngineConfig, EngineOptions
from planaria.config.parallel import refuse_outer_launcher, refuse_several_engines
from planaria.config.resolve import other_tensors, other_weights, resolve
from planaria.config.vllm_words import ours
from planaria.engine_thread import EngineThread, OnFailure, Waiting
from planaria.errors import ConfigError, EngineDead, RequestError, UserError
from planaria.generate_journal import going_on
from planaria.parsers.reading import Reading
from planaria.pooled import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from planaria.processes import interrupt_between_steps
from planaria.prompts import LoRARequest, Prompt, content_of, refuse, salt_of
from planaria.server.inputs import child_seed, grammar_check, submissions
from planaria.server.loras import LoraRegistry
from planaria.server.records import version_runs
from planaria.server.stream import Choices, Piece, Stream
from planaria.server.tokenise import Tokenizer, check_variables, load_tokenizer
from planaria.server.tools import (
    CalledTool,
    Parsers,
    about,
    call_form,
    check_tools,
    gathered,
    has_form,
    reading_of,
    shown_marks,
    thinking_first,
    with_calls,
)
from planaria.server.vectors import need_task
from planaria.together import PromptAsked, everyones
from planaria.tokenizer_words import TokenizerWords
from planaria.types import Delta, PoolingParams, SamplingParams, TokenLogprobs
from planaria.wire import (
    Cancel,
    EngineFacts,
    EngineState,
    EngineStats,
    FromEngine,
    Output,
    Phase,
    Progress,
    Sleep,
    Slept,
    StartUpNews,
    Submit,
    UpdateWeights,
    WeightsUpdated,
)

logger = logging.getLogger("planaria")

ChatMessage = dict[str, Any]
Folder = str | os.PathLike[str]
Changed = Slept | WeightsUpdated
T = TypeVar("T")
OnProgress = Callable[[StartUpNews], None]


@dataclass(frozen=True)
class Logprob:
    """Of a token at a position. `rank` counts from 1, the likeliest; `decoded_token` is None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class PositionLogprobs(dict[int, Logprob]):
    """Of one position: from token id to Logprob, that of the `token` that was chosen first."""

    def __init__(self, position: TokenLogprobs, tokenizer: Tokenizer | None) -> None:
        super().__init__(
            (token, Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token)))
            for token, logprob, rank in position.entries()
        )
        self.token, self.top = position.token, position.top

    @property
    def logprob(self) -> float:
        """Of the chosen token, as is `rank`."""
        return self[self.token].logprob

    @property
    def rank(self) -> int:
        return self[self.token].rank


@dataclass
class StreamOutput:
    """A piece of one choice, as it comes. `finish_reason` is set on a choice's last one: stop, length, abort or error
    (`error` then says why)."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    error: str | None = None
    weights_version: int = 0  # of those that drew its last token


@dataclass
class Gauge:
    """A number of `get_metrics` that goes up and down."""

    name: str
    labels: dict[str, str]
    value: float


class Counter(Gauge):
    """One that only grows."""


@dataclass
class Completion(StreamOutput):
    """One of the n continuations, whole. weights_versions: from which token on which weights drew them. Of an answer of
    `chat` that was read (it had tools, or the model writes its reasoning apart): its content, reasoning and calls; else
    content is None."""

    weights_versions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] = field(default_factory=list)

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all its tokens together; None where log-probabilities weren't asked for."""
        return None if self.logprobs is None else sum(position.logprob for position in self.logprobs)


@dataclass
class RequestOutput:
    """One prompt and what was generated for it, in order of choice."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.outputs[0].text

    def take_apart(self, reading: Reading) -> None:
        """Fill in what the texts say."""
        for output in self.outputs:
            told = gathered(reading.events(output.text))
            output.content, output.reasoning, output.tool_calls = told.content, told.reasoning or None, told.calls


def make_options(model: Folder, options: dict[str, Any]) -> EngineOptions:
    """EngineOptions from keyword arguments; raises ConfigError for a name or type that is wrong."""
    known = EngineOptions.__struct_fields__
    options, line = ours(options)
    if line:
        logger.warning(line)
    for name in options:
        if name not in known:
            raise ConfigError(name, options[name], "is not an option of an engine", f"known: {', '.join(known)}")
    backend, group = options.get("distributed_executor_backend"), options.get("placement_group")
    if isinstance(backend, type):
        options = {**options, "distributed_executor_backend": f"{backend.__module__}.{backend.__qualname__}"}
    if group is not None and hasattr(group, "bundle_specs"):  # Ray's own object
        options = {**options, "placement_group": group.id.hex()}
    try:
        return msgspec.convert(
            {"model": os.fspath(model) if isinstance(model, os.PathLike) else model, **options}, EngineOptions
        )
    except msgspec.ValidationError as e:
        raise ConfigError("options", options, str(e)) from None


class _Front:
    """What both kinds share: configuration, tokenizer, an engine that isn't started, turning prompts into streams."""

    def __init__(
        self, model: Folder, options: dict[str, Any], on_progress: OnProgress | None, deliver: Callable[[Delta], None]
    ) -> None:
        self.options = make_options(model, options)
        self.config: EngineConfig = resolve(self.options)
        refuse_several_engines(self.config.parallel, "an engine in this process")
        self.tokenizer: Tokenizer | None = None
        if not self.options.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(msgspec.convert(self.config.checkpoint, Checkpoint))
        self.facts: EngineFacts
        self.stats = EngineStats()
        self._level: int | None = None
        self.weights_version = self._weights_number = 0  # in force; the last that was asked for
        self._shared: dict[int, SharedWeights] = {}  # by number, of those that are in force or may come to be
        self._changes: dict[str, Future[Changed]] = {}
        me = weakref.ref(self)  # neither the engine nor what checks grammars holds who uses it
        self._grammars = grammar_check(self.tokenizer, lambda: front.facts if (front := me()) else None)
        weakref.finalize(self, self._grammars.close)
        self._numbers, self._on_progress, self._to = itertools.count(), on_progress, deliver
        self._process = os.getpid()
        self._loop = build_loop(self.config, lambda message: front._hear(message) if (front := me()) else None)
        self._loras = LoraRegistry.of(self.config)
        self._turn = threading.RLock()  # one thread at a time reads adapters, and has an LLM's engine run
        self._closed = threading.Event()
        self._looks: dict[str, tuple[str, str]] = {}  # by name of an adapter: its path, its files as they were read

    def _end_with(self, end: Callable[[], None]) -> weakref.finalize[Any, Any]:
        """Have the engine end by this, when it is closed, nobody has it any more, or the program ends."""
        finalizer = weakref.finalize(self, _close, self._closed, self._turn, end, self._shared, self._process)
        finalizer.atexit = True
        atexit.register(finalizer)  # once; before those that its launcher's libraries registered
        return finalizer

    def _need_open(self) -> None:
        """Raises EngineDead."""
        if self._closed.is_set():
            raise EngineDead("the engine was closed")

    def _need_engine(self) -> None:
        """Raises UserError in a process that was forked from the one whose engine it is."""
        if os.getpid() != self._process:
            raise UserError("this process was forked after its LLM was made, and has none of its ranks: make one here")

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Output):
            self.stats = message.stats
            for delta in message.deltas:
                self._to(delta)
        elif isinstance(message, Slept | WeightsUpdated):
            if isinstance(message, Slept):
                self._level = message.level
            else:
                self._have(message)
            if (future := self._changes.pop(message.id, None)) is not None:
                future.set_result(message)
        elif isinstance(message, Progress | Phase) and self._on_progress is not None:
            self._on_progress(message)

    @property
    def is_sleeping(self) -> bool:
        return self._level is not None

    def _sleep(self, level: int | None) -> Sleep:
        return Sleep(f"s{next(self._numbers)}", level)

    def _weights(
        self,
        path: Folder | None,
        tensors: Named | None = None,
        handle: str = "",
        keep_kv: bool = False,
        *,
        beside: bool = False,
    ) -> UpdateWeights:
        """Raises ConfigError, ModelError, CapacityError."""
        if sum((path is not None, tensors is not None, bool(handle))) != 1:
            raise ConfigError("update_weights", path, "takes one of path, tensors and handle", "give that alone")
        shared = None
        if path is not None:
            checkpoint = other_weights(self.config, os.fspath(path))
        else:
            shared = SharedWeights(tensors) if tensors is not None else SharedWeights.held(handle)
            checkpoint = other_tensors(self.config, shared)
        self._weights_number += 1
        if shared is not None:
            self._shared[self._weights_number] = shared
        return UpdateWeights(f"w{self._weights_number}", self._weights_number, checkpoint, beside, keep_kv)

    def _have(self, done: WeightsUpdated) -> None:
        """These are in force: memory of others is let go of, but for those that may still come."""
        self.weights_version, asked = done.number, int(done.id[1:])
        for number in [n for n in self._shared if n < done.number or done.number < n <= asked]:
            self._shared.pop(number).close()

    def _ask(self, asked: Sleep | UpdateWeights, tell: Callable[[Sleep | UpdateWeights], None]) -> Future[Changed]:
        """Its answer. Who no longer waits for it calls nothing off: it is carried out all the same."""
        future = self._changes[asked.id] = Future[Changed]()
        future.set_running_or_notify_cancel()
        tell(asked)
        return future

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a request that brings none: of the model's generation_config.json (option `generation_config`)."""
        return sampling_defaults(self.config.checkpoint["generation_config"])

    def _logprobs(self, positions: Iterable[TokenLogprobs | None] | None) -> list[PositionLogprobs] | None:
        """Of the positions that have any: a prompt's first has none."""
        return None if positions is None else [PositionLogprobs(p, self.tokenizer) for p in positions if p is not None]

    def _encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        content = content_of(prompt)
        if not isinstance(content, str):
            try:
                return [operator.index(token) for token in content]
            except TypeError:
                raise RequestError(
                    f"a prompt is a text or a list of token ids, got {prompt!r:.60}", param="prompt"
                ) from None
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; give token ids, or leave out skip_tokenizer_init")
        return self.tokenizer.encode(content, add_special_tokens=add_special_tokens)

    def _next_id(self) -> str:
        return f"r{next(self._numbers)}"

    def _adapter(self, request: LoRARequest | None) -> str:
        """The digest of what is asked for. Its folder is read again when its files have changed. Raises
        RequestError."""
        if request is None:
            return ""
        registry, name, path = self._loras, request.lora_name, request.lora_path
        if registry is None:
            raise RequestError("lora_request needs enable_lora=True", param="lora_request")
        look = path, weights_version([os.path.join(path, file) for file in (CONFIG, WEIGHTS)])
        with self._turn:
            if name not in registry.named or self._looks.get(name) != look:
                adapter = registry.read(path)
                if name not in registry.named and len(registry.named) >= registry.config.max_cpu_loras:
                    registry.remove(next(iter(registry.named)))  # the one that was loaded first
                registry.add(name, adapter)
                self._looks[name] = look
            return registry.named[name].digest

    def _adapters(self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[str]:
        """Of each prompt."""
        if given is None or isinstance(given, LoRARequest):
            return [self._adapter(given)] * count
        if len(given) != count:
            raise RequestError(f"{len(given)} lora_request for {count} prompts", param="lora_request")
        return [self._adapter(each) for each in given]

    def get_tokenizer(self) -> TokenizerWords:
        """The model's tokenizer, under Hugging Face's words. Raises ConfigError without one."""
        if self.tokenizer is None:
            raise ConfigError("skip_tokenizer_init", True, "there is no tokenizer", "leave it out")
        return TokenizerWords(self.tokenizer)

    def get_metrics(self) -> list[Counter | Gauge]:
        """What the engine counts, under the names that /metrics has."""
        from planaria.server.metrics import of_engines

        facts, name = self.facts, self.config.served_model_name
        engine = EngineState(0, "ready", os.getpid(), facts.layout, facts.ranks, self.stats, 0, 0, False)
        return [
            (Gauge if family.type == "gauge" else Counter)(family.name, sample.labels, sample.value)
            for family in of_engines([engine], name) for sample in family.samples
        ]  # fmt: skip

    def chat_prompt(self, messages: list[ChatMessage], **template: Any) -> str:
        """The model's chat template over messages of {"role", "content"}, ready for an answer. template: arguments of
        `Tokenizer.apply_chat_template`. Raises RequestError for messages that are none."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer; leave out skip_tokenizer_init")
        return self.tokenizer.apply_chat_template(messages, **template)

    def _stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        salt: str = "",
        reading: Reading | None = None,
        adapter: str = "",
    ) -> tuple[str, Choices, list[Submit]]:
        self._need_engine()
        need_task(self.config.pooling, "generate")
        params = self._grammars.spelled(msgspec.structs.replace(params))  # the caller may go on to change its own
        if self.tokenizer is not None:
            params = thinking_first(params, reading, self.tokenizer)
        params.verify(self.facts.vocab_size)
        number = next(self._numbers)
        request_id = f"r{number}"
        seed = self.options.seed
        submits = submissions(
            request_id, prompt, params, self.facts, eos_ids=self.config.model.eos_ids, tokenizer=self.tokenizer,
            seed=child_seed(seed, number) if seed is not None else None, priority=priority,
            cache_salt=salt, adapter=adapter,
        )  # fmt: skip
        tokenizer = self.tokenizer if params.detokenize else None
        if reading is not None and tokenizer is not None:
            tokenizer = tokenizer.showing(shown_marks(reading))
        return request_id, Choices(prompt, submits, tokenizer), submits

    def _output(self, stream: Choices, request_id: str, prompt: str | None) -> RequestOutput:
        """What a finished stream came to."""
        positions = stream.sequences[0].prompt_logprobs
        return RequestOutput(
            request_id, prompt, stream.prompt,
            [_completion(sequence, self._logprobs(sequence.logprobs)) for sequence in stream.sequences],
            None if positions is None else [None, *(self._logprobs(positions) or ())],
            stream.cached_tokens,
        )  # fmt: skip


_GENERATE_ONLY = (
    "programs with prompts of their own ($PLANARIA_DP_SIZE) can call generate, and nothing else that computes"
)


def _completion(of: Stream, logprobs: list[PositionLogprobs] | None) -> Completion:
    """Of a choice that has ended."""
    runs = version_runs(of.versions)
    return Completion(
        of.choice, of.text, of.tokens, str(of.finish), of.stop_reason, logprobs, of.error, runs[-1][1], runs
    )


def _close(
    closed: threading.Event, turn: threading.RLock, end: Callable[[], None], shared: dict[int, SharedWeights],
    process: int,
) -> None:  # fmt: skip
    """Of an engine, and then of what its ranks read. closed: tells a thread that has it run to leave it. process: whose
    it is; what was forked from that has a copy."""
    if os.getpid() != process:
        return
    closed.set()
    with turn:
        end()
    for weights in shared.values():
        weights.close()


def _changed(change: Changed) -> None:
    """Raises UserError where it isn't what was asked for."""
    if change.error:
        raise UserError(change.error)


def _wakes(tags: Sequence[str] | None) -> bool:
    """Weights alone are there again with KV, when that is asked for. Raises ConfigError."""
    tags = [tags] if isinstance(tags, str) else tags
    unknown = set(tags or ()) - {"weights", "kv_cache"}
    if unknown:
        raise ConfigError("tags", sorted(unknown)[0], "is neither weights nor kv_cache", "leave tags out")
    return not tags or "kv_cache" in tags


class LLM(_Front):
    """A model in this process, for batches.

    >>> llm = LLM("smollm2")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text

    `options` are the fields of `EngineOptions`: dtype, quantization, threads, max_model_len, kv_cache_memory, ...
    Raises ConfigError, ModelError or CapacityError before anything runs. The engine runs inside your calls: a rank that
    ends between two of them is replaced by the next, and calls of several threads take turns.
    """

    def __init__(self, model: Folder, *, on_progress: OnProgress | None = None, **options: Any) -> None:
        super().__init__(model, options, on_progress, self._deliver)
        self._sinks: dict[str, Choices] = {}
        self._pieces: list[Piece] = []
        outer = self.config.parallel.outer
        self._programs = outer is not None and outer.own_prompts
        self.facts = self._loop.start()
        if self._loras is not None:
            self._loras.tell = self._loop.handle  # type: ignore[method-assign]
        self._finalizer = self._end_with(self._loop.close)

    def _deliver(self, delta: Delta) -> None:
        stream = self._sinks.get(delta.request_id)
        piece = stream.take(delta) if stream is not None else None
        if piece is not None:
            self._pieces.append(piece)
            if piece.finish is not None:
                del self._sinks[delta.request_id]
            if piece.cancel:
                self._loop.handle(Cancel(delta.request_id))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        on_tokens: Callable[[int, int], None] | None = None,
        priority: Sequence[int] | None = None,
        journal: str | os.PathLike[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (a text, token ids, or a dict of either); results in the order of the prompts.

        Without `sampling_params` the model's own defaults hold. use_tqdm: show a bar, on a terminal; what makes another
        bar shows that everywhere. `on_tokens(finished requests, new tokens)` is called after each step. journal: a file
        in which tokens are noted as they come: the same call in a program that is started again goes on from there.
        Raises RequestError for a bad prompt or parameter before any of them runs, ConfigError for another call's
        journal, EngineDead if the engine ends.
        """
        batch = _listed(prompts)
        adapters = self._adapters(lora_request, len(batch))
        each = _each(self.get_default_sampling_params() if sampling_params is None else sampling_params, len(batch))
        ranks = list(priority) if priority is not None else [0] * len(batch)
        if len(ranks) != len(batch) or not all(isinstance(rank, int) for rank in ranks):
            raise RequestError(f"priority takes a number for each of {len(batch)} prompts, got {ranks!r:.60}",
                               param="priority")  # fmt: skip
        asked = [
            PromptAsked(self._encode(p), s, r, salt_of(p)) for p, s, r in zip(batch, each, ranks, strict=True)
        ]  # fmt: skip
        own = slice(None)
        if self._programs:
            refuse(lora_request=any(adapters))
            asked, own = everyones(self._loop.share, asked)
            adapters = [""] * len(asked)
        opened = [
            self._stream(a.prompt, a.params, a.priority, a.salt, adapter=adapter)
            for a, adapter in zip(asked, adapters, strict=True)
        ]
        with going_on(journal, opened, self._loop.share, self.config.parallel.outer):
            self._run(opened, use_tqdm, on_tokens, shared=True)
        opened = opened[own]
        texts = [prompt.get("prompt") if isinstance(prompt, dict) else prompt for prompt in batch]
        return [
            self._output(stream, id, text if isinstance(text, str) else None)
            for (id, stream, _), text in zip(opened, texts, strict=True)
        ]

    def _run(
        self, opened: list[tuple[str, Choices, list[Submit]]], use_tqdm: bool | Callable[..., Any],
        on_tokens: Callable[[int, int], None] | None = None, *, shared: bool = False,
    ) -> None:  # fmt: skip
        """Until all of them have ended. shared: they are those of all programs. Raises UserError: it sleeps, or other
        programs don't know of these."""
        self._need_engine()
        if self._programs and not shared:
            raise UserError(_GENERATE_ONLY)
        told = _told(use_tqdm, len(opened), on_tokens)
        with self._turn, interrupt_between_steps() as look, told as tell:
            self._need_open()
            if self.is_sleeping:
                raise UserError("the engine sleeps: call wake_up first")
            try:
                for _, stream, submits in opened:
                    self._sinks |= dict.fromkeys([submit.id for submit in submits], stream)
                for _, _, submits in opened:
                    for submit in submits:
                        self._loop.handle(submit)
                while self._sinks:
                    self._need_open()
                    self._pieces.clear()
                    self._loop.step()
                    look()
                    if self._loop.dead is not None:
                        raise EngineDead(self._loop.dead.message)
                    if tell is not None:
                        done = sum(stream.done for _, stream, _ in opened)
                        tell(done, sum(len(piece.tokens) for piece in self._pieces))
            except BaseException:
                for id in list(self._sinks):
                    del self._sinks[id]
                    if self._loop.core is not None:
                        self._loop.handle(Cancel(id))
                raise

    def chat(
        self,
        messages: list[ChatMessage] | list[list[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation (messages of {"role", "content"}) or each of several: always a list, in their order.

        Without `sampling_params` the model's own defaults hold, with as many tokens as there is room for. Raises
        RequestError as `generate` does, and for messages that are none. tools: an answer's calls are its `tool_calls`,
        where the format in which the model writes them is known, else its text. chat_template_content_format: content
        is text, whatever is said here.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        many = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
        conversations: list[Any] = messages if many else [messages]
        declared = check_tools(tools, tool_choice, parallel_tool_calls)
        check_variables(chat_template_kwargs or {})
        texts = [
            self.chat_prompt(
                conversation, chat_template=chat_template, add_generation_prompt=add_generation_prompt,
                tools=declared.shown, continue_final_message=continue_final_message, **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]  # fmt: skip
        parsers = picked(Parsers, self.options)
        template = chat_template or (self.tokenizer.chat_template if self.tokenizer is not None else None) or ""
        known = parsers["tool_call_parser"] is not None or about(template)[0] if declared.shown else False
        read = declared.forced or known
        opened, readings = [], []
        if sampling_params is None:
            sampling_params = msgspec.structs.replace(self.get_default_sampling_params(), max_tokens=None)
        adapters = self._adapters(lora_request, len(texts))
        for text, params, adapter in zip(texts, _each(sampling_params, len(texts)), adapters, strict=True):
            ids, reading = self._encode(text, add_special_tokens=False), None
            if self.tokenizer is not None:
                reading = reading_of(declared if read else None, Parsers(**parsers), template, self.tokenizer, ids)
                params = self._grammars.spelled(params) if read else params
                if reading is not None and has_form(declared, reading, params):
                    form = call_form(declared, reading, template, self.tokenizer)
                    params = with_calls(params, self._grammars.grammar(form, "structured_outputs"))
            readings.append(reading)
            opened.append(self._stream(ids, params, reading=reading, adapter=adapter))
        self._run(opened, use_tqdm)
        outputs = [self._output(stream, id, text) for (id, stream, _), text in zip(opened, texts, strict=True)]
        for output, reading in zip(outputs, readings, strict=True):
            if reading is not None:
                output.take_apart(reading)
        return outputs

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, lora_request: LoRARequest | None = None,
        use_tqdm: bool = False, concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:  # fmt: skip
        """The likeliest continuations of each prompt, best first. use_tqdm and concurrency_limit have no effect: all
        beams of all prompts are requests of one batch. Raises RequestError."""
        if self._programs:
            raise UserError(_GENERATE_ONLY)
        batch, most = [self._encode(prompt) for prompt in _listed(prompts)], self.facts.max_model_len
        eos = self.tokenizer.eos_ids if self.tokenizer is not None else self.config.model.eos_ids

        def step(histories: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
            return self.generate(list(histories), params, use_tqdm=False, lora_request=lora_request)

        found = beam_search(batch, params, step, eos, most)
        if self.tokenizer is None:
            return [BeamSearchOutput(beams) for beams in found]
        decode = self.tokenizer.decode
        return [BeamSearchOutput([replace(beam, text=decode(beam.tokens)) for beam in beams]) for beams in found]

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`. level 0: none; 1: that of KV (weights stay where the node keeps them); 2:
        that of weights, too. Raises UserError."""
        self._change(self._sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """tags: as vLLM's; with "weights" alone nothing happens until "kv_cache" follows. Raises UserError."""
        if _wakes(tags):
            self._change(self._sleep(None))

    def update_weights(self, path: Folder | None = None, *, tensors: Named | None = None, handle: str = "") -> None:
        """Go on with those of another checkpoint of the same model: a folder or file, which may be that of before with
        other bytes; or tensors, or the handle of those that another process has: see SharedWeights. `weights_version`
        counts. Raises ConfigError, ModelError, CapacityError, UserError: those of before stay."""
        self._change(self._weights(path, tensors, handle))

    def _change(self, asked: Sleep | UpdateWeights) -> None:
        """Raises UserError, as while requests of this thread run (it was called by their `on_tokens`)."""
        with self._turn:
            self._need_open()
            if self._sinks:
                raise UserError("requests of this call still run: change the engine when they have ended")
            _changed(self._ask(asked, self._loop.handle).result())

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None, lora_request: pooled.Adapted = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """Each prompt's embedding, in their order. Raises RequestError, as where the model gives none; EngineDead."""
        wish = pooled.wish_of(pooling_params, truncate_prompt_tokens)
        found = pooled.run(self, "embed", _listed(prompts), wish, use_tqdm, lora_request)
        return [pooled.embedded(stream, self.config.pooling, wish) for stream in found]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None, lora_request: pooled.Adapted = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:  # fmt: skip
        """Of each prompt the probabilities of the model's labels. Raises as `embed`."""
        wish = pooled.wish_of(pooling_params, truncate_prompt_tokens)
        found = pooled.run(self, "classify", _listed(prompts), wish, use_tqdm, lora_request)
        return [pooled.classified(stream, self.config.pooling, wish) for stream in found]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None, *,
        use_tqdm: bool | Callable[..., Any] = True, lora_request: pooled.Adapted = None,
        pooling_task: str | None = None, truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:  # fmt: skip
        """What the model gives for each prompt, embedding or probabilities, as an array. pooling_task: embed or
        classify; default: whichever it does. Raises as `embed`."""
        wish = pooled.wish_of(pooling_params, truncate_prompt_tokens)
        if pooling_task not in (None, "embed", "classify"):
            raise RequestError(f"pooling_task must be embed or classify, got {pooling_task!r}", param="pooling_task")
        found = pooled.run(self, pooling_task or "pool", _listed(prompts), wish, use_tqdm, lora_request)
        return [pooled.encoded(stream, self.config.pooling, wish) for stream in found]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], /, *,
        use_tqdm: bool | Callable[..., Any] = True, pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None, truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """How alike pairs of texts are, one with each of the others or each with its own: the cosine of their
        embeddings, or the score of a model with one label, which looks at both together. Raises as `embed`."""
        wish = pooled.wish_of(pooling_params, truncate_prompt_tokens)
        return pooled.score(self, _listed(data_1), _listed(data_2), wish, use_tqdm, lora_request)

    def reset_prefix_cache(self) -> bool:
        """Forget what is kept of earlier requests."""
        with self._turn:
            if self._loop.core is not None:
                self._loop.core.forget_prefixes()
        return True

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None = None, args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Run a worker's method on every rank, after the steps that are on their way; answers in rank order.

        Arguments and answers are plain data: numbers, text, bytes, lists, dicts. A function, which gets the worker
        first, can be run where the only rank is in this process, and give back anything. `timeout`: seconds, for this
        thread's turn and for the answers, None for ever.
        Raises TimeoutError, CallFailed where the method raised (the engine goes on), UserError where the workers have
        no such method (`worker_extension_cls` adds some), EngineDead.
        """
        if not self._turn.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"{method} was not begun in {timeout:g} s: another thread has the engine run")
        try:
            return self._loop.call(method, tuple(args), kwargs).result(timeout)
        finally:
            self._turn.release()

    def close(self) -> None:
        """Free everything; what another thread waits for raises EngineDead. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as several."""
    is_ids = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)
    if isinstance(prompts, str | dict) or not isinstance(prompts, Iterable) or is_ids:
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """One for each of `count` prompts. Raises RequestError."""
    given = [params] * count if isinstance(params, SamplingParams) else params
    each = list(given) if isinstance(given, Iterable) else [given]
    for one in each:
        if not isinstance(one, SamplingParams):
            what = "takes SamplingParams, or one for each prompt"
            raise RequestError(f"sampling_params {what}, got {params!r:.60}", param="sampling_params")
    if len(each) != count:
        raise RequestError(f"{count} prompts but {len(each)} sampling parameters", param="sampling_params")
    return each


@contextmanager
def _told(
    use_tqdm: bool | Callable[..., Any], total: int, on_tokens: Callable[[int, int], None] | None
) -> Iterator[Callable[[int, int], None] | None]:
    """What is told of finished requests and new tokens after each step: `on_tokens`, or a bar, if anybody is to see
    one."""
    make: Any = use_tqdm if callable(use_tqdm) else None
    if make is None and use_tqdm and on_tokens is None and sys.stderr.isatty():
        from tqdm import tqdm

        make = tqdm
    if make is None or on_tokens is not None:
        yield on_tokens
        return
    bar = make(total=total, desc="Processed prompts")
    try:
        yield lambda done, tokens: bar.update(done - bar.n)
    finally:
        bar.close()


class AsyncLLM(_Front):
    """A model in this process that streams to asyncio. The engine runs in a thread of its own.

    >>> llm = AsyncLLM("smollm2")
    >>> async for piece in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
    ...     print(piece.text, end="")
    """

    def __init__(self, model: Folder, *, on_progress: OnProgress | None = None, **options: Any) -> None:
        super().__init__(model, options, on_progress, lambda delta: engine.deliver(delta))
        refuse_outer_launcher(self.config.parallel, "AsyncLLM")
        self._engine = engine = EngineThread(self._loop, self._changes)
        self.facts = engine.start()
        self._finalizer = self._end_with(engine.close)
        if self._loras is not None:
            self._loras.tell = engine.inbox.put  # type: ignore[method-assign, assignment]

    @property
    def is_failed(self) -> bool:
        """Has the engine given up? Nothing is answered any more."""
        return self._engine.failure is not None

    def register_failure_callback(self, callback: OnFailure) -> None:
        """Have it called once, in the engine's thread, when the engine gives up; at once if it has. What it raises is
        logged. `close` is no failure."""
        self._engine.on_failure(callback)

    async def sleep(self, level: int = 1) -> None:
        """See LLM.sleep. What runs goes on after `wake_up`, and new requests wait for it."""
        _changed(await self._tell(self._sleep(level)))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See LLM.wake_up."""
        if _wakes(tags):
            _changed(await self._tell(self._sleep(None)))

    async def update_weights(
        self, path: Folder | None = None, *, tensors: Named | None = None, handle: str = "", keep_kv: bool = False
    ) -> None:  # fmt: skip
        """See LLM.update_weights. What runs goes on with them, from KV that is computed again, or (keep_kv) from that
        of the weights of before, which it then shares with nobody."""
        asked = await asyncio.to_thread(self._weights, path, tensors, handle, keep_kv, beside=True)
        _changed(await self._tell(asked))

    async def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None = None, args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """See LLM.collective_rpc. Steps that come later wait for it; nothing in this thread does."""
        name = f"c{next(self._numbers)}"
        try:
            async with asyncio.timeout(timeout):
                return await self._answer(self._engine.ask_ranks(name, method, tuple(args), kwargs))
        except TimeoutError:
            raise TimeoutError(f"{method} was not done on every rank in {timeout:g} s") from None

    async def _tell(self, asked: Sleep | UpdateWeights) -> Changed:
        return await self._answer(self._ask(asked, self._engine.inbox.put))

    async def _answer(self, future: Future[T]) -> T:
        if self._engine.ended:
            raise EngineDead(self._engine.ended)
        return await asyncio.wrap_future(future)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[StreamOutput]:  # fmt: skip
        """Stream a completion, a piece per step and choice. Leaving the loop early cancels it. Raises RequestError."""
        params = sampling_params or self.get_default_sampling_params()
        adapter = "" if lora_request is None else await asyncio.to_thread(self._adapter, lora_request)
        _, stream, submits = self._stream(self._encode(prompt), params, priority, salt_of(prompt), adapter=adapter)
        engine, target = self._engine, Waiting(stream)
        for submit in submits:
            engine.waiting[submit.id] = target
            engine.inbox.put(submit)
        if engine.ended:  # looked at after `waiting` was filled in: the ending thread answers what it finds there
            for submit in submits:
                engine.waiting.pop(submit.id, None)
            raise EngineDead(engine.ended)
        try:
            while not stream.done or not target.pieces.empty():
                piece = await target.pieces.get()
                yield StreamOutput(
                    piece.choice, piece.text, piece.tokens, str(piece.finish) if piece.finish else None,
                    piece.stop_reason, self._logprobs(piece.logprobs), piece.error, piece.weights,
                )  # fmt: skip
        finally:
            for submit in submits:
                engine.forget(submit.id)

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._finalizer()
