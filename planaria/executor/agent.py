"""A node's agent: starts, tells, watches and ends processes here for who is on the first node: an engine, whose ranks
they are, or a server, whose engines.

They are children of this process, so they end with it; and with who asked for them: when it says so, and when the
connection to it breaks, for it may have ended, or go on without this node. Then the agent comes again, for that one may
be back, or another in its place. Told to end (SIGTERM), it passes that on to engines; the server takes what they have
elsewhere and ends them, and only then it goes.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from planaria.config.machine import accelerator_ids, usable_cores
from planaria.config.options import ParallelConfig
from planaria.env import host_ip
from planaria.errors import CapacityError, PlanariaError, RanksDiffer
from planaria.executor import node_messages as messages
from planaria.executor.launcher.nodes import JOIN_TIMEOUT
from planaria.executor.link.faults import ConnectionLost, Fenced, LinkClosed, LinkError
from planaria.executor.link.keys import Invitation, Keys
from planaria.executor.link.tcp_port import TcpPort
from planaria.executor.link.tcp_socket import CHUNK_BYTES, bracketed
from planaria.executor.node_messages import (
    AllEnded,
    ChildNews,
    EndAll,
    Here,
    KillChild,
    Leaves,
    NodeRefused,
    Spawn,
    Tell,
    Trouble,
    Welcome,
)
from planaria.executor.patience import Patience
from planaria.hosts.local import HERE, LocalChild, LocalHost
from planaria.hosts.pool import EXIT_TIMEOUT, KILL_TIMEOUT
from planaria.node import home, node_name, own_address, resolve_host
from planaria.processes import set_title

logger = logging.getLogger("planaria.agent")

CONNECT = 2.0  # seconds of one attempt
WELCOME_TIMEOUT = 5.0  # seconds for the first answer
DRAIN_TIMEOUT = 60.0  # seconds engines that were told to end get for it
LOOK = 1.0  # seconds between looks at processes

Fit = Callable[[bytes], tuple[bytes, str]]  # makes what is told fit this node; and whom it makes of the process


class _Told(Exception):
    """A signal asked this process to end."""


class _Over(Exception):
    """The one that it worked for has ended, and no other will follow."""


class _Kept:
    """A process here, and what runs in it. name: of what it is, for people; stopped: as was said; heard: are its news
    told?"""

    name, stopped, heard = "", False, True

    def __init__(self, module: str) -> None:
        self.module = module
        self.child: LocalChild  # set when it is started


class Agent:
    """parallel: of this node; fits: by modules, that alone are started here; same: what must be equal on all nodes;
    drains: modules that are told to end before this does; forks: see LocalHost; join_timeout: seconds to wait for who
    is on the first node, at first and any later time."""

    def __init__(
        self, parallel: ParallelConfig, fits: Mapping[str, Fit], secret: bytes, same: Mapping[str, str], *,
        drains: Collection[str] = (), forks: Mapping[str, Sequence[str]] | None = None,
        join_timeout: float = JOIN_TIMEOUT,
    ) -> None:  # fmt: skip
        self.parallel, self.fits, self.same, self.drains = parallel, dict(fits), dict(same), drains
        self.join_timeout = join_timeout
        self.host = LocalHost(forks=forks)
        self.first = ""  # the first node's address
        self.port: TcpPort | None = None
        self.kept: dict[int, _Kept] = {}
        self._keys = Keys.derive(secret, parallel.nnodes - 1, messages.PURPOSE)
        self._lock = threading.Lock()  # what watches processes reports too
        self._was_here = False  # the network
        self._followed = False  # it was said that another follows
        self._asked = ""  # the signal that asked this process to end
        self._until = 0.0  # when that is done without engines' ends; 0: they don't know of it yet

    def run(self) -> int:
        """Exit code 0 when who it works for or a signal ended it. Raises CapacityError (nobody came, or nobody again),
        RanksDiffer. Called from the main thread."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        set_title("agent", node=self.parallel.node_rank)
        last = "it has ended"
        try:
            while True:
                try:
                    self._serve()
                except (ConnectionLost, Fenced) as e:
                    self._leave()
                    if self._asked:
                        raise _Told(self._asked) from None
                    logger.warning("%s: the ranks of node %d have ended; it waits", e, self.parallel.node_rank)
        except _Told as e:
            logger.info("node %d ends: %s", self.parallel.node_rank, e)
            last = f"it was ended by {e}"
            return 0
        except _Over:
            logger.info("node 0 has ended: so does this one")
            return 0
        finally:
            for number in before:
                signal.signal(number, signal.SIG_IGN)
            self._leave(last)
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- its own end

    def _on_signal(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if self._asked or not self._draining() or self.port is None:
            raise _Told(name)
        self._asked = name
        self.port.wake()

    def _draining(self) -> list[LocalChild]:
        return [kept.child for kept in self.kept.values() if kept.module in self.drains and not kept.child.ended]

    def _drain(self) -> None:
        draining = self._draining()
        if not draining:
            raise _Told(self._asked)
        if not self._until:
            self._until = time.monotonic() + DRAIN_TIMEOUT
            self._say(Leaves())
            for child in draining:
                child.signal(signal.SIGTERM)
        elif time.monotonic() >= self._until:
            raise _Told(f"{self._asked}, and engines did not end in {DRAIN_TIMEOUT:.0f} s")

    def _leave(self, why: str = "it has ended") -> None:
        """End all processes for certain, then the connection."""
        for kept in self.kept.values():
            kept.heard = False  # their ends are the node's
        self._end(0.0)
        self._say(Trouble(why))
        if self.port is not None:
            self.port.close()
            self.port = None

    # -- who is on the first node

    def _serve(self) -> None:
        """Until the connection ends. Raises ConnectionLost, Fenced (there may be another), _Over."""
        self._followed = False
        try:
            port = self._join()
            while True:
                item = port.receive(LOOK if self.kept or self._asked else None)
                if item is not None:
                    self._obey(item[1])
                self._look()
        except LinkClosed as e:
            if self._followed:
                raise ConnectionLost(str(e)) from None
            raise _Over from None

    def _join(self) -> TcpPort:
        """Raises CapacityError: nobody came, or there is another process for this node."""
        parallel = self.parallel
        patience = Patience(logger.info, self.join_timeout)
        where = f"{parallel.master_addr} port {parallel.master_port}"
        # One that has not noticed yet that the last connection of this node broke takes no other.
        taken_after = parallel.heartbeat_timeout + WELCOME_TIMEOUT
        refused: float | None = None
        while True:
            port = self._connect(patience, where)
            try:
                self.host.address = host_ip() or own_address(self.first)
            except CapacityError:  # the network is gone again
                if not self._was_here:
                    raise
            self._was_here = True
            self._say(
                Here(
                    parallel.node_rank, node_name(), self.host.address, os.getpid(), self.same,
                    tuple(accelerator_ids()), home(), usable_cores(),
                )
            )  # fmt: skip
            item = port.receive(WELCOME_TIMEOUT)
            if item is not None:
                self._obey(item[1])
                return port
            port.close()
            refused = refused or time.monotonic() - WELCOME_TIMEOUT
            if time.monotonic() - refused >= taken_after:
                raise CapacityError(
                    f"node 0 doesn't take this node: another process is node {parallel.node_rank} already; give each "
                    "node its own --node-rank"
                )

    def _connect(self, patience: Patience, where: str) -> TcpPort:
        parallel = self.parallel
        while True:
            patience.tell(f"node {parallel.node_rank} of {parallel.nnodes}: waiting for node 0 at {where}")
            try:
                self.first = resolve_host(parallel.master_addr)
            except CapacityError:
                if not self.first:  # with the network the names may be gone, too; not before it was there
                    raise
            invitation = Invitation(
                f"tcp://{bracketed(self.first)}:{parallel.master_port}", self._keys.driver.public,
                self._keys.ranks[parallel.node_rank - 1], parallel.node_rank - 1, 0, CHUNK_BYTES,
            )  # fmt: skip
            try:
                self.port = TcpPort(
                    invitation, timeout=CONNECT, heartbeat=parallel.heartbeat_timeout,
                    encode=messages.encode_from_agent, decode=messages.decode_to_agent,
                )  # fmt: skip
                return self.port
            except LinkError as e:
                if patience.over:
                    raise CapacityError(f"no node 0 at {where} in {patience.waited:.0f} s: {e}") from None

    def _say(self, message: Any) -> None:
        """To who is on the first node, if it still hears. Any thread."""
        if self.port is not None:
            try:
                with self._lock:
                    self.port.reply(0, message)
            except PlanariaError:
                logger.debug("node 0 did not hear %s", message)

    # -- what it is told

    def _obey(self, message: Any) -> None:
        match message:
            case Welcome():
                logger.info("node %d of %d: joined node 0", self.parallel.node_rank, self.parallel.nnodes)
            case NodeRefused():
                raise RanksDiffer(message.why)
            case Spawn():
                self._spawn(message)
            case Tell() if message.id in self.kept:
                self._tell(self.kept[message.id], message.message)
            case KillChild() if message.id in self.kept:
                self.kept[message.id].name = ""
                self.kept[message.id].child.kill()
            case EndAll():
                self._followed = not message.last
                self._end(EXIT_TIMEOUT)
                self._say(AllEnded())

    def _spawn(self, asked: Spawn) -> None:
        kept = _Kept(asked.entry.module)
        try:
            if kept.module not in self.fits:
                raise OSError(f"{kept.module} is not what this node's agent starts")
            news = functools.partial(self._news, asked.id, kept)
            kept.child = self.host.spawn((HERE, asked.slot), asked.entry, None, news)
        except OSError as e:
            self._say(ChildNews(asked.id, 0, ended=f"could not be started: {e}"))
            return
        self.kept[asked.id] = kept
        self._news(asked.id, kept, kept.child)
        if asked.boot is not None:
            self._tell(kept, asked.boot)

    def _tell(self, kept: _Kept, message: bytes) -> None:
        fitting, kept.name = self.fits[kept.module](message)
        kept.child.tell(fitting)

    def _news(self, id: int, kept: _Kept, child: LocalChild) -> None:
        """Any thread, maybe before it is kept. News are whole, so that their order does not matter but for the last."""
        with self._lock:
            news = ChildNews(id, child.place.pid, child.said, child.ended, child.code, kept.stopped)
        if child.code and kept.name:
            logger.error("%s %s", kept.name, child.ended)
        if kept.heard:
            self._say(news)
        if child.ended and self._asked and (port := self.port) is not None:
            port.wake()

    def _look(self) -> None:
        for id, kept in list(self.kept.items()):
            if kept.child.ended:
                del self.kept[id]
            elif kept.child.stopped != kept.stopped:
                kept.stopped = not kept.stopped
                self._news(id, kept, kept.child)
        if self._asked:
            self._drain()

    def _end(self, patience: float) -> None:
        """See the ends of all processes."""
        children = [kept.child for kept in self.kept.values()]
        for kept in self.kept.values():
            kept.name = ""  # they are to end
        for child in self.host.await_ends(children, patience):
            child.kill()
        self.host.await_ends(children, KILL_TIMEOUT)
        self.kept = {}
