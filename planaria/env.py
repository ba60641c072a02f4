"""The only reads of os.environ. Every setting is a config field or an argument first; these are defaults for them."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """What was converted or compiled: $PLANARIA_CACHE, else $XDG_CACHE_HOME/planaria, else ~/.cache/planaria."""
    own = os.environ.get("PLANARIA_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "planaria"


def log_level() -> str:
    """$PLANARIA_LOG_LEVEL: debug, info (default), warning or error."""
    return os.environ.get("PLANARIA_LOG_LEVEL", "info")


def api_keys() -> tuple[str, ...]:
    """$PLANARIA_API_KEY: keys separated by commas, used where --api-key isn't given."""
    return tuple(key for key in os.environ.get("PLANARIA_API_KEY", "").split(",") if key)
