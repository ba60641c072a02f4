"""A node's agent for a server on another node: starts, watches and ends whole engines here, and this node's part of
engines that are on several nodes.

Engines are processes, children of this one, as ranks are of an engine: they end when the server says so, when the
connection to it breaks, and with this process. Told to end (SIGTERM), it passes that on to its engines; the server
takes what they have elsewhere and ends them, and only then it goes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from planaria.config.machine import accelerator_ids
from planaria.config.options import EngineConfig
from planaria.config.secret import deployment_secret
from planaria.env import environment, visible_devices
from planaria.executor import engine_messages as messages
from planaria.executor.engine_messages import (
    EndEngine,
    EngineEnded,
    LeavePart,
    Leaves,
    Listening,
    StartEngine,
    TakePart,
)
from planaria.executor.joining import Attendant, Told
from planaria.executor.launcher.nodes import JOIN_TIMEOUT, what_must_agree
from planaria.executor.launcher.process import EXIT_TIMEOUT, how_it_ended
from planaria.executor.link.tcp_socket import bracketed
from planaria.logs import current_level

logger = logging.getLogger("planaria.agent")

DRAIN_TIMEOUT = 60.0  # seconds engines that were told to end get for it
LOOK = 1.0  # seconds between looks at that


class _Process:
    """An engine's process, or one that has its ranks of this node. `ended(it)` is called from a thread, and with its
    address `listens(it, address)` before, where it tells one."""

    def __init__(
        self, module: str, said: bytes, devices: tuple[int, ...], ended: Callable[[_Process], None],
        listen: str = "", listens: Callable[[_Process, str], None] = lambda process, address: None, again: bool = False,
    ) -> None:  # fmt: skip
        self.code: int | None = None
        self.over = False  # nobody wants to hear of it any more
        hears, tells = os.pipe()
        try:
            address = [listen, str(tells)] if listen else []
            words = [*address, str(os.getpid()), current_level(), *(["again"] if again else [])]
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *words], stdin=subprocess.PIPE, pass_fds=[tells] if listen else [],
                env={**environment(), **visible_devices(devices)},
            )  # fmt: skip
        except BaseException:
            os.close(hears)
            raise
        finally:
            os.close(tells)
        self.pid = self.process.pid

        def watch() -> None:
            assert self.process.stdin is not None
            try:
                with self.process.stdin as stdin:
                    stdin.write(said)
            except OSError:
                logger.debug("process %d ended before it was told what it is", self.pid)
            with open(hears) as told:
                if line := told.readline().strip():
                    listens(self, line)
            self.code = self.process.wait()
            ended(self)

        threading.Thread(target=watch, name=f"process {self.pid}", daemon=True).start()

    def tell_end(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Also a stopped one, and wait for its end."""
        self.over = True
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


def engines_agent(config: EngineConfig, engine: str, part: str) -> EnginesAgent:
    """Of this node. Raises ConfigError for a secret that is missing or bad."""
    return EnginesAgent(config, engine, part, deployment_secret(config.parallel), what_must_agree(config))


