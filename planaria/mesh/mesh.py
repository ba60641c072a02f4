"""A rank's place in its layout: one `Comm` for each axis."""

from __future__ import annotations

from dataclasses import dataclass, field

from planaria.mesh.comm import Comm, Solo


@dataclass(frozen=True)
class Mesh:
    """`rank` is the world rank (see planaria.topology.layout). An axis of size 1 is a no-op."""

    rank: int = 0
    tp: Comm = field(default_factory=Solo)
    pp: Comm = field(default_factory=Solo)
    shares: Comm | None = None  # tensor ranks of all prefill context ranks, where there are several
    ep: Comm = field(default_factory=Solo)  # ranks of all lanes that share this stage's experts
    experts: Comm = field(default_factory=Solo)  # the same (also of one lane), for experts that travel beside steps
    further: tuple[Comm, ...] = ()  # groups as ep, one for each micro-batch after the first

    @property
    def cp(self) -> Comm:
        """Those that compute a stage's part of a step together."""
        return self.shares or self.tp

    @property
    def samples(self) -> bool:
        """Does this rank draw the tokens? The first tensor rank of the first share, in the last stage, does."""
        return self.cp.rank == 0 and self.pp.rank == self.pp.size - 1

    @property
    def reads_tokens(self) -> bool:
        """Is this rank of the stage that embeds tokens?"""
        return self.pp.rank == 0

    def abort(self, reason: str) -> None:
        """End every wait of this rank with CollectiveAborted; safe from any thread."""
        for comm in self._all:
            comm.abort(reason)

    def close(self) -> None:
        """Let go of all groups."""
        for comm in self._all:
            comm.close()

    @property
    def _all(self) -> tuple[Comm, ...]:
        groups = (self.tp, self.pp, self.shares, self.ep, self.experts, *self.further)
        return tuple(comm for comm in groups if comm is not None)
