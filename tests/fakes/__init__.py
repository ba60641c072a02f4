"""Packages of others that can't be installed everywhere: what stands for them, by their own names."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent


@contextlib.contextmanager
def stand_in(package: str) -> Iterator[bool]:
    """Does something stand for it here? Not where it is installed."""
    if importlib.util.find_spec(package) is not None:
        yield False
        return
    sys.path.append(str(FOLDER))
    try:
        yield True
    finally:
        sys.path.remove(str(FOLDER))
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
