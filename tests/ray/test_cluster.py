"""A Ray cluster of several nodes on this machine: who goes where, the user's placement groups, waiting for nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planaria import LLM
from planaria.cli import main
from planaria.config.options import ParallelConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError, ConfigError
from planaria.executor.ray import cluster, fleet
from planaria.topology import Layout
from tests.proc.servers import wait_until
from tests.ray.clusters import actor_nodes, live_groups, several_nodes
from tests.ray.test_ray import PROMPTS, SMALL, answers, check, ray_options

SLOT = "planaria_slot"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A driver's node with one slot, and a node with two."""
    with several_nodes(1, 2) as cluster:
        yield cluster


@pytest.mark.row("R2")
def test_a_cluster_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has left behind is killed, and the next one begins as if it had never been."""
    import ray.cluster_utils

    left: list[subprocess.Popen[bytes]] = []

    class Broken:
        def add_node(self, **options: Any) -> None:
            left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
            raise RuntimeError("the raylet did not come up")

        def shutdown(self) -> None:
            raise OSError("there is nothing to shut down")

    monkeypatch.setattr(ray.cluster_utils, "Cluster", Broken)
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="the raylet did not come up") as error, several_nodes(1):
        pass
    assert error.value.__notes__ == ["it could not be shut down: OSError('there is nothing to shut down')"]
    assert left[0].wait(60) == -signal.SIGKILL and dict(os.environ) == before


def test_the_job_has_the_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cluster that is started here, and of a fleet: its engines are actors of that job."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # where a start says more
    monkeypatch.setattr(cluster, "_reread_config", lambda: None)
    told, mine = [], {"working_dir": "/mine"}
    cluster._start(SimpleNamespace(init=lambda **given: told.append(given["runtime_env"])), 1, mine)

    def connect(address: str | None, slots: int, runtime_env: dict[str, Any] | None) -> Any:
        told.append(runtime_env)
        raise ConfigError("Ray address", address, "is nobody's", "give another")

    monkeypatch.setattr(fleet, "connect", connect)
    config: Any = SimpleNamespace(parallel=ParallelConfig(data_parallel_size=2, ray_runtime_env=mine))
    with pytest.raises(ConfigError, match="is nobody's"):
        fleet.RayHosts(config, RaySettings()).open(2)
    assert told == [mine, mine]


@pytest.fixture(scope="module")
def connection(nodes: Any) -> Iterator[Any]:
    from planaria.executor.ray.cluster import connect

    connection = connect(nodes.address, 1)
    yield connection
    connection.close()


def obtain(connection: Any, layout: Layout, group: Any = None, **settings: Any) -> Any:
    from planaria.executor.ray import groups

    given = group.id.hex() if group is not None else None
    return groups.obtain(connection, given, layout, SLOT, RaySettings(**settings), "test")


@pytest.fixture
def group(connection: Any) -> Iterator[Any]:
    """A user's: a bundle without a slot, then one on each of several nodes."""
    from ray.util import placement_group, remove_placement_group

    made = placement_group([{"CPU": 0.1}, *([{SLOT: 1}] * 3)], strategy="PACK")
    assert made.wait(60)
    yield made
    remove_placement_group(made)
    free_again(connection, 3)


def free_again(connection: Any, count: int) -> None:
    wait_until("slots are free again", lambda: connection.snapshot(SLOT).num_devices == count)


@pytest.mark.row("R2")
def test_it_joins_and_does_not_end_a_cluster_that_was_there(connection: Any) -> None:
    assert not connection.started and connection.resource("cpu") == SLOT
    cluster = connection.snapshot(SLOT)
    assert sorted(len(node.devices) for node in cluster.nodes) == [1, 2]
    assert cluster.head == connection.node and len(cluster.ordered()[0].devices) == 1


def plan(capsys: Any, *args: str) -> dict[str, Any]:
    """What `planaria plan --json` says of this cluster."""
    capsys.readouterr()
    code = main(["plan", *args, "--json"])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["feasible"] == (code == 0) and said["source"].startswith("Ray at ")
    return said


@pytest.mark.row("R3")
def test_each_rank_is_on_the_node_that_was_planned(connection: Any, small: Path, capsys: Any) -> None:
    with LLM(str(small), **SMALL) as llm:
        expected = answers(llm, PROMPTS, 8)
    planned = [(row["node"], row["device"]) for row in plan(capsys, "-pp", "2", "--device", "cpu")["ranks"]]
    with LLM(str(small), **SMALL, **ray_options("pp2")) as llm:
        launcher: Any = llm._loop.gang.launcher
        nodes = [child.place.host for _, child in sorted(launcher.pool.ranks.items())]
        assert nodes == [slot.node for slot in launcher.ray.bundles.groups[0].placement.slots]
        assert nodes == [node for node, _ in planned] == actor_nodes(connection.ray)
        assert nodes[0] == connection.node != nodes[1] and [device for _, device in planned] == [0, 0]
        check(answers(llm, PROMPTS, 8), expected)
    assert connection.alive, "others may be using it"
    wait_until("its placement group is gone", lambda: not live_groups())
    free_again(connection, 3)


