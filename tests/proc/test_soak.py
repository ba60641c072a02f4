"""A short soak of a tiny model: faults at random under load, nothing is lost, nothing is left. The long one, and the
rules of what counts as flat: `python -m benchmarks.soak`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import false_alarms
from benchmarks.deployment import Footprint, Server
from benchmarks.soak import FAULTS, RESIZED, Harm, Play, Sample, Soak, growths, run, verdict
from planaria.cli.traces import Trace, TracedRequest
from tests.proc.servers import needs_smollm2

EVERY = 1.0  # seconds
TINY = ["--skip-tokenizer-init", "--kv-cache-memory", "8MiB", "--max-model-len", "512"]
# However slow this machine is just now: more faults in a row than there are here may come to nothing.
PATIENT = ["--recovery-limit", "100"]


@pytest.fixture(scope="module", params=[5, pytest.param(40, marks=pytest.mark.long)], ids="{} blows".format)
def soak(request: pytest.FixtureRequest, small: Path) -> Soak:
    """So many, however slow the machine is."""
    return run(
        str(small), 0.0, EVERY, options=[*TINY, *PATIENT], vocabulary=131, tokens=64, streams=8, seed=3,
        blows=request.param,
    )  # fmt: skip


def test_every_request_ends_with_its_tokens_and_nothing_is_left(soak: Soak) -> None:
    assert verdict(soak) == []
    assert soak.requests > 20 and soak.tokens > 20 * 50


def test_there_were_faults_of_every_kind_and_recoveries(soak: Soak) -> None:
    """Else it shows nothing. Some faults hit what still comes back from the one before."""
    assert set(soak.faults) == set(FAULTS) and all(soak.faults.values())
    assert soak.recoveries["rank"] >= 1 and sum(soak.recoveries.values()) >= 2
    assert soak.samples and soak.samples[-1].total.processes == 6  # server, engine, a fork server of each, two ranks


def test_what_a_client_that_leaves_is_refused_is_counted_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    play: Play

    class Refuses:
        asked = 0

        async def stream(self, client: Any, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            self.asked += 1
            if self.asked == 1:
                raise RuntimeError("503")
            play.over.set()
            yield {}

    async def at_once(self: Play, seconds: float) -> None:
        pass

    async def leave() -> None:
        nonlocal play
        play = Play(cast("Server", Refuses()), cast("Any", None), cast("Harm", None), [{}])
        await play.leave()

    monkeypatch.setattr(Play, "_pause", at_once)
    asyncio.run(leave())
    assert play.soak.failed == ["request 0, whose client leaves: RuntimeError: 503"] and play.soak.left_early == 1
    assert verdict(Soak(failed=play.soak.failed, samples=[Sample(0.0, 0, Footprint())]))


@pytest.mark.long
@needs_smollm2
def test_everything_at_once() -> None:
    """The hour of `python -m benchmarks.soak --trace FILE`, for four blows."""
    trace = Trace([TracedRequest(2.0 * i, 20 + 7 * i, 10 + i) for i in range(12)], 16)
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    options = ["--max-model-len", "512", "--kv-cache-memory", "64MiB", "--speculative-config", drafts]
    soak = run("smollm2", 0.0, 2.0, options=[*options, *PATIENT], seed=3, blows=4, trace=trace)
    assert verdict(soak) == []
    assert sum(soak.faults.values()) == 4 and soak.faults[RESIZED]
    assert soak.requests and soak.responses and soak.left_early


def test_growth_is_seen() -> None:
    """The verdict can be another."""
    held = [Footprint(4, 100 << 20, 40 + i, 9, 17) for i in range(12)]
    soak = Soak(samples=[Sample(5.0 * i, i, h, {"server": (1, h)}) for i, h in enumerate(held)], left=[7])
    assert [(g.whose, g.what) for g in growths(soak) if not g.flat] == [
        ("all processes", "descriptors"), ("server", "descriptors"),
    ]  # fmt: skip
    assert len(verdict(soak)) == 3


@pytest.mark.long
@needs_smollm2
def test_nobody_is_blamed_for_being_slow() -> None:
    """Prompts of 8,000 tokens while four times as many processes as cores compute: the ten minutes of
    `python -m benchmarks.false_alarms`, for one."""
    result = false_alarms.run("smollm2", 1.0, 4, [])
    assert (result["epoch"], result["restarts"], result["failures"]) == (0, 0, [])
    assert result["more"] == 0
    assert all(seconds <= false_alarms.FOUND[name] for name, seconds in result["found"].items())
