"""Processes of this machine. One thread of this process starts all of them, writes to them and watches them.

It starts them because the kernel ends a process with the thread that started it. Nobody who decides anything ever waits
for a process to read: what it is told waits here, for as long as `TAKE_TIMEOUT` allows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from planaria.config.machine import accelerator_ids, present_platform, usable_cores
from planaria.config.system import no_processes
from planaria.env import environment, visible_devices
from planaria.errors import UserError
from planaria.hosts.child import framed
from planaria.hosts.forkserver import ForkServer, server_of
from planaria.hosts.host import Child, News, Place, Program, Slot, how_it_ended
from planaria.node import home, node_name, process_state
from planaria.topology import Cluster, Node

logger = logging.getLogger("planaria.hosts")

T = TypeVar("T")

TAKE_TIMEOUT = 120.0  # seconds without a byte taken after which a process, which imports first, counts as lost
LOOK = 1.0  # seconds between looks for those, while something waits
SAID_LIMIT = 4096  # bytes of a first line
HERE = "0"  # this machine's name among the nodes


class LocalChild:
    """See Child."""

    leaving = False

    def __init__(self, slot: Slot, place: Place, process: _Process, stdin: int, says: int, news: News) -> None:
        self.slot, self.place, self.process, self.news = slot, place, process, news
        self.ended = self.said = self.why = ""
        self.code = 0
        self.stdin, self.says = stdin, says
        self.untold: deque[memoryview] = deque()
        self.taken = 0.0  # when it last took something, of what waits
        os.set_blocking(self.stdin, False)
        os.set_blocking(says, False)

    @property
    def stopped(self) -> bool:
        return process_state(self.place.pid) in ("T", "t")

    def tell(self, message: bytes) -> None:
        keeper().ask(functools.partial(keeper().tell, self, framed(message)))

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        self.process.signal(number)


class _Process:
    """One that was started. exit: its pidfd; wait: returns its code, once it has ended."""

    def __init__(self, pid: int, exit_fd: int, wait: Callable[[], int]) -> None:
        self.pid, self.exit, self.wait = pid, exit_fd, wait
        self._lock, self._closed = threading.Lock(), False

    def signal(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._closed:
                signal.pidfd_send_signal(self.exit, number)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.exit)


def _begin(entry: Program, env: dict[str, str], hear: int, says: int, fds: Sequence[int]) -> _Process:
    """In a process with nothing imported."""
    command = [sys.executable, "-m", entry.module, str(os.getpid()), *map(str, (says, *fds)), *entry.args]
    started = subprocess.Popen(command, stdin=hear, pass_fds=(says, *fds), env=env)
    try:
        return _Process(started.pid, os.pidfd_open(started.pid), started.wait)
    except BaseException:
        started.kill()
        started.wait()
        raise


def _with_pipes(
    begin: Callable[..., _Process], slot: Slot, place: Place, entry: Program, fds: Sequence[int], news: News
) -> LocalChild:
    """That it has to itself, whoever else may have been asked to begin it. Not yet watched."""
    hears, says = os.pipe()
    hear, tells = os.pipe()
    process: _Process | None = None
    try:
        process = begin(entry, {**environment(), **visible_devices(present_platform(), entry.visible)}, hear, says, fds)
        at = Place(-1, place.home, place.node, place.address, process.pid, place.cores, place.devices)
        return LocalChild(slot, at, process, tells, hears, news)
    except BaseException:
        for descriptor in (hears, tells):
            os.close(descriptor)
        if process is not None:  # it runs already
            process.signal(signal.SIGKILL)
            process.wait()
            process.close()
        raise
    finally:
        for descriptor in (says, hear):
            os.close(descriptor)


def _fork(
    server: ForkServer, entry: Program, env: dict[str, str], hear: int, says: int, fds: Sequence[int]
) -> _Process:
    """In one with what the server has imported. Raises OSError."""
    pid, exit_fd = server.fork(entry.module, entry.args, env, (hear, 1, 2, says, *fds))
    return _Process(pid, exit_fd, functools.partial(server.code, pid))


class _Keeper(threading.Thread):
    """The thread. What begins without "ask" is for it alone."""

    def __init__(self) -> None:
        super().__init__(name="planaria-children", daemon=True)
        self.changed = threading.Condition()  # a child has ended
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ, (self._rung,))
        self._waiting: set[LocalChild] = set()  # for them to take what they were told
        self.start()

    def ask(self, act: Callable[[], None]) -> None:
        """Any thread."""
        self._asked.put(act)
        os.eventfd_write(self._bell, 1)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(LOOK if self._waiting else None):
                self.see_to(*key.data)
            for child in [child for child in self._waiting if time.monotonic() - child.taken >= TAKE_TIMEOUT]:
                child.why = f"took nothing of what it was told in {TAKE_TIMEOUT:.0f} s: killed"
                self._forget(child)
                child.kill()

    def see_to(self, act: Callable[..., object], *child: LocalChild) -> None:
        if any(each.ended for each in child):  # this round has seen it end: its descriptors may be somebody else's now
            return
        try:
            act(*child)
        except Exception:
            logger.exception("a process could not be seen to")
            for each in child:  # it would fail again at once
                try:
                    self._lose(each)
                except Exception:
                    logger.exception("process %d could not be lost", each.place.pid)

    def _lose(self, child: LocalChild) -> None:
        """Kill one that can't be watched any more."""
        child.kill()
        child.process.wait()
        if not child.ended:
            self._over(child, -signal.SIGKILL, "could not be watched any more: killed")

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while not self._asked.empty():
            self._asked.get()()

    def done(self, act: Callable[[], T]) -> T:
        """What `act` returns, or raises, carried out by this thread. Any other thread."""
        into = Future[T]()

        def carry_out() -> None:
            try:
                into.set_result(act())
            except BaseException as e:
                into.set_exception(e)

        self.ask(carry_out)
        return into.result()

    def watch(self, child: LocalChild) -> LocalChild:
        self._selector.register(child.process.exit, selectors.EVENT_READ, (self._exited, child))
        self._selector.register(child.says, selectors.EVENT_READ, (self._hear, child))
        return child

    def serve(self, modules: Sequence[str]) -> ForkServer:
        server = server_of(modules)
        self._selector.register(server.port, selectors.EVENT_READ, (functools.partial(self._hear_server, server),))
        return server

    def _hear_server(self, server: ForkServer) -> None:
        if not server.hear():
            self._selector.unregister(server.port)
            server.port.close()

    def tell(self, child: LocalChild, data: bytes) -> None:
        if child.ended or child.why:
            return
        if not child.untold:
            child.taken = time.monotonic()
            self._waiting.add(child)
            self._selector.register(child.stdin, selectors.EVENT_WRITE, (self._write, child))
        child.untold.append(memoryview(data))
        self._write(child)

    def _write(self, child: LocalChild) -> None:
        try:
            while child.untold:
                count = os.write(child.stdin, child.untold[0])
                child.taken = time.monotonic()
                left = child.untold.popleft()[count:]
                if left:
                    child.untold.appendleft(left)
        except BlockingIOError:
            return
        except OSError:  # it has ended
            child.untold.clear()
        self._forget(child)

    def _forget(self, child: LocalChild) -> None:
        """It is told nothing more."""
        child.untold.clear()
        if child in self._waiting:
            self._waiting.remove(child)
            self._selector.unregister(child.stdin)

    def _hear(self, child: LocalChild) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(child.says, SAID_LIMIT)
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(child.says)
            elif not child.said:
                child.said = data.decode(errors="replace").partition("\n")[0]
                self._news(child)

    def _news(self, child: LocalChild) -> None:
        try:
            child.news(child)
        except Exception:
            logger.exception("news of process %d could not be used", child.place.pid)

    def _exited(self, child: LocalChild) -> None:
        code = child.process.wait()
        self._hear(child)  # its last word
        self._over(child, code, child.why or how_it_ended(code))

    def _over(self, child: LocalChild, code: int, how: str) -> None:
        self._forget(child)
        for descriptor in (child.process.exit, child.says):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        child.process.close()
        os.close(child.says)
        os.close(child.stdin)
        with self.changed:
            child.code, child.ended = code, how
            self.changed.notify_all()
        self._news(child)


