"""The processes of an engine, for people: what is known of each rank, without waiting for any."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from planaria.node import home, node_name, process_state, resident_bytes
from planaria.protocol import Hello
from planaria.topology import Layout
from planaria.wire import ProcessInfo

_STATES = {"T": "stopped", "t": "stopped", "Z": "ended", "": "ended"}


def here(member: Hello) -> bool:
    """Can this process see that rank's?"""
    return member.home == home()


def census(
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
    return found


def _coordinates(rank: int, layout: Layout) -> dict[str, int]:
    at = layout.coords(rank)
    return {"tp": at.tp, "pp": at.pp} | ({"dp": at.dp} if layout.dp > 1 else {})


def _state(member: Hello, busy: bool) -> str:
    word = _STATES.get(process_state(member.pid)) if here(member) else None
    return word or ("busy" if busy else "idle")
