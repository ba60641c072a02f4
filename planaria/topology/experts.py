"""Which rank of an expert group holds which experts of a layer.

A layer has `num_experts` logical experts and at least as many slots; a slot holds the weights of one expert, and an
expert may have several slots (replicas). Slots are numbered through and dealt to ranks contiguously: as many to each,
earlier ranks one more. Every expert has a slot, always.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

STRATEGIES = ("linear", "round_robin")

Maps = tuple[tuple[int, ...], ...]  # of each layer with experts, in order: the expert of each slot


class Move(msgspec.Struct, frozen=True, array_like=True):
    """An expert's weights, written into a slot. source == target: a copy inside the rank."""

    layer: int  # among the layers with experts
    expert: int
    slot: int  # of the layer, in the new map
    source: int | None  # rank of the expert group; None: to be read from the checkpoint
    target: int  # rank of the expert group


class ExpertMap(msgspec.Struct, frozen=True, array_like=True):
    """`slots`: logical expert of each slot. Raises ValueError where an expert has none or there is no such expert."""

    num_experts: int
    num_ranks: int
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_experts < 1:
            raise ValueError(f"{self.num_experts} experts on {self.num_ranks} ranks: at least one of each is needed")
        held = set(self.slots)
        unknown = sorted(held - set(range(self.num_experts)))
        if unknown:
            raise ValueError(f"there is no expert {unknown[0]} among {self.num_experts}")
        missing = sorted(set(range(self.num_experts)) - held)
        if missing:
            raise ValueError(f"no slot holds expert {missing[0]}")

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertMap:
        """4 on 2 ranks: [0, 1] [2, 3]. Redundant slots come last and hold experts 0, 1, ... again."""
        again = (slot % num_experts for slot in range(num_redundant))
        return cls(num_experts, num_ranks, (*range(num_experts), *again))

    @classmethod
    def round_robin(cls, num_experts: int, num_ranks: int) -> ExpertMap:
        """4 on 2 ranks: [0, 2] [1, 3]."""
        return cls(num_experts, num_ranks, tuple(e for r in range(num_ranks) for e in range(r, num_experts, num_ranks)))

    @classmethod
    def placed(cls, strategy: str, num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertMap:
        """By the name of a strategy. With redundant slots round robin is linear (the configuration has said so)."""
        if strategy == "round_robin" and num_redundant == 0:
            return cls.round_robin(num_experts, num_ranks)
        return cls.linear(num_experts, num_ranks, num_redundant)

    @property
    def num_redundant(self) -> int:
        return len(self.slots) - self.num_experts

    def span(self, rank: int) -> range:
        """The slots of a rank. Raises ValueError for a rank that isn't there."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not among {self.num_ranks}")
        return slots_of(len(self.slots), self.num_ranks, rank)

    def of(self, rank: int) -> tuple[int, ...]:
        """Logical experts of a rank's slots, slot by slot. An expert may be there twice."""
        self.span(rank)
        return slots_at(self.slots, self.num_ranks, rank)

    def rank_of(self, slot: int) -> int:
        """Raises ValueError for a slot that isn't there."""
        if not 0 <= slot < len(self.slots):
            raise ValueError(f"slot {slot} is not among {len(self.slots)}")
        each, more = divmod(len(self.slots), self.num_ranks)
        large = more * (each + 1)  # slots of the ranks with one more
        return slot // (each + 1) if slot < large else more + (slot - large) // each

    @property
    def counts(self) -> list[int]:
        """How many slots each expert has, which share its tokens evenly."""
        counts = [0] * self.num_experts
        for expert in self.slots:
            counts[expert] += 1
        return counts


def slots_at(experts: Sequence[int], num_ranks: int, rank: int) -> tuple[int, ...]:
    """What the slots of a rank hold, of all."""
    held = slots_of(len(experts), num_ranks, rank)
    return tuple(experts[held.start : held.stop])


def slots_of(num_slots: int, num_ranks: int, rank: int) -> range:
    """The slots of a rank where so many are dealt contiguously, earlier ranks holding one more."""
    each, more = divmod(num_slots, num_ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))
