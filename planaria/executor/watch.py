"""Which ranks of a gang are lost: ended, stopped, silent, or late with a step. What is asked of the system is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planaria.config.options import EngineConfig
from planaria.executor.backend import Launcher, Link
from planaria.executor.health import Health, Pace
from planaria.executor.preflight import Needs, check_node, look
from planaria.executor.reply_ledger import ReplyLedger
from planaria.hosts.host import Place
from planaria.node import home, node_name, process_state
from planaria.protocol import StepPlan, StepResult

SHARED = 64 << 20  # bytes of memory file that a node must be able to make


class System:
    """What a gang asks of the node it runs on."""

    def problems(self, num_ranks: int) -> list[str]:
        """Why so many ranks can't start here, worst first."""
        needs = Needs(num_ranks, SHARED if num_ranks > 1 else 0)
        return check_node(look(node_name(), needs), needs)

    def is_stopped(self, pid: int) -> bool:
        """Does the kernel hold this process still?"""
        return process_state(pid) in ("T", "t")


@dataclass(frozen=True)
class LostRanks:
    """Ranks that are lost; their processes `how`; known `detect` seconds after the first sign of it."""

    ranks: tuple[int, ...]
    how: str
    detect: float = 0.0


class Watch:
    """Over the ranks of one gang, epoch after epoch. clock: seconds, monotonic."""

    def __init__(self, config: EngineConfig, launcher: Launcher, clock: Callable[[], float], system: System) -> None:
        self.launcher, self.clock, self.system = launcher, clock, system
        self.timeout = config.parallel.heartbeat_timeout
        self.health, self.pace = Health(self.timeout), Pace(config.faults.step_timeout)
        self._ending: float | None = None  # when a rank's process was seen to end, in this epoch

    def fenced(self) -> None:
        """The epoch is over: the next one's ranks have not been silent yet."""
        self.health, self._ending = Health(self.timeout), None

    def ending(self) -> None:
        """A process was seen to end. Any thread."""
        if self._ending is None and self.launcher.replaces:
            self._ending = self.clock()

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step that was answered."""
        self.pace.took(planned_tokens(plan), result.seconds)

    def ended(self) -> LostRanks | None:
        """Those whose processes have ended."""
        lost = self.launcher.lost()
        if not lost:
            return None
        detect = 0.0 if self._ending is None else self.clock() - self._ending
        return LostRanks(tuple(lost), "; ".join(lost.values()), detect)

    def look(self, link: Link, places: Sequence[Place], ledger: ReplyLedger) -> LostRanks | None:
        """Those that have ended, are stopped, silent, or late."""
        ending = self._ending
        if (gone := self.ended()) is not None:
            return gone
        if ending is not None:
            self._ending = None  # it was a spare's, or one that was asked for
        here = [place.pid if place.home == home() else 0 for place in places]
        if lost := self.health.look(link.pulses(), self.clock(), self.system.is_stopped, here):
            return LostRanks(tuple(lost), "; ".join(lost.values()), self.health.silent(lost))
        if ledger.open and isinstance(plan := ledger.open[0].command, StepPlan):
            waited = self.pace.look(ledger.open[0].number, planned_tokens(plan), self.clock())
            if waited is not None:
                return LostRanks(tuple(ledger.owing()), f"did not finish its step in {waited:.0f} s", waited)
        return None


def planned_tokens(plan: StepPlan) -> int:
    """That the plan names, and one for the rows that go on by themselves."""
    return 1 + sum([row.count for lane in plan.lanes for row in lane])
