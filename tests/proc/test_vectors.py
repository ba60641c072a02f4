"""An engine, or a rank, is killed while 64 texts are embedded: each is answered once, with the numbers that it would
have had. And a file of them, whose process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.proc.servers import PATIENCE, TLS, Server, planaria, wait_until
from tests.tiers import representatives

COUNT, AT = 64, 8  # texts, and how many of them are answered when the blow falls
OPTIONS = [
    "--kv-cache-memory", "8MiB", "--max-model-len", "1024", "--dtype", "float32", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "64", "--batch-invariant", "--no-enable-prefix-caching",
]  # fmt: skip
TEXTS = [f"Text {i}: " + "a word or two, " * (3 + i * 7 % 41) for i in range(COUNT)]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.model.checkpoints import write_talker

    return write_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module", params=representatives(["mean", "last"], "mean"))
def server(request: pytest.FixtureRequest, talker: Path) -> Iterator[Server]:
    """Of two ranks that give vectors alone, made of all positions; or that generate, too."""
    kind = ["--runner", "pooling", "--pooler-config", '{"pooling_type": "MEAN"}'] if request.param == "mean" else []
    with Server(str(talker), *OPTIONS, *kind, "-tp", "2", "--threads", "1") as server:
        yield server


def embedded(server: Server, harm: int | None = None) -> list[str]:
    """All at once, each a request of its own; `harm` is killed when some are answered."""

    async def run() -> list[str]:
        answered = 0

        async def one(http: httpx.AsyncClient, text: str) -> str:
            nonlocal answered
            answer = await http.post("/v1/embeddings", json={"input": text, "encoding_format": "base64"})
            assert answer.status_code == 200, answer.text
            answered += 1
            if harm is not None and answered == AT:
                os.kill(harm, signal.SIGKILL)
            (data,) = answer.json()["data"]
            return str(data["embedding"])

        async with httpx.AsyncClient(base_url=server.url, timeout=4 * PATIENCE, verify=TLS) as http:
            return await asyncio.gather(*(one(http, text) for text in TEXTS))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    found = embedded(server)
    assert len(set(found)) == COUNT
    return found


@pytest.mark.parametrize("who", representatives(["rank 0", "rank 1", "engine"], "rank 1", "engine"))
def test_a_death_while_64_texts_are_embedded(server: Server, expected: list[str], who: str) -> None:
    ended, said = ends(server), len(server.log)
    harm = server.engine_pid() if who == "engine" else server.rank_pids()[int(who[-1])]
    assert embedded(server, harm) == expected
    assert ends(server) == {**ended, "stop": ended["stop"] + COUNT}
    wait_until("the death is told", lambda: any("killed" in line for line in server.log[said:]))


def ends(server: Server) -> dict[str, float]:
    """How many have ended in each way."""
    lines = httpx.get(server.url + "/metrics", verify=TLS).text.splitlines()
    found = [line for line in lines if line.startswith("vllm:request_success_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


def test_a_file_of_texts_is_gone_on_with(talker: Path, tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"t{i}", "method": "POST", "url": "/v1/embeddings", "body": {"model": str(talker), "input": text}}
        for i, text in enumerate(TEXTS)
    ]
    lines.append({"custom_id": "s", "method": "POST", "url": "/v1/score", "body": {"text_1": "a", "text_2": "b"}})
    source, out, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = out.with_name(out.name + ".journal")
    process = subprocess.Popen([sys.executable, "-m", "planaria", "batch", str(source), str(out), *OPTIONS])
    wait_until("some are answered", lambda: journal.exists() and journal.read_bytes().count(b"\n") > AT)
    process.kill()
    process.wait(PATIENCE)
    assert not out.exists()
    for path in (out, whole):
        run = planaria("batch", str(source), str(path), *OPTIONS)
        assert run.returncode == 0 and "65 answered, 0 failed" in run.stderr, run.stderr
    assert answers(out) == answers(whole)


def answers(path: Path) -> list[object]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["custom_id"], line["response"]["body"]["data"]) for line in found]
