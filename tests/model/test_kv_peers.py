"""KV blocks between ranks of different servers: what is offered, to whom, for how long; and what a peer that lies, is
of another kind, is slow or says nothing can do to who asks it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from planaria.config.options import TransferConfig
from planaria.executor.link.keys import Keys, guard, introduce
from planaria.protocol import KVLoad, KVNews, KVWork
from planaria.types import KVOffer
from planaria.worker import kv_nixl, kv_peers
from planaria.worker.kv_offers import MOST_WAIT, PURPOSE, AskBlocks, EndLease, Offered, SentBlock
from planaria.worker.kv_peers import KVPeers
from planaria.worker.kv_store import head_of
from tests.fakes import stand_in
from tests.proc.servers import wait_until

SIZE = 4096
SECRET = b"s" * 32
ME = b"i" * 16
KEYS = tuple(bytes([i]) * 16 for i in range(40))


def payload(number: int) -> bytearray:
    return bytearray(np.random.default_rng(number).integers(0, 256, SIZE, np.uint8).tobytes())


def peers(*, serves: bool = False, port: int = 0, secret: bytes = SECRET, identity: bytes = ME, **more: Any) -> KVPeers:
    backends = tuple(more.get("backends", ()))
    config = TransferConfig(
        "NixlConnector" if backends else "tcp", serves, not serves, "e", "127.0.0.1", port,
        buffer=more.get("buffer", 1 << 20), lease=more.get("lease", 30.0), backends=backends,
    )  # fmt: skip
    blocks = [np.zeros((40, SIZE // 2), np.uint8), np.zeros((40, SIZE // 2), np.uint8)]
    return KVPeers(config, secret, 0, 0, identity, blocks, SIZE, None, None, threading.Condition())


def fill(rank: KVPeers, block: int, number: int) -> None:
    for part, half in zip(rank.blocks, np.frombuffer(payload(number), np.uint8).reshape(2, -1), strict=True):
        part[block] = half


def holds(rank: KVPeers, block: int, number: int) -> bool:
    return b"".join(part[block].tobytes() for part in rank.blocks) == payload(number)


def offer(port: int, count: int, lease: str = "a") -> KVOffer:
    return KVOffer(lease, tuple(range(count)), "127.0.0.1", port)


def fetched(
    rank: KVPeers, number: int, of: KVOffer, keys: tuple[bytes, ...], wait: float = MOST_WAIT
) -> tuple[int, str]:
    """How many have come, and why no more."""
    rank.begin(KVWork(loads=(KVLoad(number, keys, tuple(range(len(keys))), of, wait=wait),)))
    found: list[KVNews] = []
    wait_until(
        "it has ended", lambda: found.extend(filter(None, [rank.finished(waits=True)])) or any(n.loaded for n in found)
    )
    news = next(news for news in found if news.loaded)
    return news.loaded[0][1], news.failed.get(number, "")


@pytest.fixture
def port() -> int:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as found:
        return found.bind_to_random_port("tcp://127.0.0.1")


@pytest.fixture
def both(port: int) -> Iterator[tuple[KVPeers, KVPeers]]:
    one, other = peers(serves=True, port=port), peers()
    assert not one.why
    yield one, other
    for each in (one, other):
        each.close()


def test_blocks_go_from_one_server_to_another(both: tuple[KVPeers, KVPeers], port: int) -> None:
    one, other = both
    for i in range(30):
        fill(one, i, i)
    one.begin(KVWork(offers=tuple(("a", KEYS[i], i) for i in range(30))))
    for i in range(30):
        fill(one, i, 99)  # the step computes, and they are others'
    assert fetched(other, 1, offer(port, 30), KEYS[:30]) == (30, "")
    assert all(holds(other, i, i) for i in range(30))
    assert one.server is not None
    offered = one.server.offered
    wait_until("nothing is held", lambda: len(offered) == 0)
    news = one.finished(waits=False)
    assert news is not None and news.stores["tcp"].saved == 30


def test_who_comes_too_early_waits_a_moment(both: tuple[KVPeers, KVPeers], port: int) -> None:
    one, other = both
    fill(one, 1, 1)
    threading.Timer(0.1, one.begin, [KVWork(offers=(("a", KEYS[1], 1),))]).start()
    assert fetched(other, 1, offer(port, 1), KEYS[1:2]) == (1, "")


def test_nobody_waits_longer_for_a_block_than_it_is_waited_for(both: tuple[KVPeers, KVPeers], port: int) -> None:
    one, other = both
    assert one.server is not None
    one.server.offered.clock = iter(itertools.count(0.0, 1e-9)).__next__  # a moment is a billion looks
    assert fetched(other, 1, offer(port, 1), KEYS[1:2], wait=0.0) == (0, "gone")


def test_a_block_of_another_lease_or_key_is_not_given(both: tuple[KVPeers, KVPeers], port: int) -> None:
    one, other = both
    one.begin(KVWork(offers=(("a", KEYS[1], 1), ("b", KEYS[1], 1), ("b", KEYS[2], 2))))
    assert fetched(other, 1, offer(port, 2, "a"), KEYS[1:3]) == (1, "gone")
    assert fetched(other, 2, offer(port, 1, "c"), KEYS[1:2]) == (0, "gone")
    assert fetched(other, 3, offer(port, 2, "b"), KEYS[1:3]) == (2, "")


def test_a_server_of_another_kind_gives_nothing(port: int) -> None:
    one, other, stranger = peers(serves=True, port=port), peers(identity=b"j" * 16), peers(secret=b"t" * 32)
    one.begin(KVWork(offers=(("a", KEYS[1], 1),)))
    assert fetched(other, 1, offer(port, 1), KEYS[1:2]) == (0, "layout")
    assert fetched(stranger, 1, offer(port, 1), KEYS[1:2]) == (0, "silent")
    for each in (one, other, stranger):
        each.close()


def test_two_can_not_listen_at_one_port_and_say_so(both: tuple[KVPeers, KVPeers], port: int) -> None:
    second = peers(serves=True, port=port)
    news = second.finished(waits=False)
    assert news is not None and "can't listen" in news.stores["tcp"].why
    second.close()


def test_what_is_offered_is_bounded_in_bytes_and_time() -> None:
    now = [0.0]
    offered = Offered(ME, 3 * SIZE, 30.0, lambda: now[0])
    assert [offered.put("a", key, payload(1)) for key in KEYS[:4]] == [True, True, True, False]
    assert offered.share("b", KEYS[0]) and not offered.share("b", KEYS[3])
    now[0] = 20.0
    offered.put("b", KEYS[0], payload(1))
    now[0] = 31.0
    assert offered.get("a", KEYS[1]) is None and offered.get("b", KEYS[0]) is not None  # also before it is tidied
    assert offered.expire() == 1 and len(offered) == 1 and offered.put("c", KEYS[3], payload(1))
    offered.release("b")
    offered.release("never")
    assert len(offered) == 1


class Liar:
    """In the place of a server: `say` is what it answers to an AskBlocks, in frames."""

    def __init__(self, say: Callable[[AskBlocks], Sent]) -> None:
        self.say, self.context = say, zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        guard(self.context, self.socket, Keys.derive(SECRET, 1, PURPOSE))
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                route, data = self.socket.recv_multipart()
                said = msgspec.msgpack.decode(data, type=AskBlocks | EndLease)
                for part, bytes_ in self.say(said) if isinstance(said, AskBlocks) else ():
                    self.socket.send_multipart([route, msgspec.msgpack.encode(part), bytes_])
        except zmq.ContextTerminated:
            pass
        finally:
            self.socket.close(0)  # else nothing ends its context

    def close(self) -> None:
        self.context.term()
        self.thread.join(10)


Sent = list[tuple[SentBlock, bytes]]
Harm = Callable[[Sent, AskBlocks], Sent]


def honest(ask: AskBlocks) -> Sent:
    sent = []
    for i, key in enumerate(ask.keys):
        number = KEYS.index(key)
        sent.append((SentBlock(ask.number, ask.first + i, head_of(ME, key, payload(number))), bytes(payload(number))))
    return sent


def lies(
    harm: Harm,
) -> Callable[[AskBlocks], Any]:
    return lambda ask: harm(honest(ask), ask)


def changed(place: int, **more: Any) -> Harm:
    def harm(sent: Sent, ask: AskBlocks) -> Sent:
        part, data = sent[place]
        data = more.get("data", lambda data: data)(data)
        sent[place] = msgspec.structs.replace(part, **{k: v for k, v in more.items() if k != "data"}), data
        return sent

    return harm


LIES: dict[str, tuple[Harm, int, str]] = {
    "flipped": (changed(2, data=lambda data: bytes([data[0] ^ 1]) + data[1:]), 2, "damaged"),
    "cut": (changed(2, data=lambda data: data[:-1]), 2, "damaged"),
    "lengthened": (changed(2, data=lambda data: data + b"x"), 2, "damaged"),
    "empty": (changed(2, data=lambda data: b""), 2, "damaged"),
    "of another block": (lambda sent, ask: [*sent[:2], (sent[2][0], sent[3][1]), *sent[3:]], 2, "damaged"),
    "another block under its own head": (
        changed(2, head=head_of(ME, KEYS[9], payload(9)), data=lambda data: bytes(payload(9))), 2, "damaged",
    ),
    "of another identity": (changed(2, head=head_of(b"j" * 16, KEYS[2], payload(2))), 2, "damaged"),
    "refused": (changed(2, why="because " * 100), 2, ("because " * 100)[:32]),
    "doubled": (lambda sent, ask: [each for each in sent for _ in range(2)], 5, ""),
    "of another load, too": (
        lambda sent, ask: [*((SentBlock(7, i, part.head), b"x") for i, (part, _) in enumerate(sent)), *sent], 5, "",
    ),
    "out of order": (lambda sent, ask: [sent[0], *sent[:0:-1]], 2, "silent"),
    "half of them": (lambda sent, ask: sent[:2], 2, "silent"),
    "nothing": (lambda sent, ask: [], 0, "silent"),
    "beyond the last": (lambda sent, ask: [*sent, (SentBlock(ask.number, 99, b"h"), b"x")], 5, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_what_a_peer_sends_counts_only_if_it_is_what_was_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "SILENCE", 0.3)
    harm, count, why = LIES[name]
    liar, rank = Liar(lies(harm)), peers()
    assert fetched(rank, 1, offer(liar.port, 5), KEYS[:5]) == (count, why)
    assert all(holds(rank, i, i) for i in range(count))
    assert not any(part[count:].any() for part in rank.blocks)
    rank.close()
    liar.close()


def test_bytes_that_are_no_message_end_the_load() -> None:
    liar, rank = Liar(honest), peers()

    def say(ask: AskBlocks) -> list[Any]:
        return [(b"\xc1 no message", b"")]

    liar.say = say
    assert fetched(rank, 1, offer(liar.port, 2), KEYS[:2]) == (0, "damaged")
    rank.close()
    liar.close()


def test_who_is_silent_is_let_be_and_nothing_late_is_written() -> None:
    asked, rank = [], peers()
    may = threading.Event()

    def say(ask: AskBlocks) -> Sent:
        asked.append(ask)
        may.wait(30)
        return honest(ask)

    liar = Liar(say)
    rank.begin(KVWork(loads=(KVLoad(1, KEYS[1:3], (1, 2), offer(liar.port, 2)),)))
    wait_until("it is asked", lambda: asked)
    rank.begin(KVWork(dropped=(1,)))
    assert fetched(rank, 2, offer(liar.port, 2), KEYS[3:5]) == (0, "silent") and len(asked) == 1
    may.set()
    numbers = itertools.count(3)  # it was late, and is asked again as soon as it says something
    wait_until("it is asked again", lambda: fetched(rank, next(numbers), offer(liar.port, 1), KEYS[3:4]) == (1, ""))
    assert holds(rank, 0, 3) and not any(part[1:].any() for part in rank.blocks)
    assert fetched(rank, next(numbers), offer(liar.port, 1), KEYS[4:5]) == (1, "")
    liar.close()
    rank.close()


def test_who_is_late_each_time_is_let_be() -> None:
    asked, may, numbers, rank = list[AskBlocks](), threading.Semaphore(0), itertools.count(1), peers()

    def say(ask: AskBlocks) -> Sent:
        asked.append(ask)
        may.acquire(timeout=30)
        return honest(ask)

    liar = Liar(say)

    def asks(times: int) -> bool:
        """A load in vain: is it what this peer is asked for now?"""
        number = next(numbers)
        rank.begin(KVWork(loads=(KVLoad(number, KEYS[1:3], (1, 2), offer(liar.port, 2)),)))
        wait_until("it is asked, or not", lambda: len(asked) == times or rank.finished(waits=True))
        rank.begin(KVWork(dropped=(number,)))
        return len(asked) == times

    for times in (1, 2):
        wait_until("it is asked", lambda times=times: asks(times))  # type: ignore[misc]
        may.release()
    for _ in range(20):
        assert fetched(rank, next(numbers), offer(liar.port, 2), KEYS[3:5]) == (0, "silent") and len(asked) == 2
    liar.close()
    rank.close()


def test_who_was_given_no_time_to_answer_is_asked_again() -> None:
    waits, rank = list[float](), peers()

    def say(ask: AskBlocks) -> Sent:
        waits.append(ask.wait)
        return honest(ask) if ask.wait == MOST_WAIT else []

    liar = Liar(say)
    for number in (1, 2, 3):
        rank.begin(KVWork(loads=(KVLoad(number, KEYS[1:3], (1, 2), offer(liar.port, 2), wait=0.4),)))
        wait_until("it is asked", lambda number=number: len(waits) == number)  # type: ignore[misc]
        rank.begin(KVWork(dropped=(number,)))
    assert fetched(rank, 4, offer(liar.port, 2), KEYS[3:5], wait=60.0) == (2, "") and waits == [0.4] * 3 + [MOST_WAIT]
    liar.close()
    rank.close()


def test_who_was_silent_is_asked_again_however_much_is_to_be_fetched_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked, rank = [0.0], list[AskBlocks](), peers()
    monkeypatch.setattr(kv_peers, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def say(ask: AskBlocks) -> Sent:
        asked.append(ask)
        return honest(ask) if len(asked) > 1 else []

    liar = Liar(say)
    rank.begin(KVWork(loads=(KVLoad(1, KEYS[1:3], (1, 2), offer(liar.port, 2)),)))
    wait_until("it is asked", lambda: asked)
    rank.begin(KVWork(dropped=(1,)))
    assert fetched(rank, 2, offer(liar.port, 2), KEYS[3:5]) == (0, "silent")
    now[0] = kv_peers.PAUSE - 1
    assert fetched(rank, 3, offer(liar.port, 2), KEYS[3:5]) == (0, "silent")
    now[0] = kv_peers.PAUSE
    assert fetched(rank, 4, offer(liar.port, 2), KEYS[3:5]) == (2, "")
    liar.close()
    rank.close()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"x" * 100, ["ask", 1, 0, "a" * 300, ME, [KEYS[1]]], ["ask", 1, 0, "a", ME, [KEYS[1]] * 9],
        ["ask", 1, 0, "a", ME, []], ["ask", 1, 0, "a", b"i", [KEYS[1]]],
    ],
)  # fmt: skip
def test_messages_that_are_none_harm_nobody(both: tuple[KVPeers, KVPeers], port: int, data: Any) -> None:
    one, other = both
    keys = Keys.derive(SECRET, 1, PURPOSE)
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        introduce(hostile, keys.driver.public, keys.ranks[0])
        hostile.setsockopt(zmq.LINGER, 1000)
        hostile.connect(f"tcp://127.0.0.1:{port}")
        hostile.send(data if isinstance(data, bytes) else msgspec.msgpack.encode(data))
    fill(one, 1, 1)
    one.begin(KVWork(offers=(("a", KEYS[1], 1),)))
    assert fetched(other, 1, offer(port, 1), KEYS[1:2]) == (1, "")
    assert one.server is not None
    server = one.server
    wait_until("it is counted", lambda: server.counts(told=False)["refused"] == 1)


def test_a_peer_that_takes_nothing_holds_up_nobody(both: tuple[KVPeers, KVPeers], port: int) -> None:
    one, other = both
    for i in range(8):
        fill(one, i, i)
    one.begin(KVWork(offers=tuple(("a", KEYS[i], i) for i in range(8))))
    keys = Keys.derive(SECRET, 1, PURPOSE)
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        introduce(hostile, keys.driver.public, keys.ranks[0])
        hostile.setsockopt(zmq.LINGER, 0)
        hostile.setsockopt(zmq.RCVHWM, 1)
        hostile.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(200):
            hostile.send(msgspec.msgpack.encode(AskBlocks(1, 0, "a", ME, KEYS[:8])))
        assert fetched(other, 1, offer(port, 8), KEYS[:8]) == (8, "")


# -- by NIXL


@pytest.fixture
def nixl() -> Iterator[bool]:
    """Does something stand for the package? Not where it is installed."""
    with stand_in("nixl") as stands:
        yield stands


@pytest.fixture
def by_nixl(port: int, nixl: bool) -> Iterator[tuple[KVPeers, KVPeers]]:
    one, other = peers(serves=True, port=port, backends=["UCX"], buffer=8 * SIZE), peers(backends=["UCX"])
    assert not one.why
    yield one, other
    for each in (one, other):
        each.close()


def test_nixl_reads_what_is_offered(by_nixl: tuple[KVPeers, KVPeers], port: int) -> None:
    one, other = by_nixl
    for turn in range(3):  # in places that others had
        numbers = range(8 * turn, 8 * turn + 8)
        for i in numbers:
            fill(one, i, i)
        one.begin(KVWork(offers=tuple((f"{turn}", KEYS[i], i) for i in numbers)))
        assert one.server is not None
        wait_until("copies are taken", lambda: one.server is not None and len(one.server.offered) == 8)
        one.begin(KVWork(offers=(("more", KEYS[39], 39),)))
        keys = KEYS[8 * turn : 8 * turn + 8]
        assert fetched(other, turn, offer(port, 8, f"{turn}"), keys) == (8, "")
        assert all(holds(other, i, number) for i, number in enumerate(numbers))
        wait_until("nothing is held", lambda: one.server is not None and len(one.server.offered) == 0)
    news = one.finished(waits=False)
    assert news is not None and news.stores["NixlConnector"].saved == 24
    assert news.stores["NixlConnector"].errors == {"full": 3}


def test_a_place_that_was_given_to_another_block_is_not_used(by_nixl: tuple[KVPeers, KVPeers], port: int) -> None:
    one, other = by_nixl
    assert one.server is not None and one.server.offered.places is not None
    offered = one.server.offered
    for i in range(2):
        fill(one, i, i)
    one.begin(KVWork(offers=(("a", KEYS[0], 0), ("a", KEYS[1], 1))))
    wait_until("copies are taken", lambda: len(offered) == 2)
    places = one.server.offered.places
    places.agent.place(1)[:] = payload(77)
    assert fetched(other, 1, offer(port, 2), KEYS[:2]) == (1, "damaged")


def test_without_nixl_who_can_read_blocks_gets_none(by_nixl: tuple[KVPeers, KVPeers], port: int) -> None:
    one, plain = by_nixl[0], peers()
    fill(one, 0, 0)
    one.begin(KVWork(offers=(("a", KEYS[0], 0),)))
    assert fetched(plain, 1, offer(port, 1), KEYS[:1]) == (0, "damaged")
    plain.close()


def test_with_nixl_blocks_of_a_server_without_it_come(both: tuple[KVPeers, KVPeers], port: int, nixl: bool) -> None:
    one, other = both[0], peers(backends=["UCX"])
    fill(one, 0, 0)
    one.begin(KVWork(offers=(("a", KEYS[0], 0),)))
    assert fetched(other, 1, offer(port, 1), KEYS[:1]) == (1, "")
    other.close()


@pytest.mark.parametrize("how", ["stuck", "error"])
def test_a_read_that_never_ends_or_fails_is_computed(
    by_nixl: tuple[KVPeers, KVPeers], port: int, monkeypatch: pytest.MonkeyPatch, nixl: bool, how: str
) -> None:
    if not nixl:
        pytest.skip("NIXL itself does as it likes")
    one, other = by_nixl
    monkeypatch.setenv("FAKE_NIXL", how)
    monkeypatch.setattr(kv_nixl, "PATIENCE", 0.05)
    fill(one, 0, 0)
    one.begin(KVWork(offers=(("a", KEYS[0], 0),)))
    assert fetched(other, 1, offer(port, 1), KEYS[:1]) == (0, "error")
    assert one.server is not None
    offered = one.server.offered
    wait_until("nothing is held", lambda: len(offered) == 0)
    monkeypatch.delenv("FAKE_NIXL")
    one.begin(KVWork(offers=(("b", KEYS[0], 0),)))
    assert fetched(other, 2, offer(port, 1, "b"), KEYS[:1]) == (0, "silent")  # it isn't asked for a while


def test_a_back_end_that_nixl_has_not_is_named(port: int, nixl: bool) -> None:
    one = peers(serves=True, port=port, backends=["FAX"])
    news = one.finished(waits=False)
    assert news is not None and "no back end FAX" in news.stores["NixlConnector"].why
    one.close()
