"""What a simulated rank has of the experts, and how they travel between ranks: exchanged at a meeting or beside steps,
laid aside, put into slots by a commit. What is in memory stays from one epoch to the next.

Rules
- same maps: ranks that compute a step together go by the same maps, those that were in force when it was planned
- held: each slot holds the expert that the maps say; who is to send an expert has it
- prepared: a commit comes only to ranks that have received what it is of, in this epoch, one step at a time
- weights: no expert is read from the checkpoint that a rank of this epoch has in memory, or that one had which left
- bytes: what is said to have moved was sent, by steps that were committed, once
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from planaria.config.experts import expert_map
from planaria.models.deal import deal_layers
from planaria.protocol import Load, SendExperts
from planaria.topology import Layout
from planaria.topology.experts import Maps, Move, slots_of

if TYPE_CHECKING:
    from tests.sim.process import Process

Held = dict[int, set[int]]  # by layer


class Experts:
    """Of one process. `stamp` changes with its maps."""

    def __init__(self, process: Process) -> None:
        self.process, self.world = process, process.sim.world
        config = process.sim.scenario.config
        self.config, self.num_layers = config, config.model.num_layers
        self.travel = config.model.moe is not None and config.parallel.enable_expert_parallel
        self.memory: Held = {}
        self.aside: set[tuple[int, int]] = set()  # layer, expert
        self.maps: dict[int, tuple[int, ...]] = {}
        self.stamp = 0
        self.prepared = 0  # version
        self.coming: SendExperts | None = None  # beside steps
        self.failure = ""
        self.steps = 0  # whose load was not told

    # -- where it is

    @property
    def layout(self) -> Layout:
        return self.process.layout

    @property
    def group(self) -> tuple[int, ...]:
        return self.layout.group(self.process.rank, "dp", "pcp", "tp")

    @property
    def own(self) -> int:
        return self.group.index(self.process.rank)

    @property
    def layers(self) -> range:
        return deal_layers(self.num_layers, self.layout.pp)[self.layout.coords(self.process.rank).pp]

    def mine(self, slots: Sequence[int]) -> Sequence[int]:
        span = slots_of(len(slots), len(self.group), self.own)
        return slots[span.start : span.stop]

    def configured(self, layout: Layout) -> Maps:
        placed = expert_map(self.config.model, self.config.parallel, layout.expert_ranks)
        return (placed.slots,) * self.num_layers if placed is not None else ()

    def takes_part(self, moves: Iterable[Move]) -> bool:
        own, layers = self.own, self.layers
        return any(move.layer in layers and own in (move.source, move.target) for move in moves)

    # -- epochs

    def held(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """As Hello says."""
        if not self.travel:
            return ()
        return tuple((layer, tuple(sorted(experts))) for layer, experts in sorted(self._all().items()))

    def _all(self) -> Held:
        every = {layer: set(experts) for layer, experts in self.memory.items()}
        for layer, expert in self.aside:
            every.setdefault(layer, set()).add(expert)
        return every

    def unload(self) -> None:
        """Another part of the model is loaded in place of this one."""
        self.memory, self.maps, self.aside = {}, {}, set()
        self.stamp += 1

    def read_ahead(self, layout: Layout) -> None:
        """A spare that may become any lane's rank."""
        if self.travel:
            self.memory = {layer: set(slots) for layer, slots in enumerate(self.configured(layout))}

    def enter(self) -> None:
        self.prepared, self.failure, self.coming, self.steps = 0, "", None, 0

    def load(self, command: Load) -> None:
        if not self.travel:
            return
        maps, have = command.maps or self.configured(self.layout), self._all()
        coming = {(m.layer, m.expert) for m in command.moves if m.target == self.own and m.source is not None}
        for layer in self.layers:
            for expert in sorted(set(self.mine(maps[layer]))):
                if expert not in have.get(layer, ()) and (layer, expert) not in coming:
                    self.process.sim.rules.reads_expert(self.process, layer, expert)
                    self.memory.setdefault(layer, set()).add(expert)
        if not command.moves:
            self.arrange(0, enumerate(maps))

    # -- travelling

    def receive(self, command: SendExperts) -> None:
        """The exchange is over: what others sent lies aside."""
        ports = self.process.link.ports if self.process.link is not None else {}
        own, layers = self.own, self.layers
        for move in command.moves:
            if move.layer not in layers or move.source is None or own not in (move.source, move.target):
                continue
            source = ports[self.group[move.source]].experts
            has = move.expert in source._all().get(move.layer, ())
            who = f"rank {source.process.rank} is to send expert {move.expert} of layer {move.layer}"
            self.world.require(has, "held", f"{who}, which it hasn't got")
            if move.target == own:
                self.aside.add((move.layer, move.expert))
                self.process.sim.counts["experts moved"] += move.source != own
        self.prepared, self.coming = command.version, None

    def arrange(self, version: int, maps: Iterable[tuple[int, Sequence[int]]]) -> None:
        require, rank = self.world.require, self.process.rank
        has = version <= self.prepared
        require(has, "prepared", f"version {version} is committed, rank {rank} has {self.prepared}")
        layers = self.layers
        for layer, slots in maps:
            if layer not in layers:
                continue
            every, wanted = self._all().get(layer, set()), set(self.mine(slots))
            require(wanted <= every, "held", f"rank {rank}, layer {layer}: {sorted(wanted - every)} are not there")
            self.aside = {item for item in self.aside if item[0] != layer}
            self.memory[layer], self.maps[layer] = wanted, tuple(slots)
        self.stamp += 1

    # -- computing

    def load_counts(self) -> bytes:
        """Tokens of this stage's layers' experts since the last time; some experts are liked more than others."""
        moe = self.config.model.moe
        if moe is None or self.layout.coords(self.process.rank).tp:
            return b""
        liked = self.process.sim.scenario.liked
        counts = [
            self.steps * liked[(layer + expert) % len(liked)] + self.world.random.randrange(3)
            for layer in self.layers for expert in range(moe.num_experts)
        ]  # fmt: skip
        self.steps = 0
        return struct.pack(f"<{len(counts)}q", *counts)

    def meets(self, others: Iterable[Experts], planned: Maps) -> None:
        """These ranks compute a step together."""
        for layer in self.layers:
            slots = self.maps.get(layer)
            for other in others:
                theirs, who = other.maps.get(layer), f"layer {layer} of ranks {self.process.rank}, {other.process.rank}"
                self.world.require(theirs == slots, "same maps", f"{who}: {slots} and {theirs}")
            if planned:
                self.world.require(slots == planned[layer], "same maps", f"{slots}, {planned[layer]} is in force")
            assert slots is not None
            missing = set(self.mine(slots)) - self.memory[layer]
            self.world.require(not missing, "held", f"rank {self.process.rank}, layer {layer}: {missing} not there")
