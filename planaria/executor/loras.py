"""The adapters that an engine was given, those requests that came before theirs, and how they reach the ranks: between
steps, in parts, a few at a time, so that no step waits for a whole one.

Rule: what is kept here is what a front end sent, and ranks that come later get the same; no path is read again. An
adapter that was unloaded stays as long as an open request has it, and some more for requests that are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from planaria.config.options import EngineConfig
from planaria.core.engine import EngineCore
from planaria.executor.gang import Gang
from planaria.executor.health import LONGEST_LOOK
from planaria.protocol import LoraModule, PutLora
from planaria.types import Delta, FinishReason
from planaria.wire import LoadLora, Submit, UnloadLora

STEP_BYTES = 8 << 20  # of an adapter between two steps; a part more than that goes alone
HOLD = 30.0  # seconds that a request waits for an adapter which the engine hasn't got yet

Modules = tuple[LoraModule, ...]


class LoraStore:
    """Of an engine."""

    def __init__(self, config: EngineConfig, gang: Gang, clock: Callable[[], float]) -> None:
        self.gang, self.clock = gang, clock
        # adapters that stay when they were unloaded and nobody has them
        self.most = config.lora.max_cpu_loras if config.lora is not None else 0
        self.parts: dict[str, dict[int, Modules]] = {}  # by digest, of those that are still coming
        self.complete: dict[str, list[Modules]] = {}
        self.unloaded: dict[str, None] = {}  # the longest first; but requests may have them
        self.held: dict[str, tuple[float, Submit]] = {}  # by request: since when
        # seconds, added up over looks: while this process was stopped nothing could come
        self._waited, self._looked = 0.0, clock()
        self._sent = ("", -1, 0)  # digest, epoch, parts of it that the ranks were sent

    def hear(self, message: LoadLora | UnloadLora, core: EngineCore) -> list[Delta]:
        """Those who waited for it are admitted."""
        digest = message.digest
        if isinstance(message, UnloadLora):
            self.parts.pop(digest, None)
            if digest in self.complete:
                self.unloaded[digest] = None
            return []
        self.unloaded.pop(digest, None)
        if digest in self.complete:
            return []
        coming = self.parts.setdefault(digest, {})
        coming[message.part] = message.modules
        if len(coming) < message.parts:
            return []
        self.complete[digest] = [coming[part] for part in range(message.parts)]
        del self.parts[digest]
        core.loras.warm(digest)
        found = [submit for _, submit in self.held.values() if submit.adapter == digest]
        return [delta for submit in found for delta in core.admit(self.held.pop(submit.id)[1].request(self.clock()))]

    def look(self, core: EngineCore | None) -> list[Delta]:
        """Let go of adapters that nobody has any more, and of requests whose adapter doesn't come."""
        if not self.held and len(self.unloaded) <= self.most:
            return []
        if core is not None and len(self.unloaded) > self.most:
            used = {core.loras.wanted, *(request.adapter for request in core.snapshot())}
            unused = [digest for digest in self.unloaded if digest not in used]
            for digest in unused[: len(self.unloaded) - self.most]:
                del self.complete[digest], self.unloaded[digest]
        now = self.clock()
        self._waited, self._looked = self._waited + min(LONGEST_LOOK, now - self._looked), now
        late = [id for id, (since, _) in self.held.items() if self._waited - since >= HOLD]
        return self.end(late, FinishReason.ERROR, "its adapter is not loaded here (any more); load it and ask again")

    # -- requests that came first

    def hold(self, submit: Submit) -> list[Delta]:
        """Until its adapter has come."""
        if not self.held:
            self._looked = self.clock()
        self.held[submit.id] = self._waited, submit
        return []

    def end(self, ids: Collection[str], reason: FinishReason, error: str | None) -> list[Delta]:
        """Of those that wait."""
        found = [self.held.pop(id)[1] for id in ids if id in self.held]
        return [Delta(submit.id, len(submit.output), [], reason, error=error) for submit in found]

    # -- ranks

    def place(self, core: EngineCore | None) -> None:
        """Send what ranks are to have next, a part of it between two steps. None: they sleep. Raises WorkersLost."""
        if core is None or not core.loras.wanted:
            return
        slots, epoch = core.loras, self.gang.epoch
        parts = self.complete[slots.wanted]
        digest, of, number = self._sent
        if (digest, of) != (slots.wanted, epoch):
            number = 0
        size = 0
        while number < len(parts) and size < STEP_BYTES:
            modules, first, last = parts[number], number == 0, number == len(parts) - 1
            self.gang.send(PutLora(slots.slot, slots.wanted, modules, first, last))
            size += sum(len(module.a) + len(module.b) for module in modules)
            number += 1
            self._sent = slots.wanted, epoch, number
        if number == len(parts):
            self._sent = "", -1, 0
            slots.placed()
