"""Groups over torch's gloo: any nodes, any platform. The plain way, where shared memory isn't there.

Rule: nothing listens but on the address given; a wait ends at the deadline, with the peer's connection, or at `abort`.
torch 2.13 has no abort for gloo: `ProcessGroupGloo.abort` and `shutdown` return at once and a wait goes on (measured:
on a stopped peer until the group's time-out). So `abort` hangs up the group's connections; gloo then takes its peers
for dead and ends every operation, within a millisecond. Which connections those are is known from the ports that the
members' groups listen on.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

try:
    import torch
    from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore
except ImportError as e:
    why = 'ranks that share no memory meet by PyTorch\'s gloo, which is not here: pip install "planaria[torch]"'
    raise ImportError(f"{why} ({e})") from e

from planaria.mesh.comm import DEADLINE, Array, CollectiveAborted, broadcast_by_messages
from planaria.mesh.sockets import Address, hang_up, listening

IN_FLIGHT = 64  # messages that `send` leaves on their way
BACKLOG = 1024

_listens = threading.Lock()  # held while a group begins to listen, so that it is known where


def open_store(host: str, port: int = 0, *, deadline: float = DEADLINE) -> tuple[TCPStore, int]:
    """Serve a rendezvous on `host`, an address of this node, and nowhere else. The store, and its port, which is bound
    by now (0: any). Raises OSError when the address isn't this node's, or the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=BACKLOG) as server:
        port = int(server.getsockname()[1])
        store = TCPStore(
            host, port, is_master=True, timeout=timedelta(seconds=deadline), wait_for_workers=False,
            master_listen_fd=server.fileno(),
        )  # fmt: skip
        server.detach()  # it is the store's now
    return store, port


def join_store(host: str, port: int, *, deadline: float = DEADLINE) -> TCPStore:
    """The store that another rank serves. Raises CollectiveAborted when it can't be reached by the deadline."""
    # torch's own deadline isn't for a server that takes a connection and says nothing: it would wait for ever
    silent = threading.Timer(deadline, hang_up, (set(), {(address, port) for address in _numeric(host)}))
    silent.daemon = True
    silent.start()
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline), wait_for_workers=False)
    except RuntimeError as e:
        raise CollectiveAborted((), f"no connection to the groups' store at {host} port {port}: {_line(e)}") from e
    finally:
        silent.cancel()


def leave_store(store: TCPStore) -> None:
    """End all waits of this process on the store, also of groups that are being made: from another thread, when the
    epoch is over. The store is of no more use."""
    hang_up(set(), {(host, store.port) for host in _numeric(store.host)})


