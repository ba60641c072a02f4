"""An engine whose layout changes while requests run: because a device is gone, is back, or somebody asks for it.
Of a small model: what becomes of a large one's weights is in test_recovery.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria.wire import EngineResized, FromEngine, ResizeEngine
from tests.model.engines import ask_for
from tests.proc.servers import wait_until
from tests.proc.test_recovery import Watched, each_once, watched_small


@pytest.fixture(scope="module")
def missing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """While it is there, no process of tests.proc.custom.ShortLauncher starts."""
    path = tmp_path_factory.mktemp("device") / "missing"
    os.environ["TEST_NO_DEVICE"] = str(path)
    yield path
    del os.environ["TEST_NO_DEVICE"]


def try_now(watched: Watched) -> None:
    """What was tried in vain is tried again after ever more seconds: how many depends on how slow all this is."""
    launcher: Any = watched.llm._loop.gang.launcher
    launcher.pool.tries.at = 0.0


TP, PP = "tensor_parallel_size", "pipeline_parallel_size"


@pytest.fixture(scope="module")
def engines(small: Path, missing: Path) -> Iterator[Callable[[str], Watched]]:
    """With two ranks along an axis."""
    short = "tests.proc.custom.ShortLauncher"
    with each_once(lambda axis: watched_small(small, distributed_executor_backend=short, **{axis: 2})) as engine:
        yield engine


@pytest.fixture
def two(request: pytest.FixtureRequest, engines: Callable[[str], Watched]) -> Watched:
    return engines(request.param)


def cases(*default: tuple[str, int]) -> list[object]:
    """Axis and victim: these, and the others where long tests are asked for."""
    every = [(axis, victim) for axis in (TP, PP) for victim in (0, 1)]
    return [pytest.param(*case, marks=() if case in default else pytest.mark.long) for case in every]


@pytest.mark.parametrize(("two", "victim"), cases((PP, 1)), indirect=["two"])
def test_a_device_that_is_gone_costs_a_smaller_layout_until_it_is_back(
    two: Watched, missing: Path, victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = two.pids
    heard = len(two.done)

    def harm() -> None:
        missing.touch()
        os.kill(before[victim], signal.SIGKILL)

    assert two.run(at=20, harm=harm) == two.expected
    (shrunk,) = two.done[heard:]
    assert (shrunk.layout, shrunk.kind) == ("tp=1 pp=1", "fault")
    assert two.pids == [before[1 - victim]]
    assert "going on with tp=1" in caplog.text
    assert two.run() == two.expected  # nothing is back yet
    assert two.done[heard:] == [shrunk]

    missing.unlink()
    loop = two.llm._loop
    try_now(two)
    wait_until("it has its layout again", lambda: loop.check() or len(two.pids) == 2, 120)
    grown = two.done[-1]
    assert (grown.kind, grown.ranks) == ("layout", []) and grown.layout != shrunk.layout
    assert before[1 - victim] in two.pids
    assert two.run() == two.expected


@pytest.mark.parametrize("two", [pytest.param(TP, marks=pytest.mark.long), PP], indirect=True)
def test_it_grows_back_while_requests_run(two: Watched, missing: Path) -> None:
    missing.touch()
    two.run(harm=lambda: os.kill(two.pids[1], signal.SIGKILL))
    assert len(two.pids) == 1
    missing.unlink()
    loop = two.llm._loop
    try_now(two)
    wait_until("a process is ready", lambda: loop.gang.room() is not None, 120)  # what the loop looks for now and then
    loop.layout_change.look_at = 0.0
    assert two.run() == two.expected
    assert len(two.pids) == 2 and two.done[-1].requests == len(two.expected)


@pytest.mark.parametrize("two", [pytest.param(TP, marks=pytest.mark.long), PP], indirect=True)
def test_another_layout_is_asked_for(two: Watched) -> None:
    loop, heard = two.llm._loop, list[EngineResized]()
    hear = loop.emit

    def listen(message: FromEngine) -> None:
        if isinstance(message, EngineResized):
            heard.append(message)
        hear(message)

    loop.emit = listen
    asked = loop.gang.asked
    try:
        assert two.run(at=20, harm=lambda: ask_for(loop, ResizeEngine("a", 1, 1))) == two.expected
        assert two.run(at=20, harm=lambda: ask_for(loop, ResizeEngine("b", asked.tp, asked.pp))) == two.expected
        epoch = loop.gang.epoch
        for wish in (ResizeEngine("c", 0, 1), ResizeEngine("d", 1, 1000), ResizeEngine("e", asked.tp, asked.pp)):
            loop.handle(wish)
    finally:
        loop.emit = hear
    assert [(done.id, done.layout) for done in heard[:2]] == [("a", "tp=1 pp=1"), ("b", f"tp={asked.tp} pp={asked.pp}")]
    assert [bool(done.error) for done in heard] == [False, False, True, True, False]
    assert "2 layers" in heard[3].error
    assert loop.gang.epoch == epoch, "what can't be, or is so already, costs nobody anything"
