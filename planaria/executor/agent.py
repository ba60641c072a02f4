"""A node's agent: starts, watches and ends this node's ranks for a driver on another node.

Ranks end with their driver: when it says so, and when the connection to it breaks, for it may have ended, or go on
without this node. Then the agent waits for it, or for the next one in its place, and has ranks again. Ranks are
children of this process, so they end with it also when it is killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from planaria.config.machine import usable_cores
from planaria.config.options import EngineConfig, ParallelConfig
from planaria.config.secret import deployment_secret
from planaria.executor import node_messages as messages
from planaria.executor.boot import RankBoot, Room
from planaria.executor.joining import Attendant
from planaria.executor.launcher.nodes import JOIN_TIMEOUT, what_must_agree
from planaria.executor.launcher.process import ProcessLauncher
from planaria.executor.node_messages import Arrange, Ended, GiveUp, Prepare, Prepared, Run, Started
from planaria.node import home, node_name

logger = logging.getLogger("planaria.agent")

LOOK = 1.0  # seconds between looks whether a spare has got ready


def node_agent(config: EngineConfig, module: str) -> NodeAgent:
    """Of this node; its ranks run `module`. Raises ConfigError for a secret that is missing or bad."""
    spares = config.faults.spare_workers

    def adapt(boot: RankBoot) -> RankBoot:
        own = msgspec.structs.replace(boot.config, checkpoint=config.checkpoint)  # the same model, where it is here
        return msgspec.structs.replace(boot, config=own)

    return NodeAgent(
        config.parallel, lambda ranks, address: ProcessLauncher(module, ranks, address, spares=spares), adapt,
        deployment_secret(config.parallel), what_must_agree(config), spares=spares,
    )  # fmt: skip


class NodeAgent(Attendant):
    """make_local(ranks, address) gives the launcher; adapt(boot) makes a boot fit this node (its own model folder).
    The rest is as Attendant's."""

    def __init__(
        self, parallel: ParallelConfig, make_local: Callable[[Sequence[int], str], ProcessLauncher],
        adapt: Callable[[RankBoot], RankBoot], secret: bytes, same: Mapping[str, str], *, spares: int = 0,
        join_timeout: float = JOIN_TIMEOUT,
    ) -> None:  # fmt: skip
        super().__init__(
            parallel, secret, messages.PURPOSE, same, join_timeout, messages.encode_from_agent,
            messages.decode_to_agent,
        )  # fmt: skip
        self.make_local, self.adapt, self.spares = make_local, adapt, spares
        self.local: ProcessLauncher | None = None
        self._told: set[int] = set()  # processes whose end was told, by pid
        self._room = Room(0, 0, 0)  # as the driver was told

    def welcomed(self) -> None:
        self.local = self.make_local((), self.address)
        self.local.on_exit = self._on_exit

    def look_after(self) -> float | None:
        return LOOK if self._awaits_spares() else None

    def look(self) -> None:
        if self.local is not None and self.local.capacity() != self._room:
            self._say_room(self.local)

    def end(self, *, kill: bool) -> None:
        local, self.local = self.local, None
        if local is not None and kill:
            local.kill()
        elif local is not None:
            local.close()

    def told(self, message: Any) -> None:
        assert self.local is not None  # a driver welcomes first
        local = self.local
        match message:
            case Arrange():
                local.more_slots(message.slots)
                self.say(self._arranged(local, message))
                self._on_exit()  # what ended before that was said
            case Prepare():
                local.more_slots(message.slots)
                local.get_ready(message.ranks, self._own(RankBoot.decode(message.boot)))
                self._say_room(local)
            case GiveUp():
                local.give_up(message.ranks)
            case Run():
                boots = [self.adapt(RankBoot.decode(data)) for data in message.boots]
                local.run([boot for boot in boots if boot.rank in local.processes])

    def _arranged(self, local: ProcessLauncher, message: Arrange) -> Started:
        local.end([*message.lost, *local.lost()])
        room = local.capacity()
        if room.good < len(message.ranks):
            return Started((), room, f"there is room for {room.good} processes, {len(message.ranks)} are asked for")
        try:
            places = local.arrange(message.ranks)
        except OSError as e:
            return Started((), local.capacity(), f"{e}")
        return Started(tuple(places), local.capacity())

    def _awaits_spares(self) -> bool:
        return self.local is not None and not all(spare.ready for spare in self.local.spares)

    def _say_room(self, local: ProcessLauncher) -> None:
        self._room = local.capacity()
        self.say(Prepared(self._room))

    def _own(self, boot: RankBoot) -> RankBoot:
        """A spare's, of this node."""
        place = msgspec.structs.replace(
            boot.place, home=home(), node=node_name(), address=self.address, pid=0, cores=usable_cores()
        )
        return self.adapt(msgspec.structs.replace(boot, place=place))

    def _on_exit(self) -> None:
        """In a watcher's thread, too."""
        local = self.local
        for rank, how in local.lost().items() if local is not None else ():
            process = local.processes.get(rank) if local is not None else None
            if process is not None and process.pid not in self._told:
                self._told.add(process.pid)
                logger.error("rank %d %s", rank, how)
                self.say(Ended(process.pid, how))
        if (port := self.port) is not None:
            port.wake()  # it may have been a spare
