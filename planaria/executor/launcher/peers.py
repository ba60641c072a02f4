"""Other nodes as they come to this one: one link to all, a thread that serves it, and processes there.

A node may come at any time, go, and come again; each time it brings no process.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from planaria.errors import CapacityError, RanksDiffer
from planaria.executor import node_messages as messages
from planaria.executor.link.faults import ConnectionLost, LinkError, PeerLags
from planaria.executor.link.keys import Keys
from planaria.executor.link.tcp import TcpLink
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
from planaria.hosts.host import News, Place, Program, Slot

logger = logging.getLogger("planaria.engine")

END_TIMEOUT = 20.0  # seconds; an agent waits 5 s for its processes before it kills them
CONFIGURATION = "configuration "  # in the names of what must agree: values that are digests


class NodePeer:
    """A node but the first. `here` while it has a connection; `gone`: why it has none any more; `leaving`: it was told
    to end."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"node {number}"
        self.here: Here | None = None
        self.gone = ""
        self.times = 0  # that it came
        self.leaving = self.all_ended = False
        self.children: dict[int, NodeChild] = {}

    def __str__(self) -> str:
        return self.name

    @property
    def takes_processes(self) -> bool:
        return self.here is not None and not self.leaving


class NodeChild:
    """See Child."""

    leaving = stopped = False
    ended = said = ""
    code = 0

    def __init__(self, peers: NodePeers, peer: NodePeer, id: int, slot: Slot, place: Place, news: News) -> None:
        self.peers, self.peer, self.id, self.slot, self.place, self.news = peers, peer, id, slot, place, news

    def tell(self, message: bytes) -> None:
        self.peers.post(self.peer, Tell(self.id, message))

    def kill(self) -> None:
        if not self.ended:
            self.peers.post(self.peer, KillChild(self.id))

    def hear(self, now: ChildNews) -> None:
        self.place = msgspec.structs.replace(self.place, pid=now.pid)
        self.said, self.stopped, self.code = now.said, now.stopped, now.code
        self.ended = f"{now.ended} on {self.peer}" if now.ended else ""


