"""KV outside of memory, as the core sees it: what is fetched and when it counts, what is given up, what is saved."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.core import connector, transfer
from planaria.core.connector import UNKNOWN, LaneConnector, Rates
from planaria.core.engine import EngineCore
from planaria.core.kv_cache import chain
from planaria.protocol import KVLoad, KVNews, StepPlan, StepResult, StoreNews
from planaria.types import Delta, FinishReason, KVLayout, KVOffer, Request, SamplingParams
from tests.reference_worker import HashWorker, hash_tokens

VOCAB, SIZE = 40, 4
Store = dict[bytes, list[int | None]]


class Ranks:
    """Of one lane, with a store each; what they say of loads is held back until `answer` is called with it. now: the
    core's time."""

    def __init__(
        self, stores: list[Store], *, num_blocks: int = 32, prompt_seconds: float = 0.0, block_bytes: int = 1
    ) -> None:
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=200, max_model_len=SIZE * num_blocks)
        self.core = EngineCore(scheduler, CacheConfig(block_size=SIZE), num_blocks)
        self.core.connect({rank: {"disk": b"".join(store)} for rank, store in enumerate(stores)}, block_bytes)
        self.stores, self.prompt_seconds = stores, prompt_seconds
        self.workers = [HashWorker(num_blocks, SIZE, VOCAB) for _ in stores]
        self.open: list[KVLoad] = []  # told, not dropped
        self.news: list[dict[int, KVNews]] = []
        self.flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.deltas: list[Delta] = []
        self.saved: list[bytes] = []
        self.offered: list[tuple[str, bytes, int]] = []
        self.now, self.writes = 0.0, True

    @property
    def connector(self) -> LaneConnector:
        found = self.core.lanes[0].connector
        assert found is not None
        return found

    def ask(self, id: str, prompt: list[int], count: int, **more: Any) -> None:
        self.take(self.core.admit(Request(id, prompt, SamplingParams(), 7, max_tokens=count, **more)))

    def take(self, deltas: list[Delta]) -> None:
        self.deltas += deltas
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.index == 0:
                self.cached[delta.request_id] = delta.num_cached

    def step(self) -> bool:
        plan = self.core.plan(self.now)
        if plan is None:
            return False
        for work in plan.kv:
            self.offered += work.offers
            self.open = [load for load in [*self.open, *work.loads] if load.number not in work.dropped]
            for key, block in work.saves:
                self.saved.append(key)
                for store, worker in zip(self.stores, self.workers, strict=True):
                    store[key] = list(worker.cells[block])
            if work.saves:
                self.news.append(
                    {rank: KVNews(stored=tuple(k for k, _ in work.saves)) for rank in range(len(self.stores))}
                )
        parts = [worker.step(plan.step, plan.lanes[0], plan.freed_rows[0]) for worker in self.workers]
        computed = sum(row.count for row in plan.lanes[0])
        self.take(self.core.commit(StepResult(plan.epoch, plan.step, (parts[0],), computed * self.prompt_seconds)))
        for news in self.news if self.writes else ():
            self.core.hear(news)
        self.news = []
        self.core.lanes[0].pool.check()
        return True

    def answer(self, load: KVLoad, rank: int, *, seconds: float = 0.001, most: int = 1000) -> None:
        """What this rank's store has of it is in its blocks."""
        count = 0
        for key, block in zip(load.keys[:most], load.blocks, strict=False):
            if key not in self.stores[rank]:
                break
            self.workers[rank].cells[block] = list(self.stores[rank][key])
            count += 1
        self.core.hear({rank: KVNews(loaded=((load.number, count, seconds),))})

    def answer_all(self) -> None:
        for load in self.open:
            for rank in range(len(self.stores)):
                self.answer(load, rank)
        self.open = []

    def run(self, limit: int = 400) -> None:
        for _ in range(limit):
            self.answer_all()
            if not self.step() and not self.core.has_requests():
                return
        raise AssertionError("no end")


PROMPT = [i % 3 for i in range(30)]
EXPECTED = hash_tokens(PROMPT, 7, 6, VOCAB)


def stored(ranks: int = 2, **more: Any) -> list[Store]:
    """What such ranks have after a request with the prompt that was to persist."""
    stores: list[Store] = [{} for _ in range(ranks)]
    first = Ranks(stores, **more)
    first.ask("a", PROMPT, 6, persist=True)
    first.run()
    assert first.tokens["a"] == EXPECTED and len(first.saved) == len(stores[0]) == 8
    return stores


