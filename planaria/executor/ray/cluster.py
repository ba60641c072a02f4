"""A connection to a Ray cluster: use the one this process is in, join one that runs, or start one. And what it has.

Rule: a cluster started here listens on this machine only, with Ray's token authentication on and no usage statistics,
and ends with the last connection of this process. One that was joined, or that the user had initialised, stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from planaria.config.machine import usable_cores
from planaria.env import host_ip
from planaria.errors import CapacityError, ConfigError
from planaria.topology import Cluster, Node

logger = logging.getLogger("planaria.ray")

SLOT = "planaria_slot"  # one unit: a rank without an accelerator
ACCELERATORS = {"cuda": "GPU", "rocm": "GPU", "xpu": "GPU", "npu": "NPU", "hpu": "HPU", "tpu": "TPU"}
OBJECT_STORE = 256 << 20  # bytes, of a cluster started here: nothing large travels through it
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": a node's address is 127.0.0.1, and Ray binds to it

PATIENCE = 2.0  # seconds for a call while ending

_lock = threading.Lock()
_connections = 0  # of this process, to a Ray that was initialised here
_started = False  # its cluster too


def load_ray() -> Any:
    """The package. Raises ConfigError where it isn't installed. Usage statistics are off unless the user said so."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as e:
        raise ConfigError(
            "--distributed-executor-backend", "ray", f"needs the package ray ({e})", "pip install 'planaria[ray]'"
        ) from None
    return ray


class Connection:
    """To `ray`. started: its cluster was started by this process for itself, so nobody will add nodes to it."""

    def __init__(self, ray: Any, *, initialised: bool, started: bool) -> None:
        self.ray, self.started = ray, started
        self._initialised = initialised

    def close(self) -> None:
        """Leave; the last one to leave ends what was started here. Idempotent."""
        global _connections
        if not self._initialised:
            return
        self._initialised = False
        with _lock:
            _connections -= 1
            if _connections == 0:
                with _signals_kept():
                    self.ray.shutdown()  # of what is gone already: nothing

    @property
    def alive(self) -> bool:
        """Is this process still connected? Without, almost any call to Ray starts a cluster."""
        return bool(self.ray.is_initialized())

    @property
    def node(self) -> str:
        """The driver's node."""
        return str(self.ray.get_runtime_context().get_node_id())

    @property
    def address(self) -> str:
        """Of the driver's node."""
        return host_ip() or str(self.ray.util.get_node_ip_address())

    def resource(self, device: str) -> str:
        """What one device is to Ray."""
        if device != "cpu":
            return ACCELERATORS[device]
        return SLOT if self.ray.cluster_resources().get(SLOT, 0) else "CPU"

    def snapshot(self, resource: str, *, free: bool = True) -> Cluster:
        """Living nodes by Ray's ids, with the devices that are free on them now (Ray learns of what is given back with
        a delay), or with all."""
        from ray._private.state import available_resources_per_node

        has = {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}
        if free:
            now = available_resources_per_node()
            has = {id: now.get(id, {}) for id in has}
        return Cluster(tuple(Node.of(id, int(devices.get(resource, 0.0))) for id, devices in has.items()), self.node)


def bounded(what: str, call: Callable[[], object]) -> None:
    """`call()`, which waits for a minute where Ray's head has gone: for PATIENCE seconds at most, errors ignored."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=run, name="planaria-ray-call", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        logger.warning("Ray did not %s within %g s", what, PATIENCE)


def connect(address: str | None, slots: int) -> Connection:
    """address: see `planaria.env.RaySettings`. slots: how many ranks without accelerators a cluster started here takes.

    Raises ConfigError when Ray is missing or `address` can't be reached.
    """
    global _connections, _started
    with _lock:
        ray = load_ray()
        if ray.is_initialized():
            if _connections:
                _connections += 1
            return Connection(ray, initialised=_connections > 0, started=_connections > 0 and _started)
        given = address or os.environ.get("RAY_ADDRESS")
        found = given or _running()
        _started = found is None or found == "local"
        if not _started:
            try:
                _join(ray, found)
            except Exception as e:  # Ray raises what it likes here
                if given:
                    what = f"can't be joined: {_first_line(e)}"
                    raise ConfigError("Ray address", given, what, _join_fix(e)) from None
                logger.warning("the Ray cluster last started here can't be joined: %s; starting one", _first_line(e))
                _started = True
        if _started:
            _start(ray, slots)
        _connections = 1
        return Connection(ray, initialised=True, started=_started)


def _running() -> str | None:
    """The address of the cluster that `ray start` made on this machine, if any."""
    from ray._private.services import canonicalize_bootstrap_address

    found: str | None = canonicalize_bootstrap_address(None)
    return found


def _join(ray: Any, address: str | None) -> None:
    if "RAY_AUTH_MODE" not in os.environ and _token_is_known():
        os.environ["RAY_AUTH_MODE"] = "token"
        _reread_config()
    with _signals_kept():
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)


def _start(ray: Any, slots: int) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    _reread_config()
    os.environ.setdefault("RAY_worker_niceness", "0")  # ranks serve; Ray's default is for batch work
    from ray._private import ray_constants

    with _signals_kept(), loopback(ray_constants):
        try:
            ray.init(
                address="local", num_cpus=usable_cores(), resources={SLOT: max(slots, usable_cores())},
                include_dashboard=False, object_store_memory=OBJECT_STORE, logging_level=logging.WARNING,
                log_to_driver=True,
            )  # fmt: skip
        except Exception as e:
            raise CapacityError(f"Ray can't be started: {_first_line(e)}") from e


@contextlib.contextmanager
def loopback(constants: Any) -> Iterator[None]:
    """Make a cluster that starts meanwhile bind to 127.0.0.1. An address of 127.0.0.1 in `init` doesn't: Ray replaces
    it by the machine's. This switch of its own, for machines whose firewall would ask, does."""
    before, had = constants.ENABLE_RAY_CLUSTER, os.environ.get(_LOOPBACK)
    constants.ENABLE_RAY_CLUSTER, os.environ[_LOOPBACK] = False, "0"
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if had is None:
            del os.environ[_LOOPBACK]
        else:
            os.environ[_LOOPBACK] = had


def _token_is_known() -> bool:
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    return (Path.home() / ".ray" / "auth_token").is_file()


def _reread_config() -> None:
    """Ray's native part read the environment when it was imported, which may have been before."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import Config

        Config.initialize("")


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets a handler for SIGTERM in the main thread; whoever runs us has their own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _join_fix(error: BaseException) -> str:
    if "uthentication" in type(error).__name__ + str(error) or "oken" in str(error):
        return "give its token in $RAY_AUTH_TOKEN, $RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
    return "check that it runs (`ray status --address ...`), or leave the address out to start one"


