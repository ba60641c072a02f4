"""Commands and replies over TCP, between nodes: ZeroMQ with CurveZMQ, so encrypted and both ends known by key.

The port is bound first and published after, in the invitations. Frames that no rank of this epoch can have meant
(unauthenticated, malformed, oversized, replayed, of another epoch) are dropped and counted in `refused`, and serving
goes on.

    link = TcpLink(num_ranks, host="10.0.0.1")              in the driver
    link.invitation(rank).encode()                          to the rank, through a pipe
    port = TcpPort(Invitation.decode(data))                 in the rank (planaria.executor.link.tcp_port)
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from planaria.executor.link.address import TcpAddress
from planaria.executor.link.codec import Bytes, encode_command, heard
from planaria.executor.link.faults import ConnectionLost, Fenced, LinkClosed, LinkError, PeerLags
from planaria.executor.link.keys import HEARTBEAT, Invitation, Keys, guard
from planaria.executor.link.stream import FrameDropped, FrameStream, Kind
from planaria.executor.link.tcp_socket import CHUNK_BYTES, NOTHING, WINDOW, End, bracketed

PROBE = 0.05  # seconds between looks for whose connection broke
PROBES = 40
BROKE = "the connection to {} broke: process ended or stopped, or network"
_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unauthenticated",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake",
}
_OF_CONNECTIONS = {*_FAILURES.values(), "second connection"}

logger = logging.getLogger("planaria.link")


class _Peer:
    """A rank as the driver sees it. Frames wait in `unsent` until it has said hello."""

    def __init__(self, stream: FrameStream[Any]) -> None:
        self.stream = stream
        self.route: bytes | None = None
        self.unsent: list[tuple[bytes, memoryview]] = []
        self.state = "expected"  # connected, left, lost


class TcpLink:
    """The driver's end. One thread sends and receives; `wake` and `fence` may be called from any.

    host, port: where it listens (0: any); `address`: where ranks connect; `refused`: dropped frames and connections by
    reason. `send_timeout`: seconds without progress after which a rank that takes nothing is reported. `heartbeat`:
    seconds without a sign of life after which either end takes a connection for dead. `encode` and `decode` are for
    other messages than commands and replies; `decode(bytes, rank)` never raises.
    """

    name = "tcp"

    def __init__(
        self, num_ranks: int, *, host: str = "127.0.0.1", port: int = 0, keys: Keys | None = None, epoch: int = 0,
        chunk_bytes: int = CHUNK_BYTES, heartbeat: float = HEARTBEAT, send_timeout: float = 30.0,
        encode: Callable[[Any], bytes] = encode_command, decode: Callable[[Bytes, int], Any] = heard,
    ) -> None:  # fmt: skip
        """Raises LinkError."""
        if not zmq.has("curve"):
            raise LinkError("this ZeroMQ has no CurveZMQ; install pyzmq from its wheel")
        self.keys = keys = keys or Keys.generate(num_ranks)
        self.epoch, self.chunk_bytes, self.send_timeout = epoch, chunk_bytes, send_timeout
        self.num_ranks, self.heartbeat = num_ranks, heartbeat
        self.refused: Counter[str] = Counter()
        self._encode, self._decode = encode, decode
        self._peers = [self._new_peer(rank) for rank in range(self.num_ranks)]
        self._heard: deque[tuple[int, int, Any]] = deque()
        self._woken = self._fenced = False
        self._broken: LinkError | None = None
        self._probes = 0  # looks left for the rank whose connection broke
        self._end = End(zmq.ROUTER, chunk_bytes, heartbeat)
        socket = self._end.socket
        guard(self._end.context, socket, keys)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        try:
            socket.bind(f"tcp://{bracketed(host)}:{port}")
        except zmq.ZMQError as e:
            self._end.close()
            raise LinkError(f"can't listen on {host} port {port}: {e}") from None
        bound = int(socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0").rpartition(":")[2])  # type: ignore[union-attr]
        self.address = f"tcp://{bracketed(host)}:{bound}"

    def address_of(self, rank: int) -> TcpAddress:
        """For this rank alone: it contains its secret key."""
        return TcpAddress(self.invitation(rank).encode())

    def pulses(self) -> list[tuple[int, int]]:
        """None are needed: ZeroMQ's own heartbeats notice a silent rank."""
        return [(0, 0)] * self.num_ranks

    def invitation(self, rank: int) -> Invitation:
        """For this rank alone: it contains its secret key."""
        return Invitation(
            self.address, self.keys.driver.public, self.keys.ranks[rank], rank, self.epoch, self.chunk_bytes,
            self.heartbeat,
        )  # fmt: skip

    def forget(self, rank: int) -> None:
        """This rank's loss has been dealt with: another process may come in its place. Who is still there is fenced."""
        with self._end.lock:
            peer = self._peers[rank]
            if peer.route is not None and not self._end.closed:
                self._put(peer, peer.stream.header(Kind.FENCE), NOTHING)
            self._peers[rank] = self._new_peer(rank)

    def ranks(self, *states: str) -> list[int]:
        """Those that are "expected", "connected", "left" (in order), or "lost": their connection broke."""
        self._take_in()
        return [rank for rank, peer in enumerate(self._peers) if peer.state in states]

    def send(self, number: int, command: Any, to: int | None = None) -> None:
        """To every rank, or to one. Raises CodecError; PeerLags or ConnectionLost when a rank takes nothing; Fenced,
        LinkClosed."""
        data = self._encode(command)
        self._check()
        ranks = range(self.num_ranks) if to is None else (to,)
        peers = [self._peers[rank] for rank in ranks]
        for at, (chunk, left) in enumerate(peers[0].stream.chunks(data)):
            if any(peer.stream.full() for peer in peers):
                try:
                    self._wait_for_room(ranks)
                except LinkError as e:
                    if at:  # ranks have half a message
                        self._broken = e
                    raise
            with self._end.lock:
                for peer in peers:
                    self._put(peer, peer.stream.data_header(number, left), chunk)

    def receive(self, timeout: float | None) -> tuple[int, int, Any] | None:
        """The next reply: rank, number, reply. None after `timeout` seconds or a `wake`.

        Raises ConnectionLost when a rank's connection broke (what had left it by then comes first), MessageLost,
        Fenced, LinkClosed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._heard:
                return self._heard.popleft()
            self._check()
            self._take_in()
            if self._heard:
                continue
            self._check()
            if lost := [rank for rank, peer in enumerate(self._peers) if peer.state == "lost"]:
                raise ConnectionLost(BROKE, *lost)
            if self._woken:
                self._woken = False
                return None
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            if self._probes:
                left = PROBE if left is None else min(left, PROBE)
            self._end.wait(left)

    def wake(self) -> None:
        """Make `receive` (this one, or the next) return None. Any thread."""
        self._woken = True
        self._end.ring()

    def fence(self) -> None:
        """End the epoch: every wait on this link, here and in all ranks, ends with Fenced. Any thread. Idempotent."""
        with self._end.lock:
            if not self._fenced and not self._end.closed:
                self._fenced = True
                self._tell(Kind.FENCE)
                self._end.ring()

    def close(self) -> None:
        """Idempotent. Ranks that wait hear LinkClosed."""
        with self._end.lock:
            if not self._end.closed:
                self._tell(Kind.BYE)
                self._broken = LinkClosed("the link is closed")
                self._end.close()

    # -- inside

    def _new_peer(self, rank: int) -> _Peer:
        return _Peer(
            FrameStream(
                self.epoch, f"rank {rank}", lambda data: self._decode(data, rank), chunk_bytes=self.chunk_bytes,
                window=WINDOW,
            )
        )  # fmt: skip

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._fenced:
            raise Fenced(f"epoch {self.epoch} is over")

    def _tell(self, kind: Kind) -> None:
        for peer in self._peers:
            if peer.state == "connected":
                self._put(peer, peer.stream.header(kind), NOTHING)

    def _put(self, peer: _Peer, header: bytes, payload: memoryview) -> None:
        if peer.route is None:
            peer.unsent.append((header, payload))
            return
        if peer.state != "connected":
            return
        try:
            self._end.socket.send_multipart([peer.route, header, payload], zmq.NOBLOCK, copy=len(payload) < 65536)
        except zmq.ZMQError:  # no such connection any more
            peer.state = "lost"

    def _take_in(self) -> None:
        """Everything that has come: frames, then what happened to connections."""
        end = self._end
        with end.lock:
            if end.closed:
                return
            self._take_frames()
            for event in end.events():
                if event == zmq.EVENT_DISCONNECTED:
                    self._probes = PROBES
                elif event in _FAILURES:
                    self._refuse(_FAILURES[event])
            if self._probes:
                # The event doesn't say whose connection it was. A send to it fails once the socket has noticed.
                self._probes -= 1
                self._tell(Kind.PING)
                self._take_frames()  # sending uses up the signal that something has come

    def _take_frames(self) -> None:
        while (frames := self._end.frames()) is not None:
            try:
                self._on(frames)
            except FrameDropped as e:
                self._refuse(e.reason)
            except LinkError as e:
                self._broken = self._broken or e

    def _refuse(self, reason: str) -> None:
        self.refused[reason] += 1
        count = self.refused[reason]
        if not count & (count - 1):  # the 1st, 2nd, 4th, 8th ...: nobody fills the log from outside
            what = "connections" if reason in _OF_CONNECTIONS else "frames"
            logger.warning("refused at %s: %d %s (%s)", self.address, count, what, reason)

    def _on(self, frames: list[zmq.Frame]) -> None:
        try:
            rank = int(frames[1].get("User-Id"))
            peer = self._peers[rank]
        except (zmq.ZMQError, IndexError, ValueError):
            raise FrameDropped("unauthenticated") from None
        if len(frames) != 3:
            raise FrameDropped("malformed")
        route, header, payload = (frame.buffer for frame in frames)
        stream = peer.stream
        if peer.route is None:
            if stream.kind(header) is not Kind.HELLO:
                raise FrameDropped("malformed")
            stream.take(header, payload)
            peer.route, peer.state = bytes(route), "connected"
            for unsent in peer.unsent:
                self._put(peer, *unsent)
            peer.unsent.clear()
            return
        if route != peer.route:
            raise FrameDropped("second connection")
        kind, found = stream.take(header, payload)
        if kind is Kind.BYE:
            peer.state = "left"
        if found is not None:
            self._heard.append((rank, *found))
        if stream.owes_credit():
            self._put(peer, stream.header(Kind.CREDIT), NOTHING)

    def _wait_for_room(self, ranks: Sequence[int]) -> None:
        """Until each of `ranks` may be sent a chunk. Replies are taken in meanwhile."""
        began = time.monotonic()
        while True:
            self._check()
            self._take_in()
            behind = [rank for rank in ranks if self._peers[rank].stream.full()]
            if not behind:
                return
            if gone := [rank for rank in behind if self._peers[rank].state == "lost"]:
                raise ConnectionLost(BROKE, *gone)
            if gone := [rank for rank in behind if self._peers[rank].state == "left"]:
                raise LinkClosed("{} left the link", *gone)
            waited = time.monotonic() - began
            if waited >= self.send_timeout:
                never = [rank for rank in behind if self._peers[rank].state == "expected"]
                what = "never connected" if never else "stopped, stuck or busy"
                raise PeerLags(f"{{}} took no command for {waited:.1f} s: {what}", *behind)
            left = self.send_timeout - waited
            self._end.wait(min(left, PROBE) if self._probes else left)
