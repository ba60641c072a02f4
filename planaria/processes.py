"""What every process of a deployment does first: end with its parent, leave signals to it, carry a readable name.

Names are for `ps` and for `planaria ps`: "planaria: worker rank=1 tp=1 pp=0 epoch=0".
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from planaria.node import readable

LEAST = 0.04  # of a processor, for who gives way: a usual grammar takes a millisecond of one
LOOK = 0.05  # seconds until it is looked at what it had
SOON = 0.01  # and again, where that was too little
WAITS = 10.0  # seconds after which it gives way no more
LEAST_ADDRESSES = 512 << 20  # bytes of an engine, whatever its model; libraries abort where they get none

_PREFIX = "planaria: "
_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux); a parent already gone ends it now.

    The kernel watches the thread that started this process: launchers start processes from a thread that stays.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_with_pipe(fd: int) -> None:
    """The same for a process whose parent is somebody else (Linux): when nobody has the other end of this pipe any
    more, to which nobody writes. It takes `fd`."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # whom a signal goes to is said of an open file
    os.close(fd)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
    if readable(own):
        os._exit(1)


def raise_descriptor_limit() -> None:
    """The soft limit of open files becomes the hard one, for this process and those it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def few_addresses() -> str:
    """Why this process hasn't the addresses of an engine, or ""."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_ADDRESSES:
        return ""
    return (
        f"this process may have {soft >> 20} MiB of addresses (ulimit -v); an engine needs {LEAST_ADDRESSES >> 20} MiB "
        "and those of its model: raise the limit, or take it away with ulimit -v unlimited"
    )


def leave_signals_to_parent() -> None:
    """A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group: the root drains, then ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """A terminal's Ctrl-C is raised by the function that is given, and at the end, not in the midst of what stands
    between two calls of it; a second one at once. In the main thread, unless SIGINT has a handler of somebody's."""
    heard = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if heard:
            signal.default_int_handler(number, frame)
        heard = True

    def look() -> None:
        if heard:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield look
        return
    signal.signal(signal.SIGINT, hear)
    try:
        yield look
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    look()


def set_title(role: str, **facts: object) -> None:
    """Name this process in `ps`. role: server, api, engine, worker, spare or keeper. A space in a fact becomes "_"."""
    words = (f"{name}={'_'.join(str(value).split())}" for name, value in facts.items())
    title = _PREFIX + " ".join([role, *words])
    raylet = sys.modules.get("ray._raylet")
    ours = getattr(raylet, "getproctitle", str)  # another thread may be importing it
    if raylet is not None and ours().startswith("ray::"):
        raylet.setproctitle(title)  # has taken over the memory that titles are written to
        return
    from setproctitle import setproctitle

    setproctitle(title)


def read_title(title: str) -> tuple[str, dict[str, str]] | None:
    """The role and facts of a title that `set_title` made; None for another."""
    if not title.startswith(_PREFIX):
        return None
    role, *facts = title.removeprefix(_PREFIX).split() or [""]
    return role, dict(fact.split("=", 1) for fact in facts if "=" in fact)


def titled_processes() -> Iterator[tuple[int, str, dict[str, str]]]:
    """(pid, role, facts) of every process of this user that `set_title` named (Linux). Anybody can give a process such
    a name, and what is said to it may be secret."""
    if sys.platform != "linux":
        return
    for name in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as f:
                if os.fstat(f.fileno()).st_uid != os.geteuid():
                    continue
                found = read_title(f.read().rstrip(b"\0").decode(errors="replace"))
        except OSError:  # ended meanwhile
            continue
        if found is not None:
            yield int(name), *found


@functools.cache
def can_give_way() -> bool:
    """Is a process that gave way let back? Not on every system, nor without the right to it (CAP_SYS_NICE, or a limit
    RLIMIT_NICE that allows its nice value)."""
    found = []

    def attempt() -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            found.append(True)

    thread = threading.Thread(target=attempt, name="give-way")  # of which all this is forgotten
    thread.start()
    thread.join()
    return bool(found)


def _processor_time(id: int, *, thread: bool) -> float:
    """Seconds that a process has had, or a thread of this one. Linux."""
    with contextlib.suppress(OSError):  # it has ended
        return time.clock_gettime((~id << 3) | (6 if thread else 2))
    return 0.0


class LeftoverTime:
    """Of the processors, what somebody has who computes beside ranks: what these leave, and where they leave less than
    LEAST of one, what a high nice value gives, as after WAITS seconds in any case. That value alone is not enough: who
    has begun to run with it has a processor until the scheduler's next tick, milliseconds later, and threads that
    compute together sleep and wake many times a step. ids: of processes; thread: of a thread of this one."""

    def __init__(self, *ids: int, thread: bool = False) -> None:
        self.ids, self.thread, self._gives_way = ids, thread, False

    def begin(self) -> None:
        self._began = time.monotonic()
        self._before = self._had()
        self._give_way(True)

    def look(self) -> float:
        """Change it, if need be. Returns seconds until it is to be looked at again."""
        waited = time.monotonic() - self._began
        if waited >= WAITS:
            self._give_way(False)
            return math.inf
        if waited < LOOK:
            return LOOK - waited
        enough = self._had() - self._before >= LEAST * waited
        self._give_way(enough)
        return LOOK if enough else SOON

    def _had(self) -> float:
        return sum(_processor_time(id, thread=self.thread) for id in self.ids)

    def _give_way(self, always: bool) -> None:
        if always == self._gives_way or not can_give_way():
            return
        self._gives_way = always
        for id in self.ids:
            with contextlib.suppress(OSError):  # it has ended
                for one in [id] if self.thread else map(int, os.listdir(f"/proc/{id}/task")):
                    os.sched_setscheduler(one, os.SCHED_IDLE if always else os.SCHED_OTHER, os.sched_param(0))
