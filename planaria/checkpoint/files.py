"""Files that a model is read from, which others may have made."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def descriptor(path: Path | str) -> int:
    """One to read from. Raises OSError, also for a pipe or a device: those may never say anything, or never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return fd


def opened(path: Path | str) -> BufferedReader:
    """To read from, also more than the 2 GiB that the system gives at once. Raises OSError, see `descriptor`."""
    return open(descriptor(path), "rb")
