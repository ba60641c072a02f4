"""Questions to other processes, and who waits for their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from planaria.wire import ExpertLoads, Processes, ToEngine

T = TypeVar("T", ExpertLoads, Processes)

A = TypeVar("A")

ANSWER_LIMIT = 2.0  # seconds


class PendingAnswers(Generic[A]):
    """Who waits for which answer, by the number of the question."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[A]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def ask(self, send: Callable[[int], None], limit: float | None = None) -> A:
        """send: gets the number. Raises TimeoutError after so many seconds."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        send(number)
        try:
            return await asyncio.wait_for(waiting, limit)
        finally:
            self._waiting.pop(number, None)

    def answer(self, number: int, answer: A) -> None:
        """Nobody may be waiting any more."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def answer_all(self, answer: A) -> None:
        for number in list(self._waiting):
            self.answer(number, answer)


class Questions:
    """To an engine's process, which it answers between two steps. Whoever asks meanwhile gets the same answer."""

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
