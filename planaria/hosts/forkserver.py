"""A process that has imported what others need, never started a thread, and is forked for each of them: they begin at
once, share its pages, and cost no imports.

`python -m planaria.hosts.forkserver PARENT SOCKET MODULES...`. It ends with its parent. So does what it forked, but not
with the server: what that was for goes on without it. On the socket (SEQPACKET): a Fork with descriptors, answered by
Forked with the pidfd; ForkEnded, whenever one has.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import msgspec

from planaria.env import environment
from planaria.node import readable
from planaria.preload import importing
from planaria.processes import die_with_parent, die_with_pipe, leave_signals_to_parent, set_title

LONGEST = 1 << 20  # bytes of a message
MOST = 16  # descriptors with one
IMPORTS = 60.0  # seconds that imports may take
ANSWER = 5.0  # seconds that a fork may take, once they are done
SOON = 1.0  # seconds until an end is told
# Variables that are read once, by the interpreter, the loader, or a library that is imported.
READ_ONCE = (
    "PYTHON", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMBA_", "TORCH", "PYTORCH", "CUDA",
)  # fmt: skip
SINGLE = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's library starts threads when it is imported


class Fork(msgspec.Struct, frozen=True, tag=True):
    """As `python -m module -KEEPER SAYS GIVEN... args...`, in folder `cwd` (if any) with `env`. With it come
    descriptors: the pipe with which it ends; standard input, output and error; SAYS; GIVEN. keeper: pid of who asks
    for it."""

    keeper: int
    module: str
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]


class Forked(msgspec.Struct, frozen=True, tag=True):
    """With its pidfd. why: there is none, and `pid` is 0."""

    pid: int
    why: str = ""


class ForkEnded(msgspec.Struct, frozen=True, tag=True):
    """code: as subprocess says it, below 0 for a signal."""

    pid: int
    code: int


_decode = msgspec.msgpack.Decoder(Fork | Forked | ForkEnded).decode


def _send(port: socket.socket, message: Fork | Forked | ForkEnded, fds: Sequence[int] = ()) -> None:
    """Raises OSError: nobody is there, or it is too long."""
    socket.send_fds(port, [msgspec.msgpack.encode(message)], fds)


def _receive(port: socket.socket) -> tuple[Fork | Forked | ForkEnded, list[int]] | None:
    """None when the other has ended. Where there is no room for all descriptors here, none come."""
    data, fds, flags, _ = socket.recv_fds(port, LONGEST, MOST)
    if flags & socket.MSG_CTRUNC:
        while fds:
            os.close(fds.pop())
    return (_decode(data), fds) if data else None


def _here() -> str:
    """This process's folder; "" for one that was removed: whoever is forked from it is there, too."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _concerns(modules: Sequence[str]) -> tuple[list[str], str, dict[str, str]]:
    """All that decides what is imported."""
    return list(modules), _here(), {k: v for k, v in environment().items() if k.startswith(READ_ONCE)}


