"""Which of a server's models are loaded: at most so many at a time. One that a request wants is loaded on demand; the
one that was used longest ago, and has nothing open, makes room.

Nothing that runs is interrupted for it, and what has been idle for long makes room also for nobody. Where all that are
loaded have something open, the one that was used longest ago gets no new requests once somebody has waited for `TURN`:
they wait, too, and it makes room when what runs in it has ended. One change is carried out at a time, so that memory is
never that of more models than may be loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from planaria.errors import CapacityError, PlanariaError, RequestError
from planaria.hosts.pool import BackOff
from planaria.server.residence import Residence
from planaria.server.service import Service

logger = logging.getLogger("planaria.server")

TURN = 5.0  # seconds that a model which is busy gets new requests while others wait, and after it was loaded
PATIENCE = 300.0  # seconds that a request waits for its model to be loaded
MAX_WAITING = 1024  # requests that wait for models to be loaded; beyond that 503
FIRST, LONGEST = 1.0, 60.0  # seconds between two tries to load a model that can't be

UNLOADED, LOADING, LOADED, UNLOADING, FAILED = "unloaded", "loading", "loaded", "unloading", "failed"


class Waiter(NamedTuple):
    """since: time.monotonic(); open: it is one of the service's `open`."""

    since: float
    open: bool


class ServedModel:
    """One of them, a `ModelPlace`. table: of all."""

    def __init__(self, service: Service, residence: Residence) -> None:
        self.service, self.residence = service, residence
        self.table: ModelTable
        self.state = UNLOADED
        self.why = self.told = ""  # why it failed, and what clients are told of that
        self.used = self.since = 0.0  # time.monotonic() when a request last began or ended, and when it was loaded
        self.loads, self.seconds = 0, 0.0  # how often it was loaded, and for how long the last time
        self.pause = BackOff(LONGEST, FIRST)
        self.waiting: dict[asyncio.Future[None], Waiter] = {}  # the first one first
        self.held: set[asyncio.Future[None]] = set()  # of those that waited and aren't `open`
        service.place, service.on_closed = self, self._closed

    @property
    def name(self) -> str:
        return self.service.model_names[0]

    @property
    def known(self) -> bool:
        """Can a request be checked? It could be loaded once, and hasn't died since."""
        return self.service.client.facts is not None and self.service.client.dead is None

    @property
    def running(self) -> int:
        """Requests that are open, or hold it, and don't wait for it to be loaded."""
        return len(self.service.open) - sum(waiter.open for waiter in self.waiting.values()) + len(self.held)

    @property
    def idle(self) -> bool:
        return self.state == LOADED and not self.running and not self.residence.busy

    def _closed(self) -> None:
        self.used = time.monotonic()
        self.table.changed.set()

    def admits(self) -> bool:
        if self.state != LOADED or self.table.closing is self:
            return False
        self.used = time.monotonic()
        return True

    async def enter(self) -> None:
        if not self.admits():
            await self._wait(asyncio.get_running_loop().create_future(), open=True)

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait until it is loaded, and have it stay so until the block ends. Raises RequestError."""
        admitted = asyncio.get_running_loop().create_future()
        try:
            if self.admits():
                self.held.add(admitted)
            else:
                await self._wait(admitted, open=False)
            yield
        finally:
            self.held.discard(admitted)
            self._closed()

    async def _wait(self, admitted: asyncio.Future[None], *, open: bool) -> None:
        """open: a `Generation` that is open waits. Raises RequestError."""
        if self.state == FAILED and time.monotonic() < self.pause.at:
            raise RequestError(self.told, code="not_ready", status=503)
        if sum(len(model.waiting) for model in self.table.models) >= MAX_WAITING:
            why = f"{MAX_WAITING} requests wait for models to be loaded"
            raise RequestError(why, code="overloaded", status=503)
        self.waiting[admitted] = Waiter(time.monotonic(), open)
        self.table.changed.set()
        try:
            async with asyncio.timeout(PATIENCE):
                await admitted
        except TimeoutError:
            raise RequestError(self.table.why_not(self), code="not_ready", status=503) from None
        finally:
            if self.waiting.pop(admitted, None) is not None:
                self.table.changed.set()  # others may not have to make room now

    def admit_all(self) -> None:
        """Whoever waits counts as running from now on."""
        waiting, self.waiting = self.waiting, {}
        for admitted, waiter in waiting.items():
            if not admitted.done():
                self.used = time.monotonic()
                admitted.set_result(None)
                if not waiter.open:
                    self.held.add(admitted)

    def fail(self, why: str, told: str) -> None:
        """It can't be loaded, or has died: who waits is told, and it is tried again for who comes after a pause."""
        self.state, self.why, self.told = FAILED, why, told
        self.pause.failed(time.monotonic())
        self.refuse_all(told)

    def refuse_all(self, why: str, status: int = 503, code: str = "not_ready") -> None:
        """Who waits."""
        waiting, self.waiting = self.waiting, {}
        for admitted in waiting:
            if not admitted.done():
                admitted.set_exception(RequestError(why, code=code, status=status))


