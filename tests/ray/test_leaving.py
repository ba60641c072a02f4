"""What is said where Ray goes away in the middle of a question, or has been left. No Ray here."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from planaria.config.options import EngineConfig, ParallelConfig
from planaria.env import RaySettings
from planaria.errors import PlanariaError
from planaria.executor.ray import cluster
from planaria.executor.ray.cluster import Connection
from planaria.executor.ray.fleet import RayHosts, beside
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
