"""A worker without a model, which defines what a worker must do: `HashWorker`. `RowBooks` are its rows as plain books.

HashWorker's "KV" at a position is a hash of the position before it and the token there, read back through the block
table, so that a wrongly shared, freed too early or never computed block changes the tokens. The next token is a
function of that hash and (seed, position) alone: the same request gives the same tokens in any batch. Where it may, it
drafts: some guesses are right, and all of them leave hashes behind. A request may have a small grammar (`Rule`), whose
state is of the tokens that came out; whether it is ready when its row is to draw depends on the step.
"""

from __future__ import annotations

from typing import NamedTuple

from planaria.protocol import Fresh, LanePlan, LaneResult, PutLora

_MASK = (1 << 61) - 1


class Work(NamedTuple):
    """`size` tokens of `row` from position `start`; draw a token after the last of them if `sample`. `drafts`: that may
    be guessed."""

    row: int
    start: int
    size: int
    sample: bool
    drafts: int = 0


class Rule:
    """A grammar of few states: which of `size` tokens may come next, and where a token leads. text: a number."""

    START = 0

    def __init__(self, text: str, size: int) -> None:
        self.key, self.size = int(text), size

    def after(self, state: int, token: int) -> int:
        return mix(self.key, state, token) % 5

    def allowed(self, state: int) -> list[int]:
        """A third of all, at least one."""
        return [token for token in range(self.size) if mix(self.key, state, token) % 3 == 0] or [state]

    def of(self, output: list[int]) -> int:
        """The state after what came out."""
        state = self.START
        for token in output:
            state = self.after(state, token)
        return state


class RowState:
    """at: where the row's grammar is, after all its tokens; None: it has none. late: it can't draw. summed: of the
    positions that were computed for it. slot: of its adapter."""

    __slots__ = ("at", "blocks", "cursor", "fresh", "late", "slot", "summed", "tokens")

    def __init__(self, fresh: Fresh) -> None:
        self.fresh = fresh
        self.at: int | None = None
        self.late = False
        self.summed = 0
        self.slot: int | None = None
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
        """This step's work in row order, from a plan that names changes only. Raises ValueError when it doesn't follow
        the last one."""
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
            if change.sample and not self.rows[change.row].fresh.params.pooling:
                self.auto[change.row] = turn
        return [work[row] for row in sorted(work)]


