"""The end of actors: a thread that looks at the references of their runs. Any end is a loss, a normal return too, but
for one: when Ray gives up a node, its actors may live on and answer, and then nothing is lost yet.

Rule: no wait is longer than a second, so that it ends also when Ray goes away, and the thread can be joined before Ray
is torn down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from planaria.executor.ray.members import Member

POLL = 1.0  # seconds
JOIN = 3.0
SEEN = 1.0  # seconds until a process that ended can be seen to have
NODE_DIED = "its node has died"  # Ray's words
UNKNOWN = ("died", "can't be")  # how it ended, where Ray only says that it hears nothing any more


class Watcher:
    """Whom `add` names is watched. `on_end(member)` is called from the thread when one has `ended`, or is `adrift`."""

    def __init__(self, ray: Any, on_end: Callable[[Member], None]) -> None:
        self._ray, self._on_end = ray, on_end
        self._members: dict[Member, None] = {}
        self._lock = threading.Lock()
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="planaria-ray-watch", daemon=True)
        self._thread.start()

    def add(self, member: Member) -> None:
        """Its run has begun."""
        with self._lock:
            self._members[member] = None
        self._changed.set()

    def forget(self, member: Member) -> None:
        with self._lock:
            self._members.pop(member, None)

    def stop(self) -> None:
        """Returns when the thread has ended or a limit is over. Not for the watcher's own thread."""
        self._stop.set()
        self._changed.set()
        self._thread.join(JOIN)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._changed.clear()
            with self._lock:
                members = list(self._members)
            if not members:
                self._changed.wait(POLL)
                continue
            try:
                if not self._ray.is_initialized():  # a call would start another one
                    raise ConnectionError("disconnected")
                ended, _ = self._ray.wait([member.run for member in members], num_returns=1, timeout=POLL)
            except Exception as e:  # the connection to Ray is gone, in whatever way
                for member in members:
                    self._tell(member, f"can't be watched: Ray is gone ({type(e).__name__})")
                continue  # whoever comes later is watched, if Ray is back
            for member in members:
                if member.run in ended:
                    self._tell(member, how_it_ended(self._ray, member.run))

    def _tell(self, member: Member, how: str) -> None:
        with self._lock:
            if member not in self._members:
                return
            del self._members[member]
        lives = how.startswith(UNKNOWN) and (not member.gone(SEEN) if member.here else NODE_DIED in how)
        if lives:
            member.adrift = True
        else:
            member.ended = how
        self._on_end(member)


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
