"""Memory of devices that outlives ranks, with memory files in place of a device's: who keeps it, who maps it, when it
counts and when it goes. The same as is asked of the memory of a node."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from planaria.config.options import EngineConfig, EngineOptions
from planaria.config.resolve import resolve
from planaria.executor.boot import SPARE
from planaria.executor.ray.actor import NodeReaper
from planaria.executor.ray.actors import Actors
from planaria.executor.status import facts_of
from planaria.hosts import cuda_memory
from planaria.hosts.cuda_memory import CudaAllocator
from planaria.hosts.device_keeper import DeviceKeeper, GivenKeepers, OwnedKeepers
from planaria.hosts.device_memory import FileAllocator, Keepers, ListMemory, MemoryFound, MemoryRefused, TakeMemory, ask
from planaria.hosts.memory import KVMemory
from planaria.hosts.weights import UnwrittenPart, WeightsMemory
from planaria.kernels.gpu.packed import pack
from planaria.kernels.quant import quantise
from planaria.kernels.reference import TorchOps
from planaria.kernels.torch_placed import ThingAt, found, moved
from planaria.loader import WeightSource
from planaria.node import Memories, readable
from planaria.topology import Layout
from planaria.worker import weights
from planaria.worker.parts import read_part
from planaria.worker.weights import RankWeights
from planaria.worker.worker import Worker
from tests.model.checkpoints import write_checkpoint
from tests.model.driver import Driver
from tests.model.engines import Engine, texts
from tests.model.faulty import FILE, FaultyRank
from tests.model.ranks import boot_of

ALL = 0, Layout()
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def owned() -> Iterator[OwnedKeepers]:
    made = OwnedKeepers("file", [0])
    yield made
    made.close()


@pytest.fixture
def keepers(owned: OwnedKeepers) -> Keepers:
    return Keepers(owned.keeping, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("device"), "llama", num_hidden_layers=4)


# -- the keeper


def test_what_is_taken_is_there_for_others_until_it_is_dropped(owned: OwnedKeepers, keepers: Keepers) -> None:
    other = Keepers(owned.keeping, 0)
    keepers.take("kv/1/", 1000)[:5] = b"words"
    there = other.find("kv/1/")
    assert there is not None and bytes(there[:5]) == b"words" and bytes(other.take("kv/1/", 1000)[:5]) == b"words"
    keepers.take("kv/12/", 10)
    assert other.held() == {"kv/1/": 1000, "kv/12/": 10} and other.held("kv/1/") == {"kv/1/": 1000}
    keepers.drop("kv/1/")
    assert other.find("kv/1/") is None and other.held() == {"kv/12/": 10}
    assert bytes(there[:5]) == b"words"  # who has it mapped keeps it
    assert not any(other.take("kv/1/", 1000))  # another


def test_what_is_for_reading_alone_can_not_be_written(keepers: Keepers) -> None:
    keepers.take("kv/1/", 10)
    there = keepers.find("kv/1/", writable=False)
    assert there is not None and there.readonly


def test_a_question_that_is_none_is_refused_and_the_next_is_answered(owned: OwnedKeepers, keepers: Keepers) -> None:
    for name, size in (("", 1), ("x", 1), ("x" * 300 + "/", 1), ("x/", 0), ("x/", -1), ("x/", 1 << 60)):
        with pytest.raises(OSError, match="no memory is called"):
            keepers.take(name, size)
    (_, address) = owned.keeping[0]
    for data in (b"", b"\xc1" * 100, msgspec.msgpack.encode(["take", "x/"])):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect("\0" + address)
            end.settimeout(30)
            end.send(data)
            assert b"not a question" in end.recv(1000) or not data
    asks_nothing = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(200)]
    for end in asks_nothing:
        end.connect("\0" + address)
    assert keepers.held() == {}
    asks_nothing[0].settimeout(30)
    assert asks_nothing[0].recv(1) == b""  # has been hung up on
    for end in asks_nothing:
        end.close()
    keepers.take("x/", 10)
    with pytest.raises(OSError, match="has 10 bytes, not 20"):
        keepers.take("x/", 20)


class Short(FileAllocator):
    """A device that is full, or that can't hand on what it has."""

    def __init__(self) -> None:
        self.freed = list[int]()
        self.exports = False

    def reserve(self, size: int) -> tuple[int, int]:
        if size > 100:
            raise OSError("cuMemCreate: out of memory (2)")
        return size, size

    def export(self, handle: int) -> int:
        if not self.exports:
            raise OSError("cuMemExportToShareableHandle: not permitted (800)")
        return os.open(os.devnull, os.O_RDONLY)

    def free(self, handle: int) -> None:
        self.freed.append(handle)


