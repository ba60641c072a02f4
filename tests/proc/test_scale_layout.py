"""`planaria scale --tp`, `--pp`: a running engine gets another layout while requests stream."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from tests.proc.servers import Server, needs_smollm2, planaria
from tests.proc.test_engine_death import HASH, expected, health, run  # noqa: F401

pytestmark = needs_smollm2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("smollm2", *HASH, "-tp", "2") as server:
        yield server


def layout(server: Server, *wanted: str) -> str:
    """Changed to, as the command says it."""
    done = planaria("scale", *wanted, "--url", server.url, "--json")
    assert done.returncode == 0, done.stderr
    (engine,) = json.loads(done.stdout)["engines"]
    return str(engine["layout"])


def test_requests_go_on_in_every_layout(server: Server, expected: object) -> None:  # noqa: F811
    found: list[str] = []
    changing: list[threading.Thread] = []

    def change() -> None:
        found.extend(layout(server, *wanted) for wanted in (["--tp", "1"], ["--pp", "2"], ["--tp", "2", "--pp", "2"]))

    def harm(tokens: int) -> None:
        if tokens == 50:
            changing.append(threading.Thread(target=change))
            changing[0].start()

    assert run(server, harm) == expected
    changing[0].join(240)
    assert found == ["tp=1 pp=1", "tp=1 pp=2", "tp=2 pp=2"]
    body = health(server)
    assert body["last_fault"] is None and body["last_layout_change"]["layout"] == "tp=2 pp=2"
    assert len(server.rank_pids()) == 4


def test_what_cant_be_costs_nobody_anything(server: Server) -> None:
    epoch = health(server)["epoch"]
    for wanted, reason in ((["--pp", "31"], "30 layers"), (["--tp", "0"], "tensor_parallel_size"), ([], "--dp")):
        done = planaria("scale", *wanted, "--url", server.url)
        assert done.returncode == 2 and reason in done.stderr, done.stderr
    assert health(server)["epoch"] == epoch
