"""Commands and replies over TCP, between nodes: ZeroMQ with CurveZMQ, so encrypted and both ends known by key.

The port is bound first and published after, in the invitations. Frames that no rank of this epoch can have meant
(unauthenticated, malformed, oversized, replayed, of another epoch) are dropped and counted in `refused`, and serving
goes on.

    link = TcpLink.create(num_ranks, host="10.0.0.1")       in the driver
    link.invitation(rank).encode()                          to the rank, through a pipe
    port = TcpPort.connect(Invitation.decode(data))         in the rank
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections import Counter, deque
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from planaria.executor.link.address import Tcp
from planaria.executor.link.codec import Bytes, CodecError, answer, decode_command, encode_command, heard
from planaria.executor.link.faults import DRIVER, Fenced, LinkClosed, LinkError, PeerLags, PeerLost
from planaria.executor.link.keys import Invitation, Keys
from planaria.executor.link.stream import Kind, Refused, Stream
from planaria.protocol import Command, Failed, Reply

CHUNK_BYTES = 1 << 18
WINDOW = 32  # chunks under way to one peer
HEARTBEAT = 5.0  # seconds without a sign of life (ZeroMQ's own thread gives it) after which a connection is dead
PROBE = 0.05  # seconds between looks for whose connection broke, and between looks for room
PROBES = 40
_DOMAIN = b"planaria"
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
)  # fmt: skip
_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unauthenticated",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake",
}


class _End:
    """What both ends share: a socket with its events, used under `lock`, and a wait that any thread can end."""

    def __init__(self, kind: int, chunk_bytes: int, heartbeat: float) -> None:
        self.context = zmq.Context()
        self.context.setsockopt(zmq.BLOCKY, 0)
        self.socket: zmq.Socket[bytes] = self.context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, 0), (zmq.RCVHWM, 4 * WINDOW), (zmq.LINGER, 500), (zmq.MAXMSGSIZE, 2 * chunk_bytes),
            (zmq.HEARTBEAT_IVL, max(1, int(heartbeat * 200))), (zmq.HEARTBEAT_TIMEOUT, max(1, int(heartbeat * 800))),
            (zmq.HANDSHAKE_IVL, 10_000), (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 1000),
        ):  # fmt: skip
            self.socket.set(option, value)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.lock = threading.RLock()
        self.bell_read, self.bell_write = os.pipe()
        for fd in (self.bell_read, self.bell_write):
            os.set_blocking(fd, False)
        self.poll = select.poll()
        for source in (self.socket.fileno(), self.monitor.fileno(), self.bell_read):
            self.poll.register(source, select.POLLIN)
        self.closed = False

    def ring(self) -> None:
        """End the wait that is on, or the next. Any thread."""
        with contextlib.suppress(BlockingIOError, OSError):  # a full pipe ends it just as well
            os.write(self.bell_write, b"!")

    def wait(self, seconds: float | None) -> None:
        """Sleep until something may have come. Whatever had come before must have been taken."""
        self.poll.poll(None if seconds is None else max(0, int(seconds * 1000 + 0.999)))
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell_read, 4096)

    def frames(self) -> list[zmq.Frame] | None:
        """The next message that is there."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def events(self) -> list[int]:
        """What happened to connections since the last look."""
        found = []
        while True:
            try:
                found.append(int(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]))
            except zmq.Again:
                return found

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.socket.close()
            self.context.term()
            os.close(self.bell_read)
            os.close(self.bell_write)