def test_a_prefix_comes_back_to_another_engine() -> None:
    ranks = Ranks(stored())
    ranks.ask("b", PROMPT, 6)
    assert ranks.step() and [len(load.blocks) for load in ranks.open] == [7]
    ranks.run()
    assert ranks.tokens["b"] == EXPECTED and ranks.cached["b"] == 28
    stats = ranks.core.stats()
    assert stats.tier is not None and (stats.tier.hits, stats.prefix_hits, stats.prompt_tokens) == (28, 28, 2)
    assert ranks.core.lanes[0].pool.num_free == 32


def test_others_go_on_meanwhile_and_who_has_the_same_prefix_waits() -> None:
    ranks = Ranks(stored())
    ranks.ask("b", PROMPT, 6)
    ranks.ask("c", PROMPT, 6)
    ranks.ask("d", [2] * 9, 3)
    for _ in range(5):
        ranks.step()
    assert ranks.tokens.keys() == {"d"} and len(ranks.open) == 1 and ranks.core.lanes[0].counts()[1] == 2
    ranks.run()
    assert ranks.tokens["b"] == ranks.tokens["c"] == EXPECTED and ranks.cached["c"] == 28


def test_a_block_counts_when_every_rank_has_it_not_when_so_many_have_said_so() -> None:
    ranks = Ranks(stored(3))
    ranks.ask("b", PROMPT, 6)
    ranks.step()
    (load,) = ranks.open
    for _ in range(3):
        ranks.answer(load, 0)
    ranks.core.hear({1: KVNews(loaded=((load.number + 1, 7, 0.1),))})
    ranks.answer(load, 1, most=5)
    ranks.step()
    assert ranks.core.lanes[0].counts()[1] == 1
    ranks.answer(load, 2)
    ranks.open = []
    ranks.run()
    assert ranks.tokens["b"] == EXPECTED and ranks.cached["b"] == 20  # the fewest that one had


def test_a_fetch_that_brings_nothing_counts_once() -> None:
    ranks = Ranks(stored())
    ranks.ask("b", PROMPT, 6)
    ranks.step()
    (load,) = ranks.open
    for rank in (0, 1):
        ranks.answer(load, rank, most=0)
    ranks.open = []
    ranks.run()
    stats = ranks.core.stats()
    assert ranks.tokens["b"] == EXPECTED and (stats.prefix_queries, stats.prefix_hits) == (30, 0)
    assert stats.tier is not None and stats.tier.missing == 1


def test_what_one_rank_lacks_nobody_asks_for() -> None:
    stores = stored()
    keys = list(stores[0])
    del stores[1][keys[3]]
    ranks = Ranks(stores)
    ranks.ask("b", PROMPT, 6)
    ranks.step()
    assert [load.keys for load in ranks.open] == [tuple(keys[:3])]
    ranks.core.hear({0: KVNews(gone=(keys[1],))})
    assert ranks.core.stats().tier.stores["disk"].stored == 7  # type: ignore[union-attr]
    ranks.run()
    assert ranks.tokens["b"] == EXPECTED


def test_who_leaves_drops_its_fetch_before_its_blocks_are_anothers() -> None:
    ranks = Ranks(stored(), num_blocks=9)
    ranks.ask("b", PROMPT, 6)
    ranks.step()
    (load,) = ranks.open
    ranks.core.cancel("b")
    assert ranks.core.lanes[0].pool.num_free == 9
    ranks.ask("c", [2] * 30, 6)
    ranks.step()
    assert not ranks.open and set(ranks.core.lanes[0].entries["c"].blocks) >= set(load.blocks)
    ranks.answer(load, 1)  # what one rank has said too late does nothing
    ranks.workers[1].cells = [list(cells) for cells in ranks.workers[0].cells]
    ranks.run()
    assert ranks.tokens["c"] == hash_tokens([2] * 30, 7, 6, VOCAB)


def test_rows_that_run_take_blocks_from_a_fetch_and_not_from_one_another() -> None:
    ranks = Ranks(stored(), num_blocks=12)
    ranks.ask("runs", [2] * 14, 12)
    ranks.step()
    ranks.ask("b", PROMPT, 6)
    for _ in range(12):
        ranks.step()
    assert len(ranks.tokens["runs"]) == 12 and ranks.core.lanes[0].preemptions == 0 and not ranks.open
    ranks.run()
    assert ranks.tokens["b"] == EXPECTED and ranks.tokens["runs"] == hash_tokens([2] * 14, 7, 12, VOCAB)