def mix(*values: int) -> int:
    """A 61-bit hash of small integers, the same in every process."""
    h = 0x1F83D9ABFB41BD6B
    for value in values:
        h = ((h ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        h ^= h >> 29
    return h & _MASK


def hash_tokens(
    prompt: list[int], seed: int, count: int, vocab_size: int, grammar: str = "", *, keyed: bool = True,
    adapter: str = "",
) -> list[int]:  # fmt: skip
    """What HashWorker generates after `prompt`: the definition that no schedule may change. keyed: by position; else by
    how many were drawn (a mutation)."""
    h = 0
    for token in prompt:
        h = mix(h, token, *number_of(adapter))
    rule = Rule(grammar, vocab_size) if grammar else None
    out: list[int] = []
    for drawn in range(count):
        number = mix(h, seed, len(prompt) + drawn if keyed else drawn)
        allowed = rule.allowed(rule.of(out)) if rule is not None else range(vocab_size)
        token = allowed[number % len(allowed)]
        out.append(token)
        h = mix(h, token, *number_of(adapter))
    return out


def hash_vector(prompt: list[int], pooling: str, adapter: str = "") -> bytes:
    """What HashWorker gives for a prompt in place of tokens: by its last position, or by all."""
    h = summed = 0
    for token in prompt:
        h = mix(h, token, *number_of(adapter))
        summed += h
    return (h if pooling == "last" else summed).to_bytes(16, "little")


def number_of(adapter: str) -> tuple[int, ...]:
    """What an adapter, known by a number, adds to each hash."""
    return (int(adapter),) if adapter else ()


class HashWorker:
    """`num_blocks` of `block_size` cells; a cell is None until it is computed."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size
        self.cells: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.books = RowBooks(block_size)
        self.slots: dict[int, str] = {}  # adapters, all of which have come

    def put(self, command: PutLora) -> None:
        if command.first:
            self.slots.pop(command.slot, None)
        if command.last:
            self.slots[command.slot] = command.digest

    def adapter(self, state: RowState) -> str:
        """What is in the slot that the row's adapter had when it entered."""
        if not state.fresh.adapter:
            return ""
        if state.slot is None:
            state.slot = next((slot for slot, own in self.slots.items() if own == state.fresh.adapter), None)
        if state.slot is None or state.slot not in self.slots:
            raise ValueError(f"the adapter {state.fresh.adapter} is not here")
        return self.slots[state.slot]

    def step(self, step: int, plan: LanePlan, freed: tuple[int, ...], turn: int = 0) -> LaneResult:
        rows, tokens, late = [], [], []
        more: dict[int, list[int]] = {}
        pooled: dict[int, bytes] = {}
        every = self.books.apply(step, plan, freed, turn)
        self._compute_all(every)
        for work in every:
            state = self.books.rows[work.row]
            if pooling := state.fresh.params.pooling:
                cells = [self._cell(state.blocks, work.start + i) or 0 for i in range(work.size)]
                state.summed += sum(cells)
                if work.sample:
                    pooled[work.row] = (cells[-1] if pooling == "last" else state.summed).to_bytes(16, "little")
            elif work.sample:
                self.enter(state)
                if state.late:
                    state.tokens.append(0)
                    late.append(work.row)
                    continue
                drawn = self._draw_all(work, state)
                for token in drawn:
                    state.at = self.after(state, state.at, token)
                state.tokens += drawn
                state.cursor += len(drawn) - 1
                rows.append(work.row)
                tokens.append(drawn[0])
                if len(drawn) > 1:
                    more[work.row] = drawn[1:]
        return LaneResult(rows, tokens, more=more, late=tuple(late), pooled=pooled)

    def _draw_all(self, work: Work, state: RowState) -> list[int]:
        """The token after the last one, and those after it as far as they are guessed; all guesses are computed."""
        position = work.start + work.size
        assert position == len(state.tokens)
        drafts = self.draft(state, position, work.drafts) if work.drafts else []
        for i, guess in enumerate(drafts):
            self._compute(work.row, state, position + i, guess)
        drawn: list[int] = []
        at = state.at
        while len(drawn) <= len(drafts) and drawn == drafts[: len(drawn)]:
            last = self._cell(state.blocks, position + len(drawn) - 1)
            assert last is not None
            drawn.append(self.choose(state, at, self.draw(state, last, position + len(drawn))))
            at = self.after(state, at, drawn[-1])
        return drawn

    def draft(self, state: RowState, position: int, most: int) -> list[int]:
        """Up to so many guesses for the tokens from `position` on, three of four right."""
        h = self._cell(state.blocks, position - 1)
        assert h is not None
        guesses: list[int] = []
        at = state.at
        for i in range(mix(h, state.fresh.seed) % (most + 1)):
            token = self.choose(state, at, self.draw(state, h, position + i))
            guesses.append(token if mix(h, i) % 4 else (token + 1) % self.vocab_size)
            h = mix(h, guesses[-1], *number_of(state.fresh.adapter))
            at = self.after(state, at, guesses[-1])
        return guesses

    def rule(self, state: RowState) -> Rule | None:
        """The row's grammar, of its request."""
        grammar = state.fresh.params.grammar
        return Rule(grammar, self.vocab_size) if grammar else None

    def enter(self, state: RowState) -> None:
        """Bring a row's grammar to where its output is, when it draws for the first time, unless it is late; it may
        also be later on."""
        rule = self.rule(state)
        if rule is None:
            return
        state.late = state.late or mix(self.books.step, state.fresh.seed) % (4 if state.at is None else 40) == 0
        if state.at is None and not state.late:
            state.at = rule.of(state.tokens[state.fresh.num_prompt :])

    def after(self, state: RowState, at: int | None, token: int) -> int | None:
        rule = self.rule(state)
        return rule.after(at, token) if rule is not None and at is not None else None

    def choose(self, state: RowState, at: int | None, number: int) -> int:
        """The token that a number stands for, among those that may come."""
        rule = self.rule(state)
        allowed = rule.allowed(at) if rule is not None and at is not None else range(self.vocab_size)
        return allowed[number % len(allowed)]

    def _compute_all(self, every: list[Work]) -> None:
        """All tokens of a step's plan."""
        for work in every:
            state = self.books.rows[work.row]
            for position in range(work.start, work.start + work.size):
                self._compute(work.row, state, position, state.tokens[position])

    def _compute(self, row: int, state: RowState, position: int, token: int) -> None:
        before = self._cell(state.blocks, position - 1) if position else 0
        if before is None:
            raise ValueError(f"row {row}: position {position - 1} was never computed")
        self._store(state.blocks, position, mix(before, token, *number_of(self.adapter(state))))

    def _store(self, blocks: list[int], position: int, cell: int) -> None:
        block, offset = divmod(position, self.block_size)
        self.cells[blocks[block]][offset] = cell

    def draw(self, state: RowState, last: int, position: int) -> int:
        """What the token at `position` is chosen by, after a history whose hash is `last`."""
        return mix(last, state.fresh.seed, position)

    def _cell(self, blocks: list[int], position: int) -> int | None:
        block, offset = divmod(position, self.block_size)
        return self.cells[blocks[block]][offset]
