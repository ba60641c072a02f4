"""What people look at: progress bars, the start-up summary. All of it on standard error."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from planaria.wire import EngineFacts, Phase, StartUpNews


class _Words(Console):
    """What is said to people ends nothing: who reads it may be gone, or the disk full that it goes to."""

    def print(self, *objects: Any, **how: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **how)


console = _Words(stderr=True, highlight=False, markup=False, emoji=False)  # names of models have [ and :
logger = logging.getLogger("planaria.cli")


def write_json(value: Any) -> None:
    """A line on standard output."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def show_table(table: Table) -> None:
    """On standard output; wide enough for whoever reads it by program."""
    Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 200).print(table)


@contextlib.contextmanager
def started(kind: str, model: str, *, bar: bool = True, show: bool = True, **options: Any) -> Iterator[Any]:
    """A loaded `LLM` or `AsyncLLM`, closed at the end of the block. bar: of its progress; show: its summary."""
    began = time.perf_counter()
    from planaria import llm as module

    with loading(show=bar) as progress:
        llm = getattr(module, kind)(model, on_progress=progress, **options)
    with contextlib.closing(llm):
        if show:
            console.print(summary(llm.facts, {"total": time.perf_counter() - began}))
        yield llm


MOST_LINES = 16  # ranks that get a line of their own


@contextlib.contextmanager
def loading(*, show: bool = True) -> Iterator[Callable[[StartUpNews], None]]:
    """A line per rank that says what it does and for how long, until the block ends; nothing where no one watches."""
    if not (show and console.is_terminal):
        yield lambda news: None
        return
    with Progress(
        TextColumn("{task.fields[name]:>8}"), TextColumn("{task.description:<10}"), BarColumn(40),
        TextColumn("{task.fields[seconds]}"), console=console, transient=True,
    ) as bars:  # fmt: skip
        start = StartUpLines(bars)
        yield start.hear
        bars.stop()


class StartUpLines:
    """The lines, and since when each rank is in its phase. `clock` is for tests."""

    def __init__(self, bars: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self.bars, self.clock = bars, clock
        self.tasks: dict[int, TaskID] = {}

    def hear(self, news: StartUpNews) -> None:
        rank = news.rank if isinstance(news, Phase) else 0
        if rank >= MOST_LINES:
            return
        if rank not in self.tasks:
            self.tasks[rank] = self.bars.add_task("launch", total=None, name=f"rank {rank}", seconds=Since(self.clock))
        task = self.tasks[rank]
        if not isinstance(news, Phase):
            self.bars.update(task, total=1.0, completed=news.fraction)
        elif news.seconds is None:
            self.bars.reset(task, total=None, description=news.phase, name=f"rank {rank}", seconds=Since(self.clock))
        else:
            self.bars.update(task, total=1.0, completed=1.0, seconds=f"{news.seconds:.1f} s")


class Since:
    """Seconds since it was made, as text, whenever it is drawn."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.began = clock, clock()

    def __str__(self) -> str:
        return f"{self.clock() - self.began:.1f} s"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


@contextlib.contextmanager
def generating(total: int, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar over `total` requests with tokens per second; called with (requests done, new tokens)."""
    if not (show and console.is_terminal):
        yield lambda done, tokens: None
        return
    with Progress(
        TextColumn("generate"), BarColumn(40), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(), console=console, transient=True,
    ) as bars:  # fmt: skip
        task = bars.add_task("", total=total, rate="")
        count = 0

        def update(done: int, tokens: int) -> None:
            nonlocal count
            count += tokens
            elapsed = bars.tasks[0].elapsed or 1e-9
            bars.update(task, completed=done, rate=f"{count / elapsed:,.0f} tok/s")

        yield update


def size(count: float) -> str:
    """1234567 -> 1.2M"""
    for unit in ("", "k", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def summary(
    facts: EngineFacts, seconds: dict[str, float] | None = None, defaults: str = "", address: str = "",
    prefill: str = "",
) -> Table:  # fmt: skip
    """The start-up summary: what runs, the memory it takes, how much fits; at level debug how, and where the time went.
    defaults: of requests that say nothing; prefill: which prompts go to which engines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim")
    table.add_column()
    kept = {"none": "", "keep": ", weights packed as in the file"}.get(facts.quantization, f", {facts.quantization}")
    table.add_row("model", f"{facts.model} ({size(facts.num_parameters)} parameters, {facts.dtype}{kept})")
    each = f" on each of {len(facts.ranks)} ranks" if len(facts.ranks) > 1 else ""
    weights, kv = (f"{value / 2**20:,.0f} MiB" for value in (facts.weight_bytes, facts.kv_bytes))
    shared = ", shared," if facts.shared_bytes else ","
    table.add_row("memory", f"{weights} of weights{shared} {kv} of KV{each} ({facts.device})")
    tokens = facts.num_blocks * facts.block_size
    table.add_row("tokens", f"{tokens:,} fit at a time; the longest request has {facts.max_model_len:,}")
    if facts.attention:
        table.add_row("attention", f"by {', '.join(facts.attention)}")
    if facts.drafts is not None:
        table.add_row("drafts", "{}, up to {} tokens of a sequence in a step".format(*facts.drafts))
    if prefill:
        table.add_row("prefill", prefill)
    if defaults:
        table.add_row("defaults", f"{defaults} (--generation-config)")
    parts = {**facts.seconds, **(seconds or {})}
    total = parts.pop("total", None)
    if logger.isEnabledFor(logging.DEBUG):
        parts.pop("engine", None)
        threads = "1 thread" if facts.threads == 1 else f"{facts.threads} threads"
        table.add_row("executor", f"{facts.executor} ({facts.layout}), {threads}")
        table.add_row("blocks", f"{facts.num_blocks:,} of {facts.block_size} tokens")
        table.add_row("parts", ", ".join(f"{part} {value:.2f}" for part, value in parts.items()) + " s")
    ready = f"ready in {total:.2f} s" if total is not None else ""
    if ready or address:
        table.add_row("address" if address else "start-up", ", ".join(filter(None, (address, ready))))
    return table
