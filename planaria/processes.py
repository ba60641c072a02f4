"""What every process of a deployment does first: end with its parent, leave signals to it, carry a readable name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux); a parent already gone ends it now.

    The kernel watches the thread that started this process: launchers start processes from a thread that stays.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def leave_signals_to_parent() -> None:
    """A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group: the root drains, then ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
