"""A program under an outer launcher: `python -m tests.proc.spmd_program FOLDER JSON`. Every process runs it.

JSON: options of LLM, and by rank what this program does differently. It writes what it saw to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from planaria import LLM, SamplingParams
from planaria.errors import PlanariaError
from planaria.executor.link import spmd

PROMPTS = ["The capital of France is", "def fibonacci(n):", "1 2 3 4 5 6"]


def main() -> int:
    folder, what = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = int(os.environ["RANK"])
    seen: dict[str, object] = {"pid": os.getpid()}
    hashes: list[str] = []
    plain = spmd.digest

    def noted(data: bytes) -> bytes:
        hashes.append(plain(data).hex())
        return plain(data)

    spmd.digest = noted
    mine = what.get(f"rank {rank}", {})
    begun = False

    def on_tokens(done: int, tokens: int) -> None:
        nonlocal begun
        if tokens and not begun:
            begun = True
            (folder / f"begun {rank}").write_text(str(os.getpid()))

    try:
        llm = LLM(
            "smollm2", distributed_executor_backend="external_launcher", **what["options"], **mine.get("options", {})
        )
        for params in what["params"]:
            outputs = llm.generate(mine.get("prompts", PROMPTS), SamplingParams(**params), on_tokens=on_tokens)
            seen.setdefault("tokens", []).append([[c.token_ids for c in o.outputs] for o in outputs])  # type: ignore[attr-defined]
        seen["pids"] = llm.facts.ranks
        llm.close()
    except PlanariaError as e:
        seen["error"] = f"{type(e).__name__}: {e}"
    seen["hashes"] = hashes
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    return 1 if "error" in seen else 0


if __name__ == "__main__":
    sys.exit(main())
