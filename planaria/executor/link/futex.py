"""Sleeping on a word of shared memory (Linux futexes), and what is relied on for its order.

The rule that keeps waits from being missed: a waiter reads the word, then looks for work, then waits for the word to
differ from what it read; a waker makes work visible, changes the word, then wakes. Nobody needs atomic arithmetic:
each word has one writer, or writers whose values never coincide.

Memory order. Words are aligned and 4 bytes, written and read by single instructions (memoryview items of format "I").
x86-64 keeps stores in order and loads in order, which is all that a ring with one writer needs: payload before the
count that announces it, the count before what it covers is read. Other processors may reorder both; there `fence` is a
full barrier (from libatomic), called between the two. Where none is found, `available` says so.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import sys
from collections.abc import Callable

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1  # not the private kind: the word is shared between processes
_ALL = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_NUMBER = _NUMBERS.get(platform.machine(), -1)


def _function(library: ctypes.CDLL) -> Callable[..., int]:
    call = library.syscall
    call.restype = ctypes.c_long
    call.argtypes = [
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_uint32,
    ]  # fmt: skip
    return call


if sys.platform == "linux":
    _sleeping = _function(ctypes.CDLL(None, use_errno=True))  # lets other threads run meanwhile
    _quick = _function(ctypes.PyDLL(None))  # returns at once: handing over the interpreter would cost more


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the word at `address` is `value`, at most `seconds`. May return early (also for a signal)."""
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _sleeping(_NUMBER, address, _WAIT, value, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wake all that sleep on the word."""
    _quick(_NUMBER, address, _WAKE, _ALL, None, None, 0)


def _barrier() -> Callable[[], None] | None:
    """None where the processor keeps the order by itself. Raises OSError where there is no barrier to call."""
    if platform.machine() == "x86_64":
        return None
    function = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    function.restype, function.argtypes = None, [ctypes.c_int]
    return functools.partial(function, 5)  # memory_order_seq_cst


fence: Callable[[], None] | None = None
_missing = ""
if sys.platform != "linux":
    _missing = f"{sys.platform} has no futex"
elif _NUMBER < 0:
    _missing = f"the number of the futex call on {platform.machine()} isn't known"
else:
    try:
        fence = _barrier()
    except OSError:
        _missing = f"{platform.machine()} needs libatomic.so.1 for memory barriers"


@functools.cache
def available() -> str:
    """Empty, or why futexes can't be used here."""
    if _missing:
        return _missing
    word = ctypes.c_uint32(1)
    ctypes.set_errno(0)
    limit = _Timespec(0, 0)
    _sleeping(_NUMBER, ctypes.addressof(word), _WAIT, 0, ctypes.addressof(limit), None, 0)
    code = ctypes.get_errno()  # the value differs, so a working call says "try again"
    return "" if code == errno.EAGAIN else f"the system refuses futex calls ({errno.errorcode.get(code, code)})"
