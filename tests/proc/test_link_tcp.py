"""What strangers and broken ranks can send to a TCP link: it is dropped and counted, and serving goes on."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from planaria.executor.link.address import TcpAddress
from planaria.executor.link.codec import answer
from planaria.executor.link.faults import DRIVER, ConnectionLost, Fenced, LinkError
from planaria.executor.link.keys import Invitation, Keys, Pair
from planaria.executor.link.stream import FrameStream, Kind
from planaria.executor.link.tcp import TcpLink
from planaria.executor.link.tcp_port import TcpPort
from planaria.executor.link.tcp_socket import CHUNK_BYTES, WINDOW
from planaria.protocol import Call, Done, Exit, Failed
from tests.proc.link_rank import ENDED
from tests.proc.links import HEARTBEAT, LIMIT, Rank, within
from tests.proc.servers import SOON, wait_until


class Deployment:
    """A link of two ranks: rank 0 is real, rank 1 is ours to misuse."""

    def __init__(self) -> None:
        self.link = TcpLink(2, heartbeat=LIMIT)
        self.process = Rank(0, self.link.address_of(0))
        self.number = 0

    def serves(self) -> None:
        """Rank 0 still answers."""
        self.number += 1
        self.link.send(self.number, Call("echo", (self.number,)))
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            got = self.link.receive(1.0)
            if got == (0, self.number, Done(0, self.number)):
                return
        raise AssertionError("rank 0 no longer answers")

    def counted(self, reason: str, count: int = 1) -> None:
        end = time.monotonic() + LIMIT
        while self.link.refused[reason] < count:
            assert time.monotonic() < end, f"{reason}: {dict(self.link.refused)}"
            assert self.link.receive(0.02) is None

    def port(self) -> str:
        return self.link.address.rpartition(":")[2]


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    deployment = Deployment()
    deployment.serves()
    yield deployment
    deployment.link.close()
    deployment.process.kill()
    deployment.process.wait(LIMIT)


@contextlib.contextmanager
def raw(invitation: Invitation) -> Iterator[zmq.Socket[bytes]]:
    """A socket with a rank's key that sends what it is told to."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, invitation.driver_key.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, invitation.pair.public.encode())
    dealer.setsockopt(zmq.CURVE_SECRETKEY, invitation.pair.secret.encode())
    dealer.connect(invitation.address)
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


def stream() -> FrameStream[object]:
    return FrameStream(0, "the driver", bytes, chunk_bytes=CHUNK_BYTES, window=WINDOW)


def test_a_wrong_key_is_refused(deployment: Deployment) -> None:
    stranger = msgspec.structs.replace(deployment.link.invitation(1), pair=Keys.generate(1).ranks[0])
    with pytest.raises(LinkError, match="refused the key of rank 1"):
        TcpPort(stranger, timeout=LIMIT)
    deployment.counted("unauthenticated")
    assert deployment.link.ranks("connected") == [0]
    deployment.serves()


def test_a_driver_with_another_key_is_not_trusted(deployment: Deployment) -> None:
    deceived = msgspec.structs.replace(deployment.link.invitation(1), driver_key=Keys.generate(0).driver.public)
    with pytest.raises(LinkError, match="another deployment"):
        TcpPort(deceived, timeout=1.0)
    assert deployment.link.ranks("connected") == [0]
    deployment.serves()


def test_no_key_at_all(deployment: Deployment) -> None:
    """A ZeroMQ socket without keys, and a socket that speaks something else."""
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(deployment.link.address)
    plain.send_multipart([stream().header(Kind.HELLO), b""])
    deployment.counted("handshake")
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"", b"\xff" + bytes(8) + b"\x7f" + os.urandom(54)):
        with socket.create_connection(("127.0.0.1", int(deployment.port()))) as stranger:
            stranger.sendall(greeting)
        deployment.serves()
    assert deployment.link.ranks("connected") == [0]
    plain.close()
    context.term()


