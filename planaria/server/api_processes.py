"""The API processes of a server, as the root has them: started, heard, replaced when they end. All accept connections
from one socket that they inherit.

What one of them has counted outlives it: `totals` never falls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from planaria import preload
from planaria.config.data_parallel import as_api_process
from planaria.config.options import EngineConfig
from planaria.executor.recovery import Reformations
from planaria.hosts.host import Child, Program
from planaria.hosts.local import HERE, LocalHost
from planaria.hosts.pool import BackOff
from planaria.logs import current_level
from planaria.node import node_name, process_state, resident_bytes
from planaria.server.background import Background
from planaria.server.channel import Channel
from planaria.server.config import ServerConfig
from planaria.server.counts import added
from planaria.server.engine_client import LOOK, STOPPED, Ending
from planaria.server.inputs import child_seed
from planaria.server.neighbours import KEEPER
from planaria.server.questions import PendingAnswers
from planaria.server.root_messages import ApiOrder, Boot, Counts, OrderDone, Serving, State, Stop, ToRoot, Unable
from planaria.wire import ProcessInfo

logger = logging.getLogger("planaria.server")

ANSWER_LIMIT = 1.0  # seconds for counts; one that doesn't answer has those it said last
ENDING = 2.0  # seconds that one may take to end once it has closed its channel
ASK, HUNG = 5.0, 30.0  # seconds of silence after which one is asked something, and is given up
RESTARTS, WINDOW = 5, 300.0  # times in so many seconds that API processes may end before they serve
_decoder = msgspec.msgpack.Decoder(ToRoot)


class ApiProcess:
    """One of them. number: no other ever has the same; rank: its place among those that there are."""

    def __init__(self, number: int, rank: int) -> None:
        self.number, self.rank = number, rank
        self.child: Child
        self.end = Ending()
        self.channel: Channel[ToRoot]
        self.serving = asyncio.Event()
        self.orders = PendingAnswers[OrderDone]()
        self.counts = Counts()
        self.silent = 0.0  # seconds without a message, by looks

    @property
    def pid(self) -> int:
        return self.child.place.pid

    def kill(self) -> None:
        self.child.kill()


class ApiProcesses:
    """hear: gets what they say that isn't dealt with here; lost: hears of each that has ended."""

    def __init__(self, config: EngineConfig, settings: ServerConfig, tokenizer: bool, sock: socket.socket) -> None:
        self.config, self.settings, self.tokenizer, self.sock = config, settings, tokenizer, sock
        self.hear: Callable[[ApiProcess, ToRoot], None] = lambda api, message: None
        self.lost: Callable[[ApiProcess], None] = lambda api: None
        self.state = State([])
        self.all: dict[int, ApiProcess] = {}  # by number
        self.failure = ""  # why no other is started
        self.changed = asyncio.Event()  # one is serving, has ended, or no other is started
        self.stopping = False
        self._past = Counts()  # of those that have ended
        self._numbers = itertools.count()
        self._limit = Reformations(RESTARTS, WINDOW)
        self._attending = Background()
        self.host = LocalHost(devices=(), forks={preload.API: preload.of_an_api_process()})

    async def start(self, count: int) -> None:
        await asyncio.gather(*(self._start(rank) for rank in range(count)))

    async def _start(self, rank: int) -> None:
        number = next(self._numbers)
        parallel = as_api_process(self.config.parallel, rank)
        ours, theirs = socket.socketpair()
        fds = self.sock.fileno(), theirs.fileno()
        api = ApiProcess(number, rank)
        seed = self.settings.seed
        settings = msgspec.structs.replace(
            self.settings, seed=None if seed is None else child_seed(seed, number), **self._journal(rank)
        )
        config = msgspec.structs.replace(self.config, parallel=parallel)
        boot = msgspec.msgpack.encode(Boot(config, settings, self.tokenizer, number))
        spawn = functools.partial(self.host.spawn, (HERE, rank), Program(preload.API, (current_level(),)), boot)
        try:
            with theirs:
                api.child = await asyncio.to_thread(spawn, api.end.news, fds)  # the first may wait for imports
        except OSError:
            ours.close()
            raise
        try:
            api.channel = await Channel.open(ours, _decoder)
        except BaseException:
            api.kill()
            ours.close()
            raise
        api.channel.send(self.state)
        self.all[number] = api
        self._attending.start(self._attend(api))

    def _journal(self, rank: int) -> dict[str, Any]:
        """One of them keeps responses; what it has written its successor goes on with."""
        if rank != KEEPER:
            return {"journal": None}
        ends = self.settings.journal is None
        return {"journal": os.path.join(self.settings.passing, "responses"), "journal_ends": True} if ends else {}

    async def _attend(self, api: ApiProcess) -> None:
        """Until it has ended."""
        watching = asyncio.create_task(self._watch(api))
        try:
            while (message := await api.channel.receive()) is not None:
                api.silent = 0.0
                match message:
                    case Serving():
                        api.serving.set()
                        self.changed.set()
                    case Unable():
                        self.failure = message.why
                        self.changed.set()
                    case OrderDone():
                        api.orders.answer(message.id, message)
                    case _:
                        self.hear(api, message)
        except Exception:
            logger.exception("API process %d said what can't be", api.pid)
        if not self.stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(api.end.wait(), ENDING)
            api.kill()  # without its channel it is nothing
        await api.end.wait()
        watching.cancel()
        del self.all[api.number]
        api.orders.answer_all(OrderDone(0))
        self._past = added(
            [self._past, msgspec.structs.replace(api.counts, requests=0, open={}, moved=0.0, responses=[])]
        )
        self.lost(api)
        await api.channel.close()
        if not self.stopping:
            await self._replace(api)
        self.changed.set()

    async def _replace(self, api: ApiProcess) -> None:
        if self.failure:
            return
        how, pauses = api.child.ended, BackOff()
        if not self._limit.allowed(time.monotonic(), api.serving.is_set()):
            self.failure = f"API processes end again and again before they serve; the last one {how}"
            return
        logger.warning("API process %d (%d) %s: its requests are cancelled, another is started", api.rank, api.pid, how)
        while not self.stopping:
            try:
                await self._start(api.rank)
                return
            except OSError as e:  # there may be descriptors, or memory, in a while
                logger.warning("no API process can be started: %s; trying again in %.0f s", e, pauses.pause)
            await asyncio.sleep(pauses.pause)
            pauses.failed(0.0)

    async def _watch(self, api: ApiProcess) -> None:
        """A stopped one answers nobody, nor does one that hangs."""
        stopped = 0.0
        while stopped < STOPPED and api.silent < HUNG:
            await asyncio.sleep(LOOK)  # looks are counted and not seconds, as with engines
            stopped = stopped + LOOK if process_state(api.pid) == "T" else 0.0
            if api.serving.is_set():
                api.silent += LOOK
                if api.silent % ASK < LOOK:
                    api.channel.send(ApiOrder(-1, "count"))
        why = "was stopped" if stopped >= STOPPED else f"said nothing for {api.silent:.0f} s"
        logger.warning("API process %d %s: killed", api.pid, why)
        api.kill()

    # -- what they are told

    def publish(self, state: State) -> None:
        """To all, and those that come."""
        if state != self.state:
            self.state = state
            for api in self.all.values():
                api.channel.send(state)

    async def order(
        self, what: str, engine: int = -1, timeout: float = 0.0, limit: float | None = None
    ) -> list[OrderDone]:
        """Have all of them do it; what each says, in time (`limit` seconds)."""

        return await asyncio.gather(*(self._tell(api, what, engine, timeout, limit) for api in list(self.all.values())))

    async def _tell(self, api: ApiProcess, what: str, engine: int, timeout: float, limit: float | None) -> OrderDone:
        try:
            return await api.orders.ask(lambda id: api.channel.send(ApiOrder(id, what, engine, timeout)), limit)
        except TimeoutError:
            return OrderDone(0, error=f"API process {api.pid} doesn't answer")

    async def count(self) -> None:
        """Have `totals` be of now."""

        async def one(api: ApiProcess) -> None:
            api.counts = (await self._tell(api, "count", -1, 0.0, ANSWER_LIMIT)).counts or api.counts

        await asyncio.gather(*(one(api) for api in list(self.all.values())))

    @property
    def totals(self) -> Counts:
        """Of all there ever were."""
        return added([self._past, *(api.counts for api in self.all.values())])

    async def serving(self) -> None:
        """Wait until all accept connections, or `failure` says why they don't."""
        while not self.failure and not all(api.serving.is_set() for api in self.all.values()):
            self.changed.clear()
            await self.changed.wait()

    def stop(self) -> None:
        """Have them finish what is open, and end; called again: abort it."""
        self.stopping = True
        for api in self.all.values():
            if api.serving.is_set():
                api.channel.send(Stop())
            else:
                api.kill()

    async def ended(self, timeout: float) -> None:
        """Wait for all; those that are still there after so many seconds are killed."""
        self.stopping = True
        if self._attending.tasks:
            await asyncio.wait(self._attending.tasks, timeout=timeout)
        for api in self.all.values():
            logger.warning("API process %d did not end in time: killed", api.pid)
            api.kill()
        if self._attending.tasks:
            await asyncio.wait(self._attending.tasks)
        self.host.close()

    def report(self) -> list[ProcessInfo]:
        """For people."""
        found = []
        for api in sorted(self.all.values(), key=lambda api: api.rank):
            state = "draining" if self.stopping else "ready" if api.serving.is_set() else "loading"
            memory = resident_bytes(api.pid)
            found.append(ProcessInfo("api", None, {"api": api.rank}, api.pid, node_name(), None, state, memory))
        return found
