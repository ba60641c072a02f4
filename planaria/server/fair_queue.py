"""Work that waits for a few threads: that of one owner in the order in which it came, and owners in turn, so that
nobody's work waits behind all that somebody else has.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

_Work = tuple[Future[Any], Callable[[], Any]]


class NoRoom(Exception):
    """Of work that isn't done, as too much waits."""


class FairQueue:
    """threads: that work; name: of them; most: pieces of work that may wait: where there are more, the last one of the
    owner of most of them has NoRoom. Any thread."""

    def __init__(self, threads: int, name: str, most: int) -> None:
        self.most = most
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()  # by owner; whose turn it is first

    def of(self, owner: str) -> Executor:
        """Where this owner's work is handed in."""
        return _OwnLine(self, owner)

    def add(self, owner: str, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        refused: Future[Any] | None = None
        with self._lock:
            for waiting in self._waiting.values():  # who has left has no place
                for one in [one for one in waiting if one[0].cancelled()]:
                    waiting.remove(one)
            self._waiting.setdefault(owner, deque()).append((future, work))
            if sum(map(len, self._waiting.values())) > self.most:
                name = max(self._waiting, key=lambda name: (len(self._waiting[name]), name == owner))
                refused, _ = self._waiting[name].pop()
        self._pool.submit(self._next)
        if refused is not None and refused.set_running_or_notify_cancel():
            refused.set_exception(NoRoom())
        return future

    def _next(self) -> None:
        """Do what is next, if anything is."""
        while (one := self._taken()) is not None:
            future, work = one
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as e:
                future.set_exception(e)
            return

    def _taken(self) -> _Work | None:
        with self._lock:
            while self._waiting:
                owner, waiting = self._waiting.popitem(last=False)
                if not waiting:
                    continue
                one = waiting.popleft()
                if waiting:
                    self._waiting[owner] = waiting
                return one
        return None

    def close(self) -> None:
        """What waits is not done. Idempotent."""
        with self._lock:
            waiting = [future for owned in self._waiting.values() for future, _ in owned]
            self._waiting.clear()
        for future in waiting:
            future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _OwnLine(Executor):
    def __init__(self, queue: FairQueue, owner: str) -> None:
        self._queue, self._owner = queue, owner

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._queue.add(self._owner, partial(fn, *args, **kwargs))
