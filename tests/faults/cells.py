"""The matrix: what is made to fail, how, and when; which cells make no sense and why; which outcomes are right."""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("start-up", "idle", "prefill", "decode", "recovery", "drain")
FAULTS = ("kill", "stop", "exception", "exit", "slow", "full", "cut")
WHO = {
    "mp-tp2": ("server", "engine", "rank0", "rank1", "link"),
    "mp-tp2-spare": ("spare",),
    "mp-pp2": ("server", "engine", "rank0", "rank1", "link"),
    "mp-pp2-spare": ("spare",),
    "mp-nodes": ("link",),
    "ray": ("server", "engine", "rank0", "rank1", "raylet", "link"),
    "ray-spare": ("spare",),
    "ray-nodes": ("link",),
}

WENT_ON, RECOVERED, NAMED, ENDED, FAILED = "went on", "recovered", "named error", "ended with it", "FAILED"
ALONE = "its request alone"


@dataclass(frozen=True)
class Cell:
    deployment: str
    who: str
    fault: str
    phase: str

    def __str__(self) -> str:
        return f"{self.deployment}/{self.who}/{self.fault}/{self.phase}"

    @classmethod
    def of(cls, name: str) -> Cell:
        return cls(*name.split("/"))


def all_cells(deployment: str) -> list[Cell]:
    """In an order in which deployments last: a drain ends the one that a start-up cell has begun."""
    cells = ordered(deployment)
    ends = [cell for cell in cells if cell.phase in ("start-up", "drain")]
    return ends + [cell for cell in cells if cell.phase not in ("start-up", "drain")]


def senseless(cell: Cell) -> str:
    """Why there is no such cell; "" if there is."""
    who, fault, phase, nodes = cell.who, cell.fault, cell.phase, cell.deployment.endswith("nodes")
    if (fault == "cut") != (who == "link"):
        return "a cut is of the link, and a link can only be cut"
    if who == "link":
        return "" if nodes else "one node: its processes share memory, no network is between them"
    if who == "spare":
        if fault == "full" and phase not in ("start-up", "recovery"):
            return "a spare that waits makes no memory file"
        if fault == "slow" and phase not in ("start-up", "recovery"):
            return "a spare that waits does nothing that could be slow"
        if fault == "exception" and phase not in ("start-up", "recovery"):
            return "a spare that waits runs nothing that could raise"
    if who == "raylet":
        if fault == "exception":
            return "a raylet is not written in Python"
        if fault == "full":
            return "its object store is made before, and nothing of ours goes through it"
    if who == "server" and fault == "full":
        return "a server makes no memory file"
    if who.startswith("rank") and fault == "exception" and phase == "idle":
        return "a rank that waits runs nothing that could raise"
    return ""


def right(cell: Cell) -> tuple[str, ...]:
    """The outcomes that are as promised. Of "went on" and "recovered" all requests are whole."""
    who, fault, phase = cell.who, cell.fault, cell.phase
    if who == "server":
        if fault in ("slow", "stop"):  # and continued
            return (WENT_ON, RECOVERED)  # of the other fault
        return (ENDED, ALONE, WENT_ON) if fault == "exception" else (ENDED,)
    if fault == "slow" or who in ("spare", "raylet"):
        return (WENT_ON, RECOVERED)
    if fault == "full":
        return (NAMED, RECOVERED) if phase == "start-up" else (WENT_ON, RECOVERED)
    if fault == "exception" and phase == "start-up":
        return (NAMED, RECOVERED)
    if who == "link":
        return (NAMED, RECOVERED)
    return (RECOVERED,)


def ordered(deployment: str) -> list[Cell]:
    """For people: by what fails, how, when."""
    return [Cell(deployment, who, fault, phase) for who in WHO[deployment] for fault in FAULTS for phase in PHASES]
