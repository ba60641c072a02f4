"""Blocks of KV that ranks of one layout have, in another's: every number is where it belongs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.options import TransferConfig
from planaria.models.config import ModelConfig
from planaria.models.deal import kv_parts
from planaria.protocol import KVLoad, KVNews, KVWork
from planaria.topology.kv_parts import KVRect, pieces
from planaria.topology.stripes import Context, Stripes
from planaria.types import KVLayout, KVOffer
from planaria.worker import kv_store_loads
from planaria.worker.kv_peers import KVPeers
from planaria.worker.kv_recut import Recut
from planaria.worker.kv_store import BlockStore
from planaria.worker.kv_store_loads import StoreLoads
from planaria.worker.kv_tier import copy_out, own_load
from tests.proc.servers import wait_until
from tests.pure.test_deal import SMOLLM2, model, models

TOKENS, NUMBERS = 12 * 48, 3  # of the history; of a head's token in one layer, of two bytes each
NINE = model(9, 9, 64, 576, 1536, 49152, 5)


def layout(
    config: ModelConfig, tp: int, pp: int = 1, dcp: int = 1, pcp: int = 1, interleave: int = 1, block_size: int = 48
) -> KVLayout:
    layers = tuple(len(part.layers) for part in kv_parts(config, 1, pp))
    return KVLayout(tp, layers, block_size, dcp, pcp, interleave)


def parts_of(config: ModelConfig, of: KVLayout) -> list[KVRect]:
    return kv_parts(config, of.tp, len(of.layers), of.layers, Context(of.dcp, of.pcp, of.interleave))


@st.composite
def layouts(draw: st.DrawFn, config: ModelConfig) -> KVLayout:
    tp, pp = (draw(st.integers(1, min(5, most))) for most in (config.num_heads, config.num_layers))
    dcp = draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0]))
    return layout(config, tp, pp, dcp, draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 8])))


@given(st.data(), models())
def test_a_part_comes_whole_and_nothing_twice(data: st.DataObject, config: ModelConfig) -> None:
    of, to = (data.draw(layouts(config)) for _ in range(2))
    held, positions = parts_of(config, of), range(60)
    for wanted in parts_of(config, to):
        found = [
            (layer, head, at)
            for rank, part in pieces(wanted, held)
            for layer in part.layers for head in part.heads
            if layer in held[rank].layers and head in held[rank].heads
            for at in positions if wanted.stripes.here(at) and held[rank].stripes.here(at)
        ]  # fmt: skip
        every = [(layer, head, at) for layer in wanted.layers for head in wanted.heads
                 for at in positions if wanted.stripes.here(at)]  # fmt: skip
        assert sorted(found) == every


@given(*[st.builds(lambda size, rank, turn: Stripes(size, rank % size, turn), *[st.integers(1, 6)] * 3)] * 2)
def test_ranks_meet_where_they_have_a_token_in_common(one: Stripes, other: Stripes) -> None:
    assert one.meets(other) == any(one.here(at) and other.here(at) for at in range(36 * 36))


def test_what_nobody_has_is_said() -> None:
    with pytest.raises(ValueError, match="no rank has KV head 2 of layer 0"):
        pieces(KVRect(range(2), range(3)), [KVRect(range(2), range(2))])


def whole(config: ModelConfig) -> npt.NDArray[np.uint16]:
    """[layers, heads, tokens, numbers]"""
    shape = config.num_layers, config.num_kv_heads, TOKENS, NUMBERS
    return np.random.default_rng(1).integers(1, 1 << 16, shape, np.uint16)


def items(heads: int, tokens: int) -> list[npt.NDArray[np.intp]]:
    """Two caches a layer: heads one after the other, and anything."""
    every = np.arange(heads * tokens * NUMBERS)
    shuffled = np.random.default_rng(heads * tokens).permutation(every)
    return [each.reshape(heads, tokens, NUMBERS) for each in (every, shuffled)]


def identity(part: KVRect, of: KVLayout) -> bytes:
    return hashlib.sha256(f"{part} {of.block_size}".encode()).digest()[:16]


def caches(part: KVRect, block_size: int, kv: npt.NDArray[np.uint16]) -> list[npt.NDArray[np.uint8]]:
    """Of a rank with this part, full of this KV."""
    tokens, found = block_size // part.stripes.size, []
    positions = part.stripes.position(np.arange(TOKENS // part.stripes.size)).reshape(-1, tokens)
    for layer in part.layers:
        for places in items(len(part.heads), tokens):
            cache = np.zeros((len(positions), places.size), np.uint16)
            for block, at in enumerate(positions):
                cache[block, places.ravel()] = kv[layer, part.heads.start : part.heads.stop, at].swapaxes(0, 1).ravel()
            found.append(cache.view(np.uint8))
    return found


@contextmanager
def ranks(
    config: ModelConfig, of: KVLayout, port: int, kv: npt.NDArray[np.uint16] | None = None
) -> Iterator[list[KVPeers]]:
    """Of an engine with this KV, to offer, or with nothing but zeros."""
    found, parts, block_size = [], parts_of(config, of), of.block_size
    said = TransferConfig("tcp", kv is not None, kv is None, "e", "127.0.0.1", port, buffer=1 << 24, lease=30.0)
    for rank, part in enumerate(parts):
        blocks = caches(part, block_size, whole(config) * 0 if kv is None else kv)
        recut = Recut(config, parts, rank, blocks, block_size, items, identity)
        size, news = sum(cache.shape[1] for cache in blocks), threading.Condition()
        found.append(KVPeers(said, b"s" * 32, rank, rank, identity(part, of), blocks, size, recut, None, news))
    with ExitStack() as stack:
        for each in found:
            assert not each.why
            stack.callback(each.close)
        yield found


def keys_of(of: KVLayout) -> tuple[bytes, ...]:
    return tuple(bytes([i]) * 16 for i in range(TOKENS // of.block_size))


def offer(of: KVLayout, port: int) -> KVOffer:
    return KVOffer("a", tuple(range(TOKENS // of.block_size)), "127.0.0.1", port, of)


def load(of: KVOffer, own: KVLayout, first: int = 0) -> KVLoad:
    """Of all blocks from the own one `first` on, into those with the same numbers."""
    assert of.layout is not None
    its = first * own.block_size // of.layout.block_size
    said = msgspec.structs.replace(of, blocks=of.blocks[its:])
    blocks = tuple(range(first, TOKENS // own.block_size))
    return KVLoad(1, keys_of(of.layout)[its:], blocks, said, first)


def fetch(taker: KVPeers | StoreLoads, wanted: KVLoad) -> tuple[int, str]:
    taker.begin(KVWork(loads=(wanted,)))
    found: list[KVNews] = []
    wait_until(
        "it ends", lambda: found.extend(filter(None, [taker.finished(waits=True)])) or any(n.loaded for n in found)
    )
    news = next(news for news in found if news.loaded)
    return news.loaded[0][1], news.failed.get(1, "")


@pytest.fixture
def port() -> int:
    """The first of several that follow one another."""
    for first in range(20000, 60000, 16):
        with zmq.Context() as context, ExitStack() as stack:
            try:
                for number in range(8):
                    stack.enter_context(context.socket(zmq.ROUTER)).bind(f"tcp://127.0.0.1:{first + number}")
            except zmq.ZMQError:
                continue
            return first
    raise AssertionError("no port")


LAYOUTS: list[Any] = [
    (SMOLLM2, (2,), (1,)), (SMOLLM2, (1,), (2,)),  # 2 heads and 1 of 3
    (SMOLLM2, (2,), (3,)), (SMOLLM2, (4,), (2,)),  # two ranks have the same head
    (NINE, (4,), (3,)), (NINE, (1, 2), (1, 3)), (NINE, (2, 2), (3,)),  # ends of heads and stages that differ
    (NINE, (2,), (2,)),
    # dcp, pcp, interleave, tokens of a block
    (SMOLLM2, (1,), (1, 1, 1, 2)), (SMOLLM2, (1, 1, 1, 2), (1,)), (SMOLLM2, (1, 1, 1, 2), (1, 1, 1, 2)),
    (SMOLLM2, (2, 1, 2), (1, 1, 1, 2)), (NINE, (2, 1, 2, 2, 4), (1, 2, 1, 3, 2)),
    (SMOLLM2, (1, 1, 1, 2, 1, 32), (1, 1, 1, 1, 1, 16)), (SMOLLM2, (1, 1, 1, 1, 1, 16), (1, 1, 1, 2, 1, 32)),
    (NINE, (2, 1, 2, 1, 8, 32), (1, 1, 1, 3, 1, 48)), (NINE, (1, 1, 1, 3, 16, 48), (2, 1, 1, 2, 8, 32)),
]  # fmt: skip


@pytest.mark.parametrize("config, of, to", LAYOUTS)
@pytest.mark.parametrize("first", [0, 3])
def test_every_number_is_where_it_belongs(
    config: ModelConfig, of: tuple[int, ...], to: tuple[int, ...], first: int, port: int
) -> None:
    kv, theirs, own = whole(config), layout(config, *of), layout(config, *to)
    with ranks(config, theirs, port, kv) as owners, ranks(config, own, 0) as takers:
        for owner in owners:
            owner.begin(KVWork(offers=tuple(("a", key, i) for i, key in enumerate(keys_of(theirs)))))
        for taker, part in zip(takers, parts_of(config, own), strict=True):
            wanted, heard = load(offer(theirs, port), own, first), list[int]()
            taker.loads.loaded = heard.extend
            assert fetch(taker, wanted) == (len(wanted.blocks), "")
            assert heard == list(wanted.blocks)
            for cache, expected in zip(taker.blocks, caches(part, own.block_size, kv), strict=True):
                assert (cache[first:] == expected[first:]).all() and not cache[:first].any()
        held = parts_of(config, theirs)
        asked = {piece.rank for part in parts_of(config, own) for piece in pieces(part, held)}
        for rank in asked:  # when the last has what it needs, and not before
            server = owners[rank].server
            assert server is not None
            wait_until("nothing is held", lambda server=server: len(server.offered) == 0)


def stored(folder: Path, config: ModelConfig, of: KVLayout, kv: npt.NDArray[np.uint16]) -> list[BlockStore]:
    """What each rank has written of it."""
    found = []
    for part in parts_of(config, of):
        blocks = caches(part, of.block_size, kv)
        size = sum(cache.shape[1] for cache in blocks)
        store = BlockStore(str(folder), identity(part, of), size, 1 << 30)
        for number, key in enumerate(keys_of(of)):
            store.write(key, copy_out(blocks, number, size))
        found.append(store)
    return found


@contextmanager
def readers(folder: Path, config: ModelConfig, own: KVLayout) -> Iterator[list[StoreLoads]]:
    with ranks(config, own, 0) as takers, ExitStack() as stack:
        found = [
            StoreLoads(taker.loads, own, lambda name, size: BlockStore(str(folder), name, size, 1 << 30))
            for taker in takers
        ]
        for each in found:
            stack.callback(each.close)
        yield found


@pytest.mark.parametrize("config, of, to", LAYOUTS)
def test_ranks_of_other_layouts_write_into_a_store_what_is_read(
    config: ModelConfig, of: tuple[int, ...], to: tuple[int, ...], tmp_path: Path
) -> None:
    kv, theirs, own, first = whole(config), layout(config, *of), layout(config, *to), 3
    stored(tmp_path, config, theirs, kv)
    with readers(tmp_path, config, own) as takers:
        for taker, part in zip(takers, parts_of(config, own), strict=True):
            wanted, heard = load(msgspec.structs.replace(offer(theirs, 0), host=""), own, first), list[int]()
            taker.loads.loaded = heard.extend
            assert own_load(wanted, own) == (theirs == own)
            if theirs == own:
                continue
            assert fetch(taker, wanted) == (len(wanted.blocks), "") and heard == list(wanted.blocks)
            for cache, expected in zip(taker.loads.blocks, caches(part, own.block_size, kv), strict=True):
                assert (cache[first:] == expected[first:]).all() and not cache[:first].any()


@pytest.mark.parametrize("how", ["gone", "damaged", "dropped", "layout"])
def test_what_a_store_has_not_of_one_of_several_ranks_does_not_count(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store_loads, "COMES", 0.05 if how == "gone" else 60)
    theirs, own = layout(SMOLLM2, 1, 1, 1, 2, 1, 32), layout(SMOLLM2, 1, 1, 1, 1, 1, 16)
    stores = stored(tmp_path, SMOLLM2, theirs, whole(SMOLLM2))
    path = stores[1]._path(keys_of(theirs)[5])
    wanted = load(msgspec.structs.replace(offer(theirs, 0), host=""), own)
    with readers(tmp_path, SMOLLM2, own) as (taker,):
        match how:
            case "gone" | "dropped":
                path.unlink()
            case "damaged":
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            case _:
                assert fetch(taker, msgspec.structs.replace(wanted, lease=impossible(wanted))) == (0, "layout")
                return
        if how != "dropped":
            assert fetch(taker, wanted) == (10, how) and not path.exists()
            return
        taker.begin(KVWork(loads=(wanted,)))
        wait_until("some are there", lambda: taker.loads.num_loaded == 10)
        taker.begin(KVWork(dropped=(1,)))
        before = [cache.copy() for cache in taker.loads.blocks]
        stores[1].write(keys_of(theirs)[5], bytearray(stores[1].size))
        taker.begin(KVWork(loads=(msgspec.structs.replace(wanted, number=2, lease=impossible(wanted)),)))
        wait_until("it is done with it", lambda: taker.finished(waits=True) is not None)
        assert all((one == two).all() for one, two in zip(before, taker.loads.blocks, strict=True))


def impossible(of: KVLoad) -> KVOffer:
    """An offer of a layout that nobody can have: it ends at once."""
    assert isinstance(of.lease, KVOffer) and of.lease.layout is not None
    return msgspec.structs.replace(of.lease, layout=msgspec.structs.replace(of.lease.layout, layers=(29,)))


@pytest.mark.parametrize(
    "of, to, counts, come",
    [
        ((2,), (1,), (12, 5), 5),
        ((1, 1, 1, 2, 1, 32), (1, 1, 1, 1, 1, 16), (18, 5), 10),
        ((1, 1, 1, 2, 1, 32), (1, 1, 1, 1, 1, 48), (18, 5), 3),  # 160 tokens
    ],
)
def test_what_one_of_several_ranks_lacks_does_not_count(
    of: tuple[int, ...], to: tuple[int, ...], counts: tuple[int, ...], come: int, port: int
) -> None:
    theirs, own = layout(SMOLLM2, *of), layout(SMOLLM2, *to)
    with ranks(SMOLLM2, theirs, port, whole(SMOLLM2)) as owners, ranks(SMOLLM2, own, 0) as (taker,):
        for owner, count in zip(owners, counts, strict=True):
            owner.begin(KVWork(offers=tuple(("a", key, i) for i, key in enumerate(keys_of(theirs)[:count]))))
        heard: list[int] = []
        taker.loads.loaded = heard.extend
        assert fetch(taker, load(offer(theirs, port), own)) == (come, "gone")
        assert heard == [*range(come)], "others aren't whole"


@pytest.mark.parametrize(
    "wrong",
    [
        KVLayout(10, (30,), 48), KVLayout(2, (29,), 48), KVLayout(2, (0, 30), 48), KVLayout(1, (), 48),
        KVLayout(2, (30,), 48, 2, 1, 5), KVLayout(3, (30,), 48, 2), KVLayout(1, (30,), 48, 1, 5),
        KVLayout(1, (30,), 1 << 16, 1, 1 << 9), KVLayout(1, (30,), 1 << 16), KVLayout(9, (1,) * 30, 48),
        KVLayout(2, (30,), 16, 1, 1 << 14, 1 << 14),
    ],
)  # fmt: skip
def test_a_layout_that_can_not_be_is_refused(wrong: KVLayout) -> None:
    with ranks(SMOLLM2, layout(SMOLLM2, 1), 0) as (taker,):
        said = KVOffer("a", (0,), "127.0.0.1", 1, wrong)
        assert fetch(taker, KVLoad(1, (b"0" * 16,), (0,), said)) == (0, "layout")
