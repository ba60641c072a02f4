"""Sums by memory that devices share: a stand-in of torch's kernel, a thread for a stream, with the signals that torch's
waits for. Not run on hardware."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from planaria.kernels.cpu.build import load, target_for
from planaria.kernels.cpu.shared import SharedComm
from planaria.mesh import boot, nccl, symmetric
from planaria.mesh.comm import CollectiveAborted
from planaria.mesh.gloo import GlooComm, open_store
from planaria.mesh.symmetric import SymmetricSums
from planaria.topology import Layout
from tests.model.test_mesh import Pretend, hello, values


class Devices:
    """Of so many ranks: their parts, and the signals for each, [blocks, ranks]."""

    def __init__(self, size: int) -> None:
        self.parts = [torch.zeros(1024) for _ in range(size)]
        self.signals = [torch.zeros(2, size, dtype=torch.int32) for _ in range(size)]
        self.over = threading.Event()


class PretendedSums(SymmetricSums):
    def __init__(self, devices: Devices, rank: int) -> None:
        self.devices = devices
        self.stream = ThreadPoolExecutor(1)
        self.last: Future[None] | None = None
        super().__init__("sums", rank, len(devices.parts))

    def _open(self) -> tuple[Tensor, list[Tensor]]:
        return self.devices.parts[self.rank], self.devices.signals

    def _sum(self, there: Tensor, out: Tensor) -> None:
        self.last = self.stream.submit(self._kernel, there.numel(), out)

    def _queued(self) -> Callable[[], bool]:
        return self.stream.submit(lambda: None).done

    def _beside(self) -> Any:
        return contextlib.nullcontext()

    def _kernel(self, count: int, out: Tensor) -> None:
        self._meet()
        found = torch.zeros(count)
        for part in self.devices.parts:
            found += part[:count]
        out.copy_(found.view(out.shape))
        self._meet()

    def _meet(self) -> None:
        for other in range(self.size):
            self._change(self.signals[other][0, self.rank], 0, 1)
        for other in range(self.size):
            self._change(self.signals[self.rank][0, other], 1, 0)

    def _change(self, signal: Tensor, old: int, new: int) -> None:
        while int(signal) != old:
            assert not self.devices.over.is_set()
            time.sleep(0)
        signal.fill_(new)


class Together:
    """Ranks, each in a thread."""

    def __init__(self, size: int) -> None:
        self.devices, self.pool = Devices(size), ThreadPoolExecutor(size)
        self.sums = [PretendedSums(self.devices, rank) for rank in range(size)]


@pytest.fixture
def three() -> Iterator[Together]:
    made = Together(3)
    yield made
    made.devices.over.set()


def test_all_get_the_sum_in_the_order_of_ranks(three: Together) -> None:
    def work(sums: PretendedSums) -> tuple[str, list[Tensor]]:
        refused, found = sums.refusal(), []
        for count in (4, 1024, 64):
            found.append(values(sums.rank, (count,)))
            sums.all_reduce(found[-1])
            assert sums.last is not None
            sums.last.result(20)
        return refused, found

    for refused, found in three.pool.map(work, three.sums):
        assert not refused
        for x in found:
            parts = [values(rank, x.shape) for rank in range(3)]
            assert torch.equal(x, parts[0] + parts[1] + parts[2])
    assert not any(signals.any() for signals in three.devices.signals)
    takes = three.sums[0].takes
    assert takes(torch.zeros(4)) and takes(torch.zeros(2, 512)) and not takes(torch.zeros(1028))
    assert not takes(torch.zeros(0)) and not takes(torch.zeros(6)) and not takes(torch.zeros(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("waits_to", ["hear", "say"])
def test_who_gives_up_waits_for_nobody(three: Together, waits_to: str) -> None:
    """The others never come; or one was there before, and hasn't heard what it was told."""
    if waits_to == "say":
        three.devices.signals[1][:, 0] = 1
    first = three.sums[0]
    first.all_reduce(torch.ones(8))
    assert first.last is not None
    with pytest.raises(TimeoutError):
        first.last.result(0.1)
    first.release()
    first.last.result(20)


def test_a_trial_that_does_not_end_or_is_wrong_refuses(three: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "TRIAL", 0.1)
    assert three.sums[0].refusal() == "a trial did not end in 0 s"
    monkeypatch.setattr(PretendedSums, "_kernel", lambda self, count, out: out.fill_(7))
    assert three.sums[1].refusal() == "a trial gave another sum"


