"""Logging for people: one line each, on standard error, with the process's role; or for machines, as JSON."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import logging
import logging.handlers
import os
import socket
import stat
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from planaria.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
PIPE = 1 << 20  # bytes that a pipe is to hold, for a reader who is late
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


class _Outlet(io.RawIOBase):
    """A pipe, socket or terminal that nobody may be reading: what finds no room is left out, and counted; how much it
    was, is said once there is room again. A quarter of a pipe is left for what libraries write there by themselves.
    Raises OSError where it can't be opened again, by another user."""

    def __init__(self, fd: int) -> None:
        self._fd, self._kind = fd, os.fstat(fd).st_mode
        self._lock = threading.RLock()  # a signal's handler may log
        self._rest, self._left_out = b"", 0  # of lines of which a part was taken; lines
        self._send: Callable[[bytes], int]
        if stat.S_ISSOCK(self._kind):
            own = socket.socket(fileno=os.dup(fd))
            self._send = lambda data: own.send(data, socket.MSG_DONTWAIT)
        else:  # an opening of its own: who else has `fd` goes on waiting where it wants to
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._send = functools.partial(os.write, os.open(f"/proc/self/fd/{fd}", flags))
        if stat.S_ISFIFO(self._kind):
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        """All of it, or nothing."""
        lines = bytes(data)
        with self._lock:
            whole = self._rest + (self._note() if self._left_out else b"") + lines
            try:
                taken = 0 if self._is_full(len(whole)) else self._send(whole)
            except OSError:  # no room, or no reader any more
                taken = 0
            if taken:
                self._rest, self._left_out = whole[taken:], 0
            else:
                self._left_out += lines.count(b"\n")
        return len(lines)

    def _is_full(self, more: int) -> bool:
        if not stat.S_ISFIFO(self._kind):
            return False
        inside = int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        return inside > 0 and inside + more > fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ) * 3 // 4

    def _note(self) -> bytes:
        message = f"{self._left_out} lines are missing here: nobody read what was said before"
        record = logging.LogRecord("planaria", logging.WARNING, "", 0, message, None, None)
        handlers = logging.getLogger("planaria").handlers
        return f"{handlers[0].format(record) if handlers else message}\n".encode()


def wait_for_no_reader() -> None:
    """From now on this process leaves out what it can't write to standard output and error at once, where that is a
    pipe, a socket or a terminal: a server must not stop because nobody reads its log (Linux)."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError, ValueError):  # not there, closed, or a test's
            if stream.fileno() == fd and not stat.S_ISREG(os.fstat(fd).st_mode):
                outlet = io.TextIOWrapper(_Outlet(fd), stream.encoding, "backslashreplace", line_buffering=True)  # type: ignore[type-var]
                setattr(sys, name, outlet)


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
