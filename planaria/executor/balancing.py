"""Carries out what `core/eplb/balance.py` decides: the loop tells of steps and answers, and commands go out between
steps. Without `--enable-eplb` nothing happens here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from planaria.config.options import EngineConfig
from planaria.core.eplb.balance import ASK, ExpertBalance
from planaria.core.eplb.policy import balancedness, counts_of, rank_loads
from planaria.executor.gang import Gang
from planaria.executor.reply_ledger import Ticket
from planaria.protocol import Command, PlaceExperts, SendExperts, StepResult
from planaria.wire import ExpertLoads, ExpertStats, LayerLoad

logger = logging.getLogger("planaria.engine")

PACKED = {"q8_0": 34 / 32, "q4_1": 20 / 32}  # bytes of a weight


class Balancing:
    """Of a gang's ranks. tell: called when numbers have changed with no step to tell of. wall: seconds since 1970."""

    def __init__(
        self, config: EngineConfig, gang: Gang, tell: Callable[[], None], wall: Callable[[], float] = time.time
    ) -> None:
        self.config, self.gang, self.tell, self.wall = config, gang, tell, wall
        self.state: ExpertBalance | None = None
        self.stats: ExpertStats | None = None
        self.paused = False  # in this epoch: a rank could not tell its load
        self._began, self._moved = 0.0, 0  # the last time that nothing was being rearranged; bytes until then

    # -- events

    def formed(self) -> None:
        """The ranks of an epoch wait for steps."""
        parallel, model, gang = self.config.parallel, self.config.model, self.gang
        if not parallel.enable_eplb or model.moe is None:
            return
        self.paused = False
        nodes = num_nodes([gang.places[rank].home for rank in gang.layout.group(0, "dp", "tp")])
        if self.state is None:
            size = expert_bytes(self.config)
            self.state = ExpertBalance(
                parallel.eplb_config, gang.maps, size, num_groups=model.moe.num_groups, num_nodes=nodes
            )
            self.stats = ExpertStats()
        else:
            self.state.num_nodes = nodes
            self.state.formed(gang.maps)
            self._note(self.state)

    def stepped(self, ticket: Ticket) -> None:
        """Every rank has answered a step. Raises WorkersLost."""
        if self.state is None or self.paused:
            return
        prepared = 0
        if self.state.rearranging and self.state.config.use_async:
            prepared = min(reply.prepared for reply in ticket.replies.values() if isinstance(reply, StepResult))
        self._send(self.state, self.state.stepped(prepared))

    def moved(self, ticket: Ticket) -> None:
        """Every rank has answered another command. Raises WorkersLost."""
        if self.state is None:
            return
        if isinstance(ticket.command, SendExperts):
            self._send(self.state, self.state.received())
        elif isinstance(ticket.command, PlaceExperts):
            self._arranged(self.state)

    def told(self, ticket: Ticket) -> None:
        """A call was answered: if it was for load, take it in."""
        if self.state is None or ticket.command is not ASK:
            return
        if ticket.failed is None:
            self._loaded(self.state, ticket)
        else:  # a worker class of the user's; what has been counted and moved until now stays true
            why = ticket.failed.message
            logger.warning("experts stay where they are in this epoch: their load is not known (%s)", why)
            self.paused = True
            self.state.formed(self.gang.maps)

    def _send(self, state: ExpertBalance, commands: Iterable[Command]) -> None:
        """Maps are in force when the word for them goes out, whoever it reaches."""
        self.gang.maps = state.maps
        for command in commands:
            self.gang.send(command)

    def _loaded(self, state: ExpertBalance, ticket: Ticket) -> None:
        """Of each lane, and each share of its tokens, the first tensor rank's load, stage after stage."""
        layout, loads = self.gang.layout, dict[tuple[int, int], bytes]()
        for rank, reply in sorted(ticket.replies.items()):
            at = layout.coords(rank)
            if at.tp == 0:
                loads[at.dp, at.pcp] = loads.get((at.dp, at.pcp), b"") + getattr(reply, "value", b"")
        if not state.rearranging:
            self._began, self._moved = self.wall(), state.bytes_moved
        to_say = state.loaded(list(loads.values()))
        self._note(state)
        if to_say:
            load = counts_of(state.latest, state.window.num_experts)
            logger.info(
                "step %d: balancedness of experts %.3f in the last %d steps, %.3f in the last %d",
                state.steps, balancedness(load, state.maps), state.latest_steps, state.balancedness, state.window.steps,
            )  # fmt: skip

    def _arranged(self, state: ExpertBalance) -> None:
        before = state.rearrangements
        state.arranged()
        if state.rearrangements > before:
            now = self.wall()
            logger.info(
                "experts rearranged in %.2f s: %.1f MiB moved; balancedness of the last %d steps with them %.3f",
                now - self._began, (state.bytes_moved - self._moved) / 2**20, state.window.steps, state.balancedness,
            )  # fmt: skip
            self._note(state, now)
            self.tell()

    def _note(self, state: ExpertBalance, rearranged: float | None = None) -> None:
        assert self.stats is not None
        at = self.stats.rearranged_at if rearranged is None else rearranged
        self.stats = ExpertStats(state.balancedness, state.rearrangements, state.bytes_moved, at)

    # -- for people

    def report(self) -> ExpertLoads:
        state, model = self.state, self.config.model
        if state is None or self.stats is None:
            return ExpertLoads()
        return ExpertLoads(
            steps=state.window.steps, num_ranks=state.num_ranks, stats=self.stats, bytes_needed=state.bytes_needed,
            rearranging=state.rearranging,
            layers=[
                LayerLoad(layer, load, list(placed.slots), rank_loads(load, placed), balancedness([load], [placed]))
                for layer, load, placed in zip(model.moe_layers, state.window.total(), state.maps, strict=True)
            ],
        )  # fmt: skip


def expert_bytes(config: EngineConfig) -> int:
    """What an expert's weights take, about: how a file has packed them is not looked at."""
    model, device = config.model, config.device
    assert model.moe is not None
    weight = PACKED.get(device.quantization, 4 if device.dtype == "float32" else 2)
    return int(3 * model.hidden_size * model.moe.intermediate_size * weight)


def num_nodes(homes: Sequence[str]) -> int:
    """Nodes of an expert group's ranks; 1 where they don't follow one another in equal numbers."""
    nodes = list(dict.fromkeys(homes))
    each = len(homes) // len(nodes)
    return len(nodes) if list(homes) == [home for home in nodes for _ in range(each)] else 1
