"""A connection to a Ray cluster: use the one this process is in, join one that runs, or start one. And what it has.

Rule: a cluster started here listens on this machine only, with Ray's token authentication on and no usage statistics,
and ends with the last connection of this process. One that was joined, or that the user had initialised, stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from planaria.config.machine import usable_cores
from planaria.env import home, host_ip
from planaria.errors import CapacityError, ConfigError
from planaria.topology import Cluster, Node
from planaria.topology.platforms import PLATFORMS
from planaria.topology.table import short

logger = logging.getLogger("planaria.ray")

SLOT = "planaria_slot"  # one unit: a rank without an accelerator
UPLOADED = ("working_dir", "py_modules")  # fields of a runtime environment that may be folders of this machine
OBJECT_STORE = 256 << 20  # bytes, of a cluster started here: nothing large travels through it
HINT = "see `ray status` and `ray list nodes`; a node that should be there may need its address set: $PLANARIA_HOST_IP"
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": a node's address is 127.0.0.1, and Ray binds to it

CONNECT = 5.0  # seconds for a cluster to take a connection
PATIENCE = 2.0  # seconds for a call while ending
SHUTDOWN = 10.0  # seconds to leave Ray; where its head has gone it takes longer, and nobody waits
ANSWER = 15.0  # seconds for Ray's head to answer what it knows, before it counts as gone
KNOCK = 2.0  # seconds for a raylet to take a connection
DISTRUST = 30.0  # seconds in which nothing is started on a node that did not answer
# Ray ends a driver whose head has been silent for a minute. An engine goes on without Ray, and decides for itself.
_HEAD_SILENT = "RAY_gcs_rpc_server_reconnect_timeout_s"

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


def check_folders(runtime_env: Mapping[str, Any], inherited: Mapping[str, Any] | None = None) -> None:
    """Folders of this machine in a runtime environment are uploaded once, with the job: they must be there, and can't
    come later. inherited: what the job has, once it has begun; None: it begins with them. Raises ConfigError."""
    for field in UPLOADED:
        given = runtime_env.get(field) or ()
        for path in [given] if isinstance(given, str) else given:
            option, value = "--ray-runtime-env", f"{field} {path}"
            if not isinstance(path, str) or "://" in path:
                continue  # a module, which is for Ray to find; or what is elsewhere
            if inherited is not None and field not in inherited:
                rule = "is uploaded when Ray is initialised, which this process was before"
                raise ConfigError(option, value, rule, f"give it to ray.init(runtime_env=...), or {field} as a URI")
            if inherited is None and not os.path.exists(path):
                raise ConfigError(option, value, "is not there", "give a folder or file of this machine, or a URI")


class Distrusted:
    """Nodes that did not answer, or not in time: nothing is started there for a while. Any thread."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, nodes: Iterable[str]) -> None:
        self._until |= dict.fromkeys(nodes, time.monotonic() + DISTRUST)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, str) and time.monotonic() < self._until.get(node, 0.0)


