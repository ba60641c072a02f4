"""Other weights for an engine that runs. Where its node keeps weights, processes beside the ranks pack the new ones
into that memory first, while steps go on as ever; what can't be had is known then, and nothing has changed. The change
itself is an epoch that begins with them, by the same door as faults: all ranks map what is there. What is open goes on
from its tokens, and its KV is computed again, or kept for it alone, as is asked; keys of KV are of the new weights.

If ranks can't have them, those of before are what the next epoch begins with. A rank or an engine that ends in the
middle is replaced by one that has what the engine's configuration says, which is changed once: no two ranks compute
with different ones, since they would be refused to each other. Who prepares may end as well: ranks then read what there
isn't.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from planaria.core.engine import rescope
from planaria.errors import CapacityError, WorkersLost
from planaria.executor.boot import READY, boots_for
from planaria.executor.link.address import Inside
from planaria.executor.transition import Wish
from planaria.hosts.host import Child
from planaria.node import available_memory, home
from planaria.protocol import Failed
from planaria.wire import UpdateWeights, WeightsUpdated

if TYPE_CHECKING:
    from planaria.config.options import EngineConfig
    from planaria.executor.gang import Gang
    from planaria.executor.loop import EngineLoop

logger = logging.getLogger("planaria.engine")


class NewWeights:
    """Of an engine. settle: what is on its way ends. asked: that are being prepared, by `children`."""

    def __init__(self, loop: EngineLoop, settle: Callable[[], None]) -> None:
        self.loop, self.settle = loop, settle
        self.asked: UpdateWeights | None = None
        self.children: Sequence[Child] = ()
        self._began = 0.0

    def ask(self, asked: UpdateWeights, why_not: str) -> None:
        """Begin with it, or answer. why_not: it can't be done. Raises WorkersLost, when that is answered."""
        loop = self.loop
        if not why_not and self.asked is not None:
            why_not = "others are on their way; ask again after them"
        if not why_not and asked.beside:
            why_not = self._no_room()
        if why_not:
            loop.emit(WeightsUpdated(asked.id, loop.gang.config.weights_number, why_not))
            return
        self.asked, self._began = asked, loop.clock()
        try:
            self.children = beside(loop.gang, _with(loop.gang.config, asked)) if asked.beside else ()
        except OSError as e:
            logger.warning("ranks wait while weights are read: no process can be started for that: %s", e)
        if not self.children:
            self._commit(asked)

    def _no_room(self) -> str:
        """Why those that are in force and others can't be in this node's memory together."""
        gang, free = self.loop.gang, available_memory()
        here = all(place.home == home() for place in gang.places) and gang.config.device.platform.on_host
        if not here or self.loop.sleeper.level == 2 or free > gang.weight_bytes:
            return ""
        return (
            f"{gang.weight_bytes / 2**30:.1f} GiB of weights have no room beside those in force, "
            f"{free / 2**30:.1f} GiB are free; sleep at level 2 first, which gives these back"
        )

    def look(self, why_not: str) -> None:
        """Are they prepared? why_not: they can't be had just now. Raises WorkersLost, when that is answered."""
        asked = self.asked
        if asked is None or why_not or not all(child.said or child.ended for child in self.children):
            return
        said = [child.said for child in self.children if child.said not in ("", READY)]
        if said:
            self._end(said[0].partition(" ")[2])
        else:
            self._commit(asked)

    def close(self) -> None:
        """Nobody prepares anything any more."""
        for child in self.children:
            child.kill()
        self.asked, self.children = None, ()

    def _end(self, error: str, seconds: float = 0.0) -> None:
        asked, loop = self.asked, self.loop
        assert asked is not None
        self.close()
        took = loop.clock() - self._began
        loop.emit(WeightsUpdated(asked.id, loop.gang.config.weights_number, error, took, seconds))

    def _commit(self, asked: UpdateWeights) -> None:
        """In between two steps."""
        loop, before, began, error = self.loop, self.loop.gang.config, self.loop.clock(), ""
        lost: WorkersLost | None = None
        try:
            self.settle()
        except WorkersLost as e:
            error, lost = f"{e}; ask again", e
        if not error:
            why = f"weights become number {asked.number}: {asked.checkpoint['path']}"
            error = self._begin(_with(before, asked), why, asked.keep_kv)
            if error and (failed := self._begin(before, f"weights stay as they were: {error}", False)):
                loop.die(Failed(0, "weights", f"{error}; and those of before can't be had any more: {failed}", ""))
        self._end(error, loop.clock() - began)
        if lost is not None:
            raise lost
        gang = loop.gang
        if gang.link is not None:  # those in reserve let go of what they have, and get ready with these
            gang.launcher.tell_spares(gang.spare_boot(gang.asked))

    def _begin(self, config: EngineConfig, why: str, kept: bool) -> str:
        """An epoch with this configuration; why there is none, if so. kept: KV of what is open is."""
        loop = self.loop
        assert loop.core is not None
        gang = loop.gang
        gang.config = gang.kv.config = config
        try:
            gang.kv.rescope(kept=kept)
        except CapacityError as e:  # their digest can't be taken
            return str(e)
        rescope(loop.core, gang.kv.scope, kept=kept)
        failed = loop.epochs.begin_next(loop.core, Wish(gang.layout, why, "weights"))
        if failed is not None:
            return failed.message
        try:
            loop.sleeper.again()  # that they can be had is known before it wakes
        except WorkersLost as e:
            loop.begin_next(e)
        return ""


def beside(gang: Gang, config: EngineConfig) -> Sequence[Child]:
    """Start processes that pack this configuration's weights into the memory of each node (or device) that has ranks,
    as they are now; see Launcher. Empty where ranks have weights of their own. Raises OSError."""
    device, link = config.device, gang.link
    apart = not device.platform.on_host and (
        config.parallel.distributed_executor_backend == "ray" or not gang.memories.keepers
    )
    if apart or link is None or config.null_worker:
        return ()
    maps = tuple(each.slots for each in gang.maps)
    boots = boots_for(config.with_layout(gang.layout), gang.places, link)
    return gang.launcher.beside([
        msgspec.structs.replace(boot, link=Inside(), memories=gang.memories, beside=(boot.rank,), maps=maps)
        for boot in boots
    ])  # fmt: skip


def _with(config: EngineConfig, asked: UpdateWeights) -> EngineConfig:
    return msgspec.structs.replace(config, checkpoint=asked.checkpoint, weights_number=asked.number)
