"""How long streams pause while `planaria serve --replace` puts another process in a server's place, and what a prefix
that comes back after it costs; or (--weights) while /update_weights gives it others.

    python -m benchmarks.replace [--rounds 3] [--streams 16] [--prompt 128] [--prefix 4096] [--weights]
        [--markdown PAGE]

Streams of `--prompt` tokens in and 256 out run when the successor is started. A pause is the longest silence of any of
them from then on; beside it stands the longest without a successor. Then a prompt of `--prefix` tokens is asked for
once, its server is replaced, and it is asked for again, with another last token: the time to the first token, both
times.

--weights: two copies of the model's file take turns. The engine's pause, in which it computes nothing, is what it says
itself, and is told in steps of these streams, too; a stream also waits for its tokens to be computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.deployment import Server, patient_client
from benchmarks.recovery import Load, Streams, kv_room, streams
from planaria.checkpoint import resolve_checkpoint

OUT = Path(__file__).resolve().parent / "out"
TOKENS = 256
PAUSE, FASTER, STEPS = 1.0, 20.0, 2.0  # goals: seconds at most, times at least, steps at most


def longest(found: Streams, since: float = 0.0) -> float:
    """Seconds that the stream which waited longest has waited."""
    silences = [0.0]
    for stream in range(len(found.texts)):
        times = [at for at, which in found.pieces if which == stream]
        silences += [b - a for a, b in itertools.pairwise(times) if b > since]
    return max(silences)


class Replaced:
    """A server whose place others take, one after the other."""

    def __init__(self, model: str, *arguments: str) -> None:
        self.model, self.arguments = model, arguments
        self.now = Server(model, *arguments)
        self.before: list[Server] = []

    def replace(self) -> None:
        """Returns when another serves in the place of the one of now."""
        port = self.now.url.rsplit(":", 1)[1]
        self.before.append(self.now)
        self.now = Server(self.model, *self.arguments, "--replace", "--port", port)

    def close(self) -> None:
        for server in (self.now, *self.before):
            server.close()


def pauses(model: str, load: Load, rounds: int) -> list[dict[str, Any]]:
    found = []
    length = load.prompt + TOKENS
    options = ["--max-model-len", str(length), "--kv-cache-memory", str(kv_room(model, 2 * load.streams * length))]
    server = Replaced(model, *options)
    try:
        asyncio.run(streams(server.now, load.prompts(0), 8))
        for number in range(1, rounds + 1):
            asked = load.prompts(number)
            expected = asyncio.run(streams(server.now, asked, TOKENS))
            struck: list[float] = []

            async def harmed(asked: list[list[int]] = asked, struck: list[float] = struck) -> Streams:
                first, tasks = server.now, []

                def replace() -> None:
                    struck.append(time.monotonic())
                    tasks.append(asyncio.get_running_loop().run_in_executor(None, server.replace))

                got = await streams(first, asked, TOKENS, replace, 0.1)
                await asyncio.gather(*tasks)
                return got

            got = asyncio.run(harmed())
            took_over = max(at for at, _ in got.pieces) > struck[0]
            found.append({
                "pause": longest(got, struck[0]), "without": longest(expected), "failed": list(got.errors.values()),
                "same": sum(a == b for a, b in zip(got.texts, expected.texts, strict=True)), "during": took_over,
                "exit": server.before[-1].process.wait(60),
            })  # fmt: skip
            print(f"round {number}: {found[-1]}")
    finally:
        server.close()
    return found


def updates(model: str, load: Load, rounds: int) -> list[dict[str, Any]]:
    """model: a GGUF file."""
    (file,) = resolve_checkpoint(model).files
    copies = [OUT / f"weights-{name}.gguf" for name in "ab"]
    for copy in copies:
        shutil.copy(file, copy)
    found, length = list[dict[str, Any]](), load.prompt + TOKENS
    options = ["--max-model-len", str(length), "--kv-cache-memory", str(kv_room(model, 2 * load.streams * length))]
    with Server(str(copies[0]), *options) as server:
        asyncio.run(streams(server, load.prompts(0), 8))
        for number in range(1, 2 * rounds + 1):
            asked, kept = load.prompts(number), not number % 2
            body = {"path": str(copies[number % 2]), "keep_kv": kept}
            calm = longest(asyncio.run(streams(server, asked, TOKENS)))
            struck, answers = list[float](), list[dict[str, Any]]()

            async def updated(
                asked: list[list[int]] = asked, body: dict[str, Any] = body, struck: list[float] = struck,
                answers: list[dict[str, Any]] = answers,
            ) -> Streams:  # fmt: skip
                tasks = []

                def update() -> None:
                    answers.append(server.http.post(server.url + "/update_weights", json=body).json())

                def begin() -> None:
                    struck.append(time.monotonic())
                    tasks.append(asyncio.get_running_loop().run_in_executor(None, update))

                got = await streams(server, asked, TOKENS, begin, 0.1)
                await asyncio.gather(*tasks)
                return got

            got = asyncio.run(updated())
            mine = [at for at, which in got.pieces if not which]
            engine, step = answers[0]["engines"][0], statistics.median(b - a for a, b in itertools.pairwise(mine))
            found.append({
                "kept": kept, "seconds": engine["seconds"], "pause": engine["pause"], "step": step,
                "steps": engine["pause"] / step,
                "silence": (silence := longest(got, struck[0])), "silences": silence / step, "without": calm,
                "failed": list(got.errors.values()),
            })  # fmt: skip
            print(f"round {number}: {found[-1]}", flush=True)
    for copy in copies:
        copy.unlink()
    return found


def updates_table(rounds: list[dict[str, Any]]) -> list[report.Table]:
    words = {
        "seconds": "until they are in force, s", "step": "a step, s", "pause": "the engine's pause, s",
        "steps": "the same in steps", "silence": "longest pause of any stream, s", "silences": "the same in steps",
        "without": "the longest without, s",
    }  # fmt: skip
    most, ways = max(found["steps"] for found in rounds), (False, True)
    rows = [
        [words[kind], *(report.spread([found[kind] for found in rounds if found["kept"] == kept], 3) for kept in ways)]
        for kind in words
    ]
    return [
        report.Table("Streams while weights become others", ["", "KV is computed again", "`keep_kv`"], [
            *rows,
            ["failed", *(str(sum(len(f["failed"]) for f in rounds if f["kept"] == kept)) for kept in ways)],
        ]),
        report.Table("Goals", ["", "goal", "measured", "met"], [
            ["the engine's pause, steps", f"<= {STEPS:g}", f"{most:.1f}", "yes" if most <= STEPS else "no"],
        ]),
    ]  # fmt: skip


async def first_token(server: Server, prompt: list[int]) -> float:
    began = time.monotonic()
    async with patient_client() as client:
        async for _ in server.stream(client, server.body(prompt, 2)):
            return time.monotonic() - began
    raise RuntimeError("no token came")


def returning(model: str, prefix: int, rounds: int) -> list[dict[str, float]]:
    found = []
    length = prefix + 64
    server = Replaced(model, "--max-model-len", str(length), "--kv-cache-memory", str(kv_room(model, 2 * length)))
    draw = random.Random(1)
    try:
        asyncio.run(first_token(server.now, [1000] * 64))
        for number in range(rounds):
            prompt = [draw.randrange(1000, 40000) for _ in range(prefix)]
            computed = asyncio.run(first_token(server.now, [*prompt, 1000]))
            server.replace()
            asyncio.run(first_token(server.now, [1000 + number] * 64))  # the first steps of a process are slower
            found.append({"computed": computed, "found": asyncio.run(first_token(server.now, [*prompt, 1001]))})
            print(f"prefix, round {number + 1}: {found[-1]}")
    finally:
        server.close()
    return found


def tables(result: dict[str, Any], load: Load, prefix: int) -> list[report.Table]:
    rounds, back = result["pauses"], result["prefix"]
    pause = [r["pause"] for r in rounds]
    times = [r["computed"] / r["found"] for r in back]
    return [
        report.Table("Streams while another process takes the server's place", ["", "s"], [
            ["longest pause of any stream", report.spread(pause, 2)],
            ["the longest without", report.spread([r["without"] for r in rounds], 2)],
            ["failed", str(sum(len(r["failed"]) for r in rounds))],
            ["the same text as without", f"{sum(r['same'] for r in rounds)} of {load.streams * len(rounds)}"],
        ]),
        report.Table(f"First token of {prefix} tokens that come back", ["", "s"], [
            ["computed", report.spread([r["computed"] for r in back], 3)],
            ["after --replace", report.spread([r["found"] for r in back], 3)],
            ["times faster", report.spread(times, 1)],
        ]),
        report.Table("Goals", ["", "goal", "measured", "met"], [
            ["pause, s", f"<= {PAUSE:g}", f"{max(pause):.2f}", "yes" if max(pause) <= PAUSE else "no"],
            ["prefix, times faster", f">= {FASTER:g}", f"{min(times):.1f}", "yes" if min(times) >= FASTER else "no"],
        ]),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each stream's prompt")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--weights", action="store_true", help="weights become others, instead")
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    load, name = Load(options.streams, options.prompt), "weights" if options.weights else "replace"
    OUT.mkdir(exist_ok=True)
    result: dict[str, Any]
    if options.weights:
        result = {"updates": updates(options.model, load, options.rounds)}
        made = updates_table(result["updates"])
    else:
        result = {
            "pauses": pauses(options.model, load, options.rounds),
            "prefix": returning(options.model, options.prefix, options.rounds),
        }
        made = tables(result, load, options.prefix)
    (OUT / f"{name}.json").write_text(json.dumps(result, indent=1))
    note = f"{time.strftime('%Y-%m-%d %H:%M')}; {load.streams} streams of {load.prompt} + {TOKENS} tokens; "
    note += f"median of {options.rounds} rounds (low-high)."
    print(report.as_text(made, [note]))
    if options.markdown:
        report.write_between(options.markdown, name, report.as_markdown(made, [note]))


if __name__ == "__main__":
    main()
