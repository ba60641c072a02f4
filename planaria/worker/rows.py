"""The rows of a worker as plain books: what each holds, which go on by themselves. Shared by every kind of worker.

A plan names changes only; `apply` turns it into the list of (row, start, count, sample) of this step.
"""

from __future__ import annotations

from typing import NamedTuple

from planaria.protocol import Fresh, LanePlan


class Work(NamedTuple):
    """`size` tokens of `row` from position `start`; draw a token after the last of them if `sample`. `drafts`: that may
    be guessed."""

    row: int
    start: int
    size: int
    sample: bool
    drafts: int = 0


class RowState:
    __slots__ = ("blocks", "cursor", "fresh", "tokens")

    def __init__(self, fresh: Fresh) -> None:
        self.fresh = fresh
        self.tokens = list(fresh.tokens)
        self.blocks: list[int] = []
        self.cursor = 0  # position after the last planned token


class RowBooks:
    """Rows by number. `auto`: those that go on by themselves, with their turn. block_size: tokens of a block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[int, RowState] = {}
        self.auto: dict[int, int] = {}
        self.step = 0

    def apply(self, step: int, plan: LanePlan, freed: tuple[int, ...], turn: int = 0) -> list[Work]:
        """This step's work in row order. Raises ValueError when the plan doesn't follow the last one."""
        if step != self.step + 1:
            raise ValueError(f"plan for step {step} after step {self.step}")
        self.step = step
        for row in freed:
            self.rows.pop(row, None)
            self.auto.pop(row, None)
        work: dict[int, Work] = {}
        for change in plan:
            if change.fresh is not None:
                self.rows[change.row] = RowState(change.fresh)
                self.auto.pop(change.row, None)
            state = self.rows[change.row]
            state.blocks.extend(change.blocks)
            if change.start < 0:
                continue  # it goes on by itself, with more room
            state.cursor = change.start + change.count
            work[change.row] = Work(change.row, change.start, change.count, change.sample)
        for row, own in self.auto.items():
            if own == turn and row not in work:
                state = self.rows[row]
                drafts = min(state.fresh.drafts, len(state.blocks) * self.block_size - 1 - state.cursor)
                if drafts < 0:
                    continue  # its blocks are full
                work[row] = Work(row, state.cursor, 1, True, drafts)
                state.cursor += 1
        for change in plan:
            if change.sample:
                self.auto[change.row] = turn
        return [work[row] for row in sorted(work)]
