"""A whole engine, with its ranks in processes, over a small checkpoint: what `LLM` is, without texts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from planaria.build import build_loop
from planaria.config.options import EngineOptions
from planaria.config.resolve import resolve
from planaria.executor.recovery import is_replayed
from planaria.node import Memories
from planaria.types import FinishReason, SamplingParams
from planaria.wire import EngineResized, FromEngine, Output, Recovery, ResizeEngine, Submit
from tests.proc.servers import wait_until

LIMIT = 240.0  # seconds for what takes a few when nothing else runs


class Engine:
    """`ask` is what requests are made of: (prompt, tokens). parallel: fields of ParallelConfig that have no option.
    given: memory of somebody who lives longer."""

    def __init__(
        self, model: str, *, parallel: dict[str, Any] | None = None, given: Memories | None = None, **options: Any
    ) -> None:
        options = {
            "dtype": "float32", "device": "cpu", "quantization": "none", "max_model_len": 256, "max_num_seqs": 4,
            "max_num_batched_tokens": 32, "kv_cache_memory": "8MiB", "distributed_executor_backend": "mp", **options,
        }  # fmt: skip
        config = resolve(EngineOptions(model=model, **options))
        config = msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, **(parallel or {})))
        self.config = config
        self.recoveries: list[Recovery] = []
        self.resized: list[EngineResized] = []
        self.tokens: dict[str, list[int]] = {}
        self._open: set[str] = set()
        self._count = 0
        self.loop = build_loop(config, self._hear, given=given)
        try:
            self.facts = self.loop.start()
        except BaseException:
            self.loop.close()
            raise

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Output():
                for delta in message.deltas:
                    assert delta.error is None, delta.error
                    assert delta.index == len(self.tokens[delta.request_id])
                    self.tokens[delta.request_id] += delta.tokens
                    self._count += len(delta.tokens)
                    if delta.finish is not None:
                        assert delta.finish == FinishReason.LENGTH
                        self._open.remove(delta.request_id)
            case Recovery() if message.seconds and not is_replayed(message):
                self.recoveries.append(message)
            case EngineResized():
                self.resized.append(message)
            case _:
                pass

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.loop.gang.members]

    def run(
        self, asked: list[tuple[list[int], int]], at: int = 0, harm: Callable[[], Any] | None = None
    ) -> list[list[int]]:
        """Greedy tokens of each; `harm` is called once, when more than `at` have come."""
        self._count = 0
        self.tokens = {f"r{i}": [] for i in range(len(asked))}
        self._open = set(self.tokens)
        params = SamplingParams(temperature=0, ignore_eos=True)
        for i, (prompt, count) in enumerate(asked):
            self.loop.handle(Submit(f"r{i}", prompt, params, i, count))
        end = time.monotonic() + LIMIT
        while self._open:
            assert time.monotonic() < end, f"{len(self._open)} requests don't end"
            if harm is not None and self._count > at:
                harm()
                harm = None
            if not self.loop.step():
                self.loop.check()
        return list(self.tokens.values())

    def finish(self) -> None:
        """What is still being done with no request."""
        end = time.monotonic() + LIMIT
        while self.loop.busy():
            assert time.monotonic() < end, "it stays busy"
            self.loop.step()

    def kill(self, rank: int, how: int) -> None:
        os.kill(self.pids[rank], how)

    def close(self) -> None:
        self.loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def texts(vocab: int, sizes: list[tuple[int, int]]) -> list[tuple[list[int], int]]:
    """Prompts of these lengths, with so many tokens to come."""
    return [
        ([(7 + 131 * i + 17 * j * j) % vocab for j in range(length)], count) for i, (length, count) in enumerate(sizes)
    ]


def ask_for(loop: Any, wish: ResizeEngine) -> None:
    """Another layout, with ranks that are to come ready by then: so the change falls where it is asked for."""
    loop.handle(wish)
    if (arrival := loop.layout_change.arrival) is not None:
        wait_until("the ranks that are to come are ready", lambda: loop.gang.came(arrival.layout))
        arrival.look_at = 0.0
