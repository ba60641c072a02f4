"""`planaria ps`: the processes of the servers that run on this machine, as each of them says."""

from __future__ import annotations

import http.client
import ssl
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from planaria.errors import PlanariaError
from planaria.processes import titled_processes

TIMEOUT = 10.0  # seconds a server gets to answer; it gives its engine 2
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def running_servers() -> list[dict[str, str]]:
    """host, port and scheme of every server of this machine, by their processes' titles."""
    if sys.platform != "linux":
        return []
    return [facts for _, role, facts in titled_processes() if role == "server" and "port" in facts]


def call(
    server: dict[str, str], method: str, path: str, key: str | None, body: dict[str, Any] | None = None,
    timeout: float = TIMEOUT,
) -> tuple[int, bytes]:  # fmt: skip
    """Status and body of a server's answer on an admin route. Raises PlanariaError when none comes, or no key does."""
    host, port = server.get("host", "127.0.0.1"), int(server["port"])
    host = _LOCAL.get(host, host)
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    if server.get("scheme") == "https":
        context = ssl.create_default_context()
        if host in ("127.0.0.1", "::1"):  # its certificate has another name, and nobody is in between
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request(method, path, msgspec.json.encode(body) if body is not None else None, headers)
        answer = connection.getresponse()
        status, body_of_answer = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as e:
        raise PlanariaError(f"no server answers at {host} port {port}: {e}") from None
    finally:
        connection.close()
    if status in (401, 403):
        raise PlanariaError(f"the server at {host} port {port} wants its admin key: give --admin-key")
    return status, body_of_answer


def not_planaria(server: dict[str, str], status: int) -> PlanariaError:
    """For an answer of an unknown shape."""
    where = f"{server.get('host', '127.0.0.1')} port {server['port']}"
    return PlanariaError(f"what answers at {where} is not a server of Planaria (status {status})")


def ask(server: dict[str, str], key: str | None) -> list[dict[str, Any]]:
    """The server's processes. Raises PlanariaError."""
    status, body = call(server, "GET", "/admin/processes", key)
    try:
        if status == 200:
            return msgspec.json.decode(body, type=dict[str, list[dict[str, Any]]])["processes"]
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
        pass
    raise not_planaria(server, status)


def run(*, port: int | None, key: str | None, as_json: bool) -> None:
    """Raises PlanariaError when there is no server, or none that answers; of several, one that doesn't is named."""
    servers = running_servers()
    if port is not None:
        servers = [server for server in servers if server["port"] == str(port)] or [{"port": str(port)}]
    if not servers:
        raise PlanariaError("no Planaria server runs on this machine")
    rows: list[dict[str, Any]] = []
    failures: list[PlanariaError] = []
    for server in servers:
        try:
            rows += [{"port": int(server["port"]), **process} for process in ask(server, key)]
        except PlanariaError as e:
            failures.append(e)
    if not rows:
        raise failures[0]
    for failure in failures:
        print(f"planaria: {failure}", file=sys.stderr)
    if as_json:
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
        return
    table = Table("PORT", "ROLE", "RANK", "COORDINATES", "PID", "NODE", "EPOCH", "STATE", "RESIDENT", box=None)
    for row in rows:
        table.add_row(
            str(row["port"]), row["role"], _text(row["rank"]),
            " ".join(f"{axis}={number}" for axis, number in row["coordinates"].items()) or "-",
            str(row["pid"]), row["node"], _text(row["epoch"]), row["state"], f"{row['resident'] / 2**20:,.0f} MiB",
        )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def _text(number: int | None) -> str:
    return "-" if number is None else str(number)
