"""Ranks on accelerators, which the nodes only say they have: what each reserves, sees, and is started with."""

from __future__ import annotations

import logging
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria import LLM
from planaria.config.options import ParallelConfig
from planaria.env import RaySettings
from planaria.errors import CapacityError, ConfigError
from planaria.executor.ray.actors import Actors
from planaria.executor.ray.cluster import connect
from planaria.executor.ray.launcher import RayLauncher
from planaria.topology import Infeasible, Layout
from planaria.topology.platforms import PLATFORMS
from tests.proc.servers import wait_until
from tests.ray.clusters import kill_node, live_groups, required, several_nodes
from tests.ray.extension import Somebody

MASKS = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
# In place of NVIDIA's: says how it was called, and carries out what it would have profiled.
NSYS = """#!/usr/bin/env bash
while [[ $1 != python && $1 != */python* ]]; do said+=" $1"; shift; done
shift
PROFILED="$said" exec {python} "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A node with three accelerators, the first of which is somebody else's, and a node with one. Both have nsys."""
    folder = tmp_path_factory.mktemp("nsys")
    (folder / "nsys").write_text(NSYS.format(python=sys.executable))
    (folder / "nsys").chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}:{before}"
    try:
        with several_nodes(0, 0, gpus=(3, 1)) as cluster:
            connection = connect(cluster.address, 0)
            actor = connection.ray.remote(num_gpus=1, num_cpus=0, lifetime="detached", name="another")(Somebody)
            assert connection.ray.get(actor.remote().ids.remote(), timeout=60) == ["0"]
            connection.close()
            os.environ["RAY_ADDRESS"] = cluster.address
            yield cluster
    finally:
        os.environ["PATH"] = before
        os.environ.pop("RAY_ADDRESS", None)


