"""Reading config.json: every field is checked when it is read, and a refusal names the field. No torch.

Rule: a value that would crash or give wrong numbers later is a ModelError here.
"""

from __future__ import annotations

from typing import Any

from planaria.errors import ModelError

HF = dict[str, Any]
MOST = 2**31 - 1
MOST_NUMBER = 1e15
MOST_LAYERS = 10_000


def refuse(field: str, value: object, rule: str) -> ModelError:
    """The error for a field of config.json."""
    shown = repr(value)
    return ModelError(f"config.json: {field} {shown if len(shown) < 60 else shown[:57] + '...'}: {rule}")


def _given(hf: HF, field: str, default: object, where: str) -> Any:
    value = hf.get(field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {where}{field} is missing")
    return value


def size(hf: HF, field: str, default: int | None = None, *, where: str = "", least: int = 1, most: int = MOST) -> int:
    """An integer from `least` to `most`; `default` where the field is missing or null."""
    value = _given(hf, field, default, where)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refuse(where + field, value, f"must be an integer from {least} to {most}")
    return value


def number(hf: HF, field: str, default: float | None = None, *, least: float = 0.0, where: str = "") -> float:
    """A number up to MOST_NUMBER, more than 0 and at least `least`; `default` where the field is missing or null."""
    value = _given(hf, field, default, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_NUMBER:
        raise refuse(where + field, value, f"must be a number up to {MOST_NUMBER:g}")
    if value < least or value <= 0:
        raise refuse(where + field, value, f"must be at least {least:g}" if least else "must be more than 0")
    return float(value)


def flag(hf: HF, field: str, default: bool = False) -> bool:
    """true or false; `default` where the field is missing or null."""
    value = hf.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(field, value, "must be true or false")
    return value


def token_ids(hf: HF, field: str) -> tuple[int, ...]:
    """A token id, a list of them, or nothing."""
    value = hf.get(field)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise refuse(field, value, "must be a token id or a list of token ids")
    return tuple(ids)
