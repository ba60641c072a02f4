"""A server's side of `planaria serve --replace`: another process of its user may take its port, memory and journal.

Three rules are kept here. Until the successor accepts connections nothing is lost with it: its engines are started
again, and the port is accepted from. What its clients have asked for ends here, with tokens of the successor's engines,
which this process uses as an API process uses its root's. And connections that wait for another question go to the
successor as they are, so that nobody's next request meets a closed one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable

import msgspec

import planaria
from planaria.core.quarantine import ExclusiveUses
from planaria.processes import set_title
from planaria.server import response_passing
from planaria.server.attached import Attached
from planaria.server.background import Background
from planaria.server.fleet import Fleet
from planaria.server.packets import Packets, peer_of
from planaria.server.replace_messages import (
    PROTOCOL,
    Ask,
    Declined,
    Given,
    GoneResponse,
    IdleConnection,
    KeptResponse,
    Offer,
    Take,
    ToFirst,
    Withdraw,
    Yours,
)
from planaria.server.response_store import Entry
from planaria.server.root_messages import Kill, LetGo, Serving, State, Stop, ToRoot, Wants
from planaria.server.serve import Lifecycle
from planaria.server.service import Service

logger = logging.getLogger("planaria.server")

COMES_UP = 300.0  # seconds that a successor gets from the end of the engines until it serves
ASKS = 10.0  # seconds for its first word
MAX_CALL = 4096  # bytes: what a pipe takes in one piece
LOCKED = 0.05  # seconds between looks whether a process that has ended still holds the journal's lock


class HandingOver:
    """Begin with `open`. busy: why nothing can be handed over now, or ""; tls: is TLS spoken on the port? Called in one
    event loop."""

    def __init__(
        self, fleet: Fleet, life: Lifecycle[Service], busy: Callable[[], str] = lambda: "", *, tls: bool = False
    ) -> None:
        self.fleet, self.life, self.busy, self.tls = fleet, life, busy, tls
        self.state = "serves"  # then "asked", "gives", "given" and "replaced", or back
        self.successor = 0  # its pid
        self.packets: Packets[ToFirst] | None = None
        self.attached: Attached | None = None  # to its engines
        self._calls: tuple[int, ...] = ()  # both ends of a pipe
        self._told = State([])  # of the successor's engines
        self._exclusive_uses = defaultdict[int, ExclusiveUses](ExclusiveUses)  # by engine
        self._late: asyncio.TimerHandle | None = None
        self._background = Background()

    def open(self) -> None:
        """Let successors call: a pipe without a name, which a process of this user finds by the title of this one."""
        if sys.platform == "linux":
            self._calls = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            asyncio.get_running_loop().add_reader(self._calls[0], self._called)
            self._title("server")

    @property
    def mailbox(self) -> int:
        """The descriptor of this process that a call is written to."""
        return self._calls[1]

    def close(self) -> None:
        if self._calls:
            asyncio.get_running_loop().remove_reader(self._calls[0])
            for fd in self._calls:
                os.close(fd)
            self._calls = ()
        self._background.cancel()
        self._not_late()
        if self.attached is not None:
            self.attached.close()
        if self.packets is not None:
            self.packets.close()

    def _called(self) -> None:
        for address in os.read(self._calls[0], MAX_CALL).split(b"\0"):
            if address:
                self._answer(address)

    def _answer(self, address: bytes) -> None:
        """Go to where a successor listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.connect(address)
            pid, uid = peer_of(sock)
            if uid == os.geteuid() and self.packets is not None:
                why = Declined(f"process {self.successor} takes its place already")
                sock.send(msgspec.msgpack.encode(why))
        except OSError:  # it has ended
            pid = uid = -1
        if uid != os.geteuid() or self.packets is not None:
            sock.close()
            return
        self.state, self.successor = "asked", pid
        self.packets = Packets(sock, msgspec.msgpack.Decoder(ToFirst), self._hear, self._gone)
        self._late = asyncio.get_running_loop().call_later(ASKS, self._too_late)

    def _hear(self, message: ToFirst, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        match message, self.state:
            case Ask(), "asked":
                self._offer(message)
            case Take(), "asked":
                self.state = "gives"
                self._background.start(self._give())
            case State(), "given" | "replaced":
                self._told = message
                self._follow()
            case Serving(), "given":
                self._replaced()
            case Stop(), "replaced":
                self.life.on_signal(signal.SIGTERM)
            case Withdraw(), _:
                response_passing.withdraw(self.life.service.responses, message.id, message.why)
            case _:
                logger.warning("process %d, which takes over, says %s out of turn", self.successor, message)

    # -- forward

    def _unable(self, ask: Ask) -> str:
        fleet = self.fleet
        if ask.protocol != PROTOCOL:
            return f"release {planaria.__version__} can't hand over to release {ask.release}: they speak differently"
        if why := self.busy():
            return why
        if self.life.service.draining:
            return self.life.service.draining
        if fleet.local is None:
            return "its engines are not processes of its own on this machine"
        for index, keeper in sorted(fleet.members.items()):
            if keeper.engine.state != "ready":
                return f"engine {index} is {keeper.engine.state}"
        return "it is being resized" if fleet.resizer.busy else ""

    def _offer(self, ask: Ask) -> None:
        assert self.packets is not None
        if why := self._unable(ask):
            self.packets.send(Declined(why))
            logger.info("process %d wants to take over: %s", self.successor, why)
            self._back()
            return
        kv = {index: keeper.memory for index, keeper in sorted(self.fleet.members.items()) if keeper.memory is not None}
        weights = self.fleet.weights
        fds = [self.life.server.sock.fileno(), *([weights.fileno()] if weights is not None else [])]
        fds += [memory.fileno() for memory in kv.values()]
        config, tensors = self.fleet.config, self.fleet.shared_weights
        fds += [tensors.fileno()] if tensors is not None else []
        path = config.checkpoint["path"] if config.weights_number and tensors is None else ""
        keepers = self.fleet.keepers
        fds += keepers.pipes if keepers is not None else []
        self.packets.send(
            Offer(
                planaria.__version__, weights is not None, list(kv), self.fleet.began, config.weights_number, path,
                keepers.keeping if keepers is not None else [],
            ), fds,
        )  # fmt: skip
        self._not_late()  # it may import, compile and read for as long as it likes: this one serves
        logger.info("process %d, release %s, prepares to take over", self.successor, ask.release)

    async def _give(self) -> None:
        """All that the other can't have while this one uses it, or nothing."""
        try:
            await self._give_up()
        except Exception:
            logger.exception("nothing could be handed over")
            await self._take_back()

    async def _give_up(self) -> None:
        packets, responses = self.packets, self.life.service.responses
        assert packets is not None
        why = "" if self.life.lend() else "it is about to end"
        if not why and not await response_passing.lend(responses, self._written, self._deleted):
            why = "its journal can't be written"
        if why or packets.closed:
            packets.send(Declined(why))
            if not why:
                await self._journal_back()
            self.life.take_back()
            self._back()
            return
        # However they end: what they had committed stays in memory, and what is open is written down here.
        self.fleet.closing = True
        await asyncio.gather(*(keeper.lend() for keeper in self.fleet.members.values()))
        if packets.closed:  # meanwhile
            await self._take_back()
            return
        self.state = "given"
        self.attached = Attached(self.fleet.config, os.getpid(), self._tell, self.fleet.dispatcher)
        packets.send(Given(list(responses.unfinished)))
        if responses.lent is None:  # nobody can read them anywhere
            for entry in list(responses.known.values()):
                if entry.kept.end is not None or entry.kept.head.background:
                    self._written(entry)
        self._late = asyncio.get_running_loop().call_later(COMES_UP, self._too_late)
        logger.info("process %d starts engines in place of those here; %d requests are open", self.successor,
                    self.life.service.requests)  # fmt: skip

    def _tell(self, message: ToRoot) -> None:
        """Those of this process that may be what engines die of run alone among its own: the successor may have others
        beside them."""
        match message:
            case Kill() if self.packets is not None:
                self.packets.send(message)
            case Wants():
                self._exclusive_uses[message.engine].want(0, message.alone, [0])
                asyncio.get_running_loop().call_soon(self._follow)
            case LetGo():
                self._exclusive_uses[message.engine].let_go(0, message.serial)
                asyncio.get_running_loop().call_soon(self._follow)

    def _follow(self) -> None:
        """The successor's engines, as it has told."""
        if self.attached is not None:
            uses = self._exclusive_uses
            told = [msgspec.structs.replace(one, exclusive_use=uses[one.index].now) for one in self._told.engines]
            self.attached.follow(State(told))

    def _written(self, entry: Entry) -> None:
        """The successor is to have this response."""
        if self.packets is None or self.packets.closed:
            return
        fd = os.memfd_create("planaria-response", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(entry.kept.file())
            self.packets.send(KeptResponse(entry.kept.head.id), [fd])
        except OSError as e:
            logger.error("response %s stays here alone: %s", entry.kept.head.id, e)
        finally:
            os.close(fd)

    def _deleted(self, id: str) -> None:
        """The successor is to forget this response."""
        if self.packets is not None:
            self.packets.send(GoneResponse(id))

    def _replaced(self) -> None:
        assert self.packets is not None
        self._not_late()
        self.state = "replaced"
        self.packets.send(Yours())
        self.fleet.leave_keepers()
        self._title("former")
        self.life.leave(self._pass_on)
        logger.info("process %d serves now; %d requests end here", self.successor, self.life.service.requests)

    def _title(self, role: str) -> None:
        host, port = self.life.server.sock.getsockname()[:2]
        calls = {"calls": self.mailbox} if role == "server" else {}
        scheme, model = "https" if self.tls else "http", self.fleet.config.served_model_name
        set_title(role, port=port, host=host, scheme=scheme, model=model, **calls)

    def _pass_on(self, sock: socket.socket) -> bool:
        """A connection that waits. False: it stays here."""
        if self.tls or self.packets is None or self.packets.closed:
            return False
        try:
            self.packets.send(IdleConnection(), [sock.fileno()])
        except OSError:
            return False
        return True

    # -- back

    def _not_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        assert self.packets is not None
        logger.warning("process %d does not come up", self.successor)
        self.packets.close()
        self._gone()

    def _gone(self) -> None:
        """The successor has ended, or was given up."""
        if self.state == "asked":
            self._back()
        elif self.state != "gives":  # which is about to look
            self._background.start(self._take_back())

    async def _take_back(self) -> None:
        """All is as it was before the successor came."""
        logger.warning("process %d has ended: this server goes on, with engines of its own", self.successor)
        if self.attached is not None:
            self.attached.leave()
            self.attached = None
        fleet, before = self.fleet, self.fleet.dispatcher
        for keeper in fleet.members.values():
            if keeper.index not in before.members:
                before.add(keeper.engine)
            keeper.take_back()
        for index in set(before.members) - set(fleet.members):
            engine = before.members[index]
            engine.ending = True
            before.rescue(engine, certainly=True)
            before.forget(engine)
        fleet.closing = bool(self.life.service.draining)
        await self._journal_back()
        self._title("server")
        self.life.take_back()
        self._back()

    async def _journal_back(self) -> None:
        while not response_passing.take_back(self.life.service.responses):
            await asyncio.sleep(LOCKED)

    def _back(self) -> None:
        self._not_late()
        if self.packets is not None:
            self.packets.close()
        self.packets, self.state, self.successor = None, "serves", 0
        self._told, self._exclusive_uses = State([]), defaultdict(ExclusiveUses)
