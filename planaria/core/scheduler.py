"""One lane: its rows, its blocks, and which tokens of which requests go into the next step.

Rules it keeps
- A row that sampled goes on by itself in every later step of its turn until it is freed. So a plan names only rows
  that change, and planning costs nothing for the others: what a row will need, and when at the earliest, is known when
  it starts (`MicroStep.due`, a calendar by the turn's own count of steps; see `step.StepBuilder`).
- A row goes on by one token a step, or by up to `max_drafts` more where the worker drafts: how many, commits tell. What
  lies in its blocks after its last committed token counts for nothing.
- With several turns (micro-steps of a pipeline) a step is of one turn, and a turn is planned again only after its last
  step is committed: so a row is in one step in flight at most, and the steps in flight are of different rows. Parts of
  a history follow one another in any steps; the step of its last part says which turn the row is of.
- Steps may be planned ahead of commits. A row or block is reused only after the last step planned with it is committed
  (`deferred`); a token that arrives for a request that already ended is dropped.
- A request enters with blocks for its whole history, so only rows that generate ever ask for more. When there are none,
  the last in policy order is preempted: its cursor goes back to 0, its tokens stay.
- What is committed can outlive a rank. Then a request waits with the blocks up to its cursor, and enters with them.
- Prefix keys enter the cache at commit. A request whose next block is being computed by another row waits for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.core import holding
from planaria.core.connector import LaneConnector
from planaria.core.holding import Moved
from planaria.core.kv_cache import BlockKey, BlockPool, KeyScope, block_key
from planaria.core.kv_index import HeldBlocks, LaneIndex
from planaria.core.loras import LoraSlots
from planaria.core.policy import POLICIES, Key
from planaria.core.sequence import NEVER, MicroStep, SequenceState
from planaria.core.stats import DraftStats
from planaria.core.step import StepBuilder
from planaria.core.transfer import Lender, leave_with
from planaria.protocol import LanePlan, LaneResult
from planaria.types import Delta, FinishReason, Request, TokenLogprobs


class Lane:
    """The scheduler of one data-parallel rank. Driven by `EngineCore`, which numbers the steps. index: tells of what is
    in KV. scope: of its blocks' keys. loras: slots of its ranks, which those of other lanes have alike."""

    def __init__(
        self, scheduler: SchedulerConfig, cache: CacheConfig, num_blocks: int, index: LaneIndex | None = None,
        scope: KeyScope = KeyScope(), loras: LoraSlots | None = None,
    ) -> None:  # fmt: skip
        self.config, self.block_size, self.scope = scheduler, cache.block_size, scope
        self.policy, self.loras = POLICIES[scheduler.policy], loras or LoraSlots(0)
        self.caching = cache.enable_prefix_caching
        self.num_blocks, self.micro_steps = num_blocks, scheduler.micro_steps
        self.step_tokens = scheduler.max_num_batched_tokens  # at most, in one step
        self.prefix_queries = self.prefix_hits = self.preemptions = self.prompt_tokens = 0
        self.drafts = DraftStats()
        self.now = 0.0
        self.waiting: list[tuple[Key, SequenceState]] = []  # a heap
        self.entries: dict[str, SequenceState] = {}  # every open request
        self.builder = StepBuilder(self)
        self.drawn, self.ended = 0, list[str]()  # in the last commit: tokens, requests
        self.only: str | None = None  # no other request may enter (quarantine)
        self.index: LaneIndex = index or LaneIndex(scheduler.max_num_seqs)
        self.held: dict[bytes, HeldBlocks] = {}  # of requests that may come, by name
        self.connector: LaneConnector | None = None  # to what is kept outside of memory
        self.lender: Lender | None = None  # to other engines
        self.reset(0)

    def reset(self, step: int, pool: BlockPool | None = None) -> None:
        """All rows are free, and all blocks but those in use in `pool`; `step` is the last step that counts."""
        self.loras.lost()
        self.pool = pool or BlockPool(self.num_blocks, caching=self.caching, index=self.index)
        self.held = self.held if pool is not None else {}
        self.free_rows = list(range(self.config.max_num_seqs - 1, -1, -1))
        self.at_row: list[SequenceState | None] = [None] * self.config.max_num_seqs
        self.prefilling: list[SequenceState] = []  # in order of admission
        self.turns = [MicroStep(step) for _ in range(self.micro_steps)]
        self.freed: list[int] = []  # rows to be named as freed in the next plan
        self.deferred: deque[tuple[int, int, list[int]]] = deque()  # (after commit of step, row, blocks)
        self.chunks: dict[int, list[tuple[SequenceState, int]]] = {}  # step -> cursors its commit confirms
        self.computing: dict[BlockKey, SequenceState] = {}
        self.committed = step

    # -- requests come and go

    def add(self, request: Request, order: int) -> None:
        """order: counts the engine's admissions, so that those of several lanes have one order."""
        entry = SequenceState(request, self.policy(request, order))
        if self.held:
            holding.claim(self, entry)
        self.take(entry)

    def take(self, entry: SequenceState) -> None:
        """One that has no row on any worker."""
        self.entries[entry.request.id] = entry
        heapq.heappush(self.waiting, (entry.key, entry))

    def capacity(self) -> int:
        """Tokens of one request that fit when it is alone."""
        return self.num_blocks * self.block_size

    def load(self) -> int:
        """Tokens still held or to be computed: what a new request competes with."""
        return sum(e.request.num_tokens for e in self.entries.values())

    def counts(self) -> tuple[int, ...]:
        """Requests that run and that wait, tokens of room, and what stats have of prefixes, preemptions and prompts."""
        waiting = len(self.waiting)
        return (
            len(self.entries) - waiting, waiting, self.capacity(), self.prefix_queries, self.prefix_hits,
            self.preemptions, self.prompt_tokens,
        )  # fmt: skip

    def remove(self, request_id: str) -> SequenceState | None:
        """Forget an open request; its row and blocks come back when no planned step needs them."""
        entry = self.entries.pop(request_id, None)
        if entry is None:
            return None
        entry.open, entry.quiet_to = False, 0
        self._quit(entry)
        self.collect()
        return entry

    def present(self) -> list[str]:
        """Requests that a step in flight may be computing, in the order they would be served."""
        held = (entry for entry in self.at_row if entry is not None and entry.open)
        return [entry.request.id for entry in sorted(held, key=lambda e: e.key)]

    def lost(self, step: int, micro_steps: int, *, kept: bool = False, moved: Moved | None = None) -> None:
        """The worker's state is gone: every open request waits again, in its old order, with its tokens. kept: but not
        its KV, which holds what was committed; moved: see `holding.move`."""
        self.micro_steps = micro_steps
        if self.connector is not None:
            self.connector.close()
            self.connector = None
        if kept:
            holding.hold_all(self)
        if moved is not None:
            holding.move(self, moved)
        self.lender = self.lender if kept and moved is None else None
        for entry in self.entries.values():
            if not kept:
                self.rewind(entry)
            entry.last_step = 0
        self.waiting = [(entry.key, entry) for entry in self.entries.values()]
        heapq.heapify(self.waiting)
        self.reset(step, self.pool if kept else None)
        holding.forget_rows(self)

    # -- planning

    def plan(self, step: int, number: int) -> tuple[LanePlan, tuple[int, ...]]:
        """Changes and freed rows of the step `step`, which is of turn `number`. May be called before earlier steps are
        committed, of a turn among several only after its own last one."""
        rows, self.chunks[step] = self.builder.build(step, number)
        freed = tuple(self.freed)
        self.freed = []
        return rows, freed

    def unplan(self, step: int, number: int, last_step: int, freed: tuple[int, ...]) -> None:
        """The plan of `step` had nothing to compute and won't be sent: the number will be used again. `last_step` is
        the turn's before it."""
        turn = self.turns[number]
        turn.tick, turn.last_step = turn.tick - 1, last_step
        self.chunks.pop(step, None)
        self.freed = [*freed, *self.freed]

    def has_work(self) -> bool:
        """Would a plan compute anything now? (Requests that wait for a commit don't count.)"""
        if self.prefilling:
            return True
        for turn in self.turns:
            if turn.num_rows:
                return True
        if self.connector is not None and self.connector.busy:
            return True
        return any(entry.last_step <= self.committed for _, entry in self.waiting)

    # -- leaving a row

    def leave(self, entry: SequenceState, *, keep_open: bool = False, at_once: bool = False) -> None:
        """Give up row and blocks after the last planned step (blocks `at_once`: steps run in order, so the next
        owner's step comes later). `keep_open`: all is planned, the last token is still to come."""
        assert entry.row is not None
        if entry.auto:
            turn = self.turns[entry.turn]
            turn.num_rows -= 1
            entry.auto = False
            entry.last_step = turn.last_step
        elif entry in self.prefilling:
            self.prefilling.remove(entry)
        entry.leaving = True
        self.loras.leave(entry.request.adapter)
        self.freed.append(entry.row)
        blocks = entry.blocks
        if at_once:
            self.index.leave(entry.row)
            self.pool.release(blocks)
            blocks = []
        self.deferred.append((entry.last_step, entry.row, blocks))
        if not keep_open:
            self.disown(entry)

    def disown(self, entry: SequenceState) -> None:
        """It will not compute what it announced."""
        for key in entry.owned:
            self.computing.pop(key, None)
        entry.owned = []

    def _quit(self, entry: SequenceState) -> None:
        """The request ended, wherever it is."""
        if self.connector is not None:
            self.connector.ended(entry)
        if entry.row is None:
            self.pool.release(entry.blocks)
            entry.blocks = []
            self.waiting = [item for item in self.waiting if item[1] is not entry]
            heapq.heapify(self.waiting)
        elif entry.leaving:
            self.disown(entry)
        else:
            self.leave(entry)
        if self.held and not self.entries:
            holding.drop_unclaimed(self)

    def preempt(self) -> int:
        """Send the last running request in policy order back to waiting. Returns its row, -1 where blocks come from one
        that waits with some."""
        lenders = (self.connector, self.lender)
        if any(each is not None and each.make_room() for each in lenders) or holding.make_room(self, self.waiting):
            return -1
        running = [e for e in self.entries.values() if e.row is not None and (e.auto or e in self.prefilling)]
        victim = max(running, key=lambda e: e.key)
        row = victim.row
        assert row is not None
        self.leave(victim, at_once=True)
        self.rewind(victim)
        heapq.heappush(self.waiting, (victim.key, victim))
        self.preemptions += 1
        self.collect()
        return row

    def rewind(self, entry: SequenceState) -> None:
        """The cursor goes back to 0; tokens stay."""
        entry.request.computed = entry.planned = 0
        entry.row, entry.quiet_to = None, 0
        entry.auto = entry.leaving = False
        entry.blocks, entry.owned, entry.remembered, entry.fetched = [], [], 0, False
        entry.end_tick = entry.next_event = NEVER

    def collect(self) -> None:
        """Take back what no step in flight needs. Not in the midst of a commit: rows that follow may be leaving, and
        have their last token in it."""
        kept: deque[tuple[int, int, list[int]]] = deque()
        for step, row, blocks in self.deferred:
            if step <= self.committed:
                self.index.leave(row)
                self.pool.release(blocks)
                self.free_rows.append(row)
                self.at_row[row] = None
            else:
                kept.append((step, row, blocks))
        self.deferred = kept

    # -- committing

    def commit(self, step: int, result: LaneResult) -> list[Delta]:
        """Take in what step `step` computed; steps are committed in order."""
        self.committed, self.drawn, self.ended = step, 0, []
        for entry, cursor in self.chunks.pop(step, ()):
            if entry.row is not None and entry.open:
                self.computed_to(entry, cursor)
        for row, part in result.prompt_logprobs.items():
            at = self.at_row[row]
            if at is not None and at.prompt_logprobs is not None:
                at.prompt_logprobs.extend(part)
        deltas = drew(self, result.rows, result.tokens, result.logprobs)
        if result.pooled:
            deltas += pooled(self, result.pooled)
        if result.drafted:
            self.drafts = self.drafts.checked(result.drafted, result.more)
        if result.more:
            further(self, deltas, result.more)
        for row in result.late:
            holding.again(self, row)
        if result.errors:
            deltas += failed(self, result.errors)
        if self.deferred:
            self.collect()
        return deltas

    def computed_to(self, entry: SequenceState, cursor: int) -> None:
        """KV holds the first `cursor` tokens: remember the full blocks among them."""
        request = entry.request
        assert entry.row is not None
        request.computed = self.index.lengths[entry.row] = cursor
        full = cursor // self.block_size
        if not self.caching or full <= entry.remembered:
            return
        keys, size = entry.keys, self.block_size
        while (known := len(keys)) < full:
            parent = keys[-1] if known else self.scope.root(request.salt, request.adapter)
            keys.append(block_key(parent, request.span(known * size, known * size + size)))
        for index in range(entry.remembered, full):
            key = entry.keys[index]
            self.pool.remember(entry.blocks[index], key)
            if self.computing and self.computing.get(key) is entry:
                del self.computing[key]
        if request.persist and self.connector is not None:
            self.connector.want(entry.keys[entry.remembered : full], entry.blocks[entry.remembered : full])
        entry.remembered = full
        if request.offers and self.connector is not None:
            self.connector.offers.add(entry)

    def finish(self, entry: SequenceState, delta: Delta, reason: FinishReason) -> Delta:
        delta.finish = reason
        entry.open, entry.quiet_to = False, 0
        self.ended.append(entry.request.id)
        self.entries.pop(entry.request.id, None)
        self._quit(entry)
        return delta


