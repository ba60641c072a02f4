"""A program under an outer launcher: `python -m tests.proc.spmd_program FOLDER JSON`. Every process runs it.

JSON: a model and options of LLM, prompts, parameters of each generation, and maybe a journal of the first. It writes
what it saw to FOLDER/RANK.json; `came`: tokens that were computed for each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from planaria import LLM, SamplingParams
from planaria.errors import PlanariaError
from planaria.executor.link import spmd


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
    begun, came, journal = False, list[int](), what.get("journal")

    def on_tokens(done: int, tokens: int) -> None:
        nonlocal begun
        came[-1] += tokens
        if tokens and not begun:
            begun = True
            (folder / f"begun {rank}").write_text(str(os.getpid()))

    try:
        llm = LLM(what["model"], distributed_executor_backend="external_launcher", **what["options"])
        for params in what["params"]:
            came.append(0)
            outputs = llm.generate(what["prompts"], SamplingParams(**params), on_tokens=on_tokens, journal=journal)
            journal = None
            seen.setdefault("tokens", []).append([[c.token_ids for c in o.outputs] for o in outputs])  # type: ignore[attr-defined]
        seen["pids"] = llm.facts.ranks
        llm.close()
    except PlanariaError as e:
        seen["error"] = f"{type(e).__name__}: {e}"
    seen["hashes"], seen["came"] = hashes, came
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    return 1 if "error" in seen else 0


if __name__ == "__main__":
    sys.exit(main())
