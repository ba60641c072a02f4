"""`planaria ps`: the processes of the servers that run on this machine, as each of them says."""

from __future__ import annotations

import sys
from typing import Any

from rich.table import Table

from planaria.cli.admin import AdminAddress, local_servers, running_servers, server_of
from planaria.cli.look import show_table, write_json
from planaria.errors import PlanariaError


def run(port: int | None, url: str | None, admin_key: str | None, as_json: bool) -> None:
    """Raises PlanariaError when there is no server, or none that answers; of several, one that doesn't is named."""
    if url is not None:
        servers = [server_of(url)]
    elif port is not None:
        servers = [server for server in running_servers() if server.local and server.port == port]
        servers = servers or [AdminAddress(port)]
    else:
        servers = local_servers()
    rows: list[dict[str, Any]] = []
    failures: list[PlanariaError] = []
    for server in servers:
        try:
            found = server.get("/admin/processes", admin_key, dict[str, list[dict[str, Any]]])[1]
            rows += [{"port": server.port, **process} for process in found["processes"]]
        except PlanariaError as e:
            failures.append(e)
        except KeyError:
            failures.append(server.not_planaria(200))
    if not rows:
        raise failures[0]
    for failure in failures:
        print(f"planaria: {failure}", file=sys.stderr)
    if as_json:
        write_json(rows)
        return
    table = Table("PORT", "ROLE", "RANK", "COORDINATES", "PID", "NODE", "EPOCH", "STATE", "RESIDENT", box=None)
    for row in rows:
        table.add_row(
            str(row["port"]), row["role"], _text(row["rank"]),
            " ".join(f"{axis}={number}" for axis, number in row["coordinates"].items()) or "-",
            str(row["pid"]), row["node"], _text(row["epoch"]), row["state"], f"{row['resident'] / 2**20:,.0f} MiB",
        )  # fmt: skip
    show_table(table)


def _text(number: int | None) -> str:
    return "-" if number is None else str(number)
