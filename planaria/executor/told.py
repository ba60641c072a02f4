"""What the log says of an epoch that ended."""

from __future__ import annotations

from planaria.topology import Layout
from planaria.wire import Recovery, Travel


def layout_name(layout: Layout) -> str:
    """As in EngineFacts: the lanes, where there are several, then the degrees of each."""
    return (f"dp={layout.dp} " if layout.dp > 1 else "") + f"tp={layout.tp} pp={layout.pp}"


def travel_told(travel: Travel) -> str:
    """Of experts when an epoch began."""
    moved, needed = (f"{size / 2**20:.1f} MiB" for size in (travel.moved, travel.needed))
    return f"experts: {moved} moved between ranks, {needed} had to; {travel.read} read from the checkpoint"


def told(done: Recovery, replaced: bool, before: Layout) -> str:
    """The block of the log that says what happened and what was done. before: the layout until then."""
    ranks = ", ".join(map(str, done.ranks))
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in done.seconds.items() if part != "total")
    if layout_name(before) != done.layout:
        what = f"went from {layout_name(before)} to {done.layout}"
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
