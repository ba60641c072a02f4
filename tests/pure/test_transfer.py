"""Blocks from one engine to another, as the two cores see it: what is lent, for how long, and when it counts."""

from __future__ import annotations

from collections import deque

import pytest

from planaria.config.options import CacheConfig, SchedulerConfig
from planaria.core import transfer
from planaria.core.engine import EngineCore
from planaria.core.kv_cache import BlockPool
from planaria.core.kv_index import BufferIndex, begin
from planaria.core.transfer import LEASE, Lender
from planaria.hosts.kv_keys import Shape
from planaria.protocol import KVLoad, KVNews, StepResult
from planaria.types import Delta, FinishReason, KVLease, Request, SamplingParams
from tests.reference_worker import HashWorker, hash_tokens

VOCAB, SIZE = 40, 4
PROMPT = [i % 3 for i in range(30)]
EXPECTED = hash_tokens(PROMPT, 7, 6, VOCAB)


class Side:
    """An engine with its ranks, in memory of its own; number: of its KV. `copies`: loads without an answer."""

    def __init__(self, number: int, *, ranks: int = 2, num_blocks: int = 32, drafts: int = 0) -> None:
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=200, max_model_len=128, max_drafts=drafts)
        shape = Shape(1, num_blocks, SIZE, 4, 40)
        (self.index,) = begin(memoryview(bytearray(shape.size)), shape, b"", number)
        self.core = EngineCore(scheduler, CacheConfig(block_size=SIZE), num_blocks, indexes=[self.index])
        self.core.connect({rank: {} for rank in range(ranks)}, 1)
        transfer.lend_from(self.core.lanes, number, (number, 0, 0))
        self.workers = [HashWorker(num_blocks, SIZE, VOCAB) for _ in range(ranks)]
        self.copies: list[KVLoad] = []
        self.deltas: deque[Delta] = deque()
        self.now = 0.0

    @property
    def pool(self) -> BlockPool:
        return self.core.lanes[0].pool

    @property
    def lender(self) -> Lender:
        (found,) = transfer.lenders(self.core.lanes)
        return found

    def ask(self, id: str, *, count: int = 6, prompt: list[int] = PROMPT, **more: object) -> None:
        request = Request(id, prompt, SamplingParams(), 7, max_tokens=count, **more)  # type: ignore[arg-type]
        self.deltas.extend(self.core.admit(request))

    def step(self) -> bool:
        plan = self.core.plan(self.now)
        if plan is None:
            return False
        for work in plan.kv:
            self.copies = [load for load in [*self.copies, *work.loads] if load.number not in work.dropped]
        parts = [worker.step(plan.step, plan.lanes[0], plan.freed_rows[0]) for worker in self.workers]
        self.deltas.extend(self.core.commit(StepResult(plan.epoch, plan.step, (parts[0],))))
        self.pool.check()
        return True

    def copy(self, other: Side, load: KVLoad, rank: int) -> int:
        """As a rank does it. Returns how many blocks it has."""
        assert load.lease is not None
        good = len(other.index.keys.marks(load.lease.blocks, load.keys))
        for theirs, own in list(zip(load.lease.blocks, load.blocks, strict=True))[:good]:
            self.workers[rank].cells[own] = list(other.workers[rank].cells[theirs])
        return good

    def answer(self, other: Side) -> None:
        for load in self.copies:
            for rank in range(len(self.workers)):
                self.core.hear({rank: KVNews(loaded=((load.number, self.copy(other, load, rank), 0.001),))})
        self.copies = []

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    def run(self, other: Side | None = None) -> list[int]:
        """Tokens that came."""
        for _ in range(60):
            if other is not None:
                self.answer(other)
            if not self.step() and not self.core.has_requests():
                return self.tokens
        raise AssertionError("no end")


def lend(owner: Side, **more: object) -> tuple[list[int], KVLease]:
    """The first token, and what holds the prompt."""
    owner.ask("a", lends=True, **more)
    tokens = owner.run()
    last = owner.deltas.pop()
    owner.deltas.clear()
    assert last.finish is FinishReason.LENT and last.lease is not None and not owner.core.has_requests()
    return tokens, last.lease


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_goes_on_with_what_another_has_computed(drafts: int) -> None:
    owner, taker = Side(5, drafts=drafts), Side(6, drafts=drafts)
    tokens, lease = lend(owner)
    assert tokens == EXPECTED[:1] and len(lease.blocks) == owner.lender.held == 7
    taker.ask("a~1", output=list(tokens), lease=lease)
    assert tokens + taker.run(owner) == EXPECTED
    stats = taker.core.stats()
    assert stats.transfers is not None and (stats.transfers.transfers, stats.transfers.blocks) == (1, 7)
    assert stats.prompt_tokens == 0 and not stats.transfers.failed and stats.tier is None
    owner.core.lanes[0].lender = None  # nothing but the lease has them
    assert owner.pool.num_free == 32 - 7


