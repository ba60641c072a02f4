"""Line plots as SVG, written directly: a page that shows one needs no drawing library, and a diff of it can be read."""

from __future__ import annotations

import html
import math

Points = list[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 70, 150, 40, 50
COLOURS = ("#1b6ca8", "#c4512d", "#3d8b40", "#8a56a5", "#7a6a32", "#5f6b76")


def lines(title: str, x: str, y: str, series: dict[str, Points], *, log: bool = False, lowest: float = 0.0) -> str:
    """An SVG picture of named lines. `log`: both axes are logarithmic; else y begins at `lowest`."""
    points = [point for line in series.values() for point in line]
    xs, ys = _ticks([p[0] for p in points], log), _ticks([*(p[1] for p in points), *([] if log else [lowest])], log)

    def place(value: float, ticks: list[float], start: float, end: float) -> float:
        low, high, value = (math.log10(v) if log else v for v in (ticks[0], ticks[-1], value))
        return start + (value - low) / (high - low) * (end - start)

    def at(point: tuple[float, float]) -> str:
        across = place(point[0], xs, LEFT, WIDTH - RIGHT)
        return f"{across:.1f},{place(point[1], ys, HEIGHT - BOTTOM, TOP):.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#333"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{html.escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{html.escape(x)}</text>',
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y)}</text>",
    ]
    for tick in xs:
        across = place(tick, xs, LEFT, WIDTH - RIGHT)
        out.append(f'<path d="M{across:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:,g}</text>')
    for tick in ys:
        up = place(tick, ys, HEIGHT - BOTTOM, TOP)
        out.append(f'<path d="M{LEFT} {up:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        joined = " ".join(map(at, line))
        out.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        up = TOP + 12 + 20 * number
        out.append(f'<path d="M{WIDTH - RIGHT + 12} {up - 4}h18" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{WIDTH - RIGHT + 36}" y="{up}">{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _ticks(values: list[float], log: bool) -> list[float]:
    """Round values from below the lowest to above the highest."""
    low, high = min(values), max(values)
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]
    raw = (high - low or 1.0) / 6
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * n, 10) for n in range(first, max(last, first + 1) + 1)]
