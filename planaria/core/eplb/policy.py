"""Which experts to repeat and where to put them, from the load there was. Pure and deterministic.

A layer is as slow as its busiest rank, so what counts is *balancedness*: mean over maximum of the ranks' loads, 1 where
all are equal. An expert's replicas share its load evenly. Each expert keeps a slot, ranks keep their number of slots,
and what comes out is never less balanced than experts dealt in order (`ExpertMap.linear`).
"""

from __future__ import annotations

import heapq
import struct
from collections import deque
from collections.abc import Sequence
from math import fsum

from planaria.topology.experts import ExpertMap

ExpertLoad = Sequence[int]  # tokens of each expert of a layer
Packs = list[list[int]]  # experts of each rank

ROUNDING = 1e-9  # of a load: a smaller gain may be none


class LoadWindow:
    """The load of the last `size` steps, at least: as it comes for several steps at a time, up to so many more.

    What comes at a time is kept as one large integer with a field of 64 bits for each count, so that adding it is one
    addition. Load is of experts, not of slots: a rearrangement changes nothing of what was counted.
    """

    def __init__(self, num_layers: int, num_experts: int, size: int) -> None:
        self.num_layers, self.num_experts, self.size = num_layers, num_experts, size
        self.steps = 0  # that are in it
        self._parts: deque[tuple[int, int]] = deque()  # load, of so many steps
        self._sum = 0

    def add(self, load: bytes, steps: int = 1) -> None:
        """Tokens of the next steps, [layers, experts], int64 little-endian. ValueError for another size."""
        if len(load) != 8 * self.num_layers * self.num_experts:
            shape = f"{self.num_layers} layers x {self.num_experts} experts"
            raise ValueError(f"{len(load)} bytes of load are not {shape} of 8 bytes")
        part = int.from_bytes(load, "little")
        self._parts.append((part, steps))
        self._sum += part
        self.steps += steps
        while self._parts and self.steps - self._parts[0][1] >= self.size:
            part, steps = self._parts.popleft()
            self._sum -= part
            self.steps -= steps

    def total(self) -> list[list[int]]:
        """Tokens of each layer's experts in the window."""
        return counts_of(self._sum.to_bytes(8 * self.num_layers * self.num_experts, "little"), self.num_experts)


def counts_of(load: bytes, num_experts: int) -> list[list[int]]:
    """Tokens of each layer's experts."""
    counts = struct.unpack(f"<{len(load) // 8}q", load)
    return [list(counts[i : i + num_experts]) for i in range(0, len(counts), num_experts)]


def rank_loads(load: ExpertLoad, placed: ExpertMap) -> list[float]:
    """Tokens of each rank in a layer."""
    counts = placed.counts
    return [fsum(load[expert] / counts[expert] for expert in placed.of(rank)) for rank in range(placed.num_ranks)]


def balancedness(load: Sequence[ExpertLoad], placed: Sequence[ExpertMap]) -> float:
    """Of all layers: the sum of their means over the sum of their maxima; 1 where there is no load."""
    each = [rank_loads(layer, where) for layer, where in zip(load, placed, strict=True)]
    busiest = fsum(max(loads) for loads in each)
    total = fsum(sum(layer) / where.num_ranks for layer, where in zip(load, placed, strict=True))
    return total / busiest if busiest else 1.0


def balance(
    load: Sequence[ExpertLoad], num_slots: int, num_ranks: int, *, num_groups: int = 1, num_nodes: int = 1,
    now: Sequence[ExpertMap] | None = None, least_gain: float = 0.0,
) -> tuple[ExpertMap, ...]:  # fmt: skip
    """A map for each layer.

    num_groups: of experts in order, from which routing picks a few for a token; where they divide the nodes evenly a
    group's experts stay on one node. num_nodes: with as many ranks each, in order. now: the maps in force: a rank keeps
    what it can. least_gain: what balancedness must gain to be worth moving weights: a layer that would gain no more is
    left as it is (unless groups are to come together), and a map that is no further from the best is taken if few moves
    lead to it. ValueError for fewer slots than experts.
    """
    return tuple(
        _layer(layer, num_slots, num_ranks, num_groups, num_nodes, now[i] if now else None, least_gain)
        for i, layer in enumerate(load)
    )


