"""What tests ask of the machine around a cluster."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from tests.forked import keepers
from tests.proc.networks import REMOVE, Networks
from tests.proc.servers import wait_until

Reserved = dict[int, tuple[str, str, int]]  # by pid: node, placement group, bundle

# Ray notices that a raylet is gone in a second or two, not in 15; not one that is slow.
NOTICE = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 300, "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 4,
}  # fmt: skip
# Nor does it start workers that nobody asked for: ours have an environment of their own, so none of them is used.
SYSTEM = {**NOTICE, "prestart_worker_first_driver": False}
# Nor an autoscaler, or what brings lines of workers to the driver, or Ray's own server: a process of Python each, of
# which nobody reads.
UNWATCHED = {"no_monitor": True, "include_log_monitor": False}

# The command `ray`, but for that server.
RAY = """
from ray._private import node
from ray.scripts.scripts import main

def without(self, **options):
    self._webui_url = ""

node.Node.start_api_server = without
main()
"""

# Waits until these addresses are of living nodes.
JOINED = """
import sys, time
from ray._raylet import GcsClient

address, *wanted = sys.argv[1:]
while True:
    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=10).values()
        if set(wanted) <= {node.node_manager_address for node in nodes if not node.state}:
            break
    except Exception as e:
        print(e, file=sys.stderr)
    time.sleep(0.2)
"""


def ray_processes() -> set[int]:
    """Below this process. What Python and tests keep as long as it runs, and networks' remover, are not Ray's."""
    found = set[int]()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            command = " ".join(process.cmdline())
            if "multiprocessing.resource_tracker" not in command and REMOVE not in command:
                found.add(process.pid)
    return found - keepers()


def stored() -> list[str]:
    """Names of Ray's shared memory."""
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("plasma")]


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """What is ended inside is gone at the end: every process below this one that was there, and its shared memory."""
    before = ray_processes()
    yield
    wait_until("Ray's processes are gone", lambda: not before & ray_processes())
    wait_until("Ray's shared memory is gone", lambda: not stored())  # a file has a name only while it is being made


@contextlib.contextmanager
def ends(shut_down: Callable[[], Any]) -> Iterator[None]:
    """As `ended`, of what is started inside, with `shut_down`. An error inside is what the caller hears of, not what
    it left behind: that is killed."""
    before = ray_processes()
    try:
        yield
    except BaseException as e:
        try:
            shut_down()
        except Exception as late:
            e.add_note(f"it could not be shut down: {late!r}")
        for pid in ray_processes() - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    with ended():
        shut_down()


def live_actors(ray: Any) -> list[str]:
    """Names of actors that have not ended; a graph's own has none."""
    from ray._private.state import actors

    return [a["Name"] for a in actors().values() if a["State"] not in ("DEAD",)]


def actor_nodes(ray: Any) -> list[str]:
    """Ids of the nodes of actors that live, by the actors' names."""
    from ray._private.state import actors

    living = [a for a in actors().values() if a["State"] == "ALIVE"]
    return [a["Address"]["NodeID"] for a in sorted(living, key=lambda a: a["Name"])]


def live_groups() -> list[str]:
    """Placement groups that have not been removed."""
    from ray.util import placement_group_table

    return [id for id, group in placement_group_table().items() if group["state"] != "REMOVED"]


def reservations() -> Reserved:
    """What Ray's table of actors has of those that live."""
    return reserved((actor.pid, actor.node_id.hex(), actor.required_resources) for actor in _living())


def required() -> dict[int, dict[str, float]]:
    """What each actor that lives asks for, by pid."""
    return {actor.pid: dict(actor.required_resources) for actor in _living()}


def _living() -> list[Any]:
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    rows = map(gcs_pb2.ActorTableData.FromString, state._connect_and_get_accessor().get_actor_table(None, None))
    return [actor for actor in rows if actor.state == gcs_pb2.ActorTableData.ALIVE]


def reserved(actors: Iterable[tuple[int, str, Iterable[str]]]) -> Reserved:
    """By Ray's names of what an actor needs."""
    found = {}
    for pid, node, resources in actors:
        for bundle in filter(None, (re.fullmatch(r"bundle_group_(\d+)_([0-9a-f]+)", name) for name in resources)):
            found[pid] = node, bundle[2], int(bundle[1])
    return found


def cluster_environment() -> dict[str, str]:
    """Of clusters that tests start: a token of their own, workers that are not niced, and none killed because others
    use the machine's memory."""
    return {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
    }  # fmt: skip


def without_server(node: Any) -> Any:
    return mock.patch.object(node, "start_api_server", lambda self, **options: None)


