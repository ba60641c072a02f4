"""The part *resize* of benchmarks.experts: an expert-parallel engine gets a second lane and gives it back under load.

A server of a random Qwen3-MoE with one lane streams to 8 clients, each request followed by the next, while it is
scaled to two lanes and back, so often. Said of each resize: its seconds and parts, the longest time between two tokens
of any stream, what travelled between ranks and what had to, and how many experts were read from the checkpoint. Each
stream's tokens are held against those of a server that is left alone.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import report
from benchmarks.deployment import Server, patient_client
from benchmarks.experts_tokens import checkpoint

SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_experts": 16, "moe_intermediate_size": 256, "head_dim": 64,
    "norm_topk_prob": True, "num_experts_per_tok": 4,
}  # fmt: skip
SERVED = [
    "--enable-expert-parallel", "--distributed-executor-backend", "mp", "--dtype", "float32", "--device", "cpu",
    "--max-model-len", "256", "--kv-cache-memory", "64MiB", "--skip-tokenizer-init",
]  # fmt: skip
STREAMS, PROMPTS, PROMPT, TOKENS = 8, 16, 64, 96
REST = 4.0  # seconds between two resizes


class Streams:
    """Requests without end, so many at a time, until `stop`."""

    def __init__(self, server: Server, prompts: list[list[int]], expected: list[list[int]]) -> None:
        self.server, self.prompts, self.expected = server, prompts, expected
        self.gaps: list[tuple[float, float]] = []  # when a token came, and seconds since the one before
        self.failed: list[str] = []
        self.ended = self.same = 0
        self.stop = False

    async def run(self) -> None:
        async with patient_client() as client:
            await asyncio.gather(*(self._one_after_the_other(client, i) for i in range(STREAMS)))

    async def _one_after_the_other(self, client: httpx2.AsyncClient, number: int) -> None:
        while not self.stop:
            which, number = number % PROMPTS, number + STREAMS + 1
            try:
                found = await self.answer(client, self.prompts[which])
                self.same += found == self.expected[which]
            except (RuntimeError, httpx2.HTTPError) as e:
                self.failed.append(str(e))
            self.ended += 1

    async def answer(self, client: httpx2.AsyncClient, prompt: list[int]) -> list[int]:
        found: list[int] = []
        last = 0.0
        async for choice in self.server.stream(client, self.server.body(prompt, TOKENS)):
            now = time.monotonic()
            if last:
                self.gaps.append((now, now - last))
            last = now
            found += choice["token_ids"]
        return found

    def longest(self, begin: float, end: float) -> float:
        return max((gap for at, gap in self.gaps if begin <= at <= end), default=0.0)


def said(health: dict[str, Any]) -> dict[str, Any]:
    """What a server says of the last change of its layout: seconds by part, MiB that moved and that had to, experts
    that were read from the checkpoint."""
    change = health.get("last_layout_change") or {"seconds": {}, "experts": None}
    seconds = change["seconds"]
    travel = change["experts"] or {"moved": 0, "needed": 0, "read": 0}
    return {
        "parts": ", ".join(f"{part} {value:.2f}" for part, value in seconds.items() if part != "total"),
        "moved": travel["moved"] / report.MIB, "needed": travel["needed"] / report.MIB, "read": travel["read"],
    }  # fmt: skip


async def scaled(server: Server, streams: Streams, rounds: int) -> dict[str, Any]:
    async with patient_client() as client:
        streams.expected = [await streams.answer(client, prompt) for prompt in streams.prompts]
        streams.gaps.clear()
        running = asyncio.create_task(streams.run())
        await asyncio.sleep(REST)
        begin = time.monotonic()
        await asyncio.sleep(2 * REST)
        quiet = streams.longest(begin, time.monotonic())
        steps = []
        for size in (2, 1) * rounds:
            begin = time.monotonic()
            answer = await client.post(server.url + "/scale_elastic_ep", json={"new_data_parallel_size": size})
            took = time.monotonic() - begin
            await asyncio.sleep(REST)
            gap = streams.longest(begin, time.monotonic())
            error = "" if answer.status_code == 200 else answer.text
            steps.append({"size": size, "seconds": took, "gap": gap, "error": error, **said(server.health())})
            print(steps[-1], file=sys.stderr, flush=True)
        streams.stop = True
        await running
    return {"quiet": quiet, "steps": steps, "ended": streams.ended, "same": streams.same, "failed": streams.failed}


def resize_part(rounds: int = 2) -> tuple[dict[str, Any], list[report.Table]]:
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 131) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder), "qwen3_moe", SHAPE)
        with Server(folder, *SERVED) as server:
            result = asyncio.run(scaled(server, Streams(server, prompts, []), rounds))
    rows = [["no resize", "-", "-", f"{result['quiet']:.2f}", "-", "-", "-"]]
    for step in result["steps"]:
        name = f"{3 - step['size']} to {step['size']}"
        rows.append([
            name, f"{step['seconds']:.2f}", step["error"] or step["parts"], f"{step['gap']:.2f}",
            f"{step['moved']:.1f}", f"{step['needed']:.1f}", str(step["read"]),
        ])  # fmt: skip
    title = (
        f"Resizes of an expert-parallel engine while {STREAMS} streams run: {result['ended']} ended, "
        f"{len(result['failed'])} failed, {result['same']} with the tokens of an engine that is left alone"
    )
    head = ["lanes", "s", "of that", "longest gap, s", "MiB moved", "MiB that had to", "experts read"]
    return result, [report.Table(title, head, rows)]
