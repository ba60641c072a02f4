"""`vllm serve` of its CPU build over two pipeline stages (it refuses two tensor ranks of this model): to be harmed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import httpx2

from benchmarks import environments, proc
from benchmarks.deployment import Streaming

START_LIMIT = 600.0  # seconds; it compiles for about a minute
TITLES = {"worker": "VLLM::Worker", "engine": "VLLM::EngineCore"}


class VllmServer(Streaming):
    """Ready when the block begins. `started`: seconds until it answered. folder: a checkpoint. Raises RuntimeError."""

    def __init__(self, python: Path, folder: Path, max_model_len: int, kv_bytes: int) -> None:
        super().__init__("m")
        environments.write_vllm_stub(python)
        variables, _ = environments.vllm_variables(python)
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        with socket.socket() as held:  # it takes no port 0; nothing else asks for ports on this machine meanwhile
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.folder = tempfile.TemporaryDirectory(prefix="vllm-")
        self.log = Path(self.folder.name) / "log"
        began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1",
                 "--port", str(port), "--dtype", "bfloat16", "--served-model-name", self.model,
                 "--kv-cache-memory-bytes", str(kv_bytes), "--max-model-len", str(max_model_len),
                 "--max-num-seqs", "64", "--no-enable-prefix-caching", "--pipeline-parallel-size", "2"],
                stdout=log, stderr=log, text=True, env={**os.environ, **variables}, cwd=self.folder.name,
            )  # fmt: skip
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() - began > START_LIMIT:
                proc.kill(self.process.pid)
                raise RuntimeError("vllm did not start: " + self.log.read_text()[-2000:])
            time.sleep(0.2)
        self.started = time.monotonic() - began

    def answers(self) -> bool:
        """Does it make a token?"""
        try:
            answer = self.http.post(self.url + "/v1/completions", json=self.body([5, 6, 7], 1, stream=False))
        except httpx2.TransportError:
            return False
        return answer.status_code == 200

    def victims(self, role: str) -> list[int]:
        found = []
        for pid in proc.tree(self.process.pid):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if title.startswith(TITLES[role]):
                    found.append(pid)
        return found

    def close(self) -> int:
        """Whatever is left of it ends, too."""
        pids = proc.tree(self.process.pid)
        code = super().close()
        for pid in pids:
            if proc.tree(pid):
                proc.kill(pid)
        self.folder.cleanup()
        return code