@contextlib.contextmanager
def several_nodes(*slots: int, gpus: Sequence[int] = (), dashboard: bool = False) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` on this machine only, with a token of its own; so many slots on each node, and
    accelerators that there aren't. One that is kept is ended before. dashboard: with Ray's, which answers questions
    about its state."""
    if not KEPT.opening:
        KEPT.close()
    own = cluster_environment()
    os.environ |= own
    from ray._private import node, ray_constants, utils
    from ray._private.authentication_test_utils import reset_auth_token_state
    from ray.cluster_utils import Cluster

    from planaria.executor.ray.cluster import loopback

    reset_auth_token_state()
    with loopback(ray_constants):
        cluster = Cluster()
        head: dict[str, Any] = {"_system_config": SYSTEM, "include_dashboard": dashboard, **UNWATCHED}
        try:
            with ends(cluster.shutdown):
                for count, accelerators in itertools.zip_longest(slots, gpus, fillvalue=0):
                    slot = {"planaria_slot": count} if count else {}
                    with contextlib.nullcontext() if dashboard else without_server(node.Node):
                        cluster.add_node(num_cpus=1, num_gpus=accelerators, resources=slot, **head)
                    head = {"include_dashboard": False}
                yield cluster
        finally:
            address_file = Path(utils.get_ray_address_file(None))  # by which others would find it
            address_file.unlink(missing_ok=True)
            for name in own:
                del os.environ[name]
            reset_auth_token_state()


@contextlib.contextmanager
def joined_nodes(*slots: int, dashboard: bool = False) -> Iterator[Any]:
    """`several_nodes` that this process has joined and that what it starts finds."""
    from planaria.executor.ray.cluster import connect

    with several_nodes(*slots, dashboard=dashboard) as cluster:
        os.environ["RAY_ADDRESS"] = cluster.address
        connection = connect(None, sum(slots))
        try:
            yield cluster
        finally:
            connection.close()
            del os.environ["RAY_ADDRESS"]


@contextlib.contextmanager
def ray_node(prefix: tuple[str, ...], env: dict[str, str], *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start ARGS --block` in a namespace; at the end nothing of it is left there."""
    command = [*prefix, sys.executable, "-c", RAY, "start", *args, "--block", "--num-cpus", "1"]
    command += ["--resources", '{"planaria_slot": 1}', "--object-store-memory", str(100 << 20)]
    command += ["--include-log-monitor", "false"]  # see UNWATCHED
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # a test may have stopped it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            for pid in pids_in(prefix[-1]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(60)


def pids_in(space: str) -> list[int]:
    """Processes of one of the test's own namespaces."""
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in found.split()]


class Kept:
    """The cluster that this process is a part of, from one test file to the next that wants the same. `have` is a
    context manager that opens it."""

    def __init__(self) -> None:
        self._stack, self._what, self.opening = contextlib.ExitStack(), "", False

    def have(self, what: str, made: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
        """The cluster by this name, which is `made` unless it is there; another is ended."""
        if what != self._what:
            self.close()
            self.opening = True
            try:
                self.cluster = self._stack.enter_context(made())
            finally:
                self.opening = False
            self._what = what
        return self.cluster

    def close(self) -> None:
        self._what = ""
        self._stack.close()


KEPT = Kept()


@contextlib.contextmanager
def started_here() -> Iterator[Any]:
    """Ray as `connect` starts it: one node, four slots."""
    from planaria.executor.ray.cluster import connect

    connection = connect("local", 4)
    try:
        yield connection.ray
    finally:
        with ended():
            connection.close()


@contextlib.contextmanager
def three_nodes() -> Iterator[Any]:
    """Each with two slots, and a variable of its own, that a server says otherwise."""
    os.environ["MALLOC_ARENA_MAX"] = "7"
    with joined_nodes(2, 2, 2) as cluster:
        del os.environ["MALLOC_ARENA_MAX"]
        yield cluster


class RayNodes:
    """Ray on several networks: `start` a node on one of them, the first is the head. A node is killed with all its
    processes at once, or told to end as users do it. Only the head is told its own address."""

    def __init__(self, networks: Networks) -> None:
        KEPT.close()  # it would be found by what runs here
        self.networks, self.env = networks, os.environ | cluster_environment()
        self.address = "10.93.0.1:6379"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}  # that end a node when one of its own has ended
        self._stacks: dict[int, contextlib.ExitStack] = {}

    def start(self, *which: int) -> None:
        """Counted from 0. Returns when Ray knows them."""
        for i in which:
            stack = self._stacks[i] = contextlib.ExitStack()
            folder = tempfile.mkdtemp(prefix="pr")  # short: sockets' paths have a limit
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            how = ["--address", self.address]
            if not i:
                how = ["--head", "--port", "6379", "--no-monitor", "--node-ip-address", "10.93.0.1"]
                how += ["--system-config", json.dumps(SYSTEM)]
            node = ray_node(self.networks.prefixes[i], self.env, *how, "--temp-dir", folder)
            self.processes[i] = stack.enter_context(node)
            if not i:
                self._wait_for(0)
        self._wait_for(*which)

    def _wait_for(self, *which: int) -> None:
        command = [*self.networks.prefixes[0], sys.executable, "-c", JOINED, self.address]
        addresses = [f"10.93.0.{i + 1}" for i in which]
        subprocess.run([*command, *addresses], env=self.env, timeout=180, check=True, capture_output=True)

    def pids(self, which: int) -> list[int]:
        return pids_in(self.networks.spaces[which])

    def kill(self, which: int) -> None:
        for pid in self.pids(which):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, which: int) -> None:
        """So that it can be started again. Of one that isn't there: nothing."""
        if which in self._stacks:
            self._stacks.pop(which).close()

    def close(self) -> None:
        for which in sorted(self._stacks, reverse=True):
            self.end(which)


def raylet_of(node: Any) -> int:
    """Pid of a node's raylet."""
    (info,) = node.all_processes["raylet"]
    return int(info.process.pid)


def kill_node(node: Any, *pids: int) -> None:
    """A node's raylet, and these actors on it, at once."""
    for pid in (raylet_of(node), *pids):
        os.kill(pid, signal.SIGKILL)
