"""The rules that one engine is held to while it runs, by what was really done to it: who was harmed and when, which
recoveries there were, how many devices there are. `simulation.py` names all rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planaria.topology import Layout
from planaria.types import Delta, FinishReason
from planaria.wire import Dead, EngineResized, Recovery, ResizeEngine
from tests.sim.client import Answer
from tests.sim.process import Process
from tests.sim.scenario import MOST, Asked

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

FENCED = 65.0  # seconds after which a rank that does not come to a new epoch is missed


def name(layout: Layout, asked: int) -> str:
    """asked: context ranks; as many of them as divide both share a sequence's tokens."""
    shared = max(size for size in range(1, layout.tp + 1) if asked % size == layout.tp % size == 0)
    degrees = f"tp={layout.tp} pp={layout.pp}" + ("" if layout.pcp == 1 else f" pcp={layout.pcp}")
    degrees += "" if shared == 1 else f" dcp={shared}"
    return degrees if layout.dp == 1 else f"dp={layout.dp} {degrees}"


@dataclass(frozen=True)
class Wish:
    """For another layout, and how things were when it came."""

    asked: ResizeEngine
    before: Layout
    epoch: int
    faults: int
    shortages: int
    read: int  # experts, from the checkpoint
    another: bool  # was on its way


class Rules:
    def __init__(self, sim: Simulation) -> None:
        self.sim, self.world, self.scenario = sim, sim.world, sim.scenario
        self.harms: list[Process] = []
        self.last_event = 0.0  # by the engine's own time
        self.fence_at = 0.0
        self.fruitless: list[tuple[float, bool]] = []  # recoveries since the last token; do they count for sure?
        self.lost_now: set[int] = set()  # since requests went on
        self.doomed = False  # there was a reason to give up at once
        self.disturbed = False  # slow or late, in this epoch: deadlines may be missed by ranks that are well
        self.short = self.unstarted = False  # since requests went on: too few devices, a process that couldn't start
        self.kind = "fault"  # of the last loss
        self.layout = sim.scenario.config.parallel.layout  # when requests last went on
        self.losses = 0  # that were faults
        self.shortages: list[Layout] = []  # layouts that there were not enough devices for

    # -- harm

    def stirred(self) -> None:
        """Something happened that the engine may have to deal with."""
        self.last_event = self.world.awake()

    def harmed(self, process: Process, how: str) -> None:
        """What the engine must notice, and may act on."""
        if process.harm is None or how == "dead":
            process.harm = how, self.world.awake()
            self.harms.append(process)
        self.stirred()

    def fenced(self) -> None:
        """Another epoch begins: whoever must be noticed has to be noticed there."""
        self.fence_at = self.world.awake()
        if not self.sim.began:
            self.fruitless.append((self.world.now, False))

    def watch(self) -> None:
        """Is every harm noticed in time?"""
        if not self.harms or self.sim.launcher.is_closing:
            return
        now, current = self.world.awake(), self.sim.launcher.ranks
        self.harms = [p for p in self.harms if p.harm is not None and (p.rank < 0 or current.get(p.rank) is p)]
        for process in self.harms:
            assert process.harm is not None
            how, since = process.harm
            if process.rank < 0:
                continue
            if how in ("failed", "gap") and since <= self.fence_at:
                continue
            waited = now - max(since, self.fence_at, process.begun)
            if waited > self._bound(process, how):
                self.world.require(
                    False, "detect", f"rank {process.rank} is {how} for {waited:.2f} s and nobody noticed"
                )

    def _bound(self, process: Process, how: str) -> float:
        config = self.scenario.config
        attached = process.link is not None and process.link is self.sim.link
        match how:
            case "dead":
                return 0.2 if attached else 0.7
            case "stopped":
                return 6.0
            case "cut":
                return config.parallel.heartbeat_timeout + 4.0 if attached else FENCED
            case "gap":
                return config.parallel.heartbeat_timeout + 4.0
            case "hung":
                return config.faults.step_timeout + 5.0 if attached else FENCED
            case _ if process.hung:
                return FENCED
            case _:  # answers are heard in order: one who is cut off may owe an earlier one
                ranks = self.sim.launcher.ranks.values()
                cut = any(other.harm is not None and other.harm[0] == "cut" for other in ranks)
                return config.parallel.heartbeat_timeout + 4.0 if cut else 5.0

    @staticmethod
    def _is_harmed(process: Process) -> bool:
        return process.harm is not None or process.stopped  # a short stop is one, too, while it lasts

    @property
    def excused(self) -> bool:
        """Is there another reason than a rank's own?"""
        return self.disturbed or any(process.harm is not None for process in self.sim.launcher.ranks.values())

    # -- losses and recoveries

    def replacing(self, ranks: Sequence[int]) -> None:
        """Who is given up was harmed, or failed twice; a deadline that was missed may be anyone's."""
        for rank in ranks:
            process = self.sim.launcher.ranks.get(rank)
            if process is None or process.link is None:
                continue  # none could be started, or it was one of several of which not all could be
            self.world.require(
                self._is_harmed(process) or process.failures > 1 or self.excused, "verdict",
                f"rank {rank} is well and was given up",
            )  # fmt: skip

    def giving_up(self, ranks: Sequence[int]) -> None:
        """A device is given up when what was started there ended."""
        self.replacing(ranks)

    def short_of_devices(self, room: int, layout: Layout) -> None:
        self.short = True
        self.shortages.append(layout)
        self.doomed = self.doomed or not room or not self.sim.began

    def lost(self, notice: Recovery) -> None:
        self.kind = notice.kind
        self.world.note("LOSS of ranks {} in {}: {}", notice.ranks, notice.phase, notice.cause)
        if notice.kind == "layout":
            self.world.require(not notice.ranks, "verdict", f"ranks {notice.ranks} for a change of the layout")
            return
        self.losses += 1
        self._attempt(notice)
        limit = self.scenario.config.faults.recovery_limit
        self.world.require(self._recent(True) <= limit, "gives up", f"attempt {self._recent(True)} of {limit}")
        sure = "signal" in notice.cause or "stopped" in notice.cause or "no sign of life" in notice.cause
        present = {rank: self.sim.launcher.ranks.get(rank) for rank in notice.ranks}
        well = [rank for rank, process in present.items() if process is not None and not self._is_harmed(process)]
        true = self.unstarted if "can't be started" in notice.cause else not well if sure else self.excused
        self.world.require(true, "verdict", f"ranks {well} are well: {notice.cause}")

    def _attempt(self, notice: Recovery) -> None:
        """A further attempt for sure, or maybe the rest of what killed others a moment ago?"""
        ended = any(word in notice.cause for word in ("process", "connection", "missing", "missed", "started"))
        sure = not self.lost_now or (ended and not self.lost_now.isdisjoint(notice.ranks))
        self.fruitless.append((self.world.now, sure))
        self.lost_now.update(notice.ranks if ended else (-1,))

    def _recent(self, sure: bool = False) -> int:
        since = self.world.now - self.scenario.config.faults.recovery_window
        return sum(1 for when, counts in self.fruitless if when >= since and (counts or not sure))

    def recovered(self, done: Recovery) -> None:
        require, ranks, layout = self.world.require, self.sim.launcher.ranks, self.sim.loop.gang.layout
        self.world.note("RECOVERED: epoch {}, {}, {} requests", done.epoch, done.layout, done.requests)
        require(done.pids == [ranks[rank].pid for rank in sorted(ranks)], "epoch", f"pids {done.pids}")
        shared = self.scenario.config.parallel.decode_context_parallel_size
        same = done.layout == name(layout, shared) and sorted(ranks) == list(range(layout.size))
        require(same, "layout", f"{done.layout} is told, {layout} believed, ranks {sorted(ranks)} are there")
        changed = layout != self.layout
        require(not changed or self.short or done.kind == "layout", "layout", f"{layout} without need")
        mine = {*ranks.values(), *self.sim.launcher.spares}
        left = [process.pid for process in self.sim.launcher.all if process.alive and process not in mine]
        require(not left, "leaks", f"processes {left}")
        self.sim.counts["shrunk" if layout.size < self.layout.size else "grown"] += changed
        moved = done.kind == "layout" and not changed
        self.sim.counts["moved in time"] += moved
        self.layout, self.disturbed, self.short, self.unstarted = layout, False, False, False
        self.lost_now.clear()
        for process in ranks.values():
            if process.harm is not None and process.harm[0] in ("failed", "gap"):
                process.harm = None

    def resized(self, wish: Wish, done: EngineResized) -> None:
        require, gang, asked, before = self.world.require, self.sim.loop.gang, wish.asked, wish.before
        now, faults, shortages = gang.layout, self.losses - wish.faults, self.shortages[wish.shortages :]
        self.world.note("{} is answered: {} {}", asked.id, done.layout, done.error)
        shared = self.scenario.config.parallel.decode_context_parallel_size
        require(done.layout == name(now, shared), "layout", f"{done.layout} is told, it is {now}")
        possible = 1 <= asked.tp <= MOST and 1 <= asked.pp <= MOST
        calm = not (faults or shortages or self.sim.loop.dead or self.sim.loop.stopping)
        if not done.error:
            met = (now.tp, now.pp) == (asked.tp, asked.pp) and (now.dp == asked.dp or not asked.dp)
            require(possible and met, "layout", f"{now} for {asked}")
            self.sim.counts["layouts"] += 1
            read = self.sim.counts["experts read"] - wish.read
            if calm and gang.epoch == wish.epoch + 1 and (now.tp, now.pp) == (before.tp, before.pp):
                require(not read, "weights", f"{read} experts are read for {now} after {before}")
            return
        if not (faults or self.sim.loop.dead or before in shortages or gang.epoch > wish.epoch + 1):
            require(now == before, "layout", f"{now} after {asked} was refused, it was {before}")
        if possible and self.sim.fits(Layout(tp=asked.tp, pp=asked.pp, dp=max(1, asked.dp), pcp=before.pcp)):
            require(not calm or wish.another or bool(self.sim.wishes), "layout", f"{asked} was possible: {done.error}")

    def gave_up(self, dead: Dead) -> None:
        limit = self.scenario.config.faults.recovery_limit
        forced = self.kind == "fault" or self.short  # into this layout
        full = "KV memory" in dead.message and not self.sim.fits(self.sim.loop.gang.layout) and forced
        self.world.require(
            full or self.doomed or self._recent() >= limit, "gives up", f"after {self._recent()} attempts of {limit}"
        )
        self.doomed = self.doomed or full

    # -- experts

    def reads_expert(self, reader: Process, layer: int, expert: int) -> None:
        """From the checkpoint."""
        self.sim.counts["experts read"] += 1
        assert reader.link is not None
        for rank in reader.experts.group:
            has = (layer, expert) in reader.link.had.get(rank, ())
            who = f"rank {reader.rank} reads expert {expert} of layer {layer}"
            self.world.require(not has, "weights", f"{who}, which rank {rank} has")

    # -- answers

    def heard(self, delta: Delta, answer: Answer) -> None:
        if delta.tokens:
            self.fruitless.clear()
            for process in self.sim.launcher.ranks.values():
                process.failures = 0
        if answer.finish is not None:
            self._ended(self.scenario.asked[delta.request_id], answer)

    def _ended(self, asked: Asked, answer: Answer) -> None:
        require, id, counts = self.world.require, asked.submit.id, self.sim.counts
        match answer.finish:
            case FinishReason.ABORT:
                require(id in self.sim.client.cancelled or self.sim.loop.stopping, "cancelled", f"{id} was not")
            case FinishReason.ERROR if "again and again" in (answer.error or ""):
                outside = self.losses + 1 - counts["poisoned"]  # the loss in hand is told after the verdict
                require(asked.poison is not None or outside >= 2, "poison", f"{id} is innocent")
                self.fruitless.clear()
                counts["convicted" if asked.poison is not None else "convicted though innocent"] += 1
            case FinishReason.ERROR:
                less = "holds" in (answer.error or "") and (counts["out of memory"] > 0 or self.scenario.tight)
                require(self.sim.loop.core is None or less or self.dying(), "errors", f"{id}: {answer.error}")

    def dying(self) -> bool:
        return self.doomed or self._recent() >= self.scenario.config.faults.recovery_limit
