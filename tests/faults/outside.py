"""Faults that nobody in the product knows of: what acts on the machine around a deployment, or on the network between
its nodes. Each is a small function of `outside_network`, `outside_machine`, `outside_disk` or `outside_ray`.

Streams run while it acts and after it; their tokens are compared with those of a run without a fault.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.cable import CarriedNetworks, carried_networks
from tests.faults.cells import ENDED, FAILED, NAMED, RECOVERED, WENT_ON
from tests.faults.deployment import Deployment, write_model
from tests.faults.nodes_deployment import NodesDeployment
from tests.faults.streams import Load, wrong
from tests.proc.servers import Server

SKIPPED = "not here"
LIMIT = 60.0  # seconds in which streams must have ended, and in which all must be whole again
MOST = 120  # tokens of a stream


class NotHere(Exception):
    """This machine hasn't what the fault is made with."""


class Wrong(Exception):
    """What must not be."""


class Refused(Exception):
    """It didn't start, by an error that says why; or the kernel killed it."""

    outcome = NAMED


@dataclass(frozen=True)
class Outside:
    """name; what was done, for people; the outcomes that are right; what does it."""

    name: str
    what: str
    right: tuple[str, ...]
    act: Callable[[Scene], None]


@dataclass
class Came:
    """What came of one. epochs, engines: that began on account of it."""

    name: str
    outcome: str
    right: bool
    seconds: float = 0.0
    requests: int = 0
    epochs: int = 0
    engines: int = 0
    note: str = ""


ALL: dict[str, Outside] = {}


