"""Workers without a model. `HashWorker` defines what a worker must do; `NullWorker` costs nothing.

HashWorker's "KV" at a position is a hash of the position before it and the token there, read back through the block
table, so that a wrongly shared, freed too early or never computed block changes the tokens. The next token is a
function of that hash and (seed, position) alone: the same request gives the same tokens in any batch. Where it may, it
drafts: some guesses are right, and all of them leave hashes behind.
"""

from __future__ import annotations

from planaria.protocol import LanePlan, LaneResult
from planaria.worker.rows import RowBooks, RowState, Work

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
        self.books = RowBooks(block_size)

    def step(self, step: int, plan: LanePlan, freed: tuple[int, ...], turn: int = 0) -> LaneResult:
        rows, tokens = [], []
        more: dict[int, list[int]] = {}
        for work in self.books.apply(step, plan, freed, turn):
            state = self.books.rows[work.row]
            for position in range(work.start, work.start + work.size):
                self._compute(work.row, state, position, state.tokens[position])
            if work.sample:
                drawn = self._draw_all(work, state)
                state.tokens += drawn
                state.cursor += len(drawn) - 1
                rows.append(work.row)
                tokens.append(drawn[0])
                if len(drawn) > 1:
                    more[work.row] = drawn[1:]
        return LaneResult(rows, tokens, more=more)

    def _draw_all(self, work: Work, state: RowState) -> list[int]:
        """The token after the last one, and those after it as far as they are guessed; all guesses are computed."""
        position = work.start + work.size
        assert position == len(state.tokens)
        drafts = self.draft(state, position, work.drafts) if work.drafts else []
        for i, guess in enumerate(drafts):
            self._compute(work.row, state, position + i, guess)
        drawn: list[int] = []
        while len(drawn) <= len(drafts) and drawn == drafts[: len(drawn)]:
            last = self._cell(state.blocks, position + len(drawn) - 1)
            assert last is not None
            drawn.append(self.draw(state, last, position + len(drawn)))
        return drawn

    def draft(self, state: RowState, position: int, most: int) -> list[int]:
        """Up to so many guesses for the tokens from `position` on, three of four right."""
        h = self._cell(state.blocks, position - 1)
        assert h is not None
        guesses = []
        for i in range(mix(h, state.fresh.seed) % (most + 1)):
            token = self.draw(state, h, position + i)
            guesses.append(token if mix(h, i) % 4 else (token + 1) % self.vocab_size)
            h = mix(h, guesses[-1])
        return guesses

    def _compute(self, row: int, state: RowState, position: int, token: int) -> None:
        before = self._cell(state.blocks, position - 1) if position else 0
        if before is None:
            raise ValueError(f"row {row}: position {position - 1} was never computed")
        block, offset = divmod(position, self.block_size)
        self.cells[state.blocks[block]][offset] = mix(before, token)

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