def test_a_disk_that_takes_longer_than_computing_is_given_up_and_let_be() -> None:
    ranks = Ranks(stored(prompt_seconds=0.01), prompt_seconds=0.01)
    ranks.ask("long", [5] * 100, 1)
    ranks.run()
    ranks.ask("b", PROMPT, 6)
    ranks.step()
    ranks.now += 0.27
    ranks.step()
    assert len(ranks.open) == 1
    ranks.now += 0.02  # 28 tokens of 10 ms
    ranks.step()
    assert not ranks.open and ranks.core.tier.given_up == 1
    ranks.run()
    ranks.core.forget_prefixes()
    ranks.connector.hear(0, KVNews(stored=tuple(ranks.stores[0])))
    ranks.connector.hear(1, KVNews(stored=tuple(ranks.stores[1])))
    for id, wait, asks in (("c", 0.1, 0), ("d", connector.AGAIN, 1)):
        ranks.now += wait
        ranks.core.lanes[0].pool.forget()
        ranks.ask(id, PROMPT, 6)
        ranks.step()
        assert len(ranks.open) == asks
        ranks.run()
    assert ranks.tokens["b"] == ranks.tokens["c"] == ranks.tokens["d"] == EXPECTED


def test_what_is_faster_is_known_by_measure() -> None:
    rates = Rates()
    assert rates.worth(2, 0, 32, 0.0)
    rates.computed(63, 1.0)
    assert rates.token is None
    rates.computed(100, 1.0)
    rates.loaded(10, 1.0, 5.0)
    assert rates.worth(2, 0, 32, 6.0) and not rates.worth(2, 2, 32, 6.0) and not rates.worth(2, 0, 16, 6.0)
    assert rates.worth(2, 9, 32, 6.0 + connector.AGAIN)


@pytest.mark.parametrize(("more", "length", "saves"), [({}, 30, 0), ({"persist": True}, 30, 7), ({}, 40, 10)])
def test_what_is_wanted_again_is_saved(
    more: dict[str, Any], length: int, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "LONG", 40)
    ranks = Ranks([{}, {}])
    ranks.ask("a", [1] * length, 1, **more)
    ranks.run()
    assert len(ranks.saved) == saves
    ranks.ask("b", [1] * length, 1)  # which began with what another had computed
    ranks.run()
    assert len(set(ranks.saved)) == len(ranks.saved) == length // SIZE


def test_what_falls_out_of_memory_is_saved_before() -> None:
    ranks = Ranks([{}, {}], num_blocks=16)
    for number in range(6):
        ranks.ask(f"r{number}", [number] * 13, 2)
        ranks.run()
    assert len(ranks.saved) >= 3 * 2
    for number in range(6):
        ranks.ask(f"s{number}", [number] * 13, 2)
        ranks.run()
        assert ranks.tokens[f"s{number}"] == ranks.tokens[f"r{number}"]
    assert ranks.core.tier.hits > 0


def test_an_engine_without_requests_asks_for_nothing_that_was_refused() -> None:
    """Memory gets no shorter then; a disk that refuses one block after the other would keep it busy for ever."""
    ranks = Ranks([{}, {}], num_blocks=16)
    ranks.writes = False
    for number in range(6):
        ranks.ask(f"r{number}", [number] * 13, 2)
        while ranks.core.has_requests():
            ranks.step()
    for _ in range(60):
        refused = tuple(ranks.connector.saving)[:1]
        ranks.core.hear({rank: KVNews(refused=refused) for rank in range(2)})
        ranks.step()
    assert ranks.saved and not ranks.connector.busy


def test_a_background_requests_blocks_are_saved_while_it_runs() -> None:
    ranks = Ranks([{}, {}])
    ranks.ask("a", [1] * 9, 20, persist=True)
    for _ in range(8):
        ranks.step()
    assert len(ranks.saved) == 3 and ranks.core.has_requests()
    ranks.run()