@pytest.mark.row("P14", "R8", "R9", "R10")
def test_what_ranks_on_accelerators_reserve_and_are_started_with(
    cluster: Any, weightless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them, on devices 1 and 2 of the driver's node, each half of one; profiled; with the user's own folder."""
    monkeypatch.setattr("planaria.config.resolve.usable_platform", lambda: PLATFORMS["cuda"])
    monkeypatch.setenv("PLANARIA_RAY_FRACTION", "0.5")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "of_the_users.py").write_text("WHAT = 'in the folder'")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text("WHAT = 'a package'")
    runtime_env = {"working_dir": str(tmp_path / "work"), "py_modules": [str(tmp_path / "library")]}
    options: dict[str, Any] = {
        "device": "cuda", "null_worker": True, "skip_tokenizer_init": True, "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray", "worker_extension_cls": "tests.ray.extension.Environment",
        "ray_workers_use_nsight": True, "ray_runtime_env": runtime_env,
    }  # fmt: skip
    with LLM(weightless, **options) as llm:
        places = llm._loop.gang.places
        assert sorted(place.devices for place in places) == [(1,), (2,)]
        noset = [f"RAY_EXPERIMENTAL_NOSET_{name}" for name in MASKS]
        for at_start, now in llm.collective_rpc("environment", args=[[*MASKS, *noset, "PROFILED"]]):
            assert {name: now[name] for name in MASKS} == dict.fromkeys(MASKS, "1,2"), "of the gang, no other"
            assert {name: at_start[name] for name in noset} == dict.fromkeys(noset, "1")
            for said in (" profile ", " -t cuda,cudnn,cublas", "/worker_process_%p", " --cuda-graph-trace=node"):
                assert said in at_start["PROFILED"]
        assert llm.collective_rpc("imported", args=["of_the_users", "WHAT"]) == ["in the folder"] * 2
        assert llm.collective_rpc("imported", args=["library", "WHAT"]) == ["a package"] * 2
        from ray.util import list_named_actors, placement_group_table

        names = sorted(name.split("-", 2)[2] for name in list_named_actors() if name.startswith("planaria-"))
        assert names == ["tp0-e0", "tp1-e0"]
        (group,) = live_groups()
        assert list(placement_group_table()[group]["bundles"].values()) == [{"GPU": 1.0}] * 2
        asked = required()
        for pid in llm.facts.ranks:
            assert asked[pid][f"GPU_group_{group}"] == 0.5 and not any(name.startswith("CPU") for name in asked[pid])
    connection = connect(cluster.address, 0)
    try:
        wait_until("its group is gone", lambda: not live_groups())
        with pytest.raises(ConfigError, match=r"working_dir .*which this process was before.*ray\.init"):
            LLM(weightless, **options)
        assert connection.inherited({"working_dir": "s3://bucket/it.zip", "env_vars": {"A": "1"}}).keys() == {
            "working_dir", "env_vars",
        }  # fmt: skip
    finally:
        connection.close()
    with pytest.raises(ConfigError, match="py_modules /nowhere: is not there"):
        connect(cluster.address, 0, {"py_modules": ["/nowhere"]})


def test_engines_on_one_node_have_devices_of_their_own(
    cluster: Any, weightless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planaria.config.resolve.usable_platform", lambda: PLATFORMS["cuda"])
    options: dict[str, Any] = {
        "device": "cuda", "null_worker": True, "skip_tokenizer_init": True, "distributed_executor_backend": "ray",
        "worker_extension_cls": "tests.ray.extension.Environment",
    }  # fmt: skip
    with LLM(weightless, **options) as one, LLM(weightless, **options) as other:
        places = [llm._loop.gang.places[0] for llm in (one, other)]
        assert len({place.host for place in places}) == 1 and sorted(place.devices for place in places) == [(1,), (2,)]
        for llm, place in zip((one, other), places, strict=True):
            ((_, now),) = llm.collective_rpc("environment", args=[MASKS])
            assert now == dict.fromkeys(MASKS, str(place.devices[0]))


def test_ranks_see_the_devices_of_their_gang_on_their_machine() -> None:
    """In order; not those of another machine, which have the same numbers, nor of who has ended."""

    def child(home: str, *devices: int, ended: bool = False) -> Any:
        gone = threading.Event()
        if ended:
            gone.set()
        at = types.SimpleNamespace(home=home, devices=devices, own={}, node=home)
        run = types.SimpleNamespace(remote=lambda entry, message, values: values)
        actor = types.SimpleNamespace(run=run, said=types.SimpleNamespace(remote=lambda: None))
        ordered = types.SimpleNamespace(engine=False, variables={})
        return types.SimpleNamespace(at=at, gone=gone, ordered=ordered, here=True, entry="it", actor=actor)

    actors: Any = object.__new__(Actors)
    one = child("here", 2)
    actors.children = [child("here", 1), child("there", 0), child("here", 5, ended=True)]
    actors._offer, actors._shown = {}, set()
    assert actors.begin(one, b"")[0] == dict.fromkeys(MASKS, "1,2")


def launcher(ranks: int, **settings: Any) -> RayLauncher:
    parallel = ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend="ray")
    return RayLauncher(parallel, "cuda", "tests.ray.nobody:Nobody", RaySettings(**settings))


@pytest.mark.row("R6")
def test_a_tensor_group_on_several_nodes_is_warned_of(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And one that must have the driver's node is refused when nothing is free there."""
    two, three, inside = launcher(2), launcher(3), launcher(1, driver_inside=True, wait=0.0)
    try:
        with caplog.at_level(logging.WARNING, "planaria.ray"):
            assert len({place.host for place in two.start()}) == 1
            with pytest.raises(CapacityError, match="driver's node"):
                inside.start()
            two.kill()
            assert len({place.host for place in three.start()}) == 2
        said = [record.getMessage() for record in caplog.records]  # on a busy machine that it waits, too
        assert [line for line in said if "tensor ranks" in line] == [
            "tensor ranks 0, 1, 2 are on several nodes: each layer's sums cross the network"
        ]
    finally:
        for each in (two, three, inside):
            each.kill()


def test_a_lost_node_takes_its_devices_with_it(cluster: Any) -> None:
    """What is left is known, and a node that comes has a place for the rank."""
    three = launcher(3)
    try:
        before = three.start()
        hosts = [place.host for place in before]
        lost = next(rank for rank in range(3) if hosts.count(hosts[rank]) == 1)
        (node,) = cluster.worker_nodes
        kill_node(node, before[lost].pid)
        connection = three.ray.connection
        assert connection is not None
        wait_until("Ray knows", lambda: len(connection.nodes()) == 1)
        with pytest.raises(Infeasible) as e:
            three.replace([lost], three.layout)
        assert e.value.nearest == Layout(tp=2)
        cluster.add_node(num_cpus=1, num_gpus=1, include_dashboard=False)
        wait_until("Ray knows", lambda: len(connection.nodes()) == 2)
        after = three.replace([lost], three.layout)
        assert (after[lost].devices, after[lost].host in hosts) == ((0,), False)
        assert [after[rank] for rank in range(3) if rank != lost] == [before[rank] for rank in range(3) if rank != lost]
    finally:
        three.kill()
        three.close()


def test_platforms_are_to_ray_what_the_table_says() -> None:
    """By name of the resource, and of the variable that Ray masks with."""
    accelerators = pytest.importorskip("ray._private.accelerators")
    said = {
        (each.get_resource_name(), each.get_visible_accelerator_ids_env_var())
        for each in accelerators.get_all_accelerator_managers()
    }
    masked = [each for each in PLATFORMS.values() if each.masks]
    assert len(masked) == 7 and not [each.name for each in masked if (each.resource, each.masks[0]) not in said]
