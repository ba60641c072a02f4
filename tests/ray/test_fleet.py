"""Engines of a fleet as actors on a cluster of three nodes, each with room for one: where they are, what becomes of
their requests when one is killed, stopped or loses its node, what is left when the server ends, and groups of the
user's."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import psutil
import pytest

from planaria.cli import main
from planaria.config.options import EngineConfig, ParallelConfig
from planaria.env import RaySettings
from planaria.errors import ConfigError
from planaria.processes import titled_processes
from planaria.topology import Cluster, Layout, Node, pack
from planaria.topology.table import CameUp
from tests.proc.servers import Server, alive, needs_smollm2, planaria, wait_until
from tests.proc.test_engine_death import HASH, expected, health, run  # noqa: F401
from tests.ray.clusters import Reserved, live_actors, live_groups, reservations

pytestmark = needs_smollm2

SLOT = "planaria_slot"


@pytest.fixture(scope="module")
def cluster(three: Any) -> Any:
    return three


ON_RAY = [*HASH, "-dp", "2", "--data-parallel-backend", "ray", "--heartbeat-timeout", "2"]


def plan_of(*args: str) -> tuple[dict[str, Any], str]:
    """What `planaria plan` says before anything is started: for machines, and for people."""
    out = [io.StringIO(), io.StringIO()]
    for text, how in zip(out, (["--json"], []), strict=True):
        with contextlib.redirect_stdout(text):
            assert main(["plan", *args, "--data-parallel-backend", "ray", "--device", "cpu", *how]) == 0
    return json.loads(out[0].getvalue()), out[1].getvalue()


@pytest.fixture(scope="module")
def planned(cluster: Any) -> tuple[dict[str, Any], str]:
    return plan_of("-dp", "2", "-tp", "2")


@pytest.fixture(scope="module")
def server(planned: Any) -> Iterator[Server]:
    env = {"MALLOC_ARENA_MAX": "5", "OMP_DYNAMIC": "FALSE", "PLANARIA_SECRET": "sesame"}
    with Server("smollm2", *ON_RAY, "-tp", "2", env=env) as server:
        yield server


def fleet(server: Server) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = httpx2.get(server.url + "/admin/fleet").json()["engines"]
    return engines


def scale(server: Server, size: int) -> dict[str, Any]:
    asked = {"new_data_parallel_size": size, "drain_timeout": 1}
    answer: dict[str, Any] = httpx2.post(server.url + "/scale_elastic_ep", json=asked, timeout=300).json()
    return answer


def group_nodes() -> list[list[str]]:
    """Of each placement group, by name: the nodes of its bundles."""
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    return [
        [node for _, node in sorted(group["bundles_to_node_id"].items())]
        for group in sorted(groups, key=lambda group: group["name"])
    ]


def check_plan(server: Server, planned: tuple[dict[str, Any], str], actors: Reserved) -> None:
    """What Ray says of groups and actors is what `planaria plan` printed, rank for rank; serve has printed it too."""
    from ray.util import placement_group_table

    plan, table = planned
    wait_until("it says so", lambda: "".join(l for l in server.log if l in table.splitlines(keepends=True)) == table)
    assert not [line for line in server.log if "was planned" in line]
    groups = placement_group_table()
    there, world = fleet(server), len(plan["ranks"]) // len(plan["engines"])
    assert len(actors) == len(plan["ranks"]) + len(plan["engines"]) and len(live_groups()) == len(there)
    ranks = iter(plan["ranks"])
    for engine, row in zip(there, plan["engines"], strict=True):
        (group,) = {group for _, group, _ in map(actors.get, [engine["pid"], *engine["ranks"]])}
        assert sorted(groups[group]["bundles_to_node_id"].items()) == list(enumerate(b["node"] for b in row["bundles"]))
        wanted = [{SLOT: 1.0}] * world + [{"CPU": 1.0}]
        assert [wants for _, wants in sorted(groups[group]["bundles"].items())] == wanted
        devices = dict[str, list[int]]()  # of the nodes that it has whole: the n-th bundle there is the n-th device
        for bundle, pid in enumerate(engine["ranks"]):
            rank = next(ranks)
            own = devices.setdefault(rank["node"], [])
            own.append(bundle)
            assert actors[pid] == (rank["node"], group, own[rank["device"]])
        assert actors[engine["pid"]] == (row["bundles"][world]["node"], group, world)
        assert engine["misplaced"] == []
    assert next(ranks, None) is None


@pytest.mark.row("D1")
def test_engines_and_ranks_are_where_it_was_planned(server: Server, planned: tuple[dict[str, Any], str]) -> None:
    import ray

    check_plan(server, planned, reservations())
    assert len(live_actors(ray)) == 6 and len({row["node"] for row in planned[0]["ranks"]}) == 2


def test_engines_start_with_what_their_node_has_and_the_server_adds(server: Server) -> None:
    engine = fleet(server)[1]
    for pid in (engine["pid"], engine["ranks"][0]):
        at_start = psutil.Process(pid).environ()
        assert (at_start["MALLOC_ARENA_MAX"], at_start["OMP_DYNAMIC"]) == ("7", "FALSE")
        assert "PLANARIA_SECRET" not in at_start


def test_what_is_elsewhere_is_said(cluster: Any) -> None:
    from planaria.executor.ray.fleet import RayHosts

    config = EngineConfig(
        model=None, checkpoint={}, served_model_name="", scheduler=None, cache=None,  # type: ignore[arg-type]
        device=None, parallel=ParallelConfig(tensor_parallel_size=2),  # type: ignore[arg-type]
    )  # fmt: skip
    hosts = RayHosts(config, RaySettings())
    nodes = Cluster((Node.of("a", 2, "x"), Node.of("b", 2, "x")), "a")
    hosts.packing, hosts.groups, hosts.resource = pack(nodes, Layout(dp=2, tp=2)), {0: None, 1: None}, "CPU"
    hosts.connection = SimpleNamespace(seat_cores=lambda resource: 1.0)  # type: ignore[assignment]
    hosts.came_up(1, "b")
    assert hosts.differences(1, [CameUp("b", (7,), 0), CameUp("b", (), -1)]) == []
    hosts.came_up(1, "a")
    assert hosts.differences(1, [CameUp("b", (), 1), CameUp("a")]) == [
        "engine 1 was planned on b and is on a",
        "rank 2 was planned in bundle 0 (device 0 of b) and is in bundle 1",
        "rank 3 was planned on b and is on a",
    ]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
@pytest.mark.row("D5")
def test_requests_go_on_when_an_engine_is_lost(
    server: Server,
    expected: Any,  # noqa: F811
    how: signal.Signals,
) -> None:
    victim = fleet(server)[1]["pid"]
    assert run(server, lambda tokens: os.kill(victim, how) if tokens == 150 else None) == expected
    wait_until("another is there", lambda: [e["state"] for e in fleet(server)] == ["ready", "ready"], 240)
    assert fleet(server)[1]["pid"] != victim and fleet(server)[1]["misplaced"] == []
    wait_until("the old one is gone", lambda: not alive(victim), 120)
    assert len(live_groups()) == 2


@pytest.mark.row("D6", "D7")
def test_the_fleet_changes_its_size(server: Server, expected: Any) -> None:  # noqa: F811
    grown = scale(server, 3)
    assert grown["state"] == "committed" and len(live_groups()) == 3
    assert [engine["misplaced"] for engine in fleet(server)] == [[], [], []]
    assert len({node for nodes in group_nodes() for node in nodes}) == 3
    assert scale(server, 3)["start"] == [], "nothing to do"
    assert "0 engines can't serve" in scale(server, 0)["error"]["message"]
    refused = scale(server, 4)["error"]["message"]
    assert "1 of 4 engines have no place" in refused and "dp=3 would fit" in refused
    assert len(live_groups()) == 3 and run(server) == expected
    assert scale(server, 2)["stop"] == [2] and len(fleet(server)) == 2 and len(live_groups()) == 2


def test_an_engine_whose_node_is_gone_gets_another(
    server: Server,
    cluster: Any,
    expected: Any,  # noqa: F811
) -> None:
    home = group_nodes()[1][0]
    node = next(node for node in cluster.worker_nodes if node.node_id == home)

    def harm(tokens: int) -> None:
        if tokens == 150:
            cluster.remove_node(node, allow_graceful=False)

    assert run(server, harm) == expected
    # its processes may outlive the raylet until Ray gives the node up
    wait_until("it has another group", lambda: [home] * 3 not in group_nodes() and len(group_nodes()) == 2, 240)
    wait_until("it is there", lambda: [e["state"] for e in fleet(server)] == ["ready", "ready"], 240)
    assert [engine["misplaced"] for engine in fleet(server)] == [[], []]
    assert run(server) == expected
    cluster.add_node(num_cpus=1, resources={SLOT: 2}, include_dashboard=False)


@pytest.mark.row("X11")
def test_nothing_is_left(server: Server, cluster: Any) -> None:
    import ray

    pids = [engine["pid"] for engine in fleet(server)] + [pid for engine in fleet(server) for pid in engine["ranks"]]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    wait_until("processes, actors and groups are gone", lambda: not (
        any(alive(pid) for pid in pids) or live_actors(ray) or live_groups()
    ), 120)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(server: Server, expected: Any) -> Any:  # noqa: F811
    """What streams give; the server is gone."""
    server.close()
    wait_until("its groups are gone", lambda: not live_groups(), 120)
    return expected


@pytest.mark.long
def test_an_engine_of_several_nodes_is_where_it_was_planned(cluster: Any, undisturbed: Any) -> None:
    """And goes on in a smaller layout, in the same group, also in another process."""
    span = ["-dp", "1", "-tp", "4", "--ray-dp-pack-strategy", "span"]
    planned = plan_of(*span)
    assert len({row["node"] for row in planned[0]["ranks"]}) == 2 and "tensor group spans" in planned[1]
    with Server("smollm2", *HASH, *span, "--data-parallel-backend", "ray", "--heartbeat-timeout", "2") as server:
        check_plan(server, planned, reservations())
        asked = {"tensor_parallel_size": 2}
        changed = httpx2.post(server.url + "/admin/layout", json=asked, timeout=120)
        assert changed.status_code == 200, changed.text
        os.kill(fleet(server)[0]["pid"], signal.SIGKILL)
        assert run(server) == undisturbed
        assert [engine["layout"] for engine in fleet(server)] == ["tp=2 pp=1"] and len(fleet(server)[0]["ranks"]) == 2
    wait_until("its group is gone", lambda: not live_groups())


@pytest.mark.long
@pytest.mark.row("D1")
def test_of_a_fleet_that_can_not_start_nothing_is_left(cluster: Any, undisturbed: Any) -> None:
    """One engine's rank fails while it comes up."""
    import ray

    failed = planaria("serve", "smollm2", *ON_RAY, "-tp", "2", "--worker-cls", "tests.proc.custom.Nobody")
    assert failed.returncode not in (0, None) and "Nobody" in failed.stderr, failed.stderr
    wait_until("no actor and no group", lambda: not live_actors(ray) and not live_groups())


