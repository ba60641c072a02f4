"""What is wanted of an engine, whatever becomes of its processes: whether it sleeps, and which weights it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from planaria.config.options import EngineConfig
from planaria.server.engine import Engine
from planaria.server.questions import PendingAnswers
from planaria.wire import EngineFacts, FromEngine, Sleep, Slept, UpdateWeights, WeightsUpdated

if TYPE_CHECKING:
    from planaria.server.keeper import EngineKeeper

AGAIN = "again"  # of what a new process is told


class EngineWishes:
    """level: at which processes that come later sleep; None: they stay awake."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.level = engine, engine.asleep
        self._sleeps, self._weights = PendingAnswers[Slept](), PendingAnswers[WeightsUpdated]()

    @property
    def waits(self) -> bool:
        """Does somebody, for its answer?"""
        return bool(self._sleeps or self._weights)

    async def sleep(self, level: int | None) -> Slept:
        """See wire.Sleep. One that is not up does it when it is."""
        engine, before, self.level = self.engine, self.level, level
        if not engine.up:
            return Slept("", level)
        done = await self._sleeps.ask(lambda id: engine.send(Sleep(str(id), level)))
        if done.error:
            self.level = before
        return done

    async def weights(self, number: int, checkpoint: dict[str, Any], keep_kv: bool) -> WeightsUpdated:
        """See wire.UpdateWeights. One that is not up has them when it is."""
        engine = self.engine
        if not engine.up:
            return WeightsUpdated("", number)
        return await self._weights.ask(
            lambda id: engine.send(UpdateWeights(str(id), number, checkpoint, keep_kv=keep_kv))
        )

    def hear(self, message: FromEngine) -> None:
        if isinstance(message, Slept) and message.id != AGAIN:
            self._sleeps.answer(int(message.id), message)
        elif isinstance(message, WeightsUpdated) and message.id != AGAIN:
            self._weights.answer(int(message.id), message)

    def came_up(self, facts: EngineFacts, config: EngineConfig) -> None:
        """Another process has. config: as it should be; it was started before that was so, maybe."""
        if facts.weights_number != config.weights_number:  # not beside: what it is asked next is for these
            self.engine.send(UpdateWeights(AGAIN, config.weights_number, config.checkpoint, beside=False))
        if self.level is not None:
            self.engine.send(Sleep(AGAIN, self.level))

    def ended(self, config: EngineConfig) -> None:
        """Its process has; the next one does as this one was told."""
        self._sleeps.answer_all(Slept("", self.level))
        self._weights.answer_all(WeightsUpdated("", config.weights_number))


async def update_weights(
    keeper: EngineKeeper, number: int, checkpoint: dict[str, Any], keep_kv: bool = False
) -> WeightsUpdated:  # fmt: skip
    """Processes that come later have them from the start."""
    before = keeper.config
    keeper.config = msgspec.structs.replace(before, checkpoint=checkpoint, weights_number=number)
    done = await keeper.wishes.weights(number, checkpoint, keep_kv)
    if done.error:
        keeper.config = msgspec.structs.replace(
            keeper.config, checkpoint=before.checkpoint, weights_number=before.weights_number
        )
    return done
