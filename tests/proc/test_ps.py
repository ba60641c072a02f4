"""`planaria ps` and the titles of processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator

import httpx2
import pytest

from planaria import processes
from planaria.cli import admin, experts, ps, scale
from planaria.errors import PlanariaError, UserError
from planaria.node import process_state
from planaria.processes import read_title, set_title
from tests.proc.servers import SOON, Server, alive, needs_smollm2, planaria, wait_until

pytestmark = needs_smollm2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("smollm2", "--null-worker", "-tp", "2", "-pp", "2") as running:
        yield running


def port_of(server: Server) -> str:
    return server.url.rpartition(":")[2]


def test_every_process_is_listed(server: Server) -> None:
    run = planaria("ps", "--port", port_of(server), "--json")
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert [(row["role"], row["rank"], row["coordinates"]) for row in rows] == [
        ("server", None, {}),
        ("engine", None, {}),
        ("worker", 0, {"tp": 0, "pp": 0}),
        ("worker", 1, {"tp": 1, "pp": 0}),
        ("worker", 2, {"tp": 0, "pp": 1}),
        ("worker", 3, {"tp": 1, "pp": 1}),
    ]
    assert rows[0]["pid"] == server.pid and rows[1]["pid"] == server.engine_pid()
    assert all(alive(row["pid"]) and row["resident"] > 10 << 20 and row["node"] == socket.gethostname() for row in rows)
    assert {row["epoch"] for row in rows[1:]} == {0}
    assert {(row["model"], row["kind"]) for row in rows} == {("smollm2", "mp on cpu")}
    assert [row["engine"] for row in rows] == [None, 0, 0, 0, 0, 0]
    assert all(0 <= row["uptime"] < 3600 for row in rows) and rows[0]["uptime"] >= rows[-1]["uptime"]
    assert [row["state"] for row in rows] == ["ready", "idle", "idle", "idle", "idle", "idle"]
    assert {row["port"] for row in rows} == {int(port_of(server))}


def test_it_finds_the_servers_of_this_machine_by_itself(server: Server) -> None:
    run = planaria("ps", "--json")
    assert run.returncode == 0, run.stderr
    assert server.pid in [row["pid"] for row in json.loads(run.stdout)]


def test_people_get_a_table(server: Server) -> None:
    run = planaria("ps", "--port", port_of(server))
    lines = [line.split() for line in run.stdout.splitlines()]
    assert lines[0][:6] == [f"127.0.0.1:{port_of(server)}", "smollm2", "mp", "on", "cpu", "up"] and len(lines) == 8
    assert lines[1][:6] == ["PORT", "ROLE", "ENGINE", "RANK", "COORDINATES", "PID"]
    assert lines[5][:6] == [port_of(server), "worker", "0", "1", "tp=1", "pp=0"] and lines[5][-1] == "MiB"


def test_titles_can_be_read_in_ps(server: Server) -> None:
    rows = json.loads(planaria("ps", "--port", port_of(server), "--json").stdout)
    pids = ",".join(str(row["pid"]) for row in rows)
    shown = subprocess.run(["ps", "-o", "args=", "-p", pids], capture_output=True, text=True, check=True)
    titles = sorted(shown.stdout.splitlines())
    assert titles[0].startswith("planaria: engine server=")
    assert titles[1].startswith(f"planaria: server port={port_of(server)} host=127.0.0.1 scheme=http model=smollm2")
    assert [title.strip() for title in titles[2:]] == [
        f"planaria: worker rank={rank} tp={rank % 2} pp={rank // 2} epoch=0" for rank in range(4)
    ]


def test_a_stopped_engine_does_not_hold_it_up() -> None:
    with Server("smollm2", "--null-worker") as server:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        wait_until("it is stopped", lambda: process_state(engine) == "T")
        rows = httpx2.get(server.url + "/admin/processes", timeout=10).json()["processes"]
        assert [(row["role"], row["pid"], row["state"]) for row in rows] == [
            ("server", server.pid, "ready"), ("engine", engine, "stopped"),
        ]  # fmt: skip

        def idle() -> bool:
            rows = json.loads(planaria("ps", "--port", port_of(server), "--json").stdout)
            assert rows[1]["role"] == "engine"
            another = rows[1]["pid"] != engine
            return another and rows[1]["state"] == "idle" and rows[1]["coordinates"] == {"tp": 0, "pp": 0}

        wait_until("another is in its place", lambda: not alive(engine))
        wait_until("it is idle", idle)


def test_the_admin_key_is_needed_where_there_is_one() -> None:
    with Server("smollm2", "--null-worker", "--admin-key", "sesame") as server:
        run = planaria("ps", "--port", port_of(server))
        assert run.returncode == 1 and "wants its admin key: give --admin-key" in run.stderr
        run = planaria("ps", "--port", port_of(server), "--admin-key", "other")
        assert run.returncode == 1 and "does not take the admin key that was given" in run.stderr
        run = planaria("ps", "--port", port_of(server), "--admin-key", "sesame")
        assert run.returncode == 0 and "engine" in run.stdout
        run = planaria("ps", "--port", port_of(server), env={"PLANARIA_ADMIN_KEY": "sesame"})
        assert run.returncode == 0 and "engine" in run.stdout
        assert "sesame" not in "".join(server.log)
    with Server("smollm2", "--null-worker", "--api-key", "sesame") as server:
        run = planaria("ps", "--port", port_of(server), "--admin-key", "sesame")
        assert run.returncode == 1 and "has no admin key" in run.stderr and "start it with --admin-key" in run.stderr


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "titled_processes", lambda: iter([(1, "worker", {"rank": "0"}), (2, "server", {})]))
    with pytest.raises(PlanariaError, match=r"^no Planaria server of yours runs on this machine: give --url$"):
        ps.run(port=None, url=None, admin_key=None, as_json=False)


@pytest.fixture
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """A stranger that listens on loopback: its port, and what it was told."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = sock.accept()
                    with connection:
                        connection.settimeout(10)
                        heard.append(connection.recv(4096))
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n" + b'{"processes": []}')

        thread = threading.Thread(target=answer)
        thread.start()
        yield str(sock.getsockname()[1]), heard
        sock.shutdown(socket.SHUT_RDWR)
        thread.join(SOON)


