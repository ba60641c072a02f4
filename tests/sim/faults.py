"""What goes wrong around one engine, drawn from the seed at every step: to processes, to messages, to devices and
nodes, to launches and to the clock.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from planaria.protocol import Reply
from planaria.topology import Layout
from tests.sim.process import Process
from tests.sim.scenario import DEVICES, MESSAGES

if TYPE_CHECKING:
    from tests.sim.launcher import Device
    from tests.sim.link import SimLink
    from tests.sim.simulation import Simulation

OCCASIONS = 60_000
GHOSTS = 100


class Faults:
    """`left`: how many there may still be; `armed`: those that hit what comes along next."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.world, self.scenario = sim, sim.world, sim.scenario
        self.left = sim.scenario.budget
        self.armed: Counter[str] = Counter()
        self.ghosts: deque[tuple[int, tuple[int, int, Reply]]] = deque(maxlen=GHOSTS)
        self.remembers = "late ghost" in sim.scenario.kinds

    def occasion(self) -> None:
        """Something may go wrong now."""
        self.sim.counts["occasions"] += 1
        self.world.require(self.sim.counts["occasions"] < OCCASIONS, "ends", "the engine goes round and round")
        chance = self.world.random
        if self.left and self.scenario.kinds and chance.random() < self.scenario.chance:
            self.left -= 1
            kind = chance.choice(self.scenario.kinds)
            self.world.at(chance.choice([0.0, 0.0, chance.uniform(0, 0.1), chance.uniform(0, 3)]), self._inject, kind)

    def over(self) -> None:
        """From now on nothing goes wrong any more."""
        self.left = 0
        self.armed.clear()

    def strikes(self, kind: str, rank: int | None) -> bool:
        """Does an armed fault hit here?"""
        if not self.armed or not self.armed[kind]:
            return False
        self.armed[kind] -= 1
        if kind in ("delay", "launch is slow"):
            self.sim.rules.disturbed = True
        if kind == "launch fails":
            self.sim.rules.unstarted = True
        if kind == "no device":
            self.sim.rules.doomed = True
            self.sim.rules.shortages.append(Layout())
        self.happened(kind, rank)
        return True

    def happened(self, kind: str, rank: int | None) -> None:
        self.sim.counts[kind] += 1
        self.sim.rules.stirred()
        self.world.note("FAULT {} (rank {})", kind, rank)

    # -- kinds

    def _inject(self, kind: str) -> None:
        if self.world.inside:  # the engine is away: what needs it waits
            self.world.at(0.01, self._inject, kind)
            return
        chance, launcher = self.world.random, self.sim.launcher
        if kind in MESSAGES or kind.startswith("launch") or kind == "no device":
            self.armed[kind] += 1
        elif kind == "engine away":
            self.happened(kind, None)
            self.sim.rules.disturbed = True
            self.world.pass_by(chance.choice([chance.uniform(0.5, 20), chance.uniform(20, 200)]))
        elif kind == "all asleep":
            self.happened(kind, None)
            self.world.sleep(chance.uniform(1, 4000))
        elif kind in DEVICES:
            self._lose_devices(kind)
        elif alive := [p for p in (launcher.spares if kind == "spare dies" else launcher.ranks.values()) if p.alive]:
            process = chance.choice(alive)
            self.happened(kind, process.rank)
            self._harm(kind, process, alive)

    def _harm(self, kind: str, process: Process, alive: list[Process]) -> None:
        chance, rules = self.world.random, self.sim.rules
        match kind:
            case "kill" | "spare dies":
                self.kill(process, 0.0)
            case "kill several":
                for each in alive:
                    if each is process or chance.random() < 0.6:
                        self.kill(each, chance.choice([0.0, chance.uniform(0, 0.1)]))
            case "stop":
                self.harmed(process, "stopped")
                process.for_good = True
                process.stop()
            case "short stop":
                if not process.stopped:
                    process.stop()
                    self.world.at(chance.uniform(0.1, 1.3), process.go_on)
            case "cut":
                if not process.cut:
                    process.cut, process.still_since = True, self.world.now
                    self.harmed(process, "cut")
            case "hang":
                process.hung = True
            case "slow":
                process.slow, process.slow_steps, rules.disturbed = chance.uniform(10, 100), 1, True
            case "slow for long":
                process.slow, process.slow_steps, rules.disturbed = 10.0, 30, True
            case "exception":
                process.fail_next = True
            case "out of memory":
                process.oom_next = True
            case _:
                raise AssertionError(kind)

    def _lose_devices(self, kind: str) -> None:
        """What is there dies with them; they come back after a while, or never."""
        chance, launcher = self.world.random, self.sim.launcher
        there = [device for device in launcher.devices if device.is_well]
        if not there:
            return
        hit = chance.choice(there)
        devices = [device for device in there if device.node == hit.node] if "node" in kind else [hit]
        self.happened(kind, None)
        if kind == "node will leave":
            for device in devices:
                device.going = True
            self.world.at(chance.uniform(0.1, 20), self._leave, kind, devices)
        else:
            self._leave(kind, devices)

    def _leave(self, kind: str, devices: list[Device]) -> None:
        chance, launcher = self.world.random, self.sim.launcher
        self.sim.rules.stirred()
        if "node" in kind:
            self.sim.memory.node_left(devices[0].node)
        back = chance.choice([chance.uniform(0.2, 3), chance.uniform(3, 60), chance.uniform(3, 60), None])
        for device in devices:
            device.bad, device.gone, device.going = kind == "device is bad", kind != "device is bad", False
            for process in [*launcher.ranks.values(), *launcher.spares]:
                if process.device is device:
                    self.kill(process, chance.choice([0.0, chance.uniform(0, 0.1)]))
        if back is not None:
            self.world.at(back, self._devices_are_back, devices)

    def _devices_are_back(self, devices: list[Device]) -> None:
        self.world.note("{} devices of node {} are well again", len(devices), devices[0].node)
        self.sim.rules.stirred()
        for device in devices:
            device.bad = device.gone = False

    def kill(self, process: Process, delay: float) -> None:
        if delay:
            self.world.at(delay, self.kill, process, 0.0)
        elif process.alive:
            self.harmed(process, "dead")
            process.end("was killed by signal 9")

    def harmed(self, process: Process, how: str) -> None:
        self.sim.rules.harmed(process, how)

    # -- messages of epochs that are over

    def remember(self, link: SimLink, answer: tuple[int, int, Reply]) -> None:
        """It may be heard again in an epoch that is not its own."""
        self.ghosts.append((link.epoch, answer))

    def haunt(self, link: SimLink, number: int) -> None:
        """Those of epochs before that look like an answer to this command, and any."""
        for ghost in list(self.ghosts):
            epoch, answer = ghost
            if epoch < link.epoch and (answer[1] == number or self.world.random.random() < 0.05):
                self.ghosts.remove(ghost)
                self.sim.counts["ghosts"] += 1
                self.world.at(0.0001, link.hear, answer)
