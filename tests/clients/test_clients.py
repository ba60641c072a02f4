"""Clients that nobody here wrote drive a server of SmolLM2, each by a program in an environment of its own: `make
clients`, and `CLIENT=openai` for one."""

from __future__ import annotations

import os
import re
import subprocess
import time

import pytest

from planaria.checkpoint import resolve_checkpoint
from tests.clients.environments import CLIENTS, HERE, environment
from tests.clients.report import ROWS, Row

pytestmark = pytest.mark.clients
LIMIT = 600.0  # seconds for a client's program, where four others are busy: some take a minute to import


@pytest.mark.parametrize("client", CLIENTS)
def test_an_environment_is_a_list_of_versions(client: str) -> None:
    lines = (HERE / client / "pins.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9._-]+==[\w.+]+", line) for line in lines), lines
    names = {line.partition("==")[0] for line in lines}
    assert not names & {"torch", "triton"}, "a client of a server needs none"


@pytest.mark.parametrize("client", CLIENTS)
def test_client(client: str, server, tmp_path) -> None:
    row = Row(client)
    ROWS.append(row)
    try:
        python = environment(client)
    except subprocess.CalledProcessError as e:
        row.failed["install"] = e.output
        pytest.fail(f"pip could not install {client}/pins.txt:\n{e.output}")
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("PYTHON")}
    tokenizer, began = resolve_checkpoint("smollm2").tokenizer_dir, time.monotonic()
    program = subprocess.run(
        [python, HERE / client / "run.py", server.url, "smollm2", "sesame", tokenizer],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT,
        env=clean | {"PYTHONPATH": str(HERE / "common"), "HOME": str(tmp_path)},
    )  # fmt: skip
    row.seconds = time.monotonic() - began
    row.read(program.stdout)
    if program.returncode:
        row.failed["its program"] = f"exit code {program.returncode}\n{program.stderr[-4000:]}"
    failed = "\n".join(f"--- {name}\n{how}" for name, how in row.failed.items())
    assert not row.failed, f"{failed}\n--- standard error\n{program.stderr[-4000:]}"
    assert row.done, f"it did nothing:\n{program.stdout}{program.stderr}"
