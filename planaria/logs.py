"""Logging for people: one line each, on standard error, with the process's role."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def setup_logging(level: str = "info") -> None:
    """Send the `planaria` loggers to standard error. Calling it again only changes the level."""
    root = logging.getLogger("planaria")
    root.setLevel(level.upper())
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
