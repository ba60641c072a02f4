"""How an epoch ends and the next begins: for a fault, or because another layout is wished for.

`begin_next` is the only place where that happens. What of open requests isn't in KV is computed from tokens; where the
ranks can't come up, as often as may be tried, there is no next epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from planaria.config.options import EngineConfig
from planaria.core.engine import EngineCore
from planaria.core.transfer import lend_from, offer_from
from planaria.errors import CapacityError, WorkersLost
from planaria.executor.gang import Gang, Refusal
from planaria.executor.recovery import Reformations, Replay, told, told_replay
from planaria.executor.status import places_of
from planaria.executor.transition import Transition, Wish
from planaria.protocol import Failed
from planaria.types import Delta
from planaria.wire import FromEngine, Recovery

logger = logging.getLogger("planaria.engine")

LESS = 0.8  # of the KV memory it had, after a rank ran out of memory


class TellDeltas(Protocol):
    def __call__(self, deltas: list[Delta], *, stepped: bool = False) -> None: ...


class Epochs:
    """tell: of deltas, and that something has changed; formed: called when the ranks of an epoch wait for steps."""

    def __init__(
        self, config: EngineConfig, gang: Gang, clock: Callable[[], float], emit: Callable[[FromEngine], None],
        tell: TellDeltas, formed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.gang, self.clock, self.emit, self.tell, self.formed = gang, clock, emit, tell, formed
        self.limit = Reformations(config.faults.recovery_limit, config.faults.recovery_window)
        self.replay: Replay | None = None  # that is on, after a fault
        self._tokens = -1  # generated when the last epoch began
        self._failed_rank = -1  # that answered with a failure last, with no token since

    def may_go_on(self, core: EngineCore | None) -> bool:
        """May there be another epoch?"""
        tokens = core.generation_tokens if core is not None else 0
        progressed, self._tokens = tokens != self._tokens and core is not None, tokens
        if progressed:
            self._failed_rank = -1
        return self.gang.launcher.replaces and self.limit.allowed(self.clock(), progressed)

    def begin_next(self, core: EngineCore, cause: WorkersLost | Wish) -> Failed | None:
        """What became of it: nothing to tell, or why the engine ends."""
        gang, change = self.gang, Transition(cause, self.gang.layout)
        began = self.clock() - (change.loss.detect if change.loss is not None else 0.0)
        self.replay = None
        if change.loss is not None:
            convicted = core.fault()
            self.tell(convicted)
            if convicted:
                self._tokens = -1  # an answer is progress: what ended the epochs before this one is out of the way
        while True:
            loss, failed = change.loss, change.failed
            if failed.kind == "capacity" and failed.phase != "probe":  # which takes no more than is there
                gang.kv_share *= LESS
                gang.kv.forget()
            if change.counts and not self.may_go_on(core):
                return failed
            self.emit(self._told(change, failed, gang.epoch + 1, loss))
            if loss is not None and self._failed_rank in loss.ranks:
                loss.dead = True  # it failed twice with no token in between: another process may do better
                gang.kv.forget()
            if gang.layout.size > 1 and (hopeless := change.hopeless()):
                gang.launcher.give_up(hopeless)
            change.replacing()
            self._failed_rank = loss.ranks[0] if loss is not None and loss.ranks and not loss.dead else -1
            try:
                seconds = gang.reform(change)
                break
            except (WorkersLost, Refusal, CapacityError) as e:
                if not change.came_to_nothing(e):
                    why = f"{failed.message}; it can't be replaced: {e}"
                    return e.failed if isinstance(e, Refusal) else msgspec.structs.replace(
                        failed, message=why, kind="error"
                    )  # fmt: skip
        self._go_on(core, change, seconds, began)
        return None

    def _told(self, change: Transition, failed: Failed, epoch: int, loss: WorkersLost | None) -> Recovery:
        return Recovery(
            epoch, list(loss.ranks) if loss is not None else [], failed.phase, failed.message, failed.traceback,
            kind="layout" if isinstance(change.first, Wish) else "fault",
        )  # fmt: skip

    def _go_on(self, core: EngineCore, change: Transition, seconds: dict[str, float], began: float) -> None:
        """Another epoch has begun: everything open is computed again in it."""
        gang, replaced = self.gang, bool(change.loss is not None and change.loss.dead)
        tokens = core.replayed_tokens
        self.formed()
        # the epoch is news, also with no request
        layout = gang.layout
        kv = gang.kv
        lost = core.lost(
            gang.epoch, gang.num_blocks, layout.pp, layout.dp, kept=kv.kept, moved=kv.moved, indexes=kv.indexes
        )
        self.connect(core)
        self.tell(lost, stepped=True)
        seconds["total"] = self.clock() - began
        first = Transition(change.first, change.present)
        done = msgspec.structs.replace(
            self._told(change, first.failed, gang.epoch, first.loss), seconds=seconds, layout=gang.named(gang.layout),
            pids=[member.pid for member in gang.members], requests=len(core.lane_of),
            tokens=core.replayed_tokens - tokens, places=places_of(gang), travel=gang.travel if gang.maps else None,
        )  # fmt: skip
        self.emit(done)
        logger.warning("%s", told(done, replaced, gang.named(change.present)))
        if going := [request.id for request in core.snapshot() if request.output]:
            self.replay = Replay(done, going, self.clock())
        else:
            gang.stand_by()

    def connect(self, core: EngineCore) -> None:
        """What ranks have kept outside of memory can be used, if all have a connector; what has suffered can't."""
        if damaged := sum(map(len, self.gang.kv.damaged.values())):
            logger.warning("%d KV blocks are not what their checksums say, and are computed again", damaged)
            core.cut(self.gang.kv.damaged)
        kv = self.gang.kv
        if kv.stored:
            core.connect(kv.stored, kv.block_bytes)
        if len(kv.addresses) == self.gang.layout.size:
            offer_from(core.lanes, kv.addresses)
        if kv.config.lends_memory and kv.origin is not None:
            lend_from(core.lanes, kv.there.number, msgspec.structs.astuple(kv.origin))

    def watch(self, deltas: list[Delta]) -> bool:
        """Tell when all sequences go on that a fault had interrupted. Is that so now?"""
        assert self.replay is not None
        now = self.clock()
        for delta in deltas:
            moved = delta.tokens or delta.finish is not None
            if moved and (replayed := self.replay.heard(delta.request_id, now)) is not None:
                self.replay = None
                self.emit(replayed)
                logger.warning("%s", told_replay(replayed))
                return True
        return False
