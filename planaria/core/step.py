"""What goes into one step of a lane: rows that need something, parts of histories, and who enters.

A row that goes on by itself is looked at when it could be short of blocks at the earliest, and when its last token is
planned. Where rows draft (`max_drafts`), how far they are is known by commits alone: the steps since then count as if
every draft had been accepted, up to the end of the row's blocks, which no draft goes beyond. Such a row ends when its
last token is committed, and does nothing in a step for which it has no room.
"""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING

from planaria.core import holding
from planaria.core.kv_cache import chain
from planaria.core.policy import Key
from planaria.core.sequence import NEVER, SequenceState
from planaria.protocol import Fresh, LanePlan, Row

if TYPE_CHECKING:
    from planaria.core.scheduler import Lane

PART = 256  # tokens of a history in one step, where there are several turns; more of a long one: see `_part`


class StepBuilder:
    """Of a lane, one step after the other. `changes`: by row; `confirm`: cursors that the step's commit confirms."""

    __slots__ = (
        "changes", "confirm", "drafts", "lane", "logits", "number", "parts", "pressed", "room", "step", "tokens", "turn"
    )  # fmt: skip

    def __init__(self, lane: Lane) -> None:
        self.lane, self.drafts = lane, lane.config.max_drafts
        self.changes: dict[int, Row] = {}
        self.confirm: list[tuple[SequenceState, int]] = []

    def build(self, step: int, number: int) -> tuple[LanePlan, list[tuple[SequenceState, int]]]:
        """Of the step `step`, which is of turn `number`."""
        lane = self.lane
        turn = lane.turns[number]
        self.step, self.number, self.turn = step, number, turn
        turn.tick += 1
        lane.loras.begin()
        changes: dict[int, Row] = {}
        self.changes, self.confirm = changes, []
        pressed = self._go_on()
        self.tokens = lane.step_tokens - turn.num_rows  # that may still be taken
        self.parts = 0  # that were, of histories
        if lane.prefilling or lane.waiting:
            self._histories(pressed)
        turn.last_step = step
        return tuple(changes.values()), self.confirm

    # -- rows that go on by themselves

    def _go_on(self) -> bool:
        """Handle the turn's rows that need something at this step. True when memory was short."""
        lane, turn, changes, pool = self.lane, self.turn, self.changes, self.lane.pool
        pressed, tick, drafts = False, turn.tick, self.drafts
        for entry in turn.due.pop(tick, ()):
            if not entry.auto or entry.next_event != tick or lane.turns[entry.turn] is not turn:
                continue
            if tick >= entry.end_tick:  # its last token is in a step before this one
                lane.leave(entry, keep_open=True)
                continue
            lacking = self._lacking(entry) if drafts else 1
            if lacking:
                while not pool.num_free and entry.auto:
                    pressed = True
                    changes.pop(lane.preempt(), None)
                if not entry.auto:
                    continue
                blocks = pool.take(lacking if lacking == 1 else min(lacking, pool.num_free))
                assert entry.row is not None
                lane.index.append(entry.row, len(entry.blocks), blocks)
                entry.blocks += blocks
                position = -1 if drafts else entry.auto_start + tick - entry.auto_from
                changes[entry.row] = Row(entry.row, position, 1, tuple(blocks), True)
            self._schedule(entry)
        return pressed

    def _lacking(self, entry: SequenceState) -> int:
        """Blocks for all it could draft in this step: none where memory is short and there is room for a token."""
        size, held = self.lane.block_size, len(entry.blocks)
        cursor = self._furthest(entry)
        if cursor < held * size and not self.lane.pool.num_free:
            return 0
        return max(0, -(-min(cursor + self.drafts + 1, self._total(entry)) // size) - held)

    def _furthest(self, entry: SequenceState) -> int:
        """Where the row's next token may be in this step at most."""
        committed = self.lane.committed
        cursor, since = entry.request.num_tokens - 1, committed
        if entry.last_step > committed:
            cursor, since = entry.target, entry.last_step  # of its last part, in which it draws one token
        flying = self.step - 1 - since if len(self.lane.turns) == 1 else 0  # a turn's last step is committed first
        return min(cursor + flying * (self.drafts + 1), len(entry.blocks) * self.lane.block_size)

    @staticmethod
    def _total(entry: SequenceState) -> int:
        """Positions it can ever fill."""
        return len(entry.request.prompt) + entry.request.max_tokens - 1

    def _schedule(self, entry: SequenceState) -> None:
        """Note when this row next needs something: a block, or to end."""
        held = len(entry.blocks) * self.lane.block_size
        if not self.drafts:
            full, end = entry.auto_from + held - entry.auto_start, entry.end_tick
            event = full if full < end else end
        elif held < self._total(entry):
            event = self.turn.tick + max(1, (held - self._furthest(entry)) // (self.drafts + 1))
        else:
            entry.next_event = NEVER
            return
        entry.next_event = event
        self.turn.due.setdefault(event, []).append(entry)

    # -- histories

    def _histories(self, pressed: bool) -> None:
        """Parts of those that have a row, and new ones; pressed: nobody enters."""
        lane, turn = self.lane, self.turn
        # positions whose logits are wanted beside those that rows sample from
        self.logits = lane.config.max_logit_rows - lane.config.max_num_seqs
        # Rows the turn may have: its part of all there could be, so that no turn is without.
        self.room = -(-min(len(lane.entries), lane.config.max_num_seqs) // len(lane.turns))
        for entry in list(lane.prefilling):
            if self.tokens <= 0:
                break
            if self.logits <= 0 and entry.reads:
                continue
            if turn.num_rows >= self.room and entry.target - entry.planned <= self.tokens:
                continue  # another turn takes it
            if self._part(entry) > 0:
                self._chunk(entry)
        if not pressed:
            self._admit()

    def _admit(self) -> None:
        lane = self.lane
        passed: list[tuple[Key, SequenceState]] = []  # wait for a block that another row computes, or for a commit
        while lane.waiting and lane.free_rows and self.tokens > 0 and self.turn.num_rows < self.room:
            item = heapq.heappop(lane.waiting)
            entry = item[1]
            history = entry.request.prompt + entry.request.output
            other = lane.only is not None and entry.request.id != lane.only
            if entry.last_step > lane.committed or other or self._part(entry) <= 0:
                passed.append(item)
                continue
            hits = entry.blocks  # that it has, of before a fault
            usable = (len(history) - 1) // lane.block_size  # the last token must be computed
            cached = lane.caching and not entry.reads
            if entry.reads and self.logits <= 0:
                passed.append(item)
                continue
            if cached:
                chain(history, lane.block_size, entry.keys, lane.scope.root(entry.request.salt, entry.request.adapter))
            if cached and not hits:
                hits = lane.pool.hits(entry.keys[:usable])
                if len(hits) < usable and entry.keys[len(hits)] in lane.computing:
                    passed.append(item)
                    continue
                if lane.connector is not None and lane.connector.fetching(entry, hits, usable):
                    passed.append(item)
                    continue
            if not lane.loras.may_enter(entry.request.adapter):  # last: who waits for something else wants no slot yet
                passed.append(item)
                continue
            need = -(-len(history) // lane.block_size) - len(hits)
            if need > lane.pool.num_free - lane.pool.num_idle(hits):
                holders = [item, *passed, *lane.waiting]
                holder = holding.last(holders)
                may = lane.held or (holder is not None and (holder.key >= entry.key or lane.only is not None))
                alone = lane.lender is not None and lane.lender.make_room(alone=True)
                if alone or (may and holding.make_room(lane, holders)):
                    heapq.heappush(lane.waiting, item)
                    continue
                passed.append(item)
                break
            self._enter(entry, history, hits, need, usable if cached else 0)
        for item in passed:
            heapq.heappush(lane.waiting, item)

    def _enter(self, entry: SequenceState, history: list[int], hits: list[int], need: int, usable: int) -> None:
        """Give it a row, and blocks for its whole history. usable: blocks of it that others may use; 0: none."""
        lane, request = self.lane, entry.request
        if not entry.blocks:
            self._begin_with(entry, hits, len(history))
        entry.blocks = hits + lane.pool.take(need)
        entry.planned, entry.target = request.computed, len(history)
        entry.owned = [k for k in entry.keys[entry.remembered : usable] if k not in lane.computing]
        for key in entry.owned:
            lane.computing[key] = entry
        entry.prompt_logprobs = [None] if request.params.prompt_logprobs is not None else None
        entry.row, entry.quiet_to = lane.free_rows.pop(), 0
        lane.index.enter(entry.row, request, entry.blocks)
        lane.at_row[entry.row] = entry
        lane.prefilling.append(entry)
        lane.loras.enter(request.adapter)
        tokens = array("i", history)
        self._chunk(
            entry,
            Fresh(
                tokens, len(request.prompt), request.params, request.seed, request.eos_ids, self.drafts, request.adapter
            ),
        )  # fmt: skip

    def _begin_with(self, entry: SequenceState, hits: list[int], length: int) -> None:
        """Of a history of so many tokens others have computed the blocks `hits`."""
        lane, request = self.lane, entry.request
        lane.pool.share(hits)
        entry.remembered = len(hits)
        request.computed = len(hits) * lane.block_size
        if lane.caching and not entry.reads:
            lane.prefix_queries += length
            lane.prefix_hits += request.computed
        if not request.output:
            entry.num_cached, entry.queued = request.computed, max(0.0, lane.now - request.arrival)

    def _part(self, entry: SequenceState) -> int:
        """The most tokens of a history in this step: where stages take turns, few enough that all work on it at once;
        where steps are to be short, what others leave."""
        request, connector, turns = entry.request, self.lane.connector, len(self.lane.turns)
        if request.pause and not request.output and connector is not None:
            return connector.rates.tokens(request.pause) - self.parts
        return self.lane.step_tokens if turns == 1 else max(PART, -(-entry.target // (4 * turns)))

    def _chunk(self, entry: SequenceState, fresh: Fresh | None = None) -> None:
        """Plan the next part of a history."""
        count = min(entry.target - entry.planned, self.tokens, self._part(entry))
        if entry.reads:
            count = min(count, max(self.logits, 1))
            self.logits -= count
        self.tokens -= count
        self.parts += count
        row, start = entry.row, entry.planned
        assert row is not None
        entry.planned += count
        if not entry.request.output:
            self.lane.prompt_tokens += count
        entry.last_step = self.step
        done = entry.planned == entry.target
        self.changes[row] = Row(row, start, count, tuple(entry.blocks) if fresh else (), done, fresh)
        if not done:
            self.confirm.append((entry, entry.planned))
            return
        self.lane.prefilling.remove(entry)
        turn = self.turn
        turn.num_rows += 1
        entry.auto, entry.turn = True, self.number
        entry.auto_from, entry.auto_start = turn.tick + 1, entry.planned
        tokens = 1 if entry.request.lends else entry.request.max_tokens - len(entry.request.output)
        entry.end_tick = turn.tick + tokens if not self.drafts else NEVER
        self._schedule(entry)
