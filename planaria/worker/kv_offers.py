"""Copies of KV blocks that other servers will fetch: held under leases with deadlines, sealed, and sent to who asks.

A block's copy is taken before its step computes and sealed (as planaria.worker.kv_store seals a file) under the key
that the core names, so what is sent later is what the key stands for, whatever has become of the block. Nobody can name
a copy but by its key, which hashes all tokens up to its end, the weights, the adapter and the salt: who asks knows what
it is of. Who asks at all has proved by CurveZMQ that it has the deployment's secret; what it says is bounded all the
same.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import zmq

from planaria.executor.link.keys import HEARTBEAT, Keys, guard
from planaria.executor.link.tcp_socket import End, bracketed
from planaria.worker.kv_store import KEY, head_of

if TYPE_CHECKING:
    from planaria.worker.kv_nixl import NixlPlaces

logger = logging.getLogger("planaria.worker")

PURPOSE = "kv transfer"  # keys of the deployment's secret for it
MOST_KEYS = 8  # of an AskBlocks
MOST_ASKS = 4  # of a peer, that wait
MOST_PEERS = 256
MOST_WAIT = 0.5  # seconds that an AskBlocks waits for a block to be there, at most
UNSENT = 16  # blocks on their way to a peer
RETRY = 0.01  # seconds, where it takes none
READS = 5.0  # seconds after an AskBlocks in which its blocks may be read where they are
TICK = 0.001  # seconds between what NIXL does for that
LOOK = 1.0  # seconds between looks for leases that are over
STAGED = 128 << 20  # bytes that wait to be sealed
HEADER = 1 << 15  # bytes of a message to who holds blocks, at most


class AskBlocks(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Send the blocks with these keys, in this order; they are number `first` and so on of the load `number`. identity:
    see planaria.worker.kv.identity_of. wait: seconds for a block to be there."""

    number: int
    first: int
    lease: Annotated[str, msgspec.Meta(max_length=256)]
    identity: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    keys: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=KEY, max_length=KEY)], ...],
        msgspec.Meta(min_length=1, max_length=MOST_KEYS),
    ]
    wait: Annotated[float, msgspec.Meta(ge=0.0, le=MOST_WAIT)] = MOST_WAIT


class EndLease(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Nothing more of this lease will be asked for, by one of so many `takers`."""

    lease: Annotated[str, msgspec.Meta(max_length=256)]
    takers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1


class SentBlock(msgspec.Struct, frozen=True, array_like=True):
    """Before a payload, or where that is: at an address in the memory of a NIXL agent, known by its metadata. why: in a
    word, why there is none, and none after it of this AskBlocks."""

    number: int
    index: int
    head: bytes = b""
    why: str = ""
    address: int = 0
    agent: bytes = b""


class Copy(NamedTuple):
    """Of a block, `size` bytes. payload: empty where it is at an address of an agent's."""

    head: bytes
    size: int
    payload: bytearray
    address: int = 0


class Offered:
    """What there is. most: bytes; lease: seconds since the last block of it was put here; places: where others read it
    by themselves. Any thread."""

    def __init__(
        self, identity: bytes, most: int, lease: float, clock: Callable[[], float] = time.monotonic,
        places: NixlPlaces | None = None,
    ) -> None:  # fmt: skip
        self.identity, self.most, self.lease, self.clock, self.places = identity, most, lease, clock, places
        self._lock = threading.Lock()
        self._blocks: dict[bytes, Copy] = {}  # by key
        self._holders: Counter[bytes] = Counter()  # leases of each key
        self._leases: dict[str, tuple[float, set[bytes]]] = {}  # deadlines and keys, the oldest first
        self._ended = Counter[str]()  # takers of a lease that need no more
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def share(self, lease: str, key: bytes) -> bool:
        """Is it there already? Then it is held for this lease, too."""
        with self._lock:
            if key in self._blocks:
                self._hold(lease, key)
            return key in self._blocks

    def put(self, lease: str, key: bytes, payload: bytearray) -> bool:
        """False: there is no room."""
        head = head_of(self.identity, key, payload)
        with self._lock:
            if key not in self._blocks:
                if self._bytes + len(payload) > self.most:
                    return False
                address = self.places.put(payload) if self.places is not None else 0
                if address is None:
                    return False
                kept = payload if self.places is None else bytearray()
                self._blocks[key] = Copy(head, len(payload), kept, address)
                self._bytes += len(payload)
            self._hold(lease, key)
        return True

    def _hold(self, lease: str, key: bytes) -> None:
        _, keys = self._leases.pop(lease, (0.0, set[bytes]()))
        self._holders[key] += key not in keys
        self._leases[lease] = self.clock() + self.lease, keys | {key} if key not in keys else keys

    def get(self, lease: str, key: bytes) -> Copy | None:
        """Only what is held for this lease."""
        with self._lock:
            until, keys = self._leases.get(lease, (0.0, ()))
            return self._blocks[key] if key in keys and until > self.clock() else None

    def done(self, lease: str, takers: int) -> None:
        """One of so many needs no more of it."""
        if lease in self._leases:
            self._ended[lease] += 1
            if self._ended[lease] >= takers:
                self.release(lease)

    def release(self, lease: str) -> None:
        with self._lock:
            self._ended.pop(lease, None)
            for key in self._leases.pop(lease, (0.0, ()))[1]:
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]
                    copy = self._blocks.pop(key)
                    self._bytes -= copy.size
                    if self.places is not None:
                        self.places.drop(copy.address)

    def expire(self) -> int:
        """End leases whose time is over. Returns how many."""
        now = self.clock()
        over = [lease for lease, (until, _) in self._leases.items() if until <= now]
        for lease in over:
            self.release(lease)
        return len(over)