def outside(name: str, what: str, *right: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """The decorated function is a fault. right: none are that every request is whole, whatever was recovered."""

    def keep(act: Callable[[Scene], None]) -> Callable[[Scene], None]:
        assert name not in ALL, name
        ALL[name] = Outside(name, what, right or (WENT_ON, RECOVERED), act)
        return act

    return keep


class Own(Deployment):
    """One node, two tensor ranks, started within `prefix` and `env`, with `more` options."""

    end_limit = 15.0

    def __init__(self, name: str, model: Path, *, real: bool = False) -> None:
        super().__init__(name, model, real=real)
        self.more: Sequence[str] = ()
        self.prefix: tuple[str, ...] = ()
        self.env: dict[str, str] = {}

    def options(self) -> list[str]:
        return ["-tp", "2", *self.more]

    def environment(self) -> dict[str, str]:
        return super().environment() | self.env

    def command(self) -> Server:
        return Server(*self.arguments(), module="tests.faults.serve", env=self.environment(), prefix=self.prefix)


class CabledNodes(NodesDeployment):
    """Two nodes with a program as the cable between them."""

    names = ("engine", "rank0", "rank1")
    carried: CarriedNetworks

    def options(self) -> list[str]:
        """A step that nothing else ends is overdue after 20 s, however slow a bad cable made those before."""
        return [*super().options(), "--step-timeout", "20"]

    def connect(self) -> CarriedNetworks:
        self.carried = self._stack.enter_context(carried_networks())
        return self.carried


class Stage:
    """Deployments by kind, one at a time, and models. `real`: for ranks that compute, and say things to each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[bool, Path] = {}
        self._up: dict[str, Deployment] = {}

    def model(self, real: bool) -> Path:
        if real not in self._models:
            made = self.folder / ("real" if real else "hash")
            made.mkdir()
            self._models[real] = write_model(made, real=real)
        return self._models[real]

    def have(self, kind: str) -> Deployment:
        """That lasts from one fault to the next: "mp", "nodes" or "ray". Up and whole, its tokens known."""
        for other in [name for name in self._up if name != kind]:
            self._up.pop(other).close()
        if kind not in self._up:
            self._up[kind] = self._make(kind)
        deployment = self._up[kind]
        deployment.learn(MOST)
        return deployment

    def _make(self, kind: str) -> Deployment:
        if kind == "mp":
            return Own("mp-tp2", self.model(False))
        if kind == "nodes":
            try:
                return CabledNodes("mp-nodes", self.model(True))
            except OSError as e:
                raise NotHere(f"no network namespaces: {e}") from None
        from tests.faults.ray_deployment import RayDeployment

        return RayDeployment("ray", self.model(False), real=False)

    def drop(self) -> None:
        """What is up is ended: the next fault starts another."""
        while self._up:
            with contextlib.suppress(Exception):
                self._up.popitem()[1].close()

    def close(self) -> None:
        self.drop()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Scene:
    """One fault that is played. `deployment`: the one it is played on, once that is known; `notes` are for the page."""

    stage: Stage
    deployment: Deployment | None = None
    before: tuple[int, int] = (0, 0)
    requests: int = 0
    epochs: int = 0  # that there were more in the end
    restarts: int = 0  # of the engine
    notes: list[str] = field(default_factory=list)

    # -- where

    def at(self, kind: str) -> Deployment:
        """On what lasts."""
        deployment = self.stage.have(kind)
        if deployment is not self.deployment:
            self._see(deployment)
        return deployment

    @contextlib.contextmanager
    def own(
        self, *more: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None, real: bool = False
    ) -> Iterator[Own]:
        """On one of its own, which is up. Raises Refused where it can't come up, and says so."""
        self.stage.drop()
        known = Own("mp-tp2", self.stage.model(real), real=real)
        deployment = Own("mp-tp2", self.stage.model(real), real=real)
        try:
            known.learn(MOST)
            known.end()
            deployment.expected = known.expected
            deployment.more, deployment.prefix, deployment.env = more, prefix, env or {}
            if why := deployment.start(LIMIT):
                assert deployment.server is not None
                code = deployment.server.ended()
                refused = Refused(last_line(why) if code >= 0 else f"it was killed by signal {-code}")
                refused.outcome = NAMED if code >= 0 else ENDED
                raise refused
            self._see(deployment)
            yield deployment
            self.rest()
        finally:
            self.deployment = None
            known.close()
            deployment.close()

    def _see(self, deployment: Deployment) -> None:
        self.deployment, self.before = deployment, counted(deployment)

    @property
    def on(self) -> Deployment:
        assert self.deployment is not None
        return self.deployment

    # -- streams

    def begin(self, tokens: int = MOST) -> Load:
        """Streams, once a token has come."""
        load = self.on.load(tokens)
        if not load.began.wait(LIMIT):
            raise Wrong(f"no token came in {LIMIT:g} s")
        return load

    def await_end(self, load: Load, limit: float = LIMIT) -> None:
        """Each ended as it would have."""
        load.wait(limit)
        self.requests += len(load.streams)
        if bad := [stream.error or "no finish" for stream in load.streams if not stream.finish]:
            raise Wrong(f"{len(bad)} of {len(load.streams)} requests: {bad[0]}")
        if count := wrong(load, self.on.learn(MOST)):
            raise Wrong(f"{count} tokens are others than without a fault")

    def stream(self, seconds: float = 0.0, tokens: int = MOST) -> None:
        """Streams one after the other, for so long at least."""
        end = time.monotonic() + seconds
        while True:
            self.await_end(self.on.load(tokens))
            if time.monotonic() >= end:
                return

    # -- afterwards

    def rest(self) -> None:
        """The fault is over: all is whole again, and answers as ever."""
        if self.deployment is None:
            return
        end = time.monotonic() + LIMIT
        while why := self.on.whole():
            if time.monotonic() > end:
                raise Wrong(f"not whole {LIMIT:g} s after it: {why}")
            time.sleep(0.1)
        self.stream()
        epochs, restarts = counted(self.on)
        self.restarts = restarts - self.before[1]
        self.epochs = epochs - (0 if self.restarts else self.before[0])


def counted(deployment: Deployment) -> tuple[int, int]:
    """Epochs, and engine processes, so far."""
    health = deployment.health()
    return int(health["epoch"]), int(health["engine_restarts"])


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was said"


def play(fault: Outside, stage: Stage) -> Came:
    """Never raises: what goes wrong is the result, and ends the deployment."""
    began, scene = time.monotonic(), Scene(stage)
    came = Came(fault.name, FAILED, False)
    try:
        fault.act(scene)
        scene.rest()
        came.outcome = RECOVERED if scene.epochs or scene.restarts else WENT_ON
    except NotHere as e:
        came.outcome = SKIPPED
        scene.notes.append(str(e))
    except Refused as e:
        came.outcome = e.outcome
        scene.notes.append(str(e))
    except Exception as e:
        scene.notes.append(str(e) if isinstance(e, Wrong) else f"{type(e).__name__}: {e}")
    came.right = came.outcome in (*fault.right, SKIPPED)
    if not came.right:
        stage.drop()
    came.epochs, came.engines = scene.epochs, scene.restarts
    came.requests, came.note, came.seconds = scene.requests, "; ".join(scene.notes), time.monotonic() - began
    return came
