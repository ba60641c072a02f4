"""Several models behind one port, with real processes: what is killed while models are loaded and unloaded loses no
request, and what was computed before is there when a model returns."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from planaria.server.models import LOADED, LOADING
from tests.proc.servers import PATIENCE, PATIENT, TINY, Server, planaria, wait_until

PROMPT = [5 + i % 100 for i in range(200)]
TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of three models that differ."""
    from tests.model.checkpoints import write_checkpoint

    base = tmp_path_factory.mktemp("several")
    return [
        str(write_checkpoint(base / name, "llama", seed, max_position_embeddings=2048))
        for seed, name in enumerate("abc")
    ]


@pytest.fixture(scope="module")
def names(folders: list[str]) -> list[str]:
    return [Path(folder).name for folder in folders]


@pytest.fixture(scope="module")
def server(folders: list[str], names: list[str]) -> Iterator[Server]:
    called = [word for name in names for word in ("--served-model-name", name)]
    room = ["--host-memory", "1GiB", "--recovery-limit", "10"]
    with Server(*folders, *called, "--max-loaded", "1", *room, *TINY) as server:
        yield server


def ask(server: Server, name: str, prompt: list[int] = PROMPT, tokens: int = TOKENS) -> dict[str, Any]:
    body = {
        "model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = httpx2.post(server.url + "/v1/completions", json=body, timeout=4 * PATIENCE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["model"] == name and len(found["choices"][0]["token_ids"]) == tokens
    return found


def tokens_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def models(server: Server, what: str) -> dict[str, Any]:
    found = httpx2.get(server.url + "/admin/models", timeout=PATIENCE).json()["models"]
    return {model["model"]: model[what] for model in found}


def states(server: Server) -> dict[str, str]:
    return models(server, "state")


@pytest.fixture(scope="module")
def expected(server: Server, names: list[str]) -> dict[str, list[int]]:
    return {name: tokens_of(ask(server, name)) for name in names}


def asked(server: Server, name: str) -> tuple[threading.Thread, list[Any]]:
    """In a thread: and what came of it."""
    found: list[Any] = []

    def carry_out() -> None:
        try:
            found.append(tokens_of(ask(server, name)))
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=carry_out)
    thread.start()
    return thread, found


def test_each_answers_as_itself_and_its_prefixes_return_with_it(
    server: Server, names: list[str], expected: dict[str, list[int]]
) -> None:
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    for name in names:
        again = ask(server, name)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(PROMPT) // 16 * 16 - 16
        assert tokens_of(again) == expected[name]
        assert [each for each, state in states(server).items() if state == LOADED] == [name]
    shown = planaria("ps", "--url", server.url)
    heading, engine = f"{names[-1]} ({LOADED})", f" {names[-1]} "
    assert heading in shown.stdout and engine in shown.stdout, shown.stdout + shown.stderr


def test_an_engine_killed_while_it_is_loaded_loses_no_request(
    server: Server, names: list[str], expected: dict[str, list[int]]
) -> None:
    first, second = names[:2]
    ask(server, first)
    before = set(server.engine_pids())
    thread, found = asked(server, second)
    wait_until("an engine comes", lambda: set(server.engine_pids()) - before)
    seen = states(server)[second]
    for pid in set(server.engine_pids()) - before:
        os.kill(pid, signal.SIGKILL)
    thread.join(240)
    assert found == [expected[second]] and seen in (LOADING, LOADED)


def test_an_engine_killed_while_it_is_unloaded_loses_no_request(
    server: Server, names: list[str], expected: dict[str, list[int]]
) -> None:
    first, second = names[:2]
    ask(server, first)
    (pid,) = server.engine_pids()
    thread, found = asked(server, second)
    wait_until("there is no room", lambda: states(server)[first] != LOADED)
    with contextlib.suppress(ProcessLookupError):  # it has gone by itself
        os.kill(pid, signal.SIGKILL)
    thread.join(240)
    assert found == [expected[second]]


def test_an_engine_killed_while_others_wait_for_its_place_loses_nothing(
    server: Server, names: list[str], expected: dict[str, list[int]]
) -> None:
    """It goes on, and they get their turn."""
    first, second, third = names
    before = ask(server, first, PROMPT[:20], 800)
    (pid,) = server.engine_pids()
    answers: list[Any] = []
    busy = threading.Thread(target=lambda: answers.append(tokens_of(ask(server, first, PROMPT[:20], 800))))
    busy.start()
    wait_until("it computes", lambda: models(server, "running")[first])
    others = [asked(server, name) for name in (second, third)]
    wait_until("they wait", lambda: sum(models(server, "waiting").values()) == 2)
    os.kill(pid, signal.SIGKILL)
    for thread in (busy, *(thread for thread, _ in others)):
        thread.join(240)
    assert answers == [tokens_of(before)]
    assert [found for _, found in others] == [[expected[second]], [expected[third]]]


def test_a_model_that_slept_comes_back_awake(server: Server, names: list[str], expected: dict[str, list[int]]) -> None:
    first, second = names[:2]
    ask(server, first)
    assert httpx2.post(f"{server.url}/sleep?model={first}", timeout=PATIENCE).status_code == 200
    for name in (second, first):
        assert tokens_of(ask(server, name)) == expected[name]


def test_a_server_that_drains_answers_who_waits_for_a_model(folders: list[str]) -> None:
    with Server(*folders[:2], "--served-model-name", "a", "--served-model-name", "b", *TINY, *PATIENT) as server:
        busy: list[Any] = []
        first = threading.Thread(target=lambda: busy.append(tokens_of(ask(server, "a", PROMPT[:20], 900))))
        first.start()
        wait_until("it computes", lambda: models(server, "running")["a"])
        second, found = asked(server, "b")
        wait_until("it waits", lambda: models(server, "waiting")["b"])
        server.process.send_signal(signal.SIGTERM)
        first.join(240)
        second.join(240)
        assert len(busy[0]) == 900 and len(found[0]) == TOKENS, found
        assert server.ended() == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tokenizer", "x"], "--tokenizer"),
        (["--api-server-count", "2"], "--api-server-count"),
        (["--served-model-name", "one"], "1 names for 2 models"),
        (["--distributed-executor-backend", "ray"], "processes of this machine"),
        (["--lora-modules", "x=y", "--enable-lora"], "/v1/load_lora_adapter?model=NAME"),
    ],
)
def test_what_is_for_one_model_is_refused_by_name(folders: list[str], more: list[str], words: str) -> None:
    done = planaria("serve", *folders[:2], *TINY, *more)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_what_is_wrong_with_one_model_names_it(folders: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    done = planaria("serve", folders[0], str(broken), *TINY)
    assert done.returncode == 2 and str(broken) in done.stderr, done.stderr
    done = planaria("serve", folders[0], folders[0], *TINY)
    assert done.returncode == 2 and "is the name of two models" in done.stderr
    done = planaria("serve", folders[0], "--max-loaded", "2", *TINY)
    assert done.returncode == 2 and "--max-loaded" in done.stderr and "several models" in done.stderr
