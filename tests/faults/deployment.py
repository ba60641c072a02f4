"""Deployments of a small random model whose processes fail when they are told to, and ending them for certain."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil

import tests.faults.worker as workers
from planaria.node import process_state
from tests.faults.orders import FOLDER, Orders
from tests.faults.streams import VOCABULARY, Load, Stream, within
from tests.proc.servers import PATIENT, Server, alive

ROOT = Path(__file__).resolve().parents[2]
MAX_LENGTH = 256
SMALL = [
    "--skip-tokenizer-init", "--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "16",
    "--max-num-batched-tokens", "48", "--heartbeat-timeout", "5", "--served-model-name", "m", *PATIENT,
]  # fmt: skip
REAL = ["--dtype", "float32", "--batch-invariant", "--kv-cache-memory", "16MiB"]
LAYOUTS = {
    "mp-tp2": ["-tp", "2"], "mp-pp2": ["-pp", "2"], "mp-tp2-spare": ["-tp", "2", "--spare-workers", "1"],
    "mp-pp2-spare": ["-pp", "2", "--spare-workers", "1"],
}  # fmt: skip


def worker_of(model_rank: bool) -> str:
    return f"{workers.__name__}.{'ModelRank' if model_rank else 'HashRank'}"


def write_model(folder: Path, *, real: bool = True) -> Path:
    """A random model of two layers; without weights, for ranks that read none."""
    if real:
        from tests.model.checkpoints import write_checkpoint

        return write_checkpoint(folder, "llama")
    shape = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": MAX_LENGTH,
    }  # fmt: skip
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


class Deployment:
    """A server, its engine, two ranks and, where they are kept, a spare. `start` and `end` as often as needed; what it
    answers without a fault is `expected`, asked for once.

    real: ranks compute a model, in float32 and the mode in which a continuation is the same to the last bit.
    """

    space = ""  # the network namespace in which the server can be reached
    limit = 120.0  # seconds in which all streams of a cell must have ended
    lasting = True  # for another cell
    names: tuple[str, ...] = ("engine", "rank0", "rank1")  # that there must be
    end_limit = 2.0  # seconds in which everything ends when the server has

    def __init__(self, name: str, model: Path, *, real: bool = True) -> None:
        self.name, self.model, self.real = name, model, real
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.orders = Orders(self.folder)
        self.server: Server | None = None
        self.expected: dict[int, list[Stream]] = {}  # by which prompts
        self.outside: dict[str, Callable[[str], None]] = {}  # who is no process of ours: what harms it

    # -- its life

    def options(self) -> list[str]:
        return LAYOUTS[self.name]

    def arguments(self) -> list[str]:
        more = REAL if self.real else []
        return [str(self.model), *SMALL, *more, "--worker-cls", worker_of(self.real), *self.options()]

    def environment(self) -> dict[str, str]:
        return {**os.environ, FOLDER: str(self.folder), "PYTHONPATH": str(ROOT)}

    def command(self) -> Server:
        return Server(*self.arguments(), module="tests.faults.serve", env=self.environment())

    def start(self, limit: float = 120.0) -> str:
        """ "" when it is ready, or how it ended instead."""
        assert self.server is None
        self.server = server = self.command()
        return server.wait_up(limit)

    def up(self) -> bool:
        """The server's process is there."""
        return self.server is not None and self.server.process.poll() is None

    def get(self, path: str) -> Any:
        assert self.server is not None
        url = self.server.url
        return within(self.space, lambda: httpx2.get(url + path, timeout=10).json())

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/health")
        return found

    def load(self, tokens: int, other: int = 0) -> Load:
        assert self.server is not None
        return Load(self.server.url, tokens=tokens, other=other, space=self.space)

    def learn(self, tokens: int, other: int = 0) -> list[Stream]:
        """What it answers to these prompts without a fault. Starts it, if it isn't up."""
        if other not in self.expected:
            if not self.up():
                self.end()
                why = self.start()
                assert not why, why
            load = self.load(tokens, other)
            load.wait(self.limit)
            bad = [stream.error for stream in load.streams if not stream.finish]
            assert not bad, bad
            self.expected[other] = load.streams
        return self.expected[other]

    def pids(self, name: str) -> list[int]:
        """Of living processes that go by this name."""
        return [pid for pid, who in self.orders.pids().items() if who == name and alive(pid)]

    def runs(self, name: str) -> bool:
        """Is there one that isn't stopped?"""
        return any(process_state(pid) not in ("T", "t") for pid in self.pids(name))

    def whole(self) -> str:
        """ "" if all is there and ready for the next cell; else what isn't."""
        names = [*self.names, *(["spare"] if "--spare-workers" in self.options() else [])]
        missing = [name for name in names if not self.runs(name)]
        if missing:
            return f"there is no {', no '.join(missing)}"
        try:
            body = self.health()
        except (httpx2.HTTPError, ValueError) as e:
            return f"/health can't be read: {e}"
        return "" if body["ready"] and body["live"] and not body["recovering"] else str(body["why"])

    # -- its end

    def left(self, limit: float | None = None) -> dict[int, str]:
        """Processes that are still there so many seconds after the server's end."""
        end = time.monotonic() + (self.end_limit if limit is None else limit)
        while True:
            found = {pid: who for pid, who in self.orders.pids().items() if alive(pid)}
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.02)

    def end(self) -> None:
        """Kill what is left of it, by pid."""
        if self.server is not None:
            if self.server.process.poll() is None:
                self.server.process.kill()
            self.server.process.wait(60)
            self.server = None
        for pid in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(pid, signal.SIGKILL)
        self.left(5.0)
        shutil.rmtree(self.folder, ignore_errors=True)  # a process that just began may still write into it
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.orders = Orders(self.folder)

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)
