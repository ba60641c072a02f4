"""What is lost on Ray while requests run: ranks, nodes, raylets, Ray itself. Tokens are those of a run without."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria import LLM
from planaria.executor.ray.cluster import connect
from planaria.hosts.pool import is_ready
from planaria.wire import FromEngine, Recovery
from tests.proc.servers import SOON, alive, wait_until
from tests.ray.clusters import kill_node, live_groups, raylet_of, several_nodes
from tests.ray.test_ray import PROMPTS, SMALL, answers, check, ray_options

LENGTH = 48


@pytest.fixture(scope="module")
def expected(small: Path) -> Any:
    with LLM(str(small), **SMALL) as llm:
        return answers(llm, PROMPTS, LENGTH)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A driver's node with one slot, and a node with one; tests add others."""
    with several_nodes(1, 1) as cluster:
        connection = connect(cluster.address, 1)  # that engines of the module reuse
        yield cluster
        connection.close()


class Watched:
    """An engine on Ray, and what it says of its recoveries."""

    def __init__(self, small: Path, layout: str = "pp2", **options: Any) -> None:
        self.llm = LLM(str(small), **SMALL, **ray_options(layout), **options)
        self.done: list[Recovery] = []
        loop = self.llm._loop
        self.launcher: Any = loop.gang.launcher
        hear = loop.emit

        def listen(message: FromEngine) -> None:
            if isinstance(message, Recovery) and message.seconds:
                self.done.append(message)
            hear(message)

        loop.emit = listen

    def close(self) -> None:
        """Nothing of it is left."""
        pids = [*self.pids, *self.launcher.spare_pids()]
        groups = {group.handle.id.hex() for group in self.launcher.ray.bundles.groups}
        self.llm.close()
        wait_until("what was killed is gone", lambda: not any(alive(pid) for pid in pids), SOON)
        wait_until("no placement group of it is left", lambda: not groups & set(live_groups()))

    @property
    def epoch(self) -> int:
        return self.llm._loop.gang.epoch

    @property
    def last(self) -> Recovery:
        return self.done[-1]

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.llm._loop.gang.members]

    @property
    def layout(self) -> str:
        return str(self.llm._loop.gang.layout)

    def node_of(self, cluster: Any, rank: int) -> Any:
        id = self.launcher.pool.ranks[rank].place.host
        return next(node for node in cluster.list_all_nodes() if node.node_id == id)

    def run(self, expected: Any, harm: Any = None) -> None:
        left = [harm] if harm is not None else []

        def count(done: int, tokens: int) -> None:
            if tokens and left:
                left.pop()()

        check(answers(self.llm, PROMPTS, LENGTH, count), expected)

    def turns_until(self, what: str, condition: Any, limit: float = 60) -> None:
        """As an engine that has nothing else to do."""

        def look() -> bool:
            self.llm._loop.check()
            return bool(condition())

        wait_until(what, look, limit=limit)


@pytest.fixture(scope="module")
def watched(cluster: Any, small: Path) -> Iterator[Watched]:
    """One engine for several tests, each of which leaves it whole, on two nodes."""
    watched = Watched(small)
    yield watched
    watched.close()


def add_node(cluster: Any, slots: int = 1) -> Any:
    return cluster.add_node(num_cpus=1, resources={"planaria_slot": slots}, include_dashboard=False)


def test_a_lost_node_costs_a_smaller_layout_until_one_comes(cluster: Any, watched: Watched, expected: Any) -> None:
    """Its raylet and its actor are killed at once; nothing is free elsewhere."""
    before, node = watched.pids, watched.node_of(cluster, 1)
    assert node is not cluster.head_node
    watched.run(expected, lambda: kill_node(node, before[1]))
    assert watched.layout == "tp=1" and watched.pids == before[:1]
    cluster.remove_node(node, allow_graceful=False)
    add_node(cluster)
    watched.turns_until("it has its layout again", lambda: watched.layout == "pp=2")
    assert watched.pids[0] == before[0] and watched.last.kind == "layout"
    watched.run(expected)


@pytest.mark.long
def test_another_node_is_used_first(cluster: Any, watched: Watched, expected: Any) -> None:
    before, epoch = watched.pids, watched.epoch
    other, node = add_node(cluster), watched.node_of(cluster, 1)
    watched.run(expected, lambda: kill_node(node, before[1]))
    assert watched.layout == "pp=2" and watched.epoch == epoch + 1
    assert watched.pids[0] == before[0] and watched.node_of(cluster, 1) is other
    cluster.remove_node(node, allow_graceful=False)


def test_a_raylets_death_is_not_a_ranks(cluster: Any, watched: Watched, expected: Any) -> None:
    """Nor is it when Ray has noticed, and calls everything dead that it knew there: the rank goes on, until there is
    another place for it."""
    before, epoch, node = watched.pids, watched.epoch, watched.node_of(cluster, 1)
    watched.run(expected, lambda: kill_node(node))
    wait_until("Ray has noticed", lambda: watched.launcher.pool.ranks[1].leaving)
    watched.run(expected)
    assert watched.pids == before and watched.epoch == epoch
    other = add_node(cluster)
    watched.turns_until("it has moved", lambda: watched.epoch > epoch)
    assert watched.last.kind == "layout" and watched.layout == "pp=2"
    assert watched.pids[0] == before[0] and watched.node_of(cluster, 1) is other and not alive(before[1])
    watched.run(expected)
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.long
def test_a_raylet_that_is_stopped_is_passed_over(cluster: Any, watched: Watched, expected: Any) -> None:
    """It takes connections and answers nothing: what is to be started there doesn't come up, and goes elsewhere."""
    before, node = watched.pids, watched.node_of(cluster, 1)
    other = add_node(cluster)

    def harm() -> None:
        os.kill(raylet_of(node), signal.SIGSTOP)
        os.kill(before[1], signal.SIGKILL)

    watched.run(expected, harm)
    assert watched.pids[0] == before[0] and watched.node_of(cluster, 1) is other
    os.kill(raylet_of(node), signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def test_a_spare_becomes_the_rank(cluster: Any, small: Path, expected: Any) -> None:
    node = add_node(cluster, 3)
    watched = Watched(small, spare_workers=1)
    try:
        before, pool = watched.pids, watched.launcher.pool
        wait_until("it is ready", lambda: any(map(is_ready, pool.spares)))
        (spare,) = watched.launcher.spare_pids()
        watched.run(expected, lambda: os.kill(before[1], signal.SIGKILL))
        assert watched.pids == [before[0], spare]
        wait_until("there is another", lambda: watched.launcher.spare_pids() not in ([], [spare]))
    finally:
        watched.close()
        cluster.remove_node(node)
