"""Sizes in bytes and in tokens, as people write them."""

from __future__ import annotations

import re

from planaria.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | str, option: str) -> int:
    """`4GiB`, `500M`, `1073741824` -> bytes. Raises ConfigError."""
    if isinstance(value, int):
        number = float(value)
    else:
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value, re.IGNORECASE)
        if match is None:
            raise ConfigError(option, value, "is not a size", "write bytes, or a number with a unit: 2GiB, 500M")
        number = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if number <= 0:
        raise ConfigError(option, value, "must be more than 0")
    return int(number)


AUTO = ("auto", "-1")


def parse_tokens(value: int | str | None, option: str) -> int | None:
    """`4096`, `4k` (4,000), `4K` (4,096) -> tokens; None for `auto`, too. Raises ConfigError."""
    if value is None or str(value) in AUTO:
        return None
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([kKmM]?)", str(value).strip())
    if match is None:
        raise ConfigError(option, value, "is not a number of tokens", "write 4096, 4k, 4K or auto")
    number = int(float(match[1]) * {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[match[2]])
    if number < 2:
        raise ConfigError(option, value, "must be at least 2")
    return number
