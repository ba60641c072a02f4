"""How long after the start of a server what ran in the background of another, whose processes were all killed, goes on.

    python -m benchmarks.whole_tree [--model smollm2] [--tokens 1024] [--streams 4] [--rounds 3]

Each round has two servers with a journal, and two more whose KV is on disk, too (`--kv-tier`). The first of each two is
asked for responses in the background with prompts of so many tokens, and ended with SIGKILL, all its processes with it,
when each has some more. A response goes on with the first event that the journal didn't have.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import proc, report
from benchmarks.deployment import Server
from planaria.server.kept import Kept
from planaria.server.records import scan
from planaria.server.response_shapes import num_events

OUT = Path(__file__).resolve().parent / "out"
HAVE = 32  # events that each has when the first server dies
MORE = 512  # tokens that each would have in the end
GOAL = 3.0  # seconds, with the tier
WORDS = "one two three four five six seven eight nine ten "


def begin(server: Server, tokens: int, number: int) -> str:
    """Its id, when it has a few tokens."""
    text = f"{number} " + WORDS * (tokens // 10 + 1)
    body = {
        "input": " ".join(text.split()[: tokens - 20]), "background": True, "stream": True, "temperature": 0,
        "max_output_tokens": MORE, "ignore_eos": True,
    }  # fmt: skip
    with server.http.stream("POST", server.url + "/v1/responses", json=body, timeout=600) as answer:
        told = events(answer)
        id: str = next(told)["response"]["id"]
        for event in told:
            if event["sequence_number"] >= HAVE:
                return id
    raise RuntimeError("a response ended too early")


def events(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def goes_on(server: Server, id: str, known: int) -> float:
    """time.monotonic() of the first event after those that are known."""
    url = f"{server.url}/v1/responses/{id}?stream=true&starting_after={known - 1}"
    with server.http.stream("GET", url, timeout=600) as answer:
        for event in events(answer):
            if event["type"] == "response.output_text.delta":
                return time.monotonic()
    raise RuntimeError(f"{id} does not go on")


def one_round(model: str, tokens: int, streams: int, folder: str, *, tier: bool) -> dict[str, float]:
    arguments = [
        "--journal", f"{folder}/journal", "--max-model-len", str(tokens + 2 * MORE), "--max-num-seqs", str(streams),
        "--log-level", "warning", *(["--kv-tier", f"{folder}/tier"] if tier else []),
    ]  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        with Server(model, *arguments) as server:
            ids = list(pool.map(lambda number: begin(server, tokens, number), range(streams)))
            for pid in reversed(proc.tree(server.process.pid)):
                proc.kill(pid)
        known, prompt = [], 0
        for id in ids:
            kept = Kept.of(scan(Path(folder, "journal", f"{id}.v1").read_bytes())[0])
            if kept is None or kept.head.submit is None:
                raise RuntimeError(f"{id} was over, or is not there")
            prompt = len(kept.head.submit.prompt)
            known.append(num_events(kept))
        began = time.monotonic()
        with Server(model, *arguments) as server:
            ready = time.monotonic() - began
            found = list(pool.map(lambda one: goes_on(server, *one), zip(ids, known, strict=True)))
    return {
        "ready": ready, "first": min(found) - began, "last": max(found) - began, "prompt": prompt,
    }  # fmt: skip


def table(rounds: dict[str, list[dict[str, float]]], streams: int) -> report.Table:
    def told(found: list[dict[str, float]], name: str) -> str:
        values = [each[name] for each in found]
        return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

    prompt = next(iter(rounds.values()))[0]["prompt"]
    return report.Table(
        f"{streams} responses in the background with prompts of {prompt:.0f} tokens: seconds from a server's start",
        ["KV", "it is ready", "the first goes on", "the last goes on", "goal"],
        [
            [
                name,
                told(found, "ready"),
                told(found, "first"),
                told(found, "last"),
                f"{GOAL:g}" if "disk" in name else "",
            ]
            for name, found in rounds.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"is on disk": [], "is computed": []}
    for _ in range(options.rounds):
        for name, found in rounds.items():
            with tempfile.TemporaryDirectory() as folder:
                found.append(one_round(options.model, options.tokens, options.streams, folder, tier="disk" in name))
    OUT.mkdir(exist_ok=True)
    (OUT / "whole_tree.json").write_text(json.dumps({"tokens": options.tokens, "rounds": rounds}, indent=1))
    note = f"{time.strftime('%Y-%m-%d %H:%M')}; {options.model}; median of {options.rounds} rounds (low-high)."
    print(report.as_text([table(rounds, options.streams)], [note]))


if __name__ == "__main__":
    main()