def test_a_lease_holds_its_blocks_until_it_is_released() -> None:
    owner = Side(5)
    _, lease = lend(owner)
    before = owner.pool.num_free
    transfer.release(owner.core.lanes, lease.number + 1, lease.id)  # of another KV
    transfer.release(owner.core.lanes, lease.number, lease.id + 1)
    assert owner.pool.num_free == before == 25
    transfer.release(owner.core.lanes, lease.number, lease.id)
    transfer.release(owner.core.lanes, lease.number, lease.id)  # twice
    assert owner.pool.num_free == 32 and not owner.lender.held
    owner.pool.check()


def test_a_lease_ends_by_itself() -> None:
    owner = Side(5)
    lend(owner)
    assert not transfer.expire(owner.core.lanes, LEASE - 1) and owner.lender.held == 7
    assert transfer.expire(owner.core.lanes, LEASE) and owner.pool.num_free == 32
    stats = owner.core.stats().transfers
    assert stats is not None and (stats.lent, stats.expired, stats.held) == (1, 1, 0)


def test_running_rows_go_before_leases_and_who_comes_for_them_computes() -> None:
    owner, taker = Side(5, num_blocks=16), Side(6)
    tokens, lease = lend(owner)
    owner.ask("b", count=30, prompt=[9] * 32)
    owner.run()
    stats = owner.core.stats().transfers
    assert stats is not None and stats.taken_back == 1 and not owner.lender.held
    taker.ask("a~1", output=list(tokens), lease=lease)
    assert tokens + taker.run(owner) == EXPECTED


def test_who_is_alone_does_not_wait_for_leases() -> None:
    """Nothing runs that could end, so nothing else would make room before the deadline."""
    owner = Side(5, num_blocks=9)
    lend(owner)
    owner.ask("b", count=2, prompt=[9] * 20)
    owner.run()
    assert owner.deltas[-1].finish is FinishReason.LENGTH


def test_blocks_count_when_every_rank_has_confirmed_them() -> None:
    owner, taker = Side(5), Side(6)
    tokens, lease = lend(owner)
    taker.ask("a~1", output=list(tokens), lease=lease)
    taker.step()
    (load,) = taker.copies
    for _ in range(3):  # the same rank, again and again
        taker.core.hear({0: KVNews(loaded=((load.number, taker.copy(owner, load, 0), 0.0),))})
    taker.step()
    assert taker.core.lanes[0].counts()[1] == 1 and not taker.deltas
    count = taker.copy(owner, load, 1)
    taker.core.hear({1: KVNews(loaded=((load.number, count - 2, 0.0),), failed={load.number: "evicted"})})
    taker.copies = []
    assert tokens + taker.run() == EXPECTED
    stats = taker.core.stats().transfers
    assert stats is not None and stats.blocks == 5 and stats.failed == {"evicted": 1}


def test_what_takes_too_long_is_computed_and_a_late_answer_changes_nothing() -> None:
    owner, taker = Side(5), Side(6)
    tokens, lease = lend(owner)
    taker.ask("a~1", output=list(tokens), lease=lease)
    taker.step()
    (load,) = taker.copies
    taker.now = 100.0
    while taker.step():
        pass
    for rank in range(2):
        taker.core.hear({rank: KVNews(loaded=((load.number, 7, 0.0),))})
    assert tokens + taker.run() == EXPECTED and taker.pool.num_free == 32
    stats = taker.core.stats().transfers
    assert stats is not None and stats.failed == {"slow": 1}


def test_a_block_that_was_given_to_another_is_known_by_its_mark() -> None:
    shape = Shape(1, 4, SIZE, 1, 4)
    index = BufferIndex(memoryview(bytearray(shape.size)), shape, 0)
    one, two = b"1" * 16, b"2" * 16
    index.remember(3, one)
    before = index.keys.marks([3], [one])
    assert before and index.keys.marks([3], [two]) == index.keys.marks([2], [one]) == index.keys.marks([9], [one]) == []
    index.forget(3)
    assert index.keys.marks([3], [one]) == []
    index.remember(3, one)  # the same again, and other bytes were there meanwhile
    assert index.keys.marks([3], [one]) not in ([], before) and index.load()[0] == {3: one}


def test_an_end_at_the_owner_is_no_loan() -> None:
    owner = Side(5)
    owner.ask("a", count=1, lends=True)
    owner.run()
    assert owner.deltas[-1].finish is FinishReason.LENGTH and owner.lender.held == 0
    owner.ask("b", prompt=[1, 2], lends=True)  # not one full block
    owner.run()
    assert owner.deltas[-1].finish is FinishReason.LENT and owner.deltas[-1].lease is None


def test_without_memory_that_others_can_read_it_goes_on_elsewhere_all_the_same() -> None:
    owner = Side(5)
    owner.core.lanes[0].lender = None
    owner.ask("a", lends=True)
    owner.run()
    assert owner.deltas[-1].finish is FinishReason.LENT and owner.deltas[-1].lease is None


@pytest.mark.parametrize("kept", [True, False])
def test_leases_outlive_an_epoch_with_their_kv(kept: bool) -> None:
    owner = Side(5)
    lend(owner)
    owner.core.lost(1, 32, kept=kept)
    transfer.lend_from(owner.core.lanes, 5 if kept else 6, (5, 0, 0))
    owner.pool.check()
    assert owner.lender.held == (7 if kept else 0)
    transfer.release(owner.core.lanes, 5, 1)
    assert owner.pool.num_free == 32