class _Gatekeeper(threading.Thread):
    """Answers ZeroMQ's question whether a key may connect, and as which rank. Ends with the context."""

    def __init__(self, context: zmq.Context[Any], allowed: dict[bytes, int]) -> None:
        super().__init__(name="link keys", daemon=True)
        self.allowed = allowed
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def run(self) -> None:
        while True:
            try:
                version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
                rank = self.allowed.get(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else None
                verdict = (b"400", b"key not on the list", b"") if rank is None else (b"200", b"", b"%d" % rank)
                self.socket.send_multipart([version, request, *verdict, b""])
            except zmq.ContextTerminated:
                self.socket.close()
                return


class _Peer:
    """A rank as the driver sees it. Frames wait in `unsent` until it has said hello."""

    def __init__(self, stream: Stream[Reply]) -> None:
        self.stream = stream
        self.route: bytes | None = None
        self.unsent: list[tuple[bytes, memoryview]] = []
        self.state = "expected"  # connected, left, lost


class TcpLink:
    """The driver's end. One thread sends and receives; `wake` and `fence` may be called from any.

    `address`: where ranks connect; `refused`: dropped frames and connections by reason. `send_timeout`: seconds without
    progress after which a rank that takes nothing is reported.
    """

    name = "tcp"

    def __init__(
        self, keys: Keys, host: str, port: int, advertise: str, epoch: int, chunk_bytes: int, heartbeat: float,
        send_timeout: float,
    ) -> None:  # fmt: skip
        self.keys, self.epoch, self.chunk_bytes, self.send_timeout = keys, epoch, chunk_bytes, send_timeout
        self.num_ranks = len(keys.ranks)
        self.refused: Counter[str] = Counter()
        self._peers = [
            _Peer(Stream(epoch, f"rank {rank}", functools.partial(heard, rank=rank), chunk_bytes=chunk_bytes,
                         window=WINDOW))
            for rank in range(self.num_ranks)
        ]  # fmt: skip
        self._heard: deque[tuple[int, int, Reply]] = deque()
        self._woken = self._fenced = False
        self._broken: LinkError | None = None
        self._probes = 0  # looks left for the rank whose connection broke
        self._end = _End(zmq.ROUTER, chunk_bytes, heartbeat)
        allowed = {z85.decode(pair.public): rank for rank, pair in enumerate(keys.ranks)}
        _Gatekeeper(self._end.context, allowed).start()
        socket = self._end.socket
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.driver.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        try:
            socket.bind(f"tcp://{_bracketed(host)}:{port}")
        except zmq.ZMQError as e:
            self._end.close()
            raise LinkError(f"can't listen on {host} port {port}: {e}") from None
        bound = int(socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0").rpartition(":")[2])  # type: ignore[union-attr]
        self.address = f"tcp://{_bracketed(advertise or host)}:{bound}"

    @classmethod
    def create(
        cls, num_ranks: int, *, host: str = "127.0.0.1", port: int = 0, advertise: str = "", keys: Keys | None = None,
        epoch: int = 0, chunk_bytes: int = CHUNK_BYTES, heartbeat: float = HEARTBEAT, send_timeout: float = 30.0,
    ) -> TcpLink:  # fmt: skip
        """`host` is where to listen, `advertise` what ranks connect to if that differs. Raises LinkError."""
        if not zmq.has("curve"):
            raise LinkError("this ZeroMQ has no CurveZMQ; install pyzmq from its wheel")
        return cls(keys or Keys.generate(num_ranks), host, port, advertise, epoch, chunk_bytes, heartbeat, send_timeout)

    def address_of(self, rank: int) -> Tcp:
        """For this rank alone: it contains its secret key."""
        return Tcp(self.invitation(rank).encode())

    def pulses(self) -> list[tuple[int, int]]:
        """None are needed: ZeroMQ's own heartbeats notice a silent rank."""
        return [(0, 0)] * self.num_ranks

    def invitation(self, rank: int) -> Invitation:
        """For this rank alone: it contains its secret key."""
        return Invitation(
            self.address, self.keys.driver.public, self.keys.ranks[rank], rank, self.epoch, self.chunk_bytes
        )

    def attached(self) -> list[int]:
        """Ranks that have been at the link (and may have left)."""
        self._take_in()
        return [rank for rank, peer in enumerate(self._peers) if peer.state != "expected"]

    def dead(self) -> list[int]:
        """Ranks whose connection broke without `close`."""
        self._take_in()
        return [rank for rank, peer in enumerate(self._peers) if peer.state == "lost"]

    def send(self, number: int, command: Command) -> None:
        """To every rank. Raises CodecError; PeerLags or PeerLost when a rank takes nothing; Fenced, LinkClosed."""
        data = encode_command(command)
        self._check()
        first = self._peers[0].stream
        for at, (chunk, left) in enumerate(first.chunks(data)):
            if any(peer.stream.full() for peer in self._peers):
                try:
                    self._wait_for_room()
                except LinkError as e:
                    if at:  # ranks have half a message
                        self._broken = e
                    raise
            with self._end.lock:
                for peer in self._peers:
                    self._put(peer, peer.stream.data_header(number, left), chunk)

    def receive(self, timeout: float | None) -> tuple[int, int, Reply] | None:
        """The next reply: rank, number, reply. None after `timeout` seconds or a `wake`.

        Raises PeerLost when a rank's connection broke (what had left it by then comes first), MessageLost, Fenced,
        LinkClosed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._heard:
                return self._heard.popleft()
            self._check()
            self._take_in()
            if self._heard:
                continue
            if lost := [rank for rank, peer in enumerate(self._peers) if peer.state == "lost"]:
                raise _lost(lost)
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
        if not self._end.closed:
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

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._fenced:
            raise Fenced(f"epoch {self.epoch} is over")

    def _tell(self, kind: Kind) -> None:
        for peer in self._peers:
            if peer.state == "connected":
                self._put(peer, peer.stream.header(kind), _NOTHING)

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
            while (frames := end.frames()) is not None:
                try:
                    self._on(frames)
                except Refused as e:
                    self.refused[e.reason] += 1
                except LinkError as e:
                    self._broken = self._broken or e
            for event in end.events():
                if event == zmq.EVENT_DISCONNECTED:
                    self._probes = PROBES
                elif event in _FAILURES:
                    self.refused[_FAILURES[event]] += 1
            if self._probes:
                # The event doesn't say whose connection it was. A send to it fails once the socket has noticed.
                self._probes -= 1
                self._tell(Kind.PING)

    def _on(self, frames: list[zmq.Frame]) -> None:
        try:
            rank = int(frames[1].get("User-Id"))
            peer = self._peers[rank]
        except (zmq.ZMQError, IndexError, ValueError):
            raise Refused("unauthenticated") from None
        if len(frames) != 3:
            raise Refused("malformed")
        route, header, payload = (frame.buffer for frame in frames)
        stream = peer.stream
        if peer.route is None:
            if stream.kind(header) is not Kind.HELLO:
                raise Refused("malformed")
            stream.take(header, payload)
            peer.route, peer.state = bytes(route), "connected"
            for unsent in peer.unsent:
                self._put(peer, *unsent)
            peer.unsent.clear()
            return
        if route != peer.route:
            raise Refused("second connection")
        kind, found = stream.take(header, payload)
        if kind is Kind.BYE:
            peer.state = "left"
        if found is not None:
            self._heard.append((rank, *found))
        if stream.owes_credit():
            self._put(peer, stream.header(Kind.CREDIT), _NOTHING)

    def _wait_for_room(self) -> None:
        """Until every rank may be sent a chunk. Replies are taken in meanwhile."""
        began = time.monotonic()
        while True:
            self._check()
            self._take_in()
            behind = [rank for rank, peer in enumerate(self._peers) if peer.stream.full()]
            if not behind:
                return
            if gone := [rank for rank in behind if self._peers[rank].state == "lost"]:
                raise _lost(gone)
            if gone := [rank for rank in behind if self._peers[rank].state == "left"]:
                raise LinkClosed(f"{_names(gone)} left the link", *gone)
            waited = time.monotonic() - began
            if waited >= self.send_timeout:
                never = [rank for rank in behind if self._peers[rank].state == "expected"]
                what = "never connected" if never else "stopped, stuck or busy"
                raise PeerLags(f"{_names(behind)} took no command for {waited:.1f} s: {what}", *behind)
            left = self.send_timeout - waited
            self._end.wait(min(left, PROBE) if self._probes else left)


class TcpPort:
    """A rank's end. One thread receives, one (the same or another) replies.

    `reply_timeout`: seconds without progress after which a driver that takes no replies is reported.
    """

    name = "tcp"

    def __init__(self, invitation: Invitation, heartbeat: float, reply_timeout: float) -> None:
        self.rank, self.epoch, self.reply_timeout = invitation.rank, invitation.epoch, reply_timeout
        self.refused: Counter[str] = Counter()
        self._stream = Stream(
            invitation.epoch, "the driver", _either, chunk_bytes=invitation.chunk_bytes, window=WINDOW
        )
        self._heard: deque[tuple[int, Command | CodecError]] = deque()
        self._fault: LinkError | None = None
        self._connected = self._receiving = False
        self._end = _End(zmq.DEALER, invitation.chunk_bytes, heartbeat)
        socket = self._end.socket
        socket.setsockopt(zmq.CURVE_SERVERKEY, invitation.driver_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, invitation.pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, invitation.pair.secret.encode())
        socket.setsockopt(zmq.IPV6, int("[" in invitation.address))
        socket.connect(invitation.address)

    @classmethod
    def connect(
        cls, invitation: Invitation, *, timeout: float = 60.0, heartbeat: float = HEARTBEAT, reply_timeout: float = 60.0
    ) -> TcpPort:
        """Raises LinkError when refused, or when there is no connection after `timeout` seconds."""
        port = cls(invitation, heartbeat, reply_timeout)
        began = time.monotonic()
        try:
            while not port._connected:
                left = began + timeout - time.monotonic()
                if left <= 0:
                    raise LinkError(
                        f"rank {invitation.rank} got no connection to {invitation.address} in {timeout:g} s: nobody "
                        "listens there, or its key is another deployment's"
                    )
                port._end.wait(left)
                port._take_in()
                if port._fault is not None:
                    raise port._fault
        except BaseException:
            port._end.close()
            raise
        port._put(port._stream.header(Kind.HELLO), _NOTHING)
        return port

    def receive(self, timeout: float | None) -> tuple[int, Command] | None:
        """The next command and its number. None after `timeout` seconds.

        A command that can't be read is answered with Failed here, for every command is answered. Raises PeerLost when
        the connection broke, MessageLost, Fenced, LinkClosed.
        """
        self._receiving = True
        try:
            return self._receive(None if timeout is None else time.monotonic() + timeout)
        finally:
            self._receiving = False

    def _receive(self, deadline: float | None) -> tuple[int, Command] | None:
        while True:
            self._take_in()
            if isinstance(self._fault, Fenced):
                raise self._fault
            if self._heard:
                number, command = self._heard.popleft()
                if not isinstance(command, CodecError):
                    return number, command
                self.reply(number, Failed(self.rank, "receive", str(command), ""))
                continue
            if self._fault is not None:
                raise self._fault
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._end.wait(left)

    def beat(self) -> None:
        """Nothing: ZeroMQ's own thread answers heartbeats while this process runs."""

    def reply(self, number: int, reply: Reply) -> None:
        """Answer command `number`. A reply that can't be sent goes as Failed. Raises PeerLags or PeerLost when the
        driver takes nothing; Fenced, LinkClosed."""
        data = answer(self.rank, reply)
        if self._fault is not None:
            raise self._fault
        for chunk, left in self._stream.chunks(data):
            if self._stream.full():
                self._wait_for_room()
            with self._end.lock:
                self._put(self._stream.data_header(number, left), chunk)
        if self._receiving:  # another thread may wait for what came while this one used the socket
            self._end.ring()

    def close(self) -> None:
        """Idempotent."""
        with self._end.lock:
            if not self._end.closed:
                if self._fault is None:
                    self._put(self._stream.header(Kind.BYE), _NOTHING)
                self._fault = LinkClosed(f"rank {self.rank} closed its end", self.rank)
                self._end.close()

    # -- inside

    def _put(self, header: bytes, payload: memoryview) -> None:
        try:
            self._end.socket.send_multipart([header, payload], zmq.NOBLOCK, copy=len(payload) < 65536)
        except zmq.ZMQError as e:
            self._fault = self._fault or PeerLost(f"the connection to the driver broke: {e}", DRIVER)

    def _take_in(self) -> None:
        end = self._end
        with end.lock:
            if end.closed:
                return
            while (frames := end.frames()) is not None:
                try:
                    self._on(frames)
                except Refused as e:
                    self.refused[e.reason] += 1
                except LinkError as e:
                    self._fault = self._fault or e
            for event in end.events():
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected = True
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._fault = LinkError(f"the driver refused the key of rank {self.rank}", self.rank)
                elif event == zmq.EVENT_DISCONNECTED and self._connected and self._fault is None:
                    self._fault = PeerLost("the connection to the driver broke", DRIVER)

    def _on(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 2:
            raise Refused("malformed")
        header, payload = (frame.buffer for frame in frames)
        kind, found = self._stream.take(header, payload)
        if kind is Kind.FENCE:
            raise Fenced(f"epoch {self.epoch} is over")
        if kind is Kind.BYE:
            raise LinkClosed("the driver closed the link", DRIVER)
        if found is not None:
            self._heard.append(found)
        if self._stream.owes_credit():
            self._put(self._stream.header(Kind.CREDIT), _NOTHING)

    def _wait_for_room(self) -> None:
        began = time.monotonic()
        while True:
            self._take_in()
            if self._fault is not None:
                raise self._fault
            if not self._stream.full():
                return
            waited = time.monotonic() - began
            if waited >= self.reply_timeout:
                raise PeerLags(f"the driver took no reply of rank {self.rank} for {waited:.1f} s", DRIVER)
            if self._heard:
                self._end.ring()
            self._end.wait(min(PROBE, self.reply_timeout - waited))


_NOTHING = memoryview(b"")


def _either(data: Bytes) -> Command | CodecError:
    try:
        return decode_command(data)
    except CodecError as e:
        return e


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _lost(ranks: list[int]) -> PeerLost:
    return PeerLost(f"the connection to {_names(ranks)} broke: process ended or stopped, or network", *ranks)
