"""A rank's end of the TCP link: see planaria.executor.link.tcp."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq

from planaria.executor.link.codec import Bytes, CodecError, answer, decode_command
from planaria.executor.link.faults import DRIVER, ConnectionLost, Fenced, LinkClosed, LinkError, PeerLags
from planaria.executor.link.keys import Invitation, introduce
from planaria.executor.link.stream import FrameDropped, FrameStream, Kind
from planaria.executor.link.tcp_socket import NOTHING, WINDOW, End
from planaria.protocol import Command, Failed

LOOK = 0.05  # seconds between looks for room


class TcpPort:
    """A rank's end. One thread receives, one (the same or another) replies.

    `reply_timeout`: seconds without progress after which a driver that takes no replies is reported. `heartbeat`: the
    invitation's, unless given. `encode(rank, value)` and `decode(bytes)` are for other messages than replies and
    commands; neither raises, `decode` returns a CodecError.
    """

    name = "tcp"

    def __init__(
        self, invitation: Invitation, *, timeout: float = 60.0, heartbeat: float | None = None,
        reply_timeout: float = 60.0, encode: Callable[[int, Any], bytes] = answer,
        decode: Callable[[Bytes], Any] | None = None,
    ) -> None:  # fmt: skip
        """Raises LinkError when refused, or when there is no connection after `timeout` seconds."""
        self.rank, self.epoch, self.reply_timeout = invitation.rank, invitation.epoch, reply_timeout
        self.refused: Counter[str] = Counter()
        self._encode = encode
        chunk = invitation.chunk_bytes
        self._stream = FrameStream(self.epoch, "the driver", decode or _either, chunk_bytes=chunk, window=WINDOW)
        self._heard: deque[tuple[int, Any]] = deque()
        self._fault: LinkError | None = None
        self._connected = self._receiving = self._woken = False
        self._end = End(zmq.DEALER, chunk, heartbeat or invitation.heartbeat)
        socket = self._end.socket
        introduce(socket, invitation.driver_key, invitation.pair)
        socket.setsockopt(zmq.IPV6, int("[" in invitation.address))
        socket.connect(invitation.address)
        try:
            self._await_connection(invitation.address, timeout)
        except BaseException:
            self._end.close()
            raise
        self._put(self._stream.header(Kind.HELLO), NOTHING)

    def _await_connection(self, address: str, timeout: float) -> None:
        until = time.monotonic() + timeout
        while not self._connected:
            left = until - time.monotonic()
            if left <= 0:
                raise LinkError(
                    f"rank {self.rank} got no connection to {address} in {timeout:g} s: nobody listens there, or its "
                    "key is another deployment's"
                )
            self._end.wait(left)
            self._take_in()
            if self._fault is not None:
                raise self._fault

    def receive(self, timeout: float | None) -> tuple[int, Any] | None:
        """The next command and its number. None after `timeout` seconds or a `wake`.

        A command that can't be read is answered with Failed here, for every command is answered. Raises ConnectionLost
        when the connection broke, MessageLost, Fenced, LinkClosed.
        """
        self._receiving = True
        try:
            return self._receive(None if timeout is None else time.monotonic() + timeout)
        finally:
            self._receiving = False

    def _receive(self, deadline: float | None) -> tuple[int, Any] | None:
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
            if self._woken:
                self._woken = False
                return None
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._end.wait(left)

    def wake(self) -> None:
        """Make `receive` (this one, or the next) return None. Any thread."""
        self._woken = True
        self._end.ring()

    def beat(self) -> None:
        """ZeroMQ's own thread says that this process runs. Raises ConnectionLost where the driver is out of reach: who
        computes doesn't look."""
        self._take_in()
        if self._receiving and (self._heard or self._fault is not None):
            self._end.ring()
        if isinstance(self._fault, ConnectionLost):
            raise self._fault

    def reply(self, number: int, reply: Any) -> None:
        """Answer command `number`. A reply that can't be sent goes as Failed. Raises PeerLags or ConnectionLost when
        the driver takes nothing; Fenced, LinkClosed."""
        data = self._encode(self.rank, reply)
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
                    self._put(self._stream.header(Kind.BYE), NOTHING)
                self._fault = LinkClosed(f"rank {self.rank} closed its end", self.rank)
                self._end.close()

    # -- inside

    def _put(self, header: bytes, payload: memoryview) -> None:
        try:
            self._end.socket.send_multipart([header, payload], zmq.NOBLOCK, copy=len(payload) < 65536)
        except zmq.ZMQError as e:
            self._fault = self._fault or ConnectionLost(f"the connection to the driver broke: {e}", DRIVER)

    def _take_in(self) -> None:
        end = self._end
        with end.lock:
            if end.closed:
                return
            events = end.events()  # first: what the driver said before the connection ended counts
            while (frames := end.frames()) is not None:
                try:
                    self._on(frames)
                except FrameDropped as e:
                    self.refused[e.reason] += 1
                except LinkError as e:
                    self._fault = self._fault or e
            for event in events:
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected = True
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._fault = LinkError(f"the driver refused the key of rank {self.rank}", self.rank)
                elif event == zmq.EVENT_DISCONNECTED and self._connected and self._fault is None:
                    self._fault = ConnectionLost("the connection to the driver broke", DRIVER)

    def _on(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 2:
            raise FrameDropped("malformed")
        header, payload = (frame.buffer for frame in frames)
        kind, found = self._stream.take(header, payload)
        if kind is Kind.FENCE:
            raise Fenced(f"epoch {self.epoch} is over")
        if kind is Kind.BYE:
            raise LinkClosed("the driver closed the link", DRIVER)
        if found is not None:
            self._heard.append(found)
        if self._stream.owes_credit():
            self._put(self._stream.header(Kind.CREDIT), NOTHING)

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
            self._end.wait(min(LOOK, self.reply_timeout - waited))


def _either(data: Bytes) -> Command | CodecError:
    try:
        return decode_command(data)
    except CodecError as e:
        return e
