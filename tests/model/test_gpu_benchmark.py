"""What `benchmarks.gpu` does on a machine with a device, here without one: a model of a small layout, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu
from planaria.kernels.gpu.draw import DrawnTokens

SMALL = gpu.LLAMA_7B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1200, "max_position_embeddings": 512,
}  # fmt: skip


def test_the_parts_of_a_step_of_the_host() -> None:
    found = gpu.host(rows=8, steps=20, vocab=100)
    assert found["rows"] == 8 and found["all"][0] >= max(found[part][0] for part in ("plan", "worker", "commit")) > 0
    (table,) = [each for each in gpu.tables({"host": found}, "a device") if each.rows]
    assert [row[0].rsplit(": ")[-1] for row in table.rows[:4]] == ["all", "plan", "worker", "commit"]
    assert table.rows[4][1:] == ["<= 1", "1.00"]


def test_what_waits_is_in_the_profile() -> None:
    x, size = torch.arange(4), np.zeros((2, 3), np.int64)
    assert gpu.waits(lambda: x + 1) == 0 and gpu.waits(lambda: (int(x[1]), x.nonzero())) == 2
    assert gpu.waits(lambda: DrawnTokens(size, 3, None).read()) == 1


def test_memory_of_a_keeper() -> None:
    found = gpu.keeping("file", 1 << 30)
    assert found["bytes"] == 1 << 30 and min(found.values()) > 0
    (row,) = [each for table in gpu.tables({"memory": found}, "a device") for each in table.rows]
    assert row[0].startswith("1 GiB of a keeper") and len(row[2].split(", ")) == 2


def test_what_failed_is_in_the_page() -> None:
    ours = {
        "first": 2.0, "before": 0, "rates": {"1": 90.0, "32": 10.0}, "recorded": 2, "waits": 1.0, "busy": 0.93,
        "said": ["attention (decode): Triton"],
    }  # fmt: skip
    found = {
        "smollm2": {"planaria": ours, "vllm": {"rates": {"32": 20.0}}, "limit": 100.0},
        "7b": {"planaria": ours, "vllm": {"error": "Traceback\nno memory"}, "limit": 100.0},
        "recovery": {"error": "no such process\n"},
    }
    wrong = {"files": "tests/gpu", "passed": 3, "failed": 1, "wrong": ["tests/gpu/test_nccl.py::test_it"], "code": 1}
    rows = {name: value for name, _, value in gpu.tables({"correct": wrong, **found}, "a device")[0].rows}
    assert (
        rows["`pytest tests/gpu`"] == "3 passed, 1 failed" and rows[""] == "failed: `tests/gpu/test_nccl.py::test_it`"
    )
    assert rows["smollm2: 1 streams, tokens/s"] == "90, 90% of the limit"
    assert rows["smollm2: 32 streams, tokens/s"] == "10, 0.50 x vLLM"
    assert rows["7b: start to first token, s"] == "2.0, 0 steps recorded before"
    assert rows["7b: waits for the device in a step of 32, how much of the time it computes"] == "1.00, 93%"
    assert rows["7b: vLLM"] == "failed: no memory" and rows["7b: 32 streams, tokens/s"] == "10"
    assert rows["7b: shapes of steps that were recorded"] == "2; attention (decode): Triton"
    assert rows["recovery"] == "failed: no such process"
    assert gpu.tables({"recovery": {"all": 1.0, "failed": 0}}, "a device")[0].rows[0][2] == "1.00, 0 failed"


def test_one_case_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, too: with stand-ins for what needs one."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    def hangs() -> Any:
        subprocess.run([sys.executable, "-c", "print('so far', flush=True); import time; time.sleep(99)"], timeout=1,
                       capture_output=True, check=False)  # fmt: skip

    wrong = {"files": "tests/gpu", "failed": 1, "wrong": ["tests/gpu/test_nccl.py::test_it"], "code": 1}
    for name, own in {
        "correct": lambda here: wrong, "host": fails, "bandwidth": lambda: 1e12, "keeping": fails, "killed": hangs,
        "engine": lambda which, *_: fails() if which == "planaria" else {}, "bf16_folder": lambda _: "folder",
        "random_llama": lambda folder: folder,
    }.items():  # fmt: skip
        monkeypatch.setattr(gpu, name, own)
    found = gpu.run([*gpu.CASES], here=True)
    assert found.keys() == {*gpu.CASES}
    rows = {name: value for name, _, value in gpu.tables(found, "a device")[0].rows}
    said = "failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert rows["host"] == rows["memory"] == rows["7b-int4"] == rows["smollm2"] == said
    assert rows["recovery"].startswith("failed: it did not end") and rows["bandwidth, GB/s"] == "1000"


@pytest.mark.long
def test_a_random_model_is_served_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TOKENS", 24)
    model = str(gpu.random_llama(tmp_path, SMALL))
    for options in ({}, {"quantization": "q4_1"}):
        found = gpu.engine("planaria", model, {"device": "cpu", "dtype": "bfloat16", **options}, (1, 4))
        assert found.get("rates", {}).keys() == {"1", "4"}, found
        assert min(found["rates"].values()) > 0 and found["first"] > 0 and (found["recorded"], found["said"]) == (0, [])


def test_a_random_model_has_the_layout_that_is_asked_for(tmp_path: Path) -> None:
    from planaria.checkpoint import resolve_checkpoint

    checkpoint = resolve_checkpoint(str(gpu.random_llama(tmp_path, SMALL)))
    assert checkpoint.config["vocab_size"] == 1200
    assert sum(1 for _ in tmp_path.glob("*.safetensors")) == 3
