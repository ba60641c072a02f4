"""On the cable between two nodes. Ranks compute a model: hidden states go over it as well as commands."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any, cast

from tests.faults.cells import RECOVERED, WENT_ON
from tests.faults.outside import CabledNodes, NotHere, Scene, Wrong, outside
from tests.proc.networks import ip

FEW = 40  # tokens, where each takes long


@contextlib.contextmanager
def harmed(scene: Scene, **harm: Any) -> Iterator[CabledNodes]:
    """While streams are under way the cable becomes so; it is good again in the end."""
    nodes = cast(CabledNodes, scene.at("nodes"))
    cable = nodes.carried.cable
    before = cable.harmed
    cable.set(**harm)
    try:
        yield nodes
    finally:
        cable.calm()
    if cable.harmed > before:
        scene.notes.append(f"packets: {cable.harmed - before}")


def through(scene: Scene, seconds: float, tokens: int, **harm: Any) -> None:
    with harmed(scene, **harm):
        scene.stream(seconds, tokens)


@outside("loss", "one packet in 50 is lost, 4 s", WENT_ON)
def loss(scene: Scene) -> None:
    through(scene, 4, FEW, loss=0.02)


@outside("heavy-loss", "one packet in 5 is lost, 4 s")
def heavy_loss(scene: Scene) -> None:
    through(scene, 4, FEW, loss=0.2)


@outside("delay", "each packet takes 50 ms more, 4 s", WENT_ON)
def delay(scene: Scene) -> None:
    through(scene, 4, FEW, delay=0.05)


@outside("reorder", "each packet takes up to 20 ms more, and so overtakes others, 4 s", WENT_ON)
def reorder(scene: Scene) -> None:
    through(scene, 4, FEW, spread=0.02)


@outside("twice", "one packet in 3 comes twice, 4 s", WENT_ON)
def twice(scene: Scene) -> None:
    through(scene, 4, FEW, twice=0.33)


@outside("damage", "a byte of one packet in 20 is another, 4 s", WENT_ON)
def damage(scene: Scene) -> None:
    through(scene, 4, FEW, damage=0.05)


@outside("reset", "a connection is reset while it carries data, three times", RECOVERED)
def reset(scene: Scene) -> None:
    for _ in range(3):
        with harmed(scene) as nodes:
            load = scene.begin()
            nodes.carried.cable.set(resets=1)
            scene.await_end(load)
            if nodes.carried.cable.resets:
                raise Wrong("no connection was reset")


@outside("stall", "nothing passes for 3 s, less than the heartbeat's limit (5 s)")
def stall(scene: Scene) -> None:
    with harmed(scene) as nodes:
        load = scene.begin()
        nodes.carried.cable.set(loss=1.0)
        time.sleep(3)
        nodes.carried.cable.calm()
        scene.await_end(load)


def cut_while_streaming(scene: Scene, **harm: Any) -> None:
    """Until the streams have ended."""
    with harmed(scene) as nodes:
        load = scene.begin()
        nodes.carried.cable.set(**harm)
        scene.await_end(load)


@outside("cut", "nothing passes until all streams have ended", RECOVERED)
def cut(scene: Scene) -> None:
    cut_while_streaming(scene, loss=1.0)


@outside("half-open-there", "what the first node sends is lost, until all streams have ended", RECOVERED)
def half_open_there(scene: Scene) -> None:
    cut_while_streaming(scene, deaf=(0,))


@outside("half-open-here", "what the other node sends is lost, until all streams have ended", RECOVERED)
def half_open_here(scene: Scene) -> None:
    cut_while_streaming(scene, deaf=(1,))


@outside("flapping", "five times nothing passes for 1 s, and all for 1 s")
def flapping(scene: Scene) -> None:
    with harmed(scene) as nodes:
        load = scene.begin()
        for _ in range(5):
            nodes.carried.cable.set(loss=1.0)
            time.sleep(1)
            nodes.carried.cable.calm()
            time.sleep(1)
        scene.await_end(load)


@outside("large", "packets of more than 400 bytes are lost, until all streams have ended: heartbeats pass, "
         "`--step-timeout 20` finds it", RECOVERED)  # fmt: skip
def large(scene: Scene) -> None:
    cut_while_streaming(scene, longest=400)


@outside("rate", "`tc tbf` lets 256 kbit/s pass in each direction, 4 s", WENT_ON)
def rate(scene: Scene) -> None:
    with harmed(scene) as nodes, shaped(nodes, "tbf", "rate", "256kbit", "burst", "4kb", "latency", "200ms"):
        scene.stream(4, FEW)


@outside("netem", "`tc netem`: 20 ms more, one packet in 100 lost, 4 s", WENT_ON)
def netem(scene: Scene) -> None:
    with harmed(scene) as nodes, shaped(nodes, "netem", "delay", "20ms", "loss", "1%"):
        scene.stream(4, FEW)


@contextlib.contextmanager
def shaped(nodes: CabledNodes, kind: str, *args: str) -> Iterator[None]:
    """By the kernel, in both directions."""
    ends = list(zip(nodes.networks.spaces, nodes.networks.ends, strict=True))
    try:
        for space, end in ends:
            found = subprocess.run(
                ["tc", "-n", space, "qdisc", "add", "dev", end, "root", kind, *args], capture_output=True, text=True
            )
            if found.returncode:
                raise NotHere(f"this kernel has no {kind}: {found.stderr.strip()}")
        yield
    except FileNotFoundError:
        raise NotHere("no `tc`") from None
    finally:
        for space, end in ends:
            subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", end, "root"], capture_output=True, check=False)


@outside("no-way", "the first node's interface is down for 2 s: who sends is told that there is no way")
def no_way(scene: Scene) -> None:
    nodes = cast(CabledNodes, scene.at("nodes"))
    space, end = nodes.networks.spaces[0], nodes.networks.ends[0]
    load = scene.begin()
    ip("-n", space, "link", "set", end, "down")
    time.sleep(2)
    ip("-n", space, "link", "set", end, "up")
    scene.await_end(load)
