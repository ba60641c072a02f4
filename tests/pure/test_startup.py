"""What people see while an engine comes up: a line per rank, and lines in the log for what takes long."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace
from rich.progress import Progress

from planaria.build import telling
from planaria.cli.look import MOST_LINES, StartUpLines, console, summary
from planaria.executor.startup import FIRST_LINE, StartUp
from planaria.wire import EngineFacts, Phase
from planaria.wire import Progress as Part


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(bars: Progress) -> list[tuple[str, str, str]]:
    return [(task.fields["name"], task.description, str(task.fields["seconds"])) for task in bars.tasks]


def test_each_rank_has_its_phase_and_its_seconds() -> None:
    clock, bars = Clock(), Progress(disable=True)
    shown = StartUpLines(bars, clock)
    start = StartUp(2, shown.hear, clock)
    start.enter("load")
    clock.now += 2.5
    assert lines(bars) == [("rank 0", "load", "2.5 s"), ("rank 1", "load", "2.5 s")]
    start.done(1)
    clock.now += 1.0
    assert lines(bars) == [("rank 0", "load", "3.5 s"), ("rank 1", "load", "2.5 s")]  # live, and done
    shown.hear(Part("weights", 0.5))
    assert bars.tasks[0].percentage == 50
    start.enter("ready")
    assert lines(bars)[0] == ("rank 0", "ready", "0.0 s") and start.seconds == {"load": 3.5}


def test_the_first_ranks_only() -> None:
    bars = Progress(disable=True)
    StartUp(100, StartUpLines(bars).hear).enter("load")
    assert len(bars.tasks) == MOST_LINES


def test_the_log_says_what_takes_long_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    told: list[Phase] = []
    start = StartUp(3, told.append, clock)  # type: ignore[arg-type]
    start.enter("load")
    with caplog.at_level(logging.INFO, "planaria.engine"):
        for _ in range(100):
            clock.now += 1.0
            start.waiting([1, 2])
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"waiting for load for {s:.0f} s: ranks 1, 2" for s in (FIRST_LINE, 20, 40, 80)]
    assert [news.rank for news in told] == [0, 1, 2]


def test_who_is_told_how_loading_goes_hears_it_now_and_then_and_the_end() -> None:
    clock, told = Clock(), list[Part]()
    tell = telling(told.append, clock)  # type: ignore[arg-type]
    for number in range(300):
        tell("weights", number / 300)
        clock.now += 0.001
    tell("weights", 1.0)
    assert told[0] == Part("weights", 0.0) and told[-1] == Part("weights", 1.0) and 3 <= len(told) <= 5


def test_a_models_name_is_shown_as_it_is() -> None:
    name = "llama[/gptq]:fire:[bold]"
    facts = EngineFacts(name, 8, 8, 8, "float32", "none", "cpu", 1, 1, 16, 0, "uni", "direct", "tp=1", [1], {})
    with console.capture() as shown:
        console.print(summary(facts))
    assert name in shown.get() and "attention" not in shown.get()
    with console.capture() as shown:
        console.print(summary(replace(facts, attention=["torch varlen", "Triton"])))
    assert "attention  by torch varlen, Triton" in shown.get()
