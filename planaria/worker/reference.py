"""Workers without a model. `HashWorker` defines what a worker must do; `NullWorker` costs nothing.

HashWorker's "KV" at a position is a hash of the position before it and the token there, read back through the block
table, so that a wrongly shared, freed too early or never computed block changes the tokens. The next token is a
function of that hash and (seed, position) alone: the same request gives the same tokens in any batch.
"""

from __future__ import annotations

from planaria.protocol import LanePlan, LaneResult
from planaria.worker.rows import RowBooks, RowState

_MASK = (1 << 61) - 1


def mix(*values: int) -> int:
    """A 61-bit hash of small integers, the same in every process."""
    h = 0x1F83D9ABFB41BD6B
    for value in values:
        h = ((h ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        h ^= h >> 29
    return h & _MASK


def hash_tokens(prompt: list[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """What HashWorker generates after `prompt`: the definition that no schedule may change."""
    h = 0
    for token in prompt:
        h = mix(h, token)
    out = []
    position = len(prompt)
    for _ in range(count):
        token = mix(h, seed, position) % vocab_size
        out.append(token)
        h = mix(h, token)
        position += 1
    return out


class HashWorker:
    """`num_blocks` of `block_size` cells; a cell is None until it is computed."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size
        self.cells: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.books = RowBooks()

    def step(self, step: int, plan: LanePlan, freed: tuple[int, ...], turn: int = 0) -> LaneResult:
        rows, tokens = [], []
        for work in self.books.apply(step, plan, freed, turn):
            state = self.books.rows[work.row]
            for position in range(work.start, work.start + work.size):
                before = self._cell(state.blocks, position - 1) if position else 0
                if before is None:
                    raise ValueError(f"row {work.row}: position {position - 1} was never computed")
                block, offset = divmod(position, self.block_size)
                self.cells[state.blocks[block]][offset] = mix(before, state.tokens[position])
            if work.sample:
                position = work.start + work.size
                last = self._cell(state.blocks, position - 1)
                assert last is not None and position == len(state.tokens)
                token = self.draw(state, last, position)
                state.tokens.append(token)
                rows.append(work.row)
                tokens.append(token)
        return LaneResult(rows, tokens)

    def draw(self, state: RowState, last: int, position: int) -> int:
        """The token at `position`, after a history whose hash is `last`."""
        return mix(last, state.fresh.seed, position) % self.vocab_size

    def _cell(self, blocks: list[int], position: int) -> int | None:
        block, offset = divmod(position, self.block_size)
        return self.cells[blocks[block]][offset]


class NullWorker:
    """Gives every sampling row the same token at once: what is left is the engine's own cost."""

    def __init__(self, token: int = 1000) -> None:
        self.token = token
        self.rows: dict[int, int] = {}  # row -> turn

    def step(self, step: int, plan: LanePlan, freed: tuple[int, ...], turn: int = 0) -> LaneResult:
        for row in freed:
            self.rows.pop(row, None)
        for change in plan:
            if change.sample:
                self.rows[change.row] = turn
        rows = [row for row, own in self.rows.items() if own == turn]
        return LaneResult(rows, [self.token] * len(rows))
