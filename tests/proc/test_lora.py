"""A server with adapters: they come and go while requests run, and each request keeps the bytes that it was admitted
with, also when the engine's process is killed and the folder has others by then."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.model.adapters import peft_tokens, write_adapter
from tests.proc.servers import TINY, TLS, Server, wait_until

PROMPT = [5, 9, 40, 77, 3, 21, 8]


@pytest.fixture(scope="module")
def adapters(small: Path) -> list[Path]:
    return [write_adapter(small.parent / f"served{i}", small, 40 + i) for i in range(2)]


def ask(url: str, model: str, **fields: Any) -> list[int]:
    body = {
        "model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "return_token_ids": True,
        "ignore_eos": True, **fields,
    }  # fmt: skip
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=120, verify=TLS)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def post(url: str, path: str, key: str = "", **body: Any) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.post(f"{url}/v1/{path}_lora_adapter", json=body, headers=headers, timeout=120, verify=TLS)


def test_adapters_come_and_go(small: Path, adapters: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(adapters[0], folder)
    plain, first, second = (peft_tokens(small, path, PROMPT, 6) for path in (None, *adapters))
    assert len({tuple(plain), tuple(first), tuple(second)}) == 3
    arguments = ["--enable-lora", "--max-loras", "1", "--lora-modules", f"mine={folder}", "--served-model-name", "m"]
    with Server(str(small), *TINY, *arguments) as server:
        url = server.url
        assert ask(url, "mine") == first and ask(url, "m") == plain
        cards = {card["id"]: card for card in httpx2.get(f"{url}/v1/models", verify=TLS).json()["data"]}
        assert set(cards) == {"m", "mine"} and cards["mine"]["parent"] == cards["mine"]["root"] == "m"
        assert str(folder) not in str(cards)
        shutil.copytree(adapters[1], folder, dirs_exist_ok=True)
        assert ask(url, "mine") == first  # the folder isn't read again by itself
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert ask(url, "mine") == first  # nor by an engine that begins anew
        digests = {cards["mine"]["adapter"]}
        loaded = post(url, "load", lora_name="mine", lora_path=str(folder))
        assert loaded.status_code == 200 and "Success" in loaded.json()["message"]
        digests.add(loaded.json()["digest"])
        assert len(digests) == 2 and ask(url, "mine") == second and ask(url, "m") == plain
        httpx2.post(f"{url}/sleep?level=2", timeout=120, verify=TLS).raise_for_status()
        assert post(url, "load", lora_name="night", lora_path=str(adapters[0])).status_code == 200
        asleep = httpx2.post(f"{url}/v1/completions", json={"model": "night", "prompt": PROMPT}, verify=TLS)
        assert asleep.status_code == 503 and "/wake_up" in asleep.json()["error"]["message"]
        httpx2.post(f"{url}/wake_up", timeout=120, verify=TLS).raise_for_status()
        assert ask(url, "night") == first and ask(url, "mine") == second
        assert post(url, "load", lora_name="m", lora_path=str(folder)).status_code == 400
        refused = post(url, "load", lora_name="x", lora_path=str(tmp_path / "none"))
        assert refused.status_code == 400 and "no such file" in refused.json()["error"]["message"]
        assert post(url, "unload", lora_name="mine").status_code == 200
        assert post(url, "unload", lora_name="mine").status_code == 404
        gone = httpx2.post(f"{url}/v1/completions", json={"model": "mine", "prompt": PROMPT}, verify=TLS)
        assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"


def test_a_request_ends_with_what_it_began_with(small: Path, adapters: list[Path], tmp_path: Path) -> None:
    """While it runs its name is given to other bytes, another adapter waits for its slot, and it is unloaded."""
    folder, count = tmp_path / "mine", 400
    shutil.copytree(adapters[0], folder)
    with Server(
        str(small), *TINY, "--enable-lora", "--lora-modules", f"mine={folder}", f"other={adapters[1]}"
    ) as server:
        url, found = server.url, []
        before = ask(url, "mine", max_tokens=count)
        running = threading.Thread(target=lambda: found.append(ask(url, "mine", max_tokens=count, cache_salt="a")))
        running.start()
        wait_until("it runs", lambda: "num_requests_running{" in (text := metrics(url)) and running_now(text) == 1)
        shutil.copytree(adapters[1], folder, dirs_exist_ok=True)
        assert post(url, "load", lora_name="mine", lora_path=str(folder)).status_code == 200
        assert post(url, "unload", lora_name="mine").status_code == 200
        assert ask(url, "other") == peft_tokens(small, adapters[1], PROMPT, 6)  # it waited for the slot
        running.join(120)
        assert found == [before] and found[0][:6] == peft_tokens(small, adapters[0], PROMPT, 6)


def metrics(url: str) -> str:
    return str(httpx2.get(f"{url}/metrics", verify=TLS).text)


def running_now(text: str) -> int:
    return int(
        sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
    )


def test_who_may(small: Path, adapters: list[Path]) -> None:
    """The admin key alone, and of a server without adapters nobody."""
    arguments = ["--enable-lora", "--api-key", "user", "--admin-key", "root"]
    with Server(str(small), *TINY, *arguments) as server:
        body = {"lora_name": "a", "lora_path": str(adapters[0])}
        assert post(server.url, "load", **body).status_code == 401
        assert post(server.url, "load", "user", **body).status_code == 401
        assert post(server.url, "load", "root", **body).status_code == 200
        assert post(server.url, "unload", "user", lora_name="a").status_code == 401


def test_several_processes_that_answer(small: Path, adapters: list[Path]) -> None:
    """Each knows of an adapter when its load was answered, and two engines have it."""
    arguments = ["--enable-lora", "--api-server-count", "2", "-dp", "2", "--lora-modules", f"a={adapters[0]}"]
    with Server(str(small), *TINY, *arguments) as server:
        tokens = [peft_tokens(small, path, PROMPT, 6) for path in adapters]
        assert all(ask(server.url, "a") == tokens[0] for _ in range(6))
        assert post(server.url, "load", lora_name="b", lora_path=str(adapters[1])).status_code == 200
        assert all(ask(server.url, "b") == tokens[1] for _ in range(6))
        for pid in server.engine_pids():
            os.kill(pid, signal.SIGKILL)
        assert all(ask(server.url, name) == own for name, own in zip("abab", tokens * 2, strict=True))
