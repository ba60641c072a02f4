"""The engines of a root, as its API processes are told of them, and what these say of them: they have the sequences,
each its own, know an engine's processes by number, and none is told twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

import msgspec

from planaria.core.quarantine import ExclusiveUses
from planaria.errors import PlanariaError
from planaria.server.api_processes import ApiProcess, ApiProcesses
from planaria.server.attached import client_name
from planaria.server.engine import Engine
from planaria.server.fleet import Fleet
from planaria.server.keeper import EngineKeeper
from planaria.server.root_messages import Kill, LetGo, Listed, State, ToRoot, TracedRecovery, Wants
from planaria.wire import Gone

REACHED = 10.0  # seconds an API process gets to connect to an engine that has come up


def listed(fleet: Fleet, keeper: EngineKeeper) -> Listed:
    """An engine, as others are told of it."""
    engine, handle = keeper.engine, keeper.handle
    found = Listed(
        index=keeper.index, process=keeper.number, ended=keeper.ended, as_told=keeper.as_told, dead=engine.dead,
        joined=fleet.dispatcher.joined(keeper.index), leaving=engine.leaving, kind=engine.kind,
        exclusive_use=keeper.exclusive_uses.now,
    )  # fmt: skip
    if handle is not None:
        found = msgspec.structs.replace(found, pid=handle.pid, address=handle.address, keys=handle.keys)
    return found


class RootEngines:
    """Moves sequences, too: each API process moves its own (see `planaria.server.fleet.Mover`)."""

    def __init__(self, fleet: Fleet, apis: ApiProcesses) -> None:
        self.fleet, self.apis = fleet, apis
        self.recoveries: Collection[TracedRecovery] = ()
        fleet.mover, fleet.others, fleet.dispatcher.on_changed = self, apis.report, self.publish
        apis.lost = self._lost
        if fleet.dispatcher.loras is not None:
            fleet.dispatcher.loras.changed = self._other_loras

    # -- what API processes are told

    def publish(self) -> None:
        """Say what there is; nobody is to use those that end."""
        members = sorted(self.fleet.members.items())
        engines = [listed(self.fleet, keeper) for _, keeper in members if not keeper.engine.ending]
        loras = self.fleet.dispatcher.loras
        named = list(loras.named.values()) if loras is not None else []
        self.apis.publish(State(engines, named, list(self.recoveries)))

    async def _other_loras(self) -> None:
        """Returns when every API process knows of them: it has carried out an order that came later."""
        self.publish()
        await self.apis.order("settle")

    async def hand_over_all(self, engine: Engine) -> int:
        """Raises PlanariaError when nobody can take over."""
        done = await self.apis.order("hand over", engine.index)
        error = next((done.error for done in done if done.error), "")
        if error:
            raise PlanariaError(error)
        return sum(part.moved for part in done)

    async def take_share(self, engine: Engine) -> int:
        return sum(part.moved for part in await self.apis.order("take share", engine.index, REACHED))

    async def emptied(self, indices: Iterable[int], timeout: float) -> None:
        await asyncio.gather(*(self.apis.order("empty", index, timeout) for index in indices))

    async def leave(self, engine: Engine) -> None:
        engine.ending = True
        self.publish()
        await self.apis.order("settle")

    # -- what they say

    def hear(self, api: ApiProcess, message: ToRoot) -> None:
        """All that is about engines."""
        match message:
            case Kill():
                keeper = self.fleet.members.get(message.engine)
                handle = keeper.handle if keeper is not None and keeper.number == message.process else None
                if handle is not None and keeper is not None and keeper.ended is None:
                    handle.give_up(message.why)
            case Wants():
                self._uses(message.engine, lambda uses: uses.want(api.number, message.alone, list(self.apis.all)))
            case LetGo():
                self._uses(message.engine, lambda uses: uses.let_go(api.number, message.serial))

    def _uses(self, index: int, change: Callable[[ExclusiveUses], None]) -> None:
        if (keeper := self.fleet.members.get(index)) is not None:
            change(keeper.exclusive_uses)
            self.publish()

    def _lost(self, api: ApiProcess) -> None:
        """What it has asked of engines nobody waits for any more."""
        for keeper in self.fleet.members.values():
            if keeper.handle is not None and keeper.handle.address and keeper.ended is None:
                keeper.handle.send(Gone(client_name(api.number)))
            keeper.exclusive_uses.left(api.number, list(self.apis.all))
        self.publish()
