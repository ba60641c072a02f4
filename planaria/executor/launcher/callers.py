"""Other nodes as they come to this one: one link to all, and a thread that serves it.

One may come at any time, go, and come again. What it is told, and says beside that it is here, is for those who derive
from this.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from planaria.errors import CapacityError, RanksDiffer
from planaria.executor.link.codec import Bytes
from planaria.executor.link.faults import ConnectionLost, LinkError, PeerLags
from planaria.executor.link.keys import Keys
from planaria.executor.link.tcp import TcpLink
from planaria.executor.node_messages import Here, Refused, Trouble, Welcome
from planaria.executor.patience import Patience

logger = logging.getLogger("planaria.engine")

END_TIMEOUT = 8.0  # seconds; an agent waits 5 s for its ranks before it kills them
CONFIGURATION = "configuration "  # in the names of what must agree: values that are digests


class Caller:
    """A node but the first. `here` while it has a connection; `gone`: why it has none any more."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"node {number}"
        self.here: Here | None = None
        self.gone = ""
        self.times = 0  # that it came
        self.all_ended = False  # of what it had for this one

    def __str__(self) -> str:
        return self.name


C = TypeVar("C", bound=Caller)


class Callers(Generic[C]):
    """same: what must be equal on all nodes. encode, decode: as TcpLink's."""

    def __init__(
        self, all: Sequence[C], same: Mapping[str, str], encode: Callable[[Any], bytes],
        decode: Callable[[Bytes, int], Any],
    ) -> None:  # fmt: skip
        self.all, self.same = list(all), dict(same)
        self.changed = threading.Condition()
        self.refused = ""  # why one was
        self.closing = False
        self._encode, self._decode = encode, decode
        self._over = False
        self._link: TcpLink | None = None
        self._thread: threading.Thread | None = None
        self._outbox: queue.SimpleQueue[tuple[C, int, Any]] = queue.SimpleQueue()

    def listen(self, host: str, port: int, keys: Keys, heartbeat: float) -> None:
        """Raises LinkError: not there."""
        self._link = TcpLink.create(
            len(self.all), host=host, port=port, keys=keys, heartbeat=heartbeat, encode=self._encode,
            decode=self._decode,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, args=(self._link,), name="nodes", daemon=True)
        self._thread.start()

    def here(self) -> list[C]:
        return [agent for agent in self.all if agent.here is not None]

    def absent(self) -> list[C]:
        return [agent for agent in self.all if agent.here is None]

    def strangers(self) -> int:
        """Connections with another secret."""
        return self._link.refused["unauthenticated"] + self._link.refused["handshake"] if self._link is not None else 0

    def wait_for_all(self, timeout: float) -> None:
        """Raises RanksDiffer when one came that can't take part."""
        with self.changed:
            self.changed.wait_for(lambda: self.refused or self.closing or not self.absent(), timeout)
            if self.refused:
                raise RanksDiffer(self.refused)

    def await_all(self, where: str, limit: float, *, must: bool = True) -> None:
        """Wait until all are here, for so many seconds, and say so. must: then raise CapacityError, else begin without
        them. Raises as `wait_for_all`, and CapacityError when this is closed meanwhile."""
        patience = Patience(logger.info, limit)
        while absent := self.absent():
            nodes = f"node{'s' * (len(absent) > 1)} {names(absent)}"
            what = f"waiting for {nodes} of {len(self.all) + 1} to come to {where}"
            if refused := self.strangers():
                what += f"; {refused} connection{'s' * (refused > 1)} had another secret"
            if self.closing:
                raise CapacityError(f"ended while {what}")
            if patience.over:
                if not must:
                    return
                raise CapacityError(
                    f"gave up {what} after {patience.waited:.0f} s; run the same command there with its --node-rank"
                )
            patience.tell(what)
            self.wait_for_all(min(1.0, patience.pause()))

    def post(self, agent: C, message: Any) -> None:
        """Heard by it if it stays. A text: it is dropped, for that reason."""
        self._outbox.put((agent, agent.times, message))
        if self._link is not None:
            self._link.wake()

    def close(self) -> None:
        """Wait until all have seen the ends of what they had. Idempotent."""
        if self._over or self._link is None or self._thread is None:
            return
        with self.changed:
            told = self.here()
            self.changed.wait_for(lambda: all(agent.all_ended or agent.here is None for agent in told), END_TIMEOUT)
        for agent in told:
            if not agent.all_ended:
                logger.warning("%s did not say that its processes have ended %s", agent, agent.gone)
        self._over = True
        self._link.wake()
        self._thread.join(END_TIMEOUT)

    # -- for those who derive from this. All but `went` with `changed` held

    def came(self, agent: C) -> None:
        """It is here, with nothing of its own."""

    def heard(self, agent: C, message: Any) -> None:
        """What it said beside that it is here."""

    def heard_all(self, agent: C, message: Any) -> None:
        """After `heard`, without `changed`."""

    def lost_with(self, agent: C, why: str) -> None:
        """It is gone."""

    def went(self, agent: C, why: str) -> None:
        """After `lost_with`, without `changed`."""

    # -- the thread that owns the link

    def _serve(self, link: TcpLink) -> None:
        try:
            while not self._over or not self._outbox.empty():
                try:
                    self._send(link)
                    item = link.receive(None)
                except (ConnectionLost, PeerLags) as e:
                    for peer in e.ranks:
                        why = "its connection broke" if isinstance(e, ConnectionLost) else str(e)
                        self._drop(link, self.all[peer], why)
                else:
                    if item is not None:
                        self._hear(link, self.all[item[0]], item[2])
        except LinkError as e:
            for agent in self.here():
                self._gone(agent, str(e))
        finally:
            link.close()

    def _send(self, link: TcpLink) -> None:
        while not self._outbox.empty():
            agent, times, message = self._outbox.get()
            if agent.here is None or agent.times != times:
                continue
            if isinstance(message, str):
                self._drop(link, agent, message)
            else:
                link.send(0, message, to=agent.number - 1)

    def _drop(self, link: TcpLink, agent: C, why: str) -> None:
        """Another process may come in its place, or itself again."""
        link.forget(agent.number - 1)
        self._gone(agent, why)

    def _hear(self, link: TcpLink, agent: C, message: Any) -> None:
        with self.changed:
            if isinstance(message, Here):
                self._come(link, agent, message)
            elif isinstance(message, Trouble):
                self._drop(link, agent, message.message)
            else:
                self.heard(agent, message)
            self.changed.notify_all()
        self.heard_all(agent, message)

    def _come(self, link: TcpLink, agent: C, message: Here) -> None:
        agent.name = f"node {agent.number} ({message.node}, {message.address})"
        if why := _difference(agent, message.same, self.same):
            self.refused = why
            logger.warning("refused: %s", why)
            link.send(0, Refused(why), to=agent.number - 1)
            return
        agent.here, agent.gone, agent.all_ended = message, "", False
        agent.times += 1
        self.came(agent)
        link.send(0, Welcome(), to=agent.number - 1)
        logger.info("%s is here", agent)

    def _gone(self, agent: C, why: str) -> None:
        with self.changed:
            if agent.here is not None and not self.closing:
                logger.warning("%s is gone: %s", agent, why)
            agent.here, agent.gone = None, why
            self.lost_with(agent, why)
            self.changed.notify_all()
        self.went(agent, why)


def names(agents: Iterable[Caller]) -> str:
    """Their numbers."""
    return ", ".join(str(agent.number) for agent in agents)


def _difference(agent: Caller, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            values = f": it has {theirs.get(name, 'nothing')}, node 0 has {ours.get(name, 'nothing')}"
            said = "" if name.startswith(CONFIGURATION) else values
            return f"{agent} differs in {name}{said}; run the same command on every node"
    return ""