class ModelTable:
    """models: of which the first ones are loaded by `start`. host_memory: bytes that unloaded ones may keep.
    idle_limit: seconds without a request after which one is unloaded, though nobody needs its place. closing: the one
    that gets no new requests, to make room."""

    def __init__(
        self, models: list[ServedModel], most: int, host_memory: int = 0, idle_limit: float | None = None
    ) -> None:
        self.models, self.most, self.host_memory, self.idle_limit = models, most, host_memory, idle_limit
        self.closing: ServedModel | None = None
        self.changed = asyncio.Event()
        self._alone = asyncio.Lock()  # who loads or unloads
        self._task: asyncio.Task[None] | None = None
        for model in models:
            model.table = self

    async def start(self) -> None:
        """Load as many as may be. Raises UserError, CapacityError or EngineDead for the first that can't be."""
        for model in self.models[: self.most]:
            async with self._alone:
                try:
                    await self._load(model)
                except PlanariaError:
                    logger.error("%s", model.why)  # which of them it is
                    raise
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Change nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def why_not(self, model: ServedModel) -> str:
        """For who has waited for long."""
        if model.state == LOADING:
            return f"model {model.name!r} is still being loaded after {PATIENCE:g} s; ask again"
        others = ", ".join(f"{m.name} ({m.state}, {m.running} requests)" for m in self._there() if m is not model)
        return (
            f"model {model.name!r} could not be loaded within {PATIENCE:g} s: of {len(self.models)} models {self.most} "
            f"may be loaded, and there is: {others or 'none'}"
        )

    # -- by hand

    async def unload(self, model: ServedModel) -> str:
        """Have it unloaded, if nothing is open in it; else why not."""
        async with self._alone:
            if model.state != LOADED:
                return ""
            if not model.idle:
                what = "a change of it is under way" if model.residence.busy else f"it has {model.running} requests"
                return f"model {model.name!r} can't be unloaded now: {what}"
            await self._unload(model)
        self.changed.set()
        return ""

    def look(self) -> None:
        """Some times a second: a model whose engines have all died is loaded anew for the next request, one that is
        busy gets no new ones when others have waited for long, and one that was idle for long is unloaded."""
        if self._wanted() is not None or any(map(self._idle_for_long, self.models)):
            self.changed.set()
        for model in self.models:
            dead = model.service.client.dead
            if model.state == LOADED and dead is not None:
                why = f"the engine of model {model.name!r} has ended: {dead.message}"
                logger.error("%s", why)
                if dead.detail and dead.kind == "error":
                    logger.error("%s", dead.detail)
                model.fail(why, why)
                model.service.abort_all(why, 500, "engine_error")
                self.changed.set()

    # -- one change after the other

    async def _run(self) -> None:
        while True:
            await self.changed.wait()
            self.changed.clear()
            try:
                async with self._alone:
                    await self._settle()
            except Exception:
                logger.exception("a model could not be loaded or unloaded")
                await asyncio.sleep(FIRST)
                self.changed.set()

    async def _settle(self) -> None:
        """Load what is waited for, the longest first, as far as there is room."""
        while (model := self._wanted()) is not None:
            if len(self._there()) >= self.most:
                victim = self._oldest(m for m in self.models if m.idle and (m is self.closing or not m.waiting))
                if victim is None:
                    self._close_one(next(iter(model.waiting.values())).since)
                    break
                await self._unload(victim, model)
            elif model.waiting:  # nobody may, meanwhile
                try:
                    await self._load(model)
                except (PlanariaError, OSError):
                    logger.error("%s", model.why)
        else:
            self.closing = None
        for model in self.models:
            if model.state == LOADED and model is not self.closing:
                model.admit_all()
        for model in self.models:
            if self._idle_for_long(model):
                await self._unload(model)

    def _idle_for_long(self, model: ServedModel) -> bool:
        return self.idle_limit is not None and model.idle and time.monotonic() > model.used + self.idle_limit

    def _wanted(self) -> ServedModel | None:
        wanted = [model for model in self.models if model.waiting and model.state in (UNLOADED, FAILED)]
        return min(wanted, key=lambda model: next(iter(model.waiting.values())).since, default=None)

    def _close_one(self, since: float) -> None:
        """All are busy, and somebody has waited since then."""
        if self.closing is None or self.closing.state != LOADED:
            able = self._oldest(m for m in self.models if m.state == LOADED and not m.residence.busy)
            late = able is not None and time.monotonic() > max(since, able.since) + TURN
            self.closing = able if late else None

    def _oldest(self, models: Iterable[ServedModel]) -> ServedModel | None:
        return min(models, key=lambda model: model.used, default=None)

    def _there(self) -> list[ServedModel]:
        return [model for model in self.models if model.state in (LOADING, LOADED, UNLOADING)]

    async def _load(self, model: ServedModel) -> None:
        """Raises PlanariaError, OSError."""
        began, model.state = time.monotonic(), LOADING
        try:
            self._deal()
            await model.residence.load()
        except (PlanariaError, OSError) as e:
            why = f"model {model.name!r} can't be loaded: "
            reason = str(e) if isinstance(e, CapacityError) else "the server's log says why"  # and where, on its disk
            model.fail(f"{why}{e}", f"{why}{reason}")
            await self._make_room()
            raise
        except BaseException:
            model.state = UNLOADED
            raise
        finally:
            self._deal()
        model.pause.worked()
        model.state, model.why, model.told, model.used = LOADED, "", "", time.monotonic()
        model.since, model.loads, model.seconds = model.used, model.loads + 1, model.used - began
        logger.info("model %r was loaded in %.2f s", model.name, model.seconds)
        model.admit_all()

    async def _unload(self, model: ServedModel, wanted: ServedModel | None = None) -> None:
        """wanted: will be loaded in its place."""
        began, model.state = time.monotonic(), UNLOADING
        try:
            await model.residence.unload()
        finally:
            model.state = UNLOADED
            self.closing = None
        logger.info("model %r was unloaded in %.2f s", model.name, time.monotonic() - began)
        await self._make_room(wanted)
        self._deal()

    async def _make_room(self, wanted: ServedModel | None = None) -> None:
        """Keep what may be kept: KV goes before weights, and what was used longest ago before the rest."""
        idle = sorted((m for m in self.models if m not in self._there() and m is not wanted), key=lambda m: m.used)
        for weights in (False, True):
            for model in idle:
                if sum(m.residence.num_bytes for m in idle) <= self.host_memory:
                    return
                await model.residence.drop(weights=weights)

    def _deal(self) -> None:
        """Deal the node's cores over the engines that are there."""
        there = self._there()
        engines = sum(len(model.residence.fleet.members) for model in there)
        for model in there:
            model.residence.fleet.share_out(engines)
