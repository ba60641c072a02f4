"""Where a running deployment listens, and what comes of bytes that nobody should send it. See docs/security.md."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
import zmq

from planaria.executor import node_messages
from planaria.executor.link.keys import Invitation, Keys, Pair
from planaria.executor.link.stream import FrameStream, Kind
from planaria.executor.link.tcp_socket import CHUNK_BYTES, WINDOW
from tests.proc.servers import TINY, Server, wait_until
from tests.proc.sockets import Listener, free_port, listeners, tree
from tests.proc.test_nodes import SECRET, Command, two_networks

__all__ = ["two_networks"]  # a fixture

ENV = {"PLANARIA_SECRET": SECRET.decode()}
NAMED = [*TINY, "--served-model-name", "m"]


def all_listeners(*pids: int) -> list[Listener]:
    found = [listener for pid in pids for process in tree(pid) for listener in listeners(process)]
    assert found, "nothing listens: the search finds nothing"
    return found


def of_network(found: list[Listener]) -> list[Listener]:
    return [listener for listener in found if listener.kind != "unix"]


def check_unix(found: list[Listener]) -> None:
    """No abstract names, which everybody may connect to; files only where nobody else gets in."""
    for listener in found:
        if listener.kind == "unix" and listener.address:
            assert not listener.address.startswith("@"), listener
            folder = Path(listener.address).parent  # may be gone: then nobody can connect at all
            if folder.exists():
                assert not stat.S_IMODE(folder.stat().st_mode) & 0o077 and folder.stat().st_uid == os.getuid(), listener


def tokens(server: Server) -> str:
    """A greedy answer: the same before and after."""
    request = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = httpx2.post(server.url + "/v1/completions", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["token_ids"])


# -- where it listens


def test_one_node_listens_at_one_port_of_loopback(small: Path) -> None:
    with Server(str(small), *NAMED, "-tp", "2") as server:
        tokens(server)
        found = all_listeners(server.pid)
        assert len(tree(server.pid)) >= 4  # server, engine, two ranks
        (http,) = of_network(found)
        assert http[:1] + http[2:] == (server.pid, "tcp", "127.0.0.1", httpx2.URL(server.url).port)
        check_unix(found)


def test_nodes_listen_on_their_own_addresses_only(
    small: Path, two_networks: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Tensor ranks on two nodes, each with a network of its own: commands over TCP, gloo between the ranks."""
    (tmp_path / "secret").write_bytes(SECRET)
    args = ["serve", str(small), *NAMED, "-tp", "2", "--nnodes", "2", "--master-addr", "10.93.0.1", "--port", "8000"]
    args += ["--secret-file", str(tmp_path / "secret")]
    with (
        Command(*args, "--node-rank", "1", prefix=two_networks[1]) as other,
        Command(*args, prefix=two_networks[0]) as head,
    ):
        head.wait_for(" at http", 240)
        first, second = of_network(all_listeners(head.process.pid)), of_network(all_listeners(other.process.pid))
        assert {(found.kind, found.address) for found in first} == {("tcp", "127.0.0.1"), ("tcp", "10.93.0.1")}
        assert [found.port for found in first if found.address == "127.0.0.1"] == [8000]
        # node 0: for agents, for ranks elsewhere, the groups' store, one group; node 1: one group
        assert sorted(found.port for found in first if found.port < 30_000) == [8000, 29_501]
        assert len(first) == 5, first
        assert [found[2:4] for found in second] == [("tcp", "10.93.0.2")], second


# -- what it makes of strangers


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


class Deployment:
    """Two nodes on this machine, so that all that can listen does, at loopback."""

    def __init__(self, model: Path) -> None:
        self.port = free_port()
        args = [str(model), *NAMED, "-tp", "2", "--disable-custom-all-reduce"]
        args += ["--nnodes", "2", "--master-port", str(self.port)]
        self.agent = Command("serve", *args, "--node-rank", "1", env=ENV)
        self.server = Server(*args, env=ENV)

    def listeners(self) -> list[Listener]:
        return all_listeners(self.server.pid, self.agent.process.pid)

    def log(self) -> str:
        return "".join(self.server.log)

    def close(self) -> None:
        self.server.close()
        self.agent.__exit__()


