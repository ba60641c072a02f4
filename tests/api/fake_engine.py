"""A deterministic engine client for server tests: no model, every rule of `planaria.server.dispatcher.Dispatcher`.

Tokens are a hash of prompt, seed (unless greedy) and position, drawn from a palette that has multi-byte characters
split over tokens, special tokens and the end-of-sequence token. One step gives every open sequence one token.
With `gate` cleared no step is taken until it is set, or `steps(n)` lets n of them through.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np

from planaria.core.resize import Refused, Resize
from planaria.server.stream import Stream
from planaria.types import Delta, FinishReason, TokenLogprobs
from planaria.wire import (
    Dead,
    EngineFacts,
    EngineResized,
    EngineState,
    EngineStats,
    ExpertLoads,
    LayerLoad,
    ProcessInfo,
    Slept,
    Submit,
    WeightsUpdated,
)

TEXTS = (
    " the", " quick", " brown", " fox", ".", ",", "\n", " jumps", " STOP", " a", "é", "日本", "🙂", "👩‍👩‍👧", " 42",
    '"', "\\", "<b>", "STOP now", " end.", "\t", "ünïcödé", " Paris",
)  # fmt: skip

WIDTH = 8  # of vectors


def facts(**changes) -> EngineFacts:
    base = EngineFacts(
        model="smollm2", max_model_len=512, vocab_size=49152, num_parameters=134515008, dtype="float32",
        quantization="none", device="cpu", threads=1, num_blocks=1024, block_size=16, weight_bytes=1, executor="uni",
        link="direct", layout="tp1", ranks=[1], seconds={},
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def palette(tokenizer, special=(1,)) -> list[int]:
    ids = [token for text in TEXTS for token in tokenizer.encode(text, add_special_tokens=False)]
    return ids + list(special)


def vector(prompt: list[int], width: int = WIDTH) -> np.ndarray:
    """What the fake engine answers a text with: of so many numbers."""
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=2 * width).digest()
    return (np.frombuffer(digest, np.uint16).astype(np.float32) - 32768) / 4096


class Running:
    def __init__(self, message: Submit, sink: Callable[[Delta], None], cached: int) -> None:
        self.message, self.sink, self.cached = message, sink, cached
        self.output = list(message.output)


class FakeEngine:
    def __init__(self, tokenizer, *, is_ready: bool = True, delay: float = 0.0, **fact_changes) -> None:
        self._facts = facts(**fact_changes)
        self.facts = self._facts if is_ready else None
        self.warm = True
        self.stats = EngineStats()
        self.last_progress = time.monotonic()
        self.dead: Dead | None = None
        self.on_recovery = lambda message: None
        self.control = self.resizer = self
        self.loras = None
        self.resizes: list[Resize] = []
        self.asleep = self.busy = False
        self.hand_overs = SimpleNamespace(both=False, threshold=0)
        self.updating = asyncio.Lock()
        self.palette = palette(tokenizer) if tokenizer is not None else list(range(100, 200))
        self.delay = delay
        self.eos_every = 23  # on average
        self.weights: Callable[[int], int] = lambda index: 0  # of a token of the output, which draw it
        self.script: dict[tuple[int, ...], list[int]] = {}  # prompt -> tokens to give, the last again and again
        self.open: dict[str, Running] = {}
        self.submitted: list[Submit] = []
        self.cancelled: list[str] = []
        self.seen: set[tuple[int, ...]] = set()
        self.knows_vectors = True
        self.fail_with: str | None = None  # error of every sequence's next delta
        self.gate = asyncio.Event()
        self.gate.set()
        self._work = asyncio.Event()
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()
        if is_ready:
            self._ready.set()
        self._task: asyncio.Task | None = None

    # -- the protocol

    async def ready(self) -> EngineFacts:
        await self._ready.wait()
        if self.dead is not None:
            from planaria.errors import EngineDead

            raise EngineDead(self.dead.message)
        return self._facts

    def submit(self, stream: Stream) -> None:
        message = stream.resubmit()

        def sink(delta: Delta) -> None:
            piece = stream.take(delta)
            if piece is not None:
                if piece.cancel:
                    self.cancel(message.id)
                stream.tell(piece)

        assert message.id not in self.open and message.prompt and message.max_tokens >= 1
        self.submitted.append(message)
        if self.dead is not None:
            sink(Delta(message.id, 0, [], FinishReason.ERROR, error=self.dead.message))
            return
        key = tuple(message.prompt)
        cached = (len(key) - 1) // 16 * 16 if key in self.seen else 0
        self.open[message.id] = Running(message, sink, cached)
        self._count()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._work.set()
        self._notify()

    def cancel(self, request_id: str) -> None:
        if self.open.pop(request_id, None) is not None:
            self.cancelled.append(request_id)
            self._count()
            self._notify()

    def engines(self) -> list[EngineState]:
        state = "ended" if self.dead is not None else "ready" if self.facts is not None else "loading"
        return [EngineState(0, state, 11, "tp1", [12], self.stats, len(self.open), 0, False)]

    def drain(self) -> None:
        pass

    async def resize(self, id: str, size: int, drain_timeout: float, prefill: int | None = None) -> Resize:
        self.asked = (id, size, drain_timeout)
        if size > 4:
            raise Refused("4 fit", busy=size == 9)
        return Resize(id, 1, size, [], [], "rolled back" if size == 4 else "committed", "no room" if size == 4 else "")

    async def resize_engines(self, tp: int, pp: int) -> list[EngineResized]:
        if tp == 9:
            raise Refused("another change is under way", busy=True)
        return [EngineResized("", f"tp={tp} pp={pp}", f"{tp} ranks don't fit" if tp > 4 else "", 0.5)]

    @property
    def members(self) -> dict[int, SimpleNamespace]:
        return {0: SimpleNamespace(asleep=1 if self.asleep else None, state="asleep" if self.asleep else "ready")}

    async def sleep(self, level: int | None) -> dict[int, Slept]:
        error = "a change of the layout is on its way" if level == 2 else ""
        self.asleep = level is not None and not error
        return {0: Slept("", level, error)}

    async def update_weights(self, path: str, handle: str = "", *, keep_kv: bool = False) -> dict[int, WeightsUpdated]:
        error = "those are of another model" if len(path + handle) % 2 else ""
        return {0: WeightsUpdated("", 1, error)}

    async def report(self) -> list[ProcessInfo]:
        return [
            ProcessInfo("engine", None, {}, 11, "here", 0, "ready", 1 << 20),
            ProcessInfo("worker", 0, {"tp": 0, "pp": 0}, 12, "here", 0, "idle", 2 << 20),
        ]

    async def experts(self) -> dict[int, ExpertLoads]:
        if self.stats.experts is None:
            return {}
        layer = LayerLoad(1, [6, 2, 0, 0], [0, 1, 2, 3], [8.0, 0.0], 0.5)
        return {0: ExpertLoads(steps=3, num_ranks=2, stats=self.stats.experts, bytes_needed=64, layers=[layer])}

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    # -- for tests

    def become_ready(self) -> None:
        self.facts = self._facts
        self._ready.set()

    def die(self, message: str = "the worker was killed", *, silently: bool = False) -> None:
        self.dead = Dead("error", message)
        self._ready.set()
        victims = list(self.open.values())
        self.open.clear()
        for r in victims:
            if not silently:
                r.sink(Delta(r.message.id, 0, [], FinishReason.ERROR, error=message))

    async def until(self, condition) -> None:
        """Wait until `condition()`; it is looked at after each submit, cancel and step."""
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def step(self) -> None:
        """One step, now."""
        for r in list(self.open.values()):
            if r.message.id not in self.open:
                continue
            delta = self._advance(r)
            if delta.finish is not None:
                self.open.pop(r.message.id, None)
            r.sink(delta)
        self.last_progress = time.monotonic()
        self._count(1)
        self._notify()

    # -- inside

    def _notify(self) -> None:
        self._changed.set()

    def _count(self, steps: int = 0) -> None:
        self.stats = EngineStats(
            step=self.stats.step + steps, running=len(self.open), kv_usage=min(len(self.open) / 100, 1.0),
            prefix_queries=sum(len(s.prompt) for s in self.submitted), prefix_hits=16, preemptions=3,
        )  # fmt: skip

    async def _run(self) -> None:
        while True:
            if not self.open:
                self._work.clear()
                await self._work.wait()
            await self.gate.wait()
            await asyncio.sleep(self.delay)
            if self.gate.is_set():
                self.step()

    def draw(self, m: Submit, position: int) -> int:
        scripted = self.script.get(tuple(m.prompt))
        if scripted is not None:
            return scripted[min(position, len(scripted) - 1)]
        key = f"{m.prompt}/{0 if m.params.greedy else m.seed}/{position}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        if m.eos_ids and self.eos_every and number % self.eos_every == 0 and position >= m.params.min_tokens:
            return m.eos_ids[0]
        return self.palette[(number >> 20) % len(self.palette)]

    def _logprobs(self, token: int, at: int, k: int) -> TokenLogprobs:
        top = tuple((self.palette[(at + j) % len(self.palette)], -0.25 * (j + 1)) for j in range(k))
        return TokenLogprobs(token, -0.125 * (at % 7 + 1) if at % 5 else float("-inf"), at % 9 + 1, top)

    def _advance(self, r: Running) -> Delta:
        m = r.message
        if self.fail_with is not None:
            return Delta(m.id, len(r.output), [], FinishReason.ERROR, error=self.fail_with)
        if m.params.pooling and self.knows_vectors:
            return Delta(m.id, 0, [], FinishReason.STOP, num_cached=r.cached, pooled=vector(m.prompt).tobytes())
        index = len(r.output)
        token = self.draw(m, index)
        delta = Delta(m.id, index, [token], weights=self.weights(index))
        if m.params.logprobs is not None:
            delta.logprobs = [self._logprobs(token, index, m.params.logprobs)]
        if index == 0:
            delta.num_cached = r.cached
            if m.params.prompt_logprobs is not None:
                k = m.params.prompt_logprobs
                delta.prompt_logprobs = [None, *(self._logprobs(t, i, k) for i, t in enumerate(m.prompt[1:], 1))]
        r.output.append(token)
        self.seen.add(tuple(m.prompt))
        if len(r.output) > m.params.min_tokens and (token in m.eos_ids or token in m.params.stop_token_ids):
            delta.finish, delta.stop_reason = FinishReason.STOP, token
        elif len(r.output) >= m.max_tokens:
            delta.finish = FinishReason.LENGTH
        return delta
