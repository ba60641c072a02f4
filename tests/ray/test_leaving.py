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
from planaria.executor.ray import actor, cluster
from planaria.executor.ray.actor import RayActor
from planaria.executor.ray.child import RayChild
from planaria.executor.ray.cluster import Connection
from planaria.executor.ray.fleet import RayHosts, beside
from planaria.hosts.host import Place
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

    def __init__(self, made: Callable[[Any], None], say: Callable[[str], None]) -> None:
        self.heard.clear()

    def hear(self, message: bytes) -> None:
        self.heard.append(message)

    def run(self) -> int:
        return 0


def test_a_boot_that_comes_while_a_rank_still_imports_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank was lost meanwhile, and each is told of the next epoch."""
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
    rank.hear(b"second")
    imported.set()
    run.join(60)
    rank.hear(b"third")
    assert Life.heard == [b"first", b"second", b"third"]


class Ray:
    """Its runs end with 7; asked whether there is any Ray it says `there`."""

    exceptions = SimpleNamespace(
        RayError=OSError, RayTaskError=ZeroDivisionError, ActorDiedError=LookupError, ActorUnavailableError=EOFError
    )

    def __init__(self, *there: bool) -> None:
        self.there = iter(there)

    def is_initialized(self) -> bool:
        return next(self.there, True)

    def wait(self, runs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return (["run"], []) if "run" in runs else ([], runs)

    def get(self, run: str, timeout: float = 0) -> int:
        return 7


class Several:
    """In place of Actors: one comes up on this machine, and is gone when it is told so."""

    def __init__(self, ray: Ray, up: threading.Event) -> None:
        self.connection, self.changed, self.up = SimpleNamespace(ray=ray), threading.Condition(), up
        self.ended: list[Any] = []

    def bring_up(self, child: RayChild) -> None:
        assert self.up.wait(60)
        child.at = SimpleNamespace(home="elsewhere")  # type: ignore[assignment]

    def place(self, child: RayChild) -> Place:
        return Place(-1, "elsewhere", "a", pid=1)

    def begin(self, child: RayChild, message: bytes) -> tuple[str, str]:
        if message == b"be nobody":
            raise RuntimeError("Ray has other things to do")
        return "run", "saying"

    def end(self, child: RayChild) -> None:
        self.ended.append(child)

    def tell_all(self) -> None: ...


def child_of(several: Any) -> tuple[RayChild, queue.SimpleQueue[str]]:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    child = RayChild(several, ("a", 0), "a:B", lambda: None, 1.0, lambda child: heard.put(child.ended))  # type: ignore
    child.thread.start()
    return child, heard


@pytest.mark.parametrize(("there", "how"), [
    ((True,), "returned 7"), ((False,), "can't be watched: Ray is gone (ConnectionError)"),
])  # fmt: skip
@pytest.mark.row("R13")
def test_the_end_of_an_actor_is_seen_and_made_certain(there: tuple[bool, ...], how: str) -> None:
    """What it is told before it has come up, it hears then."""
    several = Several(Ray(*there), threading.Event())
    child, heard = child_of(several)
    child.tell(b"be a rank")
    several.up.set()
    assert heard.get(timeout=60) == how and child.code == (7 if "7" in how else 0)
    assert child.gone.wait(60) and several.ended == [child]
    child.kill()
    child.thread.join(60)
    assert child.ended == how and several.ended == [child], "once"


@pytest.mark.row("R13")
def test_one_that_is_killed_while_it_comes_up_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(Ray(), threading.Event())
    child, heard = child_of(several)
    child.kill()
    several.up.set()
    assert heard.get(timeout=60) == "was killed" and child.gone.is_set() and several.ended == [child]


def test_one_that_cannot_be_told_what_it_is_ends() -> None:
    """So its slot is free again."""
    several = Several(Ray(), threading.Event())
    child, heard = child_of(several)
    several.up.set()
    child.tell(b"be nobody")
    assert heard.get(timeout=60) == "could not be told: Ray has other things to do"
    assert child.gone.wait(60) and several.ended == [child]
