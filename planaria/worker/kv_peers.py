"""KV blocks from ranks of other servers, and for them (planaria.worker.kv_offers): a rank's connector to its peers.

Each peer that is asked has a thread, so that one which is dead, stopped or slow keeps none waiting but who asked it,
and those not long. What it sends counts only if its seal fits the key that was asked for and this rank's own identity,
and goes into its block under a lock which is also held when the load is dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from planaria.config.options import TransferConfig
from planaria.executor.link.keys import HEARTBEAT, Keys, introduce
from planaria.executor.link.tcp_socket import End, bracketed
from planaria.protocol import KVLoad, KVNews, KVWork, StoreNews
from planaria.types import KVOffer
from planaria.worker.kv_coming import PartLoads
from planaria.worker.kv_nixl import NixlAgent, NixlError, NixlPlaces, check
from planaria.worker.kv_offers import (
    MOST_ASKS,
    MOST_KEYS,
    MOST_WAIT,
    PURPOSE,
    AskBlocks,
    EndLease,
    Offered,
    OfferServer,
    SentBlock,
)
from planaria.worker.kv_recut import PartSource, Recut
from planaria.worker.kv_store import is_whole
from planaria.worker.kv_tier import WAIT, Blocks, copy_out

logger = logging.getLogger("planaria.worker")

OPEN = 16  # peers that are kept connected
SILENCE = 2.0  # seconds without a block after which nobody waits for a peer
PAUSE = 10.0  # seconds in which it isn't asked again
LOOK = 0.05  # seconds between looks whether a load was dropped
IDLE = 60.0  # seconds after which a peer is let go of


class Peer:
    """A rank of another server, that is asked for blocks; source: which one; backends: of NIXL, that may read them.
    bring(source, load, index, payload) puts one where it belongs, unless the load was dropped: False;
    ended(source, load, count, why, seconds)."""

    def __init__(
        self, address: str, keys: Keys, source: PartSource, backends: tuple[str, ...],
        bring: Callable[[PartSource, KVLoad, int, memoryview], bool],
        ended: Callable[[PartSource, KVLoad, int, str, float], None],
    ) -> None:  # fmt: skip
        self.address, self.keys, self.source, self.identity, self.size = (
            address, keys, source, source.identity, source.size,
        )  # fmt: skip
        self.bring, self.ended, self.backends = partial(bring, source), partial(ended, source), backends
        self._loads: queue.SimpleQueue[KVLoad | None] = queue.SimpleQueue()
        self._decode = msgspec.msgpack.Decoder(SentBlock).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._end: End | None = None
        self._agent: NixlAgent | None = None
        self._paused = 0.0  # until then it isn't asked
        self._lenient = True  # unless it says something after all: it may be late once
        threading.Thread(target=self._run, name="planaria-kv-peer", daemon=True).start()

    def fetch(self, load: KVLoad) -> None:
        self._loads.put(load)

    def close(self) -> None:
        self._loads.put(None)

    # -- its thread

    def _run(self) -> None:
        while True:
            try:
                load = self._loads.get(timeout=IDLE)
            except queue.Empty:
                self._hang_up()
                continue
            if load is None:
                self._hang_up()
                return
            began, count, why = time.monotonic(), 0, "silent"
            early = began < self._paused
            if not early or (self._lenient and self._spoke()):
                try:
                    count, why = self._fetch(load)
                except Exception:  # whatever it is: the rest is computed
                    logger.exception("KV blocks from %s", self.address)
                    why = "error"
                if why in ("silent", "error"):
                    self._hang_up()  # whatever it says later is not heard
                nothing = why == "dropped" and not count
                if why in ("silent", "error") or (nothing and time.monotonic() - began >= load.wait):
                    self._paused, self._lenient = began + PAUSE, not early
                elif not nothing:  # else it had no time to say anything
                    self._paused, self._lenient = 0.0, True
            self.ended(load, count, why, time.monotonic() - began)

    def _spoke(self) -> bool:
        """Has it said anything since it was asked in vain? It may only have taken long to connect."""
        heard = False
        while self._end is not None and self._end.frames() is not None:
            heard = True
        return heard

    def _hang_up(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _connected(self) -> End:
        if self._end is None:
            self._end = End(zmq.DEALER, self.size // 2 + (1 << 12), HEARTBEAT)
            self._end.socket.set(zmq.LINGER, 100)
            self._end.socket.set(zmq.IPV6, int("[" in self.address))
            introduce(self._end.socket, self.keys.driver.public, self.keys.ranks[0])
            self._end.socket.connect(self.address)
        return self._end

    def _fetch(self, load: KVLoad) -> tuple[int, str]:
        """Of the load's keys, how many from the first on have come, and why no more have."""
        assert isinstance(load.lease, KVOffer)
        end, lease, keys = self._connected(), load.lease.id, load.keys
        got = asked = 0
        heard = time.monotonic()
        why = ""
        while got < len(keys) and not why:
            while asked < len(keys) and asked - got <= (MOST_ASKS - 2) * MOST_KEYS:
                part = keys[asked : asked + MOST_KEYS]
                self._send(end, AskBlocks(load.number, asked, lease, self.identity, part, min(load.wait, MOST_WAIT)))
                asked += len(part)
            frames = end.frames()
            if frames is not None:
                found = self._part(frames, load, got)
                if found is not None:
                    why, heard = found, time.monotonic()
                    got += not found
            elif time.monotonic() - heard >= SILENCE:
                return got, "silent"
            elif not self.bring(load, -1, memoryview(b"")):
                why = "dropped"  # whoever waited for it had less patience
            else:
                end.wait(LOOK)
        if why != "silent":
            self._send(end, EndLease(lease, self.source.takers))
        return got, why

    def _send(self, end: End, message: AskBlocks | EndLease) -> None:
        """Never waits: what is not taken isn't answered."""
        end.socket.send(self._encode(message), zmq.NOBLOCK)

    def _part(self, frames: list[zmq.Frame], load: KVLoad, index: int) -> str | None:
        """The next block of a load: "" where it is there now, else why it isn't. None: it is something else, late,
        doubled, or out of order."""
        try:
            part = self._decode(frames[0].buffer)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return "damaged"
        if (part.number, part.index) != (load.number, index):
            return None
        if part.why:
            return part.why[:32]
        payload = frames[1].buffer if len(frames) == 2 else memoryview(b"")
        if part.agent and self.backends:
            try:
                if self._agent is None:
                    self._agent = NixlAgent(self.backends, self.size, 1)
                payload = self._agent.read(part.agent, part.address, self.size)
            except NixlError as e:
                logger.warning("KV blocks from %s: %s", self.address, e)
                return "error"
        if len(payload) != self.size or not is_whole(part.head, self.identity, load.keys[index], payload):
            return "damaged"
        return "" if self.bring(load, index, payload) else "dropped"


