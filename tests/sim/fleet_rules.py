"""The rules that a fleet is held to while it runs, by what was really done to its engines. `deployment.py` names all
rules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from planaria.core.router import EngineId
from planaria.core.transfer import lenders, release
from planaria.server.engine import Engine
from planaria.server.health import health_of
from planaria.server.keeper import LONGEST, EngineKeeper
from planaria.types import Delta, FinishReason
from planaria.wire import Release
from tests.sim.client import Answer
from tests.sim.scenario import Asked

if TYPE_CHECKING:
    from tests.sim.deployment import Deployment
    from tests.sim.remote import Remote

LOOK = 1.0
SURE = 5.0  # seconds after which news have come, also late ones
MARGIN = 30.0  # see planaria.server.engine
STALL = 60.0  # see ServerConfig


class FleetRules:
    def __init__(self, sim: Deployment) -> None:
        self.sim, self.world = sim, sim.world
        self.last_event = 0.0  # by the server's own time
        self.exposed: Counter[str] = Counter()  # engines that were lost with a request, since its last token
        self._gone: list[EngineKeeper] = []  # given up
        self._waiting: dict[str, float] = {}
        self._busy: dict[int, float] = {}
        # Processes that nobody told to end, and that others followed; or that nobody did, as their engine left first.
        self.lost = 0
        self._unfollowed: dict[int, float] = {}  # engines whose process's end is known, and since when nobody follows
        # Of each engine, when processes ended from which nothing was heard; and those from which no token came.
        self.silent: dict[int, list[float]] = defaultdict(list)
        self.fruitless: dict[int, list[float]] = defaultdict(list)

    def stirred(self) -> None:
        """Something happened that the fleet may have to deal with."""
        self.last_event = self.world.awake()

    def _recent(self, times: list[float]) -> int:
        since = self.world.now - self.sim.scenario.config.faults.recovery_window
        return sum(when >= since for when in times)

    # -- engines

    def started(self, remote: Remote, before: Remote | None) -> None:
        """Another process is there, in place of `before`."""
        if before is None:
            self.silent[remote.index].clear()
            self.fruitless[remote.index].clear()
            return
        remote.follows = not before.told_to_end
        self.world.require(before.returncode is not None, "leaks", f"engine {before.index} has two processes")
        if before.told_to_end:
            return
        self.lost += 1
        self.sim.counts["engines lost"] += 1
        index, limit = remote.index, self.sim.scenario.config.faults.recovery_limit
        for times, progress in ((self.silent[index], before.was_heard), (self.fruitless[index], before.had_tokens)):
            if progress:
                times.clear()
            times.append(before.ended)  # who starts it may have slept since
        recent = self._recent(self.silent[index])
        self.world.require(recent <= limit, "gives up", f"engine {index}: attempt {recent} of {limit}")

    def leaves(self, engine: EngineKeeper) -> None:
        """Perhaps its process's end was told, and it leaves before another has been started."""
        latest = self.sim.remotes.get(engine.index)
        known = latest is not None and latest.socket.closed and not latest.told_to_end
        self.lost += engine.engine.dead is None and engine._recovery is not None and known

    def tried(self, index: int) -> None:
        """Another process could not be started; it will be tried again."""
        self._unfollowed.pop(index, None)

    def ended(self, remote: Remote) -> None:
        """A process, or its ranks."""
        for id, open in self.sim.opens.items():
            if open.engine.index == remote.index:
                self.exposed[id] += 1

    def killed(self, remote: Remote) -> None:
        """By the server: only who was harmed, or was told to end, or never came up and is not wanted any more."""
        engine = self.sim.fleet.members.get(remote.index)
        asked = remote.told_to_end or engine is None or engine._closing or self.sim.closing
        harmed = remote.harm is not None or remote.stopped
        self.world.require(harmed or asked, "verdict", f"engine {remote.index} is well and was given up")

    def watch(self) -> None:
        """Is every harm noticed in time, and is who ended followed by another?"""
        now = self.world.awake()
        for index, engine in self.sim.fleet.members.items():
            latest = self.sim.remotes.get(index)  # not yet, where the first can't be started
            if latest is None or not latest.socket.closed or engine.engine.dead is not None or engine._closing:
                self._unfollowed.pop(index, None)
                continue
            waited = now - self._unfollowed.setdefault(index, now)
            most = SURE if latest.was_heard and not self.sim.counts["start fails"] else LONGEST + SURE
            self.world.require(waited <= most, "follows", f"engine {index} ended {waited:.2f} s ago, none follows it")
        for remote in self.sim.remotes.values():
            if remote.harm is None or self.sim.closing or not self._serves(remote):
                continue
            how, since = remote.harm
            if how in ("hung", "gap"):  # shows when there is something to do
                since = max(since, self.busy_since(remote.index))
            bound, waited = self._bound(how, remote), now - since
            if bound is not None and waited > bound:
                what = f"engine {remote.index} is {how} for {waited:.2f} s and nobody noticed"
                self.world.require(False, "detect", what)

    def watch_waiting(self) -> None:
        """Nothing waits for an engine while another could go on with it."""
        fleet, now = self.sim.fleet.dispatcher, self.world.awake()
        able = [i for i, engine in fleet.members.items() if engine.state == "ready" and not engine.leaving]
        idle = {
            id: self._waiting.get(id, now) for id, open in fleet.open.items()
            if open.engine.state != "ready" and not open.stuck and any(map(fleet.joined, able))
        }  # fmt: skip
        self._waiting = idle
        for id, since in idle.items():
            self.world.require(now - since <= 2 * LOOK, "route", f"{id} waits, and engines {able} are ready")

    def _bound(self, how: str, remote: Remote) -> float | None:
        silent = self.sim.scenario.config.faults.step_timeout + MARGIN + 3.0
        match how:
            case "dead" | "given up":
                return 2.0
            case "stopped":
                return 4.0
            case "hung":
                return silent if remote.up and not remote.regrouping else None  # else it may take its time
            case _:
                return silent

    def busy_since(self, index: int) -> float:
        """Since when this engine has had sequences without a break, by looks; now, if it has none."""
        now = self.world.awake()
        engine = self.sim.fleet.members[index]
        if not engine.engine.streams and not engine._resizing:
            self._busy.pop(index, None)
            return now
        return self._busy.setdefault(index, now)

    def _serves(self, remote: Remote) -> bool:
        """Is it still its engine's process, and one that somebody wants?"""
        engine = self.sim.fleet.members.get(remote.index)
        wanted = engine is not None and engine.engine.dead is None and not engine._closing
        # With a closed socket its end is known: see `watch` for what follows.
        return wanted and self._current(engine) is remote and not remote.socket.closed  # type: ignore[arg-type]

    def _current(self, engine: EngineKeeper) -> Remote | None:
        return getattr(engine.handle, "remote", None)

    # -- routing

    def chosen(self, index: EngineId) -> None:
        """By the router."""
        require, fleet = self.world.require, self.sim.fleet.dispatcher
        engine = fleet.members.get(int(index))
        require(engine is not None and not engine.leaving, "route", f"the choice is engine {index} that leaves")
        assert engine is not None
        require(engine.state == "ready", "route", f"the choice is engine {index} that is {engine.state}")

    def routed(self, id: str, engine: Engine) -> None:
        """A sequence that is new, or goes on elsewhere, was given to this engine."""
        require, fleet = self.world.require, self.sim.fleet.dispatcher
        self.exposed[id] += self.sim.remotes[engine.index].returncode is not None  # which nobody knows yet
        there = fleet.members.get(engine.index) is engine
        others = [o for o in fleet.members.values() if o.dead is None and not o.leaving]
        keeper = self.sim.fleet.members.get(engine.index)
        stays = not engine.leaving or not (others or (keeper is not None and keeper._closing))
        require(there and stays, "route", f"{id} goes to engine {engine.index} that leaves")
        require(engine.dead is None, "route", f"{id} goes to engine {engine.index} that has ended")
        ready = [o.index for o in fleet.members.values() if o.state == "ready" and not o.leaving]
        joined = [index for index in ready if fleet.joined(index)]
        require(
            not joined or engine.state == "ready", "route",
            f"{id} goes to engine {engine.index} that is {engine.state}, {joined} are ready",
        )  # fmt: skip

    # -- what is lent

    def lent(self, remote: Remote) -> None:
        self.sim.counts["prompts handed over"] += 1

    def released(self, remote: Remote, message: Release) -> None:
        """It ends that lease, and no other."""
        assert remote.core is not None
        held = {id: each.number for each in lenders(remote.core.lanes) for id in each.leases}
        release(remote.core.lanes, message.number, message.id)
        left = {id for each in lenders(remote.core.lanes) for id in each.leases}
        ended = {(held[id], id) for id in held.keys() - left}
        self.world.require(ended <= {(message.number, message.id)}, "lease", f"{message} ends {ended}")

    # -- health

    def check_health(self) -> None:
        """/health against the truth."""
        sim, require = self.sim, self.world.require
        if sim.closing or self.world.awake() - self.last_event < SURE:
            return
        body, now = health_of(sim.service), self.world.awake()
        members = sim.fleet.members
        wells, downs, stuck = [], [], []
        shown = {row["engine"]: row["state"] for row in body["engines"]}  # type: ignore[attr-defined]
        for index, engine in members.items():
            remote = self._current(engine)
            if remote is None or engine._closing:
                continue
            state, passed = shown[index], now - remote.since
            well = remote.up and not remote.regrouping and remote.harm is None and not remote.stopped
            if well and passed > SURE and not remote.told_to_end:
                wells.append(index)
                require(state in ("ready", "leaving"), "health", f"engine {index} is well and said to be {state}")
            if remote.returncode is not None and passed > SURE:
                require(state != "ready", "health", f"engine {index} has ended and is said to be ready")
            if not remote.up and engine.engine.dead is None and remote.follows and passed > LOOK:
                downs.append(index)
            waiting = now - max(remote.stepped, self.busy_since(index))
            if remote.harm is not None and len(engine.engine.streams) and waiting > STALL + SURE:
                stuck.append(index)
        alive = [index for index, engine in members.items() if engine.engine.dead is None]
        require(body["live"] == bool(alive), "health", f"live is {body['live']}, there are {alive}")
        require(not wells or bool(body["live"]), "health", f"{wells} are well, and it is not live")
        if downs and alive:
            require(bool(body["recovering"]), "health", f"engines {downs} begin anew and nobody says so")
        if stuck and alive:
            require(not body["progressing"], "health", f"engines {stuck} are stuck and nobody says so")
        if len(wells) == len(members):
            require(not body["recovering"], "health", f"all are well: {body['why']}")
            require(bool(body["progressing"] and body["ready"]), "health", f"all are well: {body['why']}")

    def check_counts(self) -> None:
        """Faults were counted, each once."""
        counted = self.sim.service.faults.faults
        self.world.require(counted["engine"] == self.lost, "health", f"{counted} faults, {self.lost} engines lost")

    @staticmethod
    def _shows(remote: Remote) -> bool:
        """Is it harmed in a way that shows also when there is nothing to do?"""
        return remote.harm is not None and remote.harm[0] not in ("hung", "gap")

    def settled(self) -> bool:
        """Are all engines well that have not been given up?"""
        members = self.sim.fleet.dispatcher.members
        return not self.sim.fleet.replacing and all(
            not engine.streams
            and (engine.dead is not None or (engine.state == "ready" and not self._shows(self.sim.remotes[index])))
            for index, engine in members.items()
        )

    # -- answers

    def heard(self, delta: Delta, answer: Answer) -> None:
        if delta.tokens:
            self.exposed[delta.request_id] = 0
            self.sim.remotes[self.sim.opens[delta.request_id].engine.index].had_tokens = True
        if answer.finish is not None:
            self._ended(self.sim.scenario.asked[delta.request_id], answer)

    def _ended(self, asked: Asked, answer: Answer) -> None:
        require, id, sim = self.world.require, asked.submit.id, self.sim
        match answer.finish:
            case FinishReason.ABORT:
                require(sim.closing, "cancelled", f"{id} was not")
            case FinishReason.ERROR if "again and again" in (answer.error or ""):
                outside = sum(sim.counts[kind] for kind in sim.scenario.kinds)
                require(asked.poison is not None or outside >= 2, "poison", f"{id} is innocent")
                index = sim.opens[id].engine.index
                self.silent[index].clear()
                if "engine died" in (answer.error or ""):  # else only its engine knows what it was
                    self.fruitless[index].clear()
                sim.counts["convicted" if asked.poison is not None else "convicted though innocent"] += 1
            case FinishReason.ERROR:
                alive = [index for index, engine in sim.fleet.members.items() if engine.engine.dead is None]
                if asked.poison is not None or self.exposed[id] > 1:
                    return  # it may have been what killed them
                require(not alive, "errors", f"{id}: {answer.error}, and there are engines {alive}")

    def gave_up(self) -> None:
        """Engines end only for a reason."""
        limit = self.sim.scenario.config.faults.recovery_limit
        for index, engine in self.sim.fleet.members.items():
            if engine.engine.dead is not None and engine not in self._gone:
                self._gone.append(engine)
                remote = self._current(engine)
                told = remote is None and index in self.sim.remotes and self.sim.remotes[index].told_to_end
                self.lost -= told  # its end was no fault, and the start that failed last is told as the engine's end
                reason = remote is None or remote.gone or self.sim.counts["start fails"]
                fair = len(self.fruitless[index]) >= limit
                self.world.require(bool(reason or fair), "gives up", f"engine {index}: {engine.engine.dead.message}")
