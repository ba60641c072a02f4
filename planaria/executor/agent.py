"""A node's agent: starts, watches and ends this node's ranks for a driver on another node.

It ends, and its ranks with it, when the driver says so or its connection ends. Ranks are children of this process, so
they end with it also when it is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from planaria.config.options import EngineConfig, ParallelConfig
from planaria.config.secret import deployment_secret
from planaria.env import host_ip
from planaria.errors import CapacityError, PlanariaError, RanksDiffer
from planaria.executor import node_messages as messages
from planaria.executor.boot import RankBoot
from planaria.executor.launcher.nodes import JOIN_TIMEOUT, LocalLauncher, what_must_agree
from planaria.executor.launcher.process import ProcessLauncher
from planaria.executor.link.faults import LinkClosed, LinkError, PeerLost
from planaria.executor.link.keys import Invitation, Keys
from planaria.executor.link.tcp_port import TcpPort
from planaria.executor.link.tcp_socket import CHUNK_BYTES, bracketed
from planaria.executor.node_messages import (
    AllEnded,
    End,
    Ended,
    FromAgent,
    Here,
    Refused,
    Replace,
    Run,
    Start,
    Started,
    Trouble,
    Welcome,
)
from planaria.executor.patience import Patience
from planaria.node import node_name, own_address, resolve_host
from planaria.processes import set_title

logger = logging.getLogger("planaria.agent")

CONNECT = 2.0  # seconds of one attempt
WELCOME_TIMEOUT = 5.0  # seconds for the driver's first answer


class _Told(Exception):
    """A signal asked this process to end."""


def node_agent(config: EngineConfig, module: str) -> NodeAgent:
    """Of this node; its ranks run `module`. Raises ConfigError for a secret that is missing or bad."""

    def adapt(boot: RankBoot) -> RankBoot:
        own = msgspec.structs.replace(boot.config, checkpoint=config.checkpoint)  # the same model, where it is here
        return msgspec.structs.replace(boot, config=own)

    return NodeAgent(
        config.parallel, lambda ranks, address: ProcessLauncher(module, ranks, address), adapt,
        deployment_secret(config.parallel), what_must_agree(config),
    )  # fmt: skip


class NodeAgent:
    """make_local(ranks, address) gives the launcher; adapt(boot) makes a boot fit this node (its own model folder);
    same: what must be equal on all nodes."""

    def __init__(
        self, parallel: ParallelConfig, make_local: Callable[[Sequence[int], str], LocalLauncher],
        adapt: Callable[[RankBoot], RankBoot], secret: bytes, same: Mapping[str, str], *,
        join_timeout: float = JOIN_TIMEOUT,
    ) -> None:  # fmt: skip
        self.parallel, self.make_local, self.adapt, self.same = parallel, make_local, adapt, dict(same)
        self.join_timeout = join_timeout
        self.local: LocalLauncher | None = None
        self.address = ""
        self._keys = Keys.derive(secret, parallel.nnodes - 1, messages.PURPOSE)
        self._lock = threading.Lock()  # watchers of ranks report too
        self._told: set[int] = set()
        self._port: TcpPort | None = None

    def run(self) -> int:
        """Exit code 0 when the driver or a signal ended it, 1 when the connection broke. Raises CapacityError (no
        driver came), RanksDiffer. Called from the main thread."""
        before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
        set_title("agent", node=self.parallel.node_rank)
        last = "it has ended"
        try:
            self._port = self._connect()
            self._say(
                Here(self.parallel.node_rank, node_name(), self.address, os.getpid(), self.same)
            )
            item = self._port.receive(WELCOME_TIMEOUT)
            if item is None:
                raise CapacityError(
                    f"node 0 doesn't take this node: another process is node {self.parallel.node_rank} already; give "
                    "each node its own --node-rank"
                )
            while True:
                if item is not None:
                    self._obey(item[1])
                item = self._port.receive(None)
        except _Told as e:
            logger.info("node %d ends: %s", self.parallel.node_rank, e)
            last = f"it was ended by {e}"
            return 0
        except LinkClosed:
            logger.info("node 0 has ended: so does this one")
            return 0
        except PeerLost as e:
            logger.error("node %d ends: %s", self.parallel.node_rank, e)
            return 1
        finally:
            for number in before:
                signal.signal(number, signal.SIG_IGN)
            if self.local is not None:
                self.local.kill()
            self._say(Trouble(last))
            if self._port is not None:
                self._port.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _connect(self) -> TcpPort:
        parallel = self.parallel
        patience = Patience(logger.info, self.join_timeout)
        where = f"{parallel.master_addr} port {parallel.master_port}"
        while True:
            patience.tell(f"node {parallel.node_rank} of {parallel.nnodes}: waiting for node 0 at {where}")
            host = resolve_host(parallel.master_addr)
            invitation = Invitation(
                f"tcp://{bracketed(host)}:{parallel.master_port}", self._keys.driver.public,
                self._keys.ranks[parallel.node_rank - 1], parallel.node_rank - 1, 0, CHUNK_BYTES,
            )  # fmt: skip
            try:
                port = TcpPort.connect(
                    invitation, timeout=CONNECT, heartbeat=parallel.heartbeat_timeout,
                    encode=messages.encode_from_agent, decode=messages.decode_to_agent,
                )  # fmt: skip
            except LinkError as e:
                if patience.over:
                    raise CapacityError(f"no node 0 at {where} in {patience.waited:.0f} s: {e}") from None
                continue
            self.address = host_ip() or own_address(host)
            return port

    def _obey(self, message: Any) -> None:
        match message:
            case Start():
                self.local = self.make_local(message.ranks, self.address)
                self.local.on_exit = self._on_exit
                self._say(Started(tuple(self.local.start())))
            case Replace():
                assert self.local is not None
                self._told |= set(message.ranks)  # their ends are no news
                places = self.local.replace(message.ranks)
                self._told -= set(message.ranks)
                self._say(Started(tuple(places)))
            case Run():
                assert self.local is not None
                self.local.run([self.adapt(RankBoot.decode(data)) for data in message.boots])
            case End():
                if self.local is not None:
                    if message.kill:
                        self.local.kill()
                    else:
                        self.local.close()
                self._say(AllEnded())
            case Welcome():
                logger.info("node %d of %d: joined node 0", self.parallel.node_rank, self.parallel.nnodes)
            case Refused():
                raise RanksDiffer(message.why)

    def _on_exit(self) -> None:
        """In a watcher's thread."""
        assert self.local is not None
        for rank, how in self.local.lost().items():
            if rank not in self._told:
                self._told.add(rank)
                logger.error("rank %d %s", rank, how)
                self._say(Ended(rank, how))

    def _say(self, message: FromAgent) -> None:
        """To the driver, if it still hears."""
        if self._port is not None:
            try:
                with self._lock:
                    self._port.reply(0, message)
            except PlanariaError:
                logger.debug("the driver did not hear %s", message)


def _stop(number: int, frame: object) -> None:
    raise _Told(signal.Signals(number).name)