def test_a_second_connection_with_a_ranks_key(deployment: Deployment) -> None:
    with raw(deployment.link.invitation(0)) as dealer:
        dealer.send_multipart([stream().header(Kind.HELLO), b""])
        deployment.counted("second connection")
        deployment.serves()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_frames_of_a_broken_rank(deployment: Deployment, tmp_path: Path) -> None:
    """Malformed, replayed, oversized, of another epoch, a pickle that would run code: no effect but a count."""
    link, end = deployment.link, stream()
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    with raw(link.invitation(1)) as dealer:
        dealer.send_multipart([b"no header", b""])  # before hello
        deployment.counted("malformed", 1)
        dealer.send_multipart([end.header(Kind.HELLO), b""])
        good = answer(1, Done(1, "good"))
        first = end.data_header(1, len(good))
        dealer.send_multipart([first, good])
        assert link.receive(LIMIT) == (1, 1, Done(1, "good"))

        dealer.send_multipart([first, good])
        deployment.counted("replayed", 1)

        for frames in (
            [b""], [b"", b""], [bomb], [bomb, bomb], [first, good, b"more"], [first[:-1], good],
            [bytes(len(first)), good],
            [first.replace(b"PLN1", b"PLN2"), good], [end.header(Kind.CREDIT), b"payload"],
            [end._header(Kind.DATA, 1, 2, 100), b"shorter"], [end._header(Kind.DATA, 1, 2, 0), b""],
            [end.header(Kind.CREDIT)[:20] + struct.pack("<Q", 2**60) + end.header(Kind.CREDIT)[28:], b""],
        ):  # fmt: skip
            before = link.refused["malformed"]
            dealer.send_multipart(frames)
            deployment.counted("malformed", before + 1)

        dealer.send_multipart([FrameStream(5, "", bytes, chunk_bytes=1, window=1).header(Kind.CREDIT), b""])
        deployment.counted("other epoch")
        dealer.send_multipart([end._header(Kind.DATA, 1, 2, CHUNK_BYTES + 1), bytes(CHUNK_BYTES + 1)])
        deployment.counted("oversized")
        dealer.send_multipart([end._header(Kind.DATA, 1, 2, 2**40), bytes(CHUNK_BYTES)])
        deployment.counted("oversized", 2)

        # In sequence, but not a reply: the command counts as failed, for every command is answered.
        dealer.send_multipart([end.data_header(2, len(bomb)), bomb])
        got = link.receive(LIMIT)
        assert got is not None and isinstance(got[2], Failed) and got[:2] == (1, 2) and "can't read" in got[2].message
        deployment.serves()
    assert not (tmp_path / "ran").exists()


def test_a_frame_beyond_all_measure_ends_the_connection_only(deployment: Deployment) -> None:
    link = deployment.link
    with raw(link.invitation(1)) as dealer:
        dealer.send_multipart([stream().header(Kind.HELLO), b""])
        while link.ranks("connected") != [0, 1]:
            assert link.receive(0.02) is None
        dealer.send_multipart([bytes(64 << 20)])
        end = time.monotonic() + LIMIT
        while link.ranks("lost") != [1]:
            assert time.monotonic() < end
            with contextlib.suppress(LinkError):
                link.receive(0.02)
    assert link.ranks("lost") == [1]


def test_a_rank_refuses_what_isnt_a_command() -> None:
    """The other direction: a driver's end that sends junk."""
    keys = Keys.generate(1)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVTIMEO, round(LIMIT * 1000))
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, keys.driver.secret.encode())
    number = router.bind_to_random_port("tcp://127.0.0.1")
    port = TcpPort(
        Invitation(f"tcp://127.0.0.1:{number}", keys.driver.public, keys.ranks[0], 0, 0, CHUNK_BYTES), timeout=LIMIT
    )
    route, *_ = router.recv_multipart()
    end = stream()
    for frames in ([b"x"], [b"x", b"y"], [bytes(44), b""], [b"x", b"y", b"z"]):
        router.send_multipart([route, *frames])
    junk = b"\xc1 not msgpack"
    router.send_multipart([route, end.data_header(7, len(junk)), junk])
    assert port.receive(1.0) is None
    assert port.refused["malformed"] == 4
    _, _, payload = router.recv_multipart()
    failed = msgspec.msgpack.decode(payload)
    assert failed[0] == "failed" and "not a command" in failed[3]
    port.close()
    router.close()
    context.term()


class Cable:
    """Carries connections from its own port to another until it is cut: then nothing passes, and nobody is told."""

    def __init__(self, to: int) -> None:
        self.to = to
        self.cut = threading.Event()
        self.over = threading.Event()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.server.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.to))
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.cut.is_set():
                    self.over.wait(LIMIT)
                    return
                to.sendall(data)

    def close(self) -> None:
        self.over.set()
        self.server.close()


