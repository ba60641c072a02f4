"""A pipeline whose hidden states travel along the edges of somebody else's graph; tokens go back over the group itself.

Rule: what a stage was given before a step is what it receives in it, and what it sends in it is taken after it. A step
that computes nothing is given and gives nothing.
"""

from __future__ import annotations

import numpy as np

from planaria.mesh.comm import Array, CollectiveAborted, Comm, flat


class EdgeComm:
    """`base` is the pipeline's group: a message to the next stage goes out by `take`, any other over `base`."""

    device = "cpu"

    def __init__(self, base: Comm) -> None:
        self.base = base
        self.rank, self.size, self.members, self.port = base.rank, base.size, base.members, 0
        self._given = b""
        self._sent = b""

    def give(self, data: bytes) -> None:
        """What the stage before sent in this step."""
        self._given, self._sent = data, b""

    def take(self) -> bytes:
        """What this stage sent in this step."""
        data, self._sent = self._sent, b""
        return data

    def send(self, x: Array, to: int) -> None:
        if to != self.rank + 1:
            self.base.send(x, to)
            return
        self._sent = flat(x).tobytes()

    def receive(self, x: Array, source: int) -> None:
        if source != self.rank - 1:
            self.base.receive(x, source)
            return
        data, self._given = self._given, b""
        into = flat(x).view(np.uint8)
        if len(data) != len(into):
            before = self.members[source]
            raise CollectiveAborted((before,), f"rank {before} handed on {len(data)} bytes, {len(into)} were due")
        if data:  # a lane without work sends no rows
            into[:] = np.frombuffer(data, np.uint8)

    def all_reduce(self, x: Array) -> None:
        self.base.all_reduce(x)

    def gather_columns(self, x: Array, columns: range, size: int) -> Array:
        return self.base.gather_columns(x, columns, size)

    def broadcast(self, x: Array, source: int = 0) -> None:
        self.base.broadcast(x, source)

    def abort(self, reason: str) -> None:
        self.base.abort(reason)

    def close(self) -> None:
        self.base.close()
