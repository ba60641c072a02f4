"""The commands as a shell sees them: output, exit codes, one line for a mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proc.servers import needs_smollm2, planaria

pytestmark = needs_smollm2

SMALL = ["--kv-cache-memory", "128MiB", "--max-model-len", "1024"]


def one_line(text: str) -> str:
    """The error, which must be one line and no traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


def test_version() -> None:
    result = planaria("--version")
    assert result.returncode == 0 and re.fullmatch(r"planaria \d+\.\d+\.\d+\n", result.stdout)


def test_generate_json() -> None:
    """One compact object for each prompt, on standard output only."""
    result = planaria(
        "generate", "smollm2", *SMALL, "--prompt", "The capital of France is", "--prompt-token-ids", "504,3575,282",
        "--max-tokens", "5", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 2
    assert lines[0]["text"].startswith(" Paris")
    for line in lines:
        assert set(line) == {"text", "token_ids", "finish_reason", "executor", "link", "layout", "ranks"}
        assert len(line["token_ids"]) == 5 and line["finish_reason"] == "length"
        assert line["executor"] == "uni" and line["link"] == "direct" and len(line["ranks"]) == 1


def test_generate_without_tokenizer() -> None:
    result = planaria(
        "generate", "smollm2", *SMALL, "--skip-tokenizer-init", "--prompt-token-ids", "1,2,3", "--max-tokens", "3",
        "--ignore-eos", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (line,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert line["text"] == "" and len(line["token_ids"]) == 3


@pytest.mark.parametrize(
    "args, says",
    [
        (["generate", "smollm2", "--dtype", "int3", "--prompt", "x"], "--dtype int3"),
        (["generate", "smollm2", "--block-size", "7", "--prompt", "x"], "--block-size 7"),
        (["generate", "smollm2", "--max-model-len", "100000", "--prompt", "x"], "--max-model-len 100000"),
        (["generate", "smollm2", "--kv-cache-memory", "lots", "--prompt", "x"], "--kv-cache-memory lots"),
        (["generate", "smollm2", "-tp", "2", "--prompt", "x"], "--tensor-parallel-size"),
        (["generate", "smollm2", *SMALL, "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "/no/such/model", "--prompt", "x"], "/no/such/model"),
        (["generate", "smollm2"], "--prompt"),
        (["serve", "smollm2", "--port", "99999"], "--port 99999"),
    ],
)
def test_mistakes_are_one_line(args: list[str], says: str) -> None:
    result = planaria(*args, env={"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert says in one_line(result.stderr)


def test_no_memory_for_kv() -> None:
    result = planaria("serve", "smollm2", "--port", "0", "--kv-cache-memory", "1MiB")
    assert result.returncode == 1
    assert "--max-model-len" in result.stderr and "Traceback" not in result.stderr


def test_truncated_file(tmp_path: Path) -> None:
    from planaria.checkpoint import resolve_checkpoint

    data = Path(resolve_checkpoint("smollm2").path).read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[: len(data) // 2])
    result = planaria("serve", str(broken), "--port", "0")
    assert result.returncode == 2
    assert str(broken) in one_line(result.stderr)


def test_models_lists_the_alias() -> None:
    result = planaria("models", "--json")
    listed = json.loads(result.stdout)
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(
        listed["architectures"]
    )
    assert any(row["model"] == "smollm2" and row["ready"] for row in listed["models"])


def test_chat_from_a_pipe() -> None:

    result = subprocess.run(
        [sys.executable, "-m", "planaria", "chat", "smollm2", *SMALL, "--temperature", "0", "--max-tokens", "12"],
        input="What is the capital of France?\n\n", capture_output=True, text=True, timeout=120, env=os.environ,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
