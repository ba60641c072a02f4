"""The container: how large it is, computed from what is installed here; and built, where there are a builder and an
image to begin with (PLANARIA_CONTAINER_BASE names another than the Containerfile's; what is there is used, none is
fetched)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import planaria

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/Containerfile"
LIMIT = 1.2e9  # bytes, for CPUs
NAME = "planaria-test"
BASE = 0.15e9  # of an image with Python and not much else


def installed(name: str, extras: set[str], seen: set[tuple[str, str]]) -> Iterator[metadata.Distribution]:
    """A distribution and all that it requires, each once."""
    for extra in extras | {""}:
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        distribution = metadata.distribution(name)
        if (name, "") not in seen or not extra:
            yield distribution
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield from installed(canonicalize_name(requirement.name), set(requirement.extras), seen)


def size_of(distribution: metadata.Distribution, left_out: re.Pattern[str]) -> int:
    """Bytes of its files, but for those."""
    files = distribution.files or ()
    paths = (Path(str(distribution.locate_file(file))) for file in files if not left_out.match(str(file)))
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_it_is_not_too_large() -> None:
    """With its default extras, less what it leaves out, as installed here. It doesn't take torch for CUDA."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("the torch here is for CUDA")
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)", FILE.read_text(), re.M)
    left_out = re.compile(r"torch/(include|test|bin)/|[ns]\w+/(\w+/)*tests/|\.\./")
    found = list(installed("planaria", set(extras.split(",")), set()))
    sizes = {distribution.name: size_of(distribution, left_out) for distribution in found}
    own = sum(path.stat().st_size for path in (ROOT / "planaria").rglob("*.py"))
    assert len(sizes) > 20 and sizes["torch"] > 1e8 and own > 1e6
    assert BASE + sum(sizes.values()) + 3 * own < LIMIT, sizes


def buildah(*words: str) -> subprocess.CompletedProcess[str]:
    """As root or not, without privileges: in a changed root, over plain folders."""
    return subprocess.run(
        ["buildah", "--storage-driver", "vfs", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def base() -> str:
    if shutil.which("buildah") is None:
        pytest.skip("no buildah here")
    (usual,) = re.findall(r"^ARG BASE=(\S+)", FILE.read_text(), re.M)
    name = os.environ.get("PLANARIA_CONTAINER_BASE", usual)
    if buildah("inspect", "--type", "image", name).returncode:
        pytest.skip(f"the image {name} is not here")
    return name


@pytest.mark.long
def test_it_is_built_and_runs_as_nobody_special(base: str) -> None:
    """PLANARIA_CONTAINER_EXTRAS: others than usual."""
    arguments = [f"BASE={base}"]
    if extras := os.environ.get("PLANARIA_CONTAINER_EXTRAS"):
        arguments.append(f"EXTRAS={extras}")
    given = [word for argument in arguments for word in ("--build-arg", argument)]
    how = ["--isolation", "chroot", "--format", "docker", "--pull=false"]
    built = buildah("bud", *how, *given, "-f", str(FILE), "-t", NAME, ".")
    assert built.returncode == 0, built.stderr[-5000:]
    assert "127.0.0.1:8000/version" in buildah(
        "inspect", "--type", "image", "--format", "{{.Docker.Config.Healthcheck}}", NAME
    ).stdout  # fmt: skip
    working = buildah("from", "--pull-never", NAME).stdout.strip()
    try:
        said = "id -u && planaria --version && planaria serve --help && du -sbx / --exclude=/proc --exclude=/sys"
        run = buildah("run", "--isolation", "chroot", working, "--", "sh", "-c", said)
        lines = run.stdout.splitlines()
        assert len(lines) > 3, run.stderr  # du finds what it may not read
        assert lines[0] == "10001" and planaria.__version__ in lines[1] and "--max-model-len" in run.stdout
        assert int(lines[-1].split()[0]) < LIMIT
    finally:
        buildah("rm", working)
        buildah("rmi", NAME)
