"""What all routes of one server share: the engine's client, the tokenizer, what is open, and whether it may admit.

The rule kept here: from the moment of `drain` nothing new is admitted, and `idle` is set once nothing is open.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from planaria.errors import RequestError
from planaria.server.config import ServerConfig
from planaria.server.faults import FaultLog
from planaria.server.history import History
from planaria.server.inputs import child_seed
from planaria.server.metrics import Metrics
from planaria.server.tokenise import Tokenizer
from planaria.wire import EngineClient, EngineFacts

if TYPE_CHECKING:
    from planaria.server.generation import Generation

logger = logging.getLogger("planaria.server")

LONG_TEXT = 2000  # characters from which a text is tokenised in a thread
NORMALIZER_SLACK = 4  # how much shorter a normaliser may make a text

T = TypeVar("T")


class Service:
    """The state of one server."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, config: ServerConfig) -> None:
        self.client, self.tokenizer, self.config = client, tokenizer, config
        self.history = History()
        self.faults = FaultLog(lambda: [engine.index for engine in client.engines() if engine.state != "ended"])
        client.on_recovery, client.on_settled = self.faults.hear, self.faults.settled
        self.metrics = Metrics(client.engines, lambda: self.model_names[0], self.faults)
        self.created = int(time.time())
        self.draining = ""  # the reason, for those who are turned away
        self.open: dict[Generation, None] = {}
        self.reading: dict[asyncio.Timeout, None] = {}  # of requests whose body is still coming
        self.busy_since = 0.0  # time.monotonic() when `open` last became non-empty
        self.requests = 0  # HTTP requests being answered
        self.elsewhere: int | None = None  # of several processes, in all of them together
        self._numbers = itertools.count()
        self._longest_token: int | None = None  # characters
        self._texts = ThreadPoolExecutor(1, "planaria-text")
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def model_names(self) -> tuple[str, ...]:
        names = self.config.served_model_names
        if names:
            return names
        facts = self.client.facts
        return (facts.model,) if facts is not None else ("unknown",)

    def not_ready(self) -> str:
        """Why nothing can be admitted now, or ""."""
        if self.draining:
            return self.draining
        if self.client.dead is not None:
            return f"the engine has ended: {self.client.dead.message}"
        if self.client.facts is None:
            return "the model is still being loaded"
        return ""

    def admit(self, model: str | None) -> EngineFacts:
        """The engine's facts, if a request for `model` can be taken; raises RequestError (503, 404)."""
        why = self.not_ready()
        facts = self.client.facts
        if why or facts is None:
            raise RequestError(why, code="not_ready", status=503)
        if model is not None and model not in self.model_names:
            names = ", ".join(self.model_names)
            raise RequestError(
                f"model {model[:200]!r} is not served here; there is: {names}",
                param="model", code="model_not_found", status=404,
            )  # fmt: skip
        return facts

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
        self, text: str, add_special_tokens: bool, *, limit: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text; a long one is done in a thread so that other requests go on.

        One thread for all of them: they must not take the cores the engine computes with. A text that can't fit
        in `limit` tokens is refused by its length alone, because megabytes take seconds to tokenise.
        """
        tokenizer = self.need_tokenizer(param)
        if len(text) <= LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        if limit is not None:
            self.check_length(text, limit, param)
        return await self.in_thread(lambda: tokenizer.encode(text, add_special_tokens))

    def check_length(self, text: str, limit: int, param: str) -> None:
        """Raise RequestError for a text that is more than `limit` tokens whatever they are."""
        tokenizer = self.need_tokenizer(param)
        if self._longest_token is None:
            self._longest_token = max(map(len, tokenizer.backend.get_vocab()), default=1)
            if tokenizer.backend.normalizer is not None:
                self._longest_token *= NORMALIZER_SLACK
        least = len(text) // self._longest_token
        if least > limit:
            raise RequestError(
                f"{param} has {len(text)} characters, at least {least} tokens; this model's length is {limit} tokens",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a long piece of text work beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    def sample(self) -> None:
        """Remember how things are now."""
        self.history.keep(time.time(), self.client.stats, self.metrics, self.faults)

    # -- what is open

    def enter(self) -> None:
        """An HTTP request begins to be answered."""
        self.requests += 1
        self.idle.clear()

    def leave(self) -> None:
        self.requests -= 1
        if not self.requests:
            self.idle.set()

    def opened(self, generation: Generation) -> None:
        if not self.open:
            self.busy_since = time.monotonic()
        self.open[generation] = None

    def closed(self, generation: Generation) -> None:
        self.open.pop(generation, None)

    def drain(self, reason: str) -> None:
        """Admit nothing from now on, nor wait for what has come in half."""
        self.draining = self.draining or reason
        self.client.drain()
        for clock in self.reading:
            if not clock.expired():
                clock.reschedule(0)

    def close(self) -> None:
        """Let go of the thread."""
        self._texts.shutdown(wait=False, cancel_futures=True)

    def abort_all(self, message: str, status: int = 503, code: str = "aborted") -> int:
        """Answer everything open with an error; returns how many requests that were."""
        victims = list(self.open)
        for generation in victims:
            generation.fail(message, status, code)
        return len(victims)
