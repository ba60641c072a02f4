"""What is decided before Ray is asked: waiting, names, bundles, environments. No Ray here."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config.options import ParallelConfig
from planaria.env import RaySettings, ray_settings
from planaria.errors import ConfigError
from planaria.executor import patience
from planaria.executor.patience import FIRST, Patience
from planaria.executor.ray.environment import Scope, kind, merge, offered, read_at_start
from planaria.executor.ray.fleet import RayHosts
from planaria.executor.ray.groups import check_bundles, too_small
from planaria.executor.ray.names import actor_name
from planaria.topology import Bundle, Infeasible, Layout, cluster_of_bundles, place, place_at
from planaria.topology.packing import Packing


@pytest.mark.row("R5")
def test_a_wait_is_said_after_ten_seconds_then_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 0.0, list[str]()
    monkeypatch.setattr(patience.time, "monotonic", lambda: now)

    def times(limit: float, step: float, first: float = FIRST) -> list[float]:
        """When it is said, by who looks so often."""
        nonlocal now
        now, found = 0.0, list[float]()
        wait = Patience(said.append, limit, first)
        while not wait.over:
            before = len(said)
            wait.tell("waiting for 2 x GPU: none is free")
            found += [now] * (len(said) - before)
            now += step
        wait.tell("not any more")
        return found

    assert times(100, 1) == [10, 20, 40, 80]
    assert times(1800, 1) == [10, 20, 40, 80, 160, 320, 640, 1280]
    assert times(10, 1) == [] and times(15, 1, first=0.0) == [0, 10]
    assert times(100, 45) == [45, 90], "one line, though two times have passed"
    assert said[0] == "waiting for 2 x GPU: none is free (10 s of 100 s)" and "not any more" not in "".join(said)


@pytest.mark.row("R5")
def test_the_last_error_names_both_numbers_and_the_flag_only_where_it_helps() -> None:
    text = str(too_small(Layout(tp=2), "GPU", 2, 1, "one node is small", 30.0))
    for part in (
        "needs 2 x GPU", "1 are available", "30 s", "--tensor-parallel-size", "one node is small", "ray status",
        "ray list nodes", "$PLANARIA_HOST_IP",
    ):  # fmt: skip
        assert part in text
    assert "--tensor-parallel-size" not in str(too_small(Layout(), "GPU", 1, 0, "none", 30.0))


@pytest.mark.row("R8")
def test_names_have_the_coordinates_that_differ_and_the_epoch() -> None:
    assert actor_name("ab", Layout(), 0, 0) == "planaria-ab-e0"
    assert actor_name("ab", Layout(tp=2), 1, 3) == "planaria-ab-tp1-e3"
    assert actor_name("ab", Layout(tp=2, pp=2), 3, 0) == "planaria-ab-tp1-pp1-e0"
    assert actor_name("ab", Layout(dp=2, pcp=2), 3, 1) == "planaria-ab-pcp1-lane1-e1"
    layout = Layout(tp=2, pp=2, dp=2)
    assert len({actor_name("ab", layout, rank, 0) for rank in range(8)}) == 8


def bundles(*rows: tuple[str, float]) -> list[Bundle]:
    return [Bundle(index, node, devices) for index, (node, devices) in enumerate(rows)]


@pytest.mark.row("R7")
def test_bundles_are_taken_from_the_drivers_node_then_by_node_then_by_index() -> None:
    table = bundles(("b", 1), ("a", 1), ("driver", 0), ("c", 1), ("driver", 1), ("a", 1))
    placement = place(cluster_of_bundles(table, head="driver"), Layout(pp=4), span=True)
    assert [slot.device for slot in placement.slots] == [4, 1, 5, 0]


@pytest.mark.row("R7")
def test_explicit_bundles_are_taken_as_they_are() -> None:
    table = bundles(("a", 1), ("b", 1), ("b", 0), ("a", 1))
    assert [slot.node for slot in place_at(table, Layout(tp=2), (3, 1)).slots] == ["a", "b"]
    for indices, says in (((3,), "1 for 2 ranks"), ((3, 3), "twice"), ((3, 2), "no device"), ((3, 9), "not in")):
        with pytest.raises(ConfigError, match=says):
            place_at(table, Layout(tp=2), indices)


@pytest.mark.row("R4")
def test_a_group_with_too_few_device_bundles_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1 of them hold a device \(GPU\), tp=2 needs 2"):
        check_bundles(bundles(("a", 1), ("a", 0)), Layout(tp=2), "GPU", 1.0)


@pytest.mark.row("R3")
def test_a_bundle_must_reserve_what_a_rank_asks_for_and_one_device_at_most() -> None:
    with pytest.raises(ConfigError, match=r"reserves 0.5 x GPU, a rank asks for 1"):
        check_bundles(bundles(("a", 1), ("a", 0.5)), Layout(), "GPU", 1.0)
    check_bundles(bundles(("a", 0.5), ("a", 0.5)), Layout(tp=2), "GPU", 0.5)
    with pytest.raises(ConfigError, match="one bundle for each device"):
        cluster_of_bundles(bundles(("a", 2)))


@pytest.mark.row("R3")
def test_a_rank_on_the_drivers_node_can_be_asked_for() -> None:
    with pytest.raises(Infeasible, match="driver's node"):
        place(cluster_of_bundles(bundles(("a", 1)), head="driver"), Layout(), driver_inside=True)


@pytest.mark.row("R6")
@pytest.mark.parametrize("inside", [True, False])
def test_engines_in_a_users_groups_may_have_to_have_the_drivers_node(inside: bool) -> None:
    packing = Packing.of(place(cluster_of_bundles(bundles(("a", 1))), Layout()))
    config: Any = SimpleNamespace(parallel=ParallelConfig())
    hosts: Any = RayHosts(config, RaySettings(driver_inside=inside))
    hosts.connection = SimpleNamespace(node="driver", snapshot=lambda resource: None)
    hosts._headed = lambda cluster: SimpleNamespace(head="driver")
    hosts.given = SimpleNamespace(pack=lambda *asked, head: packing)
    with pytest.raises(Infeasible, match="driver's node driver") if inside else nullcontext():
        assert hosts.plan([0]) == packing


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES", Scope.COMPUTED), ("NCCL_SOCKET_IFNAME", Scope.NODE), ("PLANARIA_HOST_IP", Scope.NODE),
        ("HF_HOME", Scope.NODE), ("PLANARIA_CACHE", Scope.NODE), ("UCX_NET_DEVICES", Scope.NODE),
        ("NCCL_DEBUG", Scope.GLOBAL), ("HF_TOKEN", Scope.GLOBAL), ("OMP_NUM_THREADS", Scope.GLOBAL),
        ("LD_PRELOAD", Scope.GLOBAL), ("PLANARIA_LOG_LEVEL", Scope.GLOBAL), ("PLANARIA_API_KEY", Scope.NEVER),
        ("PLANARIA_ADMIN_KEY", Scope.NEVER), ("PLANARIA_SECRET", Scope.NEVER),
        ("RAY_AUTH_TOKEN", Scope.NEVER), ("AWS_SECRET_ACCESS_KEY", Scope.NEVER), ("PATH", Scope.NEVER),
        ("HOME", Scope.NEVER), ("PLANARIA_DP_RANK", Scope.NEVER),
    ],
)  # fmt: skip
@pytest.mark.row("R11")
def test_classes_of_variables(name: str, expected: Scope) -> None:
    assert kind(name) is expected


@pytest.mark.row("R11")
def test_computed_wins_over_the_nodes_own_which_wins_over_the_drivers() -> None:
    driver = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "t0p", "CUDA_VISIBLE_DEVICES": "7", "GLOO_SOCKET_IFNAME": "e", "X": "1"}
    offer = offered(driver)
    assert offer == {"NCCL_DEBUG": "INFO", "HF_TOKEN": "t0p"}
    own = {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0,1,2", "GLOO_SOCKET_IFNAME": "eth0"}
    changes = merge(own, offer, {"CUDA_VISIBLE_DEVICES": "1,2"})
    assert {change.name: change.new for change in changes} == {
        "CUDA_VISIBLE_DEVICES": "1,2", "HF_TOKEN": "t0p", "NCCL_DEBUG": "WARN",
    }  # fmt: skip
    assert [change.line for change in changes] == [
        "~ CUDA_VISIBLE_DEVICES=1,2 (computed)", "+ HF_TOKEN=*** (global)", "  NCCL_DEBUG=WARN (the node's own, kept)",
    ]  # fmt: skip
    assert [c.new for c in merge({}, {"CUDA_DEVICE_ORDER": "driver's"}, {"CUDA_DEVICE_ORDER": "ours"})] == ["ours"]


def test_the_same_environment_is_no_change() -> None:
    assert merge({"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "INFO"}, {}) == []


@pytest.mark.row("R11")
def test_what_a_process_reads_at_its_start() -> None:
    offer = {"LD_PRELOAD": "x.so", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": "/p", "NCCL_DEBUG": "INFO"}
    assert set(read_at_start(offer)) == {"LD_PRELOAD", "OMP_WAIT_POLICY", "PYTHONPATH"}


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_settings() == RaySettings()
    for name, value in (("WAIT", "5"), ("BUNDLES", "2,0"), ("FRACTION", "0.5"), ("DRIVER_INSIDE", "1")):
        monkeypatch.setenv(f"PLANARIA_RAY_{name}", value)
    assert ray_settings() == RaySettings(wait=5.0, bundle_indices=(2, 0), fraction=0.5, driver_inside=True)


@pytest.mark.parametrize(
    ("name", "value"), [("WAIT", "soon"), ("WAIT", "-1"), ("BUNDLES", "0;1"), ("FRACTION", "2"), ("FRACTION", "0")]
)
def test_a_bad_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"PLANARIA_RAY_{name}", value)
    with pytest.raises(ConfigError, match=rf"PLANARIA_RAY_{name}"):
        ray_settings()