class NodePeers:
    """same: what must be equal on all nodes; they may say more. `on_change` hears of one that came, went or is about
    to; from the thread."""

    def __init__(self, count: int, same: Mapping[str, str]) -> None:
        self.all, self.same = [NodePeer(number + 1) for number in range(count)], dict(same)
        self.on_change: Callable[[NodePeer], None] = lambda peer: None
        self.changed = threading.Condition()
        self.refused = ""  # why one was
        self.closing = False
        self._over = False
        self._link: TcpLink | None = None
        self._port = 0
        self._thread: threading.Thread | None = None
        self._outbox: queue.SimpleQueue[tuple[NodePeer, int, Any]] = queue.SimpleQueue()
        self._ids = itertools.count(1)

    def listen(self, host: str, port: int, keys: Keys, heartbeat: float) -> int:
        """port: 0: any. Returns the port. Raises CapacityError: not there. Idempotent."""
        if self._link is not None:
            return self._port
        try:
            self._link = TcpLink(
                len(self.all), host=host, port=port, keys=keys, heartbeat=heartbeat, encode=messages.encode,
                decode=messages.decode,
            )  # fmt: skip
        except LinkError as e:
            raise CapacityError(f"{e}; choose another --master-addr or --master-port, on every node") from None
        self._thread = threading.Thread(target=self._serve, args=(self._link,), name="nodes", daemon=True)
        self._thread.start()
        self._port = int(self._link.address.rpartition(":")[2])
        return self._port

    def here(self) -> list[NodePeer]:
        return [peer for peer in self.all if peer.here is not None]

    def absent(self) -> list[NodePeer]:
        return [peer for peer in self.all if peer.here is None]

    def strangers(self) -> int:
        """Connections with another secret."""
        return self._link.refused["unauthenticated"] + self._link.refused["handshake"] if self._link is not None else 0

    def await_all(self, where: str, limit: float, *, must: bool = True) -> None:
        """Wait until all are here, for so many seconds, and say so. must: then raise CapacityError, else begin without
        them. Raises RanksDiffer when one came that can't take part, CapacityError when this is closed meanwhile."""
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
            with self.changed:
                timeout = min(1.0, patience.pause())
                self.changed.wait_for(lambda: self.refused or self.closing or not self.absent(), timeout)
                if self.refused:
                    raise RanksDiffer(self.refused)

    # -- processes there

    def spawn(self, peer: NodePeer, slot: Slot, entry: Program, boot: bytes | None, news: News) -> NodeChild:
        """Raises OSError: it isn't here."""
        with self.changed:
            if (here := peer.here) is None:
                raise OSError(f"{peer} is gone: {peer.gone}")
            devices = here.accelerators[slot[1] : slot[1] + 1]
            place = Place(-1, here.home, here.node, here.address, 0, here.cores, devices)
            child = NodeChild(self, peer, next(self._ids), slot, place, news)
            peer.children[child.id] = child
            self.post(peer, Spawn(child.id, slot[1], entry, boot))
            return child

    def await_starts(self, children: Iterable[NodeChild], timeout: float) -> None:
        """Where one is not started in time its node is dropped."""
        with self.changed:
            if self.changed.wait_for(lambda: all(child.place.pid or child.ended for child in children), timeout):
                return
            late = {child.peer for child in children if not (child.place.pid or child.ended)}
            for peer in sorted(late, key=lambda peer: peer.number):
                self.post(peer, f"it did not start its processes in {timeout:.0f} s")
            self.changed.wait_for(lambda: all(child.place.pid or child.ended for child in children), timeout)

    def await_ends(self, children: Iterable[NodeChild], timeout: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: all(child.ended for child in children), timeout)

    def post(self, peer: NodePeer, message: Any) -> None:
        """Heard by it if it stays. A text: it is dropped, for that reason."""
        self._outbox.put((peer, peer.times, message))
        if self._link is not None:
            self._link.wake()

    def close(self, *, last: bool) -> None:
        """Wait until all have seen the ends of what they had. last: agents end too. Idempotent."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if self._over or self._link is None or self._thread is None:
            return
        with self.changed:
            told = self.here()
            for peer in told:
                self.post(peer, EndAll(last))
            self.changed.wait_for(lambda: all(peer.all_ended or peer.here is None for peer in told), END_TIMEOUT)
        for peer in told:
            if not peer.all_ended:
                logger.warning("%s did not say that its processes have ended %s", peer, peer.gone)
        self._over = True
        self._link.wake()
        self._thread.join(END_TIMEOUT)

    # -- the thread that owns the link

    def _serve(self, link: TcpLink) -> None:
        try:
            while not self._over or not self._outbox.empty():
                try:
                    self._send(link)
                    item = link.receive(None)
                except (ConnectionLost, PeerLags) as e:
                    for place in e.ranks:
                        why = "its connection broke" if isinstance(e, ConnectionLost) else str(e)
                        self._drop(link, self.all[place], why)
                else:
                    if item is not None:
                        self._hear(link, self.all[item[0]], item[2])
        except LinkError as e:
            for peer in self.here():
                self._gone(peer, str(e))
        finally:
            link.close()

    def _send(self, link: TcpLink) -> None:
        while not self._outbox.empty():
            peer, times, message = self._outbox.get()
            if peer.here is None or peer.times != times:
                continue
            if isinstance(message, str):
                self._drop(link, peer, message)
            else:
                link.send(0, message, to=peer.number - 1)

    def _drop(self, link: TcpLink, peer: NodePeer, why: str) -> None:
        """Another process may come in its place, or itself again."""
        link.forget(peer.number - 1)
        self._gone(peer, why)

    def _hear(self, link: TcpLink, peer: NodePeer, message: Any) -> None:
        match message:
            case Here():
                self._come(link, peer, message)
            case Trouble():
                self._drop(link, peer, message.message)
            case ChildNews() if (child := peer.children.get(message.id)) is not None:
                with self.changed:
                    child.hear(message)
                    if child.ended:
                        del peer.children[message.id]
                    self.changed.notify_all()
                child.news(child)
            case Leaves():
                peer.leaving = True
                logger.info("%s was told to end: its engines are taken off it", peer)
                self.on_change(peer)
            case AllEnded():
                with self.changed:
                    peer.all_ended = True
                    self.changed.notify_all()

    def _come(self, link: TcpLink, peer: NodePeer, message: Here) -> None:
        with self.changed:
            peer.name = f"node {peer.number} ({message.node}, {message.address})"
            if why := _difference(peer, message.same, self.same):
                self.refused = why
                logger.warning("refused: %s", why)
                link.send(0, NodeRefused(why), to=peer.number - 1)
            else:
                peer.here, peer.gone, peer.all_ended, peer.leaving = message, "", False, False
                peer.times += 1
                link.send(0, Welcome(), to=peer.number - 1)
                logger.info("%s is here", peer)
            self.changed.notify_all()
        if not why:
            self.on_change(peer)

    def _gone(self, peer: NodePeer, why: str) -> None:
        with self.changed:
            if peer.here is not None and not self.closing:
                logger.warning("%s is gone: %s", peer, why)
            peer.here, peer.gone = None, why
            children, peer.children = list(peer.children.values()), {}
            for child in children:
                child.ended, child.code = f"is out of reach: {peer} is gone: {why}", -1
            self.changed.notify_all()
        for child in children:
            child.news(child)
        self.on_change(peer)


def names(peers: Iterable[NodePeer]) -> str:
    """Their numbers."""
    return ", ".join(str(peer.number) for peer in peers)


def _difference(peer: NodePeer, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    for name in sorted(ours):
        if theirs.get(name) != ours.get(name):
            values = f": it has {theirs.get(name, 'nothing')}, node 0 has {ours[name]}"
            said = "" if name.startswith(CONFIGURATION) else values
            return f"{peer} differs in {name}{said}; run the same command on every node"
    return ""
