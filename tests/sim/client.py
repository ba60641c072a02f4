"""What a front end has of each request, and the rules about it that hold however it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planaria.types import Delta, FinishReason
from planaria.wire import Submit
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.scenario import Asked


@dataclass
class Answer:
    tokens: list[int]
    finish: FinishReason | None = None
    error: str | None = None


class Client:
    """asked: what is true of each request."""

    def __init__(self, world: World, asked: Mapping[str, Asked]) -> None:
        self.world, self.asked = world, asked
        self.answers: dict[str, Answer] = {}
        self.cancelled: set[str] = set()

    def submit(self, message: Submit) -> None:
        self.world.note("submit {}: {} + {}", message.id, len(message.prompt), message.max_tokens)
        self.answers[message.id] = Answer(list(message.output))

    def cancel(self, id: str) -> None:
        self.world.note("cancel {}", id)
        self.cancelled.add(id)

    @property
    def open(self) -> list[str]:
        return [id for id, answer in self.answers.items() if answer.finish is None]

    def hear(self, delta: Delta) -> Answer:
        """Raises Violation."""
        require, id = self.world.require, delta.request_id
        answer = self.answers.get(id)
        require(answer is not None, "once", f"{id} was never asked for")
        assert answer is not None
        require(answer.finish is None, "once", f"{id} goes on after its end")
        have = len(answer.tokens)
        require(delta.index == have, "index", f"{id} has {have} tokens, the next is number {delta.index}")
        answer.tokens += delta.tokens
        asked = self.asked[id]
        require(answer.tokens == asked.tokens[: len(answer.tokens)], "tokens", f"{id}: {answer.tokens} {asked.tokens}")
        if delta.finish is not None:
            answer.finish, answer.error = delta.finish, delta.error
            self.world.note("{} ends: {} {}", id, delta.finish, delta.error or "")
            if delta.finish not in (FinishReason.ABORT, FinishReason.ERROR):
                require(answer.tokens == asked.tokens, "tokens", f"{id} ends early")
                require(delta.pooled == asked.vector, "vector", f"{id}: {delta.pooled!r}, not {asked.vector!r}")
                require(asked.poison is None, "poison", f"{id} can't have been computed")
        return answer

    def check(self) -> None:
        """Nothing is open any more."""
        self.world.require(not self.open, "once", f"{', '.join(self.open)} never ended")
