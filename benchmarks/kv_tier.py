"""What KV blocks outside of the cache are worth: a prompt's first token when its prefix comes from disk after the end
of all processes, or from the node's memory after others took its place, against computing it and from the cache; and
how soon responses that run in the background go on.

    python -m benchmarks.kv_tier [--model smollm2] [--cases prefix,offload,servers,background] [--tokens 4096]
        [--rounds 3] [--folder DIR] [--cold]

prefix: each round has a prompt of its own. A server with an empty folder computes the prompt, gives it from memory when
it is asked again, and is ended with SIGKILL, all its processes with it, when /metrics says that its blocks are on disk.
Another one is started, and is asked for a short prompt, which warms it up, then for the same long one. What the page
cache holds of the folder stays there, as after any restart of a process; `--cold` drops it from there first.

offload: a server whose cache has room for one such prompt and `--kv-offloading-size` computes one, then another of that
length, then is asked for the first again, and once more.

servers: one computes a prompt of 1,024 tokens for another, which fetches its KV over TCP (`--kv-transfer-config`). The
hand-over is what its first token takes longer than when it is asked once more.

background: a server with a journal has four responses of about 1,024 tokens in the background. When each has 32 tokens
more, everything gets SIGKILL. The time is from the next start of a process until each response has another token than
the journal has; once with the folder, and once without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import proc, report
from benchmarks.deployment import Server, patient_client

OUT = Path(__file__).resolve().parent / "out"
VOCAB, SHORT, TOKENS = 40_000, 64, 4
WARM = 1 << 20  # seed of what is asked first; seeds count without their sign
GOAL, OFFLOAD_GOAL = 8.0, 20.0
HANDED, HAND_OVER_GOAL = 1024, 0.15
STREAMS, GO_ON = 4, 3.0
WORDS = ("house", "river", "green", "stone", "seven", "light", "under", "bread", "cloud", "table", "north", "music")


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, VOCAB) for _ in range(tokens)]


async def first_token(server: Server, ids: list[int]) -> tuple[float, list[int]]:
    """Seconds until it came, and all tokens."""
    async with patient_client() as client:
        began, first, tokens = time.perf_counter(), 0.0, []
        async for choice in server.stream(client, server.body(ids, TOKENS)):
            first = first or time.perf_counter() - began
            tokens += choice["token_ids"]
    return first, tokens


def metric(server: Server, name: str) -> float:
    lines = server.http.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def drop_cached(folder: str) -> None:
    """Have the system read these files from the disk again."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def one_round(model: str, tokens: int, number: int, folder: str, *, cold: bool) -> dict[str, float]:
    arguments = [
        "--kv-tier", folder, "--max-model-len", str(tokens + 64), "--max-num-seqs", "4", "--log-level", "warning",
    ]  # fmt: skip
    ids, blocks, written = prompt(number, tokens), (tokens - 1) // 16, (tokens + TOKENS - 1) // 16
    with Server(model, *arguments) as server:
        asyncio.run(first_token(server, prompt(WARM, SHORT)))
        computed, expected = asyncio.run(first_token(server, ids))
        memory, again = asyncio.run(first_token(server, ids))
        waited("blocks are on disk", lambda: metric(server, "planaria:kv_tier_saved_blocks_total") >= written)
        for pid in reversed(proc.tree(server.process.pid)):
            proc.kill(pid)
    if cold:
        drop_cached(folder)
    with Server(model, *arguments) as server:
        asyncio.run(first_token(server, prompt(WARM, SHORT)))
        disk, back = asyncio.run(first_token(server, ids))
        hits = metric(server, "planaria:kv_tier_hits_total")
    if not expected == again == back or hits < 16 * blocks:
        raise RuntimeError(f"{expected}, {again} and {back} with {hits:.0f} tokens from disk, of {16 * blocks}")
    return {"computed": computed, "disk": disk, "memory": memory}


def offloaded(model: str, tokens: int, number: int) -> dict[str, float]:
    arguments = [
        "--kv-offloading-size", "1", "--kv-cache-memory", "110MiB", "--max-model-len", str(tokens + 64),
        "--max-num-seqs", "4", "--log-level", "warning",
    ]  # fmt: skip
    ids, blocks, written = prompt(number, tokens), (tokens - 1) // 16, (tokens + TOKENS - 1) // 16
    with Server(model, *arguments) as server:
        asyncio.run(first_token(server, prompt(WARM, SHORT)))
        found = []
        for count, each in enumerate((number, 1000 + number, 2000 + number), 1):
            found.append(asyncio.run(first_token(server, prompt(each, tokens))))
            waited(
                "blocks are kept",
                lambda: metric(server, "planaria:kv_tier_saved_blocks_total") >= count * written,  # noqa: B023
            )
        computed, expected = found[0]
        before = metric(server, "planaria:kv_tier_hits_total")
        host, back = asyncio.run(first_token(server, ids))
        hits = metric(server, "planaria:kv_tier_hits_total") - before
        memory, again = asyncio.run(first_token(server, ids))
    if not expected == again == back or hits < 16 * blocks:
        raise RuntimeError(f"{expected}, {again} and {back} with {hits:.0f} tokens from memory, of {16 * blocks}")
    return {"computed": computed, "host": host, "memory": memory}


