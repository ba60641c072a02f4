"""Mistakes in lanes and in experts that travel between their ranks; see `mutations.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from planaria.core.eplb import rearrangement
from planaria.core.eplb.balance import ExpertBalance
from planaria.core.eplb.rearrangement import Rearrangement
from planaria.executor import bring_up, layout_change
from planaria.executor.balancing import Balancing
from planaria.executor.bring_up import BringUp
from planaria.protocol import Command, Load, StepPlan
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


@contextmanager
def commit_before_all_have_it() -> Iterator[None]:
    stepped = ExpertBalance.stepped

    def hasten(self: ExpertBalance, prepared: int = 0) -> list[Command]:
        return stepped(self, self.version)

    with patch.object(ExpertBalance, "stepped", hasten):
        yield


@contextmanager
def keep_what_was_prepared_at_a_loss() -> Iterator[None]:
    formed = ExpertBalance.formed

    def keep(self: ExpertBalance, maps: Any) -> None:
        moving, arranging = self._moving, self._arranging
        formed(self, maps)
        if moving is not None and maps == moving.maps:
            self._moving, self._arranging = moving, arranging

    with patch.object(ExpertBalance, "formed", keep):
        yield


@contextmanager
def load_where_the_configuration_says() -> Iterator[None]:
    """A new rank is not told which maps are in force."""
    with patch.object(BringUp, "_load", lambda self: Load(self._to_load.pop(0))):
        yield


@contextmanager
def load_all_at_once() -> Iterator[None]:
    """However few may read weights at a time."""
    begin = BringUp.__init__

    def unlimited(self: BringUp, *args: Any, **more: Any) -> None:
        begin(self, *args, **{**more, "loading": None})

    with patch.object(BringUp, "__init__", unlimited):
        yield


@contextmanager
def rearrange_while_a_resize_runs() -> Iterator[None]:
    """What moves experts is not told of other ranks."""
    formed = Balancing.formed

    def deaf(self: Balancing) -> None:
        if self.state is None or self.state.num_ranks == self.gang.maps[0].num_ranks:
            formed(self)

    with patch.object(Balancing, "formed", deaf):
        yield


@contextmanager
def leave_with_the_only_copy() -> Iterator[None]:
    """Nobody asks ranks that leave for what they have."""
    with patch.object(layout_change, "leaving", lambda *args: None):
        yield


@contextmanager
def overwrite_the_last_copy() -> Iterator[None]:
    """Each slot by itself, whatever it holds."""

    def each(before: Sequence[int], wanted: Sequence[int]) -> Iterator[tuple[int, ...]]:
        return ((slot,) for slot, expert in enumerate(before) if expert != wanted[slot])

    with patch.object(rearrangement, "_units", each):
        yield


@contextmanager
def read_what_is_overwritten() -> Iterator[None]:
    """A step's sources are those that had an expert before the first step."""
    move = rearrangement._move

    def stale(layer: int, expert: int, slot: int, placed: Any, reads: Any, sends: list[int]) -> Any:
        return move(layer, expert, slot, placed, placed.slots, sends)

    with patch.object(rearrangement, "_move", stale):
        yield


@contextmanager
def believe_that_new_ranks_have_what_lost_ones_had() -> Iterator[None]:
    placed: Any = bring_up.placed  # type: ignore[attr-defined]

    def believe(placing: Any, layout: Any, holdings: Any) -> Any:
        maps = placing.in_force
        if maps and maps[0].num_ranks == placing.configured.num_ranks and layout.pp == 1:
            holdings = [{layer: each.of(rank) for layer, each in enumerate(maps)} for rank in range(layout.size)]
        return placed(placing, layout, holdings)

    with patch.object(bring_up, "placed", believe):
        yield


@contextmanager
def count_bytes_when_they_are_prepared() -> Iterator[None]:
    """And again when they are committed."""
    begin = ExpertBalance._begin

    def count(self: ExpertBalance, moving: Rearrangement) -> list[Command]:
        commands = begin(self, moving)
        assert moving.preparing is not None
        self.bytes_moved += moving.preparing.bytes
        return commands

    with patch.object(ExpertBalance, "_begin", count):
        yield
