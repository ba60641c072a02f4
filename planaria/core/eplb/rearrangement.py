"""Moving experts between ranks while they are used, as transactions. Pure: who carries a step out says when it is done.

A step is prepared (each rank reads the weights it is sent into memory aside, nothing in use changes) and then committed
(between two steps of the engine every rank writes them into their slots, and the new maps are in force). Whenever it
stops, the maps in force are complete: a slot is overwritten only when its expert has another, or gets one in the same
step. A step that was prepared and not committed is as if it had never been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import msgspec

from planaria.core.eplb.policy import joined, settled
from planaria.topology.experts import ExpertMap, Move, slots_of


class Step(msgspec.Struct, frozen=True, array_like=True):
    """Moves that are prepared together and committed together. All sources are read before any slot is written."""

    moves: tuple[Move, ...]
    bytes: int  # between ranks


class Rearrangement:
    """From the maps in force to others of the same shape, in steps of at most `step_bytes` between ranks.

    Experts that must change places in a circle are one step, however many bytes that takes. ValueError for maps of
    another shape.
    """

    def __init__(self, old: Sequence[ExpertMap], new: Sequence[ExpertMap], expert_bytes: int, step_bytes: int) -> None:
        shapes = [[(p.num_experts, p.num_ranks, len(p.slots)) for p in maps] for maps in (old, new)]
        if shapes[0] != shapes[1]:
            raise ValueError("maps of another shape can't be reached while experts are used: form the group again")
        self.maps = tuple(old)  # in force
        self.bytes_needed = sum(map(missing_copies, old, new)) * expert_bytes
        self.preparing: Step | None = None
        self.steps = deque(_steps(old, new, expert_bytes, step_bytes))  # to be prepared

    @property
    def done(self) -> bool:
        return not self.steps and self.preparing is None

    def prepare(self) -> Step | None:
        """Begins the next step; None: there is none."""
        assert self.preparing is None, "a step is being prepared"
        if self.steps:
            self.preparing = self.steps.popleft()
        return self.preparing

    def commit(self) -> tuple[ExpertMap, ...]:
        """Every rank has prepared the step: from now on its maps are in force, whoever is lost."""
        step = self.preparing
        assert step is not None, "no step is being prepared"
        slots = {move.layer: list(self.maps[move.layer].slots) for move in step.moves}
        for move in step.moves:
            slots[move.layer][move.slot] = move.expert
        self.maps = tuple(
            msgspec.structs.replace(placed, slots=tuple(slots[layer])) if layer in slots else placed
            for layer, placed in enumerate(self.maps)
        )
        self.preparing = None
        return self.maps


def missing_copies(old: ExpertMap, new: ExpertMap) -> int:
    """Experts that ranks must be sent, each once a rank: what has to move, however it is done."""
    return sum(len(set(new.of(rank)) - set(old.of(rank))) for rank in range(new.num_ranks))


def transfers(layer: int, held: Sequence[Collection[int]], new: ExpertMap) -> tuple[Move, ...]:
    """What ranks must be sent to have `new`, when a group is formed again: a resize, or after a loss.

    held: experts in the memory of each rank; those of `new` are the first, the others are leaving. A source is the one
    that sends least of those that have the expert; None: nobody has. A rank that has an expert already is sent nothing;
    one that needs it twice gets it once. Ranks' first experts come before anybody's second.
    """
    sends = [0] * len(held)
    wanted = [
        [expert for expert in dict.fromkeys(new.of(rank)) if expert not in held[rank]] for rank in range(new.num_ranks)
    ]
    moves: list[Move] = []
    for number in range(max(map(len, wanted))):
        for rank, experts in enumerate(wanted):
            if number >= len(experts):
                continue
            expert = experts[number]
            sources = [source for source, there in enumerate(held) if expert in there]
            source = min(sources, key=lambda source: (sends[source], source)) if sources else None
            if source is not None:
                sends[source] += 1
            slot = new.span(rank)[new.of(rank).index(expert)]
            moves.append(Move(layer, expert, slot, source, rank))
    return tuple(moves)


def resized(held: Sequence[Sequence[int]], num_experts: int, num_slots: int) -> ExpertMap:
    """A map for these ranks, in which each keeps all it can of what it has in memory: few weights travel.

    ValueError for fewer slots than experts.
    """
    if num_slots < num_experts:
        raise ValueError(f"{num_slots} slots are too few for {num_experts} experts")
    room = [len(slots_of(num_slots, len(held), rank)) for rank in range(len(held))]
    packs: list[list[int]] = [[] for _ in room]
    counts = [0] * num_experts

    def put(rank: int, expert: int) -> None:
        packs[rank].append(expert)
        counts[expert] += 1

    def keep(*, first: bool) -> None:
        for rank in sorted(range(len(held)), key=lambda rank: len(held[rank])):  # who has less has less of a choice
            for expert in held[rank]:
                if len(packs[rank]) < room[rank] and expert not in packs[rank] and not (first and counts[expert]):
                    put(rank, expert)

    keep(first=True)  # one slot for each expert before any replica
    for expert in [expert for expert, count in enumerate(counts) if not count]:
        put(max(range(len(room)), key=lambda rank: room[rank] - len(packs[rank])), expert)
    keep(first=False)
    for rank, pack in enumerate(packs):
        while len(pack) < room[rank]:
            put(rank, min(range(num_experts), key=lambda expert: (expert in pack, counts[expert], expert)))
    return ExpertMap(num_experts, len(held), joined(packs))


# -- steps


def _steps(old: Sequence[ExpertMap], new: Sequence[ExpertMap], expert_bytes: int, step_bytes: int) -> Iterator[Step]:
    moves: list[Move] = []
    used = 0
    for layer, (before, after) in enumerate(zip(old, new, strict=True)):
        wanted = settled([after.of(rank) for rank in range(after.num_ranks)], before).slots
        slots = list(before.slots)  # as the steps so far leave them
        reads = list(slots)  # as they are when the present step begins: what can be read
        sends = [0] * before.num_ranks
        for unit in _units(before.slots, wanted):
            cost = expert_bytes * _travels(before, reads, unit, wanted)
            if moves and used + cost > step_bytes:
                yield Step(tuple(moves), used)
                moves, used, reads = [], 0, list(slots)
                cost = expert_bytes * _travels(before, reads, unit, wanted)
            used += cost
            for slot in unit:
                moves.append(_move(layer, wanted[slot], slot, before, reads, sends))
                slots[slot] = wanted[slot]
    if moves:
        yield Step(tuple(moves), used)


def _units(before: Sequence[int], wanted: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Slots that are written together: one whose expert has another slot by then, or a circle."""
    now = list(before)
    counts = [0] * (max(now) + 1)
    for expert in now:
        counts[expert] += 1
    pending = [slot for slot, expert in enumerate(now) if expert != wanted[slot]]

    def write(slots: tuple[int, ...]) -> tuple[int, ...]:
        for slot in slots:
            counts[now[slot]] -= 1
            counts[wanted[slot]] += 1
            now[slot] = wanted[slot]
        return slots

    while pending:
        left: list[int] = []
        for slot in pending:
            if counts[now[slot]] > 1:
                yield write((slot,))
            else:
                left.append(slot)
        if len(left) == len(pending):  # each holds its expert's only copy, and waits for one that does too
            goes_to = {wanted[slot]: slot for slot in reversed(left)}
            path = [left[0]]
            while (following := goes_to[now[path[-1]]]) not in path:
                path.append(following)
            circle = path[path.index(following) :]
            yield write(tuple(circle))
            left = [slot for slot in left if slot not in circle]
        pending = left


def _travels(placed: ExpertMap, reads: Sequence[int], unit: Sequence[int], wanted: Sequence[int]) -> int:
    """How many of a unit's experts their ranks haven't got."""
    spans = [(wanted[slot], placed.span(placed.rank_of(slot))) for slot in unit]
    return sum(expert not in reads[span.start : span.stop] for expert, span in spans)


def _move(layer: int, expert: int, slot: int, placed: ExpertMap, reads: Sequence[int], sends: list[int]) -> Move:
    """From the rank itself if it has the expert, else from the one of those that have it that sends least."""
    target = placed.rank_of(slot)
    sources = sorted({placed.rank_of(at) for at, held in enumerate(reads) if held == expert})
    source = target if target in sources else min(sources, key=lambda rank: (sends[rank], rank))
    if source != target:
        sends[source] += 1
    return Move(layer, expert, slot, source, target)
