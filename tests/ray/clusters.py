"""What tests ask of the machine around a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.proc.servers import wait_until


def ray_processes() -> set[int]:
    """Below this process."""
    return {p.pid for p in psutil.Process().children(recursive=True)}


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """What is ended inside is gone at the end: every process below this one that was there, and its shared memory."""
    before = ray_processes()
    yield
    wait_until("Ray's processes are gone", lambda: not before & ray_processes())
    left = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("plasma")]
    assert not left, left


def live_actors(ray: Any) -> list[str]:
    """Names of actors that have not ended; a graph's own has none."""
    from ray._private.state import actors

    return [a["Name"] for a in actors().values() if a["State"] not in ("DEAD",)]


def live_groups() -> list[str]:
    """Placement groups that have not been removed."""
    from ray.util import placement_group_table

    return [id for id, group in placement_group_table().items() if group["state"] != "REMOVED"]
