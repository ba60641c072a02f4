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
from typing import Any

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_NUMBER = _NUMBERS.get(platform.machine(), -1)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


# Arguments are made once: converting them costs more than the call.
_FUTEX, _WAIT, _WAKE, _ALL = ctypes.c_long(_NUMBER), ctypes.c_int(0), ctypes.c_int(1), ctypes.c_int(0x7FFFFFFF)
if sys.platform == "linux":
    _sleeping = ctypes.CDLL(None).syscall  # lets other threads run meanwhile
    _sleeping.restype = None
    _quick = ctypes.PyDLL(None).syscall  # returns at once: handing over the interpreter would cost more
    _quick.restype = None


class Limit:
    """The longest that a sleep takes. Made once for what is slept often."""

    __slots__ = ("_time", "pointer")

    def __init__(self, seconds: float) -> None:
        whole = int(seconds)
        self._time = _Timespec(whole, int((seconds - whole) * 1e9))
        self.pointer = ctypes.byref(self._time)


class Word:
    """A word that processes sleep on. One thread of a process waits on it; any wakes.

    `sleep(value, limit.pointer)` sleeps while the word is `value`; it may return early (also for a signal).
    `wake()` wakes all that sleep on it. (Both are made once with their arguments: in a process whose caches are cold
    every line of Python on the way costs microseconds, and ctypes ten for what it must convert.)
    """

    __slots__ = ("_address", "sleep", "wake")

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)
        self.sleep: Callable[[int, Any], None] = functools.partial(_sleeping, _FUTEX, self._address, _WAIT)
        self.wake: Callable[[], None] = functools.partial(_quick, _FUTEX, self._address, _WAKE, _ALL)

    def wait(self, value: int, seconds: float) -> None:
        """Sleep while the word is `value`, at most `seconds`. May return early."""
        if seconds > 0:
            self.sleep(value, Limit(seconds).pointer)


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
    word, call = ctypes.c_uint32(1), ctypes.CDLL(None, use_errno=True).syscall
    ctypes.set_errno(0)
    call(_FUTEX, ctypes.byref(word), _WAIT, 0, Limit(1.0).pointer)
    code = ctypes.get_errno()  # the value differs, so a working call says "try again"
    return "" if code == errno.EAGAIN else f"the system refuses futex calls ({errno.errorcode.get(code, code)})"