@pytest.mark.row("X10")
def test_a_cut_cable_and_a_stopped_rank_are_noticed_within_the_heartbeat() -> None:
    """Neither says anything; both ends of the cable learn of it."""
    link = TcpLink(3, heartbeat=HEARTBEAT)
    cable = Cable(int(link.address.rpartition(":")[2]))
    through = msgspec.structs.replace(link.invitation(1), address=f"tcp://127.0.0.1:{cable.port}")
    addresses = [link.address_of(0), TcpAddress(through.encode()), link.address_of(2)]
    processes = [Rank(rank, address) for rank, address in enumerate(addresses)]
    try:
        link.send(1, Call("echo", (1,)))
        assert {link.receive(LIMIT) for _ in range(3)} == {(rank, 1, Done(rank, 1)) for rank in range(3)}
        for rank, act in ((1, cable.cut.set), (2, lambda: processes[2].send_signal(signal.SIGSTOP))):
            act()
            since = time.monotonic()
            with pytest.raises(ConnectionLost) as error:
                link.receive(LIMIT)
            assert error.value.ranks == (rank,)
            within(HEARTBEAT + SOON, since)
            link.forget(rank)
        link.send(2, Call("echo", (2,)), to=0)
        assert link.receive(LIMIT) == (0, 2, Done(0, 2))
        assert processes[1].wait(LIMIT) == ENDED[ConnectionLost]
    finally:
        link.close()
        cable.close()
        for process in processes:
            process.close()


def test_who_does_not_receive_learns_of_a_lost_driver_by_its_pulse() -> None:
    """And a command that comes by the pulse's look is not lost."""
    link = TcpLink(1)
    cable = Cable(int(link.address.rpartition(":")[2]))
    port = TcpPort(msgspec.structs.replace(link.invitation(0), address=f"tcp://127.0.0.1:{cable.port}"))
    try:
        link.send(1, Call("echo", (1,)))
        wait_until("it has said hello", lambda: link.ranks("connected") == [0])
        wait_until("the command is there", lambda: port.beat() or port._heard)
        assert port.receive(0) == (1, Call("echo", (1,)))
        cable.cut.set()
        link.send(2, Call("echo", (2,)))  # what carries it sees that it is cut, and hangs up when it is closed
        cable.close()

        def looked() -> bool:
            try:
                port.beat()
            except ConnectionLost as e:
                return e.ranks == (DRIVER,)
            return False

        wait_until("it is noticed", looked)
    finally:
        cable.close()
        port.close()
        link.close()


def test_who_is_forgotten_while_it_is_there_is_fenced_and_may_come_again() -> None:
    link = TcpLink(1)
    try:
        for number in (1, 2):
            port = TcpPort(link.invitation(0))
            wait_until("it is there", lambda: link.ranks("connected") == [0])
            link.send(number, Exit())
            assert port.receive(LIMIT) == (number, Exit())
            link.forget(0)
            with pytest.raises(Fenced):
                port.receive(LIMIT)
            port.close()
            assert link.ranks("connected") == []
    finally:
        link.close()


@pytest.mark.row("P3")
def test_the_port_is_bound_before_it_is_told() -> None:
    link = TcpLink(1)
    number = int(link.address.rpartition(":")[2])
    assert link.address == f"tcp://127.0.0.1:{number}" and number > 0
    assert TcpLink(1, heartbeat=7.5).invitation(0).heartbeat == 7.5
    with pytest.raises(LinkError, match=f"port {number}"):
        TcpLink(1, port=number)
    with socket.create_connection(("127.0.0.1", number)):
        pass
    link.close()


def test_keys() -> None:
    a, b = Keys.derive(b"s" * 32, 2), Keys.derive(b"s" * 32, 3)
    assert a.driver == b.driver and a.ranks == b.ranks[:2] and len({p.secret for p in (b.driver, *b.ranks)}) == 4
    assert Keys.derive(b"t" * 32, 2).driver != a.driver
    with pytest.raises(LinkError, match="at least 32"):
        Keys.derive(b"short", 1)
    assert all(zmq.curve_public(pair.secret.encode()) == pair.public.encode() for pair in (a.driver, *a.ranks))
    assert a.driver.secret not in repr(a) and isinstance(a.driver, Pair)
    with pytest.raises(LinkError, match="not an invitation"):
        Invitation.decode(b"\xff")
