"""How a driver and the comparison talk: one JSON object a line, requests on standard input, answers on standard output.

    {"do": "start", "began": epoch seconds at spawn, ...settings}
        -> {"ok": {"parts": {name: s}, "first_token": s, "about": {...}}}
    {"do": "run", "seed": n, "shapes": [[prompt, output], ...]}
        -> {"ok": {"seconds": s, "events": [[s, tokens], ...]}}
    {"do": "exit"}
        -> {"ok": {}}

A failure is answered {"error": text}; a run an engine can't do, {"ok": {"skipped": reason}}. Only the standard library,
because every engine's python reads this file. Whatever an engine prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
import traceback
from typing import Any, Protocol

FIRST_ORDINARY_TOKEN = 100  # special tokens come before it
WARM_PROMPT = 16
PR_SET_PDEATHSIG = 1


class Engine(Protocol):
    """What a driver gives. `run` admits all prompts together, greedy, exactly `outputs[i]` new tokens for prompt i."""

    def start(self, settings: dict[str, Any], parts: Parts) -> dict[str, Any]:
        """Load. Returns facts to print (version, processes, how KV was bounded)."""
        ...

    def vocab_size(self) -> int: ...

    def run(self, prompts: list[list[int]], outputs: list[int], arrived: Arrived) -> str | None:
        """Calls `arrived(n)` as soon as n new tokens are there; returns a reason when it can't do this at all."""
        ...

    def close(self) -> None: ...


class Parts:
    """Where start-up time goes: `with parts("weights"): ...`; seconds."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.seconds: dict[str, float] = {"interpreter": time.time() - began}

    def __call__(self, name: str) -> _Part:
        return _Part(self, name)


class _Part:
    def __init__(self, parts: Parts, name: str) -> None:
        self.parts, self.name, self.since = parts, name, 0.0

    def __enter__(self) -> None:
        self.since = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.parts.seconds[self.name] = time.perf_counter() - self.since


class Arrived:
    """Collects (seconds since the requests were admitted, tokens that came)."""

    def __init__(self) -> None:
        self.events: list[tuple[float, int]] = []
        self.since = time.perf_counter()

    def __call__(self, tokens: int) -> None:
        if tokens:
            self.events.append((time.perf_counter() - self.since, tokens))


def random_prompts(seed: int, lengths: list[int], vocab_size: int) -> list[list[int]]:
    """The same token ids for every engine; another seed shares no prefix with it."""
    source = random.Random(seed)
    return [[source.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(length)] for length in lengths]


def timed_run(engine: Engine, seed: int, shapes: list[list[int]]) -> dict[str, Any]:
    """One scenario. Raises RuntimeError when an engine made another number of tokens than asked for."""
    prompts = random_prompts(seed, [shape[0] for shape in shapes], engine.vocab_size())
    outputs = [shape[1] for shape in shapes]
    arrived = Arrived()
    reason = engine.run(prompts, outputs, arrived)
    seconds = time.perf_counter() - arrived.since
    if reason is not None:
        return {"skipped": reason}
    made = sum(tokens for _, tokens in arrived.events)
    if made != sum(outputs):
        raise RuntimeError(f"asked for {sum(outputs)} tokens, got {made}")
    return {"seconds": seconds, "events": arrived.events}


def die_with_parent() -> None:
    """A driver is stopped most of the time: it would outlive a comparison that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(engine: Engine) -> None:
    """Answer requests until `exit` or the end of the input."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not break the protocol
    for line in sys.stdin:
        message = json.loads(line)
        done = message["do"] == "exit"
        try:
            if message["do"] == "start":
                parts = Parts(message["began"])
                about = engine.start(message, parts)
                with parts("first token"):
                    timed_run(engine, 0, [[WARM_PROMPT, 1]])
                answer: dict[str, Any] = {
                    "parts": parts.seconds, "first_token": time.time() - message["began"], "about": about,
                }  # fmt: skip
            elif message["do"] == "run":
                answer = timed_run(engine, message["seed"], message["shapes"])
            else:
                engine.close()
                answer = {}
            reply: dict[str, Any] = {"ok": answer}
        except Exception as e:  # whatever a peer raises is this request's answer
            traceback.print_exc()
            reply = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
        if done:
            return
