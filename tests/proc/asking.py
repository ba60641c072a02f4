"""Clients of a server with a small model: greedy requests all at once, and a blow when some tokens have come."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx2

Asked = tuple[list[int], int]  # a prompt, how many tokens


def ask_all(
    url: str, model: str, asked: Sequence[Asked], *, at: int = 0, harm: Callable[[], object] | None = None,
    enter: Callable[[], None] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Tokens of each stream. harm: called once, when more than `at` tokens have come in all, while they go on. enter:
    what each client's thread does first."""
    lock, count = threading.Lock(), 0
    due = threading.Event()

    def heard(tokens: int) -> None:
        nonlocal count
        with lock:
            count += tokens
            if count > at:
                due.set()

    def stream(one: Asked) -> list[int]:
        body = {
            "model": model, "prompt": one[0], "max_tokens": one[1], "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True,
        }  # fmt: skip
        tokens: list[int] = []
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                said = json.loads(line.removeprefix("data: "))
                assert "error" not in said, said
                for choice in said["choices"]:
                    tokens += choice["token_ids"] or []
                    heard(len(choice["token_ids"] or []))
        return tokens

    with ThreadPoolExecutor(len(asked), initializer=enter) as clients:
        answers = [clients.submit(stream, one) for one in asked]
        if harm is not None:
            assert due.wait(300), [answer.exception() for answer in answers if answer.done()]
            harm()
        return [answer.result() for answer in answers]