def drew(
    lane: Lane, rows: Sequence[int], tokens: Sequence[int], logprobs: Mapping[int, list[TokenLogprobs]] | None = None
) -> list[Delta]:
    """A token each, also of who has left. What is done for each here is what a large step costs most."""
    at_row, lengths = lane.at_row, lane.index.lengths
    deltas: list[Delta] = []
    for row, token in zip(rows, tokens, strict=True):
        entry = at_row[row]
        if entry is None:
            continue
        request = entry.request
        output = request.output
        count = len(output)
        if count >= entry.quiet_to or token in entry.stops:
            if entry.open:
                deltas.append(drew_one(lane, entry, token))
            continue
        request.computed = lengths[row] = entry.prompt_length + count
        deltas.append(Delta(request.id, count, [token]))
        output.append(token)
    if logprobs:
        of = {entry.request.id: likely for row, likely in logprobs.items() if (entry := at_row[row]) is not None}
        for delta in deltas:
            delta.logprobs = of.get(delta.request_id)
    if number := lane.scope.number:
        for delta in deltas:
            delta.weights = number
    lane.drawn += len(deltas)
    return deltas


def drew_one(lane: Lane, entry: SequenceState, token: int) -> Delta:
    """A token that fills a block, or is its request's first, or may be its last; or of who has no row any more."""
    request, count = entry.request, len(entry.request.output)
    if entry.row is not None:
        lane.computed_to(entry, entry.prompt_length + count)
        entry.quiet_to = entry.most - 1
        if lane.caching:
            entry.quiet_to = min(entry.quiet_to, (entry.remembered + 1) * lane.block_size - entry.prompt_length)
    delta = Delta(request.id, count, [token])
    request.output.append(token)
    if not count:
        delta.num_cached, delta.queued = entry.num_cached, entry.queued
        delta.prompt_logprobs = entry.prompt_logprobs
    ended(lane, entry, delta, token)
    return delta


