"""A rank never leaves a command without an answer."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from planaria.errors import CapacityError, ModelError, UserError
from planaria.mesh.comm import CollectiveAborted
from planaria.protocol import Failed, Reply

_KINDS: list[tuple[type[Exception], str]] = [
    (ModelError, "model"), (UserError, "user"), (CapacityError, "capacity"), (CollectiveAborted, "peer"),
]  # fmt: skip


DEVICE_FAULT = "AcceleratorError"  # torch's


def is_device_fault(reply: Reply) -> bool:
    """Did the device fail at it? Then nothing works on it any more in this process."""
    return isinstance(reply, Failed) and reply.message.startswith(f"{DEVICE_FAULT}: ")


def guard(rank: int, phase: str, run: Callable[[], Reply]) -> Reply:
    """`run()`, or Failed with the traceback."""
    try:
        return run()
    except Exception as e:
        kind = next((kind for error, kind in _KINDS if isinstance(e, error)), "error")
        if isinstance(e, MemoryError):
            kind, e = "capacity", CapacityError(f"out of memory while {phase}")
        message = str(e) if kind != "error" else f"{type(e).__name__}: {e}"
        # where it waited for another explains nothing, and a traceback is made of source files
        return Failed(rank, phase, message, traceback.format_exc() if kind != "peer" else "", kind)
