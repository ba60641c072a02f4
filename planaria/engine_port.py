"""Where front ends reach an engine: a socket with typed messages, on this machine or, with keys, from other nodes.

Several may come, at any time: each hears what an engine says of itself, and of its own sequences. One that has ended is
named by another (`Gone`), since a socket doesn't tell.
"""

from __future__ import annotations

import contextlib
import os
import time

import msgspec
import zmq

from planaria.executor.link.gatekeeper import guard, keep_alive
from planaria.executor.link.keys import HEARTBEAT, Keys
from planaria.types import Delta
from planaria.wire import Cancel, EngineFacts, FromEngine, Gone, Output, Recovery, Submit, ToEngine

MAX_BATCH = 1024  # messages taken in between two steps
STATS_EVERY = 0.02  # seconds between two snapshots for a client that none of a step's deltas is for


class Port:
    """The engine's end of the socket: who asked for what, and typed messages both ways. keys: who may come, where the
    address is one that others reach."""

    def __init__(self, address: str, keys: Keys | None = None, heartbeat: float = HEARTBEAT) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        if keys is not None:
            guard(self.context, self.socket, keys)
            keep_alive(self.socket, heartbeat)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.bind(address)
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.bell, zmq.POLLIN)
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(ToEngine)
        self.clients: dict[bytes, float] = {}  # and when each last got a snapshot
        self.gone: set[bytes] = set()
        self.heard = time.monotonic()  # when a client last said something
        self.owner: dict[str, bytes] = {}
        self.facts: EngineFacts | None = None  # that were sent, and are true now
        self.recovery: Recovery | None = None  # that is under way

    def hello(self) -> None:
        """Wait for the first client's greeting."""
        self._greet(self.socket.recv_multipart()[0])

    def _greet(self, client: bytes) -> None:
        """Another client: it is told what those before it know."""
        if client in self.clients:
            return
        self.clients[client] = 0.0
        for known in (self.facts, self.recovery):
            if known is not None:
                self._send(client, known)

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """What has come in; waits up to `timeout_ms` (-1: for ever) for the first message, or a `wake`."""
        messages: list[ToEngine] = []
        if not self.poller.poll(timeout_ms):
            return messages
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        for _ in range(MAX_BATCH):
            try:
                client, payload = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.heard = time.monotonic()
            if not payload:
                self._greet(client)
                continue
            message = self.decoder.decode(payload)
            if isinstance(message, Gone):
                messages += self._forget(message.client.encode())
                continue
            if isinstance(message, Submit):
                if client in self.gone:  # it was sent before, and took longer
                    continue
                self.owner[message.id] = client
            messages.append(message)
        return messages

    def _forget(self, client: bytes) -> list[ToEngine]:
        self.gone.add(client)
        self.clients.pop(client, None)
        return [Cancel(id) for id, owner in self.owner.items() if owner == client]

    def send(self, message: FromEngine) -> None:
        """To every client; of an Output, each gets its own requests' deltas."""
        if isinstance(message, Output):
            self._send_output(message)
            return
        if isinstance(message, EngineFacts):
            self.facts = message
        elif isinstance(message, Recovery):
            self.recovery = None if message.seconds else message
            if message.seconds and self.facts is not None:
                self.facts = msgspec.structs.replace(
                    self.facts, layout=message.layout, ranks=message.pids, places=message.places
                )
        for client in self.clients:
            self._send(client, message)

    def _send_output(self, message: Output) -> None:
        """A client that has no part in it gets the numbers alone, and not of every step."""
        owner, now = self.owner, time.monotonic()
        parts: dict[bytes, list[Delta]] = {client: [] for client in self.clients}
        for delta in message.deltas:
            client = owner.pop(delta.request_id) if delta.finish is not None else owner[delta.request_id]
            if client in parts:  # else it has ended
                parts[client].append(delta)
        busy = len(parts) > 1 and message.stats.running + message.stats.waiting > 0
        for client, deltas in parts.items():
            if deltas or not busy or now - self.clients[client] >= STATS_EVERY:
                self.clients[client] = now
                self._send(client, Output(deltas, message.stats))

    def wake(self) -> None:
        """End a wait in `receive`. Any thread."""
        os.eventfd_write(self.bell, 1)

    def _send(self, client: bytes, message: FromEngine) -> None:
        self.socket.send_multipart([client, self.encoder.encode(message)])

    def close(self) -> None:
        self.socket.close()
        self.context.term()
