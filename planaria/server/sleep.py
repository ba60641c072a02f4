"""Whether an engine is to sleep, whatever becomes of its processes."""

from __future__ import annotations

from planaria.server.engine import Engine
from planaria.server.questions import PendingAnswers
from planaria.wire import FromEngine, Sleep, Slept

AGAIN = "again"  # of a Sleep that a new process is told


class EngineSleep:
    """level: that processes which come later are told; None: they stay awake."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.level = engine, engine.asleep
        self._asked = PendingAnswers[Slept]()

    async def ask(self, level: int | None) -> Slept:
        """See wire.Sleep. One that is not up does it when it is."""
        engine, before, self.level = self.engine, self.level, level
        if not engine.up:
            return Slept("", level)
        done = await self._asked.ask(lambda id: engine.send(Sleep(str(id), level)))
        if done.error:
            self.level = before
        return done

    def hear(self, message: FromEngine) -> None:
        if isinstance(message, Slept) and message.id != AGAIN:
            self._asked.answer(int(message.id), message)

    def came_up(self) -> None:
        """Another process has."""
        if self.level is not None:
            self.engine.send(Sleep(AGAIN, self.level))

    def ended(self) -> None:
        """Its process has; the next one does as this one was told."""
        self._asked.answer_all(Slept("", self.level))