def titled(title: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([title, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE)


def test_the_key_goes_to_no_other_users_process(
    listener: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, heard = listener
    with titled(f"planaria: server port={port} host=127.0.0.1 scheme=http") as child:
        wait_until("it has its name", lambda: child.pid in [pid for pid, *_ in processes.titled_processes()])
        user = os.geteuid()
        monkeypatch.setattr(processes.os, "geteuid", lambda: user + 1)
        assert list(processes.titled_processes()) == []
        for ask in (
            lambda: ps.run(port=None, url=None, admin_key="secret", as_json=True),
            lambda: scale.run(None, 1, 1, None, None, None, None, None, 1.0, "secret", True),
            lambda: experts.run(url=None, admin_key="secret", saved=None, plot=None, as_json=True),
        ):
            with pytest.raises(PlanariaError, match="no Planaria server of yours runs"):
                ask()
        child.communicate(b"\n")
    assert not heard


def test_the_key_leaves_the_machine_only_for_an_address_that_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"port": "8000", "host": "192.0.2.1", "scheme": "https"}
    monkeypatch.setattr(admin, "titled_processes", lambda: iter([(1, "server", facts)]))
    monkeypatch.setattr(admin.http.client, "HTTPSConnection", None)
    for ask in (lambda: ps.run(port=None, url=None, admin_key="k", as_json=True), lambda: admin.server_at(None)):
        with pytest.raises(PlanariaError, match=r"not on the loopback.*: give --url https://192\.0\.2\.1:8000$"):
            ask()
    assert admin.server_of("https://192.0.2.1:8000") == admin.AdminAddress(8000, "192.0.2.1", "https")


def test_scale_says_which_server_it_acts_on_and_takes_none_of_several(
    listener: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, heard = listener
    titles = [(1, "server", {"port": port}), (2, "server", {"port": "8000", "scheme": "https", "host": "::1"})]

    def ask() -> None:
        scale.run(None, 1, 1, None, None, None, None, None, 1.0, "secret", True)

    monkeypatch.setattr(admin, "titled_processes", lambda: iter(titles))
    with pytest.raises(UserError, match=rf"--url with one of http://127\.0\.0\.1:{port}, https://\[::1\]:8000$"):
        ask()
    assert not heard
    monkeypatch.setattr(admin, "titled_processes", lambda: iter(titles[:1]))
    with pytest.raises(PlanariaError, match="is not a server of Planaria"):
        ask()
    assert len(heard) == 1 and capsys.readouterr().err == f"the server at http://127.0.0.1:{port}\n"


def test_malformed_titles_are_skipped(listener: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    port, _ = listener
    odd = ["abc", "-1", "0", "65536", "1" * 5000, "\u0663"]
    titles = [("server", {"port": each}) for each in odd] + [("server", {"port": port, "scheme": "file"})]
    titles += [("", {}), ("server", {"port": port})]
    monkeypatch.setattr(admin, "titled_processes", lambda: ((1, *title) for title in titles))
    assert admin.running_servers() == [admin.AdminAddress(int(port))]


def test_one_of_two_servers_does_not_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound, so nobody else's, and not listening
        taken.bind(("127.0.0.1", 0))
        ports = [str(taken.getsockname()[1]), port_of(server)]
        monkeypatch.setattr(admin, "titled_processes", lambda: iter([(1, "server", {"port": port}) for port in ports]))
        ps.run(port=None, url=None, admin_key=None, as_json=True)
    out, err = capsys.readouterr()
    assert {row["port"] for row in json.loads(out)} == {int(ports[1])}
    assert err.startswith(f"planaria: no server answers at 127.0.0.1 port {ports[0]}")


def test_nobody_or_somebody_else_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        run = planaria("ps", "--port", str(port))
        assert run.returncode == 1 and len(run.stderr.strip().splitlines()) == 1
        assert f"no server answers at 127.0.0.1 port {port}" in run.stderr


@pytest.mark.parametrize(
    ("title", "read"),
    [
        ("planaria: worker rank=1 tp=1 pp=0 epoch=2", ("worker", {"rank": "1", "tp": "1", "pp": "0", "epoch": "2"})),
        ("planaria: server", ("server", {})),
        ("planaria: ", ("", {})),
        ("planaria serve smollm2", None),
        ("vim planaria: notes", None),
    ],
)
def test_titles(title: str, read: tuple[str, dict[str, str]] | None) -> None:
    assert read_title(title) == read


def test_a_killed_servers_processes_are_gone() -> None:
    """The title doesn't hide a process from the rule that nothing is left behind."""
    with Server("smollm2", "--null-worker", "--distributed-executor-backend", "mp") as server:
        pids = [row["pid"] for row in json.loads(planaria("ps", "--port", port_of(server), "--json").stdout)]
        assert len(pids) == 3
        server.process.kill()
        wait_until("all processes are gone", lambda: not any(alive(pid) for pid in pids), limit=SOON)


def test_a_title_while_ray_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread: its module is there, and empty."""
    import setproctitle

    named: list[str] = []
    monkeypatch.setattr(setproctitle, "setproctitle", named.append)
    monkeypatch.setitem(sys.modules, "ray._raylet", types.ModuleType("ray._raylet"))
    set_title("server", port=1)
    assert named == ["planaria: server port=1"]
