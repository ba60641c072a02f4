"""The greedy that DeepSeek published with EPLB, written again from its description: what ours is compared with.

Experts' groups to nodes, on each node a further replica again and again for the expert with the most load a replica,
replicas to ranks; each time the heaviest first, to the least loaded place that isn't full. Slots must divide the ranks
evenly; groups that don't divide the nodes are taken as one group and one node.
"""

from __future__ import annotations

from planaria.topology.experts import ExpertMap


def greedy_packing(weights: list[float], packs: int) -> list[list[int]]:
    """The heaviest first, each to the least loaded pack that isn't full; packs of equal size."""
    each = len(weights) // packs
    out: list[list[int]] = [[] for _ in range(packs)]
    loads = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        pack = min((p for p in range(packs) if len(out[p]) < each), key=lambda p: loads[p])
        out[pack].append(item)
        loads[pack] += weights[item]
    return out


def greedy_replicas(weights: list[float], slots: int) -> list[int]:
    """Experts of slots: one each, then again and again the one with the most load a replica."""
    out = list(range(len(weights)))
    counts = [1] * len(weights)
    while len(out) < slots:
        expert = max(range(len(weights)), key=lambda e: weights[e] / counts[e])
        counts[expert] += 1
        out.append(expert)
    return out


def greedy(load: list[int], slots: int, ranks: int, groups: int, nodes: int) -> ExpertMap:
    if groups % nodes:
        groups, nodes = 1, 1
    size, packs = len(load) // groups, []
    tokens = [float(sum(load[g * size : (g + 1) * size])) for g in range(groups)]
    for node in greedy_packing(tokens, nodes):
        experts = [e for g in node for e in range(g * size, (g + 1) * size)]
        own = [float(load[e]) for e in experts]
        held = greedy_replicas(own, slots // nodes)
        shares = [own[i] / held.count(i) for i in held]
        packs += [[experts[held[i]] for i in pack] for pack in greedy_packing(shares, ranks // nodes)]
    return ExpertMap(len(load), ranks, tuple(e for pack in packs for e in pack))
