"""A group over torch's gloo: any nodes, any platform. The plain way, where shared memory isn't there.

Rule: a message sent stays referenced until it has gone; a wait ends at the deadline, at `abort`, or with the peer's
connection. Gloo itself doesn't let go of an operation before its deadline, so a wait for a sum looks up in between, and
what an abort leaves behind ends in a thread of its own. `receive` can't look up (a wait that gives up closes the
connection): an abort ends it only with the peer or at the deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from planaria.mesh.comm import DEADLINE, PeerLost, flat

LOOK = timedelta(milliseconds=50)  # how often a wait sees whether it was aborted
IN_FLIGHT = 64  # messages that `send` leaves on their way


class GlooComm:
    """store: the deployment's rendezvous. name: of the group and its epoch, so that no two meet by mistake."""

    def __init__(
        self, store: Store, name: str, rank: int, members: Sequence[int], *, deadline: float = DEADLINE
    ) -> None:
        self.rank, self.size, self.members = rank, len(members), tuple(members)
        self.deadline = deadline
        self.port = 0
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._reason = ""
        self._group: Any = None
        # the group's constructor meets the others
        self._group = self._try(
            lambda: ProcessGroupGloo(PrefixStore(name, store), rank, self.size, timedelta(seconds=deadline))
        )

    def _try(self, run: Callable[[], Any], peer: int | None = None) -> Any:
        """`run()`; its failure names `peer`, or the others: gloo does not say which of several it was."""
        try:
            return run()
        except RuntimeError as e:
            if self._reason:
                raise PeerLost((), self._reason) from e
            others = [i for i in range(self.size) if i != self.rank] if peer is None else [peer]
            names = [self.members[i] for i in others]
            who = f"rank {names[0]}" if len(names) == 1 else f"one of the ranks {', '.join(map(str, names))}"
            late = "imed out" in str(e) or "imeout" in str(e)
            what = f"did not come within {self.deadline:g} s" if late else "is gone: its connection closed"
            raise PeerLost(tuple(names) if len(names) == 1 else (), f"{who} {what}") from e

    def _finish(self, work: Any) -> None:
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if not work.is_completed() and not self._reason:
                    continue
                self._try(lambda: work.wait(LOOK))  # raises what it ended with
                return

    def all_reduce(self, x: torch.Tensor) -> None:
        self._finish(self._try(lambda: self._group.allreduce([x])))

    def gather_columns(self, x: torch.Tensor, columns: range, size: int) -> torch.Tensor:
        out = torch.empty(x.shape[0], size)
        if self.rank:
            self.send(torch.tensor([columns.start, columns.stop]), 0)
            self.send(x.contiguous(), 0)
            return out
        out[:, columns.start : columns.stop] = x
        for rank in range(1, self.size):
            bounds = torch.zeros(2, dtype=torch.int64)
            self.receive(bounds, rank)
            first, last = bounds.tolist()
            part = torch.empty(x.shape[0], last - first)
            self.receive(part, rank)
            out[:, first:last] = part
        return out

    def send(self, x: torch.Tensor, to: int) -> None:
        """Waits only where IN_FLIGHT messages are on their way."""
        if x.numel() == 0:
            return
        copy = flat(x).clone()
        self._sent.append((self._try(lambda: self._group.send([copy], to, 0), to), copy))
        while len(self._sent) > IN_FLIGHT:
            work, _ = self._sent.popleft()
            self._try(work.wait, to)

    def receive(self, x: torch.Tensor, source: int) -> None:
        if x.numel():
            self._try(lambda: self._group.recv([flat(x)], source, 0).wait(), source)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        if self.rank != source:
            self.receive(x, source)
            return
        for rank in range(self.size):
            if rank != source:
                self.send(x, rank)

    def abort(self, reason: str) -> None:
        self._reason = reason

    def close(self) -> None:
        left, self._group = [self._group, *self._sent], None
        self._sent.clear()
        # letting go of a group waits for its operations, up to the deadline
        threading.Thread(target=left.clear, name="planaria-gloo-close", daemon=True).start()
