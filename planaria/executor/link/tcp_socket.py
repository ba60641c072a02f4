"""What both ends of a TCP link share: a ZeroMQ socket with its events, used under a lock, and a wait that any thread
can end. Connections are kept alive, and given up, by ZeroMQ's own thread."""

from __future__ import annotations

import contextlib
import os
import select
import threading

import zmq
from zmq.utils.monitor import parse_monitor_message

from planaria.executor.link.keys import keep_alive

CHUNK_BYTES = 1 << 18
WINDOW = 32  # chunks under way to one peer
NOTHING = memoryview(b"")
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
)  # fmt: skip


class End:
    """kind: of ZeroMQ socket. heartbeat: seconds without a sign of life after which a connection is dead."""

    def __init__(self, kind: int, chunk_bytes: int, heartbeat: float) -> None:
        self.context = zmq.Context()
        self.context.setsockopt(zmq.BLOCKY, 0)
        self.socket: zmq.Socket[bytes] = self.context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, 0), (zmq.RCVHWM, 4 * WINDOW), (zmq.LINGER, 500), (zmq.MAXMSGSIZE, 2 * chunk_bytes),
            (zmq.HANDSHAKE_IVL, 10_000), (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 1000),
        ):  # fmt: skip
            self.socket.set(option, value)
        keep_alive(self.socket, heartbeat)
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
        """End the wait that is on, or the next. Any thread, also while another closes this: then the descriptor may be
        somebody else's already."""
        with self.lock, contextlib.suppress(BlockingIOError):  # a full pipe ends it just as well
            if not self.closed:
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


def bracketed(host: str) -> str:
    """For an endpoint's text."""
    return f"[{host}]" if ":" in host else host
