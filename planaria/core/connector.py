"""KV that is kept outside of memory, or in another engine's: which blocks of a request are fetched, which are saved.
The core's side of a connector; what a rank does is planaria.worker.connector, and between them are `StepPlan.kv` and
`StepResult.kv`. How blocks come to count, and who holds them for others, is planaria.core.transfer.

Rules it keeps
- A key is usable only where every rank of the lane has said that it has its part. A block counts as loaded only when
  every rank (a set of ranks, not a count) has confirmed it; else what it would have held is computed.
- A fetch owns its blocks, and the blocks of memory before them, until it ends. Who drops it says so to the ranks in the
  same plan in which the blocks are free again, and ranks heed that before anything else of the step.
- Only a block that has a key is saved: it was committed. Ranks take its bytes before the step computes, so nothing has
  to be held for it.
- A fetch is begun only when it is expected to take less time than computing, by what was measured; one that takes as
  long as computing would have is given up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from planaria.core.kv_cache import BlockKey
from planaria.core.sequence import SequenceState
from planaria.core.stats import StoreStats, TierStats, TransferStats
from planaria.core.transfer import Fetch, Offers, lent_part
from planaria.hosts.kv_keys import KEY
from planaria.protocol import KVLoad, KVNews, KVWork, StoreNews
from planaria.types import KVLease, KVOffer

if TYPE_CHECKING:
    from planaria.core.scheduler import Lane

LEAST = 2  # blocks worth a fetch
LONG = 512  # tokens of a history that is saved at its end
STAGED = 64 << 20  # bytes of blocks on a rank that are taken and not yet written
BUSY_BYTES, IDLE_BYTES = 2 << 20, 16 << 20
QUEUE = 1 << 14  # blocks that wait to be saved
AHEAD = 32  # idle blocks that are looked at in a step, the next to be evicted first
MEASURED = 64  # tokens of a step from which its rate is taken
FIRST_PART, LEAST_PART = 64, 32  # tokens of histories in a step that is to be short, before anything is measured; ever
AGAIN = 30.0  # seconds after which something slow is tried again
PATIENCE, UNKNOWN = 0.25, 10.0  # seconds for a fetch at least; where the rate of computing isn't known
SILENT = 400  # waits without news, after which nobody waits for a disk that writes
SMOOTH = 0.3


class Rates:
    """Seconds for a token that is computed and for a block that is fetched, as measured; None: not yet. part: for a
    token of a history, in a step that has rows as well or has not."""

    def __init__(self) -> None:
        self.token: float | None = None
        self.part: float | None = None
        self.block: float | None = None
        self.fetched = 0.0  # when the last fetch ended

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= MEASURED and seconds > 0:
            self.token = _mean(self.token, seconds / tokens)
        if tokens >= LEAST_PART and seconds > 0:
            self.part = _mean(self.part, seconds / tokens)

    def tokens(self, pause: float) -> int:
        """Of histories, in a step that is to take so many seconds. Rows that it has are in what is measured, so that
        steps come to take as long; however long those take alone, some are computed."""
        return FIRST_PART if self.part is None else max(LEAST_PART, int(pause / self.part))

    def loaded(self, blocks: int, seconds: float, now: float) -> None:
        self.block, self.fetched = _mean(self.block, seconds / blocks), now

    def slow(self, blocks: int, seconds: float, now: float) -> None:
        """So many took longer than that."""
        self.block, self.fetched = max(self.block or 0.0, seconds / blocks), now

    def worth(self, blocks: int, queued: int, tokens: int, now: float) -> bool:
        """Is it faster to fetch them, behind those that are queued, than to compute their tokens?"""
        if self.token is None or self.block is None or now - self.fetched > AGAIN:
            return True
        return (queued + blocks) * self.block < tokens * self.token


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + SMOOTH * (new - before)


class TierCounts:
    """Of an engine, whatever becomes of its lanes. block_bytes: of one rank's part of a block; busy_bytes, idle_bytes:
    that a rank copies in a step which computes, or doesn't."""

    def __init__(self) -> None:
        self.block_bytes, self.busy_bytes, self.idle_bytes = 1, BUSY_BYTES, IDLE_BYTES
        self.queries = self.hits = self.given_up = self.missing = 0
        self.saved: Counter[str] = Counter()  # ranks' parts of blocks, by store
        self.loaded: Counter[str] = Counter()
        self.errors: dict[str, Counter[str]] = {}
        self.rates = Rates()
        self.transfers = TransferStats()

    def ended(self, fetch: Fetch, block_size: int, ranks: int, now: float) -> None:
        """All ranks have answered."""
        usable, missing = fetch.usable, fetch.usable < len(fetch.blocks)
        if fetch.lease is not None:
            self.transferred(fetch, usable, ranks, (fetch.failed or "missing") if missing else "")
            return
        if usable:
            self.rates.loaded(usable, fetch.seconds, now)
        self.missing += missing
        self.hits += usable * block_size

    def transferred(self, fetch: Fetch, usable: int, ranks: int, failed: str) -> None:
        bytes = usable * ranks * self.block_bytes
        done = TransferStats(1, usable, bytes, fetch.seconds, {failed: 1} if failed else {})
        self.transfers = self.transfers.added(done)

    def hear(self, stores: Mapping[str, StoreNews]) -> None:
        for name, news in stores.items():
            self.saved[name] += news.saved
            self.loaded[name] += news.loaded
            self.errors.setdefault(name, Counter()).update(news.errors)

    def stats(self, lanes: Iterable[LaneConnector]) -> TierStats:
        lanes = list(lanes)
        stores = {name: self._of(name, lanes) for lane in lanes for rank in lane.stores for name in rank}
        return TierStats(self.queries, self.hits, self.given_up, self.missing, stores)

    def _of(self, name: str, lanes: Sequence[LaneConnector]) -> StoreStats:
        told = [[rank.get(name, StoreNews()) for rank in lane.stores] for lane in lanes]
        return StoreStats(
            max(min(news.there for news in ranks) for ranks in told), self.saved[name] // len(told[0]),
            self.saved[name] * self.block_bytes, self.loaded[name] * self.block_bytes,
            dict(self.errors.get(name, {})), next((news.why for ranks in told for news in ranks if news.why), ""),
        )  # fmt: skip