def _layer(
    load: ExpertLoad, slots: int, ranks: int, groups: int, nodes: int, now: ExpertMap | None, least_gain: float
) -> ExpertMap:
    num = len(load)
    if slots < num:
        raise ValueError(f"{slots} slots are too few for {num} experts")
    linear = ExpertMap.linear(num, ranks, slots - num)
    if groups % nodes or num % groups or ranks % nodes or slots % ranks:
        groups, nodes = 1, 1
    best = _best(load, linear, groups, nodes)
    if _even(load, best) < _even(load, linear):  # groups that stay together can't be dealt well
        nodes = 1
        best = max(_best(load, linear, 1, 1), linear, key=lambda placed: _even(load, placed))
    if now is None or now.num_ranks != ranks or len(now.slots) != slots:
        return best
    wanted = _even(load, best) - least_gain
    if _together(now, groups, nodes):
        if _even(load, now) >= wanted:
            return now
        packs, here = _packs(now), ranks // nodes
        for start in range(0, ranks, here):
            part = packs[start : start + here]
            _improve(load, part, True, sum(load) / ranks / wanted)
            packs[start : start + here] = part
        if _even(load, ExpertMap(num, ranks, joined(packs))) >= wanted:
            return settled(packs, now)
    return settled(_relabelled(_packs(best), now, nodes), now)


