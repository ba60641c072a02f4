"""Which nodes the engines of a fleet are on where nodes are reached without Ray. Pure arithmetic on the options.

Nodes are dealt out in the order of their ranks: `per_engine` of them have `local` engines, the next ones the next. On
the first of them the engine itself runs, on the others ranks of it. The first node of all has the server, and may
have nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from planaria.errors import ConfigError

_SIZE, _LOCAL = "--data-parallel-size", "--data-parallel-size-local"


class EngineNodes(NamedTuple):
    """first: the first node that has engines; nodes: how many there are in all, the server's counted; local: engines of
    one node; per_engine: nodes of one engine."""

    first: int
    nodes: int
    local: int
    per_engine: int

    def of(self, engine: int) -> range:
        """Its nodes. The first one has the engine itself."""
        leader = self.first + engine // self.local * self.per_engine
        return range(leader, leader + self.per_engine)

    def seat(self, engine: int) -> int:
        """Which of its node's engines it is."""
        return engine % self.local

    def sharers(self, engine: int, size: int) -> int:
        """Of `size` engines those on this one's node."""
        first = engine - self.seat(engine)
        return min(size - first, self.local)


def engine_nodes(size: int, local: int | None, nnodes: int, node_rank: int) -> EngineNodes:
    """local: engines of one node; None: dealt evenly; 0: dealt evenly over all nodes but the first, which has none.

    A node but the first may also give the number that it has where the first one gave 0. Raises ConfigError.
    """
    if not local:
        first = 0 if local is None else 1
        hosts = nnodes - first
        if hosts < 1:
            raise ConfigError(_LOCAL, 0, f"nobody would have the {size} engines", "add --nnodes")
        if max(size, hosts) % min(size, hosts):
            raise ConfigError(
                "--nnodes", nnodes, f"{size} engines ({_SIZE}) can't be dealt evenly over {hosts} nodes",
                f"choose {_SIZE} so that one is a multiple of the other",
            )  # fmt: skip
        return EngineNodes(first, nnodes, max(1, size // hosts), max(1, hosts // size))
    if size % local:
        raise ConfigError(
            _LOCAL, local, f"{_SIZE} {size} is not a multiple of it: every node has as many engines", "choose a divisor"
        )
    groups = size // local
    if nnodes % groups == 0:
        return EngineNodes(0, nnodes, local, nnodes // groups)
    if node_rank and nnodes - 1 == groups:
        return EngineNodes(1, nnodes, local, 1)
    raise ConfigError(
        "--nnodes", nnodes,
        f"{size} engines, {local} on a node, make {groups} groups of nodes ({_SIZE} // {_LOCAL}), and {nnodes} is not "
        "a multiple of that",
        f"give a multiple of {groups}, or another {_LOCAL}",
    )  # fmt: skip
