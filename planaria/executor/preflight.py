"""What must hold before ranks load: this node has what they need, and every rank reaches every other.

`look` asks the system, `check_node` judges (pure): on each node, by the driver and by ranks elsewhere. Between nodes
each rank opens a `Door` with its Hello and calls `reach` before it makes its groups; a door stays open until all ranks
have looked. Rule: each problem is one line that names what was found, what is needed and the way out.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from planaria.config.secret import is_loopback
from planaria.executor.link import futex
from planaria.protocol import Hello

Endpoint = tuple[str, int]  # host, port

FILES_OF_A_PROCESS = 64  # descriptors for what every process has open: libraries, logs, model files
FILES_PER_RANK = 8  # in the engine and in every rank: pipes, memory files, connections
BACKLOG = 1024


@dataclass(frozen=True)
class Needs:
    """What a start asks of one node. shared_bytes: the largest memory file; none where 0. endpoints: what is listened
    on there (port 0: any)."""

    num_ranks: int = 1
    shared_bytes: int = 0
    endpoints: tuple[Endpoint, ...] = ()


@dataclass(frozen=True)
class NodeFacts:
    """What a node has. `futex`, `memory_file`: empty, or why there are none. files_left: descriptors that this process
    may still open. taken: endpoints that can't be bound, and why."""

    node: str
    files_left: int
    futex: str = ""
    memory_file: str = ""
    taken: Mapping[Endpoint, str] = field(default_factory=dict)


def look(node: str, needs: Needs) -> NodeFacts:
    """The facts about this node that matter for `needs`. Ports are bound and let go again."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    left = 1 << 30 if limit == resource.RLIM_INFINITY else limit - used
    shared = needs.shared_bytes > 0
    return NodeFacts(
        node,
        left,
        futex.available() if shared else "",
        _memory_file(needs.shared_bytes) if shared else "",
        {endpoint: why for endpoint in needs.endpoints if (why := _bind(endpoint))},
    )


def check_node(facts: NodeFacts, needs: Needs) -> list[str]:
    """Problems, worst first; none means ranks may start."""
    found = [
        f"{facts.node}: can't listen on {host} port {port}: {why}; "
        + ("give an address of this node" if why == _NOT_HERE else "choose another port")
        for (host, port), why in facts.taken.items()
    ]
    if facts.futex:
        found.append(f"{facts.node}: {facts.futex}, which ranks need to share memory; use --disable-custom-all-reduce")
    if facts.memory_file:
        found.append(
            f"{facts.node}: no memory file of {needs.shared_bytes / 2**20:.0f} MiB can be made: {facts.memory_file}; "
            "raise the limit on memory, or use --disable-custom-all-reduce"
        )
    files = FILES_OF_A_PROCESS + FILES_PER_RANK * needs.num_ranks
    if facts.files_left < files:
        ranks = "1 rank needs" if needs.num_ranks == 1 else f"{needs.num_ranks} ranks need"
        found.append(
            f"{facts.node}: {ranks} {files} file descriptors, {facts.files_left} are left; raise the limit (ulimit -n)"
        )
    return found


class Door:
    """A port on `host`, an address of this node, that others can connect to and that says nothing. Raises OSError."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def doors_of_others(own: Hello, members: Iterable[Hello]) -> dict[int, Endpoint]:
    """Of ranks on other nodes: those that `own` has to reach through the network."""
    return {member.rank: (member.address, member.door) for member in members if member.door and member.home != own.home}


def reach(doors: Mapping[int, Endpoint], deadline: float) -> dict[int, str]:
    """Connect to all at once, within `deadline` seconds. Why not, by rank; empty if all could be reached."""
    failed: dict[int, str] = {}
    until = time.monotonic() + deadline
    with selectors.DefaultSelector() as waiting, ExitStack() as opened:
        for rank, (host, port) in doors.items():
            try:
                family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                connection = opened.enter_context(socket.socket(family, kind, proto))
                connection.setblocking(False)
                code = connection.connect_ex(address)
            except OSError as e:
                failed[rank] = e.strerror or str(e)
                continue
            if code == errno.EINPROGRESS:
                waiting.register(connection, selectors.EVENT_WRITE, rank)
            elif code:
                failed[rank] = os.strerror(code)
        while waiting.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if code := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[key.data] = os.strerror(code)
        for key in waiting.get_map().values():
            failed[key.data] = f"no answer in {deadline:g} s"
    return dict(sorted(failed.items()))


def unreachable(own: Hello, members: Sequence[Hello], failed: Mapping[int, str]) -> str:
    """One line about what `reach` found; empty if nothing. members: in rank order."""
    if not failed:
        return ""
    rank, why = next(iter(failed.items()))
    other = members[rank]
    more = f" (nor {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    if is_loopback(other.address):
        fix = "no other node reaches a loopback address: set $PLANARIA_HOST_IP there to the one that others know it by"
    else:
        fix = "let nodes reach one another at every port, or set $PLANARIA_HOST_IP there to an address that they reach"
    return (
        f"rank {own.rank} on {own.node} ({own.address}) can't reach rank {rank} on {other.node} at "
        f"{other.address} port {other.door}{more}: {why}; {fix}"
    )


_NOT_HERE = "not an address of this node"


def _bind(endpoint: Endpoint) -> str:
    """Empty, or why not."""
    host, port = endpoint
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an old connection's rest is no obstacle
            probe.bind(address)
            probe.listen()
    except OSError as e:
        return _NOT_HERE if e.errno == errno.EADDRNOTAVAIL else e.strerror or str(e)
    return ""


def _memory_file(size: int) -> str:
    """Empty, or why no memory file of `size` bytes can be made and mapped. No memory is touched."""
    try:
        fd = os.memfd_create("planaria-preflight", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as e:
        return getattr(e, "strerror", None) or "this system has none"
    try:
        os.ftruncate(fd, size)
        mmap.mmap(fd, size).close()
    except (OSError, ValueError) as e:
        return getattr(e, "strerror", None) or str(e)
    finally:
        os.close(fd)
    return ""
