"""Blocks of KV that ranks of one layout have, in another's: every byte is where it belongs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
from planaria.types import KVOffer
from planaria.worker.kv_peers import KVPeers
from planaria.worker.kv_recut import Recut
from tests.proc.servers import wait_until
from tests.pure.test_deal import SMOLLM2, model, models

COUNT, HEAD = 12, 96  # blocks; bytes of a head in one
KEYS = tuple(bytes([i]) * 16 for i in range(COUNT))
NINE = model(9, 9, 64, 576, 1536, 49152, 5)


@given(models(), *[st.integers(1, 5)] * 4)
def test_a_part_comes_whole_and_nothing_twice(config: ModelConfig, tp: int, pp: int, tp2: int, pp2: int) -> None:
    tp, tp2 = min(tp, config.num_heads), min(tp2, config.num_heads)
    pp, pp2 = min(pp, config.num_layers), min(pp2, config.num_layers)
    held = kv_parts(config, tp, pp)
    for wanted in kv_parts(config, tp2, pp2):
        found = [
            (layer, head)
            for rank, part in pieces(wanted, held)
            for layer in part.layers for head in part.heads
            if layer in held[rank].layers and head in held[rank].heads
        ]  # fmt: skip
        assert sorted(found) == [(layer, head) for layer in wanted.layers for head in wanted.heads]


def test_what_nobody_has_is_said() -> None:
    with pytest.raises(ValueError, match="no rank has KV head 2 of layer 0"):
        pieces(KVRect(range(2), range(3)), [KVRect(range(2), range(2))])


def whole(config: ModelConfig) -> npt.NDArray[np.uint8]:
    """[layers, blocks, heads, bytes]"""
    shape = config.num_layers, COUNT, config.num_kv_heads, HEAD
    return np.random.default_rng(1).integers(1, 256, shape, np.uint8)


def identity(part: KVRect) -> bytes:
    return hashlib.sha256(str(part).encode()).digest()[:16]


def layers_of(config: ModelConfig, pp: int) -> tuple[int, ...]:
    return tuple(len(part.layers) for part in kv_parts(config, 1, pp))


@contextmanager
def ranks(
    config: ModelConfig, tp: int, pp: int, port: int, kv: npt.NDArray[np.uint8] | None = None
) -> Iterator[list[KVPeers]]:
    """Of an engine with this KV, to offer, or with nothing but zeros."""
    found, parts = [], kv_parts(config, tp, pp)
    said = TransferConfig("tcp", kv is not None, kv is None, "e", "127.0.0.1", port, buffer=1 << 24, lease=30.0)
    for rank, part in enumerate(parts):
        blocks = [np.zeros((COUNT, len(part.heads) * HEAD), np.uint8) for _ in part.layers]
        for cache, layer in zip(blocks, part.layers, strict=True) if kv is not None else ():
            cache[:] = kv[layer][:, part.heads.start : part.heads.stop].reshape(COUNT, -1)
        recut, size = Recut(config, parts, rank, blocks, identity), len(part) * HEAD
        news = threading.Condition()
        found.append(KVPeers(said, b"s" * 32, rank, rank, identity(part), blocks, size, recut, None, news))
    with ExitStack() as stack:
        for each in found:
            assert not each.why
            stack.callback(each.close)
        yield found


def fetch(taker: KVPeers, offer: KVOffer) -> tuple[int, str]:
    taker.begin(KVWork(loads=(KVLoad(1, KEYS, tuple(range(COUNT)), offer),)))
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


@pytest.mark.parametrize(
    "config, of, to",
    [
        (SMOLLM2, (2, 1), (1, 1)), (SMOLLM2, (1, 1), (2, 1)),  # 2 heads and 1 of 3
        (SMOLLM2, (2, 1), (3, 1)), (SMOLLM2, (4, 1), (2, 1)),  # two ranks have the same head
        (NINE, (4, 1), (3, 1)), (NINE, (1, 2), (1, 3)), (NINE, (2, 2), (3, 1)),  # ends of heads and stages that differ
        (NINE, (2, 1), (2, 1)),
    ],
)  # fmt: skip
def test_every_byte_is_where_it_belongs(
    config: ModelConfig, of: tuple[int, int], to: tuple[int, int], port: int
) -> None:
    kv = whole(config)
    with ranks(config, *of, port, kv) as owners, ranks(config, *to, 0) as takers:
        for owner in owners:
            owner.begin(KVWork(offers=tuple(("a", key, i) for i, key in enumerate(KEYS))))
        offer = KVOffer("a", tuple(range(COUNT)), "127.0.0.1", port, of[0], layers_of(config, of[1]))
        for taker, part in zip(takers, kv_parts(config, *to), strict=True):
            assert fetch(taker, offer) == (COUNT, "")
            for cache, layer in zip(taker.blocks, part.layers, strict=True):
                assert (cache == kv[layer][:, part.heads.start : part.heads.stop].reshape(COUNT, -1)).all()
        asked = {piece.rank for part in kv_parts(config, *to) for piece in pieces(part, kv_parts(config, *of))}
        for rank in asked:  # when the last has what it needs, and not before
            server = owners[rank].server
            assert server is not None
            wait_until("nothing is held", lambda server=server: len(server.offered) == 0)


def test_what_one_of_several_ranks_lacks_does_not_count(port: int) -> None:
    kv = whole(SMOLLM2)
    with ranks(SMOLLM2, 2, 1, port, kv) as owners, ranks(SMOLLM2, 1, 1, 0) as (taker,):
        for owner, count in zip(owners, (COUNT, 5), strict=True):
            owner.begin(KVWork(offers=tuple(("a", key, i) for i, key in enumerate(KEYS[:count]))))
        heard: list[int] = []
        taker.loaded = heard.extend
        assert fetch(taker, KVOffer("a", tuple(range(COUNT)), "127.0.0.1", port, 2, (30,))) == (5, "gone")
        assert heard == [0, 1, 2, 3, 4], "others aren't whole"


@pytest.mark.parametrize("tp, layers", [(10, (30,)), (2, (29,)), (2, (0, 30)), (1, ())])
def test_a_layout_that_can_not_be_is_refused(tp: int, layers: tuple[int, ...]) -> None:
    with ranks(SMOLLM2, 1, 1, 0) as (taker,):
        assert fetch(taker, KVOffer("a", (0,), "127.0.0.1", 1, tp, layers)) == (0, "layout")
