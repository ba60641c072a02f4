"""What would fit in place of a fleet that doesn't, by counting; and the errors that say so."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from planaria.topology.cluster import Node
from planaria.topology.layout import Layout
from planaria.topology.placement import Infeasible, divisors, per_node

STRATEGY, LOCAL = "--ray-dp-pack-strategy", "--data-parallel-size-local"


class Instead(NamedTuple):
    """What would fit in place of what was asked."""

    layout: Layout
    strategy: str
    local: int | None


class DoesNotFit(Infeasible):
    """As Infeasible. `instead` says with which strategy and local size `nearest` fits; `fitting`: engines that do."""

    def __init__(self, why: str, instead: Instead | None, needed: int, found: int, fitting: int, options: str) -> None:
        super().__init__(why, instead.layout if instead else None, needed, found, options)
        self.instead, self.fitting = instead, fitting


class HeadTooSmall(DoesNotFit):
    """The head's node has room for `fitting` of the `asked` engines that are to be there."""

    asked = 0


def head_too_small(nodes: list[Node], layout: Layout, strategy: str, local: int, possible: int) -> DoesNotFit:
    world = layout.size // layout.dp
    instead = closest(nodes, layout, strategy, local)
    error = HeadTooSmall(
        f"the head {nodes[0].id} is asked to hold {engines(local)} ({LOCAL}) and has room for {possible}: it has "
        f"{devices(len(nodes[0].devices))}, an engine takes {world}",
        instead, local * world, len(nodes[0].devices), possible, _options(instead, strategy, local),
    )  # fmt: skip
    error.asked = local
    return error


def too_few(
    nodes: list[Node], layout: Layout, strategy: str, local: int | None, fitting: int, asked: str
) -> DoesNotFit:
    instead = closest(nodes, layout, strategy, local)
    found, world = sum(len(node.devices) for node in nodes), layout.size // layout.dp
    return DoesNotFit(
        f"{layout} needs {engines(layout.dp)} of {devices(world)} ({asked}), {fitting} fit; the cluster has "
        f"{devices(found)} ({per_node(nodes)})",
        instead, layout.size, found, fitting, _options(instead, strategy, local),
    )  # fmt: skip


def closest(nodes: list[Node], layout: Layout, strategy: str, local: int | None) -> Instead | None:
    """The same layout packed otherwise, else the largest one that exceeds it along no axis."""
    head, others = len(nodes[0].devices), Counter(len(node.devices) for node in nodes[1:])
    world = layout.size // layout.dp
    others_first: list[tuple[str, int | None]] = [(strategy, None), ("fill", None), ("span", None)]
    for how in others_first:
        if _most(head, others, world, layout.dp, *how) == layout.dp:
            return Instead(layout, *how)
    best: tuple[tuple[int, int, int, int], Instead] | None = None
    for how in ((strategy, local), (strategy, None), ("strict", None)):
        for tp in range(1, layout.tp + 1):
            for pcp in divisors(layout.pcp, layout.pcp):
                for pp in range(1, layout.pp + 1):
                    dp = _most(head, others, tp * pcp * pp, layout.dp, *how)
                    key = (dp * tp * pcp * pp, dp, pp, pcp)
                    if dp and (best is None or key > best[0]):
                        best = key, Instead(Layout(pp, dp, pcp, tp), *how)
    return best[1] if best is not None else None


def _most(head: int, others: Counter[int], world: int, engines: int, strategy: str, local: int | None) -> int:
    """How many of `engines` fit. head: its devices; others: how many other nodes have so many."""
    if strategy == "span":
        sizes = {size for size in (head, *others) if size}
        size = sizes.pop() if len(sizes) == 1 else world
        return min(engines, ((head > 0) + others[size]) // (world // size)) if world > size and not world % size else 0
    first = head // world
    if local is not None and (first < local or local > engines):
        return 0
    room = [(size // world, count) for size, count in others.items()]
    if strategy == "fill":
        share = first if local is None else local
        return min(engines, share + sum(most * count for most, count in room))
    largest = max([first, *(most for most, _ in room)])
    return max(
        (
            min(engines // share, (first >= share) + sum(count for most, count in room if most >= share)) * share
            for share in (range(1, min(engines, largest) + 1) if local is None else (local,))
        ),
        default=0,
    )


def _options(instead: Instead | None, strategy: str, local: int | None) -> str:
    """What to change beside the layout."""
    if instead is None:
        return ""
    given = f" with {STRATEGY} {instead.strategy}" if instead.strategy != strategy else ""
    return given + (f" without {LOCAL}" if local is not None and instead.local is None else "")


def devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def engines(count: int) -> str:
    return "1 engine" if count == 1 else f"{count} engines"