def test_saves_wait_for_ranks_and_are_bounded() -> None:
    ranks = Ranks([{}, {}], block_bytes=connector.STAGED // 4)
    ranks.writes = False
    ranks.ask("a", [1] * 60, 1, persist=True)
    for _ in range(9):
        ranks.step()
    assert len(ranks.saved) == 4 and len(ranks.connector.queue) == 11
    for _ in range(connector.SILENT + 5):
        ranks.step()
    assert ranks.core.plan(0.0) is None  # nobody waits for it for ever
    ranks.core.hear({rank: KVNews(refused=tuple(ranks.saved)) for rank in range(2)})
    ranks.writes = True
    ranks.run()
    assert len(ranks.saved) == 15


def test_nothing_is_saved_while_a_rank_can_not() -> None:
    ranks = Ranks([{}, {}])
    ranks.core.hear({1: KVNews(stores={"disk": StoreNews(errors={"full": 1}, why="the disk is full")})})
    ranks.ask("a", PROMPT, 6, persist=True)
    ranks.run()
    tier = ranks.core.stats().tier
    assert not ranks.saved and tier is not None
    assert (tier.stores["disk"].why, tier.stores["disk"].errors) == ("the disk is full", {"full": 1})
    ranks.core.hear({1: KVNews(stores={"disk": StoreNews()})})
    ranks.ask("b", PROMPT, 6, persist=True)
    ranks.run()
    assert ranks.saved


def test_another_salt_finds_nothing() -> None:
    ranks = Ranks(stored())
    ranks.ask("b", PROMPT, 6, salt="mine")
    ranks.run()
    assert ranks.cached["b"] == 0 and ranks.tokens["b"] == EXPECTED and ranks.core.tier.queries == 0


def test_a_loss_ends_what_is_on_its_way() -> None:
    ranks = Ranks(stored())
    ranks.ask("b", PROMPT, 6)
    ranks.step()
    assert ranks.core.lanes[0].pool.num_free == 25
    ranks.core.lost(1, kept=True)
    assert ranks.core.lanes[0].pool.num_free == 32 and ranks.core.lanes[0].connector is None
    ranks.core.hear({0: KVNews(loaded=((1, 7, 0.1),))})
    ranks.core.connect({0: {"disk": b"".join(ranks.stores[0])}, 1: {"disk": b""}}, 1)
    ranks.workers = [HashWorker(32, SIZE, VOCAB) for _ in range(2)]
    ranks.open = []
    ranks.run()
    assert ranks.tokens["b"] == EXPECTED and ranks.cached["b"] == 0


def test_what_other_servers_will_fetch_is_offered_once_and_holds_nothing() -> None:
    ranks = Ranks([{}, {}])
    ranks.ask("first", PROMPT[:13], 1)
    ranks.run()
    ranks.ask("a", PROMPT, 1, offers=True)
    ranks.run()
    offered = ranks.offered
    keys = ranks.core.lanes[0].pool.block_of
    assert [lease for lease, _, _ in offered] == ["a"] * 7 and len({key for _, key, _ in offered}) == 7
    assert all(keys[key] == block for _, key, block in offered)
    assert not ranks.connector.busy and ranks.core.lanes[0].pool.num_free == 32


def test_what_is_offered_here_is_fetched_and_a_peer_that_says_nothing_is_given_up() -> None:
    ranks = Ranks([{}, {}], prompt_seconds=0.01)
    offer = KVOffer("a", tuple(range(7)), "10.0.0.1", 14579)
    ranks.ask("b", PROMPT, 6, lease=offer)
    ranks.step()
    (load,) = ranks.open
    assert load.lease == offer and len(load.keys) == 7 and load.wait == UNKNOWN / 2
    ranks.now += 60
    ranks.step()
    ranks.open = []
    ranks.run()
    assert ranks.tokens["b"] == EXPECTED and ranks.core.lanes[0].pool.num_free == 32
    stats = ranks.core.tier.transfers
    assert (stats.blocks, stats.failed) == (0, {"slow": 1})


@pytest.mark.parametrize(
    ("its", "count", "first", "come", "places"),
    [(8, 3, 0, 6, (0, 1, 2)), (8, 4, 1, 5, (0, 1, 2)), (2, 9, 0, 4, (*range(8),)), (6, 4, 2, 4, (1, 2, 3))],
)  # fmt: skip
def test_blocks_of_another_size_are_asked_for_by_their_own_keys(
    its: int, count: int, first: int, come: int, places: tuple[int, ...]
) -> None:
    """Blocks here have 4 tokens, and the first ones are there already."""
    ranks = Ranks([{}, {}])
    if first:
        ranks.ask("a", PROMPT[: 4 * first + 1], 1)
        ranks.run()
    offer = KVOffer("a", tuple(range(count)), "10.0.0.1", 14579, KVLayout(1, (1,), its))
    ranks.ask("b", PROMPT, 6, lease=offer)
    ranks.step()
    (load,) = ranks.open
    keys = chain(PROMPT, its, [], ranks.core.lanes[0].scope.root())
    assert load.lease == msgspec.structs.replace(offer, blocks=places)
    assert load.keys == tuple(keys[place] for place in places)
    assert (len(load.blocks), load.first) == (come, first)


def test_who_goes_on_elsewhere_without_memory_in_common_takes_an_offer_along() -> None:
    ranks, expected = Ranks([{}]), hash_tokens(PROMPT, 7, 6, VOCAB)
    transfer.offer_from(ranks.core.lanes, ["10.0.0.1:41", "10.0.0.2:42"])
    ranks.ask("a", PROMPT, 6, lends=True)
    ranks.run()
    (lease,) = [delta.lease for delta in ranks.deltas if delta.finish is FinishReason.LENT]
    assert lease == KVOffer("a", tuple(range(7)), "10.0.0.1", 41, at=("10.0.0.1:41", "10.0.0.2:42"))
    assert ranks.tokens["a"] == expected[:1] and [id for id, _, _ in ranks.offered] == ["a"] * 7
    ranks.ask("b", PROMPT[:2], 6, lends=True)  # not one full block
    ranks.run()
    assert ranks.deltas[-1].lease is None and ranks.core.lanes[0].pool.num_free == 32