def test_what_the_device_refuses_leaves_nothing() -> None:
    device = Short()
    keeper = DeviceKeeper(device)
    assert keeper.answer(TakeMemory("x/", 101)) == (MemoryRefused("cuMemCreate: out of memory (2)"), None)
    answer, fd = keeper.answer(TakeMemory("x/", 50))
    assert isinstance(answer, MemoryRefused) and "not permitted" in answer.why and fd is None and device.freed == [50]
    device.exports = True
    answer, fd = keeper.answer(TakeMemory("x/", 60))
    assert answer == MemoryFound("file", 60, new=True) and fd is not None
    os.close(fd)


def test_a_memory_file_that_is_too_short_is_refused() -> None:
    allocator = FileAllocator()
    handle, _ = allocator.reserve(100)
    with pytest.raises(OSError, match="fewer than 200"):
        allocator.map(handle, 200, writable=True)


def test_who_is_stopped_keeps_nobody_for_ever(owned: OwnedKeepers) -> None:
    (pid,) = owned.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(OSError, match="does not answer in 0 s"):
            ask(owned.keeping[0][1], ListMemory(""), timeout=0.2)
    finally:
        os.kill(pid, signal.SIGCONT)


OWNER = """
import sys
from planaria.hosts.device_keeper import OwnedKeepers
owned = OwnedKeepers("file", [0])
print(owned.pids[0], flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        end = os.pidfd_open(int(owner.stdout.readline()))
    finally:
        owner.kill()
        owner.wait(30)
    try:
        assert readable(end, 30)
    finally:
        os.close(end)


GIVES = """
import json, socket, sys
from planaria.hosts.device_keeper import OwnedKeepers
from planaria.hosts.device_memory import Keepers
owned = OwnedKeepers("file", [0])
Keepers(owned.keeping, 0).take("kv/1/", 10)[:5] = b"words"
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [json.dumps([owned.keeping, owned.pids]).encode()], owned.pipes)
owned.leave()
owned.close()
"""


def test_who_is_given_keepers_has_them_when_their_owner_has_ended() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        subprocess.run([sys.executable, "-c", GIVES, str(theirs.fileno())], pass_fds=[theirs.fileno()], check=True)
        data, fds, _, _ = socket.recv_fds(ours, 1000, 1)
    keeping, pids = msgspec.json.decode(data)
    given = GivenKeepers([(device, address) for device, address in keeping], fds)
    end = os.pidfd_open(pids[0])
    try:
        there = Keepers(given.keeping, 0).find("kv/1/")
        assert there is not None and bytes(there[:5]) == b"words" and not readable(end, 0)
        given.close()
        assert readable(end, 30)
    finally:
        os.close(end)


def test_on_another_node_of_ray_the_devices_of_its_ranks_have_keepers() -> None:
    """Of those that have come up there; who comes later has one, too."""
    reaper, answered = NodeReaper(), list[Any]()

    def remote(*asked: Any) -> bytes:
        answered.append(asked)
        return reaper.memories(*asked)

    actors: Any = SimpleNamespace(
        _reapers={"there": SimpleNamespace(memories=SimpleNamespace(remote=remote))}, _memories={},
        _answer=lambda child, nodes, deadline, asked: asked,
    )  # fmt: skip
    try:
        for device in (3, 5, 3):
            order = SimpleNamespace(shares=(0, 2), keeps="file", nodes=("n",))
            at = SimpleNamespace(home="there", node="n", devices=(device,))
            Actors._find_memories(actors, SimpleNamespace(here=False, at=at, ordered=order, killed=False))  # type: ignore[arg-type]
        found = actors._memories["there", 0]
        assert [device for device, _ in found.keepers] == [3, 5] and len(answered) == 2
        rank = KVMemory.of(found.kv, Keepers(found.keepers, 5))
        rank.part(1, 7, 1000, 1)
        rank.made(1, 7)
        assert KVMemory.of(found.kv, Keepers(found.keepers, 5)).numbers(1) == (7,)
        assert KVMemory.of(found.kv, Keepers(found.keepers, 3)).numbers(1) == (), "it is on another device"
        on_host = msgspec.msgpack.decode(reaper.memories(1, 2, "", (3,)), type=Memories)
        assert on_host.keepers == () and on_host.kv is not None and on_host.weights == found.weights
    finally:
        for owned in reaper._owned.values():
            owned.close()


class Library:
    """A driver that notes what it is told. fails: by name, what it answers. context: that the thread is in."""

    def __init__(self, **fails: int) -> None:
        self.fails, self.called, self.context = fails, list[str](), 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == "cuGetErrorString":
                args[1]._obj.value = b"an illegal memory access was encountered"
                return 0
            self.called.append(name)
            if name == "cuMemSetAccess":
                self.called[-1] += f" {args[2]._obj.flags}"
            values = {
                "cuMemGetAllocationGranularity": 2 << 20, "cuMemAddressReserve": 1 << 40,
                "cuMemExportToShareableHandle": 9, "cuMemCreate": 5, "cuMemImportFromShareableHandle": 6,
                "cuCtxGetCurrent": self.context, "cuDevicePrimaryCtxRetain": 7,
            }  # fmt: skip
            if name == "cuCtxSetCurrent":
                self.context = args[0].value
            if name in values:
                args[0]._obj.value = values[name]
            return self.fails.get(name, 0) if not name.startswith("cuMemSet") else self.fails.get(self.called[-1], 0)

        return call


ENTER = ["cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]  # what waits for a device needs a context
MAP = ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap"]
UNMAP = ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]


def cuda(**fails: int) -> tuple[CudaAllocator, Library]:
    library = Library(**fails)
    made = CudaAllocator(0, cuda_memory.Driver(library))
    library.called.clear()
    return made, library


def test_a_cuda_device_is_asked_in_order() -> None:
    allocator, library = cuda()
    assert allocator.reserve(100) == (5, 2 << 20) and allocator.export(5) == 9
    allocator.free(5)
    assert library.called == ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease"]
    library.called.clear()
    kept = Thing()
    there, gone = allocator.map(9, 2 << 20, writable=True, keeps=kept), weakref.ref(kept)
    del kept
    assert library.called == [*ENTER, *MAP, "cuMemSetAccess 3", "cuMemRelease"]
    part = there[100:300]
    assert len(there) == 2 << 20 and len(part) == 200
    assert part.__cuda_array_interface__["data"] == ((1 << 40) + 100, False)
    library.called.clear()
    del there
    assert not library.called and gone() is not None  # a part of it is still there
    del part
    assert library.called == [ENTER[0], *UNMAP] and gone() is None
    there = allocator.map(9, 2 << 20, writable=True)
    library.called.clear()
    library.context = 0  # another thread
    allocator.clear(there)
    assert library.called == [*ENTER, "cuMemsetD8_v2", "cuCtxSynchronize"]
    library.called.clear()
    library.context = 0
    del there
    assert library.called == [*ENTER, *UNMAP]


class Thing:
    pass


def test_a_driver_that_reserves_in_a_context_only_gets_one() -> None:
    allocator, library = cuda(cuMemCreate=201)
    with pytest.raises(OSError, match=r"\(201\)"):
        allocator.reserve(100)
    assert library.called == ["cuMemCreate", *ENTER, "cuMemCreate"]
    allocator, library = cuda(cuMemCreate=2)
    with pytest.raises(OSError, match=r"\(2\)"):
        allocator.reserve(100)
    assert library.called == ["cuMemCreate"]


@pytest.mark.parametrize(
    ("fails", "undone"),
    [
        ("cuMemImportFromShareableHandle", []), ("cuMemAddressReserve", ["cuMemRelease"]),
        ("cuMemMap", ["cuMemAddressFree", "cuMemRelease"]),
        ("cuMemSetAccess 3", ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]),
    ],
)  # fmt: skip
def test_what_a_faulty_device_refuses_is_undone(fails: str, undone: list[str]) -> None:
    allocator, library = cuda(**{fails: 700})
    with pytest.raises(OSError, match=r"illegal memory access was encountered \(700\)"):
        allocator.map(9, 2 << 20, writable=True)
    assert library.called[library.called.index(fails) + 1 :] == undone


def test_a_driver_that_maps_for_writing_only_is_asked_for_that() -> None:
    allocator, library = cuda(**{"cuMemSetAccess 1": 801})
    allocator.map(9, 2 << 20, writable=False)
    assert [name for name in library.called if "Access" in name] == ["cuMemSetAccess 1", "cuMemSetAccess 3"]


def test_who_has_gone_answers_nobody(owned: OwnedKeepers, keepers: Keepers) -> None:
    there = keepers.take("x/", 10)
    there[:3] = b"abc"
    owned.close()
    with pytest.raises(OSError, match="the keeper of the device's memory is gone"):
        keepers.find("x/")
    keepers.drop("x/")
    assert bytes(there[:3]) == b"abc"


# -- weights


def config_of(model: Path, **options: Any) -> EngineConfig:
    few = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "threads": 1, "kernels": "torch", **options}
    return resolve(EngineOptions(model=str(model), **few))


def read(config: EngineConfig, memory: WeightsMemory | None) -> tuple[Any, TorchOps]:
    given, ops = Memories.of(None, memory) if memory is not None else Memories(), TorchOps("cpu", "float32")
    weights = RankWeights(msgspec.structs.replace(boot_of(config), memories=given))
    made = read_part(config, ops, ALL, None, lambda part, fraction: None, weights)
    weights.name(ALL, 1)
    return made, ops


def logits(model: Any, ops: TorchOps) -> torch.Tensor:
    return Driver(model, ops, block_size=16).step({0: TEXT})[0].clone()


@pytest.fixture
def memory(keepers: Keepers) -> WeightsMemory:
    made = WeightsMemory.make(keepers)
    assert made is not None
    return made


@pytest.fixture
def no_source(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def read_nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("the checkpoint was read")

    return lambda: monkeypatch.setattr(WeightSource, "get", read_nothing)


def test_what_another_has_packed_is_mapped(
    model: Path, memory: WeightsMemory, keepers: Keepers, no_source: Callable[[], None]
) -> None:
    config = config_of(model)
    own, wrote = read(config, None), read(config, memory)
    held = keepers.held()
    no_source()
    mapped = read(config, memory)
    wanted = logits(*own)
    assert wanted.std() > 0.1 and held == keepers.held() and sum(held.values()) > 0
    for each in (wrote, mapped):
        assert torch.equal(logits(*each), wanted) and each[0].weight_bytes == own[0].weight_bytes
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert {line.split()[1] for line in maps if "/memfd:planaria-device" in line} == {"r--s"}  # also who wrote it


def test_a_writer_that_dies_leaves_nothing_that_counts(
    model: Path, memory: WeightsMemory, keepers: Keepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, get = config_of(model), WeightSource.get

    def dying(source: WeightSource, name: str, **given: Any) -> Any:
        if "layers.2" in name:
            raise SystemExit("half way")
        return get(source, name, **given)

    with monkeypatch.context() as patch:
        patch.setattr(WeightSource, "get", dying)
        with pytest.raises(SystemExit):
            read(config, memory)
    assert keepers.held() == {}
    assert torch.equal(logits(*read(config, memory)), logits(*read(config, None)))


def test_it_goes_when_nobody_names_it_and_nobody_has_it(model: Path, memory: WeightsMemory, keepers: Keepers) -> None:
    made = read(config_of(model), memory)
    memory.forget(0)
    assert keepers.held() and made[0].weight_bytes  # it is mapped
    del made
    gc.collect()
    memory.tidy()
    assert not keepers.held()
    digest = b"some" * 4
    part = memory.open(digest)
    assert isinstance(part, UnwrittenPart)


def test_where_the_keeper_has_nothing_the_checkpoint_is_read(
    model: Path, memory: WeightsMemory, keepers: Keepers, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(model)
    wanted = logits(*read(config, memory))
    keepers.drop("weights/")
    caplog.clear()
    assert torch.equal(logits(*read(config, memory)), wanted)
    assert "rank 0 keeps weights of its own: the device's keeper has it no longer" in caplog.text


def test_a_device_that_fails_when_it_is_mapped_is_read_anew(
    model: Path, memory: WeightsMemory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model)
    wanted = logits(*read(config, memory))

    def faulty(*_: Any, **__: Any) -> None:
        raise OSError("cuMemImportFromShareableHandle: an illegal memory access was encountered (700)")

    monkeypatch.setattr(FileAllocator, "map", faulty)
    caplog.clear()
    assert torch.equal(logits(*read(config, memory)), wanted)
    assert "rank 0 keeps weights of its own: cuMemImportFromShareableHandle: an illegal" in caplog.text


@pytest.fixture
def others(tmp_path: Path) -> EngineConfig:
    """Weights that come later."""
    config = config_of(write_checkpoint(tmp_path / "others", "llama", 2, num_hidden_layers=4))
    return msgspec.structs.replace(config, weights_number=1)


def preparing(config: EngineConfig, memory: WeightsMemory, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Who prepares them beside rank 0."""
    monkeypatch.setattr(os, "nice", lambda by: by)
    boot = boot_of(config, SPARE)
    return Worker(msgspec.structs.replace(boot, memories=Memories.of(None, memory), beside=(0,)))


