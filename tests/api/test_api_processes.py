"""API processes that can't be started now, or only by half. None is started here."""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

import pytest

from planaria.config.options import ParallelConfig
from planaria.hosts.local import LocalHost
from planaria.hosts.pool import BackOff
from planaria.server import api_processes
from planaria.server.api_processes import ApiProcess, ApiProcesses
from planaria.server.channel import Channel
from planaria.server.config import ServerConfig
from tests.api.scripted_process import Config
from tests.pure.test_pool import Fake


@pytest.fixture
def apis(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(api_processes, "BackOff", functools.partial(BackOff, first=0.001))
    monkeypatch.setattr(api_processes, "Boot", lambda *parts: b"")
    monkeypatch.setattr(api_processes, "as_api_process", lambda parallel, rank: ParallelConfig())
    with socket.socket() as listening:
        yield ApiProcesses(Config.of(), ServerConfig(), False, listening)  # type: ignore[arg-type]


async def test_one_that_can_not_be_started_now_is_tried_again(apis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def start(rank: int) -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise OSError(24, "Too many open files")

    monkeypatch.setattr(apis, "_start", start)
    ended = ApiProcess(0, 0)
    ended.child = Fake(("0", 0), 1)
    ended.serving.set()
    await apis._replace(ended)
    assert tries == 4 and not apis.failure


async def test_half_a_start_is_no_process(apis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Fake] = []

    def spawn(self: LocalHost, slot: Any, *what: Any) -> Fake:
        started.append(Fake(slot, 1))
        return started[-1]

    async def fails(*what: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(LocalHost, "spawn", spawn)
    monkeypatch.setattr(Channel, "open", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many"):
        await apis._start(0)
    assert started[0].ended == "was killed" and not apis.all
    assert len(os.listdir("/proc/self/fd")) <= before
