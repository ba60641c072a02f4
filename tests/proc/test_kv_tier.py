"""KV outside of the cache, behind a server: processes are killed, and what had been computed comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.proc.servers import Server, wait_until

PROMPT = [(7 + 131 * i) % 100 for i in range(600)]


def ask(server: Server, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx2.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def metric(server: Server, name: str) -> float:
    lines = httpx2.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"planaria:kv_tier_{name}"))


def tier(server: Server, store: str = "disk") -> str:
    return httpx2.get(server.url + "/health").json()["engines"][0]["kv_tier"][store]  # type: ignore[no-any-return]


def test_what_was_computed_comes_back_after_the_end_of_everything(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    options = [
        str(small), "--served-model-name", "m", "--skip-tokenizer-init", "--kv-tier", f"{folder},1GiB", "--dtype",
        "float32", "--max-model-len", "1024", "--kv-cache-memory", "16MiB", "--threads", "1",
    ]  # fmt: skip
    with Server(*options) as server:
        first = ask(server, cache_salt="mine")
        wait_until("all is on disk", lambda: metric(server, "saved_blocks_total") == 37)
        assert tier(server) == "ok"
        for pid in (server.pid, *server.engine_pids(), *server.rank_pids()):
            os.kill(pid, signal.SIGKILL)
    with Server(*options) as server:
        yours = ask(server, cache_salt="yours")
        assert yours["choices"] == first["choices"] and metric(server, "hits_total") == 0
        mine = ask(server, cache_salt="mine")
        assert mine["choices"] == first["choices"] and metric(server, "hits_total") == 37 * 16
        wait_until("nothing is being written", lambda: metric(server, "saved_blocks_total") == 37)
        folder.rename(tmp_path / "gone")
        folder.write_text("no folder any more")
        assert ask(server, prompt=PROMPT[::-1])["choices"]
        wait_until("it is said", lambda: tier(server) != "ok")
        assert tier(server).startswith("nothing can be written: ") and metric(server, "writable") == 0
        assert ask(server, cache_salt="third")["choices"] == first["choices"]


@pytest.mark.parametrize("whom", ["rank", "engine"])
def test_what_is_in_memory_of_the_node_outlives_its_rank_and_its_engine(small: Path, whom: str) -> None:
    options = [
        str(small), "--served-model-name", "m", "--skip-tokenizer-init", "--kv-offloading-size", "0.1", "--dtype",
        "float32", "--max-model-len", "1024", "--kv-cache-memory", "1100KiB", "--threads", "1",
        "--distributed-executor-backend", "mp",
    ]  # fmt: skip
    with Server(*options) as server:
        first = ask(server)
        wait_until("all is in memory", lambda: metric(server, "saved_blocks_total") == 37)
        for number in range(5):
            ask(server, prompt=[(number + 3 * i) % 90 for i in range(600)])
        assert tier(server, "memory") == "ok"
        found = server.rank_pids() if whom == "rank" else server.engine_pids()
        hits = metric(server, "hits_total")
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        again = ask(server)
        assert again["choices"] == first["choices"]
        hits = metric(server, "hits_total") - (hits if whom == "rank" else 0)
        assert hits >= 32 * 16 and again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32 * 16
