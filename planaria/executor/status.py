"""What an engine says of itself: how it came up, and, when asked, each of its processes.

Rule: a `Report` is always answered, with what is known. Ranks that only they can look into are asked first, between two
steps; nobody waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from planaria.config.options import EngineConfig
from planaria.core.engine import EngineCore
from planaria.errors import CallFailed, EngineDead, UserError
from planaria.executor.gang import Gang
from planaria.executor.pending import Pending, PendingCalls
from planaria.node import home, node_name, process_state, resident_bytes, uptime
from planaria.protocol import Hello
from planaria.topology import Layout
from planaria.topology.table import CameUp
from planaria.wire import EngineFacts, FromEngine, Processes, ProcessInfo

_STATES = {"T": "stopped", "t": "stopped", "Z": "ended", "": "ended"}


def facts_of(config: EngineConfig, gang: Gang, core: EngineCore) -> EngineFacts:
    """Of ranks that have come up."""
    return EngineFacts(
        model=config.served_model_name,
        weights_number=config.weights_number,
        max_model_len=min(config.scheduler.max_model_len, gang.num_blocks * config.cache.block_size),
        vocab_size=config.model.vocab_size,
        num_parameters=config.model.num_parameters,
        dtype=config.device.dtype,
        quantization=config.device.quantization,
        device=config.device.device,
        threads=config.device.threads,
        num_blocks=gang.num_blocks,
        block_size=config.cache.block_size,
        weight_bytes=gang.weight_bytes,
        executor=gang.launcher.name,
        link=gang.link.name if gang.link is not None else "",
        layout=gang.named(gang.layout),
        ranks=[member.pid for member in gang.members],
        seconds=gang.seconds,
        places=places_of(gang),
        kv_bytes=gang.kv_bytes[gang.layout],
        drafts=drafting(config),
        shared_bytes=gang.shared_bytes,
        attention=gang.attention,
        committed={name.hex(): held.length for lane in core.lanes for name, held in lane.held.items()},
    )


def drafting(config: EngineConfig) -> tuple[str, int] | None:
    """Who drafts, and how many tokens of a sequence in a step at most."""
    if config.speculative is None:
        return None
    own, by = config.parallel.sd_worker_cls, config.speculative
    return (own if own != "auto" else f"{by.method} {by.model}".strip()), config.scheduler.max_drafts


def places_of(gang: Gang) -> list[CameUp]:
    """Where its ranks came up, by rank."""
    return [
        CameUp(at.host or member.node, at.devices, at.bundle)
        for member, at in zip(gang.members, gang.places, strict=True)
    ]


class Reports:
    """pending: what ranks are asked; busy: has the engine anything to do?"""

    def __init__(
        self, gang: Gang, pending: PendingCalls, busy: Callable[[], bool], emit: Callable[[FromEngine], None]
    ) -> None:
        self.gang, self.pending, self.busy, self.emit = gang, pending, busy, emit

    def ask(self, dead: bool) -> None:
        """dead: the engine has ended, and no rank answers."""
        if dead or all(here(member) for member in self.gang.members):
            self._tell({})
        else:
            try:
                self.pending.ask(self._hear, "resident")
            except EngineDead:
                self._tell({})

    def _hear(self, answers: Pending) -> None:
        try:
            resident = dict(enumerate(answers.result()))
        except (CallFailed, UserError):  # a worker class of the user's, which may not say
            resident = {}
        self._tell(resident)

    def _tell(self, resident: dict[int, int]) -> None:
        gang, state = self.gang, "busy" if self.busy() else "idle"
        spares = gang.launcher.spare_pids()
        found = process_rows(gang.members, gang.layout, gang.epoch, gang.ledger.owing(), resident, state, spares)
        self.emit(Processes(found))


def here(member: Hello) -> bool:
    """Can this process see that rank's?"""
    return member.home == home()


def process_rows(
    members: Sequence[Hello], layout: Layout, epoch: int, busy: Sequence[int], resident: Mapping[int, int], state: str,
    spares: Sequence[int] = (),
) -> list[ProcessInfo]:  # fmt: skip
    """This process, which is in `state`, then its ranks in order. busy: ranks that owe an answer. resident: bytes of
    ranks on other nodes, as they said. spares: pids, of this node. A rank inside this process has no entry."""
    pid = os.getpid()
    inside = next((member.rank for member in members if here(member) and member.pid == pid), None)
    found = [
        ProcessInfo(
            "engine", inside, {} if inside is None else _coordinates(inside, layout), pid, node_name(), epoch,
            state, resident_bytes(pid),
        )
    ]  # fmt: skip
    for member in members:
        rank, seen = member.rank, here(member)
        if rank == inside:
            continue
        found.append(ProcessInfo(
            "worker", rank, _coordinates(rank, layout), member.pid, member.node, epoch, _state(member, rank in busy),
            resident_bytes(member.pid) if seen else resident.get(rank, 0),
        ))  # fmt: skip
    for spare in spares:
        word = _STATES.get(process_state(spare), "idle")
        found.append(ProcessInfo("spare", None, {}, spare, node_name(), epoch, word, resident_bytes(spare)))
    seen_here = {pid, *spares, *(member.pid for member in members if here(member))}
    return [_timed(row) if row.pid in seen_here else row for row in found]


def _timed(row: ProcessInfo) -> ProcessInfo:
    """With its uptime, where it is of this node."""
    return msgspec.structs.replace(row, uptime=uptime(row.pid)) if row.node == node_name() else row


def _coordinates(rank: int, layout: Layout) -> dict[str, int]:
    at = layout.coords(rank)
    further = {"pcp": at.pcp} if layout.pcp > 1 else {}
    return {"tp": at.tp, **further, "pp": at.pp} | ({"dp": at.dp} if layout.dp > 1 else {})


def _state(member: Hello, busy: bool) -> str:
    word = _STATES.get(process_state(member.pid)) if here(member) else None
    return word or ("busy" if busy else "idle")
