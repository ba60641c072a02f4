"""An engine in a process of its own, with the arguments ADDRESS LEVEL [again] (the level of its log; again: another
served before it); it is told its configuration.

It binds nothing on a network where ADDRESS is an ipc:// path, in a folder only this user may enter. A tcp:// address is
for a server on another node: it says the address when its port is known, and with the configuration come the keys of
who may come. It ends when its parent says so or ends. A SIGTERM is told to the server,
which takes what is open elsewhere and then says so; a terminal's Ctrl-C is the parent's alone.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from planaria import preload
from planaria.config.options import EngineConfig
from planaria.engine_port import Port, serve
from planaria.executor.link.keys import Keys
from planaria.executor.link.tcp_socket import bracketed
from planaria.hosts import child, forkserver
from planaria.logs import setup_logging
from planaria.node import Memories
from planaria.processes import leave_signals_to_parent


def main() -> int:
    """Exit code 0 after Shutdown, 1 when the engine died or could not start."""
    address, level, *again = child.begin()
    setup_logging(level)
    leave_signals_to_parent()
    given = next(child.hear())
    far = address.startswith("tcp:")
    keys: Keys | None = None
    if far:
        config, keys, memories = msgspec.msgpack.decode(given, type=tuple[EngineConfig, Keys, Memories])
    else:
        config, memories = msgspec.msgpack.decode(given, type=tuple[EngineConfig, Memories])
    if config.parallel.distributed_executor_backend == "mp" and (rank := forkserver.split(preload.of_a_rank(config))):
        return forkserver.run(rank)
    port = Port(address, keys, config.parallel.heartbeat_timeout) if far else Port(address)
    if far:
        child.say(port.address)
    told = threading.Event()

    def on_sigterm(number: int, frame: object) -> None:
        told.set()
        port.wake()

    signal.signal(signal.SIGTERM, on_sigterm)
    index = config.parallel.data_parallel_index
    name = {
        "agent" if far else "server": child.keeper(),
        **({"dp": index} if config.device.sharers > 1 or index else {}),
    }
    return serve(config, port, told, again=bool(again), given=memories, **name)


Orders = tuple[EngineConfig, Keys, str, str, Memories]


class RemoteEngine:
    """An engine on another node, in whatever process was made for it there: it hears its configuration, who may come,
    the host at which it is to listen, the level of its log and what memory it may have, and says the address."""

    def __init__(self, made: Callable[[Any], None], say: Callable[[str], None]) -> None:
        self.say, self.told = say, threading.Event()
        self.port: Port | None = None

    @property
    def silent(self) -> float:
        """Seconds since a front end said anything."""
        return time.monotonic() - self.port.heard if self.port is not None else 0.0

    def leave(self) -> None:
        """It was asked to end. Any thread."""
        self.told.set()
        if self.port is not None:
            self.port.wake()

    def hear(self, message: bytes) -> None:
        self.config, keys, host, level, self.memories = msgspec.msgpack.decode(message, type=Orders)
        setup_logging(level)
        self.port = Port(f"tcp://{bracketed(host)}:*", keys, self.config.parallel.heartbeat_timeout)

    def run(self) -> int:
        """As `main`."""
        assert self.port is not None
        self.say(self.port.address)
        parallel = self.config.parallel
        at: dict[str, Any] = {"dp": parallel.data_parallel_index, "local": parallel.data_parallel_rank_local}
        return serve(self.config, self.port, self.told, given=self.memories, **at)


if __name__ == "__main__":
    sys.exit(main())
