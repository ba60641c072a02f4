"""Options that are written as JSON. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.errors import ConfigError

SHOWN = 200  # characters of what can't be read, in an error
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


def json_option(flag: str, given: object, kind: Any, example: str = "") -> Any:
    """An option that is JSON, or what that says, as a `kind`. example: how it is written. Raises ConfigError."""
    try:
        return msgspec.convert(msgspec.json.decode(given) if isinstance(given, str) else given, kind)
    except UNREADABLE as e:
        fields = getattr(kind, "__struct_fields__", ())
        fix = "; ".join(part for part in (example, f"fields: {', '.join(fields)}" if fields else "") if part)
        shown = repr(given) if len(repr(given)) <= SHOWN else repr(given)[:SHOWN] + "..."
        raise ConfigError(flag, shown, f"can't be read: {e}", fix or "give a JSON object") from None
