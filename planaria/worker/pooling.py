"""Rows that draw no token but end with a vector: which they are, and what theirs are made of.

Rule: a row's vector is made of what the last stage gives for positions of its prompt (hidden states, or scores of
labels): of the last one alone; of the first; or of all, added up over the steps that its prompt takes. What is added up
is this row's and this rank's alone, so such a row starts anew wherever it enters, and nothing of it comes from KV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.kernels.numbers import main_memory
from planaria.kernels.ops import Array
from planaria.protocol import Row
from planaria.worker.stage import Stage

BROKEN = "the model gave numbers that are not finite"


class Pooling:
    """compile_both: of a model that draws tokens, too, makes what gives logits and hidden states, these times `scale`;
    None: of one that draws none, whose forward pass gives the latter alone."""

    def __init__(self, compile_both: Callable[[], Callable[[], Any]] | None = None, scale: float = 1.0) -> None:
        self.scale = 1.0 if compile_both is None else scale
        self.alone = compile_both is None
        self.kinds: dict[int, str] = {}  # by row, see types.POOLINGS
        self._sums: dict[int, npt.NDArray[np.float64]] = {}
        self._compile_both = compile_both
        self._run_both: Callable[[], tuple[Array, Array]] | None = None

    def enter(self, row: int, kind: str) -> None:
        self.kinds[row] = kind
        self._sums.pop(row, None)

    def leave(self, row: int) -> None:
        """It may be none of these."""
        if self.kinds.pop(row, None) is not None:
            self._sums.pop(row, None)

    def reads_all(self, row: int) -> bool:
        """Does a step give something for every position of this row's prompt?"""
        return self.kinds.get(row, "last") != "last"

    def run(self, stage: Stage, parts: list[tuple[Row, int]]) -> tuple[Array | None, dict[int, bytes], dict[int, str]]:
        """A forward pass: logits, and of rows that end with a vector those that are there, and errors. parts: chunks of
        such rows, each with its first line."""
        if not parts or self.alone:
            out = stage.run()
            logits, hidden = (None, out) if self.alone else (out, None)
        else:
            out = stage.run(self.both)
            logits, hidden = out if out is not None else (None, None)
        if hidden is None or not parts or not stage.samples:
            return logits, {}, {}
        return logits, *self.vectors(hidden, parts)

    def both(self) -> tuple[Array, Array]:
        """A forward pass to logits and hidden states; made ready when it is first asked for."""
        if self._run_both is None:
            assert self._compile_both is not None
            self._run_both = self._compile_both()
        return self._run_both()

    def vectors(self, hidden: Array, parts: list[tuple[Row, int]]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Take in chunks of these rows, each with its first line of `hidden` [S, N]: vectors of rows whose prompts are
        through, float32 [N], and errors."""
        lines = main_memory(hidden)
        found: dict[int, bytes] = {}
        errors: dict[int, str] = {}
        for chunk, line in parts:
            row, kind = chunk.row, self.kinds[chunk.row]
            vector = lines[line].astype(np.float64)
            if kind == "mean":
                vector = self._sums[row] = lines[line : line + chunk.count].sum(0, np.float64) + self._sums.get(
                    row, 0.0
                )
                vector = vector / (chunk.start + chunk.count)
            elif kind == "cls":
                vector = self._sums.setdefault(row, vector)
            if not chunk.sample:
                continue
            vector = vector / self.scale
            if np.isfinite(vector).all():
                found[row] = vector.astype(np.float32).tobytes()
            else:
                errors[row] = BROKEN
        return found, errors
