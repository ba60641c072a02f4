"""Which weights these are: a version of the files that hold them, for what is computed with them and kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence


def weights_version(files: Sequence[str]) -> str:
    """Changes with the files' sizes and times, as far as they can be looked at; says nothing outside of this node."""
    found = []
    for file in files:
        try:
            stat = os.stat(file)
            found.append((stat.st_size, stat.st_mtime_ns, stat.st_ino))
        except OSError:  # of another node
            found.append((-1, -1, -1))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]
