"""`planaria scale`: another number of engines behind a running server, or of lanes of its one engine, or another layout
of each, while it serves."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec

from planaria.cli.admin import AdminAddress, server_at
from planaria.cli.look import console
from planaria.errors import ConfigError, PlanariaError, UserError

LOOK = 0.25  # seconds between looks at how far it is
LONGEST = 3600.0  # seconds for the engines to come up, beside the time that requests get


def run(
    dp: int | None, tp: int | None, pp: int | None, prefill: int | None, decode: int | None, url: str | None,
    model: str | None, id: str | None, drain_timeout: float, admin_key: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Have `dp` engines or lanes, or so many of two kinds, or every engine's ranks in another layout. Returns when it
    is committed. Raises UserError when it is refused, PlanariaError when it was rolled back."""
    layout = tp is not None or pp is not None
    if prefill is not None or decode is not None:
        if prefill is None or decode is None:
            given, other = ("--prefill", "--decode") if decode is None else ("--decode", "--prefill")
            raise ConfigError(given, prefill or decode, "is one of two kinds", f"give {other}, too")
        if dp is not None:
            raise ConfigError("--dp", dp, "is the number of engines, and so are --prefill and --decode", "leave it out")
        dp = prefill + decode
    if not layout and dp is None:
        raise ConfigError("--dp", "''", "nothing to change was given", "give --dp, or --tp and --pp")
    if layout and dp is not None:
        raise ConfigError("--dp", dp, "and a layout (--tp, --pp) are two changes", "give one of them at a time")
    server = server_at(url)
    if url is None:
        console.print(f"the server at {server.url}", soft_wrap=True)
    of = "" if model is None else f"?model={quote(model, safe='')}"
    if not layout:
        _resize(server, of, dp or 0, prefill, id or uuid.uuid4().hex[:8], drain_timeout, admin_key, as_json)
        return
    degrees = (1 if degree is None else degree for degree in (tp, pp))
    body = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), degrees, strict=True))
    _show(server, *server.call("POST", f"/admin/layout{of}", admin_key, body, timeout=LONGEST), _layouts, as_json)


def _resize(
    server: AdminAddress, of: str, size: int, prefill: int | None, id: str, drain_timeout: float, key: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    answer: list[tuple[int, bytes] | PlanariaError] = []
    body: dict[str, object] = {"new_data_parallel_size": size, "drain_timeout": drain_timeout, "id": id}
    body |= {"prefill": prefill} if prefill is not None else {}

    def ask() -> None:
        try:
            answer.append(server.call("POST", f"/scale_elastic_ep{of}", key, body, timeout=LONGEST + drain_timeout))
        except PlanariaError as e:
            answer.append(e)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    phase = ""
    while asking.is_alive():
        asking.join(LOOK)
        now = _phase(server, of, key, id) if asking.is_alive() and not as_json and console.is_terminal else ""
        if now and now != phase:
            console.print(f"{now} ...")
            phase = now
    (came,) = answer
    if isinstance(came, PlanariaError):
        raise came
    _show(server, *came, _resized, as_json)


def _show(
    server: AdminAddress, status: int, content: bytes, line_of: Callable[[dict[str, Any]], str], as_json: bool
) -> None:
    try:
        value: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        if status != 200:
            raise (PlanariaError if status >= 500 else UserError)(value["error"]["message"])
        line = line_of(value)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError):
        raise server.not_planaria(status) from None
    sys.stdout.write((content.decode() if as_json else line) + "\n")


def _layouts(value: dict[str, Any]) -> str:
    return "; ".join(f"engine {e['engine']}: {e['layout']} after {e['seconds']:.2f} s" for e in value["engines"])


def _resized(value: dict[str, Any]) -> str:
    return (
        f"{value['before']} -> {value['after']} {value['unit']}s, {value['state']} (id {value['id']}): "
        + (", ".join(f"{name} {seconds:.2f} s" for name, seconds in value["phases"].items()) or "no change")
        + (f"; {value['moved']} requests moved" if value["moved"] else "")
    )


def _phase(server: AdminAddress, of: str, key: str | None, id: str) -> str:
    """What a resize is about."""
    try:
        found = server.get(f"/admin/fleet{of}", key, dict[str, Any])[1]["resizes"]
        return next((str(resize["phase"]) for resize in found if resize["id"] == id), "")
    except (PlanariaError, KeyError, TypeError):
        return ""
