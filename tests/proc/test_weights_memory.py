"""Packed weights in memory of the node: who writes a part, who waits, when it counts, when it is given back."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from planaria.hosts import weights
from planaria.hosts.memory import KVMemory
from planaria.hosts.weights import HUGE, UnwrittenPart, WeightsMemory, WrittenPart
from planaria.node import ProcessGone
from tests.proc.servers import PATIENCE, wait_until

ONE, OTHER = b"one part" * 2, b"another " * 2
SIZE = 3 * HUGE + 100

HALF = """
import sys, threading, msgspec
from planaria.hosts.weights import WeightsMemory
from planaria.node import Shared
memory = WeightsMemory.of(msgspec.json.decode(sys.argv[1], type=Shared))
part = memory.open(sys.argv[2].encode())
part.take(1000)[1][:] = b"x" * 1000
part.progress(0.5)
print("half", flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def memory() -> WeightsMemory:
    made = WeightsMemory.make()
    assert made is not None
    return made


def of(memory: WeightsMemory) -> WeightsMemory:
    """As another process has it."""
    return WeightsMemory.of(memory.origin)


def written(memory: WeightsMemory, digest: bytes, size: int = SIZE) -> WrittenPart:
    part = memory.open(digest)
    assert isinstance(part, UnwrittenPart)
    part.take(size)[1][:] = digest[:1] * size
    return part.done(b"said")


def held(memory: WeightsMemory) -> int:
    """Bytes of its file."""
    fd = memory.origin.open()
    try:
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


def test_a_writer_that_dies_half_way_leaves_nothing_and_another_begins_anew(memory: WeightsMemory) -> None:
    told = msgspec.json.encode(memory.origin).decode()
    process = subprocess.Popen([sys.executable, "-c", HALF, told, ONE.decode()], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        heard: list[float] = []
        found: list[object] = []
        waiter = threading.Thread(target=lambda: found.append(of(memory).open(ONE, heard.append)))
        waiter.start()
        wait_until("it waits", lambda: heard)
        assert heard == [0.5] and waiter.is_alive()
    finally:
        process.kill()
        process.wait(10)
    waiter.join(10)
    (part,) = found
    assert isinstance(part, UnwrittenPart)
    at, room = part.take(1000)
    assert at == 0 and not any(room)  # nothing of what the dead one wrote
    room[:] = b"y" * 1000
    part.done(b"")
    mapped = memory.open(ONE)
    assert isinstance(mapped, WrittenPart) and bytes(mapped.memory[:1000]) == b"y" * 1000


def test_what_is_written_can_be_read_alone(memory: WeightsMemory) -> None:
    first = written(memory, ONE)
    second = of(memory).open(ONE)
    assert isinstance(second, WrittenPart)
    for part in (first, second):
        assert part.manifest == b"said" and bytes(part.memory[:SIZE]) == ONE[:1] * SIZE and part.memory.readonly
        # else the system can't use huge pages, neither for who writes nor for who reads
        assert np.frombuffer(part.memory, np.uint8).ctypes.data % HUGE == 0
    assert held(memory) < SIZE + 2 * HUGE  # what was made ready and not used has been given back


def test_nobody_waits_for_a_writer_that_gets_nowhere(memory: WeightsMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "STALLED", 0.0)
    writer = memory.open(ONE)
    assert isinstance(writer, UnwrittenPart) and of(memory).open(ONE) is None
    writer.abandon()
    assert isinstance(of(memory).open(ONE), UnwrittenPart)


def test_it_is_given_back_when_nobody_names_it_and_nobody_has_it(memory: WeightsMemory) -> None:
    part: WrittenPart | None = written(memory, ONE)
    memory.name(0, 0, 2, ONE)
    memory.name(1, 0, 2, ONE)
    del part
    gc.collect()
    memory.name(0, 0, 1, OTHER)  # as another layout begins
    memory.tidy()
    assert held(memory) > SIZE
    here = of(memory)
    mapped = here.open(ONE)
    memory.forget(1)  # by name nobody has it now
    assert held(memory) > SIZE and isinstance(mapped, WrittenPart) and bytes(mapped.memory[:8]) == ONE[:1] * 8
    del mapped
    memory.tidy()
    assert held(memory) < HUGE
    assert isinstance(memory.open(ONE), UnwrittenPart)


def test_ranks_that_a_smaller_layout_has_not_have_no_names(memory: WeightsMemory) -> None:
    written(memory, ONE)
    memory.name(0, 1, 2, ONE)
    memory.name(0, 0, 1, None)
    memory.tidy()
    assert held(memory) < HUGE


def test_there_are_only_so_many_parts(memory: WeightsMemory) -> None:
    digests = [bytes([i + 1]) * weights.DIGEST_BYTES for i in range(weights.SLOTS + 1)]
    parts = [memory.open(digest) for digest in digests]
    assert all(parts[:-1]) and parts[-1] is None
    del parts
    memory.tidy()
    assert memory.open(digests[-1]) is not None


def test_where_files_are_limited_there_is_none() -> None:
    """SIGXFSZ is ignored by Python."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
        assert WeightsMemory.make() is None and KVMemory.make() is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_has_no_name_and_ends_with_who_has_it() -> None:
    memory = WeightsMemory.make()
    assert memory is not None
    origin = memory.origin
    fd = origin.open()
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    del memory
    gc.collect()
    with pytest.raises(ProcessGone):
        origin.open()


def test_only_so_many_of_a_node_read_at_a_time(memory: WeightsMemory) -> None:
    """Whatever engine they are of; a turn ends with the process that had it."""
    order: list[str] = []
    waits = threading.Event()

    def third() -> None:
        with of(memory).turn(2, lambda fraction: waits.set()):
            order.append("third")

    with of(memory).turn(2, pytest.fail), of(memory).turn(None, pytest.fail):
        with of(memory).turn(2, pytest.fail):
            thread = threading.Thread(target=third)
            thread.start()
            assert waits.wait(PATIENCE)
            order.append("second")
        thread.join(PATIENCE)
    assert order == ["second", "third"]
    with of(memory).turn(1, pytest.fail):
        pass
