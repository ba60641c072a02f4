"""By Ray's own means: what it calls failure injection, and the killers of its tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import cast

import psutil

from tests.faults.outside import NotHere, Scene, Wrong, outside
from tests.faults.ray_deployment import RayDeployment, environment

# Of a hundred calls one fails before it is sent, one when its answer comes: with five of each Ray itself doesn't start.
LOSSY = json.dumps({"*": {"num_failures": -1, "req_failure_prob": 1, "resp_failure_prob": 1}})
# Not all that Ray does: where objects are told of in another order than they were made and deleted, its raylet ends.
LATE = (
    "NodeManagerService.grpc_server.RequestWorkerLease", "CoreWorkerService.grpc_server.PushTask",
    "ActorInfoGcsService.grpc_server.CreateActor", "ActorInfoGcsService.grpc_server.KillActorViaGcs",
)  # fmt: skip
KILLER = """
import sys, ray
from ray._private import test_utils

ray.init(log_to_driver=False, logging_level="ERROR", namespace="killer")
killer = test_utils.get_and_run_resource_killer(getattr(test_utils, sys.argv[1]), 1, max_to_kill=1)
sys.exit(0 if ray.get(killer.get_killed_nodes.remote()) else 1)
"""


def on_ray(scene: Scene) -> RayDeployment:
    try:
        import ray  # noqa: F401
    except ImportError:
        raise NotHere("ray is not installed") from None
    return cast(RayDeployment, scene.at("ray"))


@contextlib.contextmanager
def chaotic(scene: Scene, **chaos: str) -> Iterator[None]:
    """A cluster of its own whose every process, and the server, has these settings of Ray's."""
    scene.stage.drop()
    with environment(chaos):
        on_ray(scene)
        yield
    scene.rest()
    scene.stage.drop()
    scene.deployment = None


@outside("ray-rpc", "`RAY_testing_rpc_failure`: one call in 50 between Ray's processes fails; rank 1 is killed")
def ray_rpc(scene: Scene) -> None:
    with chaotic(scene, RAY_testing_rpc_failure=LOSSY):
        kill_and_stream(scene)


@outside("ray-delay", "`RAY_testing_asio_delay_us`: workers and actors are handled 20 to 80 ms late; rank 1 is killed")
def ray_delay(scene: Scene) -> None:
    with chaotic(scene, RAY_testing_asio_delay_us=",".join(f"{name}=20000:80000" for name in LATE)):
        kill_and_stream(scene)


def kill_and_stream(scene: Scene) -> None:
    scene.stream()
    load = scene.begin()
    os.kill(scene.on.pids("rank1")[0], signal.SIGKILL)
    scene.await_end(load)


@outside("ray-raylet", "Ray's `RayletKiller` ends a raylet of a node that is not the head")
def ray_raylet(scene: Scene) -> None:
    by_killer(scene, "RayletKiller")
    on_ray(scene).harm_raylet("calm")  # three nodes again


def by_killer(scene: Scene, name: str) -> None:
    deployment = on_ray(scene)
    load = scene.begin()
    killer = subprocess.Popen(
        [sys.executable, "-c", KILLER, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=deployment.environment(),
    )  # fmt: skip
    try:
        said, _ = killer.communicate(timeout=40)
    finally:
        killer.kill()
        killer.wait(60)
    if killer.returncode:
        errors = [line for line in said.splitlines() if "Error" in line]
        raise Wrong(f"the killer ended with exit code {killer.returncode}: {' '.join(errors)}")
    scene.await_end(load)
    scene.stream()


@outside("ray-workers", "every 0.5 s one of the processes below Ray's raylets is killed at random, 8 times")
def ray_workers(scene: Scene) -> None:
    deployment = on_ray(scene)
    draw = random.Random(1)
    load = scene.begin()
    for _ in range(8):
        found = [
            child.pid for raylet in deployment.raylets() for child in psutil.Process(raylet).children(recursive=True)
        ]
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(sorted(found)), signal.SIGKILL)
        time.sleep(0.5)
    scene.await_end(load)
    deployment.harm_raylet("calm")  # a raylet whose agent was killed ends: three nodes again