class OfferServer:
    """Of one rank. host, port: where it listens, 0: at any port. Raises zmq.ZMQError."""

    def __init__(self, offered: Offered, keys: Keys, host: str, port: int) -> None:
        self.offered, self._lock = offered, threading.Lock()
        self._counts: Counter[str] = Counter()
        self._end = End(zmq.ROUTER, HEADER // 2, HEARTBEAT)
        socket = self._end.socket
        try:
            guard(self._end.context, socket, keys)
            for option, value in (
                (zmq.ROUTER_MANDATORY, 1), (zmq.SNDHWM, UNSENT), (zmq.LINGER, 0), (zmq.IPV6, int(":" in host)),
            ):  # fmt: skip
                socket.set(option, value)
            socket.bind(f"tcp://{bracketed(host)}:{port}")
            self.address = str(socket.get_string(zmq.LAST_ENDPOINT)).removeprefix("tcp://")
        except zmq.ZMQError:
            self._end.close()
            raise
        self._decode = msgspec.msgpack.Decoder(AskBlocks | EndLease).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._copies: queue.SimpleQueue[tuple[str, bytes, bytearray]] = queue.SimpleQueue()
        self._staged = 0
        self._asks: dict[bytes, deque[tuple[AskBlocks, float]]] = {}  # of each peer, and until when they wait
        self._reads = 0.0  # until when others may read by themselves
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="planaria-kv-offers", daemon=True)
        self._thread.start()

    def take(self, lease: str, key: bytes, copy: Callable[[], bytearray]) -> None:
        """Offer a block. copy: its bytes, as they are now."""
        if self.offered.share(lease, key):
            return
        if self._staged > STAGED:
            self._count("busy")
            return
        payload = copy()
        self._staged += len(payload)
        self._copies.put((lease, key, payload))
        self._end.ring()

    def _count(self, what: str, more: int = 1) -> None:
        with self._lock:
            self._counts[what] += more

    def counts(self, *, told: bool) -> Counter[str]:
        """Blocks saved here, and errors by kind, since they were told."""
        with self._lock:
            counts = +self._counts
            if told:
                self._counts.clear()
            return counts

    def close(self) -> None:
        self._closed = True
        self._end.ring()
        self._thread.join(LOOK)

    # -- its thread

    def _run(self) -> None:
        looked, places = 0.0, self.offered.places
        while not self._closed:
            try:
                if (now := self.offered.clock()) - looked >= LOOK:
                    self._count("expired", self.offered.expire())
                    looked = now
                busy = self._seal() | self._hear()
                late = self._answer()
                if places is not None and now < self._reads:
                    places.agent.progress()
                    if not busy:
                        self._end.wait(TICK)
                elif not busy:
                    self._end.wait(RETRY if late else LOOK if len(self.offered) else None)
            except Exception:  # of one message: others go on
                logger.exception("KV blocks for other servers")
        self._end.close()

    def _seal(self) -> bool:
        try:
            lease, key, payload = self._copies.get_nowait()
        except queue.Empty:
            return False
        self._staged -= len(payload)
        self._count("saved" if self.offered.put(lease, key, payload) else "full")
        return True

    def _hear(self) -> bool:
        frames = self._end.frames()
        if frames is None:
            return False
        route, said = frames[0].bytes, None
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, IndexError):
            said = self._decode(frames[1].buffer)
        if isinstance(said, EndLease):
            self.offered.done(said.lease, said.takers)
        elif isinstance(said, AskBlocks) and len(self._asks) < MOST_PEERS:
            self._reads = self.offered.clock() + READS
            asks = self._asks.setdefault(route, deque())
            if len(asks) < MOST_ASKS:
                asks.append((said, self.offered.clock() + said.wait))
        else:
            self._count("refused")
        return True

    def _answer(self) -> bool:
        """What can be sent. Does anybody wait?"""
        for route, asks in list(self._asks.items()):
            try:
                while asks and self._next(route, asks):
                    pass
            except zmq.Again:  # it takes no more for now
                continue
            except zmq.ZMQError:  # it has gone
                asks.clear()
            if not asks:
                del self._asks[route]
        return bool(self._asks)

    def _next(self, route: bytes, asks: deque[tuple[AskBlocks, float]]) -> bool:
        """Send a block, or why there is none. False: it may still come."""
        ask, until = asks[0]
        found = self.offered.get(ask.lease, ask.keys[0])
        if ask.identity != self.offered.identity:
            why = "layout"  # or other weights, another type: of none of which there can be a block here
        elif found is None and self.offered.clock() < until:
            return False
        else:
            why = "" if found is not None else "gone"
        part, payload = SentBlock(ask.number, ask.first, why=why), bytearray()
        if found is not None and not why:
            agent = self.offered.places.agent.metadata if self.offered.places is not None else b""
            part, payload = SentBlock(ask.number, ask.first, found.head, why, found.address, agent), found.payload
        self._end.socket.send_multipart([route, self._encode(part), payload], zmq.NOBLOCK, copy=False)
        asks.popleft()
        if len(ask.keys) > 1 and not why:
            rest = msgspec.structs.replace(ask, first=ask.first + 1, keys=ask.keys[1:])
            asks.appendleft((rest, self.offered.clock() + ask.wait))
        return True