def _together(placed: ExpertMap, groups: int, nodes: int) -> bool:
    """Is each group's every slot on one node?"""
    size, here = placed.num_experts // groups, placed.num_ranks // nodes
    places = {(held // size, placed.rank_of(slot) // here) for slot, held in enumerate(placed.slots)}
    return nodes == 1 or len(places) == groups


def _best(load: ExpertLoad, shape: ExpertMap, groups: int, nodes: int) -> ExpertMap:
    """The most balanced of those found; of equals the one whose replicas are apart."""
    found = [_dealt(load, shape, groups, nodes, apart) for apart in (True, False)]
    maps = [ExpertMap(shape.num_experts, shape.num_ranks, joined(packs)) for packs in found]
    return max(maps, key=lambda placed: _even(load, placed))


def joined(packs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(expert for pack in packs for expert in pack)


def _packs(placed: ExpertMap) -> Packs:
    return [list(placed.of(rank)) for rank in range(placed.num_ranks)]


def _even(load: ExpertLoad, placed: ExpertMap) -> float:
    return balancedness([load], [placed])


def replicate(load: Sequence[float], slots: int) -> list[int]:
    """Slots of each expert: each further one goes to the expert whose replicas have the most load."""
    counts = [1] * len(load)
    hottest = [(-tokens, expert) for expert, tokens in enumerate(load)]
    heapq.heapify(hottest)
    for _ in range(slots - len(load)):
        _, expert = hottest[0]
        counts[expert] += 1
        heapq.heapreplace(hottest, (-load[expert] / counts[expert], expert))
    return counts


def _dealt(load: ExpertLoad, shape: ExpertMap, groups: int, nodes: int, apart: bool) -> Packs:
    """Groups to nodes, then on each node replicas of its experts to its ranks. apart: replicas of one expert on
    different ranks, where that can be had."""
    size, here = len(load) // groups, shape.num_ranks // nodes
    capacity = [len(shape.span(rank)) for rank in range(shape.num_ranks)]
    tokens = [sum(load[group * size : (group + 1) * size]) for group in range(groups)]
    packs: Packs = []
    for node, dealt in enumerate(_packed(tokens, [1] * groups, [groups // nodes] * nodes, False)):
        experts = [expert for group in dealt for expert in range(group * size, (group + 1) * size)]
        own = [load[expert] for expert in experts]
        room = capacity[node * here : (node + 1) * here]
        part = _packed(own, replicate(own, sum(room)), room, apart)
        _improve(own, part, apart, 0.0)
        packs += [[experts[i] for i in pack] for pack in part]
    return packs


def _packed(load: ExpertLoad, counts: list[int], capacity: list[int], apart: bool) -> Packs:
    """Replicas on ranks: the heaviest first, each to the least loaded rank with a free slot."""
    share = [tokens / count for tokens, count in zip(load, counts, strict=True)]
    packs: Packs = [[] for _ in capacity]
    loads = [0.0] * len(capacity)
    for expert in sorted(range(len(load)), key=lambda expert: -share[expert]):
        for _ in range(counts[expert]):
            free = [rank for rank, pack in enumerate(packs) if len(pack) < capacity[rank]]
            others = [rank for rank in free if expert not in packs[rank]] if apart else free
            rank = min(others or free, key=loads.__getitem__)
            packs[rank].append(expert)
            loads[rank] += share[expert]
    return packs


# -- small changes


def _improve(load: ExpertLoad, packs: Packs, apart: bool, enough: float) -> None:
    """Makes the busiest rank less busy, again and again, until its load is `enough` or no small change helps: it swaps
    an expert with another rank, or another rank takes a share of one in place of a replica of a colder one."""
    counts = [0] * len(load)
    for pack in packs:
        for expert in pack:
            counts[expert] += 1
    for _ in range(2 * sum(counts)):
        share = [tokens / max(count, 1) for tokens, count in zip(load, counts, strict=True)]
        loads = [fsum(share[expert] for expert in pack) for pack in packs]
        busy = max(range(len(packs)), key=loads.__getitem__)
        limit = loads[busy] * (1 - ROUNDING)
        if limit <= enough:
            return
        found = _share(load, packs, counts, loads, busy, apart), _swap(packs, loads, share, busy, apart)
        ways = [way for way in found if way is not None and way[0] < limit]
        if not ways:
            return
        _, rank, at, expert, back = min(ways)
        old = packs[rank][at]
        packs[rank][at] = expert
        if back < 0:
            counts[expert] += 1
            counts[old] -= 1
        else:
            packs[busy][back] = old


# The highest load of the ranks concerned; rank, position and the expert put there; where on the busy rank the expert
# goes that was there, -1: nowhere.
Swap = tuple[float, int, int, int, int]


def _swap(packs: Packs, loads: list[float], share: list[float], busy: int, apart: bool) -> Swap | None:
    """With the least loaded rank with which it helps."""
    for rank in sorted(range(len(packs)), key=loads.__getitem__):
        best: Swap | None = None
        for back, mine in enumerate(packs[busy]):
            for at, theirs in enumerate(packs[rank]):
                gain = share[mine] - share[theirs]
                highest = max(loads[busy] - gain, loads[rank] + gain)
                if highest < (best[0] if best else loads[busy] * (1 - ROUNDING)) and not (
                    apart and (mine in packs[rank] or theirs in packs[busy])
                ):
                    best = (highest, rank, at, mine, back)
        if best is not None:
            return best
    return None


def _share(
    load: ExpertLoad, packs: Packs, counts: list[int], loads: list[float], busy: int, apart: bool
) -> Swap | None:
    """Of the busy rank's experts and the replicas on other ranks, those whose exchange for one another helps most."""
    ranks_of: dict[int, list[int]] = {}  # a rank as often as it has the expert
    for rank, pack in enumerate(packs):
        for expert in pack:
            ranks_of.setdefault(expert, []).append(rank)
    replicated = [expert for expert, ranks in ranks_of.items() if len(ranks) > 1]
    best: Swap | None = None
    for mine in dict.fromkeys(packs[busy]):
        after = load[mine] / (counts[mine] + 1)
        less = load[mine] / counts[mine] - after
        changed: dict[int, float] = {}
        for rank in ranks_of[mine]:
            changed[rank] = changed.get(rank, 0.0) - less
        for theirs in replicated:
            before = load[theirs] / counts[theirs]
            more = load[theirs] / (counts[theirs] - 1) - before
            change = dict(changed)
            for rank in ranks_of[theirs]:
                change[rank] = change.get(rank, 0.0) + more
            for rank in dict.fromkeys(ranks_of[theirs]):
                if theirs == mine or rank == busy or (apart and mine in packs[rank]):
                    continue
                highest = max(
                    loads[other] + by + (after - before - more if other == rank else 0.0)
                    for other, by in change.items()
                )  # fmt: skip
                if best is None or highest < best[0]:
                    best = (highest, rank, packs[rank].index(theirs), mine, -1)
    return best


# -- keeping what is there


def _relabelled(packs: Packs, now: ExpertMap, nodes: int) -> Packs:
    """The same packs, dealt to ranks so that much of each is there already; within nodes where those have their own."""
    held = [list(now.of(rank)) for rank in range(now.num_ranks)]
    here = len(packs) // nodes
    if nodes > 1:
        starts = range(0, len(packs), here)
        whole, had = ([list(joined(part[i : i + here])) for i in starts] for part in (packs, held))
        packs = [pack for i in _matched(whole, had) for pack in packs[i * here : (i + 1) * here]]
    out: Packs = []
    for start in range(0, len(packs), here):
        part = packs[start : start + here]
        out += [part[i] for i in _matched(part, held[start : start + here])]
    return out


def _matched(packs: Packs, held: Packs) -> list[int]:
    """For each of `held` the pack it is given, of equal size: those that have most in common first."""
    common = [
        (-len(set(pack) & set(have)), i, j)
        for i, pack in enumerate(packs) for j, have in enumerate(held) if len(pack) == len(have)
    ]  # fmt: skip
    given: dict[int, int] = {}
    taken: set[int] = set()
    for _, i, j in sorted(common):
        if j not in given and i not in taken:
            given[j] = i
            taken.add(i)
    return [given[j] for j in range(len(held))]


def settled(packs: Sequence[Sequence[int]], now: ExpertMap) -> ExpertMap:
    """The map of these packs in which an expert that a rank has already stays in its slot. ValueError where a rank
    would have another number of slots."""
    slots: list[int] = []
    for rank, pack in enumerate(packs):
        held, coming = now.of(rank), list(pack)
        if len(held) != len(coming):
            raise ValueError(f"rank {rank} has {len(held)} slots, not {len(coming)}")
        kept = [expert in coming and not coming.remove(expert) for expert in held]  # type: ignore[func-returns-value]
        coming.sort()
        slots += [expert if keep else coming.pop(0) for expert, keep in zip(held, kept, strict=True)]
    return ExpertMap(now.num_experts, now.num_ranks, tuple(slots))
