"""One cell: the fault is ordered, streams run, what came of it is judged."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from tests.faults.cells import ALONE, ENDED, FAILED, NAMED, RECOVERED, WENT_ON, Cell, right
from tests.faults.deployment import Deployment
from tests.faults.harm import SLOW_SECONDS
from tests.faults.orders import NOW
from tests.faults.streams import TOKENS, Load, wrong

STOPPED = 3.0  # seconds after which what nothing replaces is continued
START_AND_END = 240.0  # seconds for all of a cell but its streams
SETTLE = 60.0  # seconds to be whole again
AFTER = {"prefill": 3, "decode": 12, "recovery": 0}  # times that a phase is seen before the fault
LONG = 2 * TOKENS  # so that streams are open when a drain has begun


@dataclass
class Result:
    """What came of a cell. `lost`: requests without a finish reason; `tokens`: that were lost, repeated or changed.
    Seconds: until the product said that there was a fault, until a token came after the longest silence."""

    cell: str
    outcome: str
    right: bool
    lost: int = 0
    tokens: int = 0
    detect: float | None = None
    next_token: float | None = None
    seconds: float = 0.0
    note: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Late(Exception):
    """A cell took longer than any may."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises Late in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: object) -> None:
        raise Late(f"the cell was cut off after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def play(cell: Cell, deployment: Deployment) -> Result:
    """Never raises: what goes wrong is the result. A deployment that failed a cell is ended."""
    began = time.monotonic()
    result = None
    try:
        with deadline(deployment.limit + START_AND_END):
            result = Play(cell, deployment).run()
    except Exception as e:
        result = Result(str(cell), FAILED, False, note=f"{type(e).__name__}: {e}")
    result.seconds = time.monotonic() - began
    if not result.right or not deployment.up() or not deployment.lasting:
        with deadline(30), contextlib.suppress(Exception):
            deployment.end()
    return result


class Play:
    others = 0  # prompts that were asked in a cell of prefill

    def __init__(self, cell: Cell, deployment: Deployment) -> None:
        self.cell, self.deployment, self.orders = cell, deployment, deployment.orders
        self.result = Result(str(cell), FAILED, False)
        self.load: Load | None = None
        self.over = threading.Event()
        self.began = time.time()

    def run(self) -> Result:
        result, deployment = self.result, self.deployment
        result.outcome, result.note = self._played()
        if self.load is not None and result.outcome != FAILED:
            result.tokens = wrong(self.load, deployment.learn(LONG, self.load.other))
        whole = not result.tokens and (not result.lost or result.outcome in (NAMED, ENDED, ALONE))
        result.right = whole and result.outcome in right(self.cell)
        return result

    def _played(self) -> tuple[str, str]:
        """The outcome, and more about it."""
        cell, deployment = self.cell, self.deployment
        if cell.phase == "start-up":
            deployment.end()
            self.orders = deployment.orders
        elif not deployment.up() and (why := deployment.start()):
            return FAILED, f"it did not start: {why}"
        else:
            self._settle()
            if cell.phase != "prefill":
                deployment.learn(LONG)
            self.orders.clear()
        outside = threading.Thread(target=self._outside, daemon=True)
        outside.start()
        try:
            if cell.phase == "start-up" and (ended := self._start_up()):
                return ended
            self.load = self._strike()
            all_ended = self.load.wait(deployment.limit)
            return self._judge(self.load, all_ended)
        finally:
            self.over.set()
            outside.join(STOPPED + 2)
            self._calm()

    # -- the blow

    def _start_up(self) -> tuple[str, str] | None:
        """What became of a deployment that did not come up."""
        cell, deployment = self.cell, self.deployment
        self.orders.give(cell.who, "start-up", cell.fault)
        why = deployment.start()
        if cell.who == "spare":
            self._await_blow(60.0)
        if self.orders.struck(cell.who) is None:
            return FAILED, f"the fault was not carried out; {why}"
        return self._ended(why) if why else None

    def _strike(self) -> Load:
        cell, orders, deployment = self.cell, self.orders, self.deployment
        tokens = LONG if cell.phase == "drain" else TOKENS
        if cell.phase == "start-up":
            return deployment.load(tokens)
        if cell.phase == "idle":
            orders.give(cell.who, NOW, cell.fault)
            self._await_blow(60.0)
            return deployment.load(tokens)
        if cell.phase == "recovery":
            other = "rank0" if cell.who in ("rank1", "spare") else "rank1"
            orders.give(cell.who, "recovery", cell.fault)
            orders.give(other, "decode", "kill", AFTER["decode"])
            return deployment.load(tokens)
        if cell.phase == "drain":
            load = deployment.load(tokens)
            if not load.began.wait(60):
                raise Late("no token came before the drain")
            assert deployment.server is not None
            deployment.server.process.send_signal(signal.SIGTERM)
            orders.give(cell.who, "decode", cell.fault, 5)
            return load
        orders.give(cell.who, cell.phase, cell.fault, AFTER[cell.phase])
        Play.others += cell.phase == "prefill"
        return deployment.load(tokens, Play.others if cell.phase == "prefill" else 0)

    def _await_blow(self, limit: float) -> None:
        end = time.monotonic() + limit
        while self.orders.struck(self.cell.who) is None:
            if time.monotonic() > end:
                raise Late(f"the fault was not carried out within {limit:g} s")
            time.sleep(0.005)

    def _outside(self) -> None:
        """Harm what is no process of ours; continue what nobody replaces."""
        who, fault = self.cell.who, self.cell.fault
        harm = self.deployment.outside.get(who)
        while not self.over.is_set():
            if harm is not None and self.orders.take(who, NOW):
                harm(fault)
                return
            if who == "server" and fault == "stop" and (at := self.orders.struck(who)) is not None:
                self.over.wait(max(0.0, at + STOPPED - time.time()))
                self._continue()
                return
            self.over.wait(0.01)

    def _continue(self) -> None:
        for pid in self.deployment.pids("server"):
            os.kill(pid, signal.SIGCONT)

    def _calm(self) -> None:
        """What the fault left behind is taken away."""
        struck = self.orders.struck(self.cell.who)
        if self.cell.fault == "slow" and struck is not None:
            time.sleep(max(0.0, struck + SLOW_SECONDS - time.time()))
        if self.cell.fault == "full" and self.deployment.pids(self.cell.who):
            self.orders.give(self.cell.who, NOW, "calm")
            end = time.monotonic() + 2
            while self.orders.at(NOW) and time.monotonic() < end:
                time.sleep(0.01)
        calm = self.deployment.outside.get(self.cell.who)
        if calm is not None:
            calm("calm")

    # -- the verdict

    def _judge(self, load: Load, all_ended: bool) -> tuple[str, str]:
        deployment, result = self.deployment, self.result
        struck = self.orders.struck(self.cell.who)
        result.lost = sum(not stream.finish for stream in load.streams)
        error = next((stream.error for stream in load.streams if stream.error), "")
        if struck is None:
            return FAILED, f"the fault was not carried out; {error}"
        result.next_token = load.next_token(struck)
        if not all_ended:
            return FAILED, error or "streams did not end"
        if self.cell.phase == "drain" and not error:
            return self._drained()
        if error and not self._dies():
            server = (self.cell.who, self.cell.fault) == ("server", "exception")
            return (ALONE if server and result.lost == 1 else FAILED), error
        if not deployment.up():
            return self._ended(error)
        return self._went_on(struck)

    def _went_on(self, struck: float) -> tuple[str, str]:
        """All requests have ended by themselves."""
        self._settle()
        fault = self.deployment.health()["last_fault"]
        when = datetime.fromisoformat(fault["when"]).timestamp() if fault else 0.0
        began = struck if self.cell.phase != "recovery" else self.began
        if when > struck - 0.002:  # it is told in milliseconds
            self.result.detect = max(0.0, when - struck)
        if when > began - 0.002:
            return RECOVERED, f"{fault['part']} {fault['ranks'] or ''}: {fault['cause']}".replace(" :", ":")
        if self.cell.phase == "start-up" and self.cell.who not in ("server", "spare") and self.cell.fault != "slow":
            return RECOVERED, ""  # nobody tells of a fault before it is up
        return WENT_ON, ""

    def _drained(self) -> tuple[str, str]:
        """The server has finished what was open and ends."""
        server = self.deployment.server
        assert server is not None
        code = server.ended()
        if left := self.deployment.left():
            return FAILED, f"left behind: {left}"
        log = "".join(server.log)
        outcome = RECOVERED if "requests go on" in log else WENT_ON
        return FAILED if code else outcome, f"exit code {code}"

    def _dies(self) -> bool:
        """Requests ended with errors: the server is to end."""
        end = time.monotonic() + (60 if self.result.lost > 1 else 5)
        while self.deployment.up() and time.monotonic() < end:
            time.sleep(0.02)
        return not self.deployment.up()

    def _ended(self, why: str) -> tuple[str, str]:
        """The server's process has ended, or can't come up."""
        deployment, server = self.deployment, self.deployment.server
        assert server is not None
        code = server.ended()
        began = time.monotonic()
        if left := deployment.left():
            return FAILED, f"left behind {deployment.end_limit:g} s after the server's end: {left}"
        if self.cell.who == "server":
            return ENDED, f"exit code {code}, all gone {time.monotonic() - began:.2f} s later"
        log = [line for line in "".join(server.log).splitlines() if line.strip()]
        said = log[-1] if self.cell.phase == "start-up" and log else why
        return NAMED if code > 0 and said else FAILED, f"exit code {code}: {said}"[:300]

    def _settle(self) -> None:
        """Wait until the deployment is whole."""
        end = time.monotonic() + SETTLE
        while why := self.deployment.whole():
            if time.monotonic() > end:
                raise Late(f"not whole {SETTLE:g} s later: {why}")
            time.sleep(0.1)
