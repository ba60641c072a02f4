"""An actor as a host's child: a thread of its own makes it, sees it come up, watches it, and makes its end certain.

Any end is a loss, a normal return too, but for one: when Ray gives up a node, its actors may live on and answer, and
then nothing is lost yet.

Rule: no wait is longer than a second, so that it ends also when Ray goes away, and threads can be joined before Ray is
torn down.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from planaria.hosts.host import News, Place, Slot
from planaria.node import home, process_state, readable

if TYPE_CHECKING:
    from planaria.executor.ray.actor import Whereabouts
    from planaria.executor.ray.actors import Actors

logger = logging.getLogger("planaria.ray")

POLL = 1.0  # seconds
SEEN = 1.0  # seconds until a process that ended can be seen to have
NODE_DIED = "its node has died"  # Ray's words
UNKNOWN = ("died", "can't be")  # how it ended, where Ray only says that it hears nothing any more


class Order(NamedTuple):
    """What is asked of Ray. nodes: that must answer for it, first that where it is to come up; options: what it
    reserves, and where; variables: of its process, over all others; engine: one of a fleet, else a rank; shares: of
    which engine, by number and ranks, it has memory that outlives it. None: it has its own alone. keeps: as of its
    Platform."""

    name: str | None
    nodes: tuple[str, ...]
    options: Mapping[str, Any]
    variables: Mapping[str, str] = {}
    engine: bool = False
    shares: tuple[int, int] | None = None
    keeps: str = ""


class RayChild:
    """See Child. entry: `package.module:class` of its life; order: called in the thread, may wait, raises OSError;
    limit: seconds it gets to come up. `at` is known from then on."""

    leaving = killed = False
    ended = said = ""
    code = 0

    def __init__(
        self, actors: Actors, slot: Slot, entry: str, order: Callable[[], Order], limit: float, news: News
    ) -> None:
        self.actors, self.slot, self.entry, self.order, self.limit = actors, slot, entry, order, limit
        self.news, self.place = news, Place(-1, "", "", host=slot[0])
        self.at: Whereabouts | None = None
        self.ordered: Order | None = None
        self.actor: Any = None
        self.run: Any = None  # reference of its life, once it has been told what it is
        self.gone = threading.Event()  # and its process
        self._saying: Any = None  # what ends when it says something
        self._untold: list[bytes] = []
        self._deaf = ""  # why it can't be told anything
        self._pidfd = -1
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._changed = threading.Event()
        self.thread = threading.Thread(target=self._live, name="planaria-ray-child", daemon=True)

    @property
    def here(self) -> bool:
        """On the driver's machine, whichever raylet it belongs to."""
        return self.at is not None and self.at.home == home()

    @property
    def stopped(self) -> bool:
        return self.here and process_state(self.place.pid) in ("T", "t")

    def tell(self, message: bytes) -> None:
        with self._lock:
            self._untold.append(message)
            if self.place.pid:
                self._pass_on()

    def kill(self) -> None:
        with self._lock:
            if self.killed:
                return
            self.killed = True
        self._changed.set()
        self.signal()
        if self.place.pid:  # else its own thread sees it
            threading.Thread(target=self._finish, name="planaria-ray-end", daemon=True).start()

    def has_gone(self, timeout: float = 0.0) -> bool:
        """Has its process ended, as far as that can be seen from here?"""
        return self.here and (self._pidfd < 0 or readable(self._pidfd, timeout))

    # -- coming up

    def found(self, at: Whereabouts) -> None:
        """It has said where it is."""
        self.at = at
        if self.here:
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(at.pid)

    def _live(self) -> None:
        try:
            self.actors.bring_up(self)
        except Exception as e:  # whatever Ray raises
            self._over(f"could not be started: {_last_line(e)}")
            self._finish()
            return
        with self._lock:
            self.place = self.actors.place(self)
            self._pass_on()
        self.actors.tell_all()
        while not (self.ended or self.killed):
            self._watch()
        self._finish()

    def _pass_on(self) -> None:
        """With the lock."""
        try:
            for message in self._untold:
                if self.run is None:
                    self.run, self._saying = self.actors.begin(self, message)
                else:
                    self.actor.hear.remote(message)
        except Exception as e:  # whatever Ray raises
            self._deaf = f"could not be told: {_last_line(e)}"
        self._untold.clear()
        self._changed.set()

    # -- its end

    def _watch(self) -> None:
        """For a second at most."""
        if self._deaf:
            self._over(self._deaf)
            return
        if self.leaving and self.here:
            if self.has_gone(POLL):
                self._over("ended after Ray had given up its node")
            return
        if self.leaving or self.run is None:
            self._changed.wait(POLL)
            self._changed.clear()
            return
        ray = self.actors.connection.ray
        try:
            if not ray.is_initialized():  # a call would start another one
                raise ConnectionError("disconnected")
            awaited = [each for each in (self.run, self._saying) if each is not None]
            done, _ = ray.wait(awaited, num_returns=1, timeout=POLL)
        except Exception as e:  # the connection to Ray is gone, in whatever way
            self._lose(f"can't be watched: Ray is gone ({type(e).__name__})")
            return
        if self.run in done:
            how = how_it_ended(ray, self.run)
            if how.startswith("returned "):
                self.code = int(how.split()[1])
            self._lose(how)
        elif done:
            saying, self._saying = self._saying, None
            with contextlib.suppress(ray.exceptions.RayError):  # it has ended instead
                self.said = ray.get(saying)
                self.news(self)

    def _lose(self, how: str) -> None:
        """Ray says so; is it true?"""
        if how.startswith(UNKNOWN) and (not self.has_gone(SEEN) if self.here else NODE_DIED in how):
            self.leaving = True
            if not self.killed:
                logger.warning("Ray has given up the node of process %d, which lives on", self.place.pid)
            self.news(self)
        else:
            self._over(how)

    def _over(self, how: str) -> None:
        with self.actors.changed:
            first, self.ended = not self.ended, self.ended or how
            self.actors.changed.notify_all()
        if first:
            self.news(self)

    def signal(self) -> None:
        """Kill its process from here; without effect where that can't be done."""
        with self._lock:
            if self._pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _finish(self) -> None:
        """Its process, too, for certain. Twice is as once."""
        with self._ending:
            if self.gone.is_set():
                return
            self.actors.end(self)
            with self._lock:
                pidfd, self._pidfd = self._pidfd, -1
                if pidfd >= 0:
                    os.close(pidfd)
            self.gone.set()
        self._over("was killed")
        self.actors.tell_all()


def how_it_ended(ray: Any, run: Any) -> str:
    """In words, of a run that has ended."""
    try:
        return f"returned {ray.get(run, timeout=POLL)}"
    except ray.exceptions.RayTaskError as e:
        return f"raised {type(e.cause).__name__}: {e.cause}"
    except ray.exceptions.ActorDiedError as e:
        return f"died: {_reason(str(e))}"
    except ray.exceptions.ActorUnavailableError as e:
        return f"can't be reached: {_reason(str(e))}"
    except Exception as e:
        return f"ended: {type(e).__name__}: {_reason(str(e))}"


def _reason(text: str) -> str:
    """What matters in Ray's explanation, which is several lines with ids and file names."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(NODE_DIED in line for line in lines):
        return NODE_DIED
    for start in ("The actor is dead because", "The actor died because", "The actor"):
        for line in lines:
            if line.startswith(start):
                return line.partition(" Worker exit detail")[0].rstrip(".")[:300]
    return " ".join(lines)[:300] or "no reason given"


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
