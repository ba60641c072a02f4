"""What every link promises, with ranks in processes of their own. The direct link is held to what applies to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from planaria.executor.link.address import ShmAddress, TcpAddress, open_port
from planaria.executor.link.choose import make_link
from planaria.executor.link.codec import CodecError
from planaria.executor.link.direct import DirectLink
from planaria.executor.link.faults import ConnectionLost, Fenced, LinkClosed, LinkError, MessageLost, PeerLags
from planaria.executor.link.keys import Invitation, Keys
from planaria.executor.link.shm import ShmLink
from planaria.executor.link.tcp import TcpLink
from planaria.node import ProcessGone, Shared, readable
from planaria.protocol import Call, Command, Done, Failed, Reply, Row, StepPlan, StepResult
from tests.proc.link_rank import ENDED, do, lose
from tests.proc.links import KINDS, LIMIT, Gate, Ranks, within
from tests.proc.servers import SOON, segments

kinds = pytest.mark.parametrize("kind", KINDS)


class Threaded:
    """A rank of the direct link."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def handle(self, command: Command) -> Reply:
        return do(self.rank, command)


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            continue
    return sorted(found)


# -- carrying


@kinds
def test_a_step_and_its_result(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        rows = tuple(Row(i, 100 + i, 1, (i,), True) for i in range(32))
        replies = ranks.all(StepPlan(7, 3, (rows,), ((1, 2),)))
        assert set(replies) == {0, 1}
        for reply in replies.values():
            assert isinstance(reply, StepResult)
            assert (reply.epoch, reply.step, reply.lanes[0].tokens) == (7, 3, list(range(32)))
        ranks.exit()


@pytest.mark.parametrize("kind", [*KINDS, "direct"])
def test_replies_of_a_rank_come_in_the_order_of_commands(kind: str) -> None:
    """Many under way at once, ranks of uneven speed."""
    num_ranks, count = 3, 300

    def check(link: Any) -> None:
        last = dict.fromkeys(range(num_ranks), 0)
        for number in range(1, count + 1):
            link.send(number, Call("work", ([2 * ((number + rank) % 7 == 0) for rank in range(num_ranks)],)))
        for _ in range(count * num_ranks):
            got = link.receive(LIMIT)
            assert got is not None
            rank, number, reply = got
            assert number == last[rank] + 1 and isinstance(reply, Done) and reply.rank == rank
            last[rank] = number
        assert link.receive(0) is None

    if kind == "direct":
        direct = DirectLink([Threaded(rank) for rank in range(num_ranks)], threaded=True)
        check(direct)
        direct.close()
        return
    with Ranks(kind, num_ranks) as ranks:
        check(ranks.link)


@pytest.mark.parametrize(("kind", "num_ranks"), [("shm", 1), ("shm", 3), ("tcp", 1), ("tcp", 3), ("joined", 3)])
def test_sizes_from_10_bytes_to_64_megabytes(kind: str, num_ranks: int) -> None:
    with Ranks(kind, num_ranks) as ranks:
        for size in (0, 1, 10, 1000, 4063, 4064, 4065, 65_503, 65_504, 65_505, 1 << 18, (1 << 20) + 1, 64 << 20):
            data = os.urandom(min(size, 1 << 20)) * max(1, size >> 20)
            assert ranks.ask("check", data) == {r: [len(data), zlib.crc32(data)] for r in range(num_ranks)}
        for size in (0, 10, 65_505, 64 << 20):
            for value in ranks.ask("make", size).values():
                assert value == bytes(size)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.row("X3")
def test_the_size_of_a_chunk_is_an_option(kind: str) -> None:
    with Ranks(kind, 2, chunk_bytes=1 << 13) as ranks:
        for size in (10, 1 << 13, 1 << 20):
            data = os.urandom(size)
            assert ranks.ask("check", data) == {r: [size, zlib.crc32(data)] for r in range(2)}
        assert set(ranks.ask("make", 1 << 20).values()) == {bytes(1 << 20)}
    link = make_link([kind == "shm"], chunk=1 << 13)
    assert (link.segment.ring()[2] if kind == "shm" else link.chunk_bytes) == 1 << 13
    link.close()


@kinds
def test_large_both_ways_at_once(kind: str) -> None:
    """The driver sends more than a ring while ranks answer more than a ring: neither waits for the other for ever."""
    with Ranks(kind, 2) as ranks:
        data = os.urandom(4 << 20)
        for _ in range(4):
            ranks.send(Call("echo", (data,)))
        for _ in range(8):
            got = ranks.link.receive(LIMIT)
            assert got is not None and isinstance(got[2], Done) and got[2].value == data


@kinds
def test_sent_before_ranks_are_there(kind: str) -> None:
    """A launcher may send as soon as it has started processes."""
    with Ranks(kind, 2) as ranks:
        assert ranks.ask("echo", "first") == {0: "first", 1: "first"}
        assert ranks.link.receive(0.0) is None, "nobody was lost"


# -- what can't be carried


@kinds
def test_values_that_are_no_data(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        with pytest.raises(CodecError, match="Call can't be sent"):
            ranks.send(Call("echo", (object(),)))
        # the ranks' answers can't be sent; the command is answered anyway
        for rank, answer in ranks.all(Call("object")).items():
            assert isinstance(answer, Failed) and answer.rank == rank and "can't be sent" in answer.message
        assert ranks.ask("echo", 1) == {0: 1, 1: 1}


# -- waiting


@kinds
def test_receive_ends_at_its_deadline_and_at_wake(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        began = time.monotonic()
        assert ranks.link.receive(0) is None
        within(SOON, began)
        assert ranks.link.receive(0.2) is None
        assert 0.2 <= time.monotonic() - began < SOON
        timer = threading.Timer(0.2, ranks.link.wake)
        timer.start()
        began = time.monotonic()
        assert ranks.link.receive(None) is None
        within(SOON, began)
        timer.join()
        assert ranks.ask("echo", 1) == {0: 1, 1: 1}


@kinds
def test_a_rank_that_lags_is_named_at_the_deadline(kind: str) -> None:
    with Ranks(kind, 3, send_timeout=1.0) as ranks:
        ranks.ask("echo", 0)
        ranks.stop(1)
        began = time.monotonic()
        with pytest.raises(LinkError) as error:
            for _ in range(10_000):
                ranks.send(Call("echo", (b"x" * 1000,)))
            while True:
                ranks.link.receive(LIMIT)
        assert error.value.ranks == (1,) and "rank 1" in str(error.value)
        if kind == "shm":
            assert isinstance(error.value, PeerLags)
        within(SOON, began)


@kinds
def test_a_slow_rank_holds_the_driver_back_and_loses_nothing(kind: str, tmp_path: Path) -> None:
    """More than fits is sent while one rank is held up: the driver waits for it, so memory under way is bounded."""
    gate = Gate(tmp_path)
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        data = os.urandom(1 << 20)
        with ranks.when_full(1, gate.open):
            numbers = [ranks.send(Call("gate", (gate.path, [1])))]
            for _ in range(20):  # 20 MiB: more than a ring, and more than a window
                numbers.append(ranks.send(Call("check", (data,))))
        got = [ranks.link.receive(LIMIT) for _ in range(2 * len(numbers))]
        for rank in range(2):
            mine = [answer for answer in got if answer is not None and answer[0] == rank]
            assert [number for _, number, _ in mine] == numbers
            assert all(isinstance(r, Done) and r.value == [len(data), zlib.crc32(data)] for _, _, r in mine[1:])


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_after_a_lag_between_messages_the_link_goes_on(kind: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with Ranks(kind, 2, send_timeout=0.3) as ranks:
        ranks.ask("echo", 0)
        numbers = [ranks.send(Call("gate", (gate.path, [1])))]
        with pytest.raises(PeerLags) as error:
            for i in range(100_000):
                numbers.append(ranks.send(Call("echo", (i,))))
        assert error.value.ranks == (1,)
        gate.open()
        numbers.append(ranks.send(Call("echo", (-1,))))
        got = [ranks.link.receive(LIMIT) for _ in range(2 * len(numbers))]
        for rank in range(2):
            assert [answer[1] for answer in got if answer is not None and answer[0] == rank] == numbers


# -- loss


@kinds
def test_a_lost_command_is_noticed_by_the_rank(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        lose(*ranks.part(1))
        ranks.send(Call("echo", (1,)))
        assert ranks.processes[1].wait(LIMIT) == ENDED[MessageLost]


@kinds
def test_a_lost_reply_is_noticed_by_the_driver(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        ranks.send(Call("lose"))
        ranks.send(Call("echo", (1,)))
        with pytest.raises(MessageLost, match=r"rank [01] lost"):
            ranks.link.receive(LIMIT)


# -- who may join


def forged(address: ShmAddress | TcpAddress) -> list[ShmAddress | TcpAddress]:
    """What somebody might try who was not invited to a link."""
    if isinstance(address, ShmAddress):
        memory = address.memory
        other = Shared(memory.pid, memory.fd, memory.inode + 1)
        with open(os.devnull) as file:
            foreign = ShmAddress(Shared.of(file.fileno()), 0)
            return [ShmAddress(other, address.rank), ShmAddress(memory, 99), ShmAddress(memory, address.rank), foreign]
    own = Invitation.decode(address.invitation)
    stranger = Keys.generate(1).ranks[0]
    return [TcpAddress(msgspec.structs.replace(own, pair=stranger).encode())]


@kinds
def test_a_stranger_is_refused(kind: str) -> None:
    """Wrong keys, somebody else's memory, a place that is taken."""
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        for rank in range(2):
            for address in forged(ranks.link.address_of(rank)):
                with pytest.raises((LinkError, ProcessGone)):
                    open_port(address)
        assert ranks.ask("echo", 1) == {0: 1, 1: 1}


# -- death, stopping, the end of an epoch


@kinds
def test_a_killed_rank_is_named_at_once(kind: str) -> None:
    with Ranks(kind, 4) as ranks:
        ranks.ask("echo", 0)
        for victim in (2, 3):  # of joined: one of each part
            number = ranks.send(Call("die", ([victim],)))
            answered = set()
            with pytest.raises(ConnectionLost) as error:
                assert ranks.processes[victim].wait(LIMIT) == -signal.SIGKILL
                began = time.monotonic()
                while (got := ranks.link.receive(LIMIT)) is not None:
                    answered.add(got[:2])
            within(SOON, began)  # promised: 1 s, on a machine that is not busy
            assert error.value.ranks == (victim,) and f"rank {victim}" in str(error.value)
            assert answered <= {(rank, number) for rank in range(4) if rank != victim}
            if kind != "joined":
                return


def test_what_a_rank_said_before_its_death_is_heard() -> None:
    """Through memory; over TCP what hadn't left the rank's process dies with it."""
    with Ranks("shm", 1) as ranks:
        number = ranks.send(Call("echo", ("last words",)))
        ranks.send(Call("die", ([0],)))
        assert ranks.processes[0].wait(LIMIT) == -signal.SIGKILL
        assert ranks.link.receive(LIMIT) == (0, number, Done(0, "last words"))
        with pytest.raises(ConnectionLost):
            ranks.link.receive(LIMIT)


@kinds
def test_a_rank_killed_while_the_driver_sends_a_large_message(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        ranks.stop(1)
        with ranks.when_full(1, ranks.processes[1].kill), pytest.raises(ConnectionLost) as error:
            ranks.send(Call("check", (bytes(64 << 20),)))
            while ranks.link.receive(LIMIT):  # of those that live
                pass
        assert error.value.ranks == (1,)
        with pytest.raises(LinkError):  # half a message is under way: nothing may follow it
            ranks.send(Call("echo", (1,)))
            ranks.link.receive(LIMIT)


@kinds
def test_a_stopped_rank_goes_on_when_continued(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        ranks.stop(1)
        number = ranks.send(Call("echo", (1,)))
        assert ranks.link.receive(LIMIT) == (0, number, Done(0, 1))
        assert ranks.link.receive(0.3) is None
        ranks.processes[1].send_signal(signal.SIGCONT)
        assert ranks.link.receive(LIMIT) == (1, number, Done(1, 1))


@kinds
def test_ranks_notice_the_drivers_death(kind: str) -> None:
    script = (
        "import os, signal, sys\n"
        "from tests.proc.links import Ranks, start_rank\n"
        f"ranks = Ranks({kind!r}, 2, start_rank)\n"
        "ranks.ask('echo', 0)\n"
        "print(*[p.pid for p in ranks.processes], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    driver = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    pids = [int(pid) for pid in driver.stdout.split()]
    began = time.monotonic()
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=LIMIT)
    assert not alive
    within(SOON, began)


@kinds
def test_fence_ends_every_wait(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        threading.Timer(0.2, ranks.link.fence).start()
        began = time.monotonic()
        with pytest.raises(Fenced):
            ranks.link.receive(None)
        with pytest.raises(Fenced):
            ranks.send(Call("echo", (1,)))
        assert ranks.ended() == [ENDED[Fenced]] * 2
        within(SOON, began)
        ranks.link.fence()


@kinds
def test_fence_ends_a_wait_for_room(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        ranks.stop(1)
        with ranks.when_full(1, ranks.link.fence), pytest.raises(Fenced):
            ranks.send(Call("check", (bytes(64 << 20),)))
            while True:
                ranks.link.receive(LIMIT)


@kinds
def test_close_tells_ranks_and_is_idempotent(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        ranks.ask("echo", 0)
        ranks.link.close()
        ranks.link.close()
        ranks.link.wake()
        ranks.link.fence()
        with pytest.raises(LinkClosed):
            ranks.send(Call("echo", (1,)))
        with pytest.raises(LinkClosed):
            ranks.link.receive(1)
        assert ranks.ended() == [ENDED[LinkClosed]] * 2


def test_a_wake_that_comes_while_another_thread_closes_does_nothing() -> None:
    """As from who sees a process end, while the driver gives the epoch up."""
    shm = ShmLink(1)
    ring = shm._ring_own

    def late() -> None:
        shm._ring_own = ring  # type: ignore[method-assign]
        shm.close()
        ring()

    shm._ring_own = late  # type: ignore[method-assign]
    shm.wake()
    shm.wake()

    tcp, (read, write) = TcpLink(1), os.pipe()
    bell = tcp._end.bell_write
    tcp.close()
    os.dup2(write, bell)  # its descriptor is another's now
    tcp.wake()
    assert not readable(read)
    for fd in (read, write, bell):
        os.close(fd)


# -- nothing left, nothing wasted


@kinds
def test_nothing_is_left_behind(kind: str) -> None:
    with Ranks(kind, 2) as ranks:  # whatever is made once per process exists from here on
        ranks.exit()
    before, shared = descriptors(), segments()
    threads = set(threading.enumerate())
    for _ in range(3):
        with Ranks(kind, 2) as ranks:
            ranks.ask("check", bytes(1 << 20))
            assert segments() <= shared
            ranks.processes[1].kill()
            ranks.processes[1].wait(LIMIT)
    assert descriptors() == before
    assert segments() <= shared
    for thread in set(threading.enumerate()) - threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), thread


@kinds
def test_a_rank_at_rest_costs_nothing(kind: str) -> None:
    with Ranks(kind, 2) as ranks:
        for _ in range(50):
            ranks.ask("echo", 0)
        before, own = ranks.ask("cpu"), time.process_time()
        assert ranks.link.receive(2.0) is None
        used = {rank: seconds - before[rank] for rank, seconds in ranks.ask("cpu").items()}
        used[-1] = time.process_time() - own
        assert all(seconds < 0.1 for seconds in used.values()), used  # with the calls themselves; one that spins has 2
