"""`planaria ps`: the processes of the servers that run on this machine, as each of them says."""

from __future__ import annotations

import sys

import msgspec
from rich.table import Table

from planaria.cli.admin import AdminAddress, local_servers, running_servers, server_of
from planaria.cli.look import show_table, write_json
from planaria.errors import PlanariaError
from planaria.wire import ProcessInfo


class Listing(msgspec.Struct):
    """What a server says."""

    processes: list[ProcessInfo]
    model: str = ""
    kind: str = ""


def run(port: int | None, url: str | None, admin_key: str | None, as_json: bool) -> None:
    """Raises PlanariaError when there is no server, or none that answers; of several, one that doesn't is named."""
    if url is not None:
        servers = [server_of(url)]
    elif port is not None:
        servers = [server for server in running_servers() if server.local and server.port == port]
        servers = servers or [AdminAddress(port)]
    else:
        servers = local_servers()
    found: list[tuple[AdminAddress, Listing]] = []
    failures: list[PlanariaError] = []
    for server in servers:
        try:
            found.append((server, server.get("/admin/processes", admin_key, Listing)[1]))
        except PlanariaError as e:
            failures.append(e)
    if not found:
        raise failures[0]
    for failure in failures:
        print(f"planaria: {failure}", file=sys.stderr)
    if as_json:
        write_json([
            {"port": server.port, **msgspec.structs.asdict(row), "model": row.model or said.model,
             "kind": row.kind or said.kind}
            for server, said in found for row in said.processes
        ])  # fmt: skip
        return
    for server, said in found:
        show_table(_table(server, said))


def _table(server: AdminAddress, said: Listing) -> Table:
    up = _time(next((row.uptime for row in said.processes if row.role == "server"), None))
    heading = f"{server.host}:{server.port}  {said.model}  {said.kind or 'not ready'}  up {up}"
    several = any(row.model for row in said.processes)
    columns = ("ENGINE", "RANK", "COORDINATES", "PID", "NODE", "EPOCH", "STATE", "UPTIME", "RESIDENT")
    first = ("PORT", "ROLE", "MODEL") if several else ("PORT", "ROLE")
    table = Table(*first, *columns, title=heading, title_justify="left", title_style="bold", box=None)
    for row in said.processes:
        table.add_row(
            str(server.port), f"{row.role} ({row.kind})" if row.kind else row.role,
            *([row.model or "-"] if several else []), _text(row.engine), _text(row.rank),
            " ".join(f"{axis}={number}" for axis, number in row.coordinates.items()) or "-", str(row.pid), row.node,
            _text(row.epoch), row.state, _time(row.uptime), f"{row.resident / 2**20:,.0f} MiB",
        )  # fmt: skip
    return table


def _text(number: int | None) -> str:
    return "-" if number is None else str(number)


def _time(seconds: float | None) -> str:
    """75 -> 1 min"""
    if seconds is None:
        return "-"
    for unit, size, next_unit in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 86400)):
        if seconds < next_unit:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"