class EnginesAgent(Attendant):
    """config: of the fleet, as this node's command has it. engine, part: modules that an engine, or a node of an
    engine, is run by. The rest is as Attendant's."""

    def __init__(
        self, config: EngineConfig, engine: str, part: str, secret: bytes, same: Mapping[str, str], *,
        join_timeout: float = JOIN_TIMEOUT,
    ) -> None:  # fmt: skip
        super().__init__(
            config.parallel, secret, messages.PURPOSE, same, join_timeout, messages.encode_from_node,
            messages.decode_to_node,
        )  # fmt: skip
        self.config, self.engine_module, self.part_module = config, engine, part
        self.engines: dict[int, tuple[int, _Process]] = {}  # number and process
        self.parts: dict[int, tuple[TakePart, _Process]] = {}
        self._news: queue.SimpleQueue[tuple[_Process, str]] = queue.SimpleQueue()  # and its address, or ""
        self._asked = ""  # the signal that asked this process to end
        self._until = 0.0  # when that is done without engines' ends; 0: they don't know of it yet

    def on_signal(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if self._asked or not self.engines or self.port is None:
            raise Told(name)
        self._asked = name
        self.port.wake()

    def alone(self) -> None:
        if self._asked:
            raise Told(self._asked)

    def told(self, message: Any) -> None:
        match message:
            case StartEngine():
                self._start(message)
            case EndEngine():
                number, process = self.engines.get(message.engine, (-1, None))
                if process is not None and number == message.number:
                    self._kill(message.engine)
            case TakePart():
                self._take_part(message)
            case LeavePart():
                if (part := self.parts.pop(message.engine, None)) is not None:
                    part[1].kill()

    def look_after(self) -> float | None:
        return LOOK if self._asked else None

    def look(self) -> None:
        while not self._news.empty():
            process, address = self._news.get()
            if not process.over:
                self._hear(process, address)
        if self._asked and not self.engines:
            raise Told(self._asked)
        if self._asked and not self._until:
            self._until = time.monotonic() + DRAIN_TIMEOUT
            self.say(Leaves())
            for _, process in self.engines.values():
                process.tell_end()
        elif self._asked and time.monotonic() >= self._until:
            raise Told(f"{self._asked}, and engines did not end in {DRAIN_TIMEOUT:.0f} s")

    def end(self, *, kill: bool) -> None:
        for engine in list(self.engines):
            self._kill(engine)
        until = time.monotonic() + (0.0 if kill else EXIT_TIMEOUT)  # they end with their engines
        for _, process in self.parts.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, until - time.monotonic()))
            process.kill()
        self.parts = {}

    # -- inside

    def _kill(self, engine: int) -> None:
        number, process = self.engines.pop(engine)
        process.kill()
        self.say(EngineEnded(engine, number, how_it_ended(process.process.returncode), False))

    def _start(self, asked: StartEngine) -> None:
        if asked.engine in self.engines:
            self._kill(asked.engine)
        config = self._own(asked.config, asked.seat)
        said = msgspec.msgpack.encode((config, asked.keys))
        try:
            process = _Process(
                self.engine_module, said, config.device.devices, self._ended,
                f"tcp://{bracketed(self.address)}:*", self._listens, asked.again,
            )  # fmt: skip
        except OSError as e:
            self.say(EngineEnded(asked.engine, asked.number, f"could not be started: {e}", False))
            return
        self.engines[asked.engine] = asked.number, process

    def _take_part(self, asked: TakePart) -> None:
        before = self.parts.get(asked.engine)
        if before is not None:
            if before[0] == asked and before[1].code is None:
                return
            before[1].kill()
        config = self._own(asked.config, asked.seat)
        try:
            process = _Process(self.part_module, msgspec.msgpack.encode(config), config.device.devices, self._ended)
        except OSError as e:
            logger.warning("this node's part of engine %d could not be started: %s", asked.engine, e)
            return
        self.parts[asked.engine] = asked, process

    def _own(self, config: bytes, seat: int) -> EngineConfig:
        """What is this node's: the model's folder, the secret's file, accelerators."""
        theirs = msgspec.msgpack.decode(config, type=EngineConfig)
        ranks = theirs.parallel.local_world_size
        devices = accelerator_ids()[seat * ranks : (seat + 1) * ranks] if theirs.device.device != "cpu" else []
        return msgspec.structs.replace(
            theirs, checkpoint=self.config.checkpoint,
            parallel=msgspec.structs.replace(theirs.parallel, secret_file=self.config.parallel.secret_file),
            device=msgspec.structs.replace(theirs.device, devices=tuple(devices)),
        )  # fmt: skip

    def _listens(self, process: _Process, address: str) -> None:
        """In a watcher's thread."""
        self._tell(process, address)

    def _ended(self, process: _Process) -> None:
        """In a watcher's thread."""
        self._tell(process, "")

    def _tell(self, process: _Process, address: str) -> None:
        self._news.put((process, address))
        if (port := self.port) is not None and not process.over:
            port.wake()

    def _hear(self, process: _Process, address: str) -> None:
        for engine, (number, mine) in list(self.engines.items()):
            if mine is process and address:
                self.say(Listening(engine, number, process.pid, address))
            elif mine is process:
                del self.engines[engine]
                code = process.process.returncode
                self.say(EngineEnded(engine, number, how_it_ended(code), code > 0))
        for engine, (asked, mine) in list(self.parts.items()):
            if mine is process:
                del self.parts[engine]
                code = process.process.returncode
                if code < 0:
                    logger.warning("this node's part of engine %d %s; it comes again", engine, how_it_ended(code))
                    self._take_part(asked)
