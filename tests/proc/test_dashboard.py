"""The dashboard as a browser shows it: a picture of the ranks, charts, and what happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from planaria.server import dashboard
from tests.model.checkpoints import write_checkpoint
from tests.proc.servers import Server, needs_smollm2, planaria, wait_until
from tests.proc.test_engine_death import HASH, health, run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    needs_smollm2,
    pytest.mark.skipif(dashboard.script() is None, reason="the extra dashboard (plotly) is not installed"),
]
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")
SIZE = (1280, 1000)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("smollm2", *HASH, "-tp", "2", "-dp", "2", "--admin-key", "secret") as server:
        yield server


def browse(server: Server, profile: Path, *what: str) -> str:
    """What the browser writes; time in the page runs until it has asked for data a few times."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}", "--virtual-time-budget=5000", *what,
            server.url + "/dashboard",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def counted(server: Server, name: str) -> int:
    """A count of /metrics."""
    said = re.search(rf"^{name}_total\S* (\S+)$", httpx2.get(server.url + "/metrics").text, re.MULTILINE)
    assert said is not None
    return int(float(said[1]))


def sampled(server: Server) -> list[int]:
    """The same of the history that the page has."""
    data = httpx2.get(server.url + "/admin/dashboard").json()
    last = dict(zip(data["columns"], data["samples"][-1], strict=True))
    return [last["generation_tokens"], last["replayed_tokens"]]


def test_data_is_for_who_has_the_key(server: Server) -> None:
    assert httpx2.get(server.url + "/dashboard").status_code == 200  # a page without data
    assert httpx2.get(server.url + "/dashboard/plotly.min.js").status_code == 200
    assert httpx2.get(server.url + "/admin/dashboard").status_code == 401
    data = httpx2.get(server.url + "/admin/dashboard", headers={"Authorization": "Bearer secret"}).json()
    assert [engine["engine"] for engine in data["engines"]] == [0, 1] and len(data["processes"]) == 6


@needs_browser
def test_the_page_asks_for_the_key(server: Server, tmp_path: Path) -> None:
    page = browse(server, tmp_path, "--dump-dom")
    assert 'id="login" class="open"' in page and "data-rank" not in page.split("<script>")[0]


@needs_browser
def test_ranks_charts_and_faults_are_seen(tmp_path: Path) -> None:
    with Server("smollm2", *HASH, "-tp", "2", "-dp", "2") as server:
        run(server, lambda tokens: os.kill(server.rank_pids()[-1], signal.SIGKILL) if tokens == 100 else None)
        wait_until("it has recovered", lambda: (health(server)["last_fault"] or {}).get("recovered"))
        run(server)
        counts = [counted(server, name) for name in ("vllm:generation_tokens", "planaria:replayed_tokens")]
        wait_until("its history has them", lambda: sampled(server) == counts)
        page = browse(server, tmp_path, "--dump-dom")
        picture = tmp_path / "dashboard.png"
        browse(server, tmp_path, f"--screenshot={picture}")
    shown = page.split("<script>")[0]
    assert sorted(re.findall(r'data-rank="(\d)"', shown)) == ["0", "0", "1", "1"]
    assert "epoch 0" in shown and "epoch 1" in shown and ">serving<" in shown
    assert re.search(r"rank 1 failed in (step|idle)", shown) and "its process was killed by signal 9" in shown
    assert 'data-head="cause"' in shown, "a phone says it beside each cell"
    tiles = re.findall(r"<b>([^<]*)</b><span>(tokens generated|computed again after faults)</span>", shown)
    assert [int(re.sub(r"\D", "", figure)) for figure, _ in tiles] == counts and all(counts)
    for chart in ("generated", "prompt", "states", "first", "between", "queued", "kv"):
        drawn = re.search(rf'id="{chart}".*?<svg class="main-svg".*?class="js-line".*? d="M([^"]+)"', page, re.DOTALL)
        assert drawn and len(drawn[1].split("L")) > 1, f"nothing is drawn in {chart}"
    assert shown.count(">✕<") == 7, "the fault is marked on every chart over time"
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == SIZE
    assert len(data) > 30_000, "the picture is all but empty"


@needs_browser
def test_the_load_of_experts_is_seen(tmp_path: Path) -> None:
    """Drawn by layer: a heat map of experts, one of ranks with their numbers, and bars."""
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    folder = write_checkpoint(tmp_path / "model", "qwen3_moe", **moe)
    balanced = ("--enable-expert-parallel", "--enable-eplb", "--eplb-config", '{"window_size": 4, "step_interval": 9}')
    small = ("--max-model-len", "128", "--kv-cache-memory", "16MiB", "--skip-tokenizer-init")
    with Server(str(folder), "-tp", "2", *balanced, *small) as server:
        body = {"model": str(folder), "prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        assert httpx2.post(server.url + "/v1/completions", json=body, timeout=120).status_code == 200
        page = browse(server, tmp_path, "--dump-dom")
        said = planaria("experts", "--url", server.url)
    shown = page.split("<script>")[0]
    assert re.search(r"engine 0 · 2 ranks · load of \d+ steps · balancedness [01]\.\d{3}", shown)
    chart = shown[shown.index('id="experts-0"') :]
    assert chart.count('class="hm"') == 2 and chart.count('class="point"') == 3
    numbers = [float(n) for n in re.findall(r'class="heatmap-label"><text [^>]*>(\d\.\d\d)</text>', chart)]
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    assert [sum(pair) for pair in pairs] == pytest.approx([2, 2, 2], abs=0.02)  # over the mean of two ranks
    assert "tokens of each expert" in chart and "balancedness (1 is even)" in chart
    assert said.returncode == 0 and said.stdout.startswith("engine 0: 2 ranks, load of "), said.stderr
