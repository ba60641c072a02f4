"""Requests that stream tokens, all at once, and what became of each."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2

STREAMS, TOKENS = 8, 60
LENGTHS = (90, 5, 120, 33, 60, 17, 104, 48)  # of prompts: some take several steps
VOCABULARY = 131

T = TypeVar("T")


@dataclass
class Stream:
    """Tokens by index, as they came. `finish`: "" if it never came; `error`: why not."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # time.time() of each piece
    finish: str = ""
    error: str = ""


def body(i: int, tokens: int, other: int) -> dict[str, Any]:
    """Half of them greedy, half not. other: a number for other prompts, which no prefix cache knows."""
    prompt = [(7 + 13 * i + 17 * j * j + 3 * other) % VOCABULARY for j in range(LENGTHS[i % len(LENGTHS)])]
    return {
        "prompt": prompt, "max_tokens": tokens - i % 5, "temperature": 0 if i % 2 else 0.9, "seed": i, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


class Load:
    """All streams against `url`, from a thread of its own (within the network namespace `space`, if one is named)."""

    def __init__(self, url: str, *, tokens: int = TOKENS, other: int = 0, space: str = "") -> None:
        self.url, self.count, self.other, self.space = url, tokens, other, space
        self.streams = [Stream() for _ in range(STREAMS)]
        self.began = threading.Event()  # a token has come
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, limit: float) -> bool:
        """Until all have ended. False: they didn't, which they then say as their error."""
        self._thread.join(limit)
        if not self._thread.is_alive():
            return True
        for stream in self.streams:
            stream.error = stream.error or ("" if stream.finish else f"nothing more came for {limit:g} s")
        return False

    def pieces(self) -> list[float]:
        return sorted(at for stream in self.streams for at in list(stream.times))

    def next_token(self, struck: float) -> float | None:
        """Seconds from a blow to the end of the longest silence after it."""
        after = [struck, *(at for at in self.pieces() if at > struck)]
        if len(after) == 1:
            return None
        return max((b - a, b) for a, b in itertools.pairwise(after))[1] - struck

    def _run(self) -> None:
        if self.space:
            enter_network(self.space)
        asyncio.run(self._all())

    async def _all(self) -> None:
        async with httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None)) as client:
            await asyncio.gather(*(self._one(client, i) for i in range(STREAMS)))

    async def _one(self, client: httpx2.AsyncClient, i: int) -> None:
        stream, asked = self.streams[i], body(i, self.count, self.other)
        try:
            async with client.stream("POST", self.url + "/v1/completions", json=asked) as response:
                if response.status_code != 200:
                    stream.error = (await response.aread()).decode()
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(stream, json.loads(line[6:]))
        except httpx2.HTTPError as e:
            stream.error = f"{type(e).__name__}: {e}"
        if not stream.finish and not stream.error:
            stream.error = "the answer ended without a finish reason"

    def _take(self, stream: Stream, event: dict[str, Any]) -> None:
        if "error" in event:
            stream.error = event["error"]["message"]
            return
        choice = event["choices"][0]
        if choice["token_ids"]:
            stream.tokens += choice["token_ids"]
            stream.times.append(time.time())
            self.began.set()
        stream.finish = choice["finish_reason"] or stream.finish


def wrong(load: Load, expected: list[Stream]) -> int:
    """Tokens that were lost, came twice or are others: of a request that ended by itself all, else those that came.
    expected: of a run with as many tokens, or more."""
    total = 0
    for i, (stream, whole) in enumerate(zip(load.streams, expected, strict=True)):
        should = whole.tokens[: body(i, load.count, load.other)["max_tokens"]]
        total += sum(a != b for a, b in zip(stream.tokens, should, strict=False))
        total += max(0, len(stream.tokens) - len(should))
        total += max(0, len(should) - len(stream.tokens)) if stream.finish else 0
    return total


def enter_network(space: str) -> None:
    """The calling thread goes into a network namespace that `ip netns` made."""
    fd = os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace {space}")
    finally:
        os.close(fd)


def within(space: str, call: Callable[[], T]) -> T:
    """`call()` in a thread in that namespace; here, if none is named."""
    if not space:
        return call()
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            enter_network(space)
            found.append(call())
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    if failed:
        raise failed[0]
    return found[0]
