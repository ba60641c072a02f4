"""`/update_weights`: engines that serve get other weights of their model while requests stream."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.numpy import load_file

from planaria import SharedWeights
from tests.model import checkpoints
from tests.proc.servers import PATIENCE, Server, wait_until

BODY = {"model": "m", "prompt": list(range(40)), "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("weights")
    return [
        checkpoints.write_checkpoint(folder / f"{seed}", "llama", seed, max_position_embeddings=4096) for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Server]:
    options = ["--skip-tokenizer-init", "--served-model-name", "m", "--max-model-len", "4096", "-dp", "2", "-tp", "2"]
    with Server(str(folders[0]), *options, "--kv-cache-memory", "16MiB") as server:
        yield server


def ask(server: Server, count: int = 12) -> dict[str, Any]:
    answer = httpx2.post(server.url + "/v1/completions", json=BODY | {"max_tokens": count}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice)


def update(server: Server, path: Path) -> httpx2.Response:
    return httpx2.post(server.url + "/update_weights", json={"path": str(path)}, timeout=PATIENCE)


def test_every_engine_has_them_also_those_that_come_later(server: Server, folders: list[Path], tmp_path: Path) -> None:
    before = ask(server)
    assert "weights_version" not in before, "nothing is said where nothing was changed"
    body = BODY | {"max_tokens": 1500, "stream": True}
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        assert httpx2.post(server.url + "/sleep?level=0").status_code == 200, "so that it can't end meanwhile"
        done = update(server, folders[1])
        assert done.status_code == 200, done.text
        assert [engine["weights_version"] for engine in done.json()["engines"]] == [1, 1]
        assert httpx2.post(server.url + "/wake_up").status_code == 200
        *pieces, last = lines
    told = [json.loads(line[6:])["choices"][0] for line in pieces]
    said = [choice.get("weights_version", 0) for choice in told if choice["token_ids"]]
    assert said == sorted(said) and set(said) == {0, 1}, "each piece says whose its tokens are"
    assert '"weights_version":1,"weights_versions":[[0,0],[' in last, last
    after = [ask(server) for _ in range(4)]
    assert all(choice["weights_versions"] == [[0, 1]] and choice["weights_version"] == 1 for choice in after)
    assert after[0]["token_ids"] != before["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in after}) == 1, "both engines say the same"

    engines = server.engine_pids()
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    wait_until("there are others", lambda: len(set(server.engine_pids()) - set(engines)) == 2)
    again = ask(server)
    assert again["token_ids"] == after[0]["token_ids"] and again["weights_versions"] == [[0, 1]]

    with SharedWeights(load_file(folders[0] / "model.safetensors")) as weights:
        done = httpx2.post(server.url + "/update_weights", json={"handle": weights.handle}, timeout=PATIENCE)
        assert done.status_code == 200 and done.json()["engines"][1]["weights_version"] == 2, done.text
        gone = weights.handle
    again = httpx2.post(server.url + "/update_weights", json={"handle": gone}, timeout=PATIENCE)
    assert again.status_code == 400 and "shares no such memory any more" in again.text and "handle" in again.text
    engine = server.engine_pids()[0]
    os.kill(engine, signal.SIGKILL)  # its successor has them, though their owner has not
    wait_until("there is another", lambda: len(set(server.engine_pids()) - {engine}) == 2)
    assert [ask(server)["token_ids"] for _ in range(4)] == [before["token_ids"]] * 4
    for body in ({}, {"handle": gone, "path": str(folders[1])}):
        wrong = httpx2.post(server.url + "/update_weights", json=body, timeout=PATIENCE)
        assert wrong.status_code == 400 and "one of both" in wrong.text
    assert update(server, folders[1]).status_code == 200

    torn = tmp_path / "torn"
    shutil.copytree(folders[0], torn)
    (torn / "model.safetensors").write_bytes(b"no weights")
    refused = update(server, torn)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "weights_refused", refused.text
    refused = update(server, Path("/nowhere/at/all"))
    assert refused.status_code == 400 and "/nowhere/at/all" in refused.text
    assert ask(server)["token_ids"] == after[0]["token_ids"]


ENDED = "whose place this one took, has ended"  # and others may take this one's


def test_who_takes_the_servers_place_goes_on_with_those_in_force(folders: list[Path]) -> None:
    options = ["--skip-tokenizer-init", "--served-model-name", "m", "--max-model-len", "4096"]
    with ExitStack() as stack:
        first = stack.enter_context(Server(str(folders[0]), *options, "--kv-cache-memory", "16MiB"))
        port = int(first.url.rsplit(":", 1)[1])

        def successor(folder: Path) -> Server:
            more = ["--kv-cache-memory", "16MiB", "--replace"]
            return stack.enter_context(Server(str(folder), *options, *more, port=port))

        before = ask(first)
        assert update(first, folders[1]).status_code == 200
        after = ask(first)
        assert after["token_ids"] != before["token_ids"] and after["weights_versions"] == [[0, 1]]
        second = successor(folders[0])
        assert (found := ask(second))["token_ids"] == after["token_ids"] and found["weights_versions"] == [[0, 1]]
        with SharedWeights(load_file(folders[0] / "model.safetensors")) as weights:
            done = httpx2.post(second.url + "/update_weights", json={"handle": weights.handle}, timeout=PATIENCE)
            assert done.status_code == 200, done.text
        second.wait_for(ENDED)
        third = successor(folders[0])
        assert (found := ask(third))["token_ids"] == before["token_ids"] and found["weights_versions"] == [[0, 2]]
        third.wait_for(ENDED)
        fourth = successor(folders[1])
        assert (found := ask(fourth))["token_ids"] == after["token_ids"] and "weights_versions" not in found
        assert any("weights are those of this command line" in line for line in fourth.log)