def test_new_weights_are_packed_beside_those_in_force(
    model: Path, others: EngineConfig, memory: WeightsMemory, keepers: Keepers, no_source: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The rank computes with its own, and maps the others then."""
    old, wanted = read(config_of(model), memory), logits(*read(others, None))
    said, before = logits(*old), keepers.held()
    beside = preparing(others, memory, monkeypatch)
    assert beside.prepare() is None
    assert set(before) < set(keepers.held()) and torch.equal(logits(*old), said)
    no_source()
    assert torch.equal(logits(*read(others, memory)), wanted) and not torch.equal(said, wanted)


def test_where_a_device_has_no_room_for_both_the_old_ones_go_first(
    model: Path, others: EngineConfig, memory: WeightsMemory, keepers: Keepers, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Nothing is prepared, and the rank reads them in the pause."""
    old, wanted = read(config_of(model), memory), logits(*read(others, None))
    before, take = keepers.held(), Keepers.take
    with monkeypatch.context() as patch:
        patch.setattr(weights, "free_bytes", lambda config: 1 << 20)
        assert preparing(others, memory, patch).prepare() is None
    assert "new weights are read in a pause, for they can't be packed beside those in force: 0.0 GiB" in caplog.text
    assert keepers.held() == before
    caplog.clear()

    def full(self: Keepers, name: str, size: int) -> Any:
        if sum(self.held().values()) + size > sum(before.values()):
            raise OSError("cuMemCreate: out of memory (2)")
        return take(self, name, size)

    monkeypatch.setattr(Keepers, "take", full)
    assert preparing(others, memory, monkeypatch).prepare() is None
    assert "beside those in force: cuMemCreate: out of memory" in caplog.text and keepers.held() == before
    del old
    gc.collect()
    assert torch.equal(logits(*read(others, memory)), wanted)
    assert "weights of its own" not in caplog.text and set(keepers.held()).isdisjoint(before)


def test_a_packed_weight_is_the_same_where_it_is_moved_to() -> None:
    packed = pack(quantise(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32), "q4_1"), None,
                  torch.bfloat16, torch.device("cpu"))  # fmt: skip
    room = torch.zeros(1 << 16, dtype=torch.uint8)
    used = [0]

    def take(size: int) -> tuple[int, torch.Tensor]:
        at, used[0] = used[0], used[0] + -(-size // 256) * 256
        return at, room[at : at + size]

    at, there = moved(packed, take)
    again = found(at, lambda at, size: room[at : at + size])
    for each in (there, again):
        assert all(map(torch.equal, each.packed_parts()[1], packed.packed_parts()[1]))
        assert (each.kind, each.dtype, each.shape) == (packed.kind, packed.dtype, packed.shape)
    with pytest.raises(ValueError, match="no packed weight"):
        found(ThingAt(at.kind, at.numbers[:-1], at.tensors), lambda at, size: room[at : at + size])
    with pytest.raises(TypeError, match="can't be shared"):
        moved("words", take)


# -- KV


def test_kv_counts_when_its_writer_has_said_so_and_goes_with_its_number(keepers: Keepers) -> None:
    made = KVMemory.make(2, keepers)
    assert made is not None
    other = KVMemory.of(made.origin, Keepers(keepers.addresses, 0))
    made.part(1, 7, 1000, 1).take(1000)[:3] = b"abc"
    assert other.numbers(1) == ()
    made.made(1, 7)
    assert other.numbers(1) == (7,) and bytes(other.part(1, 7, 1000, 1).take(1000)[:3]) == b"abc"
    with pytest.raises(OSError, match="KV 7 of rank 1 has no"):
        other.part(1, 7, 2000, 1)
    made.part(0, 8, 10, 1)  # who took it died before it counted
    assert len(keepers.held()) == 2
    other.part(0, 9, 10, 1)
    assert sorted(name.split("/")[2:4] for name in keepers.held()) == [["0", "9"], ["1", "7"]]
    other.clear_part(1, 7)
    assert made.numbers(1) == () and len(keepers.held()) == 1
    made.clear()
    assert keepers.held() == {}


def test_what_the_engine_has_cleared_is_not_kept_by_a_rank(keepers: Keepers) -> None:
    made = KVMemory.make(1, Keepers(keepers.addresses))
    assert made is not None and not on_device(os.getpid())
    rank = KVMemory.of(made.origin, keepers)
    for number in (6, 7):
        rank.part(0, number, 1000, 1)
        rank.made(0, number)
    assert made.numbers(0) == (6, 7) and len(on_device(os.getpid())) == 2
    made.clear()
    rank.clear_part(0, 7)
    assert len(on_device(os.getpid())) == 1
    rank.unmap()
    assert not on_device(os.getpid()) and rank.numbers(0) == ()


def test_kv_that_can_not_be_mapped_counts_for_nothing(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = KVMemory.make(1, keepers)
    assert made is not None
    made.part(0, 7, 1000, 1)
    made.made(0, 7)

    def faulty(*_: Any, **__: Any) -> None:
        raise OSError("cuMemMap: an illegal memory access was encountered (700)")

    with monkeypatch.context() as patch:
        patch.setattr(FileAllocator, "map", faulty)
        assert KVMemory.of(made.origin, Keepers(keepers.addresses, 0)).numbers(0) == ()
    assert "KV of rank 0 is computed again: cuMemMap: an illegal memory access" in caplog.text
    keepers.drop("kv/")
    assert KVMemory.of(made.origin, Keepers(keepers.addresses, 0)).numbers(0) == ()
    assert made.numbers(0) == (7,)  # it has it


# -- an engine


@pytest.fixture
def given(owned: OwnedKeepers) -> Iterator[Memories]:
    keepers = Keepers(owned.keeping)
    kv, weights = KVMemory.make(2, keepers), WeightsMemory.make(keepers)
    yield Memories.of(kv, weights)
    assert kv is not None
    kv.close()


OPTIONS: dict[str, Any] = {"kernels": "torch", "threads": 1, "kv_cache_memory": "2MiB"}
ASKED = texts(100, [(70, 20), (40, 20)])


def on_device(pid: int) -> list[str]:
    """What a process has mapped of a keeper's, by access and inode."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return sorted({f"{words[1]} {words[4]}" for words in lines if "/memfd:planaria-device" in words[-2:][0]})


def test_a_replacement_maps_weights_and_goes_on_with_kv(model: Path, given: Memories) -> None:
    with Engine(str(model), given=given, tensor_parallel_size=2, **OPTIONS) as engine:
        expected = engine.run(ASKED)
        before, pids, held = [on_device(pid) for pid in engine.pids], engine.pids, Keepers(given.keepers, 0).held()
        assert all([each.split()[0] for each in own] == ["r--s", "rw-s"] for own in before)
        assert engine.run(ASKED, 4, lambda: engine.kill(1, signal.SIGKILL)) == expected
        # The same weights, which nobody can write, and the same KV.
        assert [on_device(pid) for pid in engine.pids] == before and engine.pids[1] != pids[1]
        assert Keepers(given.keepers, 0).held() == held and engine.loop.gang.shared_bytes > 0
        assert engine.loop.gang.kv.kept and engine.recoveries[0].tokens == 0
        assert engine.loop.core is not None and engine.loop.core.replayed_tokens == 0
        assert facts_of(engine.loop.config, engine.loop.gang, engine.loop.core).attention == ["plain torch"]


def test_without_its_keeper_a_replacement_loads_and_computes_again(
    model: Path, given: Memories, owned: OwnedKeepers
) -> None:
    with Engine(str(model), given=given, **OPTIONS) as engine:
        expected = engine.run(ASKED)

        def end_both() -> None:
            owned.close()
            engine.kill(0, signal.SIGKILL)

        assert engine.run(ASKED, 4, end_both) == expected
        assert not engine.loop.gang.kv.kept and on_device(engine.pids[0]) == []


def test_after_a_fault_of_its_device_a_rank_is_replaced_and_its_kv_computed_again(
    model: Path, given: Memories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fault"
    monkeypatch.setenv(FILE, str(file))
    with Engine(str(model), given=given, worker_cls=f"{FaultyRank.__module__}.FaultyRank", **OPTIONS) as engine:
        expected, pids = engine.run(ASKED), engine.pids
        weights = [each for each in on_device(pids[0]) if "r--s" in each]
        assert len(weights) == 1 and engine.run(ASKED, 4, file.touch) == expected
        assert engine.pids != pids and not engine.loop.gang.kv.kept and len(engine.recoveries) == 1
        assert [each for each in on_device(engine.pids[0]) if "r--s" in each] == weights
        assert not file.exists()
