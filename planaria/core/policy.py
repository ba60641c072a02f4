"""Who goes first. A policy is a sort key: the smallest is admitted first, the largest is preempted first."""

from __future__ import annotations

from collections.abc import Callable

from planaria.types import Request

Key = tuple[float, ...]
Policy = Callable[[Request, int], Key]


def fcfs(request: Request, order: int) -> Key:
    """First come, first served; `order` counts admissions."""
    return (order,)


def priority(request: Request, order: int) -> Key:
    """Smaller `priority` first, then first come."""
    return (request.priority, order)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}