def handed_over(model: str, number: int) -> dict[str, float]:
    def server(role: str, port: int) -> Server:
        said = {"kv_connector": "tcp", "kv_role": role, "kv_port": port}
        arguments = ["--kv-transfer-config", json.dumps(said), "--max-model-len", "2048", "--max-num-seqs", "4"]
        return Server(model, *arguments, "--threads", "1", "--log-level", "warning")

    def ask(server: Server, ids: list[int], **more: Any) -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        answer = server.http.post(server.url + "/v1/completions", json=server.body(ids, 1) | {"stream": False} | more)
        return time.perf_counter() - began, answer.raise_for_status().json()

    ids, params = prompt(number, HANDED), {"do_remote_decode": True}
    with server("kv_producer", 24579) as one, server("kv_consumer", 24679) as other:
        for each in (one, other):
            ask(each, prompt(WARM, SHORT))
        prefill, answer = ask(one, ids, kv_transfer_params=params)
        first, found = ask(other, ids, kv_transfer_params=answer["kv_transfer_params"])
        again, _ = ask(other, ids)
    if found["usage"]["prompt_tokens_details"]["cached_tokens"] < HANDED - 16:
        raise RuntimeError(f"not all has come: {found['usage']}")
    return {"prefill": prefill, "hand-over": first - again}


def handed_over_table(rounds: list[dict[str, float]]) -> report.Table:
    def told(name: str) -> str:
        found = [each[name] for each in rounds]
        return f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f})"

    part = statistics.median(each["hand-over"] / each["prefill"] for each in rounds)
    return report.Table(
        f"A prompt of {HANDED} tokens goes from one server to another over TCP, seconds",
        ["prefill", "hand-over", "of the prefill", "goal"],
        [[told("prefill"), told("hand-over"), f"{part:.1%}", f"{HAND_OVER_GOAL:.0%}"]],
    )


def waited(what: str, done: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"not within 120 s: {what}")
        time.sleep(0.05)


def going_on(model: str, number: int, folder: str | None, journal: str) -> float:
    """Seconds from a server's start until all that ran in the background has another token."""
    arguments = [
        "--journal", journal, "--max-model-len", "2048", "--max-num-seqs", "8", "--log-level", "warning",
        *(["--kv-tier", folder] if folder is not None else []),
    ]  # fmt: skip
    draw = random.Random(f"background {number}")
    with Server(model, *arguments) as server:
        ids = []
        for _ in range(STREAMS):
            words = " ".join(draw.choice(WORDS) for _ in range(1000))
            body = {"model": model, "input": words, "background": True, "max_output_tokens": 512, "ignore_eos": True}
            ids.append(server.http.post(server.url + "/v1/responses", json=body).json()["id"])
        waited("each has tokens", lambda: metric(server, "vllm:generation_tokens_total") >= 32 * STREAMS)
        if folder is not None:
            waited("blocks are on disk", lambda: metric(server, "planaria:kv_tier_saved_blocks_total") >= 64 * STREAMS)
        for pid in reversed(proc.tree(server.process.pid)):
            proc.kill(pid)
    began = time.perf_counter()
    with Server(model, *arguments) as server:
        waited("all go on", lambda: metric(server, "vllm:time_to_first_token_seconds_count") >= STREAMS)
        seconds = time.perf_counter() - began
        found = [server.http.get(f"{server.url}/v1/responses/{id}").json()["status"] for id in ids]
        if found != ["in_progress"] * STREAMS:
            raise RuntimeError(f"they are {found}")
        return seconds


def background_table(with_tier: list[float], without: list[float]) -> report.Table:
    def told(found: list[float]) -> str:
        return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"

    return report.Table(
        f"{STREAMS} responses of 1,000 words go on after the end of everything, seconds from the start of a process",
        ["", "all have another token", "goal"],
        [["with --kv-tier", told(with_tier), f"{GO_ON:g}"], ["without", told(without), ""]],
    )


def table(rounds: list[dict[str, float]], tokens: int, whence: str, said: str, goal: float) -> report.Table:
    def told(name: str) -> str:
        found = [each[name] for each in rounds]
        return f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f})"

    def faster(name: str) -> str:
        return f"{statistics.median(each['computed'] / each[name] for each in rounds):.1f}x"

    return report.Table(
        f"First token of a prompt of {tokens} tokens, seconds",
        ["its prefix", "first token", "faster than computing", "goal"],
        [
            ["is computed", told("computed"), "", ""],
            [said, told(whence), faster(whence), f"{goal:g}x"],
            ["is in the cache", told("memory"), faster("memory"), ""],
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", default="prefix,offload,servers,background")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk that is meant; default: a temporary one")
    parser.add_argument("--cold", action="store_true", help="files are read from the disk, not from the page cache")
    options = parser.parse_args()
    result: dict[str, Any] = {"tokens": options.tokens, "cold": options.cold}
    tables, cases = [], options.cases.split(",")
    if "prefix" in cases:
        rounds = []
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                rounds.append(one_round(options.model, options.tokens, number, folder, cold=options.cold))
        result["rounds"] = rounds
        tables.append(table(rounds, options.tokens, "disk", "is on disk, after a restart", GOAL))
    if "offload" in cases:
        result["offload"] = rounds = [offloaded(options.model, options.tokens, n) for n in range(options.rounds)]
        tables.append(table(rounds, options.tokens, "host", "is in memory of the node", OFFLOAD_GOAL))
    if "servers" in cases:
        result["servers"] = rounds = [handed_over(options.model, n) for n in range(options.rounds)]
        tables.append(handed_over_table(rounds))
    if "background" in cases:
        with_tier, without = [], []
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                with_tier.append(going_on(options.model, number, f"{folder}/kv", f"{folder}/journal"))
                without.append(going_on(options.model, number, None, f"{folder}/other"))
        result["background"] = {"with": with_tier, "without": without}
        tables.append(background_table(with_tier, without))
    OUT.mkdir(exist_ok=True)
    (OUT / "kv_tier.json").write_text(json.dumps(result, indent=1))
    note = f"{time.strftime('%Y-%m-%d %H:%M')}; {options.model}; median of {options.rounds} rounds (low-high)."
    print(report.as_text(tables, [note]))


if __name__ == "__main__":
    main()