class Connection:
    """To `ray`. started: its cluster was started by this process for itself, so nobody will add nodes to it."""

    def __init__(self, ray: Any, *, initialised: bool, started: bool) -> None:
        self.ray, self.started, self.distrusted = ray, started, Distrusted()
        self._cores_said: dict[str, int] = {}  # engines, by nodes with cores for fewer than devices
        self._head = str(ray.get_runtime_context().gcs_address)
        self._asking = threading.Lock()  # held by a question that has no answer yet
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
                limit = SHUTDOWN if self.answers() else PATIENCE
                with _signals_kept():
                    bounded("let this process go", self.ray.shutdown, limit)  # of what is gone already: nothing

    def answers(self) -> bool:
        """Can anything be asked of this cluster now: do the head and the driver's raylet take connections, and does the
        head answer? Found out in seconds."""
        try:
            return self.alive and self.raylet_answers(self.node)
        except Exception:  # whatever Ray raises when it is going
            return False

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Ray's rows of living nodes, by id. Raises TimeoutError when the head does not answer."""
        return {node["NodeID"]: node for node in self._ask(self.ray.nodes) if node["Alive"]}

    def _ask(self, question: Callable[[], Any]) -> Any:
        """One at a time: where the head is gone each would wait for ever, in a thread of its own."""
        if not _answers(self._head, KNOCK):
            raise TimeoutError(f"nobody listens at {self._head}, where Ray's head was")
        if not self._asking.acquire(timeout=ANSWER):
            raise TimeoutError("Ray's head has not answered what it was asked before")

        def ask() -> Any:
            try:
                return question()
            except Exception as e:  # whatever Ray raises where its head goes away meanwhile
                raise TimeoutError(f"Ray's head did not answer: {_first_line(e)}") from e
            finally:
                self._asking.release()

        return within(ask, ANSWER)

    def raylet_answers(self, node: str) -> bool:
        """Does this node's raylet take a connection? One that was killed does not, long before Ray knows."""
        row = self.nodes().get(node)
        return row is not None and _answers(f"{row['NodeManagerAddress']}:{row['NodeManagerPort']}", KNOCK)

    def deaf(self, nodes: Iterable[str]) -> list[str]:
        """Those of these nodes that Ray has given up, or whose raylet takes no connection. They are distrusted."""
        found = [node for node in nodes if not self.raylet_answers(node)]
        self.distrusted.add(found)
        return found

    @property
    def alive(self) -> bool:
        """Is this process still connected? Without, almost any call to Ray starts a cluster."""
        return bool(self.ray.is_initialized())

    def inherited(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """What of a user's runtime environment actors must be given: what they don't have from the job anyway. Raises
        ConfigError: a folder, and the job began without."""
        given, has = dict(given or {}), dict(self.ray.get_runtime_context().runtime_env)
        check_folders(given, has)
        return {name: value for name, value in given.items() if name not in UPLOADED or name not in has}

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
        platform = PLATFORMS[device]
        return SLOT if platform.on_host and self.ray.cluster_resources().get(SLOT, 0) else platform.resource

    def source(self, resource: str, groups: Sequence[str] = ()) -> str:
        """What ranks are placed on, for people. groups: the user's."""
        if groups:
            return f"Ray at {self.address}, bundles of {', '.join(groups)}"
        return f"Ray at {self.address}, free devices ({resource})"

    def snapshot(self, resource: str, *, free: bool = True, ranks: int = 0) -> Cluster:
        """Living nodes by Ray's ids, with the devices that are free on them now (Ray learns of what is given back with
        a delay), or with all. ranks: of each of the engines that these are for; there are then no more on a node than
        engines with a core for each have there. Raises TimeoutError."""
        from ray._private.state import available_resources_per_node

        rows = self.nodes()
        has = {id: row["Resources"] for id, row in rows.items()}
        if free:
            now = self._ask(available_resources_per_node)
            has = {id: now.get(id, {}) for id in has}
        devices = {id: int(there.get(resource, 0.0)) for id, there in has.items()}
        if ranks:
            engines = {id: int(there.get("CPU", 0.0) / self.seat_cores(resource)) for id, there in has.items()}
            for id in [id for id, count in devices.items() if engines[id] * ranks < count]:
                if self._cores_said.get(id) != engines[id]:
                    logger.info("%s: %d x %s free, cores for %d engines", short(id), devices[id], resource, engines[id])
                self._cores_said[id], devices[id] = engines[id], engines[id] * ranks
        nodes = [Node.of(id, count, rows[id]["NodeManagerAddress"]) for id, count in devices.items()]
        return Cluster(tuple(nodes), self.node)

    def seat_cores(self, resource: str) -> float:
        """What an engine that Ray starts has for itself: a core; a bit of one where cores are the devices, or few."""
        return 0.01 if self.started or resource == "CPU" else 1.0


def within(call: Callable[[], Any], limit: float) -> Any:
    """`call()`, which waits for a minute or for ever where Ray's head has gone. Raises what it raises; TimeoutError
    after `limit` seconds, and then it is left behind."""
    box: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            box.put((call(), None))
        except BaseException as e:
            box.put((None, e))

    threading.Thread(target=run, name="planaria-ray-call", daemon=True).start()
    try:
        found, error = box.get(timeout=limit)
    except queue.Empty:
        raise TimeoutError(f"Ray did not answer within {limit:g} s") from None
    if error is not None:
        raise error
    return found


def bounded(what: str, call: Callable[[], object], limit: float = PATIENCE) -> None:
    """`call()` for so many seconds at most, errors ignored."""
    try:
        within(call, limit)
    except TimeoutError:
        logger.warning("Ray did not %s within %g s", what, limit)
    except Exception:
        logger.debug("Ray did not %s", what, exc_info=True)


def connect(address: str | None, slots: int, runtime_env: Mapping[str, Any] | None = None) -> Connection:
    """address: see `planaria.env.RaySettings`. slots: how many ranks without accelerators a cluster started here takes.
    runtime_env: the user's, of the job, if this process is not a part of one yet.

    Raises ConfigError when Ray is missing, `address` can't be reached, or the environment can't be had.
    """
    connection = _connect(address, slots, runtime_env, start=True)
    assert connection is not None
    return connection


def join(address: str | None) -> Connection | None:
    """As `connect`, to a cluster that runs; None where there is none, and `connect` would start one."""
    return _connect(address, 0, None, start=False)


def _connect(
    address: str | None, slots: int, runtime_env: Mapping[str, Any] | None, *, start: bool
) -> Connection | None:
    global _connections, _started
    check_folders(runtime_env or {})
    with _lock:
        ray = load_ray()
        if ray.is_initialized():
            if _connections:
                _connections += 1
            return Connection(ray, initialised=_connections > 0, started=_connections > 0 and _started)
        given = address or os.environ.get("RAY_ADDRESS") or "auto"
        found = _running() if given == "auto" else given
        if not start and found in (None, "local"):
            return None
        _started = found is None or found == "local"
        if found is not None and not _started:
            try:
                _join(ray, found, runtime_env)
            except Exception as e:  # Ray raises what it likes here
                if given != "auto":
                    what = f"can't be joined: {_first_line(e)}"
                    raise ConfigError("Ray address", given, what, _join_fix(e)) from None
                if not start:
                    logger.warning("the Ray cluster last started here can't be joined: %s", _first_line(e))
                    return None
                logger.warning("the Ray cluster last started here can't be joined: %s; starting one", _first_line(e))
                _started = True
        if _started:
            _start(ray, slots, runtime_env)
        _connections = 1
        return Connection(ray, initialised=True, started=_started)


def _running() -> str | None:
    """The address of the cluster that `ray start` made on this machine, if any."""
    from ray._private.services import canonicalize_bootstrap_address

    found: str | None = canonicalize_bootstrap_address(None)
    return found


def _join(ray: Any, address: str, runtime_env: Mapping[str, Any] | None) -> None:
    """Raises what Ray does, or ConnectionError at once where nobody listens (Ray would try for minutes)."""
    if "://" in address:
        raise ConnectionError("an engine runs on a node of the cluster, not through Ray Client")
    from ray._private import ray_constants
    from ray._private.services import canonicalize_bootstrap_address

    outside = canonicalize_bootstrap_address(address)  # of loopback addresses, the machine's
    private = not _answers(outside) and outside != address and _answers(address)
    if not private and not _answers(outside):
        raise ConnectionError(f"nobody listens at {outside}")
    if "RAY_AUTH_MODE" not in os.environ and _token_is_known():
        os.environ["RAY_AUTH_MODE"] = "token"
        _reread_config()
    with _signals_kept(), _outlives_head(), loopback(ray_constants) if private else contextlib.nullcontext():
        ray.init(
            address=address, runtime_env=dict(runtime_env or {}), logging_level=logging.WARNING, log_to_driver=True
        )


def _answers(address: str, limit: float = CONNECT) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), limit).close()
    except (OSError, ValueError):
        return False
    return True


def _start(ray: Any, slots: int, runtime_env: Mapping[str, Any] | None) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    _reread_config()
    os.environ.setdefault("RAY_worker_niceness", "0")  # ranks serve; Ray's default is for batch work
    from ray._private import ray_constants

    with _signals_kept(), _outlives_head(), loopback(ray_constants):
        try:
            ray.init(
                address="local", num_cpus=usable_cores(), resources={SLOT: max(slots, usable_cores())},
                include_dashboard=False, object_store_memory=OBJECT_STORE, logging_level=logging.WARNING,
                log_to_driver=True, runtime_env=dict(runtime_env or {}),
            )  # fmt: skip
        except Exception as e:
            raise CapacityError(f"Ray can't be started: {_first_line(e)}") from e


@contextlib.contextmanager
def _outlives_head() -> Iterator[None]:
    """Of a cluster that was joined this process only: its own keep Ray's limit."""
    if _HEAD_SILENT in os.environ:
        yield
        return
    os.environ[_HEAD_SILENT] = str(10**6)
    _reread_config()
    try:
        yield
    finally:
        del os.environ[_HEAD_SILENT]


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
    return (home() / ".ray" / "auth_token").is_file()


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
