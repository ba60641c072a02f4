"""The comparison's end of `peers.peer_protocol`: one process per engine, started, asked, paused, ended."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import proc

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
START_LIMIT = 600.0  # seconds; vLLM compiles for a minute, longer on a busy machine
RUN_LIMIT = 900.0
EXIT_LIMIT = 30.0
LAST_LINES = 12


class DriverError(Exception):
    """An engine that failed or didn't answer in time; one line."""


@dataclass
class Spec:
    """An engine to measure. `bytes_per_token`: weights that one token of one stream reads."""

    name: str
    python: Path
    script: str
    model: str
    weights: str
    bytes_per_token: int
    settings: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    solo_starts: int = 1


class Driver:
    """One engine's process. Paused from the end of `start` on, except inside `awake()`."""

    def __init__(self, spec: Spec, logs: Path) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        script = HERE / "peers" / spec.script
        variables = {**os.environ, **spec.variables}
        variables["PYTHONPATH"] = str(ROOT) if spec.script.startswith("planaria") else ""
        began = time.time()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(spec.python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=variables, cwd=logs,
            )  # fmt: skip
        self.selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.pending = b""
        try:
            self.started = self._ask({"do": "start", "began": began, "model": spec.model, **spec.settings}, START_LIMIT)
        except BaseException:
            self.kill()
            raise
        proc.pause(self.process.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The only one that runs meanwhile."""
        proc.resume(self.pid)
        try:
            yield
        finally:
            proc.pause(self.pid)

    def run(self, seed: int, shapes: list[list[int]]) -> dict[str, Any]:
        """One scenario while awake. Raises DriverError."""
        return self._ask({"do": "run", "seed": seed, "shapes": shapes}, RUN_LIMIT)

    def close(self) -> None:
        """Let it end; kill what doesn't."""
        proc.resume(self.pid)
        try:
            self._ask({"do": "exit"}, EXIT_LIMIT)
            self.process.wait(EXIT_LIMIT)
        except (DriverError, OSError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def kill(self) -> None:
        proc.kill(self.pid)
        self.process.wait()
        self.selector.close()

    def _ask(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()
        until = time.monotonic() + limit
        while b"\n" not in self.pending:
            if not self.selector.select(max(0.0, until - time.monotonic())):
                raise DriverError(f"{self.spec.name}: no answer to {message['do']} in {limit:.0f} s; see {self.log}")
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            if not part:
                raise DriverError(f"{self.spec.name}: ended during {message['do']}: {self._last_words()}")
            self.pending += part
        line, _, self.pending = self.pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise DriverError(f"{self.spec.name}: {message['do']}: {answer['error']}; see {self.log}")
        result: dict[str, Any] = answer["ok"]
        return result

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        return f"{lines[-1] if lines else 'no output'}; see {self.log}"


@contextmanager
def running(spec: Spec, logs: Path) -> Iterator[Driver]:
    driver = Driver(spec, logs)
    try:
        yield driver
    finally:
        driver.close()


def quietest(
    measure: Callable[[], dict[str, Any]], limit: float, retries: int, pid: int | None = None
) -> dict[str, Any]:
    """`measure()`, again while others used more than `limit` % of a core, at most `retries` more times; the least
    disturbed one, with what was used as "foreign": watched for the tree of `pid`, or said by `measure` itself."""
    best: dict[str, Any] | None = None
    for _ in range(retries + 1):
        watch = proc.Foreign(pid) if pid is not None else None
        result = measure()
        if watch is not None:
            result["foreign"] = watch.percent()
        if best is None or result["foreign"] < best["foreign"]:
            best = result
        if best["foreign"] <= limit or "skipped" in result:
            break
    assert best is not None
    return best