class KVPeers:
    """Of one rank in one epoch. place: its number among all ranks of the server's engines, rank: among those of its
    engine; blocks: of its caches; size: bytes of one; recut, loaded: see PartLoads; news: see StoreThreads."""

    def __init__(
        self, config: TransferConfig, secret: bytes, place: int, rank: int, identity: bytes, blocks: Blocks, size: int,
        recut: Recut | None, loaded: Callable[[list[int]], None] | None, news: threading.Condition,
    ) -> None:  # fmt: skip
        self.name, self.backends = config.connector, config.backends
        self.rank, self.blocks, self.size = rank, blocks, size
        self.loads = PartLoads(PartSource(rank, identity, size), blocks, recut, loaded, news)
        self._keys = Keys.derive(secret, 1, PURPOSE)
        self._news = news  # of all below, and of every write into a block
        self._peers: OrderedDict[tuple[str, PartSource], Peer] = OrderedDict()
        self._errors: Counter[str] = Counter()
        self._said: StoreNews | None = None
        self.server: OfferServer | None = None
        self.why = ""
        if config.asks and self.backends:
            try:
                check(self.backends)
            except NixlError as e:
                self.why = f"rank {rank} has no NIXL: {e}"
                logger.warning("nothing is fetched from other servers: %s", self.why)
        if config.serves:
            try:
                places = NixlPlaces(NixlAgent(self.backends, size, config.buffer // size)) if self.backends else None
                offered = Offered(identity, config.buffer, config.lease, places=places)
                self.server = OfferServer(offered, self._keys, config.host, config.port + place)
            except zmq.ZMQError as e:
                self.why = f"rank {rank} can't listen on {config.host} port {config.port + place}: {e.strerror}"
            except NixlError as e:
                self.why = f"rank {rank} has no NIXL: {e}"
            if self.server is None:
                logger.warning("nothing is offered to other servers: %s", self.why)

    def begin(self, work: KVWork) -> None:
        self.loads.drop(work.dropped)
        for load in work.loads:
            if isinstance(load.lease, KVOffer) and load.lease.host:
                sources = self.loads.sources(load.lease)
                self.loads.expect(load, len(sources))
                for source in sources:
                    self._peer(load.lease, source).fetch(load)
                if not sources:
                    self._ended(self.loads.same, load, 0, "layout", 0.0)
        if self.server is not None:
            for lease, key, block in work.offers:
                self.server.take(lease, key, partial(copy_out, self.blocks, block, self.size))

    def _peer(self, offer: KVOffer, source: PartSource) -> Peer:
        where = f"{bracketed(offer.host)}:{offer.port + source.rank}"
        place = f"tcp://{offer.at[source.rank] if source.rank < len(offer.at) else where}", source
        peer = self._peers.pop(place, None)
        if peer is None:
            peer = Peer(place[0], self._keys, source, self.backends, self.loads.bring, self._ended)
            while len(self._peers) >= OPEN:
                self._peers.popitem(last=False)[1].close()
        self._peers[place] = peer
        return peer

    def _ended(self, source: PartSource, load: KVLoad, count: int, why: str, seconds: float) -> None:
        with self._news:
            if failed := self.loads.ended(source, load, count, why, seconds):
                self._errors[failed] += 1

    def finished(self, *, waits: bool) -> KVNews | None:
        with self._news:
            if waits and not self.loads.have_ended:
                self._news.wait(WAIT)
            figures = self._figures(told=False)
            if not self.loads.have_ended and figures == self._said:
                return None
            figures = self._figures(told=True)
            self._said = msgspec.structs.replace(figures, saved=0, loaded=0, errors={})
            ended, failed = self.loads.take()
            self.loads.num_loaded = 0
            self._errors.clear()
            return KVNews(ended, stores={self.name: figures}, failed=failed)

    def _figures(self, *, told: bool) -> StoreNews:
        """Since it was last said."""
        held, counts = 0, Counter(self._errors)
        if self.server is not None:
            held = len(self.server.offered)
            counts += self.server.counts(told=told)
        return StoreNews(held, counts.pop("saved", 0), self.loads.num_loaded, dict(counts), self.why)

    def close(self) -> None:
        self.loads.close()
        for peer in self._peers.values():
            peer.close()
        if self.server is not None:
            self.server.close()
            if self.server.offered.places is not None:
                self.server.offered.places.agent.close()
