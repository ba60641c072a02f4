"""What becomes of a question, a watch or a boot where Ray goes away, has been left, or is slow. No Ray here."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from planaria.config.options import EngineConfig, ParallelConfig
from planaria.env import RaySettings
from planaria.errors import PlanariaError
from planaria.executor.boot import RankBoot
from planaria.executor.ray import actor, cluster
from planaria.executor.ray.actor import RayActor
from planaria.executor.ray.cluster import Connection
from planaria.executor.ray.fleet import RayHosts, beside
from planaria.executor.ray.watch import Watcher
from planaria.topology import Cluster, Node


def test_what_ray_raises_is_a_head_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So ranks fall back on processes, whichever way it goes."""
    monkeypatch.setattr(cluster, "_answers", lambda address, limit: True)

    def nodes() -> None:
        raise RuntimeError("RPC error: connection reset")

    connection = Connection.__new__(Connection)
    connection.ray, connection._head, connection._asking = SimpleNamespace(nodes=nodes), "a:1", threading.Lock()
    for _ in range(2):  # and can be asked again
        with pytest.raises(TimeoutError, match="connection reset"):
            connection.nodes()


def test_engines_that_come_up_while_the_server_closes_are_told_so() -> None:
    config = EngineConfig(
        model=None, checkpoint={}, served_model_name="", scheduler=None, cache=None,  # type: ignore[arg-type]
        device=None, parallel=ParallelConfig(),  # type: ignore[arg-type]
    )  # fmt: skip
    hosts = RayHosts(config, RaySettings())
    assert hosts.stranded(0)
    for ask in (lambda: hosts.renew(0, threading.Event()), lambda: hosts.room(0), lambda: hosts.connected):
        with pytest.raises(PlanariaError, match="it is closing"):
            ask()


def test_engines_keep_what_they_have_beside_what_is_free() -> None:
    free = Cluster((Node.of("a", 1, "x"), Node.of("b", 2, "y"), Node.of("c", 1, "z")), "a")
    found = beside(free, {"a": 2, "b": 2, "c": 1}, {"a": [0], "b": [1], "gone": [0]}, {"c"})
    assert {node.id: [device.id for device in node.devices] for node in found.nodes} == {
        "a": [0, 1], "b": [0, 1], "gone": [0],
    }  # fmt: skip
    dark = beside(free, {"a": 2, "b": 2, "c": 1}, {"b": [1]}, {"a", "b"})
    assert [(node.id, len(node.devices)) for node in dark.nodes] == [("a", 0), ("c", 1), ("b", 1)]


class Life:
    """Of a rank: what it hears, in order."""

    heard: ClassVar[list[bytes]] = []

    def __init__(self, made: Callable[[Any], None], prepared: Callable[[], None]) -> None:
        self.heard.clear()

    def boot(self, boot: Any) -> None:
        self.heard.append(boot.data)

    def run(self) -> int:
        return 0


def test_a_boot_that_comes_while_a_rank_still_imports_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank was lost meanwhile, and each is told of the next epoch."""
    monkeypatch.setattr(RankBoot, "decode", lambda data: SimpleNamespace(data=data, log_level="info"))
    importing, imported = threading.Event(), threading.Event()

    def kind(entry: str, environment: dict[str, str]) -> type[Life]:
        importing.set()
        imported.wait(60)
        return Life

    monkeypatch.setattr(actor, "_kind", kind)
    rank = RayActor()
    run = threading.Thread(target=rank.run, args=("a:B", b"first", {}))
    run.start()
    importing.wait(60)
    rank.boot(b"second")
    imported.set()
    run.join(60)
    rank.boot(b"third")
    assert Life.heard == [b"first", b"second", b"third"]


class Ended:
    """A member whose process has ended."""

    run, here, ended = "a run", True, ""

    def gone(self, timeout: float = 0.0) -> bool:
        return True


def test_whoever_comes_after_ray_was_gone_is_watched() -> None:
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    there = iter((False, True))

    def get(run: str, timeout: float) -> int:
        return 7

    ray = SimpleNamespace(
        is_initialized=lambda: next(there), wait=lambda runs, num_returns, timeout: (runs, []), get=get
    )
    watcher = Watcher(ray, ended.put)
    for how in ("can't be watched: Ray is gone (ConnectionError)", "returned 7"):
        watcher.add(Ended())  # type: ignore[arg-type]
        assert ended.get(timeout=60).ended == how
    watcher.stop()