class LaneConnector:
    """Of one lane in one epoch. stored: of each of its ranks, the keys that each of its stores has, one behind the
    other; None: of what it has beside stores to save blocks in."""

    def __init__(self, lane: Lane, stored: Sequence[Mapping[str, bytes | None]], counts: TierCounts) -> None:
        self.lane, self.counts, self.rates = lane, counts, counts.rates
        self.all = (1 << len(stored)) - 1
        self.ranks_of: dict[BlockKey, int] = {}  # ranks that have a key, as bits
        self.stores = [{name: StoreNews(len(keys or b"") // KEY) for name, keys in each.items()} for each in stored]
        self.saves = [[name for name, keys in each.items() if keys is not None] for each in stored]
        for rank, stores in enumerate(stored):
            for keys in filter(None, stores.values()):
                for at in range(0, len(keys), KEY):
                    self._has(rank, keys[at : at + KEY])
        self.fetches: dict[int, Fetch] = {}
        self.numbers = 0
        self.loads: list[KVLoad] = []  # to be told
        self.dropped: list[int] = []
        self.offers = Offers()
        self.queue: OrderedDict[BlockKey, int] = OrderedDict()  # to be saved: the block of each
        self.saving: dict[BlockKey, int] = {}  # ranks that haven't answered, as bits
        self.waits = 0  # without news of a save
        self.most = min(256, max(4, STAGED // counts.block_bytes))

    # -- what ranks say

    def _has(self, rank: int, key: BlockKey) -> None:
        self.ranks_of[key] = self.ranks_of.get(key, 0) | 1 << rank

    def _lacks(self, rank: int, key: BlockKey) -> None:
        if after := self.ranks_of.get(key, 0) & ~(1 << rank):
            self.ranks_of[key] = after
        else:
            self.ranks_of.pop(key, None)

    def hear(self, rank: int, news: KVNews) -> None:
        """rank: counted in the lane."""
        self.waits = 0
        self.stores[rank].update(news.stores)
        self.counts.hear(news.stores)
        for key in news.gone:
            self._lacks(rank, key)
        for key in news.stored:
            self._has(rank, key)
            self._answered(rank, key)
        for key in news.refused:
            self._answered(rank, key)
        for number, count, seconds in news.loaded:
            self._loaded(rank, number, count, seconds, news.failed.get(number, ""))

    def _answered(self, rank: int, key: BlockKey) -> None:
        missing = self.saving.get(key)
        if missing is None:
            return
        if missing := missing & ~(1 << rank):
            self.saving[key] = missing
        else:
            del self.saving[key]

    def _loaded(self, rank: int, number: int, count: int, seconds: float, failed: str) -> None:
        fetch = self.fetches.get(number)
        if fetch is not None and fetch.confirm(rank, count, seconds, failed):  # else it was dropped
            self._done(fetch)

    # -- fetching

    def fetching(self, entry: SequenceState, hits: list[int], usable: int) -> bool:
        """Does it wait for blocks behind `hits`, of the first `usable` of its history? It asks for them if it's worth
        it."""
        if entry.fetched:
            return entry.fetch is not None
        lane, first = self.lane, len(hits)
        free = lane.pool.num_free - lane.pool.num_idle(hits)
        if (lease := entry.request.lease) is not None and free >= usable - first:
            entry.request.lease = None  # once
            if lent := lent_part(lane, entry, lease, first, usable):
                count, lease, asked = lent
                self._begin(entry, hits, entry.keys[first : first + count], lease, asked)
                return True
        keys = entry.keys[first:usable]
        count = next((i for i, key in enumerate(keys) if self.ranks_of.get(key) != self.all), len(keys))
        queued = sum(len(fetch.blocks) for fetch in self.fetches.values())
        tokens = count * lane.block_size
        if count < LEAST or count > free or not self.rates.worth(count, queued, tokens, lane.now):
            return False
        self.counts.queries += usable * lane.block_size - first * lane.block_size
        self._begin(entry, hits, keys[:count])
        return True

    def _begin(
        self, entry: SequenceState, hits: list[int], keys: list[BlockKey], lease: KVLease | KVOffer | None = None,
        asked: list[BlockKey] | None = None,
    ) -> None:  # fmt: skip
        lane = self.lane
        lane.pool.share(hits)
        self.numbers += 1
        fetch = Fetch(self.numbers, entry, list(hits), keys, lane.pool.take(len(keys)), self.all, lease, asked)
        patience = UNKNOWN if self.rates.token is None else len(keys) * lane.block_size * self.rates.token
        fetch.began, fetch.until = lane.now, lane.now + max(PATIENCE, patience)
        self.fetches[fetch.number] = fetch
        entry.fetch, entry.fetched = fetch, True
        entry.owned = [key for key in fetch.keys if key not in lane.computing]
        for key in entry.owned:
            lane.computing[key] = entry
        self.loads.append(fetch.load)

    def _done(self, fetch: Fetch) -> None:
        """All ranks have what is usable of it, and their checksums fit: the request waits with it."""
        lane, entry, usable = self.lane, fetch.entry, fetch.usable
        self._end(fetch)
        for key, block in zip(fetch.keys[:usable], fetch.blocks, strict=False):
            lane.pool.remember(block, key)
        lane.pool.release(fetch.blocks[usable:])
        self.counts.ended(fetch, lane.block_size, self.all.bit_count(), lane.now)
        request = entry.request
        entry.blocks = fetch.hits + fetch.blocks[:usable]
        entry.remembered = len(entry.blocks)
        request.computed = entry.remembered * lane.block_size
        if not entry.blocks:
            return  # as if nothing had been asked
        lane.prefix_queries += request.num_tokens
        lane.prefix_hits += request.computed
        if not request.output:
            entry.num_cached, entry.queued = request.computed, max(0.0, lane.now - request.arrival)

    def _end(self, fetch: Fetch) -> None:
        del self.fetches[fetch.number]
        fetch.entry.fetch = None
        for key in fetch.entry.owned:
            self.lane.computing.pop(key, None)
        fetch.entry.owned = []

    def drop(self, fetch: Fetch, why: str = "dropped") -> None:
        """Nobody waits for it any more."""
        self._end(fetch)
        if fetch.lease is not None:
            self.counts.transferred(fetch, 0, 0, why)
        self.loads = [load for load in self.loads if load.number != fetch.number]
        self.dropped.append(fetch.number)
        self.lane.pool.release(fetch.hits + fetch.blocks)

    def make_room(self) -> bool:
        """Running rows need blocks: the last in policy order does without what it fetches. False: nobody does."""
        last = max(self.fetches.values(), key=lambda fetch: fetch.entry.key, default=None)
        if last is not None:
            self.drop(last)
        return last is not None

    def forget(self) -> None:
        """Bring nothing back of what is stored by now, in this epoch."""
        self.ranks_of.clear()
        self.queue.clear()

    def close(self) -> None:
        """The epoch is over: no rank writes anything into a block any more."""
        for fetch in list(self.fetches.values()):
            self.drop(fetch)

    # -- saving

    def want(self, keys: Iterable[BlockKey], blocks: Iterable[int]) -> None:
        """Save these blocks, which are committed."""
        both = zip(self.stores, self.saves, strict=True)
        if any(all(stores[name].why for name in names) for stores, names in both):
            return  # some rank can save nothing, or has nowhere to
        for key, block in zip(keys, blocks, strict=False):
            known = self.ranks_of.get(key) == self.all or key in self.saving or key in self.queue
            if not known and len(self.queue) < QUEUE:
                self.queue[key] = block

    def ended(self, entry: SequenceState) -> None:
        """A request ends, wherever it is: what is long, began with what others had computed, or is to persist, will be
        wanted again."""
        request = entry.request
        if entry.fetch is not None:
            self.drop(entry.fetch)
        if request.offers:
            self.offers.add(entry)
        if request.persist or entry.num_cached or request.num_tokens >= LONG:
            self.want(entry.keys[: entry.remembered], entry.blocks)

    def _ahead(self) -> None:
        """Memory gets short: blocks that nobody uses fall out of it soon."""
        pool = self.lane.pool
        if len(pool.empty) < pool.num_blocks // 8 and len(self.queue) < AHEAD:
            idle = list(islice(pool.idle, AHEAD))
            self.want([pool.key_of[block] for block in idle], idle)

    # -- steps

    @property
    def busy(self) -> bool:
        """Is there anything to do without a row?"""
        room = bool(self.queue) and len(self.saving) < self.most
        begins = self.loads or self.dropped or self.offers.queue
        return bool(self.fetches or begins or room or (self.saving and self.waits < SILENT))

    def wait(self) -> KVWork | None:
        """For a step without anything else."""
        if not self.busy:
            return None
        self.waits += 1
        return KVWork(waits=True)

    def look(self) -> None:
        """Give up what takes too long."""
        for fetch in [fetch for fetch in self.fetches.values() if self.lane.now >= fetch.until]:
            self.counts.given_up += 1
            if fetch.lease is None:
                self.rates.slow(len(fetch.blocks), self.lane.now - fetch.began, self.lane.now)
            self.drop(fetch, "slow")

    def work(self, tokens: int, *, computes: bool) -> KVWork | None:
        """For the step that is planned, after its rows, with so many tokens of histories: what is saved keeps pace with
        them. computes: some lane has rows."""
        if computes:  # else memory gets no shorter, and what a disk refuses would be asked for again and again
            self._ahead()
        saves: list[tuple[BlockKey, int]] = []
        copied = self.counts.busy_bytes if computes else self.counts.idle_bytes
        room = max(1, copied // self.counts.block_bytes, tokens // self.lane.block_size)
        offers = self.offers.take(self.lane.pool, room)
        while self.queue and len(saves) + len(offers) < room and len(self.saving) < self.most:
            key, block = self.queue.popitem(last=False)
            if self.lane.pool.key_of.get(block) == key:  # else it has fallen out of memory
                saves.append((key, block))
                self.saving[key] = self.all
        if not (saves or offers or self.loads or self.dropped):
            return None
        work = KVWork(tuple(self.dropped), tuple(self.loads), tuple(saves), not computes, offers)
        self.dropped, self.loads = [], []
        return work


def work_of(lanes: Sequence[Lane], tokens: int, *, computes: bool, idle: bool) -> tuple[KVWork, ...]:
    """What connectors have to do in a step with so many tokens of histories, which computes, or doesn't; where there is
    nothing to begin with, and no step is in flight, news of what is on its way may be waited for. Nothing: of no
    lane."""
    connectors = [lane.connector for lane in lanes if lane.connector is not None]
    work = [connector.work(tokens, computes=computes) for connector in connectors]
    if idle and not computes and not any(work):
        work = [connector.wait() for connector in connectors]
    return tuple(each or KVWork() for each in work) if any(work) else ()