def test_plans_of_this_cluster(connection: Any, group: Any, capsys: Any) -> None:
    """Its group takes all devices; without it there is room for an engine on each node."""
    inside = plan(capsys, "-tp", "2", "--placement-group", group.id.hex())
    (node,) = {row["node"] for row in inside["ranks"]}
    assert node != connection.node and inside["layout"] == {"dp": 1, "pp": 1, "tp": 2}
    taken = plan(capsys, "-dp", "2")
    assert (taken["needed"], taken["found"], taken["nearest"]) == (2, 0, None)
    connection.ray.util.remove_placement_group(group)
    free_again(connection, 3)
    engines = plan(capsys, "-dp", "2")
    assert engines["strategy"] == "strict" and engines["head"] == connection.node == engines["ranks"][0]["node"]
    assert engines["ranks"][1]["node"] == node and engines["ranks"][1]["address"] == connection.address
    few = plan(capsys, "-dp", "2", "-tp", "2")
    assert few["needed"] == 4 and few["nearest"]["layout"] == {"dp": 2, "pp": 1, "tp": 1}
    assert connection.alive and not live_groups()


@pytest.mark.row("P15")
def test_a_users_group_is_used_and_kept(connection: Any, group: Any, small: Path) -> None:
    """Its tensor group on one node: so none on the driver's, which has one slot."""
    with LLM(str(small), **SMALL, **ray_options("tp2"), null_worker=True, placement_group=group.id.hex()) as llm:
        launcher: Any = llm._loop.gang.launcher
        (used,) = launcher.ray.bundles.groups
        assert len(used.bundles) == 2 and 0 not in used.bundles and not used.owned
        assert not used.placement.spanning() and connection.node not in used.placement.nodes
    assert live_groups() == [group.id.hex()]


def test_explicit_bundles_in_the_order_given(connection: Any, group: Any) -> None:
    assert obtain(connection, Layout(tp=2), group, bundle_indices=(3, 1)).bundles == [3, 1]
    with pytest.raises(ConfigError, match="bundle 0 holds no device"):
        obtain(connection, Layout(tp=2), group, bundle_indices=(0, 1))


def test_a_users_group_that_is_too_small_or_unknown_is_refused(connection: Any, group: Any) -> None:
    with pytest.raises(ConfigError, match=r"3 of them hold a device .*needs 6"):
        obtain(connection, Layout(tp=2, pp=3), group)
    from planaria.executor.ray import groups

    with pytest.raises(ConfigError, match="none of this name"):
        groups.obtain(connection, "nobody's", Layout(), SLOT, RaySettings(), "test")
    with pytest.raises(ConfigError, match="not in this cluster"):
        groups.obtain(connection, "0" * 36, Layout(), SLOT, RaySettings(), "test")
    with pytest.raises(ConfigError, match="none is given"):
        obtain(connection, Layout(), bundle_indices=(0,))


@pytest.mark.row("R4")
def test_the_enclosing_group_is_used(connection: Any, group: Any) -> None:
    """Seen from a task inside it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @connection.ray.remote(num_cpus=0.1)
    def inside() -> tuple[list[int], bool]:
        from planaria.executor.ray import groups
        from planaria.executor.ray.cluster import connect

        found = groups.obtain(connect(None, 1), None, Layout(tp=2), SLOT, RaySettings(), "test")
        return found.bundles, found.owned

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    bundles, owned = connection.ray.get(inside.options(scheduling_strategy=strategy).remote(), timeout=60)
    assert len(bundles) == 2 and 0 not in bundles and not owned


@pytest.mark.row("R5", "R6")
def test_a_broken_rule_is_not_waited_for(connection: Any) -> None:
    with pytest.raises(CapacityError, match="driver's node"):
        obtain(connection, Layout(tp=2), driver_inside=True)
    with pytest.raises(CapacityError, match=r"8 x planaria_slot on Ray, 3 are available .*--tensor-parallel-size"):
        obtain(connection, Layout(tp=2, pp=4), wait=0.5)
    assert not live_groups()
    free_again(connection, 3)


@pytest.mark.row("R5")
def test_a_cluster_that_grows_is_waited_for(nodes: Any, connection: Any) -> None:
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(obtain(connection, Layout(pp=5), wait=120)))
    waiting.start()
    wait_until("the demand is stated", live_groups)
    node = nodes.add_node(num_cpus=1, resources={SLOT: 2})
    waiting.join(120)
    (got,) = found
    assert got.owned and len(got.placement.nodes) == 3 and live_groups() == [got.handle.id.hex()]
    got.remove()
    wait_until("removed", lambda: not live_groups())
    nodes.remove_node(node)


@pytest.mark.row("R6")
def test_a_driver_that_must_be_inside_is(connection: Any) -> None:
    got = obtain(connection, Layout(pp=2), driver_inside=True)
    assert got.placement.slots[0].node == connection.node
    got.remove()
    free_again(connection, 3)


def test_an_address_that_nobody_answers_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: this one is connected."""
    from tests.proc.servers import planaria

    result = planaria(
        "generate", "smollm2", "--prompt", "x", "--distributed-executor-backend", "ray",
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
    )  # fmt: skip
    assert result.returncode != 0 and "127.0.0.1:1" in result.stderr and "Traceback" not in result.stderr