def ended(lane: Lane, entry: SequenceState, delta: Delta, token: int) -> None:
    """Is it, with this token? Its request's output has it."""
    request, count = entry.request, delta.index + 1
    if token in entry.stops and (count > request.params.min_tokens or request.params.grammar):
        delta.stop_reason = token
        lane.finish(entry, delta, FinishReason.STOP)
    elif count >= request.max_tokens:
        lane.finish(entry, delta, FinishReason.LENGTH)
    elif request.lends:
        delta.lease = leave_with(lane, entry)
        lane.finish(entry, delta, FinishReason.LENT)


def failed(lane: Lane, errors: dict[int, str]) -> list[Delta]:
    """Rows end with these."""
    ended = [(entry, message) for row, message in errors.items() if (entry := lane.at_row[row]) and entry.open]
    return [
        lane.finish(e, Delta(e.request.id, len(e.request.output), [], error=message), FinishReason.ERROR)
        for e, message in ended
    ]


def pooled(lane: Lane, vectors: dict[int, bytes]) -> list[Delta]:
    """Rows end with these in place of tokens."""
    deltas = []
    for row, vector in vectors.items():
        entry = lane.at_row[row]
        if entry is None or not entry.open:
            continue
        request = entry.request
        if entry.row is not None:
            lane.computed_to(entry, len(request.prompt))
        delta = Delta(request.id, 0, [], num_cached=entry.num_cached, queued=entry.queued, pooled=vector)
        deltas.append(lane.finish(entry, delta, FinishReason.STOP))
    return deltas


def further(lane: Lane, deltas: list[Delta], more: dict[int, list[int]]) -> None:
    """Put the tokens after a row's first into its delta; what comes after the request's end is dropped."""
    of = {delta.request_id: delta for delta in deltas}
    for row, tokens in more.items():
        entry = lane.at_row[row]
        delta = of.get(entry.request.id) if entry is not None else None
        if entry is None or delta is None:
            continue
        for token in tokens:
            if delta.finish is not None:
                break
            (next,) = drew(lane, [row], [token])
            delta.tokens.append(token)
            delta.finish, delta.stop_reason = next.finish, next.stop_reason
        if delta.logprobs is not None:
            delta.logprobs = delta.logprobs[: len(delta.tokens)]