class GlooComm:
    """store: the deployment's rendezvous. name: of the group and its epoch, so that no two meet by mistake. host: this
    rank's address, which the others connect to. deadline: seconds to wait for a rank. Returns when all are there."""

    device = "cpu"

    def __init__(
        self, store: Store, name: str, rank: int, members: Sequence[int], *, host: str = "127.0.0.1",
        deadline: float = DEADLINE, in_flight: int = IN_FLIGHT,
    ) -> None:  # fmt: skip
        self.in_flight = in_flight
        self.rank, self.size, self.members = rank, len(members), tuple(members)
        self.deadline = deadline
        self.port = 0
        self._sent: dict[Any, deque[tuple[Any, torch.Tensor, int]]] = defaultdict(deque)  # by what carries them
        self._columns: dict[int, list[range]] = {}  # of all ranks, by the width of the whole
        self._reason = ""
        self._own: set[Address] = set()
        self._theirs: set[Address] = set()
        self._group: Any = None
        self._group = self.attempt(lambda: self._meet(PrefixStore(name, store), host))

    def _meet(self, store: Store, host: str) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
        options._timeout = timedelta(seconds=self.deadline)
        with _listens:
            before = listening()
            options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
            self._own = {address for address in listening() - before if address[0] in _numeric(host)}
        group = ProcessGroupGloo(store, self.rank, self.size, options)
        store.set(f"listens/{self.rank}", " ".join(f"{host} {port}" for host, port in self._own))
        for rank in range(self.size):
            if rank != self.rank:
                words = store.get(f"listens/{rank}").decode().split()
                self._theirs.update(zip(words[::2], map(int, words[1::2]), strict=True))
        return group

    def attempt(self, run: Callable[[], Any], peer: int | None = None) -> Any:
        """`run()`; its failure names `peer`, or the others: torch does not say which of several it was."""
        self.check()
        try:
            return run()
        except RuntimeError as e:
            if self._reason:
                raise CollectiveAborted((), self._reason) from e
            others = [i for i in range(self.size) if i != self.rank] if peer is None else [peer]
            names = [self.members[i] for i in others]
            who = f"rank {names[0]}" if len(names) == 1 else f"one of the ranks {', '.join(map(str, names))}"
            late = "imed out" in str(e) or "imeout" in str(e)
            what = f"did not come within {self.deadline:g} s" if late else "is gone: its connection closed"
            raise CollectiveAborted(tuple(names) if len(names) == 1 else (), f"{who} {what}") from e

    @property
    def process_group(self) -> ProcessGroup:
        """torch.distributed's, of these ranks, for libraries that ask for one."""
        return self._process_group(HashStore())

    def _process_group(self, store: Store) -> ProcessGroup:
        made = ProcessGroup(store, self.rank, self.size)
        for device, kind, backend in self._backends():
            made._register_backend(torch.device(device), kind, backend)
            made._set_default_backend(kind)  # the last one
        return made

    def _backends(self) -> list[tuple[str, Any, Any]]:
        return [("cpu", ProcessGroup.BackendType.GLOO, self._group)]

    def check(self) -> None:
        """Raise CollectiveAborted if it was aborted: what a device did for it since is worth nothing."""
        if self._reason:
            raise CollectiveAborted((), self._reason)

    def _carrier(self, x: torch.Tensor) -> Any:
        """The process group that takes x."""
        return self._group

    def all_reduce(self, x: Array) -> None:
        tensor = torch.as_tensor(x)  # the same memory
        self.attempt(lambda: self._carrier(tensor).allreduce([tensor]).wait())

    def gather_columns(self, x: Array, columns: range, size: int) -> Array:
        tensor = torch.as_tensor(x)
        out = tensor.new_empty(len(tensor), size)
        if size not in self._columns:
            self._columns[size] = self._all_columns(columns)
        if self.rank:
            self.send(tensor, 0)
        else:
            for rank, part in enumerate(self._columns[size]):
                found = tensor
                if rank:
                    found = tensor.new_empty(len(tensor), len(part))
                    self.receive(found, rank)
                out[:, part.start : part.stop] = found
        return out if tensor is x else out.numpy()

    def _all_columns(self, own: range) -> list[range]:
        """Each rank's; once for a matrix, since they don't change."""
        bounds = np.zeros((self.size, 2), np.float32)
        bounds[self.rank] = own.start, own.stop
        self.all_reduce(bounds)
        return [range(*each) for each in bounds.astype(int).tolist()]

    def send(self, x: Array, to: int) -> None:
        """Waits only where `in_flight` messages are on their way. Each stays referenced until it has gone."""
        data = as_bytes(x)
        if len(data) == 0:
            return
        copy, carrier = data.clone(), self._carrier(data)
        sent = self._sent[carrier]
        sent.append((self.attempt(lambda: carrier.send([copy], to, 0), to), copy, to))
        while len(sent) > self.in_flight:
            work, _, whose = sent.popleft()
            self.attempt(work.wait, whose)

    def receive(self, x: Array, source: int) -> None:
        # in one piece: a wait that gives up by itself closes the connection
        into = as_bytes(x)
        if len(into):
            self.attempt(lambda: self._carrier(into).recv([into], source, 0).wait(), source)

    def broadcast(self, x: Array, source: int = 0) -> None:
        broadcast_by_messages(self, x, source)

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason
        hang_up(self._own, self._theirs)

    def close(self) -> None:
        """What was sent and nobody has received is dropped. Idempotent."""
        self.abort("the group is closed")  # otherwise the group's end waits for what is under way
        self._sent.clear()
        self._group = None


def as_bytes(x: Array) -> torch.Tensor:
    """The same memory: groups carry some kinds of numbers only."""
    tensor = torch.as_tensor(x)
    if not tensor.is_contiguous():
        raise ValueError("an array sent over a mesh must be contiguous")
    # axes of one number, or none, have any stride in NumPy
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _numeric(host: str) -> set[str]:
    return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
