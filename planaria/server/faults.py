"""What happened to an engine and its ranks, for /health and /metrics: counts, and the last fault in full."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from datetime import UTC, datetime

import msgspec

from planaria.executor.recovery import is_replayed
from planaria.wire import Recovery

PARTS = ("detect", "fence", "replace", "regroup", "load", "replay")


KEPT = 50  # events that are remembered


class FaultLog:
    """Hears every `Recovery`. `part` is "engine" where no rank is named: the engine's own process ended. A change of
    the layout that nothing failed for is counted apart. `alive`: the engines that there are now; a fault of one that
    was given up is dealt with no more."""

    def __init__(self, alive: Callable[[], Collection[int]]) -> None:
        self._alive = alive
        self.faults = {"rank": 0, "engine": 0}
        self.recoveries = {"rank": 0, "engine": 0}
        self.replayed_tokens = 0
        self.seconds = 0.0
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.open: dict[int, float] = {}  # engine -> time.monotonic() of the fault that is being dealt with
        self.layout_changes = 0
        self.travel = {"moved": 0, "needed": 0, "read": 0}  # of experts, see wire.Travel
        self.last: Recovery | None = None  # fault
        self.when = ""  # of the last one, UTC
        self.last_change: dict[str, object] | None = None  # of the layout, for /health
        self.recent: deque[dict[str, object]] = deque(maxlen=KEPT)  # of both kinds, for the dashboard
        self._present: Recovery | None = None  # that is being dealt with, of either kind
        self._elsewhere: dict[int, tuple[int, int]] = {}  # engine -> requests and tokens of its process's last end

    def hear(self, message: Recovery) -> None:
        """A fault that was noticed, one that is over (with `seconds`), or one after which all requests go on."""
        if is_replayed(message):
            self._on_replay(message)
            return
        part, fault = "rank" if message.ranks else "engine", message.kind == "fault"
        self._present = message
        self._note(message)
        if fault:
            self.last = message
        if not message.seconds:
            if fault:
                self.faults[part] += 1
                self.when = _now()
                self._elsewhere.pop(message.engine, None)
            self.open.setdefault(message.engine, time.monotonic())
            return
        if fault:
            self.recoveries[part] += 1
        else:
            self.layout_changes += 1
            self.last_change = {
                "when": _now(), "engine": message.engine, "cause": message.cause, "layout": message.layout,
                "epoch": message.epoch, "seconds": _rounded(message.seconds), "experts": _travel(message),
            }  # fmt: skip
        if message.travel is not None:
            for what, number in msgspec.structs.asdict(message.travel).items():
                self.travel[what] += number
        self.replayed_tokens += message.tokens
        self.seconds += message.seconds.get("total", 0.0)
        for name in PARTS:
            self.parts[name] += message.seconds.get(name, 0.0)
        self.open.pop(message.engine, None)

    def replayed(self, engine: int, requests: int, tokens: int) -> None:
        """So much of another process goes on after the end of an engine's."""
        self.replayed_tokens += tokens
        before = self._elsewhere.get(engine, (0, 0))
        self._elsewhere[engine] = before[0] + requests, before[1] + tokens

    def _on_replay(self, message: Recovery) -> None:
        self.parts["replay"] += message.seconds["replay"]
        whose = message.engine, message.epoch
        if message.kind != "fault":
            if self.last_change is not None and (self.last_change["engine"], self.last_change["epoch"]) == whose:
                self.last_change["seconds"] = _rounded(message.seconds)
        elif self.last is not None and (self.last.engine, self.last.epoch) == whose:
            self.last = message

    def _note(self, message: Recovery) -> None:
        """An entry when it is noticed, completed when it is over."""
        if not message.seconds:
            what = whose(message) if message.kind == "fault" else "another layout"
            self.recent.append({
                "when": _now(), "engine": message.engine, "what": what, "cause": message.cause, "layout": "",
                "epoch": message.epoch, "seconds": None,
            })  # fmt: skip
            return
        for entry in self.recent:
            if entry["engine"] == message.engine and entry["seconds"] is None:
                entry.update(layout=message.layout, epoch=message.epoch, seconds=message.seconds.get("total", 0.0))

    def settled(self, engine: int) -> None:
        """It is ready, was given up or has left: nothing is dealt with there any more, whatever was said of that."""
        self.open.pop(engine, None)

    @property
    def recovering(self) -> bool:
        alive = self._alive()
        self.open = {engine: since for engine, since in self.open.items() if engine in alive}
        return bool(self.open)

    def why(self) -> str:
        """What is being done, in a line; "" if nothing."""
        if not self.recovering or self._present is None:
            return ""
        since, present = time.monotonic() - min(self.open.values()), self._present
        what = f"{whose(present)}: {present.cause}" if present.kind == "fault" else present.cause
        return f"recovering for {since:.1f} s: {what}"

    def last_fault(self) -> dict[str, object] | None:
        """For /health. Seconds by part, empty while it is being dealt with."""
        fault = self.last
        if fault is None:
            return None
        requests, tokens = (0, 0) if fault.ranks else self._elsewhere.get(fault.engine, (0, 0))
        return {
            "when": self.when,
            "part": "rank" if fault.ranks else "engine",
            "engine": fault.engine,
            "ranks": fault.ranks,
            "phase": fault.phase,
            "cause": fault.cause,
            "recovered": fault.engine not in self.open,
            "epoch": fault.epoch,
            "layout": fault.layout,
            "seconds": _rounded(fault.seconds),
            "experts": _travel(fault),
            "requests": fault.requests + requests,
            "replayed_tokens": fault.tokens + tokens,
        }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _travel(message: Recovery) -> dict[str, int] | None:
    return msgspec.structs.asdict(message.travel) if message.travel is not None else None


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {part: round(value, 3) for part, value in seconds.items()}


def whose(fault: Recovery) -> str:
    """Who failed, in what."""
    ranks = ", ".join(map(str, fault.ranks))
    return f"{f'rank {ranks}' if ranks else 'the engine process'} failed in {fault.phase or 'its work'}"