@pytest.fixture(scope="module")
def deployment(small: Path) -> Iterator[Deployment]:
    made = Deployment(small)
    try:
        made.server.wait_ready()
        yield made
    finally:
        made.close()


def test_two_nodes_at_loopback_listen_there_only(deployment: Deployment) -> None:
    found = deployment.listeners()
    assert {(one.kind, one.address) for one in of_network(found)} == {("tcp", "127.0.0.1")}
    ports = [one.port for one in of_network(found)]
    # HTTP, agents, the groups' store, a group on either rank
    assert len(ports) == 5 and deployment.port in ports and httpx2.URL(deployment.server.url).port in ports, found
    check_unix(found)


def test_bytes_of_strangers_do_nothing_at_any_port(deployment: Deployment, tmp_path: Path) -> None:
    """A pickle that would make a folder, noise, the beginnings of protocols: at every port, held open and hung up."""
    before = tokens(deployment.server)
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    pids = {process for pid in (deployment.server.pid, deployment.agent.process.pid) for process in tree(pid)}
    with contextlib.ExitStack() as held:
        for listener in of_network(deployment.listeners()):
            for data in (
                bomb, len(bomb).to_bytes(4, "little") + bomb, len(bomb).to_bytes(8, "big") + bomb, b"",
                os.urandom(4096), b"\xff" * 64, bytes(64), b"GET /" + bomb,
                b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48) + bomb,
            ):  # fmt: skip
                stranger = held.enter_context(socket.create_connection((listener.address, listener.port)))
                stranger.sendall(data)
                if len(data) % 2:
                    stranger.close()
            assert tokens(deployment.server) == before
    assert tokens(deployment.server) == before
    assert not (tmp_path / "ran").exists()
    assert all(psutil.pid_exists(pid) for pid in pids)


@contextlib.contextmanager
def dealer(port: int, driver_key: str = "", pair: Pair | None = None) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    found = context.socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    if pair is not None:
        found.setsockopt(zmq.CURVE_SERVERKEY, driver_key.encode())
        found.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        found.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    found.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield found
    finally:
        found.close()
        context.term()


def test_frames_at_the_tcp_links_port_are_dropped_and_counted(deployment: Deployment, tmp_path: Path) -> None:
    """Without keys, with a stranger's, and with a node's own: none is unpickled, all are counted, serving goes on."""
    before = tokens(deployment.server)
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    keys = Keys.derive(SECRET, 1, node_messages.PURPOSE)
    stream: FrameStream[bytes] = FrameStream(0, "", bytes, chunk_bytes=CHUNK_BYTES, window=WINDOW)
    frames = [
        [bomb], [bomb, bomb], [stream.header(Kind.HELLO), bomb], [stream._header(Kind.DATA, 0, 1, len(bomb)), bomb],
        [stream.header(Kind.HELLO), b""], [bytes(64), bytes(1 << 20)],
    ]  # fmt: skip
    for reason, driver_key, pair in (
        ("handshake", "", None),
        ("unauthenticated", keys.driver.public, Keys.generate(1).ranks[0]),
        ("second connection", keys.driver.public, keys.ranks[0]),
    ):
        with dealer(deployment.port, driver_key, pair) as end:
            for parts in frames:
                end.send_multipart(parts)
            wait_until(f"{reason} is counted", lambda: f"({reason})" in deployment.log())  # noqa: B023
            assert tokens(deployment.server) == before
    assert not (tmp_path / "ran").exists()


def test_admin_routes_are_for_this_machine_unless_there_is_a_key(deployment: Deployment) -> None:
    routes = deployment.server.url + "/admin/processes"
    assert httpx2.get(routes).status_code == 200
    for header in ("x-forwarded-for", "origin", "forwarded"):  # somebody else's request, passed on by this machine
        assert httpx2.get(routes, headers={header: "http://elsewhere"}).status_code in (401, 403)


def test_an_invitation_and_keys_show_no_secret() -> None:
    keys = Keys.generate(1)
    invitation = Invitation("tcp://10.0.0.1:1", keys.driver.public, keys.ranks[0], 0, 0, 1)
    assert keys.driver.secret not in repr(keys) and keys.ranks[0].secret not in f"{invitation} {keys}"
