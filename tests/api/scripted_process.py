"""A scripted engine process under the shipping keeper: what it is sent is kept, what it says is up to the test."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from planaria.config.options import CacheConfig, DeviceConfig, FaultConfig, ParallelConfig
from planaria.server.engine_client import Ended
from planaria.server.keeper import EngineKeeper
from planaria.server.stream import Piece, Stream
from planaria.topology import Layout
from planaria.types import Delta, FinishReason, SamplingParams
from planaria.wire import Cancel, Dead, EngineResized, EngineStats, Output, Recovery, ResizeEngine, Shutdown, Submit
from tests.api.fake_engine import facts


class Config(msgspec.Struct):
    """The part of an EngineConfig that a keeper and a fleet read."""

    faults: FaultConfig
    parallel: ParallelConfig
    cache: CacheConfig = CacheConfig()
    device: DeviceConfig = DeviceConfig(device="cpu", dtype="float32", quantization="none", threads=1)
    lora: None = None
    checkpoint: dict[str, Any] = {}
    weights_number: int = 0

    def with_layout(self, layout: Layout) -> Config:
        parallel = msgspec.structs.replace(
            self.parallel, tensor_parallel_size=layout.tp, pipeline_parallel_size=layout.pp
        )
        return msgspec.structs.replace(self, parallel=parallel)

    @classmethod
    def of(cls, nnodes: int = 1, data_parallel_size: int = 1, **faults: Any) -> Config:
        return cls(
            FaultConfig(**faults),
            ParallelConfig(distributed_executor_backend="mp", nnodes=nnodes, data_parallel_size=data_parallel_size),
        )


class ScriptedProcess:
    address, keys = "", None
    shares_memory = False
    pid = 4_000_000  # above every pid there can be

    def __init__(self, config: Any, hear: Any) -> None:
        self.hear, self.silent, self.sent, self.killed, self.step = hear, 0.0, [], False, 0
        self.config = config
        self.index = config.parallel.data_parallel_index
        self.tokens: dict[str, int] = {}  # of each sequence it has: the next index
        self._end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        pass

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Submit):
            assert message.id not in self.tokens
            self.tokens[message.id] = len(message.output)
        elif isinstance(message, ResizeEngine) and message.tp <= 4:  # of more nothing is heard
            error = "" if message.tp < 4 else "4 don't fit"
            self.hear(EngineResized(message.id, f"tp={message.tp} pp={message.pp}", error, 0.5))
        elif isinstance(message, Cancel):
            asyncio.get_running_loop().call_soon(self._cancel, message.id)

    def _cancel(self, id: str) -> None:
        if id in self.tokens and not self._end.done():
            self.say(Delta(id, self.tokens.pop(id), [], FinishReason.ABORT))

    def connected(self) -> None:
        pass

    def end(self, *, followed: bool = False) -> None:
        self.send(Shutdown(followed))
        self.die("ended")

    def kill(self) -> None:
        self.killed = True
        self.die("was killed by signal 9")

    async def ended(self, most_silent: Any) -> Ended:
        return await self._end

    # -- for tests

    def become_ready(self) -> None:
        self.hear(facts())

    def die(self, how: str = "was killed by signal 9", said: Dead | None = None) -> None:
        if not self._end.done():
            self._end.set_result(Ended(how, said))

    def say(self, *deltas: Delta) -> None:
        self.step += 1
        self.hear(Output(list(deltas), EngineStats(step=self.step, generation_tokens=self.step)))

    def give(self, *ids: str, finish: FinishReason | None = None) -> None:
        """One token to each: 100 + its index."""
        deltas = []
        for id in ids:
            at = self.tokens[id]
            self.tokens[id] += 1
            deltas.append(Delta(id, at, [100 + at], finish))
            if finish is not None:
                del self.tokens[id]
        self.say(*deltas)

    @property
    def has(self) -> list[str]:
        return list(self.tokens)

    @property
    def submitted(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]


class Client:
    """A keeper of scripted processes, and what its sinks were told."""

    def __init__(self, **faults: Any) -> None:
        self.processes: list[ScriptedProcess] = []
        self.keeper = EngineKeeper(Config.of(**faults), make=self._make)  # type: ignore[arg-type]
        self.heard: list[Recovery] = []
        self.engine = self.keeper.engine
        self.keeper.on_recovery = self.heard.append
        self.told: dict[str, list[Piece]] = {}

    def _make(self, config: Any, hear: Any) -> Any:
        self.processes.append(ScriptedProcess(config, hear))
        return self.processes[-1]

    @property
    def now(self) -> ScriptedProcess:
        return self.processes[-1]

    async def start(self) -> Client:
        await self.keeper.start()
        self.now.become_ready()
        return self

    def submit(self, *ids: str) -> None:
        for id in ids:
            told = self.told[id] = []
            submit = Submit(id, [1, 2, 3], SamplingParams(), 7, 50)
            self.engine.submit(Stream(submit, lambda stream, piece, told=told: told.append(piece)))

    async def fall(self, how: str = "was killed by signal 9", said: Dead | None = None) -> None:
        """The process of now ends; until another is there, or it is clear that there will be none."""
        before = len(self.processes)
        self.now.die(how, said)
        async with asyncio.timeout(60):
            while len(self.processes) == before and self.engine.dead is None:
                await asyncio.sleep(0)

    async def replace(self) -> None:
        await self.fall()
        self.now.become_ready()

    def tokens(self, id: str) -> list[int]:
        return [token for piece in self.told[id] for token in piece.tokens]

    def error(self, id: str) -> str | None:
        return self.told[id][-1].error if self.told[id] else None
