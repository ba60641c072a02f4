"""The end of actors: a thread that looks at the references of their runs. Any end is a loss, a normal return too.

Rule: no wait is longer than a second, so that it ends also when Ray goes away, and the thread can be joined before Ray
is torn down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

POLL = 1.0  # seconds
JOIN = 3.0


class Watcher:
    """runs: reference of each rank's run. `on_end(rank, how)` is called from the thread, once for each rank."""

    def __init__(self, ray: Any, runs: Mapping[int, Any], on_end: Callable[[int, str], None]) -> None:
        self._ray, self._runs, self._on_end = ray, dict(runs), on_end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="planaria-ray-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended or a limit is over. Not for the watcher's own thread."""
        self._stop.set()
        self._thread.join(JOIN)

    def _watch(self) -> None:
        left = dict(self._runs)
        while left and not self._stop.is_set():
            try:
                if not self._ray.is_initialized():  # a call would start another one
                    raise ConnectionError("disconnected")
                ended, _ = self._ray.wait(list(left.values()), num_returns=1, timeout=POLL)
            except Exception as e:  # the connection to Ray is gone, in whatever way
                for rank in left:
                    self._on_end(rank, f"can't be watched: Ray is gone ({type(e).__name__})")
                return
            for rank, run in list(left.items()):
                if run in ended:
                    del left[rank]
                    self._on_end(rank, how_it_ended(self._ray, run))


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
    for start in ("The actor is dead because", "The actor died because", "The actor"):
        for line in lines:
            if line.startswith(start):
                return line.partition(" Worker exit detail")[0].rstrip(".")[:300]
    return " ".join(lines)[:300] or "no reason given"
