"""Engines of two kinds as actors on different nodes of a cluster: KV goes over the network."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.model.checkpoints import write_checkpoint
from tests.proc.asking import ask_all
from tests.proc.servers import Server, wait_until
from tests.proc.test_nodes import SECRET
from tests.proc.test_prefill_decode import ASKED, OPTIONS, engines, metric


@pytest.mark.long
def test_prompts_are_computed_on_one_node_and_go_on_on_another(three: Any, tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "small", "llama", max_position_embeddings=2048))
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with Server(model, *OPTIONS, "-tp", "2") as plain:
        expected = ask_all(plain.url, model, ASKED)
    kinds = ["--prefill-engines", "1", "--decode-engines", "1", "--data-parallel-backend", "ray", "-tp", "2"]
    with Server(model, *OPTIONS, *kinds, "--secret-file", str(secret)) as server:
        assert ask_all(server.url, model, ASKED) == expected
        assert metric(server, "planaria:kv_transfer_blocks_total") > 0
        (pid,) = [engine["pid"] for engine in engines(server) if engine["kind"] == "prefill"]
        assert ask_all(server.url, model, ASKED, at=60, harm=lambda: os.kill(pid, signal.SIGKILL)) == expected
        wait_until("both engines", lambda: [engine["state"] for engine in engines(server)] == ["ready"] * 2)
