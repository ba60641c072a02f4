"""What is built from a checkout installs and runs without it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import planaria
from tests.proc.servers import needs_smollm2

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("planaria-*.whl")
    return wheel


def test_all_of_the_package_and_nothing_else_is_in_the_wheel(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "planaria"], cwd=ROOT, capture_output=True, text=True)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if not name.startswith("planaria-")} == set(listed.stdout.split())


def test_a_tag_is_a_version() -> None:
    """Where this commit has one, and CHANGELOG.md says what is in it."""
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, capture_output=True, text=True)
    assert tags.stdout.split() in ([], [f"v{planaria.__version__}"])
    assert f"\n## {planaria.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_sdist_is_small(built: Path) -> None:
    (sdist,) = built.glob("planaria-*.tar.gz")
    assert sdist.stat().st_size < 2_000_000


@needs_smollm2
def test_it_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are this environment's; it itself is not."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = subprocess.run(
        [sys.executable, "-c", "import planaria; print(planaria.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert where.startswith(str(tmp_path))
    said = subprocess.run(
        [sys.executable, "-m", "planaria", "generate", "smollm2", "--prompt", "The capital of France is",
         "--temperature", "0", "--max-tokens", "4"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "Paris" in said.stdout
