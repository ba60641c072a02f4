"""EngineCore: the one place that decides. Requests in, plans out, results in, deltas out.

`plan` may be called again before `commit` (async scheduling, pipeline); plans are committed in order. In a pipeline
the steps take turns (see scheduler.py), so that those in flight are of different rows. Tokens are emitted in `commit`
and nowhere else; a result of another epoch is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import cast

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.core import holding
from planaria.core.connector import LaneConnector, TierCounts, work_of
from planaria.core.kv_cache import KeyScope
from planaria.core.kv_index import LaneIndex, name_of_request
from planaria.core.loras import LoraSlots
from planaria.core.quarantine import Quarantine
from planaria.core.scheduler import Lane
from planaria.core.stats import DraftStats, EngineStats
from planaria.core.transfer import lenders, lent
from planaria.protocol import KVNews, KVWork, StepPlan, StepResult
from planaria.types import Delta, FinishReason, Request

# A request that comes with tokens has been running elsewhere, and somebody waits for its next one: it goes before all
# that have none yet.
RESUMED = 1 << 40
CLAIM = 60.0  # seconds that blocks of another engine's requests wait for them


class EngineCore:
    """`num_blocks` KV blocks in each of `num_lanes` lanes. indexes: of each lane, what is in them; adopt: of another
    engine's, with which this one goes on. scope: of their keys. loras: slots of ranks."""

    def __init__(
        self, scheduler: SchedulerConfig, cache: CacheConfig, num_blocks: int, num_lanes: int = 1,
        indexes: Sequence[LaneIndex | None] = (), *, adopt: bool = False, scope: KeyScope = KeyScope(), loras: int = 0,
    ) -> None:  # fmt: skip
        self.loras = slots = LoraSlots(loras)
        self.config, self.cache, self.micro_steps = scheduler, cache, scheduler.micro_steps
        self.lanes = [Lane(scheduler, cache, num_blocks, each, scope, slots) for each in indexes or [None] * num_lanes]
        self.adopted, self.claim_until = adopt, cast("float | None", None)
        for lane in self.lanes if adopt else ():
            holding.adopt(lane)
        self.lane_of: dict[str, Lane] = {}
        self.epoch = 0
        self.planned = self.committed = 0  # step numbers
        self.turn = 0  # where the search for the next step's turn begins
        self.order = 0  # of the next request
        self.generation_tokens = self.replayed_tokens = 0
        self.quarantine = Quarantine()
        self.tier = TierCounts()
        self.lane_ranks = 1
        self.sizes: dict[int, int] = {}  # tokens of steps in flight, where rates are measured

    def connect(self, stored: Mapping[int, Mapping[str, bytes | None]], block_bytes: int) -> None:
        """Ranks can have blocks from outside of the cache. stored: of each, by store, keys one behind the other, if it
        has stores; block_bytes: of a rank's part of a block."""
        self.tier.block_bytes, self.lane_ranks = max(1, block_bytes), len(stored) // len(self.lanes)
        for number, lane in enumerate(self.lanes):
            ranks = range(number * self.lane_ranks, (number + 1) * self.lane_ranks)
            lane.connector = LaneConnector(lane, [stored[rank] for rank in ranks], self.tier)

    def cut(self, damaged: Mapping[int, Collection[int]]) -> None:
        """Of what was kept these blocks, by lane, don't hold what they are to hold. Nothing runs."""
        for number, blocks in damaged.items():
            lane = self.lanes[number]
            before = sum(entry.request.computed for entry in lane.entries.values())
            holding.cut(lane, blocks)
            self.replayed_tokens += before - sum(entry.request.computed for entry in lane.entries.values())

    def hear(self, news: Mapping[int, KVNews]) -> None:
        """What ranks' connectors say with a step of this epoch."""
        for rank, said in news.items():
            connector = self.lanes[rank // self.lane_ranks].connector
            if connector is not None:
                connector.hear(rank % self.lane_ranks, said)

    def limit_steps(self, tokens: int) -> None:
        """At most so many tokens in a step from now on, in the bounds of what is configured."""
        least, most = self.config.max_num_seqs, self.config.max_num_batched_tokens
        for lane in self.lanes:
            lane.step_tokens = max(least, min(tokens, most))

    def admit(self, request: Request) -> list[Delta]:
        """Take a request. One that can never run is answered at once, with an error."""
        lane = self._lane_for(request)
        total = request.most_tokens
        limit = min(self.config.max_model_len, lane.capacity())
        problem = None
        if not request.prompt:
            problem = "the prompt is empty"
        elif request.id in self.lane_of:
            problem = f"a request with id {request.id!r} is already open"
        elif total > limit:
            problem = (
                f"prompt ({len(request.prompt)}) and max_tokens ({total - len(request.prompt)}) are {total} tokens; "
                f"this engine holds {limit} for one request"
            )
        elif len(request.output) >= request.max_tokens:
            return [Delta(request.id, len(request.output), [], FinishReason.LENGTH)]
        if problem:
            return [Delta(request.id, len(request.output), [], FinishReason.ERROR, error=problem)]
        request.offers |= request.lends and lane.connector is not None and bool(lane.connector.offers.at)
        self.lane_of[request.id], request.lane = lane, self.lanes.index(lane)
        lane.add(request, self.order - (RESUMED if request.output else 0))
        self.order += 1
        if request.output:
            self.replayed_tokens += request.num_tokens - 1 - request.computed
        return []

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Delta]:
        """End a request now. Unknown or ended ids are ignored."""
        if self.quarantine.faults:
            self.quarantine.cleared(request_id)
            self._release()
        lane = self.lane_of.pop(request_id, None)
        entry = lane.remove(request_id) if lane is not None else None
        return [Delta(request_id, len(entry.request.output), [], reason)] if entry is not None else []

    def forget_prefixes(self) -> None:
        """No request to come finds anything in the prefix cache that was computed until now."""
        for lane in self.lanes:
            lane.pool.forget()
            if lane.connector is not None:
                lane.connector.forget()

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute (now, or before a commit).

        `now`, in seconds, says how long requests have waited, and how long what was adopted.
        """
        if self.adopted:
            self._drop_unclaimed(now)
        for lane in self.lanes:
            if lane.has_work():
                break
        else:
            return None
        if self.quarantine.faults and not self._only_suspects():
            return None
        step, turns = self.planned + 1, self.micro_steps
        for turn in range(self.turn, self.turn + turns):
            turn %= turns
            last_step = self.lanes[0].turns[turn].last_step
            if turns > 1 and last_step > self.committed:
                continue
            for lane in self.lanes:
                lane.now = now
                if lane.connector is not None:
                    lane.connector.look()
            parts, computes = [lane.plan(step, turn) for lane in self.lanes], False
            for lane, (rows, _) in zip(self.lanes, parts, strict=True):
                computes = computes or bool(rows or lane.turns[turn].num_rows)
            work: tuple[KVWork, ...] = ()
            if self.lanes[0].connector is not None:
                tokens = sum(row.count for rows, _ in parts for row in rows)
                work = work_of(self.lanes, tokens, computes=computes, idle=not self.in_flight)
                self.sizes |= {step: tokens} if computes else {}
            if computes or work:
                self.planned, self.turn = step, (turn + 1) % turns
                planned, freed = zip(*parts, strict=True)
                return StepPlan(self.epoch, step, planned, freed, turn, work)
            for lane, (_, freed) in zip(self.lanes, parts, strict=True):
                lane.unplan(step, turn, last_step, freed)
        return None

    def _drop_unclaimed(self, now: float) -> None:
        """Whoever goes on after another engine's death comes soon."""
        if self.claim_until is None:
            self.claim_until = now + CLAIM
        if now >= self.claim_until:
            self.adopted = False
            for lane in self.lanes:
                holding.drop_unclaimed(lane)

    def commit(self, result: StepResult) -> list[Delta]:
        """Take in a step's result; returns what it added to each request."""
        if result.epoch != self.epoch:
            return []
        if result.step != self.committed + 1 or result.step > self.planned:
            raise AssertionError(f"step {result.step} committed after {self.committed}, planned {self.planned}")
        self.committed = result.step
        if self.sizes:
            self.tier.rates.computed(self.sizes.pop(result.step, 0), result.seconds)
        deltas: list[Delta] = []
        for lane, part in zip(self.lanes, result.lanes, strict=True):
            deltas += lane.commit(result.step, part)
            self.generation_tokens += lane.drawn
        if self.quarantine.faults:
            for delta in deltas:
                if delta.tokens or delta.finish is not None:
                    self._clear(delta)
        for lane in self.lanes:
            for id in lane.ended:
                del self.lane_of[id]
        return deltas

    @property
    def in_flight(self) -> int:
        return self.planned - self.committed

    def fault(self) -> list[Delta]:
        """A fault ended the steps in flight. Returns the end of the request that is convicted of it, if one is."""
        present = [id for lane in self.lanes for id in lane.present()]
        convict = self.quarantine.fault(present)
        if convict is None:
            return []
        deltas = self.cancel(convict, FinishReason.ERROR)
        for delta in deltas:
            delta.error = "the worker failed again and again while it ran this request, and nothing else"
        return deltas

    def _lane_for(self, request: Request) -> Lane:
        """The one that holds what is computed of it, else the one with the least to do."""
        if any(lane.held for lane in self.lanes):
            for lane in self.lanes:
                if name_of_request(request) in lane.held:
                    return lane
        return self._least_loaded()

    def _least_loaded(self) -> Lane:
        return min(self.lanes, key=Lane.load) if len(self.lanes) > 1 else self.lanes[0]

    def lost(
        self, epoch: int, num_blocks: int | None = None, micro_steps: int | None = None, num_lanes: int | None = None,
        *, kept: bool = False, moved: Sequence[Mapping[int, int]] | None = None,
        indexes: Sequence[LaneIndex | None] = (),
    ) -> list[Delta]:  # fmt: skip
        """The workers' state is gone. Every cursor goes to 0, order is kept, uncommitted steps vanish. num_blocks: that
        the workers have now; requests that can't be held any more are answered. micro_steps: of the stages there are
        now. num_lanes: that there are now; if they are others than before, requests are dealt anew. kept: blocks, lanes
        and turns are those of before, and hold all that was committed: cursors stay. moved: of each lane, what is in
        which block now, where that is another; what isn't in it is gone. indexes: of each lane there is now, for KV
        that is new or elsewhere."""
        self.epoch = epoch
        unknown: list[LaneIndex | None] = [None] * max(num_lanes or 0, len(self.lanes))
        indexes = [*indexes, *unknown]
        self.micro_steps = micro_steps or self.micro_steps
        self.planned = self.committed = self.turn = 0
        self.sizes.clear()
        deltas: list[Delta] = []
        for number, lane in enumerate(self.lanes):
            before = sum(entry.request.computed for entry in lane.entries.values())
            lane.num_blocks = num_blocks or lane.num_blocks
            if not kept or moved is not None:
                lane.index = indexes[number] or LaneIndex(self.config.max_num_seqs)
            lane.lost(0, self.micro_steps, kept=kept, moved=moved[number] if moved is not None else None)
            self.replayed_tokens += before - sum(entry.request.computed for entry in lane.entries.values())
            for request in [entry.request for entry in lane.entries.values()]:
                if request.most_tokens > lane.capacity():
                    for delta in self.cancel(request.id, FinishReason.ERROR):
                        delta.error = f"after a fault this engine holds {lane.capacity()} tokens for one request"
                        deltas.append(delta)
        if num_lanes is not None and num_lanes != len(self.lanes):
            self._deal(num_lanes, indexes)
        return deltas

    def _deal(self, num_lanes: int, indexes: Sequence[LaneIndex | None]) -> None:
        """Have so many lanes, none of which has anything on its worker, and deal the open requests to them."""
        old, first = self.lanes, self.lanes[0]
        self.lanes = old[:num_lanes]
        for index in indexes[len(self.lanes) : num_lanes]:
            lane = Lane(self.config, self.cache, first.num_blocks, index, first.scope, self.loras)
            lane.step_tokens, lane.only = first.step_tokens, first.only
            lane.lost(0, self.micro_steps)
            self.lanes.append(lane)
        for lane in old[num_lanes:]:
            first.prefix_queries += lane.prefix_queries
            first.prefix_hits += lane.prefix_hits
            first.preemptions += lane.preemptions
            first.prompt_tokens += lane.prompt_tokens
            first.drafts = first.drafts.added(lane.drafts)
        entries = sorted((entry for lane in old for entry in lane.entries.values()), key=lambda entry: entry.key)
        for lane in self.lanes:
            lane.entries.clear()
            lane.waiting.clear()
        for entry in entries:
            lane = self._least_loaded()
            lane.take(entry)
            self.lane_of[entry.request.id], entry.request.lane = lane, self.lanes.index(lane)

    def _only_suspects(self) -> bool:
        """Let only the suspect that must run alone be planned, a step at a time. False: not before a commit."""
        alone = self.quarantine.next(request.id for request in self.snapshot())
        for lane in self.lanes:
            lane.only = alone
        return alone is None or self.in_flight == 0

    def _clear(self, delta: Delta) -> None:
        """A token, or its end, shows that a request is not what failed. It waits while others have to run alone."""
        was_alone = self.quarantine.cleared(delta.request_id)
        if was_alone and delta.finish is None and self.quarantine.suspects():
            holding.pause(self.lane_of[delta.request_id], delta.request_id)
        self._release()

    def _release(self) -> None:
        """Let everybody in again when nobody has to run alone."""
        if not self.quarantine.suspects():
            for lane in self.lanes:
                lane.only = None

    def snapshot(self) -> list[Request]:
        """The open requests, in the order they would be served."""
        entries = [entry for lane in self.lanes for entry in lane.entries.values()]
        return [entry.request for entry in sorted(entries, key=lambda e: e.key)]

    def transfers(self) -> bool:
        """Is there anything to fetch or to save?"""
        return any(lane.connector is not None and lane.connector.busy for lane in self.lanes)

    def has_requests(self) -> bool:
        return bool(self.lane_of)

    def stats(self) -> EngineStats:
        lanes = self.lanes
        found = [each for lane in lanes if (each := lane.connector) is not None and any(each.stores)]
        counts = [lane.counts() for lane in lanes]
        summed = counts[0] if len(counts) == 1 else [sum(column) for column in zip(*counts, strict=True)]
        running, waiting, tokens, queries, hits, preemptions, prompt_tokens = summed
        return EngineStats(
            step=self.committed, epoch=self.epoch, running=running, waiting=waiting, kv_tokens=tokens,
            prefix_queries=queries, prefix_hits=hits, preemptions=preemptions, prompt_tokens=prompt_tokens,
            generation_tokens=self.generation_tokens, replayed_tokens=self.replayed_tokens,
            kv_usage=sum([lane.pool.usage() for lane in lanes]) / len(lanes),
            tier=self.tier.stats(found) if found else None,
            drafts=reduce(DraftStats.added, (lane.drafts for lane in lanes)) if self.config.max_drafts else None,
            transfers=self.tier.transfers.added(lent(lanes)) if lenders(lanes) or self.cache.transfer else None,
            token_seconds=self.tier.rates.part or 0.0,
        )  # fmt: skip


def full_blocks(core: EngineCore) -> list[set[int]]:
    """Of each lane, blocks that are full and count."""
    return [holding.full_blocks(lane) for lane in core.lanes]


def counting_blocks(core: EngineCore) -> list[list[int]]:
    """Of each lane, blocks that count, in the order in which they are to be kept."""
    return [holding.counting_blocks(lane) for lane in core.lanes]


def rescope(core: EngineCore, scope: KeyScope, *, kept: bool = False) -> None:
    """Keys of blocks are of other weights from now on. Nothing is in flight, and `lost` follows. kept: who has KV keeps
    it, which is then of both, so that its keys are its own alone."""
    for lane in core.lanes:
        lane.scope = scope
        for entry in lane.entries.values():
            entry.keys.clear()
            if kept and (request := entry.request).computed:
                request.salt = f"{request.salt}\0{request.id}\0{scope.number}"
