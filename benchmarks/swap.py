"""How long the first token of a model takes that must be loaded for it, in another one's place (`planaria serve A B`),
and what a prefix costs that comes back with its model.

    python -m benchmarks.swap [--model smollm2] [--rounds 5] [--prefix 2048] [--markdown PAGE]

Two models (the same bytes, under two names) are served with one loaded at a time, and asked in turn, each time with
another prompt of 16 tokens: the time from the request to its first token. Then one is asked with a prompt of `--prefix`
tokens, the other with a short one, and the first once more, with another last token. Both with the room of
`--host-memory` for what unloaded models keep, and with none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.deployment import Server
from benchmarks.recovery import kv_room
from benchmarks.replace import first_token

OUT = Path(__file__).resolve().parent / "out"
SHORT = 16  # tokens
SWAP = 1.5  # goal: seconds at most


class Several(Server):
    """Of a model under two names. Begins with the first of them loaded."""

    def __init__(self, model: str, *arguments: str) -> None:
        names = [word for name in "ab" for word in ("--served-model-name", name)]
        super().__init__(model, model, *names, "--max-loaded", "1", *arguments)

    def first(self, name: str, prompt: list[int]) -> float:
        """Seconds from a request to its first token."""
        self.model = name
        return asyncio.run(first_token(self, prompt))


def measured(model: str, rounds: int, prefix: int, memory: Iterable[str]) -> dict[str, list[float]]:
    length, draw = prefix + 64, random.Random(1)
    room = ["--max-model-len", str(length), "--kv-cache-memory", str(kv_room(model, 2 * length))]

    def prompt(size: int) -> list[int]:
        return [draw.randrange(1000, 40000) for _ in range(size)]

    found: dict[str, list[float]] = {"loaded": [], "swapped": [], "computed": [], "returned": []}
    with Several(model, *room, *memory) as server:
        for name in "aba":  # each has been there once, and has compiled what it needs
            server.first(name, prompt(SHORT))
        for _ in range(rounds):
            found["swapped"] += [server.first(name, prompt(SHORT)) for name in "ba"]
            found["loaded"].append(server.first("a", prompt(SHORT)))
            asked = prompt(prefix)
            found["computed"].append(server.first("a", [*asked, 1000]))
            server.first("b", prompt(SHORT))
            found["returned"].append(server.first("a", [*asked, 1001]))
        print(found)
    return found


def tables(result: dict[str, dict[str, list[float]]], prefix: int) -> list[report.Table]:
    words = {
        "loaded": f"{SHORT} tokens, its model is loaded", "swapped": f"{SHORT} tokens, another model is loaded",
        "computed": f"{prefix} tokens, its model is loaded",
        "returned": "the same but the last, its model was unloaded meanwhile",
    }  # fmt: skip
    ways = list(result)
    worst = max(max(result[way]["swapped"]) for way in ways)
    return [
        report.Table("Seconds to the first token", ["", *ways], [
            [words[kind], *(report.spread(result[way][kind], 2) for way in ways)] for kind in words
        ]),
        report.Table("Goals", ["", "goal", "measured", "met"], [
            ["longest swap, s", f"<= {SWAP:g}", f"{worst:.2f}", "yes" if worst <= SWAP else "no"],
        ]),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--markdown", type=Path, help="write the tables between this page's markers")
    options = parser.parse_args()
    ways: dict[str, tuple[str, ...]] = {
        f"--host-memory {options.host_memory}": ("--host-memory", options.host_memory), "without": (),
    }  # fmt: skip
    result: dict[str, Any] = {
        way: measured(options.model, options.rounds, options.prefix, memory) for way, memory in ways.items()
    }
    OUT.mkdir(exist_ok=True)
    (OUT / "swap.json").write_text(json.dumps(result, indent=1))
    made = tables(result, options.prefix)
    note = f"{time.strftime('%Y-%m-%d %H:%M')}; {options.model} under two names, --max-loaded 1; "
    note += f"median of {options.rounds} rounds (low-high)."
    print(report.as_text(made, [note]))
    if options.markdown:
        report.write_between(options.markdown, "swap", report.as_markdown(made, [note]))


if __name__ == "__main__":
    main()
