"""An engine in a process of its own: `python -m planaria.engine_process ADDRESS PARENT LEVEL` (its parent's pid, the
level of its log), its configuration on standard input.

It binds nothing on a network: ADDRESS is an ipc:// path in a folder only this user may enter. It ends when its
parent says so or ends, and leaves signals to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback

import msgspec
import zmq

from planaria.build import build_loop
from planaria.config.options import EngineConfig
from planaria.errors import CapacityError, ModelError, PlanariaError, UserError
from planaria.logs import setup_logging
from planaria.processes import die_with_parent, leave_signals_to_parent, set_title
from planaria.types import Delta
from planaria.wire import Dead, FromEngine, Output, Recovery, Submit, ToEngine

logger = logging.getLogger("planaria.engine")

MAX_BATCH = 1024  # messages taken in between two steps
LOOK_MS = 1000  # between looks at ranks while nothing is to be done


class Port:
    """The engine's end of the socket: who asked for what, and typed messages both ways."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.bind(address)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.bell, zmq.POLLIN)
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(ToEngine)
        self.clients: list[bytes] = []
        self.owner: dict[str, bytes] = {}

    def hello(self) -> None:
        """Wait for the first client's greeting."""
        self.clients.append(self.socket.recv_multipart()[0])

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
            if not payload:
                if client not in self.clients:
                    self.clients.append(client)
                continue
            message = self.decoder.decode(payload)
            if isinstance(message, Submit):
                self.owner[message.id] = client
            messages.append(message)
        return messages

    def send(self, message: FromEngine) -> None:
        """To every client; of an Output, each gets its own requests' deltas."""
        if isinstance(message, Output):
            parts: dict[bytes, list[Delta]] = {client: [] for client in self.clients}
            for delta in message.deltas:
                parts[self.owner[delta.request_id]].append(delta)
                if delta.finish is not None:
                    del self.owner[delta.request_id]
            for client, deltas in parts.items():
                self._send(client, Output(deltas, message.stats))
            return
        for client in self.clients:
            self._send(client, message)

    def wake(self) -> None:
        """End a wait in `receive`. Any thread."""
        os.eventfd_write(self.bell, 1)

    def _send(self, client: bytes, message: FromEngine) -> None:
        self.socket.send_multipart([client, self.encoder.encode(message)])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def main() -> int:
    """Exit code 0 after Shutdown, 1 when the engine died or could not start."""
    address, parent, level = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    die_with_parent(parent)
    setup_logging(level)
    leave_signals_to_parent()
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    set_title("engine", server=parent, epoch=0)
    port = Port(address)
    port.hello()

    def say(message: FromEngine) -> None:
        port.send(message)
        if isinstance(message, Recovery) and message.seconds:
            set_title("engine", server=parent, epoch=message.epoch)

    loop = build_loop(config, say)
    loop.on_loss = port.wake
    began = time.perf_counter()
    try:
        facts = loop.start()
    except PlanariaError as e:
        kinds = ((ModelError, "model"), (UserError, "user"), (CapacityError, "capacity"))
        port.send(Dead(next((kind for error, kind in kinds if isinstance(e, error)), "error"), str(e)))
        port.close()
        return 1
    logger.debug("engine ready after %.2f s", time.perf_counter() - began)
    port.send(facts)
    try:
        # A rank's end ends the wait for messages; that one is stopped shows only to who looks.
        idle = LOOK_MS if loop.watches() else -1
        while not loop.stopping:
            for message in port.receive(0 if loop.busy() else idle):
                loop.handle(message)
            if not loop.turn():
                loop.check()
    except Exception as e:
        # A mistake in the engine itself. Its front end has the requests and may start another: they aren't answered.
        logger.exception("the engine failed")
        port.send(Dead("crash", f"{type(e).__name__}: {e}", traceback.format_exc()))
        loop.core, loop.crew.broken = None, True
        return 1
    finally:
        loop.close()
        port.close()
    return 1 if loop.dead is not None else 0


if __name__ == "__main__":
    sys.exit(main())
