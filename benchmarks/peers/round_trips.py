"""Round trips of one carrier, in a process of its own. What it does is asked for in JSON, one object a line:

    {"do": "run", "count": n, "gap": s}  ->  {"us": [microseconds, ...]}   n round trips, `gap` seconds before each
    {"do": "exit"}                       ->  {}

Only the standard library, because peers' own pythons read this file. Whatever a carrier prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

PROMPT, ROWS, VOCAB = 560, 24, 49152


def step() -> list[Any]:
    """Plain values of a step of 2 KB: a request of 560 tokens enters, 23 others get a block, two leave."""
    source = random.Random(0)
    tokens = [source.randrange(VOCAB) for _ in range(PROMPT)]
    fresh = [tokens, PROMPT, {"temperature": 0.7, "top_p": 0.9, "max_tokens": 128}, 7, [2]]
    rows = [[0, 0, PROMPT, list(range(35)), True, fresh]]
    rows += [[i, 1000 + i, 1, [7 * i + 1000], True, None] for i in range(1, ROWS)]
    return [3, 12345, [rows], [[30, 31]]]


def result() -> list[Any]:
    """Plain values of the answer: a token for each of 32 rows."""
    source = random.Random(1)
    return [3, 12345, [[list(range(32)), [source.randrange(VOCAB) for _ in range(32)]]], 0.01]


def serve(trip: Callable[[], None]) -> None:
    """Carry out requests from standard input; `trip` makes one round trip to all workers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trip()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "exit":
            print("{}", file=answers, flush=True)
            return
        taken = []
        for _ in range(request["count"]):
            if request["gap"]:
                time.sleep(request["gap"])
            since = time.perf_counter_ns()
            trip()
            taken.append((time.perf_counter_ns() - since) / 1e3)
        print(json.dumps({"us": taken}), file=answers, flush=True)