class Group:
    """Two ranks of a pretended NCCL group. opens: what each does to have such sums."""

    def __init__(self, opens: list[Callable[[], SymmetricSums]]) -> None:
        self.pool, store = ThreadPoolExecutor(2), HashStore()

        class Custom(Pretend):
            def _open_sums(self, store: Store, name: str) -> SymmetricSums:
                return opens[self.rank]()

        make = partial(Custom, deadline=20.0, custom=True)
        self.comms = list(self.pool.map(lambda rank: make(store, "group", rank, (10, 11)), range(2)))

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        return list(self.pool.map(work, self.comms))

    def close(self) -> None:
        for comm in self.comms:
            comm.close()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    monkeypatch.setattr(nccl, "symmetric_available", lambda: True)
    made = Devices(2)
    yield made
    made.over.set()


def added(count: int, comm: Any) -> Tensor:
    x = values(comm.rank, (count,))
    comm.all_reduce(x)
    if comm.sums is not None:
        comm.sums.last.result(20)
    return x


def test_few_numbers_go_by_it_and_an_abort_ends_them(devices: Devices) -> None:
    group = Group([partial(PretendedSums, devices, rank) for rank in range(2)])
    for count in (64, 5000):
        assert torch.equal(*group.run(partial(added, count)))
        assert torch.equal(devices.parts[1][:64], values(1, (64,)))  # what was more went elsewhere
    first: Any = group.comms[0]
    x = torch.ones(8)
    first.all_reduce(x)  # it is queued
    assert not first.sums.last.done()
    first.abort("rank 11 is lost")
    first.sums.last.result(20)
    with pytest.raises(CollectiveAborted, match="rank 11 is lost"):
        first.all_reduce(x)
    group.close()
    assert first.sums is None


def test_torch_finds_the_group_by_its_name(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do its ranks meet: `rendezvous` and the kernel are given a name."""
    found = list[tuple[int, int]]()

    def opens(sums: SymmetricSums) -> tuple[Tensor, list[Tensor]]:
        group = _resolve_process_group(GroupName(sums.name))
        group.get_group_store().set("met", "")  # ranks exchange by it what they have
        found.append((group.rank(), group.size()))
        raise RuntimeError("no device")

    monkeypatch.setattr(SymmetricSums, "_open", opens)
    store = HashStore()
    comm = Pretend(store, "group", 0, (10,), deadline=20.0, custom=True)
    assert found == [(0, 1)] and comm.sums is None and PrefixStore("group/sums", store).check(["met"])
    comm.close()
    with pytest.raises(RuntimeError, match="Could not resolve"):
        _resolve_process_group(GroupName("group/sums"))


def test_where_one_rank_refuses_none_has_it(devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def none() -> SymmetricSums:
        raise RuntimeError("the devices don't reach each other\nand more")

    class Wrong(PretendedSums):
        def _kernel(self, count: int, out: Tensor) -> None:
            super()._kernel(count, out)
            out += 1

    own = partial(PretendedSums, devices, 0)
    with caplog.at_level("INFO", "planaria.mesh"):
        for other, why in (none, "the devices don't reach each other"), (partial(Wrong, devices, 1), "another sum"):
            caplog.clear()
            group = Group([own, other])
            assert [comm.sums for comm in group.comms] == [None, None] and why in caplog.text
            assert torch.equal(*group.run(partial(added, 64)))
            group.close()
    monkeypatch.setattr(nccl, "symmetric_available", lambda: False)
    group = Group([own, none])
    assert [comm.sums for comm in group.comms] == [None, None]
    group.close()


@pytest.mark.parametrize(
    ("fast", "near", "wanted"), [(True, True, True), (False, True, False), (True, False, False)],
    ids=["usual", "--disable-custom-all-reduce", "two nodes"],
)  # fmt: skip
def test_tensor_ranks_of_a_node_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, fast: bool, near: bool, wanted: bool
) -> None:
    asked = []

    class Seen(GlooComm):
        def __init__(self, *args: Any, custom: bool, **options: Any) -> None:
            asked.append(custom)
            super().__init__(*args, **options)

    monkeypatch.setattr(nccl, "NcclComm", Seen)
    monkeypatch.setattr(nccl, "available", lambda: True)
    store, port = open_store("127.0.0.1")
    places = [{"device": rank, "home": "here" if near or not rank else "there"} for rank in range(2)]
    members = [
        msgspec.structs.replace(hello(rank), store=("127.0.0.1", port), **place) for rank, place in enumerate(places)
    ]

    def meet(rank: int) -> None:
        make = partial(SharedComm, entry=load(target_for("float32")))
        boot.open_mesh(rank, Layout(tp=2), 0, members, fast=fast, shared=lambda: make, collective="NCCL").close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(meet, range(2)))
    assert asked == [wanted] * 2
    del store
