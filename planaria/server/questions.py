"""Questions to an engine's process, which it answers between two steps. Whoever asks meanwhile gets the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from planaria.wire import ExpertLoads, Processes, ToEngine

T = TypeVar("T", ExpertLoads, Processes)

ANSWER_LIMIT = 2.0  # seconds


class Questions:
    def __init__(self) -> None:
        self.waiting: dict[type, list[asyncio.Future[Any]]] = {}  # by the answer's type

    async def ask(self, question: ToEngine, kind: type[T], send: Callable[[ToEngine], None]) -> T | None:
        """None: there is no answer in time."""
        waiting: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        others = self.waiting.setdefault(kind, [])
        others.append(waiting)
        send(question)
        try:
            return await asyncio.wait_for(waiting, ANSWER_LIMIT)
        except TimeoutError:
            others.remove(waiting)
            return None

    def answer(self, message: ExpertLoads | Processes) -> None:
        for waiting in self.waiting.pop(type(message), []):
            if not waiting.done():
                waiting.set_result(message)
