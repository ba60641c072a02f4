"""`planaria serve --replace`: a new process takes the port, the memory of weights and KV, and the journal of a server
of the same user that runs, whose clients hear a pause at most. `handing_over.py` is that server's side.

Until it has said `Yours` the other may take everything back, and does when this process ends or is too slow; so a word
that fails to come ends this process, unless the other has ended: then all of it is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import sys
import tempfile

import msgspec

import planaria
from planaria.checkpoint.shared import SharedWeights
from planaria.errors import ConfigError, PlanariaError
from planaria.hosts.device_keeper import GivenKeepers
from planaria.hosts.device_memory import Keepers
from planaria.hosts.memory import KVMemory
from planaria.hosts.weights import WeightsMemory
from planaria.node import readable
from planaria.processes import titled_processes
from planaria.server import response_passing
from planaria.server.attached import client_name
from planaria.server.config import ServerConfig
from planaria.server.fleet import Fleet
from planaria.server.packets import Packets, peer_of
from planaria.server.records import scan
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
    ToSuccessor,
    Withdraw,
    Yours,
)
from planaria.server.root import listed
from planaria.server.root_messages import Kill, Serving, State, Stop
from planaria.server.serve import LAST_ANSWERS, Lifecycle, address_of, heard
from planaria.server.service import Service
from planaria.wire import Gone

logger = logging.getLogger("planaria.server")

ANSWERS = 10.0  # seconds that the other server gets for a word that needs no work
GIVES = 30.0  # seconds until its engines have ended and its journal is written
MARGIN = 5.0  # seconds that it gets to end after its last answer


def runs_on(config: ServerConfig) -> tuple[int, int] | None:
    """Of the server of this user that listens where this one is to: its pid, and a descriptor there that calls are
    written to, -1 for none. Anybody may have such a title: who answers, the kernel says. Raises ConfigError: there is
    no such host."""
    host = str(address_of(config)[3][0])
    for pid, role, facts in titled_processes():
        if role == "server" and facts.get("port") == str(config.port) and facts.get("host") == host:
            calls = facts.get("calls", "")
            return pid, int(calls) if calls.isascii() and calls.isdigit() and len(calls) < 8 else -1
    return None


async def call(pid: int, mailbox: int) -> socket.socket:
    """A connection with a server that runs, which comes to a socket in a folder of this process's own. Raises OSError,
    TimeoutError."""
    entry = f"/proc/{pid}/fd/{mailbox}"
    if not stat.S_ISFIFO(os.stat(entry).st_mode):
        raise OSError("no calls are taken there")
    with tempfile.TemporaryDirectory(prefix="planaria-") as folder, contextlib.ExitStack() as stack:  # mode 0700
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        stack.callback(listening.close)
        listening.bind(f"{folder}/replace")
        listening.listen(1)
        fd = os.open(entry, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        os.write(fd, f"{folder}/replace".encode() + b"\0")
        async with asyncio.timeout(ANSWERS):
            sock, _ = await asyncio.get_running_loop().sock_accept(listening)
    if peer_of(sock) != (pid, os.geteuid()):
        sock.close()
        raise OSError("another process answers in its place")
    return sock


class TakingOver:
    """Made by `ask`. sock: that the other has listened on; weights, kv: memory, of each engine, by number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.release = ""
        self.sock: socket.socket
        self.weights: WeightsMemory | None = None
        self.kv: dict[int, KVMemory] = {}
        self.keepers: GivenKeepers | None = None  # of devices' memory, which they are with
        self._offer: Offer
        self._tensors: SharedWeights | None = None
        self.packets: Packets[ToSuccessor]
        self._alive = os.pidfd_open(pid)
        self._heard: asyncio.Future[ToSuccessor | None] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._fleet: Fleet | None = None
        self._life: Lifecycle[Service] | None = None
        self._written: dict[str, bytes] = {}  # responses, for who will keep them; of a gone one: nothing
        self._running: list[str] = []
        self._idle: list[socket.socket] = []
        self._mine = False  # all of it is here for good

    @classmethod
    async def ask(cls, config: ServerConfig) -> TakingOver | None:
        """None: there is no server. Raises ConfigError: there is one that doesn't hand over, or not now."""
        found = runs_on(config) if sys.platform == "linux" else None
        if found is None:
            logger.info("--replace: no server of yours runs on port %d: this one begins anew", config.port)
            return None
        pid, mailbox = found
        if mailbox < 0:
            raise _declined(
                pid, "it takes no calls: it is not ready, has several API processes, or is of an old release"
            )
        try:
            sock = await call(pid, mailbox)
            self = cls(pid)
        except (OSError, TimeoutError) as e:
            raise _declined(pid, f"it doesn't answer ({e})") from None
        self.packets = Packets(sock, msgspec.msgpack.Decoder(ToSuccessor), self._hear, self._ended)
        self.packets.send(Ask(PROTOCOL, planaria.__version__, config.ssl_certfile is not None))
        answer = await self._word(ANSWERS)
        if not isinstance(answer, Offer):
            self.close()
            raise _declined(pid, answer.why if isinstance(answer, Declined) else "it does not answer")
        return self

    def _hear(self, message: ToSuccessor, fds: list[int]) -> None:
        match message:
            case Offer():
                self._offered(message, fds)
            case KeptResponse():
                with open(fds.pop(), "rb") as file:
                    file.seek(0)
                    self._written[message.id] = file.read()
                self._bring()
            case GoneResponse():
                self._written[message.id] = b""
                self._bring()
            case IdleConnection():
                self._idle.append(socket.socket(fileno=fds.pop()))
                self._adopt()
            case Given():
                self._running = message.running
            case Kill():
                self._kill(message)
        for fd in fds:
            os.close(fd)
        if isinstance(message, Offer | Declined | Given | Yours) and not self._heard.done():
            self._heard.set_result(message)

    def _offered(self, offer: Offer, fds: list[int]) -> None:
        self.release = offer.release
        self.sock = socket.socket(fileno=fds.pop(0))
        keepers = Keepers(offer.keepers) if offer.keepers else None
        if offer.weights:
            self.weights = WeightsMemory.given(fds.pop(0), keepers)
        for engine in offer.engines:
            self.kv[engine] = KVMemory.given(fds.pop(0), keepers)
        self._offer = offer
        self._tensors = SharedWeights.given(fds.pop(0)) if offer.number and not offer.path else None
        if offer.keepers:
            self.keepers = GivenKeepers(offer.keepers, [fds.pop(0) for _ in offer.keepers])

    async def _word(self, limit: float) -> ToSuccessor | None:
        """The next; None: it doesn't come, or the other has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                word = await self._heard
                self._heard = asyncio.get_running_loop().create_future()
                return word
        return None

    def _ended(self) -> None:
        """Nothing more will be heard."""
        self._gone.set()
        if not self._heard.done():
            self._heard.set_result(None)
        if self._mine:
            self._alone()

    async def _over(self) -> bool:
        """Nothing was heard, or can be: has the other ended?"""
        return await asyncio.to_thread(readable, self._alive, MARGIN if self._gone.is_set() else 0.0)

    # -- in order

    def goes_on_with_its_weights(self, fleet: Fleet) -> None:
        """Which have come since it was started, if the command line says the same model as its own. Raises ConfigError,
        ModelError: they can't be had any more."""
        offer = self._offer
        if not offer.number:
            return
        if offer.began != fleet.began:
            logger.warning("weights are those of this command line, not those that process %d was given", self.pid)
            return
        fleet.begin_with(offer.path, self._tensors, offer.number)
        logger.info("goes on with weights %d, %s", offer.number, offer.path or "which are in memory")

    async def take(self) -> None:
        """Have all of it. Raises ConfigError: the other serves on."""
        self.packets.send(Take())
        word = await self._word(GIVES)
        if isinstance(word, Declined):
            raise _declined(self.pid, word.why)
        if word is None and not await self._over():
            raise _declined(self.pid, "it did not give up its engines")

    def follow(self, fleet: Fleet) -> None:
        """Tell the other of these engines, from now on."""
        self._fleet = fleet
        own = fleet.dispatcher.on_changed

        def changed() -> None:
            own()
            self.publish()

        fleet.dispatcher.on_changed = changed
        self.publish()

    def publish(self) -> None:
        """See RootEngines."""
        if self._fleet is not None and not self.packets.closed:
            members = sorted(self._fleet.members.items())
            keepers = [keeper for _, keeper in members if not keeper.engine.ending]
            self.packets.send(State([listed(self._fleet, keeper) for keeper in keepers]))

    async def keep(self) -> None:
        """The engines are ready. Raises PlanariaError: the other has taken everything back."""
        self.packets.send(Serving())
        if await self._word(ANSWERS) is None and not await self._over():
            raise PlanariaError(f"process {self.pid}, whose place this one was to take, serves on")
        self._mine = True

    def begin(self, life: Lifecycle[Service]) -> None:
        """It accepts connections: here is what the other has given, or gives from now on."""
        self._life = life
        for id in self._running:  # there
            response_passing.runs_elsewhere(life.service.responses, id, self._withdraw)
        self._bring()
        self._adopt()
        if self.packets.closed:
            self._alone()

    def _bring(self) -> None:
        if self._life is not None:
            responses = self._life.service.responses
            for id, data in self._written.items():
                if data:
                    response_passing.bring(responses, scan(data)[0], self._withdraw)
                else:
                    response_passing.forget(responses, id)
            self._written = {}

    def _withdraw(self, id: str, why: str) -> None:
        self.packets.send(Withdraw(id, why))

    def _adopt(self) -> None:
        if self._life is not None:
            for conn in self._idle:
                self._life.server.listener.adopt(conn)
            self._idle = []

    def _kill(self, message: Kill) -> None:
        keeper = self._fleet.members.get(message.engine) if self._fleet is not None else None
        if keeper is not None and keeper.number == message.process and keeper.ended is None and keeper.handle:
            keeper.handle.give_up(message.why)

    def _alone(self) -> None:
        """The other has ended, with whatever it had."""
        logger.info("process %d, whose place this one took, has ended", self.pid)
        for keeper in self._fleet.members.values() if self._fleet is not None else ():
            if keeper.handle is not None and keeper.handle.address and keeper.ended is None:
                keeper.handle.send(Gone(client_name(self.pid)))
        if self._life is not None:
            response_passing.none_elsewhere(self._life.service.responses)

    # -- the end

    async def finish(self, timeout: float) -> None:
        """Before the engines end: the other gets `timeout` seconds for what its clients have asked for."""
        if not self._mine or self._gone.is_set():
            return
        self.packets.send(Stop())
        with heard(lambda number: self.packets.send(Stop())), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout + LAST_ANSWERS + MARGIN):
                await self._gone.wait()

    @property
    def busy_with(self) -> str:
        """Why nobody can take the place of this one yet."""
        if self._gone.is_set():
            return ""
        return f"process {self.pid}, whose place it took, still answers its clients"

    def close(self) -> None:
        self.packets.close()
        for conn in self._idle:
            conn.close()
        os.close(self._alive)


def _declined(pid: int, why: str) -> ConfigError:
    return ConfigError(
        "--replace", True, f"process {pid} serves on: {why}", "end it and start this one, or try again later"
    )
