"""Which rank gets which experts when a group is formed, and from whom. Pure.

Rule: with as many ranks as before the maps in force stay, whoever was lost; with another number ranks keep what they
have in memory. An expert is read from the checkpoint only where nobody has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from planaria.config.experts import expert_map
from planaria.config.options import EngineConfig
from planaria.core.eplb.rearrangement import resized, transfers
from planaria.models.deal import deal_layers
from planaria.topology.experts import ExpertMap, Maps, Move
from planaria.topology.layout import Coords, Layout

Holding = Mapping[int, Sequence[int]]  # experts in a rank's memory, by number of the layer among those with experts


class Placing(msgspec.Struct, frozen=True):
    """configured: where a layer's experts are at the start, in the layout there is to be. stages: the pipeline stage of
    each layer with experts. in_force: the maps of the epoch before; empty: there was none. sent, needed: experts that
    ranks which have left sent before they did, and how many of them had to."""

    configured: ExpertMap
    stages: tuple[int, ...]
    in_force: tuple[ExpertMap, ...] = ()
    sent: int = 0
    needed: int = 0

    @classmethod
    def of(cls, config: EngineConfig, layout: Layout, in_force: tuple[ExpertMap, ...]) -> Placing | None:
        """Where whole experts may go in a layout; None: they are sliced, or there are none."""
        configured = expert_map(config.model, config.parallel, layout.expert_ranks)
        if configured is None:
            return None
        partition = config.parallel.pp_layer_partition
        if partition is not None and len(partition) != layout.pp:
            partition = None
        layers = deal_layers(config.model.num_layers, layout.pp, partition)
        stages = (stage for layer in config.model.moe_layers for stage, own in enumerate(layers) if layer in own)
        return cls(configured, tuple(stages), in_force)


class ExpertsPlaced(msgspec.Struct, frozen=True):
    """A map for each layer, the moves that lead to them, and how many experts must move between ranks or be read
    whatever the maps are: those that ranks with nothing in memory have room for."""

    maps: tuple[ExpertMap, ...]
    moves: tuple[Move, ...]
    needed: int

    @property
    def sent(self) -> int:
        """Experts that go from one rank to another."""
        return sum(move.source is not None for move in self.moves)

    @property
    def read(self) -> int:
        """Experts that are read from the checkpoint."""
        return len(self.moves) - self.sent

    def as_told(self, configured: ExpertMap) -> Maps:
        """As in a Load: empty where nothing but the configuration places them."""
        return () if all(placed == configured for placed in self.maps) else tuple(placed.slots for placed in self.maps)


def placed(placing: Placing, layout: Layout, holdings: Sequence[Holding]) -> ExpertsPlaced:
    """For ranks of `layout` with this in memory, by world rank."""
    held = []
    for layer, stage in enumerate(placing.stages):
        ranks = layout.group(layout.rank(Coords(0, stage, 0, 0)), "dp", "pcp", "tp")
        held.append([holdings[rank].get(layer, ()) for rank in ranks])
    return _placed(placing, held, None)


def departing(placing: Placing, ranks: int) -> ExpertsPlaced:
    """What ranks after the first `ranks` of each expert group send before they leave, so that nothing that is in memory
    must be read again. placing: in_force is what they have."""
    held = [[sorted(set(old.of(rank))) for rank in range(old.num_ranks)] for old in placing.in_force]
    return _placed(placing, held, ranks)


def _placed(placing: Placing, holdings: Sequence[Sequence[Sequence[int]]], ranks: int | None) -> ExpertsPlaced:
    """holdings: by layer and rank of its expert group, of which the first `ranks` stay; None: all."""
    maps: list[ExpertMap] = []
    moves: list[Move] = []
    needed = 0
    for layer, held in enumerate(holdings):
        new = _map(placing, layer, held[:ranks])
        maps.append(new)
        moves += transfers(layer, held, new)
        needed += least(held[:ranks], new)
    return ExpertsPlaced(tuple(maps), tuple(moves), needed)


def least(held: Sequence[Sequence[int]], new: ExpertMap) -> int:
    """How many experts of a layer ranks must get, whichever map of this shape they have."""
    room = [min(len(new.span(rank)), new.num_experts) for rank in range(new.num_ranks)]
    return sum(max(0, each - len(set(there))) for each, there in zip(room, held, strict=True))


def _map(placing: Placing, layer: int, held: Sequence[Sequence[int]]) -> ExpertMap:
    before = placing.in_force[layer] if placing.in_force else None
    wanted = placing.configured
    if before is not None and (before.num_ranks, len(before.slots)) == (wanted.num_ranks, len(wanted.slots)):
        return before
    if not any(held):
        return wanted
    return resized(held, wanted.num_experts, len(wanted.slots))
