"""Experts that are balanced: when their load is asked for, when they move, which maps are in force. Pure.

Events come in, commands for all ranks come out. Rules: maps change when a commit (`PlaceExperts`) is given out, at no
other time, and it is given out only when every rank has what the step sends it; one step is on its way at a time. So
what was prepared and not committed never was, whoever is lost, and a rank that missed the word for a commit is told the
maps when the next epoch begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from planaria.config.options import EPLBConfig
from planaria.core.eplb.policy import LoadWindow, balance, balancedness
from planaria.core.eplb.rearrangement import Rearrangement
from planaria.protocol import Call, Command, PlaceExperts, SendExperts
from planaria.topology.experts import ExpertMap

LEAST_GAIN = 0.02  # of a layer's balancedness, to be worth moving weights
STEP_BYTES = 16 << 20  # between ranks, at a time
LOOKS = 16  # at the load while a window, or the time between two rearrangements, passes
ASK = Call("expert_load")

Maps = tuple[ExpertMap, ...]


class ExpertBalance:
    """maps: of each layer with experts, in force at the start. expert_bytes: of one. num_groups, num_nodes: as for
    `balance`."""

    def __init__(
        self, config: EPLBConfig, maps: Maps, expert_bytes: int, *, num_groups: int = 1, num_nodes: int = 1,
        step_bytes: int = STEP_BYTES,
    ) -> None:  # fmt: skip
        self.config, self.maps = config, maps
        self.expert_bytes, self.step_bytes = expert_bytes, step_bytes
        self.num_groups, self.num_nodes = num_groups, num_nodes
        self.window = LoadWindow(len(maps), maps[0].num_experts, config.window_size)
        self.every = max(1, min(config.window_size, config.step_interval) // LOOKS)  # steps between looks
        self.version = 0  # of the last step that was begun; no other ever has the same
        self.rearrangements = 0  # that moved something, and are complete
        self.bytes_moved = self.bytes_needed = 0  # between ranks; of what was begun: what had to be
        self.steps = 0
        self.latest = bytes(8 * len(maps) * maps[0].num_experts)  # the load that came last, of so many steps
        self.latest_steps = 0
        self._since = 0  # steps since the last rearrangement was decided on
        self._unseen = self._asked = 0  # steps since load was asked for; that the answer under way is of
        self._asking = False
        self._unsaid = 0  # steps since balancedness was last to be logged
        self._saying = False  # it is, with the answer under way
        self._load: list[list[int]] | None = None  # that a rearrangement is being planned for
        self._planned: list[ExpertMap] = []  # layers of it
        self._moving: Rearrangement | None = None
        self._arranging = False

    @property
    def num_ranks(self) -> int:
        return self.maps[0].num_ranks

    @property
    def rearranging(self) -> bool:
        return self._moving is not None or self._load is not None

    # -- events

    def stepped(self, prepared: int = 0) -> list[Command]:
        """A step was computed. prepared: the last version that every rank has received beside its steps."""
        self.steps += 1
        self._since += 1
        self._unseen += 1
        self._unsaid += 1
        commands: list[Command] = []
        if not self._asking and self._to_ask:
            self._asking, self._asked, self._unseen = True, self._unseen, 0
            self._saying = self._to_say
            if self._saying:
                self._unsaid %= self.config.log_balancedness_interval
            commands.append(ASK)
        if self._load is not None:
            self._plan(self._load)
        elif self._moving is not None and not self._arranging:
            if self._moving.preparing is None:
                commands += self._begin(self._moving)
            elif self.config.use_async and prepared >= self.version:
                commands += self._commit(self._moving)
        return commands

    def loaded(self, lanes: Sequence[bytes]) -> bool:
        """The answer: of each lane the tokens of all layers' experts, as for `LoadWindow`. Is balancedness to be logged
        now? ValueError for another size."""
        self._asking = False
        size = max(map(len, lanes))
        together = sum(int.from_bytes(lane, "little") for lane in lanes).to_bytes(size, "little")
        self.window.add(together, self._asked)
        self.latest, self.latest_steps = together, self._asked
        if self._due and not self.rearranging:
            self._since, self._load, self._planned = 0, self.window.total(), []
        return self._saying

    def received(self) -> list[Command]:
        """Every rank has answered the `SendExperts` that is under way."""
        moving = self._moving
        if self.config.use_async or moving is None or moving.preparing is None:
            return []
        return self._commit(moving)

    def arranged(self) -> None:
        """Every rank has answered the `PlaceExperts`."""
        self._arranging = False
        if self._moving is not None and self._moving.done:
            self._moving = None
            self.rearrangements += 1

    def formed(self, maps: Maps) -> None:
        """Another epoch begins, with these maps, also of other ranks: what was not committed never was."""
        self.maps = maps
        self._moving, self._load = None, None
        self._asking = self._arranging = False

    # -- what is known

    @property
    def balancedness(self) -> float:
        """Of the window, with the maps in force."""
        return balancedness(self.window.total(), self.maps)

    @property
    def _to_ask(self) -> bool:
        return self._unseen >= self.every or self._to_say or (self._due and not self.rearranging)

    @property
    def _to_say(self) -> bool:
        return self.config.log_balancedness and self._unsaid >= self.config.log_balancedness_interval

    @property
    def _due(self) -> bool:
        return self._since >= self.config.step_interval

    # -- deciding

    def _plan(self, load: list[list[int]]) -> None:
        """One layer at a time, so that no step waits for all."""
        layer = len(self._planned)
        now = self.maps[layer]
        self._planned += balance(
            [load[layer]], len(now.slots), now.num_ranks, num_groups=self.num_groups, num_nodes=self.num_nodes,
            now=[now], least_gain=LEAST_GAIN,
        )  # fmt: skip
        if len(self._planned) < len(self.maps):
            return
        moving = Rearrangement(self.maps, self._planned, self.expert_bytes, self.step_bytes)
        self._load = None
        if not moving.done:
            self._moving = moving
            self.bytes_needed += moving.bytes_needed

    def _begin(self, moving: Rearrangement) -> list[Command]:
        step = moving.prepare()
        assert step is not None, "a rearrangement without steps is over"
        self.version += 1
        return [SendExperts(self.version, step.moves, self.config.use_async)]

    def _commit(self, moving: Rearrangement) -> list[Command]:
        assert moving.preparing is not None
        self.bytes_moved += moving.preparing.bytes
        before, self.maps = self.maps, moving.commit()
        self._arranging = True
        changed = [(i, new.slots) for i, (old, new) in enumerate(zip(before, self.maps, strict=True)) if old != new]
        return [PlaceExperts(self.version, tuple(changed))]
