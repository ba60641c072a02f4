"""The picture of `planaria experts --plot`: tokens of experts and of ranks by layer, and how even the ranks are.

Colours say how far a load is from the layer's mean, in powers of two: what is even is pale, whatever the layout.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from planaria.cli.experts import BalancedEngine, line_of
from planaria.errors import PlanariaError, UserError
from planaria.wire import LayerLoad

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
MISSING = "drawing needs matplotlib, which is not installed here: pip install 'planaria[plot]'"
LEAST, MOST = 2.0, 8.0  # the colours end at so many times the mean, or a fraction of it
FEW_RANKS, FEW_LAYERS = 16, 32  # with so many the numbers of ranks are written into their cells
COLORS = ("#2166ac", "#7db4d6", "#f7f5f2", "#f0a177", "#b2282e")  # little, even, much
INK, SOFT, BAR = "#1c2530", "#66717f", "#2a9d6f"


def check(path: Path) -> None:
    """Can it be drawn, and into such a file? Before anything is asked for."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--plot {path}: a picture ends in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlanariaError(MISSING)


def draw(engines: list[BalancedEngine], path: Path) -> None:
    """Raises UserError where the file can't be written."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    layers = sum(max(len(engine.layers), 4) for engine in engines)
    style: dict[Any, object] = {  # with or without matplotlib's types
        "font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": SOFT,
        "axes.edgecolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "axes.titlesize": 10,
        "axes.titlecolor": INK, "svg.fonttype": "none",
    }  # fmt: skip
    with rc_context(style):
        height = len(engines) * 1.9 + min(max(0.26 * layers, 2.2), 16.0)
        figure = Figure(figsize=(13.0, height), dpi=150, facecolor="white", layout="constrained")
        parts: Any = figure.subfigures(len(engines), 1, squeeze=False)
        for part, engine in zip(parts.flat, engines, strict=True):
            _draw_engine(part, engine)
        try:
            figure.savefig(path)
        except OSError as e:
            raise UserError(f"--plot {path}: can't be written: {e.strerror or e}") from None


def over_mean(rows: list[list[float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Each row over its mean; 1 where there is no load."""
    loads = np.array(rows, dtype=np.float64)
    means = loads.mean(axis=1, keepdims=True)
    return np.where(means > 0, loads / np.where(means > 0, means, 1.0), 1.0)


def _draw_engine(part: Any, engine: BalancedEngine) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    layers = engine.layers
    experts = over_mean([list(map(float, layer.load)) for layer in layers])
    ranks = over_mean([layer.rank_loads for layer in layers])
    end = float(np.clip(max(experts.max(), ranks.max()), LEAST, MOST))
    look = {
        "norm": LogNorm(1 / end, end, clip=True), "cmap": LinearSegmentedColormap.from_list("load", COLORS),
        "aspect": "auto", "interpolation": "nearest",
    }  # fmt: skip
    part.suptitle(f"Expert load, {line_of(engine)}", x=0.01, ha="left", fontsize=11.5)
    widths = [5.0, min(max(0.45 * engine.ranks, 1.4), 4.0), 1.5]
    left, middle, right = part.subplots(1, 3, sharey=True, width_ratios=widths)
    shown = left.imshow(experts, **look)
    middle.imshow(ranks, **look)
    _name(left, "tokens of each expert", "expert", experts.shape[1])
    _name(middle, "tokens of each rank", "rank", engine.ranks)
    if engine.ranks <= FEW_RANKS and len(layers) <= FEW_LAYERS:
        _write(middle, ranks, look["norm"], look["cmap"])
    _bars(right, layers, engine.balancedness)
    left.set_ylabel("layer")
    step = -(-len(layers) // 24)
    left.set_yticks(range(0, len(layers), step), [str(layer.layer) for layer in layers[::step]])
    for axes in (left, middle):
        for edge in range(1, len(layers)):
            axes.axhline(edge - 0.5, color="white", linewidth=0.8 if len(layers) <= FEW_LAYERS else 0.3)
    bar = part.colorbar(shown, ax=[left, middle, right], location="right", fraction=0.02, pad=0.01)
    ticks = [t for t in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0) if 1 / end <= t <= end]
    bar.set_ticks(ticks, labels=[f"{t:g}x" if t >= 1 else f"1/{1 / t:g}x" for t in ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)
    bar.set_label("of the layer's mean")


def _name(axes: Axes, title: str, label: str, count: int) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel(label)
    axes.set_xticks(range(0, count, max(1, -(-count // 16))))
    axes.set_xticks([edge - 0.5 for edge in range(1, count)], minor=True)
    axes.grid(which="minor", axis="x", color="white", linewidth=0.8 if count <= 128 else 0.3)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _write(axes: Axes, values: Any, norm: Any, colors: Any) -> None:
    """Numbers into the cells, dark on pale."""
    for (row, column), value in np.ndenumerate(values):
        red, green, blue, _ = colors(norm(value))
        pale = 0.3 * red + 0.59 * green + 0.11 * blue > 0.55
        axes.text(
            column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=INK if pale else "white"
        )  # fmt: skip


def _bars(axes: Axes, layers: list[LayerLoad], together: float) -> None:
    values = [layer.balancedness for layer in layers]
    axes.barh(range(len(layers)), values, height=0.7, color=BAR)
    axes.axvline(together, color=INK, linewidth=1, linestyle="--")
    if len(layers) <= FEW_LAYERS:
        for row, value in enumerate(values):
            axes.text(0.04, row, f"{value:.2f}", ha="left", va="center", fontsize=8, color="white", fontweight="bold")
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.set_title("balancedness (1 is even)", loc="left")
    axes.set_xlabel("line: of all layers")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
