"""Classes for `--sd-worker-cls`: drafts that are mostly right, from a file beside the model's weights; and one for
`worker_cls`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from planaria.config.options import EngineConfig
from planaria.protocol import Allocate, Reply
from planaria.worker.draft_sizes import StepTimes
from planaria.worker.worker import Worker

BOOK = "book.json"


class Book:
    """Guesses what the file's histories go on with. Every fifth place is spoiled."""

    def __init__(self, config: EngineConfig) -> None:
        path = Path(config.checkpoint["path"]) / BOOK
        self.histories: list[list[int]] = json.loads(path.read_text()) if path.exists() else []
        self.rows: dict[int, list[int]] = {}

    def enter(self, row: int, tokens: Sequence[int], num_prompt: int) -> None:
        self.rows[row] = list(tokens)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row] += tokens

    def leave(self, row: int) -> None:
        self.rows.pop(row, None)

    def draft(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        return {row: self._drafts(row, most) for row, most in wanted.items()}

    def _drafts(self, row: int, most: int) -> Sequence[int]:
        have = self.rows[row]
        for history in self.histories:
            if history[: len(have)] == have:
                after = history[len(have) : len(have) + most]
                return [token if (len(have) + i) % 5 else token ^ 1 for i, token in enumerate(after)]
        return [7] * most

    def close(self) -> None:
        self.rows.clear()


class Wild(Book):
    """Guesses what is no token, and for rows that nobody asked about."""

    def draft(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        return {**{row: [*guess[:1], 10**8, -5] for row, guess in super().draft(wanted).items()}, 7: [1]}


class Silent:
    """Lacks most of what a drafter has."""

    def __init__(self, config: EngineConfig) -> None:
        pass

    def draft(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        return {}


class OneTime(StepTimes):
    """Steps take as long with drafts as without."""

    def expected(self, tokens: int) -> float:
        return 1.0


class Eager(Worker):
    """A rank on which drafts pay, whatever else runs on the machine."""

    def _allocate(self, command: Allocate) -> Reply:
        reply = super()._allocate(command)
        if self.runner is not None and self.runner.speculation is not None:
            self.runner.speculation.sizes.times = OneTime()
        return reply
