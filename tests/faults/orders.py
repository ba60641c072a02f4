"""Orders to fail, as files in a folder that every process of a deployment knows by its environment.

An order is for one process, at one phase; a phase that only another process can see is told on by that one (`reached`).
The rule kept here: an order is carried out once, by whoever renames it, and the moment is written down before it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

FOLDER = "TEST_FAULTS"  # the environment variable
NOW = "now"
HEEDED = 5.0  # seconds in which who is there takes an order, however busy the machine is


class Orders:
    """Names of processes: server, engine, rank0, rank1, spare; of what is outside: raylet, link."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder or os.environ[FOLDER])
        for name in ("open", "struck", "pids"):
            (self.folder / name).mkdir(exist_ok=True)

    # -- who gives orders

    def give(self, who: str, phase: str, fault: str, after: int = 0) -> None:
        """`after`: times that the phase is seen before."""
        path = self.folder / "open" / f"{who}.{phase}"
        hidden = self.folder / f"{who}.{phase}"
        hidden.write_text(f"{fault} {after}")
        hidden.rename(path)

    def struck(self, who: str) -> float | None:
        """time.time() of when it was carried out."""
        try:
            return float(json.loads((self.folder / "struck" / who).read_text()))
        except (OSError, ValueError):
            return None

    def clear(self) -> None:
        """Forget what was given and done."""
        for name in ("open", "struck"):
            for path in (self.folder / name).iterdir():
                path.unlink(missing_ok=True)

    def pids(self) -> dict[int, str]:
        """Of all processes that came up, and the last name each had."""
        found = {}
        for path in (self.folder / "pids").iterdir():
            with contextlib.suppress(OSError):
                found[int(path.name)] = path.read_text()
        return found

    # -- who gets them

    def sign(self, who: str) -> None:
        """This process is `who`."""
        (self.folder / "pids" / str(os.getpid())).write_text(who)

    def at(self, phase: str) -> list[tuple[str, int]]:
        """Who has an order for a phase, and after how many times."""
        found = []
        for name in os.listdir(self.folder / "open"):
            who, _, when = name.partition(".")
            if when == phase:
                with contextlib.suppress(OSError):
                    found.append((who, int((self.folder / "open" / name).read_text().split()[1])))
        return found

    def take(self, who: str, phase: str) -> str:
        """The fault that `who` shall have now; "" for none."""
        path = self.folder / "open" / f"{who}.{phase}"
        if not path.exists():
            return ""
        mine = self.folder / f"taken-{os.getpid()}"
        try:
            path.rename(mine)
        except OSError:  # another was quicker
            return ""
        fault = mine.read_text().split()[0]
        (self.folder / "struck" / who).write_text(json.dumps(time.time()))
        return fault

    def tell_on(self, who: str, phase: str) -> None:
        """`who` can't see the phase; it is reached. Returns when the order is being carried out: the phase isn't over
        by then."""
        with contextlib.suppress(OSError):
            (self.folder / "open" / f"{who}.{phase}").rename(self.folder / "open" / f"{who}.{NOW}")
        end = time.monotonic() + HEEDED
        while self.struck(who) is None and time.monotonic() < end:
            time.sleep(0.002)