class ForkServer:
    """The parent's side: `fork` waits, in whichever thread; all else is for the thread that began it, which reads
    `port`.

    A fork's parent is the server, but it ends when `close` is called, or when this process ends: with a pipe, whose end
    nobody else has. before: one that has begun.
    """

    def __init__(self, modules: Sequence[str], before: Begun | None = None) -> None:
        self._began_with = _concerns(modules)
        self._imported = self._fails = self._over = False
        self._codes: dict[int, int] = {}
        self._forks: set[int] = set()  # pids of those whose code nobody has asked for
        self._answer = Future[tuple[int, int]]()  # to the last fork
        self._process: subprocess.Popen[bytes] | ForkedServer
        life, ours = os.pipe()
        self._life, self._hold = os.fdopen(life, "rb", buffering=0), os.fdopen(ours, "wb", buffering=0)
        try:
            self._process, self.port = before or _started(modules)
        except BaseException:
            self._let_go()
            raise
        self.port.setblocking(False)

    def fits(self, modules: Sequence[str]) -> bool:
        """Would another server have imported the same, and is this one well?"""
        return not self._fails and self._process.poll() is None and self._began_with == _concerns(modules)

    def in_vain(self, modules: Sequence[str]) -> bool:
        """Would another fare no better? This one's imports failed, or go on and on; nobody has killed it."""
        alive = (self._process.poll() or 0) >= 0
        return self._fails and not self._imported and alive and self._began_with == _concerns(modules)

    def fork(self, module: str, args: Sequence[str], env: dict[str, str], fds: Sequence[int]) -> tuple[int, int]:
        """Returns its pid and a pidfd of it. fds: see Fork, from its standard input on. Raises OSError: not by this
        server."""
        self._fails = True  # until it is known that it doesn't
        self._answer = answer = Future[tuple[int, int]]()
        if self._hold.closed:
            raise ConnectionError("its server has been closed")
        _send(self.port, Fork(os.getpid(), module, tuple(args), _here(), env), (self._life.fileno(), *fds))
        limit = ANSWER if self._imported else IMPORTS
        try:
            found = answer.result(limit)
        except TimeoutError:
            if answer.cancel():
                raise TimeoutError(f"its server has not answered for {limit:g} s") from None
            found = answer.result()  # it came just now
        self._forks.add(found[0])
        return found

    @property
    def spent(self) -> bool:
        """It has ended, and so has all that it forked."""
        return self._process.poll() is not None and not self._forks

    def hear(self) -> bool:
        """Something it says. False: nothing any more."""
        try:
            heard = _receive(self.port)
        except BlockingIOError:
            return True
        except (OSError, msgspec.DecodeError):
            heard = None
        match heard:
            case ForkEnded(pid, code), _:
                self._codes[pid] = code
            case Forked(pid, why), fds:
                if not why and not fds:  # it could not be watched: nobody has it
                    os.kill(pid, signal.SIGKILL)
                    why = os.strerror(errno.EMFILE)
                self._imported, self._fails = True, bool(why)
                if not self._answer.set_running_or_notify_cancel():  # nobody waits for that fork any more
                    for fd in fds:
                        os.close(fd)
                elif why:
                    self._answer.set_exception(OSError(why))
                else:
                    self._answer.set_result((pid, fds[0]))
            case _:
                self._over = True
                if not self._answer.done():
                    self._answer.set_exception(ConnectionError("its server has ended"))
        return not self._over

    def code(self, pid: int) -> int:
        """Of one that has ended; where its server can't say it any more, as if it had been killed."""
        until = time.monotonic() + SOON
        while pid not in self._codes and not self._over and readable(self.port.fileno(), until - time.monotonic()):
            self.hear()
        self._forks.discard(pid)
        return self._codes.pop(pid, -signal.SIGKILL)

    def close(self) -> None:
        """With all that it forked. Any thread; idempotent."""
        self._process.kill()
        self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        """The end of this is the end of all forks."""
        self._hold.close()
        self._life.close()


def _started(modules: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *modules]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**environment(), **SINGLE}
        ), ours  # fmt: skip