@pytest.fixture(scope="module")
def groups(cluster: Any, undisturbed: Any) -> Iterator[list[Any]]:
    """Two of the user's, on a node each: a bundle without a device, then two with one."""
    from ray.util import placement_group, remove_placement_group

    made = [placement_group([{"CPU": 0.5}, {SLOT: 1}, {SLOT: 1}], strategy="STRICT_PACK") for _ in range(2)]
    assert all(group.wait(120) for group in made)
    yield made
    for group in made:
        remove_placement_group(group)


@pytest.mark.row("D4")
def test_groups_of_the_users_are_checked(groups: list[Any]) -> None:
    from planaria.executor.ray.given import GivenGroups

    ids = [group.id.hex() for group in groups]
    for names, layout, rule in (
        (ids, Layout(dp=2, tp=3), f"{ids[0]}, 3 bundles: 2 of them hold a device \\({SLOT}\\), tp=3 needs 3"),
        (ids, Layout(dp=3, tp=2), "has 2 groups, one for each engine, and 3 engines were asked for"),
        ([ids[0], ids[0]], Layout(dp=2), "is given twice"),
        ([ids[0], "nobody's"], Layout(dp=2), "none of this name"),
        ([ids[0], "0" * 36], Layout(dp=2), "not in this cluster"),
    ):
        with pytest.raises(ConfigError, match=rule):
            GivenGroups(names, SLOT, RaySettings()).pack(layout, 0.0, head="")
    whole = GivenGroups(ids, SLOT, RaySettings(fraction=1.0)).pack(Layout(dp=2, tp=2), 0.0, head="")
    assert [[slot.device for slot in engine.slots] for engine in whole.engines] == [[1, 2], [1, 2]]
    assert whole.local_ranks == (0, 0)
    numbered = GivenGroups(ids, SLOT, RaySettings(), local_ranks=(3, 1))
    assert numbered.pack(Layout(dp=2, tp=2), 0.0, head="").local_ranks == (3, 1)
    assert numbered.pack(Layout(tp=2), 0.0, head="").local_ranks == (3,), "a smaller fleet"
    with pytest.raises(ConfigError, match="-1 of engine 1: is below 0"):
        GivenGroups(ids, SLOT, RaySettings(), local_ranks=(0, -1)).pack(Layout(dp=2, tp=2), 0.0, head="")
    given = ["--placement-group", ",".join(ids), "--placement-group-local-ranks", "1,0"]
    planned = plan_of("-dp", "2", "-tp", "2", *given)
    assert [engine["local_rank"] for engine in planned[0]["engines"]] == [1, 0]


