"""An engine in a child process, used from one asyncio event loop. Implements `planaria.wire.EngineClient`.

Every sink hears the end of its sequence, also when the engine dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from planaria.config.options import EngineConfig
from planaria.errors import CapacityError, EngineDead, ModelError, PlanariaError, UserError
from planaria.logs import current_level
from planaria.node import node_name, resident_bytes
from planaria.types import Delta, FinishReason
from planaria.wire import (
    Cancel,
    Dead,
    EngineFacts,
    EngineStats,
    FromEngine,
    Output,
    Phase,
    Processes,
    ProcessInfo,
    Progress,
    Report,
    Shutdown,
    Sink,
    StartUpNews,
    Submit,
    ToEngine,
)

logger = logging.getLogger("planaria.server")

LAST_WORDS = 0.5  # seconds a message of an ended process may still take
REPORT_TIMEOUT = 2.0  # seconds an engine gets to say which processes there are; between two steps it looks
EXIT_TIMEOUT = 10.0  # seconds an engine gets to end by itself


def error_of(dead: Dead) -> PlanariaError:
    """The exception that a message of the engine's end stands for."""
    kinds: dict[str, type[PlanariaError]] = {"model": ModelError, "user": UserError, "capacity": CapacityError}
    return kinds.get(dead.kind, EngineDead)(dead.message)


class ProcessEngineClient:
    """Start with `await start()`; `on_progress` hears how the start goes."""

    def __init__(self, config: EngineConfig, on_progress: Callable[[StartUpNews], None] | None = None) -> None:
        self.config, self.on_progress = config, on_progress
        self.facts: EngineFacts | None = None
        self.stats = EngineStats()
        self.last_progress = time.monotonic()
        self.dead: Dead | None = None
        self.process: asyncio.subprocess.Process | None = None
        self._sinks: dict[str, Sink] = {}
        self._ready = asyncio.Event()
        self._died = asyncio.Event()
        self._closing = False
        self._reports: list[asyncio.Future[list[ProcessInfo]]] = []  # who waits for the next one
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._folder = ""
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    async def start(self) -> None:
        """Start the process and begin to listen; `ready` says when it can admit."""
        self._folder = tempfile.mkdtemp(prefix="planaria-")  # mode 0700
        address = f"ipc://{self._folder}/engine"
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "planaria.engine_process", address, str(os.getpid()), current_level(),
            stdin=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.msgpack.encode(self.config))
        self.process.stdin.close()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0)):
            self._socket.setsockopt(option, value)
        self._socket.connect(address)
        await self._socket.send(b"")
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def ready(self) -> EngineFacts:
        await self._ready.wait()
        if self.dead is not None:
            raise error_of(self.dead)
        assert self.facts is not None
        return self.facts

    def submit(self, message: Submit, sink: Sink) -> None:
        if self.dead is not None:
            sink(Delta(message.id, len(message.output), [], FinishReason.ERROR, error=self.dead.message))
            return
        if not self._sinks:
            self.last_progress = time.monotonic()
        self._sinks[message.id] = sink
        self._send(message)

    def cancel(self, request_id: str) -> None:
        if self._sinks.pop(request_id, None) is not None and self.dead is None:
            self._send(Cancel(request_id))

    async def report(self) -> list[ProcessInfo]:
        """All of the engine's processes; only its own, and what it does, where it can't answer."""
        assert self.process is not None
        if self.dead is not None:
            state = "ended"
        elif self.facts is None:
            state = "loading"  # it listens when it is ready
        else:
            waiting: asyncio.Future[list[ProcessInfo]] = asyncio.get_running_loop().create_future()
            self._reports.append(waiting)
            self._send(Report())
            try:
                return await asyncio.wait_for(waiting, REPORT_TIMEOUT)
            except TimeoutError:
                self._reports.remove(waiting)
                state = f"silent for {REPORT_TIMEOUT:g} s"
        pid = self.process.pid
        return [ProcessInfo("engine", None, {}, pid, node_name(), self.stats.epoch, state, resident_bytes(pid))]

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        # With no high-water mark a send never waits, so the future is done at once.
        self._socket.send(self._encoder.encode(message))

    async def _listen(self) -> None:
        assert self._socket is not None
        while True:
            message = self._decoder.decode(await self._socket.recv())
            match message:
                case Output():
                    if message.stats.step != self.stats.step or not self._sinks:
                        self.last_progress = time.monotonic()
                    self.stats = message.stats
                    for delta in message.deltas:
                        self._deliver(delta)
                case EngineFacts():
                    # Both ends are connected, so nothing needs the socket's name; a kill leaves no folder behind.
                    shutil.rmtree(self._folder, ignore_errors=True)
                    self.facts = message
                    self._ready.set()
                case Progress() | Phase():
                    if self.on_progress is not None:
                        self.on_progress(message)
                case Processes():
                    self._on_processes(message)
                case Dead():
                    self._die(message)

    def _on_processes(self, message: Processes) -> None:
        for waiting in self._reports:
            if not waiting.done():
                waiting.set_result(message.processes)
        self._reports = []

    def _deliver(self, delta: Delta) -> None:
        sink = self._sinks.get(delta.request_id)
        if sink is None:
            return
        if delta.finish is not None:
            del self._sinks[delta.request_id]
        sink(delta)

    def _die(self, dead: Dead) -> None:
        if self.dead is None:
            self.dead = dead
            self._ready.set()
            self._died.set()
        for request_id, sink in list(self._sinks.items()):
            del self._sinks[request_id]
            sink(Delta(request_id, 0, [], FinishReason.ERROR, error=dead.message))

    async def _watch(self) -> None:
        """The process's end, if it says nothing itself."""
        assert self.process is not None
        code = await self.process.wait()
        if not self._closing:
            # What it said before it ended is the better reason, and may not have been read yet.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._died.wait(), LAST_WORDS)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._die(Dead("error", f"the engine process {self.process.pid} ended ({how})"))

    async def close(self) -> None:
        """End the engine and wait for it. Idempotent."""
        if self._closing or self.process is None:
            return
        self._closing = True
        if self.process.returncode is None:
            if self.facts is None:  # while it loads it hears nothing, and it has nobody to answer
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
            else:
                self._send(Shutdown())
            try:
                await asyncio.wait_for(self.process.wait(), EXIT_TIMEOUT)
            except TimeoutError:
                logger.warning("the engine process %d did not end in %.0f s: killed", self.process.pid, EXIT_TIMEOUT)
                self.process.kill()
                await self.process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._socket is not None and self._context is not None
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
