"""Mistakes in lanes and in experts that travel between their ranks; see `mutations.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from planaria.protocol import StepPlan
from tests.sim.process import Process


@contextmanager
def skip_a_step_with_nothing_to_do() -> Iterator[None]:
    """A rank whose lane is empty does not come to the meeting."""
    serve = Process.serve

    def skip(self: Process) -> None:
        command = self.inbox[0][1] if self.inbox else None
        if isinstance(command, StepPlan) and not (self.busy or self.stopped or self.link is None):
            own = self.layout.coords(self.rank).dp
            assert self.worker is not None
            if not command.lanes[own] and not self.worker.books.rows:
                self.busy = True
                self.go(*self.inbox[0])
                return
        serve(self)

    with patch.object(Process, "serve", skip):
        yield
