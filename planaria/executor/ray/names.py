"""Names of actors, for the dashboard. Pure.

Ray refuses a name that a living actor has, and a replacement starts while the one it replaces dies: so a name says
which process in this place it is. That is the epoch where each epoch has another; one that is well outlives epochs.
"""

from __future__ import annotations

from planaria.topology import AXES, Layout

_SHORT = {"dp": "lane"}


def actor_name(instance: str, layout: Layout, rank: int, number: int) -> str:
    """`planaria-<instance>-tp1-pp0-e0`: coordinates of the axes longer than 1 (of a single rank: none). number: of
    the actors that had this rank before."""
    coords = layout.coords(rank)
    parts = [f"{_SHORT.get(axis, axis)}{getattr(coords, axis)}" for axis in reversed(AXES) if getattr(layout, axis) > 1]
    return "-".join(["planaria", instance, *parts, f"e{number}"])


def spare_name(instance: str, number: int) -> str:
    """Of an actor that may become any rank; numbers are used once."""
    return f"planaria-{instance}-spare{number}"
