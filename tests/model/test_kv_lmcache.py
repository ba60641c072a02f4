"""KV blocks in a store of LMCache's: what comes back, what doesn't, and what a store that is silent costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from planaria.protocol import KVLoad, KVWork
from planaria.worker import kv_lmcache
from planaria.worker.kv_lmcache import LMCacheStore
from planaria.worker.kv_store import StoreError
from planaria.worker.kv_tier import StoreThreads
from tests.fakes import stand_in
from tests.proc.servers import wait_until

SIZE = 4096
ME = b"i" * 16
KEYS = tuple(bytes([i]) * 16 for i in range(8))


@pytest.fixture(autouse=True)
def faked() -> Iterator[bool]:
    with stand_in("lmcache") as stands:
        yield stands


def store(folder: Path, *, identity: bytes = ME, scheme: str = "fs", size: int = SIZE) -> LMCacheStore:
    return LMCacheStore(f"{scheme}://here:1{folder}", identity, size)


def payload(number: int, size: int = SIZE) -> bytearray:
    return bytearray(np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes())


def read(from_: LMCacheStore, key: bytes) -> bytearray:
    into = bytearray(from_.size)
    from_.read(key, memoryview(into))
    return into


def objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_block_comes_back_to_whoever_computes_the_same(tmp_path: Path) -> None:
    one = store(tmp_path)
    for i in range(3):
        assert one.write(KEYS[i], payload(i)) == []
    other = store(tmp_path)
    assert other.keys() == b"".join(KEYS[:3])
    assert [read(other, KEYS[i]) for i in range(3)] == [payload(i) for i in range(3)]
    assert store(tmp_path, identity=b"j" * 16).keys() == b""
    for key, there in ((KEYS[3], other), (KEYS[0], store(tmp_path, identity=b"j" * 16))):
        with pytest.raises(StoreError, match="not kept") as e:
            read(there, key)
        assert e.value.kind == "gone"


@pytest.mark.parametrize("harm", ["flip", "swap", "cut"])
def test_what_was_done_to_an_object_makes_it_none_until_it_is_kept_again(tmp_path: Path, harm: str) -> None:
    one = store(tmp_path)
    one.write(KEYS[0], payload(0))
    (first,) = objects(tmp_path)
    good = first.read_bytes()
    if harm == "swap":
        one.write(KEYS[1], payload(1))
        good = next(path for path in objects(tmp_path) if path != first).read_bytes()
    bad = {"flip": good[:-9] + bytes([good[-9] ^ 1]) + good[-8:], "swap": good, "cut": good[:-5]}
    first.write_bytes(bad[harm])
    with pytest.raises(StoreError):
        read(one, KEYS[0])
    one.remove(KEYS[0])
    one.write(KEYS[0], payload(0))
    assert read(one, KEYS[0]) == payload(0)


def test_a_store_that_is_silent_costs_one_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faked: bool
) -> None:
    if not faked:
        pytest.skip("LMCache has no such store")
    monkeypatch.setattr(kv_lmcache, "PATIENCE", 0.05)
    now = [0.0]
    one = LMCacheStore("silent://here:1/x", ME, SIZE, lambda: now[0])
    for _ in range(2):
        with pytest.raises(StoreError, match=r"says nothing for 0\.05 s"):
            read(one, KEYS[0])
    monkeypatch.setattr(one, "_ask", lambda ask: pytest.fail("it is asked"))
    with pytest.raises(StoreError, match="says nothing"):
        one.write(KEYS[0], payload(0))
    assert one.keys() == b""


def test_a_store_that_nobody_is_at_is_said_and_asked_again_later(tmp_path: Path, faked: bool) -> None:
    if not faked:
        pytest.skip("LMCache has no such store")
    now = [0.0]
    one = LMCacheStore(f"broken://here:1{tmp_path}", ME, SIZE, lambda: now[0])
    with pytest.raises(StoreError, match="ConnectionRefusedError: nobody is there"):
        one.write(KEYS[0], payload(0))
    one.url = f"fs://here:1{tmp_path}"
    with pytest.raises(StoreError, match="nobody is there"):
        one.write(KEYS[0], payload(0))
    now[0] += kv_lmcache.PAUSE
    one.write(KEYS[0], payload(0))
    assert read(one, KEYS[0]) == payload(0)


def test_a_rank_keeps_blocks_there_and_gets_them_back(tmp_path: Path) -> None:
    blocks = [np.zeros((8, SIZE // 2), np.uint8), np.zeros((8, SIZE // 2), np.uint8)]
    rank = StoreThreads("LMCacheConnectorV1", store(tmp_path), blocks, news=threading.Condition())
    for part, half in zip(blocks, np.frombuffer(payload(1), np.uint8).reshape(2, -1), strict=True):
        part[2] = half
    rank.begin(KVWork(saves=((KEYS[1], 2),)))
    wait_until("it is kept", lambda: rank.has(KEYS[1]))
    rank.begin(KVWork(loads=(KVLoad(5, (KEYS[1],), (6,)),)))
    wait_until("it is there", lambda: (blocks[0][6] == blocks[0][2]).all() and (blocks[1][6] == blocks[1][2]).all())
    wait_until("it is said", lambda: any(news.loaded for news in [rank.finished()] if news is not None))
    rank.close(last=True)
