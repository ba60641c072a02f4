"""`planaria scale`: another number of engines behind a running server, or of lanes of its one engine, or another layout
of each, while it serves."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from planaria.cli.look import console
from planaria.cli.ps import call, not_planaria, running_servers
from planaria.errors import ConfigError, PlanariaError, UserError

LOOK = 0.25  # seconds between looks at how far it is
LONGEST = 3600.0  # seconds for the engines to come up, beside the time that requests get


def run(
    *, size: int, url: str | None, id: str | None, drain_timeout: float, key: str | None, as_json: bool
) -> None:  # fmt: skip
    """Have `size` engines or lanes. Returns when it is committed. Raises UserError when it is refused, PlanariaError
    when it was rolled back."""
    server = server_at(url)
    id = id or uuid.uuid4().hex[:8]
    answer: list[tuple[int, bytes] | PlanariaError] = []
    body = {"new_data_parallel_size": size, "drain_timeout": drain_timeout, "id": id}

    def ask() -> None:
        try:
            answer.append(call(server, "POST", "/scale_elastic_ep", key, body, timeout=LONGEST + drain_timeout))
        except PlanariaError as e:
            answer.append(e)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    phase = ""
    while asking.is_alive():
        asking.join(LOOK)
        now = _phase(server, key, id) if asking.is_alive() and not as_json and console.is_terminal else ""
        if now and now != phase:
            console.print(f"{now} ...")
            phase = now
    (came,) = answer
    if isinstance(came, PlanariaError):
        raise came
    _show(server, *came, _resized, as_json)


def run_layout(*, tp: int, pp: int, url: str | None, key: str | None, as_json: bool) -> None:
    """Have every engine's ranks in another layout. Raises UserError when that can't be had."""
    server = server_at(url)
    body = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    _show(server, *call(server, "POST", "/admin/layout", key, body, timeout=LONGEST), _reshaped, as_json)


def _show(
    server: dict[str, str], status: int, content: bytes, line_of: Callable[[dict[str, Any]], str], as_json: bool
) -> None:
    try:
        value: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        if status != 200:
            raise (PlanariaError if status >= 500 else UserError)(value["error"]["message"])
        line = line_of(value)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError):
        raise not_planaria(server, status) from None
    sys.stdout.write((content.decode() if as_json else line) + "\n")


def _reshaped(value: dict[str, Any]) -> str:
    return "; ".join(f"engine {e['engine']}: {e['layout']} after {e['seconds']:.2f} s" for e in value["engines"])


def _resized(value: dict[str, Any]) -> str:
    return (
        f"{value['before']} -> {value['after']} {value['unit']}s, {value['state']} (id {value['id']}): "
        + (", ".join(f"{name} {seconds:.2f} s" for name, seconds in value["phases"].items()) or "no change")
        + (f"; {value['moved']} requests moved" if value["moved"] else "")
    )


def server_at(url: str | None) -> dict[str, str]:
    """The server at `url`, or the only one that runs here."""
    if url is not None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (KeyError, ValueError):
            raise ConfigError("--url", url, "is not the address of a server", "write http://host:port") from None
        return {"host": parts.hostname or "127.0.0.1", "port": str(port), "scheme": parts.scheme}
    servers = running_servers()
    if not servers:
        raise PlanariaError("no Planaria server runs on this machine: give --url")
    if len(servers) > 1:
        ports = ", ".join(server["port"] for server in servers)
        raise UserError(f"several servers run on this machine (ports {ports}): give --url http://127.0.0.1:PORT")
    return servers[0]


def _phase(server: dict[str, str], key: str | None, id: str) -> str:
    """What a resize is about."""
    try:
        status, content = call(server, "GET", "/admin/fleet", key)
        found = msgspec.json.decode(content)["resizes"] if status == 200 else []
        return next((str(resize["phase"]) for resize in found if resize["id"] == id), "")
    except (PlanariaError, msgspec.DecodeError, KeyError, TypeError):
        return ""
