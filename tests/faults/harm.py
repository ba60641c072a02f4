"""What a fault does to the process that it is for."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

from tests.faults.orders import NOW, Orders

SLOW_FACTOR, SLOW_SECONDS = 100, 3.0
LOOK = 0.01  # seconds between looks at the orders
FULL_BYTES = 4096  # that a file of a process without memory for files may have


class Injected(Exception):
    """An exception that a test ordered."""


def harm(fault: str) -> None:
    """In any thread. Raises Injected for "exception"."""
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(0)
        case "exception":
            raise Injected("as ordered")
        case "slow":
            threading.Thread(target=_hold, daemon=True).start()
        case "full":
            limit_files(FULL_BYTES)
        case "calm":
            limit_files(resource.RLIM_INFINITY)
        case _:
            raise ValueError(fault)


def limit_files(size: int) -> None:
    """No file of this process, memory files too, can grow beyond: what it is like when there is no memory for them."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def _hold() -> None:
    """Hold the interpreter's lock for 100 times as long as others had it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    sleep = ctypes.PyDLL(None).usleep  # by PyDLL the lock is kept meanwhile
    end = time.monotonic() + SLOW_SECONDS
    while (free := time.monotonic()) < end:
        time.sleep(0.0005)
        sleep(int(1e6 * min(0.2, SLOW_FACTOR * (time.monotonic() - free))))
    sys.setswitchinterval(before)


def watch(who: Callable[[], str], orders: Orders) -> None:
    """A thread that carries out what this process shall do at once. An exception is raised in the main thread, at its
    next instruction."""

    def look() -> None:
        main = threading.main_thread().ident
        while True:
            fault = orders.take(who(), NOW)
            if fault == "exception":
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(Injected))
            elif fault:
                harm(fault)
            time.sleep(LOOK)

    threading.Thread(target=look, name="orders", daemon=True).start()
