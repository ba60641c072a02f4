"""An engine that serves, and where front ends reach it: a socket with typed messages, on this machine or, with keys,
from other nodes.

Several may come, at any time: each hears what an engine says of itself, and of its own sequences. One that has ended is
named by another (`Gone`), since a socket doesn't tell.

One that reads more slowly than the engine computes neither stops it nor fills its memory: what such a client has no
room for waits here, the deltas of any number of steps as one for each sequence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from planaria.build import build_loop
from planaria.config.options import EngineConfig
from planaria.errors import CapacityError, ModelError, PlanariaError, UserError
from planaria.executor.link.keys import HEARTBEAT, Keys, guard, keep_alive
from planaria.hosts.device_memory import Keepers
from planaria.hosts.weights import WeightsMemory
from planaria.node import Memories, ProcessGone
from planaria.processes import set_title
from planaria.types import Delta
from planaria.wire import (
    Cancel,
    Dead,
    EngineFacts,
    FromEngine,
    Gone,
    Leaving,
    Output,
    Recovery,
    Slept,
    Submit,
    ToEngine,
    WeightsUpdated,
)

logger = logging.getLogger("planaria.engine")

LOOK_MS = 1000  # between looks at ranks while nothing is to be done
MAX_BATCH = 1024  # messages taken in between two steps
ROOM = 64  # messages on their way to a client, at each end of the connection
RETRY_MS = 5  # between attempts to send what waits, while there is nothing else to do
LAST_WORDS = 5.0  # seconds that a client that lives gets, at the end, to make room for what waits, and to read it
STATS_EVERY = 0.02  # seconds between two snapshots for a client that none of a step's deltas is for


class _Steps:
    """An Output of several steps: `stats` of the last one, a delta for each sequence and what follows its end, or is of
    other weights."""

    def __init__(self, output: Output) -> None:
        self._deltas: list[Delta] = []
        self._open: dict[str, Delta] = {}
        self.take(output)

    def take(self, output: Output) -> None:
        """Another step."""
        self._stats = output.stats
        for delta in output.deltas:
            known = self._open.get(delta.request_id)
            follows = known is not None and delta.index == known.index + len(known.tokens)
            if known is None or not follows or (delta.tokens and delta.weights != known.weights):
                known = self._open[delta.request_id] = msgspec.structs.replace(delta, tokens=list(delta.tokens))
                known.logprobs = list(delta.logprobs) if delta.logprobs is not None else None
                self._deltas.append(known)
            else:
                known.tokens += delta.tokens
                known.finish, known.stop_reason, known.error = delta.finish, delta.stop_reason, delta.error
                if delta.logprobs is not None:
                    known.logprobs = (known.logprobs or []) + delta.logprobs
            if delta.finish is not None:
                del self._open[delta.request_id]

    def output(self) -> Output:
        return Output(self._deltas, self._stats)


class Port:
    """The engine's end of the socket: who asked for what, and typed messages both ways. keys: who may come, where the
    address is one that others reach."""

    def __init__(self, address: str, keys: Keys | None = None, heartbeat: float = HEARTBEAT) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        if keys is not None:
            guard(self.context, self.socket, keys)
            keep_alive(self.socket, heartbeat)
        self.socket.setsockopt(zmq.SNDHWM, ROOM)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what there is no room for would be dropped
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, round(LAST_WORDS * 1000))
        self.socket.bind(address)
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self.bell, zmq.POLLIN)
        self.encoder = msgspec.msgpack.Encoder()
        self.on_epoch: Callable[[int], None] = lambda epoch: None  # ranks go on in another
        self.decoder = msgspec.msgpack.Decoder(ToEngine)
        self.clients: dict[bytes, float] = {}  # and when each last got a snapshot
        self.waiting: dict[bytes, deque[bytes | _Steps | FromEngine]] = {}  # what a client had no room for; never empty
        self.gone: set[bytes] = set()
        self.heard = time.monotonic()  # when a client last said something
        self.owner: dict[str, bytes] = {}
        self.facts: EngineFacts | None = None  # that were sent, and are true now
        self.recovery: Recovery | None = None  # that is under way
        self.slept: Slept | None = None  # it sleeps

    def hello(self) -> None:
        """Wait for the first client's greeting."""
        self._greet(self.socket.recv_multipart()[0])

    def _greet(self, client: bytes) -> None:
        """Another client: it is told what those before it know."""
        if client in self.clients:
            return
        self.clients[client] = 0.0
        for known in (self.facts, self.recovery, self.slept):
            if known is not None:
                self._send(client, known)

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """What has come in; waits up to `timeout_ms` (-1: for ever) for the first message, or a `wake`."""
        messages: list[ToEngine] = []
        if self.waiting and self._retry():
            timeout_ms = min(timeout_ms, RETRY_MS) if timeout_ms >= 0 else RETRY_MS
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
        self.waiting.pop(client, None)
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
            if message.seconds:
                self.on_epoch(message.epoch)
            if message.seconds and self.facts is not None:
                self.facts = msgspec.structs.replace(
                    self.facts, layout=message.layout, ranks=message.pids, places=message.places
                )
        elif isinstance(message, Slept):
            self.slept = message if message.level is not None else None
        elif isinstance(message, WeightsUpdated) and self.facts is not None:
            self.facts = msgspec.structs.replace(self.facts, weights_number=message.number)
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
        """Never waits."""
        waiting = self.waiting.get(client)
        if waiting is None:
            payload = self.encoder.encode(message)
            if not self._sent(client, payload):
                self.waiting[client] = deque([payload])
        elif not isinstance(message, Output):
            waiting.append(message)
        elif isinstance(waiting[-1], _Steps):
            waiting[-1].take(message)
        else:
            waiting.append(_Steps(message))

    def _sent(self, client: bytes, payload: bytes) -> bool:
        """False: there is no room for it yet."""
        try:
            self.socket.send_multipart([client, payload], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:  # one that has ended hears nothing more
                raise
        return True

    def _retry(self) -> bool:
        """Send what clients have room for now. Does anything still wait?"""
        for client, waiting in list(self.waiting.items()):
            while waiting:
                first = waiting[0]
                if not isinstance(first, bytes):
                    message = first.output() if isinstance(first, _Steps) else first
                    first = waiting[0] = self.encoder.encode(message)
                if not self._sent(client, first):
                    break
                waiting.popleft()
            else:
                del self.waiting[client]
        return bool(self.waiting)

    def close(self) -> None:
        until = time.monotonic() + LAST_WORDS
        while self.waiting and self._retry() and time.monotonic() < until:
            time.sleep(RETRY_MS / 1000)
        self.socket.close()
        self.context.term()


def serve(
    config: EngineConfig, port: Port, told: threading.Event, *, again: bool = False, given: Memories | None = None,
    **title: object,
) -> int:  # fmt: skip
    """Serve those who come to `port` until they say Shutdown. told: set when this process was asked to end. again,
    given: see build_loop."""
    set_title("engine", **title, epoch=0)
    port.hello()

    port.on_epoch = lambda epoch: set_title("engine", **title, epoch=epoch)
    began = time.perf_counter()
    try:
        loop = build_loop(config, port.send, again=again, given=given)
        loop.on_loss = port.wake
        facts = loop.start()
    except PlanariaError as e:
        kinds = ((ModelError, "model"), (UserError, "user"), (CapacityError, "capacity"), (ProcessGone, "crash"))
        port.send(Dead(next((kind for error, kind in kinds if isinstance(e, error)), "error"), str(e)))
        port.close()
        return 1
    logger.debug("engine ready after %.2f s", time.perf_counter() - began)
    set_title("engine", **title, epoch=0)  # Ray may have given it a name meanwhile
    port.send(facts)
    try:
        # A rank's end ends the wait for messages; that one is stopped shows only to who looks.
        idle = LOOK_MS if loop.watches() else -1
        while not loop.stopping:
            for message in port.receive(0 if loop.busy() else idle):
                loop.handle(message)
            if told.is_set():
                told.clear()
                port.send(Leaving())
            if not loop.step():
                loop.check()
    except Exception as e:
        # A mistake in the engine itself. Its front end has the requests and may start another: they aren't answered.
        logger.exception("the engine failed")
        port.send(Dead("crash", f"{type(e).__name__}: {e}", traceback.format_exc()))
        loop.core, loop.gang.broken, loop.gang.launcher.followed = None, True, True
        return 1
    finally:
        over = loop.stopping and not loop.gang.launcher.followed
        loop.close()
        if over and given is not None and given.weights is not None:
            with contextlib.suppress(ProcessGone):  # whose memory it is ends, too
                keepers = Keepers(given.keepers) if given.keepers else None
                WeightsMemory.of(given.weights, keepers).forget(config.parallel.data_parallel_index)
        port.close()
    return 1 if loop.dead is not None else 0