class ForkedServer:
    """The process of one, as subprocess would have it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, cast("int | None", None)

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, how: int = 0) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


Begun = tuple["subprocess.Popen[bytes] | ForkedServer", socket.socket]
_split: list[Begun] = []  # this process's
_early: list[tuple[object, Begun]] = []  # and with what it began


def begin(modules: Sequence[str]) -> None:
    """Have a server import `modules` from now on, for whoever is the first to ask for one, if it asks for that. For a
    thread that stays, of a process that is the program: where there is no other thread yet the server begins as a copy
    of it. Raises SystemExit in the server and in all that it forks, when they have done what they are for."""
    concerns = _concerns(modules)
    made = _copied() if threading.active_count() == 1 else _started(modules)
    if not isinstance(made, socket.socket):
        _early.append((concerns, made))
        return
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != made.fileno():  # what this process was given is its own
            with contextlib.suppress(OSError):
                os.close(fd)
    leave_signals_to_parent()
    os.environ.update(SINGLE)
    sys.exit(_import_and_serve(modules, made))


def let_go() -> None:
    """Nobody will ask for what has begun."""
    while _early:
        _, (process, port) = _early.pop()
        process.kill()
        process.wait()
        port.close()


def split(modules: Sequence[str]) -> str:
    """Have a server that begins as a copy of this process, which has no other thread yet, and has imported `modules`;
    otherwise do nothing. Returns again in each process that is forked from it: what that one is to run."""
    if not all(module in sys.modules for module in modules) or threading.active_count() > 1:
        return ""
    made = _copied()
    if not isinstance(made, socket.socket):
        _split.append(made)
        return ""
    os.close(int(sys.argv[2]))
    module = _serve(made)
    if not module:
        os._exit(0)
    return module


def _copied() -> Begun | socket.socket:
    """Returns twice: here a server that is a copy of this process, and there its socket."""
    parent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        return ForkedServer(pid), ours
    die_with_parent(parent)
    ours.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what the parent hears is its own
    os.close(nothing)
    set_title("forkserver")
    return theirs


def server_of(modules: Sequence[str]) -> ForkServer:
    """The one that was split from this process, else the one that has begun early, else another."""
    before = _split.pop() if _split else None
    if before is None and _early and _early[0][0] == _concerns(modules):
        _, before = _early.pop()
    let_go()
    return ForkServer(modules, before)


def run(module: str) -> int:
    """What a fork is for."""
    code: int | None = importlib.import_module(module).main()
    return code or 0


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    leave_signals_to_parent()
    set_title("forkserver")
    return _import_and_serve(sys.argv[3:], socket.socket(fileno=int(sys.argv[2])))


def _import_and_serve(modules: Sequence[str], port: socket.socket) -> int:
    with importing():
        for module in modules:
            importlib.import_module(module)
    asked = _serve(port)
    return run(asked) if asked else 0


def _serve(port: socket.socket) -> str:
    """Until the parent has gone. Returns twice, so to speak: in each fork, with the module that it is to run."""
    bell, ring = os.pipe()
    for end in (bell, ring):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(ring)
    poll = select.poll()
    poll.register(port, select.POLLIN)
    poll.register(bell, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == bell:
                os.read(bell, 4096)
                _reap(port)
                continue
            heard = _receive(port)
            if heard is None:
                return ""
            asked, fds = heard
            assert isinstance(asked, Fork)
            if not fds:
                _send(port, Forked(0, os.strerror(errno.EMFILE)))
                continue
            try:
                pid = os.fork()
            except OSError as e:
                _send(port, Forked(0, str(e)))
                pid = -1
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for own in (bell, ring):
                    os.close(own)
                port.close()
                _become(asked, fds)
                return asked.module
            if pid > 0:
                _told(port, pid)
            for given in fds:
                os.close(given)


def _told(port: socket.socket, pid: int) -> None:
    """It is watched by who asked for it, or it is not there."""
    try:
        exit_fd = os.pidfd_open(pid)
    except OSError as e:
        os.kill(pid, signal.SIGKILL)
        _send(port, Forked(0, str(e)))
        return
    _send(port, Forked(pid), (exit_fd,))
    os.close(exit_fd)


def _reap(port: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _send(port, ForkEnded(pid, os.waitstatus_to_exitcode(status)))


def _become(asked: Fork, fds: Sequence[int]) -> None:
    """What exec would have made of this process."""
    life, *standard = fds[:4]
    die_with_pipe(life)
    for wanted, fd in enumerate(standard):
        os.dup2(fd, wanted)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked.env)
    if asked.cwd:
        os.chdir(asked.cwd)
    sys.argv = [asked.module, *map(str, (-asked.keeper, *fds[4:])), *asked.args]


if __name__ == "__main__":
    sys.exit(main())
