"""Groups of ranks: the same operations over shared memory and gloo. Ranks are threads here, for waits hold no lock;
processes where one has to stop."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, Store

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.build import load, target_for
from planaria.kernels.cpu.fields import ROW_WORDS, MeetOp, SendOp
from planaria.kernels.cpu.memory import Region
from planaria.kernels.cpu.shared import RING, SLOT, SharedComm
from planaria.kernels.cpu.team import Team
from planaria.kernels.ops import Batch
from planaria.kernels.reference import StepTensors
from planaria.mesh.boot import Opening, axes, create_segments, open_mesh
from planaria.mesh.comm import Array, CollectiveAborted, Comm, Solo
from planaria.mesh.gloo import GlooComm, join_store, leave_store, open_store
from planaria.mesh.mesh import Mesh
from planaria.mesh.nccl import NcclComm
from planaria.mesh.segment import create_segment, fence_segment
from planaria.mesh.staged import StagedComm
from planaria.node import process_state
from planaria.protocol import Hello
from planaria.topology import Layout
from planaria.worker.torch_stage import TorchStage
from tests.proc.servers import wait_until

SOON = 15.0  # seconds: sooner than any deadline here

Together = Callable[[Callable[[Comm], Any]], list[Any]]


class Pretend(NcclComm):
    """The group over NCCL where there is none: gloo in its place, main memory for a device's."""

    device = "cpu:0"

    def _open(self, store: Store, deadline: float) -> Any:
        return ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=deadline))


class Group:
    """`size` ranks of one kind, each in a thread of its own. World ranks are 10, 11, ..."""

    def __init__(self, kind: str, size: int, deadline: float = 20.0) -> None:
        self.kind, self.size = kind, size
        self.fd = create_segment()
        self.pool = ThreadPoolExecutor(size)
        members = tuple(range(10, 10 + size))
        store = HashStore()
        entry = load(target_for("float32"))

        def make(rank: int) -> Comm:
            if kind not in ("shared", "staged"):
                made = {"gloo": GlooComm, "nccl": Pretend}[kind]
                return made(store, "group", rank, members, deadline=deadline)
            found = SharedComm(self.fd, rank, members, entry, deadline=deadline, crowded=True)
            return StagedComm(found) if kind == "staged" else found

        self.comms: list[Comm] = list(self.pool.map(make, range(size)))

    def run(self, work: Callable[[Comm], Any]) -> list[Any]:
        """`work(comm)` on all ranks at once; results by rank."""
        return list(self.pool.map(work, self.comms))

    def close(self) -> None:
        for comm in self.comms:
            comm.close()
        self.pool.shutdown()
        os.close(self.fd)


KINDS = [("shared", 2), ("shared", 3), ("staged", 2), ("gloo", 2), ("gloo", 3), ("nccl", 2), ("nccl", 3)]


