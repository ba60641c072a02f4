"""What all routes of one model share: the engine's client, the tokenizer, what is open, and whether it may admit."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import Receive

import planaria
from planaria.errors import RequestError
from planaria.server.admission import Admission
from planaria.server.config import ServerConfig
from planaria.server.dispatcher import Dispatcher
from planaria.server.fair_queue import FairQueue, NoRoom
from planaria.server.faults import FaultLog
from planaria.server.history import History
from planaria.server.idempotency import owner_of
from planaria.server.inputs import child_seed, grammar_check
from planaria.server.metrics import Metrics
from planaria.server.response_metrics import ResponseMetrics
from planaria.server.response_store import ResponseStore
from planaria.server.tokenise import LONG_TEXT, Tokenizer
from planaria.server.transfer import Transfers
from planaria.server.vectors import need_task
from planaria.structured.check import LEVELS
from planaria.structured.spec import field_of
from planaria.types import SamplingParams
from planaria.wire import Dead, EngineFacts, Recovery

if TYPE_CHECKING:
    from planaria.server.fleet import Fleet
    from planaria.server.generation import Generation, ModelPlace

logger = logging.getLogger("planaria.server")

TEXT_AT_ONCE = 1 << 16  # characters of several texts that are tokenised together
SHOWN_NAMES = 20  # of adapters, where a name is none
MAX_TEXT = 1 << 20  # characters of a text that isn't bound by the model's length
MAX_CHECKING = 256  # grammars that wait to be compiled; beyond that 503
CHECKING = 10.0  # seconds that one waits until it is; then 503
NORMALIZER_SLACK = 4  # how much shorter a normaliser may make a text


class Service(Admission):
    """The state of one model's server."""

    def __init__(self, client: Dispatcher, tokenizer: Tokenizer | None, config: ServerConfig) -> None:
        super().__init__(config)
        self.client, self.tokenizer = client, tokenizer
        self.transfers = Transfers(config.transfer, config.transfer_key, config.kv_layout)
        self.history = History()
        self.faults = FaultLog(lambda: [engine.index for engine in client.engines() if engine.state != "ended"])
        client.on_recovery, client.on_settled = self._recovery, self.faults.settled
        if config.otlp_traces_endpoint is not None:
            from planaria.server.traces import Traces

            self.traces = Traces(config.otlp_traces_endpoint, config.otlp_traces_sampling_ratio)
        self.metrics = Metrics(client.engines, lambda: self.model_names[0], self.faults, lambda: client.stats)
        self.responses = ResponseStore(self, len(config.api_keys), lasts=not config.journal_ends)
        self.metrics.registry.register(ResponseMetrics(self.responses, lambda: self.model_names[0]))
        self.created = int(time.time())
        self.place: ModelPlace | None = None  # among several models; None: it is the only one
        self.on_closed: Callable[[], None] = lambda: None  # something that was open is no more
        self.open: dict[Generation, None] = {}
        self.busy_since = 0.0  # time.monotonic() when `open` last became non-empty
        self.elsewhere: int | None = None  # of several processes, in all of them together
        self._numbers = itertools.count()
        self._fingerprint: str | None = None
        self.grammars = grammar_check(tokenizer, lambda: client.facts)
        self._checks = [FairQueue(1, f"planaria-grammar-{level}", MAX_CHECKING) for level in range(len(LEVELS))]

    @property
    def model_names(self) -> tuple[str, ...]:
        names = self.config.served_model_names
        if names:
            return names
        facts = self.client.facts
        return (facts.model,) if facts is not None else ("unknown",)

    @property
    def fingerprint(self) -> str:
        """The same for servers that compute alike, as far as they say."""
        facts = self.client.facts
        if self._fingerprint is None and facts is not None:
            what = (facts.model, facts.dtype, facts.quantization, facts.device, facts.num_parameters)
            digest = hashlib.blake2b(repr(what).encode(), digest_size=4).hexdigest()
            self._fingerprint = f"planaria-{planaria.__version__}-{digest}"
        return self._fingerprint or ""

    @property
    def control(self) -> Fleet:
        """For routes that no API process answers itself."""
        assert self.client.control is not None
        return self.client.control

    def not_ready(self, *, awake: bool = True) -> str:
        """Why nothing can be admitted now, or "". awake: what needs engines that compute."""
        if self.draining and self.outer is None:  # else the port lets nothing in, and what waited for a model begins
            return self.draining
        if self.client.dead is not None:
            return f"the engine has ended: {self.client.dead.message}"
        if self.client.facts is None:
            return "the model is still being loaded" if self.place is None else "the model has not been loaded yet"
        return "its engines are asleep (POST /wake_up wakes them)" if awake and self.asleep else ""

    @property
    def asleep(self) -> bool:
        """Every engine that there is sleeps."""
        states = {engine.state for engine in self.client.members.values()} - {"ended"}
        return states == {"asleep"}

    def admit(self, model: str | None, task: str | None = None, *, awake: bool = True) -> EngineFacts:
        """The engine's facts, if a request for `model` can be taken, and it does `task`; raises RequestError (503, 404,
        400)."""
        why = self.not_ready(awake=awake)
        facts = self.client.facts
        if why or facts is None:
            raise RequestError(why, code="not_ready", status=503)
        self.adapter(model)
        if task is not None:
            need_task(self.config.pooling, task)
        return facts

    def adapter(self, model: str | None) -> str:
        """The digest of the adapter that a request for `model` is answered with, "" for none; raises RequestError
        (404)."""
        if model is None or model in self.model_names or model == self.config.model:
            return ""
        named = self.client.loras.named if self.client.loras is not None else {}
        if model in named:
            return named[model].digest
        names = ", ".join([*self.model_names, *islice(named, SHOWN_NAMES)])
        raise RequestError(
            f"model {model[:200]!r} is not served here; there is: {names}",
            param="model", code="model_not_found", status=404,
        )  # fmt: skip

    def next_seed(self) -> int | None:
        """For a prompt whose request brings no seed; None: draw one."""
        seed = self.config.seed
        return None if seed is None else child_seed(seed, next(self._numbers))

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "this server runs without a tokenizer (--skip-tokenizer-init): only token ids can be completed",
                param=param, code="unsupported_parameter",
            )  # fmt: skip
        return self.tokenizer

    async def encode(
        self, texts: list[str], add_special_tokens: bool, gone: Receive, *, limit: int | None = None,
        param: str = "prompt",
    ) -> list[list[int]]:  # fmt: skip
        """Token ids of texts; see `spell`."""
        tokenizer = self.need_tokenizer(param)

        def one(i: int) -> list[int]:
            return tokenizer.encode(texts[i], add_special_tokens)

        return await self.spell(texts, one, gone, limit=limit, param=param)

    async def spell(
        self, texts: list[str], one: Callable[[int], list[int]], gone: Receive, *, limit: int | None, param: str
    ) -> list[list[int]]:  # fmt: skip
        """What `one` makes of each text, by number; long ones are done in a thread, some at a time, so that other
        requests go on.

        A text that can't fit in `limit` tokens is refused by its length alone, because megabytes take seconds to
        tokenise; so is what is longer than any server takes. `gone`: as for `in_thread`.
        """
        length = sum(map(len, texts))
        if length <= LONG_TEXT:
            return [one(i) for i in range(len(texts))]
        tokenizer = self.need_tokenizer(param)
        if limit is not None and max(map(len, texts)) > limit and not tokenizer.measured:
            await self.in_thread(lambda: tokenizer.longest_token, gone)
        for text in texts:
            self.check_length(text, limit, param)
        ids: list[list[int]] = []
        while len(ids) < len(texts):
            part: list[int] = []
            size = 0
            for i in range(len(ids), len(texts)):
                if part and size + len(texts[i]) > TEXT_AT_ONCE:
                    break
                part.append(i)
                size += len(texts[i])

            def work(part: list[int] = part) -> list[list[int]]:
                return [one(i) for i in part]

            ids += await self.in_thread(work, gone)
        return ids

    def check_length(self, text: str, limit: int | None, param: str) -> None:
        """Raise RequestError for a text that is more than `limit` tokens whatever they are. limit None: that of all."""
        tokenizer = self.need_tokenizer(param)
        if len(text) > MAX_TEXT and limit is None:
            raise RequestError(
                f"{param} has {len(text)} characters; at most {MAX_TEXT} are tokenised at a time",
                param=param, code="invalid_value",
            )  # fmt: skip
        slack = NORMALIZER_SLACK if tokenizer.backend.normalizer is not None else 1
        if limit is None or len(text) <= limit * slack:
            return
        least = len(text) // (tokenizer.longest_token * slack)
        if least > limit:
            raise RequestError(
                f"{param} has {len(text)} characters, at least {least} tokens; this model's length is {limit} tokens",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    async def constrained(self, params: SamplingParams, place: str, request: Request) -> SamplingParams:
        """`params` with the grammar of their structured outputs, which are in the request's field `place`. Raises
        RequestError. One that was compiled lately waits for no other, and one that doesn't take long for none that
        does; else API keys, or, where there are none, addresses, have their turns, and nobody waits for longer than
        `CHECKING`."""
        known = await self.in_thread(lambda: self.grammars.known(params, place), request.receive)
        if known is not None:
            return known
        client = request.client
        owner = owner_of(request.scope, self.config) or (client.host if client is not None else "")
        try:
            async with asyncio.timeout(CHECKING):
                for level, checks in enumerate(self._checks):
                    work = partial(self.grammars.tried, params, place, level)
                    known = await self.in_thread(work, request.receive, checks.of(owner))
                    if known is not None:
                        return known
                raise AssertionError  # the last level has a verdict
        except (TimeoutError, NoRoom) as e:
            waited = f"it waited for {CHECKING:g} s" if isinstance(e, TimeoutError) else f"{MAX_CHECKING} wait"
            raise RequestError(
                f"{place}: too many grammars are to be compiled: {waited}; send the request again later",
                param=field_of(place), code="overloaded", status=503,
            ) from None  # fmt: skip

    def _recovery(self, message: Recovery) -> None:
        self.faults.hear(message)
        if self.traces is not None:
            self.traces.hear(message)

    # -- as the server's life sees it

    @property
    def title(self) -> str:
        return self.model_names[0]

    @property
    def coming(self) -> bool:
        return self.client.facts is None

    async def ready(self) -> None:
        await self.client.ready()

    def begin(self) -> None:
        self.responses.tasks.start(self.responses.go_on())

    @property
    def runs(self) -> bool:
        """Does something that nobody need be connected to?"""
        return any(entry.run is not None for entry in self.responses.unfinished.values())

    def look(self) -> Dead | None:
        if self.history.due(time.monotonic()):
            self.sample()
        return self.client.dead

    def sample(self) -> None:
        """Remember how things are now."""
        self.history.keep(time.time(), self.client.stats, self.metrics, self.faults)

    # -- what is open

    def opened(self, generation: Generation) -> None:
        if not self.open:
            self.busy_since = time.monotonic()
        self.open[generation] = None

    def closed(self, generation: Generation) -> None:
        self.open.pop(generation, None)
        self.on_closed()

    def drain(self, reason: str) -> None:
        super().drain(reason)
        if self.client.control is not None:
            self.client.control.drain()

    def end(self, dead: Dead) -> None:
        # One that never became ready is an exception of `serve`, and its caller's to say.
        if self.client.facts is not None:
            logger.error("the engine has ended: %s", dead.message)
        if dead.detail and dead.kind == "error":
            logger.error("%s", dead.detail)
        self.drain(f"the engine has ended: {dead.message}")

    def close(self) -> None:
        super().close()
        for checks in self._checks:
            checks.close()
        self.grammars.close()

    def abort_all(self, message: str, status: int = 503, code: str = "aborted") -> int:
        victims = list(self.open)
        for generation in victims:
            generation.fail(message, status, code)
        return len(victims)
