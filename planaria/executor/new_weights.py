"""Other weights for an engine that runs: an epoch that begins with them, by the same door as faults. What is open goes
on from its tokens, and its KV is computed again; keys of KV are of the new weights.

If they can't be had, those of before are what the next epoch begins with. A rank or an engine that ends in the middle
is replaced by one that has what the engine's configuration says, which is changed once: no two ranks compute with
different ones, since they would be refused to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from planaria.core.engine import rescope
from planaria.errors import CapacityError, WorkersLost
from planaria.executor.transition import Wish
from planaria.protocol import Failed
from planaria.wire import UpdateWeights, WeightsUpdated

if TYPE_CHECKING:
    from planaria.config.options import EngineConfig
    from planaria.executor.loop import EngineLoop


def update_weights(loop: EngineLoop, asked: UpdateWeights, why_not: str, settle: Callable[[], None]) -> None:
    """Do it, and answer. why_not: it can't be done; settle: what is on its way ends. Raises WorkersLost, when that is
    answered."""
    gang, before, began, error = loop.gang, loop.gang.config, loop.clock(), why_not
    lost: WorkersLost | None = None
    try:
        if not error:
            settle()
    except WorkersLost as e:
        error, lost = f"{e}; ask again", e
    if not error:
        config = msgspec.structs.replace(before, checkpoint=asked.checkpoint, weights_number=asked.number)
        error = _begin(loop, config, f"weights become number {asked.number}: {asked.checkpoint['path']}")
        if error and (failed := _begin(loop, before, f"weights stay as they were: {error}")):
            loop.die(Failed(0, "weights", f"{error}; and those of before can't be had any more: {failed}", ""))
    loop.emit(WeightsUpdated(asked.id, gang.config.weights_number, error, loop.clock() - began))
    if lost is not None:
        raise lost


def _begin(loop: EngineLoop, config: EngineConfig, why: str) -> str:
    """An epoch with this configuration; why there is none, if so."""
    assert loop.core is not None
    gang = loop.gang
    gang.config = gang.kv.config = config
    try:
        gang.kv.rescope()
    except CapacityError as e:  # their digest can't be taken
        return str(e)
    rescope(loop.core, gang.kv.scope)
    failed = loop.epochs.begin_next(loop.core, Wish(gang.layout, why, "weights"))
    if failed is not None:
        return failed.message
    try:
        loop.sleeper.again()  # that they can be had is known before it wakes
    except WorkersLost as e:
        loop.begin_next(e)
    return ""
