"""A node but the first, towards the process on the first one that it works for: it comes there, does as it is told,
and comes again when the connection broke, for that one may be back, or another in its place.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from planaria.config.machine import accelerator_ids
from planaria.config.options import ParallelConfig
from planaria.env import host_ip
from planaria.errors import CapacityError, PlanariaError, RanksDiffer
from planaria.executor.link.codec import Bytes
from planaria.executor.link.faults import ConnectionLost, Fenced, LinkClosed, LinkError
from planaria.executor.link.keys import Invitation, Keys
from planaria.executor.link.tcp_port import TcpPort
from planaria.executor.link.tcp_socket import CHUNK_BYTES, bracketed
from planaria.executor.node_messages import AllEnded, End, Here, Refused, Trouble, Welcome
from planaria.executor.patience import Patience
from planaria.node import node_name, own_address, resolve_host
from planaria.processes import set_title

logger = logging.getLogger("planaria.agent")

CONNECT = 2.0  # seconds of one attempt
WELCOME_TIMEOUT = 5.0  # seconds for the first answer


class Told(Exception):
    """A signal asked this process to end."""


class _Over(Exception):
    """The one that it worked for has ended, and no other will follow."""


class Attendant:
    """parallel: of this node; purpose: of the keys that are derived from `secret`; same: what must be equal on all
    nodes; join_timeout: seconds to wait for who is on the first node, at first and any later time; encode, decode: as
    TcpPort's."""

    spares = 0  # that it says it keeps

    def __init__(
        self, parallel: ParallelConfig, secret: bytes, purpose: str, same: Mapping[str, str], join_timeout: float,
        encode: Callable[[int, Any], bytes], decode: Callable[[Bytes], Any],
    ) -> None:  # fmt: skip
        self.parallel, self.same, self.join_timeout = parallel, dict(same), join_timeout
        self.host = self.address = ""  # the first node's, and this one's own
        self._keys = Keys.derive(secret, parallel.nnodes - 1, purpose)
        self._encode, self._decode = encode, decode
        self._lock = threading.Lock()  # watchers of processes report too
        self.port: TcpPort | None = None
        self._followed = False  # it was said that another follows

    def run(self) -> int:
        """Exit code 0 when who it works for or a signal ended it. Raises CapacityError (nobody came, or nobody again),
        RanksDiffer. Called from the main thread."""
        before = {number: signal.signal(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        set_title("agent", node=self.parallel.node_rank)
        last = "it has ended"
        try:
            while True:
                try:
                    self._serve()
                except (ConnectionLost, Fenced) as e:
                    self._leave()
                    self.alone()
                    logger.warning("%s: the ranks of node %d have ended; it waits", e, self.parallel.node_rank)
        except Told as e:
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

    # -- for those who derive from this

    def on_signal(self, number: int, frame: object) -> None:
        raise Told(signal.Signals(number).name)

    def welcomed(self) -> None:
        """From now on it is told what to do."""

    def alone(self) -> None:
        """The connection broke, and all processes have ended. Raises Told not to wait for another."""

    def told(self, message: Any) -> None:
        """To do this."""

    def look_after(self) -> float | None:
        """Seconds after which `look` is called if nothing is said meanwhile; None: when it was woken."""
        return None

    def look(self) -> None:
        """Whether there is something to say."""

    def end(self, *, kill: bool) -> None:
        """See the ends of all processes that were started."""

    # -- inside

    def _serve(self) -> None:
        """One who is on the first node, until the connection ends. Raises ConnectionLost, Fenced (there may be
        another), _Over."""
        self._followed = False
        try:
            port = self._join()
            while True:
                item = port.receive(self.look_after())
                if item is not None:
                    self._obey(item[1])
                else:
                    self.look()
        except LinkClosed as e:
            if self._followed:
                raise ConnectionLost(str(e)) from None
            raise _Over from None

    def _leave(self, why: str = "it has ended") -> None:
        """End all processes for certain, then the connection."""
        self.end(kill=True)
        self.say(Trouble(why))
        if self.port is not None:
            self.port.close()
            self.port = None

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
                self.address = host_ip() or own_address(self.host)
            except CapacityError:  # the network is gone again
                if not self.address:
                    raise
            self.say(
                Here(
                    parallel.node_rank, node_name(), self.address, os.getpid(), self.same, len(accelerator_ids()),
                    self.spares,
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
                self.host = resolve_host(parallel.master_addr)
            except CapacityError:
                if not self.host:  # with the network the names may be gone, too; not before it was there
                    raise
            invitation = Invitation(
                f"tcp://{bracketed(self.host)}:{parallel.master_port}", self._keys.driver.public,
                self._keys.ranks[parallel.node_rank - 1], parallel.node_rank - 1, 0, CHUNK_BYTES,
            )  # fmt: skip
            try:
                self.port = TcpPort.connect(
                    invitation, timeout=CONNECT, heartbeat=parallel.heartbeat_timeout, encode=self._encode,
                    decode=self._decode,
                )  # fmt: skip
                return self.port
            except LinkError as e:
                if patience.over:
                    raise CapacityError(f"no node 0 at {where} in {patience.waited:.0f} s: {e}") from None

    def _obey(self, message: Any) -> None:
        match message:
            case Welcome():
                logger.info("node %d of %d: joined node 0", self.parallel.node_rank, self.parallel.nnodes)
                self.welcomed()
            case Refused():
                raise RanksDiffer(message.why)
            case End():
                self._followed = not message.last
                self.end(kill=message.kill)
                self.say(AllEnded())
            case _:
                self.told(message)

    def say(self, message: Any) -> None:
        """To who is on the first node, if it still hears. Any thread."""
        if self.port is not None:
            try:
                with self._lock:
                    self.port.reply(0, message)
            except PlanariaError:
                logger.debug("node 0 did not hear %s", message)
