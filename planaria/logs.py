"""Logging for people: one line each, on standard error, with the process's role; or for machines, as JSON."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from planaria.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is now: a progress bar puts itself there while it is drawn, and lets lines pass."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record: time, level, logger, message; what its `fields` are, by name; the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def setup_logging(level: str = "info", form: str | None = None) -> None:
    """Send the `planaria` loggers to standard error. Calling it again only changes the level, and the form (text or
    json) where one is given. level: or what `current_level` gave. Raises ConfigError."""
    level, _, also = level.partition("/")
    form = form or also or None
    if level.lower() not in LEVELS:
        raise ConfigError("--log-level", level, "is unknown", f"choose one of {', '.join(LEVELS)}")
    if form not in (None, *FORMATS):
        raise ConfigError("--log-format", form, "is unknown", f"choose one of {', '.join(FORMATS)}")
    root = logging.getLogger("planaria")
    root.setLevel(level.upper())
    if not root.handlers:
        handler = _Stderr()
        for name in ("planaria", "uvicorn"):  # what the HTTP server says of malformed requests, in the same form
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).propagate = False
        form = form or "text"
    if form is not None:
        root.handlers[0].setFormatter(JsonFormatter() if form == "json" else logging.Formatter(FORMAT, "%H:%M:%S"))


def as_json() -> bool:
    """Is what this process says on standard error for machines?"""
    handlers = logging.getLogger("planaria").handlers
    return bool(handlers) and isinstance(handlers[0].formatter, JsonFormatter)


def current_level() -> str:
    """What `setup_logging` was told, for a process to be started."""
    name = logging.getLevelName(logging.getLogger("planaria").getEffectiveLevel()).lower()
    return (name if name in LEVELS else "info") + ("/json" if as_json() else "")


@contextlib.contextmanager
def held() -> Iterator[None]:
    """This process's lines wait until the block ends: an answer is being written to the same terminal."""
    loggers = [logging.getLogger(name) for name in ("planaria", "uvicorn")]
    before = loggers[0].handlers[:1]
    if not before:
        yield
        return
    waiting = logging.handlers.MemoryHandler(1000, logging.CRITICAL, before[0])
    waiting.setFormatter(before[0].formatter)
    for logger in loggers:
        logger.handlers = [waiting]
    try:
        yield
    finally:
        for logger in loggers:
            logger.handlers = list(before)
        waiting.close()
