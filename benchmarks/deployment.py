"""A server of this checkout that is to be harmed while it is measured: its processes by role, what each holds, a stream
of its answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from benchmarks import proc
from planaria.processes import read_title


@dataclass(frozen=True)
class Process:
    """role: server, engine, worker or spare. rank: of a worker, else -1."""

    pid: int
    role: str
    rank: int


@dataclass
class Footprint:
    """What processes hold. memory: bytes, private and shared, without mapped files. segments: descriptors and mappings
    of memory files (memfd), by which links and sums over ranks go."""

    processes: int = 0
    memory: int = 0
    descriptors: int = 0
    segments: int = 0
    threads: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


class Streaming:
    """Something that answers /v1/completions at `url`; `process` is the root of its processes."""

    url: str
    process: subprocess.Popen[str]

    def __init__(self, model: str) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # which leaves no block, and so no end to this
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        self.model = model
        self.http = httpx2.Client(timeout=60)  # kept: to make one takes longer than most answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> int:
        """End it; its exit code. One that doesn't end is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            proc.kill(self.process.pid)
            return self.process.wait()

    def body(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """Of a streamed request for exactly so many tokens, greedy where `more` doesn't say otherwise."""
        return {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, **more,
        }  # fmt: skip

    async def stream(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The choices of a streamed completion, one after the other. Raises RuntimeError where it is an error, or ends
        without a finish reason."""
        finish = None
        async with client.stream("POST", self.url + "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        raise RuntimeError(line)
                    for choice in event["choices"]:
                        finish = choice["finish_reason"] or finish
                        yield choice
                elif line and line != "data: [DONE]":
                    raise RuntimeError(f"{response.status_code}: {line}")
        if finish != "length":
            raise RuntimeError(f"it ended with finish reason {finish}")


class Server(Streaming):
    """`planaria serve MODEL ARGUMENTS` in a process of its own, ready when the block begins; `log` is what it wrote."""

    def __init__(self, model: str, *arguments: str) -> None:
        super().__init__(model)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "planaria", "serve", model, "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " at " not in line:
            self.process.wait()
            self._reader.join()
            raise RuntimeError("the server did not start: " + "".join(self.log))
        self.url = line.split(" at ")[1].split()[0]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))

    def processes(self) -> list[Process]:
        """Those that have said what they are, from the process table: an engine that is stopped can't be asked."""
        found = []
        for pid in proc.tree(self.process.pid):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
                if (title := read_title(line)) is not None:
                    found.append(Process(pid, title[0], int(title[1].get("rank", -1))))
        return sorted(found, key=lambda process: (process.role, process.rank, process.pid))

    def victims(self, role: str) -> list[int]:
        return [process.pid for process in self.processes() if process.role == role]

    def health(self) -> dict[str, Any]:
        """/health, whatever its status. Raises RuntimeError, with the end of its log, where there is no server."""
        try:
            found: dict[str, Any] = self.http.get(self.url + "/health").json()
        except httpx2.TransportError as e:
            said = "".join([line for line in self.log if " I planaria" not in line][-60:])
            raise RuntimeError(f"the server doesn't answer: {e}\n{said}") from None
        return found


def footprint(pid: int) -> Footprint:
    """Of one process. Raises OSError for one that has ended."""
    base = Path(f"/proc/{pid}")
    values = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines() if ":" in line)
    links = []
    for entry in (base / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(entry))
    mapped = sum("memfd:" in line for line in (base / "maps").read_text().splitlines())
    memory = sum(int(values[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return Footprint(1, memory, len(links), mapped + sum("memfd:" in link for link in links), int(values["Threads"]))


def patient_client() -> httpx2.AsyncClient:
    """For as many streams as one likes, that wait for as long as it takes."""
    return httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))


def wait_healthy(server: Server, limit: float = 120.0) -> dict[str, Any]:
    """Until nothing is being recovered and requests would be taken; /health then. Raises RuntimeError."""
    end = time.monotonic() + limit
    while True:
        health = server.health()
        if health["ready"] and not health["recovering"]:
            return health
        if time.monotonic() > end:
            raise RuntimeError(f"not healthy within {limit:g} s: {health}")
        time.sleep(0.1)