@pytest.fixture(params=KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(*request.param)
    yield made
    made.close()


def values(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator) * 10.0 ** (3 * rank)


def of(comm: Comm, x: torch.Tensor) -> Array:
    """What a rank has of a group's kind: tensors only on a device."""
    return x if isinstance(comm, NcclComm | StagedComm) else x.numpy()


@pytest.mark.parametrize("count", [1, 16, 576, 4100, 3 * SLOT // 4 + 5])
def test_all_ranks_get_the_same_sum(group: Group, count: int) -> None:
    def work(comm: Comm) -> list[torch.Tensor]:
        out = []
        for _ in range(3):  # one exchange after the other: slots alternate
            x = values(comm.rank, (count,))
            comm.all_reduce(of(comm, x))
            out.append(x)
        return out

    found = group.run(work)
    expected = values(0, (count,))
    for rank in range(1, group.size):
        expected = expected + values(rank, (count,))
    for results in found:
        for x in results:
            assert torch.equal(x, found[0][0])
            assert torch.equal(x, expected) if group.kind == "shared" else torch.allclose(x, expected)


def test_columns_come_together_on_rank_0(group: Group) -> None:
    bounds = [*[0, 48, 64, 99][: group.size], 99]

    def work(comm: Comm) -> list[torch.Tensor]:
        columns, out = range(bounds[comm.rank], bounds[comm.rank + 1]), []
        for rows in (0, 2, 7, 0, 1):
            whole = values(rows, (rows, 99))
            part = whole[:, columns.start : columns.stop].contiguous()
            got = comm.gather_columns(of(comm, part), columns, 99)
            assert type(got) is type(of(comm, part))
            if comm.rank == 0:
                out.append(torch.equal(torch.as_tensor(got), whole))
        return out

    assert group.run(work)[0] == [True] * 5


def test_broadcast(group: Group) -> None:
    def work(comm: Comm) -> list[int]:
        out = []
        for source in range(group.size):
            x = np.array([comm.rank * 7 + source], np.int32)[:, None]  # its last axis has no stride
            comm.broadcast(of(comm, torch.from_numpy(x)), source)
            out.append(int(x[0, 0]))
        return out

    assert group.run(work) == [[source * 8 for source in range(group.size)]] * group.size


def test_messages_come_in_order_and_senders_run_ahead(group: Group) -> None:
    sizes = [1, 5, SLOT // 4, SLOT // 4 + 3, 2, 0, 77]
    sent = threading.Event()

    def work(comm: Comm) -> bool:
        if comm.rank == 0:
            for i, size in enumerate(sizes):
                comm.send(of(comm, torch.full((size,), float(i))), group.size - 1)
            sent.set()
        elif comm.rank == group.size - 1:
            assert sent.wait(20), "send waits for the receiver"
            for i, size in enumerate(sizes):
                x = torch.zeros(size)
                comm.receive(of(comm, x), 0)
                assert bool((x == i).all())
        return True

    assert all(group.run(work))


def test_a_message_larger_than_the_ring() -> None:
    group = Group("shared", 2)
    count = (RING + 5) * SLOT // 4 + 9

    def work(comm: Comm) -> bool:
        x = np.arange(count, dtype=np.int32) if comm.rank else np.zeros(count, np.int32)
        if comm.rank:
            comm.send(x, 0)
        else:
            comm.receive(x, 1)
        return bool((x == np.arange(count)).all())

    assert group.run(work) == [True, True]
    group.close()


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_rank_that_does_not_come_is_named(kind: str) -> None:
    group = Group(kind, 2, deadline=1.0)
    since = time.monotonic()
    with pytest.raises(CollectiveAborted, match=r"rank 11 .*did not come within 1 s") as lost:
        group.comms[0].all_reduce(np.zeros(32, np.float32))
    assert lost.value.ranks == (11,) and 0.9 < time.monotonic() - since < SOON
    group.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_is_computed_behind_an_exchange_that_was_given_up(threads: int) -> None:
    """Else a survivor would finish a step that counts for nothing before it hears of the next epoch."""
    lost, well = Group("shared", 2), Group("shared", 2)
    sent = np.ones(16, np.float32)
    rows, memory = np.zeros((2, ROW_WORDS), np.int64), Region(2 * layout.TICKET_BYTES, huge=False)
    team = Team(load(target_for("float32")), threads)
    ports = [group.comms[0].port for group in (lost, well)]  # type: ignore[attr-defined]
    at = {"peer": 1, "address": int(sent.ctypes.data), "size": sent.nbytes}
    for row, op, port, more in zip(rows, (MeetOp, SendOp), ports, ({}, at), strict=True):
        row[0] = op.code
        for name, value in {"port": port, **more}.items():
            row[op.words()[name]] = value

    def run(first: int, count: int) -> None:
        tape = int(rows[first:].ctypes.data)
        team.run({layout.TAPE: tape, layout.OPS: count, layout.TICKETS: memory.address}, (rows, sent))

    try:
        lost.comms[0].abort("another epoch has begun")
        run(0, 2)
        sent[:] = 2
        run(1, 1)  # the next run is as good as any
        found = np.zeros(16, np.float32)
        well.comms[1].receive(found, 0)
        assert found.tolist() == [2.0] * 16
    finally:
        team.close()
        lost.close()
        well.close()


def test_all_waiting_ranks_name_the_same_one() -> None:
    group = Group("shared", 3, deadline=1.0)

    def work(comm: Comm) -> str:
        if comm.rank == 1:
            return ""
        try:
            comm.all_reduce(np.zeros(32, np.float32))
        except CollectiveAborted as e:
            return str(e)
        return "no error"

    found = group.run(work)
    assert "rank 11 " in found[0] and "rank 11 " in found[2]
    with pytest.raises(CollectiveAborted):  # and nothing works from then on
        group.comms[0].send(np.zeros(1), 1)
    group.close()


WAITS: dict[str, Callable[[Comm], Any]] = {
    "sum": lambda comm: comm.all_reduce(np.zeros(32, np.float32)),
    "receive": lambda comm: comm.receive(np.zeros(32), 1),
    "send": lambda comm: [comm.send(np.zeros(SLOT, np.float32), 1) for _ in range(100)],  # more than may be on its way
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(("kind", "by"), [("shared", "abort"), ("shared", "fence"), ("gloo", "abort")])
def test_a_wait_ends_when_it_is_told_to(kind: str, by: str, wait: str) -> None:
    group = Group(kind, 2)
    waiting = group.pool.submit(WAITS[wait], group.comms[0])
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    since = time.monotonic()
    if by == "abort":
        group.comms[0].abort("told to end")
    else:
        fence_segment(group.fd)
    with pytest.raises(CollectiveAborted, match="told to end" if by == "abort" else "fenced"):
        waiting.result(60)
    assert time.monotonic() - since < SOON
    with pytest.raises(CollectiveAborted):
        group.comms[0].all_reduce(np.zeros(32, np.float32))
    group.close()


STOPPED = """
import os, signal, sys
from planaria.mesh.gloo import GlooComm, join_store
store = join_store("127.0.0.1", int(sys.argv[1]))
comms = [GlooComm(store, name, 1, (10, 11)) for name in sys.argv[2:]]
print("there", flush=True)
os.kill(os.getpid(), signal.{signal})
"""


@pytest.fixture(scope="module")
def stopped() -> Iterator[dict[str, GlooComm]]:
    """For each kind of wait a group with the same process, which is stopped."""
    store, port = open_store("127.0.0.1")
    command = [sys.executable, "-c", STOPPED.format(signal="SIGSTOP"), str(port), *WAITS]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        comms = {name: GlooComm(store, name, 0, (10, 11)) for name in WAITS}
        wait_until("it is stopped", lambda: process_state(peer.pid) == "T")
        yield comms
        for comm in comms.values():
            comm.close()
    finally:
        peer.kill()
        peer.wait(60)


@pytest.mark.parametrize("wait", WAITS)
def test_gloo_ends_a_wait_for_a_stopped_process(wait: str, stopped: dict[str, GlooComm]) -> None:
    """Nothing of a stopped process answers, and its connections stay."""
    comm = stopped[wait]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(WAITS[wait], comm)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        since = time.monotonic()
        comm.abort("rank 11 is stopped")
        with pytest.raises(CollectiveAborted, match="rank 11 is stopped"):
            waiting.result(60)
        comm.close()
        assert time.monotonic() - since < SOON


def test_gloo_names_a_killed_process() -> None:
    store, port = open_store("127.0.0.1")
    command = [sys.executable, "-c", STOPPED.format(signal="SIGKILL"), str(port), "group"]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE)
    comm = GlooComm(store, "group", 0, (10, 11))
    peer.wait(60)
    since = time.monotonic()
    with pytest.raises(CollectiveAborted, match="rank 11 is gone") as lost:
        comm.receive(np.zeros(32), 1)
    assert lost.value.ranks == (11,) and time.monotonic() - since < SOON
    comm.close()


def test_a_store_that_says_nothing_is_given_up_at_the_deadline() -> None:
    """Such as a stopped rank's: the kernel takes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        since = time.monotonic()
        with pytest.raises(CollectiveAborted, match="no connection to the groups' store"):
            join_store("127.0.0.1", silent.getsockname()[1], deadline=1.0)
        assert 0.9 < time.monotonic() - since < SOON


def test_a_group_that_is_being_made_ends_with_its_store() -> None:
    store, _ = open_store("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(GlooComm, store, "group", 0, (10, 11))
        with pytest.raises(TimeoutError):
            making.result(0.2)
        since = time.monotonic()
        leave_store(store)
        with pytest.raises(CollectiveAborted):
            making.result(60)
        assert time.monotonic() - since < SOON


@pytest.mark.parametrize("fast", [True, False], ids=["shared", "gloo"])
def test_meeting_ends_when_it_is_told_to(fast: bool) -> None:
    """The other rank never comes."""
    segments = create_segments(0, Layout(tp=2))
    store, port = open_store("127.0.0.1")
    first = msgspec.structs.replace(hello(0), segments=segments, store=("127.0.0.1", port))
    opening = Opening()

    def meet() -> Mesh:
        make = partial(SharedComm, entry=load(target_for("float32")))
        return open_mesh(0, Layout(tp=2), 0, [first, hello(1)], fast=fast, shared=lambda: make, opening=opening)

    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet)
        with pytest.raises(TimeoutError):
            meeting.result(0.5)
        opening.abort("told to end")
        with pytest.raises(CollectiveAborted, match="told to end"):
            meeting.result(60)
        with pytest.raises(CollectiveAborted, match="told to end"):  # and from now on at once
            meet()
    for fd, _ in segments.values():
        os.close(fd)
    del store


def test_a_message_that_was_not_received_names_who_did_not() -> None:
    """It is noticed when a later one, to another rank, has to wait for it."""

    class Lost:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    group = Group("gloo", 3)
    sender: Any = group.comms[0]
    sender.in_flight = 1
    sender._sent[sender._group].append((Lost(), torch.zeros(1), 1))
    with pytest.raises(CollectiveAborted, match="rank 11 is gone") as lost:
        sender.send(np.zeros(1), 2)
    assert lost.value.ranks == (11,)
    group.close()


def test_groups_that_were_made_before_one_failed_are_closed() -> None:
    """The other rank comes to the first group and never to the second."""
    segments = create_segments(0, Layout(tp=2), experts=True)
    first, entry, opening = msgspec.structs.replace(hello(0), segments=segments), load(target_for("float32")), Opening()

    def meet() -> Mesh:
        return open_mesh(
            0, Layout(tp=2), 0, [first, hello(1)], fast=True, shared=lambda: partial(SharedComm, entry=entry),
            opening=opening, experts=True,
        )  # fmt: skip

    def fail() -> None:
        with ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(meet)
            other = SharedComm(segments["tp"][0], 1, (0, 1), entry)
            opening.abort("told to end")
            with pytest.raises(CollectiveAborted, match="told to end"):
                meeting.result(SOON)
            other.close()

    def descriptors() -> int:
        gc.collect()  # a mapping has one of its own, as long as anything refers to it
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    fail()
    assert descriptors() == before
    for fd, _ in segments.values():
        os.close(fd)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_gloo_listens_only_where_it_is_told(host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")

    def found() -> set[Any]:
        return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    before = found()
    store, port = open_store(host)
    assert (host, port) in found()
    with ThreadPoolExecutor(2) as pool:
        stores = [store, join_store(host, port)]  # a store's client does one thing at a time
        comms = list(pool.map(lambda rank: GlooComm(stores[rank], "group", rank, (0, 1), host=host), range(2)))
        mine = found() - before
        assert len(mine) == 3 and {address.ip for address in mine} == {host}
        assert list(pool.map(lambda comm: comm.all_reduce(np.ones(4, np.float32)), comms)) == [None, None]
    for comm in comms:
        comm.close()
    stores.clear()
    del store
    assert found() <= before


def test_hidden_states_stay_on_the_device_where_the_group_takes_them_there() -> None:
    """From stage to stage, and drawn tokens back; nothing goes through the batch's array in main memory."""
    group = Group("nccl", 2)

    def work(comm: Comm) -> Any:
        batch = Batch(8, 2, 4, 2)
        batch.counts[:4] = 5, 1, 1, 1
        stage = TorchStage(batch, lambda: values(3, (5, 12)), Mesh(comm.rank, pp=comm), 12)
        out = stage.run()
        if comm.rank == 1:
            stage.drew(0, [1], np.array([[77]], np.int32))
            assert batch.hidden is None
            return StepTensors(batch, torch.device("cpu")).hidden
        stage.drew(0, [1], None)
        heard = []
        stage.take_tokens(0, lambda turn, rows, told: heard.append((turn, rows, told.tolist())))
        return out, heard

    first, second = group.run(work)
    assert first == (None, [(0, [1], [[77]])]) and torch.equal(second, values(3, (5, 12)))
    group.close()


def test_two_ranks_on_one_device_share_memory_and_say_why(caplog: pytest.LogCaptureFixture) -> None:
    segments = create_segments(0, Layout(tp=2))
    store, port = open_store("127.0.0.1")
    first, second = (msgspec.structs.replace(hello(rank), device=3) for rank in range(2))
    first = msgspec.structs.replace(first, segments=segments, store=("127.0.0.1", port))
    entry = load(target_for("float32"))

    def meet(rank: int, members: list[Hello]) -> Mesh:
        make = partial(SharedComm, entry=entry)
        return open_mesh(rank, Layout(tp=2), 0, members, fast=False, shared=lambda: make, collective="NCCL")

    def both(second: Hello) -> list[Mesh]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(meet, range(2), [[first, second]] * 2))

    for mesh in both(second):
        assert isinstance(mesh.tp, StagedComm) and isinstance(mesh.tp.base, SharedComm)
        mesh.close()
    assert "ranks 0, 1 meet by shared memory (not NCCL: " in caplog.text
    for mesh in both(msgspec.structs.replace(second, home="elsewhere")):
        assert isinstance(mesh.tp, StagedComm | NcclComm) and not isinstance(getattr(mesh.tp, "base", None), SharedComm)
        mesh.close()
    for fd, _ in segments.values():
        os.close(fd)
    del store


@pytest.mark.row("P1")
def test_coordinates() -> None:
    assert axes(3, Layout(tp=2, pp=3)) == {"tp": (2, 3), "pp": (1, 3, 5), "ep": (3,), "experts": (3,)}
    assert axes(3, Layout(tp=2, pp=3), experts=True)["experts"] == (2, 3)
    both = axes(3, Layout(tp=2, dp=2), experts=True)
    assert both == {"tp": (2, 3), "pp": (3,), "ep": (0, 1, 2, 3), "experts": (0, 1, 2, 3)}
    mesh = open_mesh(0, Layout(), 0, [hello(0)], fast=True, shared=lambda: Solo)
    assert isinstance(mesh.tp, Solo) and mesh.samples and mesh.reads_tokens
    assert not Mesh(0, pp=_axis(0, 2)).samples and Mesh(1, pp=_axis(1, 2)).samples
    with pytest.raises(ValueError, match="neither shared memory nor a store"):
        open_mesh(0, Layout(tp=2), 0, [hello(0), hello(1)], fast=False, shared=lambda: Solo)


def hello(rank: int) -> Hello:
    return Hello(rank, os.getpid(), "home", "node", "127.0.0.1")


def _axis(rank: int, size: int) -> Comm:
    solo = Solo()
    solo.rank, solo.size = rank, size
    return solo


def test_a_segment_never_becomes_shorter() -> None:
    """Whoever fences one that another makes longer at that moment: what is mapped beyond a file's end is a SIGBUS."""
    fd = create_segment()
    fence_segment(fd)
    assert os.fstat(fd).st_size == 8
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    fence_segment(fd)
    assert os.fstat(fd).st_size == 1 << 20
    os.close(fd)
