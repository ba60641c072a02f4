"""The agents of other nodes, as the driver of an engine's ranks sees them.

Each time one comes it brings its node with no process on it. What was lost with it stays lost until its ranks are
arranged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from planaria.executor import node_messages as messages
from planaria.executor.boot import Place, Room
from planaria.executor.launcher.callers import Caller, Callers
from planaria.executor.node_messages import AllEnded, Arrange, End, Ended, Prepare, Prepared, Started, ToAgent


class Agent(Caller):
    """Its ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.room = Room(0, 0, 0)
        self.places: tuple[Place, ...] = ()
        self.ended: dict[int, str] = {}  # how, by pid
        self.losing: set[int] = set()  # ranks whose ends it has to see yet
        self.arranging = self.preparing = False  # not answered yet
        self.why = ""  # its ranks are not those that it was told to have

    def lost(self) -> dict[int, str]:
        """Ranks whose process has ended, or is out of reach, and how."""
        return {place.rank: self.ended[place.pid] for place in self.places if place.pid in self.ended}


class Agents(Callers[Agent]):
    """same: what must be equal on all nodes. slots: for so many ranks on each node, where no accelerators count them.
    `on_loss` is called from the thread."""

    def __init__(self, count: int, same: Mapping[str, str], slots: int) -> None:
        super().__init__([Agent(number + 1) for number in range(count)], same, messages.encode, messages.decode)
        self.slots = slots
        self.on_loss: Callable[[], None] = lambda: None

    def lost(self) -> dict[int, str]:
        with self.changed:
            return {rank: how for agent in self.all for rank, how in agent.lost().items()}

    def settle(self, ranks: Sequence[int], timeout: float) -> None:
        """Wait until it is known how these ended, if they are theirs."""
        with self.changed:
            theirs = {place.rank for agent in self.all for place in agent.places} & set(ranks)
            self.changed.wait_for(lambda: theirs <= self.lost().keys(), timeout)

    def need_slots(self, ranks: int) -> None:
        """For so many ranks on each node."""
        with self.changed:
            more, self.slots = max(0, ranks - self.slots), max(ranks, self.slots)
            for agent in self.here():
                agent.room = _roomier(agent, more)

    # -- telling them

    def post(self, agent: Agent, message: ToAgent | str) -> None:
        if isinstance(message, Prepare):
            agent.preparing = True
        super().post(agent, message)

    def arrange(self, ranks: Mapping[int, tuple[int, ...]], timeout: float) -> bool:
        """Each agent that is here gets its ranks, by its number (else none). False if one went meanwhile: then they are
        to be arranged once more. Raises OSError: one could not have them now."""
        with self.changed:
            for agent in self.all:
                agent.places, agent.ended, agent.why = (), {}, ""
            told = [(agent, agent.times) for agent in self.here()]
            for agent, _ in told:
                agent.arranging = True
                self.post(agent, Arrange(tuple(sorted(agent.losing)), ranks.get(agent.number, ()), self.slots))
                agent.losing = set()
            if not self.changed.wait_for(lambda: not any(agent.arranging for agent, _ in told), timeout):
                for agent, _ in told:
                    if agent.arranging:
                        self.post(agent, f"it did not start its ranks in {timeout:.0f} s")
                        agent.arranging = False
                return False
            if any(agent.here is None or agent.times != times for agent, times in told):
                return False
            if failed := next((agent for agent, _ in told if agent.why), None):
                raise OSError(f"{failed}: {failed.why}")
            return True

    # -- ending

    def tell_end(self, *, kill: bool, last: bool) -> None:
        """last: agents end too."""
        self.closing = True
        for agent in self.here():
            if not agent.all_ended:
                self.post(agent, End(kill, last))

    # -- what they say

    def came(self, agent: Agent) -> None:
        assert agent.here is not None
        agent.losing = set()
        count = agent.here.accelerators or self.slots + agent.here.spares
        agent.room = Room(count, count, 0)

    def heard(self, agent: Agent, message: Any) -> None:
        match message:
            case Started():
                agent.places, agent.room, agent.why = message.places, message.room, message.why
                agent.arranging = False
            case Prepared():
                agent.room, agent.preparing = message.room, False
            case Ended():
                agent.ended[message.pid] = f"{message.how} on {agent}"
            case AllEnded():
                agent.all_ended = True

    def heard_all(self, agent: Agent, message: Any) -> None:
        if isinstance(message, Ended) and not self.closing:
            self.on_loss()

    def lost_with(self, agent: Agent, why: str) -> None:
        agent.arranging = agent.preparing = False
        for place in agent.places:
            agent.ended.setdefault(place.pid, f"is out of reach: {agent} is gone: {why}")

    def went(self, agent: Agent, why: str) -> None:
        if agent.places and not self.closing:
            self.on_loss()


def _roomier(agent: Agent, more: int) -> Room:
    assert agent.here is not None
    if agent.here.accelerators:
        return agent.room
    return msgspec.structs.replace(agent.room, slots=agent.room.slots + more, good=agent.room.good + more)
