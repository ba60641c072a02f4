"""`planaria experts`: where a running server's experts are and how even their load is; a table, JSON or a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.table import Table

from planaria.cli.admin import server_at
from planaria.cli.look import show_table
from planaria.errors import UserError
from planaria.wire import LayerLoad

NONE = (
    "no engine of this server says where its experts are: it is still loading, or was started without "
    "--enable-expert-parallel --enable-eplb"
)


class BalancedEngine(msgspec.Struct):
    """As /admin/experts says it."""

    engine: int
    ranks: int
    steps: int
    balancedness: float
    rearrangements: int
    bytes_moved: int
    layers: list[LayerLoad]


class ExpertReport(msgspec.Struct):
    engines: list[BalancedEngine]


def run(url: str | None, admin_key: str | None, saved: Path | None, plot: Path | None, as_json: bool) -> None:
    """saved: what `--json` printed, in place of a server. Raises UserError where there is nothing to show."""
    if plot is not None:
        from planaria.cli.experts_plot import check

        check(plot)
    if saved is not None:
        content, answer = _read(saved)
    else:
        content, answer = server_at(url).get("/admin/experts", admin_key, ExpertReport)
    if as_json:
        sys.stdout.write(content.decode() + "\n")
    engines = [engine for engine in answer.engines if engine.layers]
    if not engines and not (as_json and plot is None):
        raise UserError(NONE)
    if plot is not None:
        from planaria.cli.experts_plot import draw

        draw(engines, plot)
        print(f"planaria: {plot} written", file=sys.stderr)
    elif not as_json:
        _show(engines)


def _read(path: Path) -> tuple[bytes, ExpertReport]:
    try:
        content = path.read_bytes()
        return content.rstrip(), msgspec.json.decode(content, type=ExpertReport)
    except OSError as e:
        raise UserError(f"{path}: can't be read: {e.strerror or e}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise UserError(f"{path}: is not what planaria experts --json prints: {e}") from None


def over_mean(loads: list[int] | list[float]) -> float:
    """The largest over the mean; 1 where there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def _show(engines: list[BalancedEngine]) -> None:
    table = Table(
        "ENGINE", "LAYER", "TOKENS", "BUSIEST EXPERT", "BUSIEST RANK", "BALANCEDNESS",
        box=None, caption="busiest: over the mean of the layer", caption_justify="left",
    )  # fmt: skip
    for engine in engines:
        for layer in engine.layers:
            table.add_row(
                str(engine.engine), str(layer.layer), f"{sum(layer.load):,}", f"{over_mean(layer.load):.2f}",
                f"{over_mean(layer.rank_loads):.2f}", f"{layer.balancedness:.3f}",
            )  # fmt: skip
    for engine in engines:
        print(line_of(engine))
    show_table(table)


def line_of(engine: BalancedEngine) -> str:
    """How an engine stands."""
    words = [
        f"engine {engine.engine}: {engine.ranks} ranks", f"load of {engine.steps:,} steps",
        f"balancedness {engine.balancedness:.3f}", f"{engine.rearrangements} rearrangements",
        f"{engine.bytes_moved / 2**20:,.1f} MiB moved",
    ]  # fmt: skip
    return ", ".join(words)
