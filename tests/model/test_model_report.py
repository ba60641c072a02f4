"""What `planaria models MODEL` says, beside what an engine then does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from planaria import LLM
from planaria.cli.model_report import report
from tests.model.checkpoints import write_checkpoint, write_talker
from tests.model.test_quantised import OPTIONS, write


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """Fails where torch is imported."""
    code = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'planaria'; from planaria.cli.app import app; app()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


def test_it_is_what_an_engine_does(tmp_path: Path) -> None:
    folder, _, values = write(tmp_path, "gptq-zeros")
    said = report(str(folder))
    assert (said["family"], said["refused"], said["parameters"]) == ("LlamaForCausalLM", None, 131 * 96 * 2 + 96 + 2 * (
        96 * 2 + 96 * 32 * 6 * 2 + 2 * 96 * 32 * 3 + 3 * 96 * 192))  # fmt: skip
    (kept,) = [form for form in said["weights"] if form["stored"] == "GPTQ, 4 bits"]
    assert (kept["form"], kept["tensors"], kept["unpacked"]) == ("q4_1", len(values), False)
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as llm:
        facts = llm.facts
    assert facts.dtype == said["computed_in"] and abs(facts.weight_bytes / said["weight_bytes"] - 1) < 0.02
    assert facts.kv_bytes == facts.num_blocks * facts.block_size * said["kv_bytes_per_token"]


def test_what_will_not_work_is_said(tmp_path: Path) -> None:
    for name in ("nf4", "damaged"):
        (tmp_path / name).mkdir()
    folder, plain, _ = write(tmp_path / "nf4", "nf4")
    limits = report(str(folder))["limits"]
    assert any(line.startswith("bitsandbytes, 4 bits: unpacked to 3.5 times") for line in limits)
    assert any("no tokenizer files" in line for line in limits)
    talker = report(str(write_talker(tmp_path / "talker")))["limits"]
    assert any("no chat template" in line for line in talker) and not any("tokenizer files" in line for line in talker)
    tensors = load_file(plain / "model.safetensors")
    save_file({**tensors, "extra.weight": tensors["lm_head.weight"].clone()}, plain / "model.safetensors")
    assert any("1 tensors are not part of" in line and "extra.weight" in line for line in report(str(plain))["limits"])
    del tensors["model.norm.weight"]
    save_file(tensors, plain / "model.safetensors")
    assert "model.norm.weight is missing" in report(str(plain))["refused"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["Qwen3NextForCausalLM"]}, "architecture Qwen3NextForCausalLM is not supported"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "weights quantized with aqlm"),
        ({"head_dim": 24}, "head sizes that are multiples of 16"),
    ],
)
def test_a_model_that_cannot_be_loaded(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    """From config.json alone, too."""
    folder = write_checkpoint(tmp_path / "m", "llama", **({} if "head_dim" not in changes else changes))
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    for _ in range(2):
        said = report(str(folder))
        assert why in said["refused"] and said["family"] == config["architectures"][0]
        (folder / "model.safetensors").unlink(missing_ok=True)


def test_the_command(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "gemma2", head_dim=32)
    found = command("models", str(folder))
    assert found.returncode == 0 and "Gemma2ForCausalLM" in found.stdout and "bytes a token" in found.stdout
    assert "layers with a window keep keys and values of whole texts" in found.stdout
    machine = command("models", "show", str(folder), "--json")
    assert json.loads(machine.stdout)["kv_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    (folder / "model.safetensors").write_bytes(b"nothing")
    damaged = command("models", str(folder))
    assert damaged.returncode == 1 and "won't load" in damaged.stdout and not damaged.stderr