@pytest.mark.row("D4")
def test_engines_in_groups_of_the_users(groups: list[Any], undisturbed: Any) -> None:
    """Used and kept; a smaller fleet leaves them, a larger one has none."""
    import ray

    ids = [group.id.hex() for group in groups]
    given = ["--placement-group", ",".join(ids), "--placement-group-local-ranks", "3,1"]
    with Server("smollm2", *ON_RAY, "-tp", "2", *given) as server:
        server.wait_for(f"bundles of {ids[0]}, {ids[1]}: tp=2 dp=2: 4 ranks on 2 nodes")

        def where(*engines: int) -> None:
            """Each in its group, itself in the bundle without a device."""
            actors, there = reservations(), fleet(server)
            assert len(actors) == 3 * len(engines) == 3 * len(there)
            for number, engine in zip(engines, there, strict=True):
                assert [actors[pid][1:] for pid in [engine["pid"], *engine["ranks"]]] == [
                    (ids[number], bundle) for bundle in range(3)
                ]
                assert engine["misplaced"] == []

        where(0, 1)
        titles = {pid: facts for pid, _, facts in titled_processes()}
        own = [titles[engine["pid"]] for engine in fleet(server)]
        assert [(facts["dp"], facts["local"]) for facts in own] == [("0", "3"), ("1", "1")]
        assert run(server) == undisturbed
        assert "--placement-group names a group for each; 2 fit" in scale(server, 3)["error"]["message"]
        assert scale(server, 1)["state"] == "committed"
        wait_until("the others have left", lambda: len(reservations()) == 3, 120)
        where(0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        log = "".join(server.log)
    wait_until("no actor is left", lambda: not live_actors(ray), 120)
    assert sorted(live_groups()) == sorted(ids) and "was planned" not in log
