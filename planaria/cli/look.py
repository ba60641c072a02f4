"""What people look at: progress bars, the start-up summary. All of it on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from planaria.wire import EngineFacts

console = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def loading() -> Iterator[Callable[[str, float], None]]:
    """A bar that follows (part, fraction) until the block ends; nothing where no one watches."""
    if not console.is_terminal:
        yield lambda part, fraction: None
        return
    with Progress(
        TextColumn("{task.description:>8}"), BarColumn(40), TimeElapsedColumn(), console=console, transient=True
    ) as bars:
        task = bars.add_task("start", total=1.0)

        def update(part: str, fraction: float) -> None:
            bars.update(task, description=part, completed=fraction)

        yield update


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


def summary(facts: EngineFacts, seconds: dict[str, float] | None = None) -> Table:
    """The start-up summary: what runs, how much fits, where the time went."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim")
    table.add_column()
    kept = {"none": "", "keep": ", weights packed as in the file"}.get(facts.quantization, f", {facts.quantization}")
    table.add_row("model", f"{facts.model} ({size(facts.num_parameters)} parameters, {facts.dtype}{kept})")
    weights = f"{facts.weight_bytes / 2**20:,.0f} MiB of weights"
    threads = "1 thread" if facts.threads == 1 else f"{facts.threads} threads"
    table.add_row("device", f"{facts.device}, {threads}, {weights}")
    tokens = facts.num_blocks * facts.block_size
    table.add_row("kv cache", f"{tokens:,} tokens in {facts.num_blocks:,} blocks of {facts.block_size}")
    table.add_row("executor", f"{facts.executor} ({facts.layout})")
    parts = {**facts.seconds, **(seconds or {})}
    total = parts.pop("total", None)
    parts.pop("engine", None)
    times = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
    table.add_row("start-up", f"{total:.2f} s ({times})" if total is not None else f"{times} s")
    return table
