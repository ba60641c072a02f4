"""How uneven the load of the toy's experts is (benchmarks/train_toy_moe.py), and what balancing it gives.

Tokens of two windows of text that the toy never saw: maps are made from the first and measured on the second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from planaria.core.eplb.policy import balance, balancedness
from planaria.topology.experts import ExpertMap

RANKS, REDUNDANT = 4, 4


def skews(load: Sequence[Sequence[int]]) -> list[float]:
    """Of each layer: the busiest expert's tokens over the mean."""
    return [max(layer) * len(layer) / sum(layer) for layer in load]


def toy_part(folder: Path) -> tuple[dict[str, Any], list[report.Table]]:
    """From the load.json beside the toy's checkpoint."""
    record = json.loads((folder / "load.json").read_text())
    result: dict[str, Any] = {name: record[name] for name in ("steps", "loss", "cpu_seconds")}
    rows = []
    for name, windows, loss in zip(
        ("untrained", "trained"), (record["untrained"], record["load"]), record["loss"], strict=True
    ):
        before, after = windows
        experts = len(before[0])
        even = [
            balancedness(after, [ExpertMap.linear(experts, RANKS)] * len(after)),
            balancedness(after, balance(before, experts, RANKS)),
            balancedness(after, balance(before, experts + REDUNDANT, RANKS)),
        ]
        shown = [f"{skew:.2f}" for skew in skews(after)]
        rows.append([name, f"{loss:.3f}", " ".join(shown), *(f"{value:.3f}" for value in even)])
        result[name] = {"skews": skews(after), "balancedness": even}
    return result, [
        report.Table(
            f"The toy after {record['steps']} steps ({record['cpu_seconds']:.0f} s of CPU), on {RANKS} ranks; balanced "
            "with no and with " + f"{REDUNDANT} redundant slots",
            ["", "loss", "busiest expert over mean, by layer", "in order", "balanced", "with replicas"], rows,
        )
    ]  # fmt: skip
