"""Logging for people: one line each, on standard error, with the process's role."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from planaria.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is now: a progress bar puts itself there while it is drawn, and lets lines pass."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def setup_logging(level: str = "info") -> None:
    """Send the `planaria` loggers to standard error. Calling it again only changes the level. Raises ConfigError."""
    if level.lower() not in LEVELS:
        raise ConfigError("--log-level", level, "is unknown", f"choose one of {', '.join(LEVELS)}")
    root = logging.getLogger("planaria")
    root.setLevel(level.upper())
    if not root.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        for name in ("planaria", "uvicorn"):  # what the HTTP server says of malformed requests, in the same form
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).propagate = False


def current_level() -> str:
    """What `setup_logging` was told, for a process to be started."""
    name = logging.getLevelName(logging.getLogger("planaria").getEffectiveLevel()).lower()
    return name if name in LEVELS else "info"
