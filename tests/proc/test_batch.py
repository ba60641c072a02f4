"""`planaria batch`, killed again and again: every request is answered once, as in a run that was left alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.proc import custom
from tests.proc.servers import PATIENCE, alive, needs_smollm2, planaria, titled, wait_until
from tests.proc.test_engine_death import counting

pytestmark = needs_smollm2

OPTIONS = [
    "--worker-cls", f"{custom.__name__}.HashRank", "--max-model-len", "512", "--max-num-seqs", "4", "--seed", "3",
]  # fmt: skip
COUNT = 40
TOKENS = 50  # of the answers to a line, about


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Completions and chats, with and without a seed, one of several prompts; two that fail."""
    lines: list[Any] = []
    for i in range(COUNT):
        body: dict[str, Any] = {"model": "smollm2", "max_tokens": 10 + i % 30}
        if i % 3 == 0:
            url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"Question {i}"}]
        else:
            url, body["prompt"] = "/v1/completions", [f"Story {i}", "Another"] if i % 7 == 1 else f"Story {i}"
        if i % 2:
            body["seed"] = i
        lines.append({"custom_id": f"request-{i}", "method": "POST", "url": url, "body": body})
    lines[20]["body"]["temperature"] = -1
    lines.insert(10, {"custom_id": "nowhere", "method": "POST", "url": "/v1/nowhere", "body": {}})
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def outcomes(path: Path) -> list[tuple[str, Any]]:
    """In the file's order: custom_id, and all of an answer but what differs from run to run by nature."""
    found = []
    for line in path.read_text().splitlines():
        value = json.loads(line)
        body = value["response"] and value["response"]["body"]
        if body and "choices" in body:
            body["usage"].pop("prompt_tokens_details")  # what was found in the prefix cache
            body = [body["choices"], body["usage"]]
        found.append((value["custom_id"], [body, value["error"]]))
    return found


@pytest.fixture(scope="module")
def expected(source: Path) -> list[tuple[str, Any]]:
    out = source.with_name("expected.jsonl")
    run = planaria("batch", str(source), str(out), *OPTIONS)
    assert run.returncode == 1, run.stderr
    assert "39 answered, 2 failed" in run.stderr
    found = outcomes(out)
    assert [id for id, _ in found] == [json.loads(line)["custom_id"] for line in source.read_text().splitlines()]
    return found


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_tree(process: subprocess.Popen[str], *, root_only: bool) -> None:
    """SIGKILL, of the root alone (the others must follow by themselves) or of every process."""
    below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    for pid in [] if root_only else below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait(PATIENCE)
    wait_until("all of its processes have ended", lambda: not any(alive(pid) for pid in below))


def start(source: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "planaria", "batch", str(source), str(out), *OPTIONS],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def more_lines(journal: Path, more: int) -> Iterator[None]:
    """The block is run when there are so many more, and the batch is not far beyond that then."""
    before = lines_in(journal)
    with counting() as told:

        def there() -> bool:
            found = lines_in(journal) - before
            told(TOKENS * found)
            return found >= more

        wait_until("the batch goes on", there, limit=120)
        yield


def test_killed_three_times_then_finished(source: Path, expected: list[tuple[str, Any]], tmp_path: Path) -> None:
    out, draw = tmp_path / "out.jsonl", random.Random(os.environ.get("PYTEST_XDIST_WORKER", "1"))
    journal = tmp_path / "out.jsonl.journal"
    for attempt in range(3):
        more = (1, *sorted(draw.sample(range(2, 14), 2)))[attempt]  # the first: while the engine still loads
        process = start(source, out)
        with more_lines(journal, more):
            kill_tree(process, root_only=attempt != 1)
        assert not out.exists()
    known = lines_in(journal)
    assert known >= 5
    with journal.open("ab") as f:
        f.write(b'{"line": 3, "result": {"id": "torn')  # what a kill in the middle of a write leaves
    run = planaria("batch", str(source), str(out), *OPTIONS)
    assert run.returncode == 1 and "going on: " in run.stderr, run.stderr
    assert outcomes(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]
    data = out.read_bytes()
    again = planaria("batch", str(source), str(out), *OPTIONS)  # nothing is left to do
    assert again.returncode == 1 and "was complete already" in again.stderr and out.read_bytes() == data


def test_an_engine_that_is_killed_is_replaced(source: Path, expected: list[tuple[str, Any]], tmp_path: Path) -> None:
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    process = start(source, out)
    with more_lines(journal, 6):
        for engine in titled(process.pid, "engine"):
            os.kill(engine, signal.SIGKILL)
    assert process.wait(120) == 1
    assert outcomes(out) == expected


def test_refused_at_the_door(source: Path, tmp_path: Path) -> None:
    double = tmp_path / "double.jsonl"
    double.write_text(source.read_text().splitlines()[0] + "\n" + source.read_text())
    run = planaria("batch", str(double), str(tmp_path / "out.jsonl"))
    assert run.returncode == 2 and "lines 1 and 2 have the same custom_id 'request-0'" in run.stderr
    assert len(run.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == [double]
