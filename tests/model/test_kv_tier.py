"""KV blocks on disk: what comes back, after what, and what anybody may do to the folder meanwhile. A file that isn't
what it was costs its computation, and nothing else.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planaria.checkpoint import identity
from planaria.checkpoint.identity import weights_digest
from planaria.config import machine
from planaria.config.machine import own_folder
from planaria.config.options import EngineOptions
from planaria.config.resolve import resolve
from planaria.core.stats import StoreStats, TierStats
from planaria.errors import ConfigError
from planaria.protocol import KVLoad, KVNews, KVWork, StoreNews
from planaria.types import KVOffer
from planaria.worker import kv_store, kv_tier
from planaria.worker.kv_memory import MemoryStore
from planaria.worker.kv_store import HEAD, PART, BlockStore, StoreError
from planaria.worker.kv_tier import KVStores, StoreThreads, split
from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, texts
from tests.proc.servers import wait_until

SIZE = 4096
KEYS = [bytes([i]) * 16 for i in range(40)]
ASKED = texts(100, [(600, 8), (90, 8)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        write_checkpoint(tmp_path_factory.mktemp("tier"), "llama", num_hidden_layers=2, max_position_embeddings=1024)
    )


def store(folder: Path, *, name: bytes = b"i" * 16, most: int = 1 << 30) -> BlockStore:
    own_folder("--kv-tier", str(folder))
    return BlockStore(str(folder), name, SIZE, most)


def payload(number: int) -> bytearray:
    return bytearray(np.random.default_rng(number).integers(0, 256, SIZE, np.uint8).tobytes())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def engine(model: str, folder: Path, *, tp: int = 1, **options: Any) -> Engine:
    backend = "mp" if tp > 1 else "uni"
    return Engine(
        model, kv_tier=f"{folder},1GiB", distributed_executor_backend=backend, tensor_parallel_size=tp, threads=1,
        max_model_len=1024, max_num_batched_tokens=128, **options,
    )  # fmt: skip


def settle(engine: Engine) -> TierStats:
    """When all is saved that is to be."""
    engine.finish()
    return tier_of(engine)


def tier_of(engine: Engine) -> TierStats:
    assert engine.loop.core is not None
    stats = engine.loop.core.stats().tier
    assert stats is not None
    return stats


def disk_of(engine: Engine) -> StoreStats:
    return tier_of(engine).stores["disk"]


# -- an engine that comes back


@pytest.mark.parametrize("tp", [1, 2])
def test_a_prefix_comes_back_after_a_restart(model: str, tmp_path: Path, tp: int) -> None:
    with engine(model, tmp_path / "kv", tp=tp) as first:
        tokens = first.run(ASKED)
        assert (
            settle(first).stores["disk"].saved == 37
        )  # the full blocks of the long one; the short one isn't wanted again
    assert len(files(tmp_path / "kv")) == 37 * tp
    with engine(model, tmp_path / "kv", tp=tp) as second:
        assert second.run(ASKED) == tokens
        found = disk_of(second)
        assert (tier_of(second).hits, found.stored, found.errors) == (37 * 16, 37, {})
    files(tmp_path / "kv")[0].unlink()  # what one rank lacks is of use to none
    with engine(model, tmp_path / "kv", tp=tp) as third:
        assert third.run(ASKED) == tokens
        assert disk_of(third).stored == 36 and tier_of(third).hits < 37 * 16


def test_blocks_of_ranks_that_share_tokens_are_of_one_degree(model: str, tmp_path: Path) -> None:
    """Blocks are of twice as many tokens, of which each rank has half."""
    two = {"tp": 2, "decode_context_parallel_size": 2}

    def run(**options: Any) -> tuple[list[list[int]], int, int]:
        with engine(model, tmp_path / "kv", **options) as made:
            return made.run(ASKED), settle(made).stores["disk"].stored, tier_of(made).hits

    tokens, stored, hits = run(**two)
    assert (stored, hits) == (18, 0) and run(**two) == (tokens, 18, 18 * 32)
    for other in ({**two, "cp_kv_cache_interleave_size": 2}, {"tp": 2, "block_size": 32}):
        assert run(**other)[2] == 0


def test_nothing_of_other_weights_comes_back(model: str, tmp_path: Path) -> None:
    with engine(model, tmp_path / "kv") as first:
        first.run(ASKED)
        settle(first)
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 1024}
    other = str(write_checkpoint(tmp_path / "other", "llama", seed=1, **sizes))
    with engine(other, tmp_path / "kv") as second:
        second.run(ASKED)
        assert disk_of(second).stored == 0
    with engine(model, tmp_path / "kv") as third:
        third.run(ASKED)
        assert tier_of(third).hits == 37 * 16


def test_what_was_done_to_the_files_costs_their_computation_and_nothing_else(model: str, tmp_path: Path) -> None:
    with engine(model, tmp_path / "kv") as first:
        tokens = first.run(ASKED)
        settle(first)
    for number, path in enumerate(files(tmp_path / "kv")):
        HARMS[number % len(HARMS)](path)
    with engine(model, tmp_path / "kv") as second:
        assert second.run(ASKED) == tokens
        assert sum(disk_of(second).errors.values()) > 0


def test_a_rank_without_a_folder_says_so(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(flag: str, folder: str) -> None:
        raise ConfigError(flag, folder, "is another user's by now")

    monkeypatch.setattr(machine, "own_folder", refuse)  # as ranks find it
    with engine(model, tmp_path / "kv") as first:
        first.run(ASKED)
        found = settle(first)
        disk = found.stores["disk"]
    assert "its log says why" in disk.why and disk.saved == found.hits == 0 and not files(tmp_path / "kv")


# -- a rank's files


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap(path: Path) -> None:
    """For another block's."""
    others = sorted(other for other in path.parents[1].rglob("*") if other.is_file() and other != path)
    if others:
        path.write_bytes(others[0].read_bytes())


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: list[Callable[[Path], None]] = [flip, cut, lengthen, empty, swap, fifo, link, folder]


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_is_not_what_it_was_is_none(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    kept, into = store(tmp_path / "kv"), bytearray(SIZE)
    for number in (1, 2):
        kept.write(KEYS[number], payload(number))
    kept.read(KEYS[1], memoryview(into))
    assert into == payload(1) and len(kept.keys()) == 32
    harm(kept._path(KEYS[1]))
    with pytest.raises(StoreError):
        kept.read(KEYS[1], memoryview(bytearray(SIZE)))
    kept.read(KEYS[2], memoryview(into))
    assert into == payload(2)


def test_a_file_of_another_identity_is_none(tmp_path: Path) -> None:
    mine, yours = store(tmp_path / "kv"), store(tmp_path / "kv", name=b"j" * 16)
    for each in (mine, yours):
        each.write(KEYS[1], payload(1))
    mine._path(KEYS[1]).write_bytes(yours._path(KEYS[1]).read_bytes())
    with pytest.raises(StoreError, match="checksum"):
        mine.read(KEYS[1], memoryview(bytearray(SIZE)))


def test_files_are_this_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store(tmp_path / "kv").write(KEYS[1], payload(1))
    finally:
        os.umask(old)
    modes = {path.stat().st_mode & 0o777 for path in files(tmp_path / "kv")}
    folders = {
        path.stat().st_mode & 0o777 for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")] if path.is_dir()
    }
    assert modes == {0o600} and folders == {0o700}
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o770)
    with pytest.raises(ConfigError, match="only this user"):
        own_folder("--kv-tier", str(tmp_path / "open"))


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    kept = store(tmp_path / "kv", most=10 * (SIZE + HEAD.size))
    gone = []
    for number, key in enumerate(KEYS):
        gone += kept.write(key, payload(number))
        os.utime(kept._path(key), (number, number))
        kept.read(KEYS[0], memoryview(bytearray(SIZE)))  # used all the time
    left = {path.name for path in files(tmp_path / "kv")}
    assert KEYS[0].hex() in left and KEYS[-1].hex() in left and len(left) <= 11
    assert {key.hex() for key in gone} == {key.hex() for key in KEYS} - left


