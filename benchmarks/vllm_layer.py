"""The benchmark's end of `peers/vllm_layer_driver.py`: vLLM's layer in its own process, stopped while others run."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks import environments, proc

DRIVER = Path(__file__).resolve().parent / "peers" / "vllm_layer_driver.py"
LIMIT = 300.0  # seconds for an answer; importing vLLM takes 10 on a quiet machine


class VllmLayer:
    """Raises RuntimeError where it doesn't start or answer."""

    def __init__(self, python: Path, threads: int, log: Path, **settings: Any) -> None:
        self.log = log
        variables, self.warnings = environments.vllm_variables(python)
        variables |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(python), str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, **variables}, cwd=log.parent,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        try:
            self.about = self.ask("start", threads=threads, **settings)
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        proc.resume(self.process.pid)
        self.process.stdin.write(json.dumps({"do": what, **fields}).encode() + b"\n")
        self.process.stdin.flush()
        answer, until = b"", time.monotonic() + LIMIT
        while not answer.endswith(b"\n"):
            if not self.selector.select(max(0.0, until - time.monotonic())):
                raise RuntimeError(f"vLLM's layer: no answer to {what} in {LIMIT:.0f} s; see {self.log}")
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            if not part:
                raise RuntimeError(f"vLLM's layer ended during {what}: {self.log.read_text(errors='replace')[-2000:]}")
            answer += part
        proc.pause(self.process.pid)
        reply = json.loads(answer)
        if "error" in reply:
            raise RuntimeError(f"vLLM's layer: {what}: {reply['error']}; see {self.log}")
        result: dict[str, Any] = reply["ok"]
        return result

    def steps(self, tokens: int, seconds: float) -> list[float]:
        """Milliseconds of each of the steps it does in this time."""
        found: list[float] = self.ask("steps", tokens=tokens, seconds=seconds)["ms"]
        return found

    def close(self) -> None:
        proc.kill(self.process.pid)
        self.process.wait()
        self.selector.close()
