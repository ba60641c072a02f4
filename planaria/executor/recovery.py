"""What a recovery is: how often there may be one, how long until everybody goes on, what the log says of it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from planaria.topology import Layout
from planaria.wire import Recovery, Travel


class Reformations:
    """How often an engine may begin anew without getting anywhere: `limit` times within `window` seconds with no token
    committed since the one before."""

    def __init__(self, limit: int, window: float) -> None:
        self.limit, self.window = limit, window
        self._fruitless: deque[float] = deque()

    def allowed(self, now: float, progressed: bool) -> bool:
        """May there be another? `progressed`: a token was committed since the last one."""
        if progressed:
            self._fruitless.clear()
        self._fruitless.append(now)
        while now - self._fruitless[0] > self.window:
            self._fruitless.popleft()
        return len(self._fruitless) <= self.limit


class Replay:
    """How long it takes until all go on. Begins when a recovery is `done`, at `now` (seconds). `ids`: of the sequences
    that had tokens."""

    def __init__(self, done: Recovery, ids: Iterable[str], now: float) -> None:
        self.done, self.began, self.first = done, now, 0.0
        self._waiting = set(ids)
        self._all = len(self._waiting)

    def heard(self, id: str, now: float) -> Recovery | None:
        """A sequence got a token, or has ended; the recovery with its replay, when nobody waits any more."""
        if id not in self._waiting:
            return None
        if len(self._waiting) == self._all:
            self.first = now - self.began
        self._waiting.remove(id)
        if self._waiting:
            return None
        replay = {"first token": self.first, "replay": now - self.began}
        return msgspec.structs.replace(self.done, seconds=self.done.seconds | replay)


def is_replayed(message: Recovery) -> bool:
    """Is it the last that is said of a fault?"""
    return "replay" in message.seconds


def told_replay(message: Recovery) -> str:
    """A line for the log."""
    first, all = message.seconds["first token"], message.seconds["replay"]
    return f"replay: the first sequence has its next token {first:.2f} s after that, the last {all:.2f} s"


def layout_name(layout: Layout, dcp: int = 1) -> str:
    """As in EngineFacts: the lanes, where there are several, then the degrees of each. dcp: tensor ranks that share a
    sequence's tokens."""
    lanes = f"dp={layout.dp} " * (layout.dp > 1)
    contexts = f" pcp={layout.pcp}" * (layout.pcp > 1) + f" dcp={dcp}" * (dcp > 1)
    return f"{lanes}tp={layout.tp} pp={layout.pp}{contexts}"


def travel_told(travel: Travel) -> str:
    """Of experts when an epoch began."""
    moved, needed = (f"{size / 2**20:.1f} MiB" for size in (travel.moved, travel.needed))
    return f"experts: {moved} moved between ranks, {needed} had to; {travel.read} read from the checkpoint"


def told(done: Recovery, replaced: bool, before: str) -> str:
    """The block of the log that says what happened and what was done. before: the layout until then."""
    ranks = ", ".join(map(str, done.ranks))
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in done.seconds.items() if part != "total")
    if before != done.layout:
        what = f"went from {before} to {done.layout}"
    else:
        what = "replaced it" if replaced else "kept its process"
    lines = [
        done.cause if done.kind == "layout" else f"rank {ranks} failed in {done.phase}: {done.cause}",
        *(done.traceback.rstrip().splitlines() if done.traceback else ()),
        f"{what}, began epoch {done.epoch} ({done.layout}) after {done.seconds.get('total', 0.0):.2f} s: {parts}",
        f"{done.requests} requests go on; {done.tokens} tokens are computed again",
        *((travel_told(done.travel),) if done.travel is not None else ()),
    ]
    return "\n  ".join(lines)