def test_the_beginning_of_a_history_goes_last(tmp_path: Path) -> None:
    kept = store(tmp_path / "kv", most=10 * (SIZE + HEAD.size))
    for number, key in enumerate(KEYS[:10]):
        kept.write(key, payload(number))
    kept.most = 5 * (SIZE + HEAD.size)
    kept._make_room()
    assert {path.name for path in files(tmp_path / "kv")} == {key.hex() for key in KEYS[:4]}


def test_files_are_bounded_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_FILES", 8)
    kept = store(tmp_path / "kv", most=PART * (SIZE + HEAD.size))
    for number, key in enumerate(KEYS):
        kept.write(key, payload(number))
    assert len(files(tmp_path / "kv")) <= 9 and len(kept.keys()) <= 8 * 16


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = store(tmp_path / "kv")
    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreError) as error:
        kept.write(KEYS[1], payload(1))
    assert error.value.kind == "full" and kept.keys() == b"" and os.listdir(tmp_path / "kv") == [".lock", kept.own.name]


def test_a_folder_is_shared_by_two_writers(tmp_path: Path) -> None:
    one, two = store(tmp_path / "kv"), store(tmp_path / "kv")
    for writer, numbers in ((one, (1, 2)), (two, (2, 3))):
        for number in numbers:
            writer.write(KEYS[number], payload(number))
    into = bytearray(SIZE)
    for reader in (one, two):
        for number in (1, 2, 3):
            reader.read(KEYS[number], memoryview(into))
            assert into == payload(number)
    half, somebodys = tmp_path / "kv" / ".1234-7fab-1", tmp_path / "kv" / ".profile"
    half.write_bytes(b"half of it")
    somebodys.write_bytes(b"of a folder that has more in it than blocks")
    assert len(one.keys()) == 3 * 16
    one._make_room()
    assert half.exists()
    for file in (half, somebodys):
        os.utime(file, (0, 0))
    one._make_room()
    assert not half.exists() and somebodys.exists() and len(files(tmp_path / "kv")) == 3