_one = threading.Lock()
_make = functools.cache(_Keeper)


def keeper() -> _Keeper:
    """This process's, made when the first child is."""
    with _one:
        return _make()


class LocalHost:
    """See Host. devices: accelerators' ids, None: all that this process may use; room: slots, where they don't count
    them; elastic: then there are more when more are needed; address: by which other nodes reach this one; forks: by
    program, what its processes are forked with, already imported."""

    def __init__(
        self, *, devices: Sequence[int] | None = None, room: int = 0, elastic: bool = True, address: str = "127.0.0.1",
        forks: Mapping[str, Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        if why := no_processes():
            raise UserError(f"{why}; `planaria generate`, `planaria chat` and LLM run a model in one process")
        self.devices = list(accelerator_ids() if devices is None else devices)
        self.elastic = elastic and not self.devices
        self.room, self.address = max(room, len(self.devices)), address
        self.forks = {module: modules for module, modules in (forks or {}).items() if modules}
        self._servers: list[ForkServer] = []
        self._forking = threading.Lock()

    def slots(self) -> Cluster:
        return Cluster((Node.of(HERE, self.room),), HERE)

    def need(self, processes: int, spares: int) -> None:
        if self.elastic:
            self.room = max(self.room, processes + spares)

    def spawn(
        self, slot: Slot, entry: Program, boot: bytes | None, news: News, fds: Sequence[int] = (), *, rank: int = -1
    ) -> LocalChild:
        """fds: descriptors that it is given, and told of (see hosts.child)."""
        devices = tuple(self.devices[slot[1] : slot[1] + 1])
        place = Place(-1, home(), node_name(), self.address, 0, usable_cores(), devices)
        assert threading.current_thread() is not keeper(), "who hears news would wait for itself"
        begun = slot, place, entry, fds, news
        child = self._forked(*begun) if entry.module in self.forks else None
        if child is None:
            child = keeper().done(lambda: keeper().watch(_with_pipes(_begin, *begun)))
        if boot is not None:
            child.tell(boot)
        return child

    def await_starts(self, children: Iterable[Child], timeout: float) -> None:
        """They are."""

    def await_ends(self, children: Iterable[Child], timeout: float) -> list[Child]:
        children = list(children)
        with keeper().changed:
            keeper().changed.wait_for(lambda: all(child.ended for child in children), timeout)
        return [child for child in children if not child.ended]

    def absent(self) -> list[str]:
        return []

    def _forked(self, slot: Slot, place: Place, entry: Program, fds: Sequence[int], news: News) -> LocalChild | None:
        """None: not that way. It is waited for here: the keeper's thread has others to see to."""
        modules = self.forks[entry.module]
        with self._forking:
            return self._fork(modules, slot, place, entry, fds, news)

    def _fork(
        self, modules: Sequence[str], slot: Slot, place: Place, entry: Program, fds: Sequence[int], news: News
    ) -> LocalChild | None:
        server = self._servers[-1] if self._servers else None
        if server is not None and server.in_vain(modules):
            return None
        if server is None or not server.fits(modules):
            for spent in [each for each in self._servers if each.spent]:
                self._servers.remove(spent)
                spent.close()
            server = keeper().done(lambda: keeper().serve(modules))
            self._servers.append(server)
        try:
            child = _with_pipes(functools.partial(_fork, server), slot, place, entry, fds, news)
        except OSError as e:
            logger.warning("%s begins without what it could have been forked with: %s", entry.module, e)
            return None
        keeper().ask(functools.partial(keeper().see_to, keeper().watch, child))
        return child

    def close(self) -> None:
        """What was forked ends too."""
        while self._servers:
            self._servers.pop().close()