# -- a rank's threads


class Slow(BlockStore):
    """Reads and writes when it is told to."""

    def __init__(self, folder: Path) -> None:
        own_folder("--kv-tier", str(folder))
        super().__init__(str(folder), b"i" * 16, SIZE, 1 << 30)
        self.may, self.reads = threading.Event(), threading.Event()

    def read(self, key: bytes, into: memoryview) -> None:
        self.reads.set()
        assert self.may.wait(30)
        super().read(key, into)

    def write(self, key: bytes, payload: bytearray) -> list[bytes]:
        assert self.may.wait(30)
        return super().write(key, payload)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[StoreThreads, Slow]]:
    kept = Slow(tmp_path / "kv")
    tier = StoreThreads("disk", kept, [np.zeros((8, SIZE // 2), np.uint8), np.zeros((8, SIZE // 2), np.uint8)])
    yield tier, kept
    kept.may.set()
    tier.close(last=True)


def news_of(tier: StoreThreads) -> KVNews:
    found: list[KVNews] = []
    wait_until("there is news", lambda: found.extend(filter(None, [tier.finished()])) or found)
    return found[0]


def fill(tier: StoreThreads, block: int, number: int) -> None:
    both = np.frombuffer(payload(number), np.uint8).reshape(2, -1)
    for part, half in zip(tier.blocks, both, strict=True):
        part[block] = half


def test_blocks_go_out_and_come_in(slow: tuple[StoreThreads, Slow]) -> None:
    tier, kept = slow
    kept.may.set()
    fill(tier, 3, 1)
    tier.begin(KVWork(saves=((KEYS[1], 3),)))
    fill(tier, 3, 2)  # the step computes: what was to be saved was taken before
    assert news_of(tier).stored == (KEYS[1],)
    tier.begin(KVWork(loads=(KVLoad(7, (KEYS[1], KEYS[2]), (5, 6)),)))
    news = news_of(tier)
    assert [load[:2] for load in news.loaded] == [(7, 1)] and news.gone == (KEYS[2],)
    assert news.stores == {"disk": StoreNews(1, 0, 1, {"gone": 1})}
    assert b"".join(part[5].tobytes() for part in tier.blocks) == payload(1)
    assert not any(part[6].any() for part in tier.blocks)


def test_what_another_server_has_written_is_seen(slow: tuple[StoreThreads, Slow]) -> None:
    tier, kept = slow
    assert tier.stored() == b""
    tier.look()
    BlockStore.write(kept, KEYS[1], payload(1))
    BlockStore.write(kept, KEYS[2], payload(2))
    tier.look()
    assert news_of(tier).stored == (KEYS[1], KEYS[2])
    kept.remove(KEYS[1])
    tier.look()
    assert news_of(tier) == KVNews(gone=(KEYS[1],), stores={"disk": StoreNews(1)})
    tier.look()
    assert tier.finished() is None


def test_only_folders_that_changed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, yours = store(tmp_path / "kv"), store(tmp_path / "kv")
    for number in range(1, 9):
        yours.write(KEYS[number], payload(number))
    assert split(mine.keys()) == set(KEYS[1:9])
    monkeypatch.setattr(kv_store, "TICK", -1)
    assert mine.news() == (set(), set())
    read: list[str] = []
    found = kv_store._entries
    monkeypatch.setattr(kv_store, "_entries", lambda folder: (read.append(str(folder)), found(folder))[1])
    yours.write(KEYS[9], payload(9))
    yours.remove(KEYS[3])
    assert mine.news() == ({KEYS[9]}, {KEYS[3]})
    assert sorted(folder[-2:] for folder in read[1:]) == ["03", "09"]
    shutil.rmtree(tmp_path / "kv")
    assert mine.news() == (set(), set(KEYS[1:10]) - {KEYS[3]}) and mine.keys() == b""


def test_a_block_that_another_server_is_about_to_write_is_waited_for_a_moment(tmp_path: Path) -> None:
    mine, yours, news = store(tmp_path / "kv"), store(tmp_path / "kv"), threading.Condition()
    tier = StoreThreads("directory", mine, [np.zeros((8, SIZE), np.uint8)], news=news)
    rank = KVStores([tier], news)
    threading.Timer(0.1, yours.write, [KEYS[1], payload(1)]).start()
    rank.begin(KVWork(loads=(KVLoad(1, (KEYS[1],), (5,), KVOffer("", (0,), "", 0)),)))
    assert [load[:2] for load in news_of(tier).loaded] == [(1, 1)]
    rank.begin(KVWork(loads=(KVLoad(2, (KEYS[2],), (6,), KVOffer("", (0,), "", 0)),)))
    assert [load[:2] for load in news_of(tier).loaded] == [(2, 0)]
    rank.close(last=True)


def test_a_slow_disk_writes_into_no_block_of_another(slow: tuple[StoreThreads, Slow]) -> None:
    tier, kept = slow
    BlockStore.write(kept, KEYS[1], payload(1))
    tier.begin(KVWork(loads=(KVLoad(1, (KEYS[1],), (5,)),)))
    assert kept.reads.wait(30) and tier.finished() is None
    tier.begin(KVWork(dropped=(1,)))
    kept.may.set()
    tier.begin(KVWork(loads=(KVLoad(2, (KEYS[1],), (6,)),)))
    assert [load[:2] for load in news_of(tier).loaded] == [(2, 1)]
    assert not tier.blocks[0][5].any() and tier.blocks[0][6].any()


def test_what_waits_to_be_written_is_bounded(slow: tuple[StoreThreads, Slow], monkeypatch: pytest.MonkeyPatch) -> None:
    tier, kept = slow
    monkeypatch.setattr(kv_tier, "STAGED", 3 * SIZE)
    tier.begin(KVWork(saves=tuple((key, 0) for key in KEYS[:5])))
    assert news_of(tier).refused == tuple(KEYS[3:5])
    kept.may.set()
    wait_until("three are written", lambda: len(kept.keys()) == 3 * 16)


def test_a_disk_that_refuses_is_let_be_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = [100.0], []

    def refuse(self: BlockStore, key: bytes, payload: bytearray) -> list[bytes]:
        tries.append(key)
        raise StoreError("write", "Read-only file system")

    monkeypatch.setattr(BlockStore, "write", refuse)
    monkeypatch.setattr(kv_tier, "RATE", 1 << 60)
    tier = StoreThreads("disk", store(tmp_path / "kv"), [np.zeros((8, SIZE), np.uint8)], clock=lambda: now[0])
    tier.begin(KVWork(saves=((KEYS[1], 0),)))
    news = news_of(tier)
    assert news.refused == (KEYS[1],) and news.stores["disk"].errors == {"write": 1}
    assert "Read-only" in news.stores["disk"].why
    tier.begin(KVWork(saves=((KEYS[2], 0),)))
    assert news_of(tier).refused == (KEYS[2],) and tries == [KEYS[1]]
    now[0] += kv_tier.PAUSE
    assert news_of(tier).stores["disk"].why == ""
    tier.begin(KVWork(saves=((KEYS[3], 0),)))
    assert news_of(tier).refused == (KEYS[3],) and tries == [KEYS[1], KEYS[3]]
    tier.close(last=True)


# -- in memory of the node


def in_memory(number: int, *, most: int = 1 << 20, name: bytes = b"i" * 16) -> MemoryStore:
    """As a process with this number finds it: those of before have left what is in it."""
    return MemoryStore(LEFT.setdefault(number, mmap.mmap(-1, most)), name, SIZE)


LEFT: dict[int, mmap.mmap] = {}


def test_what_is_in_memory_is_there_for_the_process_after_it() -> None:
    kept, into = in_memory(1), bytearray(SIZE)
    for number in (1, 2):
        assert kept.write(KEYS[number], payload(number)) == []
    for found in (kept, in_memory(1)):
        assert set(split(found.keys())) == {KEYS[1], KEYS[2]}
        found.read(KEYS[2], memoryview(into))
        assert into == payload(2)
    found.remove(KEYS[2])
    assert in_memory(1).keys() == KEYS[1]
    with pytest.raises(StoreError, match="not kept"):
        found.read(KEYS[2], memoryview(into))
    assert in_memory(1, name=b"j" * 16).keys() == b"" == in_memory(1).keys()  # another rank's part: all begins anew


@pytest.mark.parametrize("at", [0, 10, 40, 63, SIZE])
def test_memory_that_was_scribbled_over_holds_no_block(at: int) -> None:
    kept = in_memory(2)
    kept.write(KEYS[1], payload(1))
    slot = kept._slots[KEYS[1]][0]
    part = kept._head(slot) if at < 64 else kept._payload(slot)
    part[at % SIZE % 64] ^= 1
    after, key = in_memory(2), KEYS[1]
    for key in split(after.keys()) | {KEYS[1]}:
        with pytest.raises(StoreError):
            after.read(key, memoryview(bytearray(SIZE)))
    del LEFT[2]


def test_in_memory_the_beginning_of_a_history_goes_last_and_what_was_used_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [10**18]
    monkeypatch.setattr(kv_store.time, "time_ns", lambda: now[0])
    kept = in_memory(3, most=11 * SIZE)
    gone = []
    for keys in (KEYS[:5], KEYS[5:9]):
        for key in keys:
            gone += kept.write(key, payload(1))
        now[0] += 2 * kv_store.BURST
    for key in KEYS[:5]:
        kept.read(key, memoryview(bytearray(SIZE)))
    now[0] += 2 * kv_store.BURST
    for key in KEYS[20:23]:
        gone += kept.write(key, payload(1))
    assert gone == [KEYS[8], KEYS[7], KEYS[6]]


def test_a_load_comes_from_several_stores_at_once(tmp_path: Path) -> None:
    """What one lacks, or has damaged, ends it there; what is dropped says nothing."""
    news = threading.Condition()
    blocks = [np.zeros((8, SIZE), np.uint8)]
    kept = [in_memory(4), store(tmp_path / "kv")]
    names = ("memory", "disk")
    for number in (1, 3):
        kept[0].write(KEYS[number], payload(number))
    for number in (2, 4, 5):
        kept[1].write(KEYS[number], payload(number))
    rank = KVStores([StoreThreads(n, each, blocks, news=news) for n, each in zip(names, kept, strict=True)], news)
    assert {name: len(keys) for name, keys in rank.stored().items()} == {"memory": 32, "disk": 48}

    def loaded(number: int) -> tuple[int, int]:
        rank.begin(KVWork(loads=(KVLoad(number, tuple(KEYS[1:6]), (1, 2, 3, 4, 5)),)))
        found: list[KVNews] = []
        wait_until(
            "it is there",
            lambda: found.extend(filter(None, [rank.finished(waits=True)])) or any(n.loaded for n in found),
        )
        return next(news.loaded[0][:2] for news in found if news.loaded)

    assert loaded(1) == (1, 5)
    assert all(blocks[0][number].tobytes() == payload(number) for number in range(1, 6))
    kept[0]._payload(kept[0]._slots[KEYS[3]][0])[7] ^= 1
    assert loaded(2) == (2, 2)
    rank.begin(KVWork(saves=((KEYS[9], 1),)))
    wait_until(
        "both have it",
        lambda: rank.finished(waits=True) is None and all(KEYS[9] in split(each.keys()) for each in kept),
    )
    rank.close(last=True)


def test_a_prefix_comes_back_from_memory(model: str) -> None:
    options: dict[str, Any] = {"threads": 1, "max_model_len": 1024, "max_num_batched_tokens": 128}
    with Engine(model, kv_offloading_size=0.25, kv_cache_memory="520KiB", **options) as engine:
        tokens = engine.run(ASKED)
        for number in range(3):
            engine.run(texts(200 + number, [(600, 8)]))
        settle(engine)
        before = tier_of(engine)
        assert engine.run(ASKED) == tokens
        found = tier_of(engine)
        memory = found.stores["memory"]
        assert found.hits - before.hits >= 30 * 16 and memory.loaded_bytes and not memory.errors, found


# -- at the door


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"kv_tier": ",1GiB"}, "names no folder"), ({"kv_tier": "x,much"}, "not a size"),
        ({"kv_tier": "x", "enable_prefix_caching": False}, "prefix cache"),
        ({"kv_tier": "x", "null_worker": True}, "CPU"), ({"kv_offloading_size": 1e6}, "are free here"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "prefix cache"),
        ({"kv_tier": "/proc/nothing/kv"}, "can't be made"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_at_the_door(model: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(EngineOptions(model=model, device="cpu", **given))


def test_weights_are_known_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "CHUNK", 1000)
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(payload(1))
    two.write_bytes(payload(1))
    os.utime(two, (5, 5))
    first = weights_digest([str(one)])
    assert first == weights_digest([str(two)]) != weights_digest([str(one), str(two)])
    time = one.stat().st_mtime_ns
    flip(one)
    os.utime(one, ns=(time, time))  # as large and as old as before
    assert weights_digest([str(one)]) != first


PRODUCER: dict[str, Any] = {"kv_connector": "tcp", "kv_role": "kv_producer"}
NIXL = PRODUCER | {"kv_connector": "NixlConnector"}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("{", "can't be read"), ({"kv_role": "kv_both"}, "kv_connector"), (PRODUCER | {"kv_sort": 1}, "kv_sort"),
        (PRODUCER | {"kv_connector": "fax"}, "unknown; use one of tcp, NixlConnector, directory, LMCacheConnectorV1"),
        (PRODUCER | {"kv_connector": "OffloadingConnector"}, "--kv-offloading-size"),
        (PRODUCER | {"kv_role": "both"}, "kv_producer, kv_consumer, kv_both"),
        (PRODUCER | {"kv_rank": 2, "kv_parallel_size": 2}, "no place among"),
        (PRODUCER | {"kv_ip": "0.0.0.0"}, "the address"), (PRODUCER | {"kv_ip": "localhost"}, "in digits"),
        (PRODUCER | {"kv_ip": "10.0.0.1"}, "needs a secret"), (PRODUCER | {"kv_port": 80}, "must be from 1024"),
        (PRODUCER | {"kv_buffer_size": 3}, "too few"), (PRODUCER | {"kv_buffer_device": "cuda"}, "'cpu'"),
        (PRODUCER | {"engine_id": ""}, "1 to 128"), (PRODUCER | {"kv_load_failure_policy": "fail"}, "'recompute'"),
        (PRODUCER | {"kv_connector_extra_config": {"path": "x"}}, "it has peers, lease_seconds"),
        (PRODUCER | {"kv_connector_extra_config": {"peers": ["example.org:1"]}}, "in digits"),
        (PRODUCER | {"kv_connector_extra_config": {"lease_seconds": -1}}, "more than 0"),
        (NIXL | {"kv_connector_extra_config": {"backends": []}}, "must be a list of names"),
        (NIXL | {"kv_connector_extra_config": {"size": 1}}, "it has peers, lease_seconds, backends"),
        (NIXL, "pip install nixl, or use tcp"),
        ({"kv_connector": "LMCacheConnectorV1"}, "must be the URL of a store"),
        (
            {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"remote_url": "redis://h:1"}},
            "pip install lmcache, or use directory",
        ),
        ({"kv_connector": "directory"}, "must name the folder"),
    ],
)  # fmt: skip
def test_what_a_transfer_can_not_be_is_refused_at_the_door(
    model: str, said: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PLANARIA_SECRET", "PLANARIA_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(why)):
        resolve(EngineOptions(model=model, kv_transfer_config=said, distributed_executor_backend="uni"))


def test_a_transfer_needs_what_it_stands_on(model: str, tmp_path: Path) -> None:
    for more, why in (
        ({"enable_prefix_caching": False}, "prefix cache"), ({"null_worker": True}, "CPU"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            resolve(EngineOptions(model=model, kv_transfer_config=PRODUCER, **more))
    folder = {"kv_connector": "directory", "kv_connector_extra_config": {"path": str(tmp_path / "kv")}}
    with pytest.raises(ConfigError, match="another; give one"):
        resolve(EngineOptions(model=model, kv_transfer_config=folder, kv_tier=str(tmp_path)))
    config = resolve(EngineOptions(model=model, kv_transfer_config=json.dumps(folder)))
    assert config.cache.kv_tier is not None and config.cache.kv_tier.folder == str(tmp_path / "kv")
    assert config.cache.transfer is not None and config.cache.transfer.serves and config.cache.transfer.asks
