"""Pictures as inline SVG. Colours are classes, so that the page's style sheet decides on light and dark.

Everything is drawn 360 units wide: on a telephone that is about its width, so that text keeps its size.
"""

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from html import escape

from tfbench.reporting.document import BarChart, Chart, Line, LineChart, Point, figure

WIDTH = 360
COLOURS = 8  # classes s0 … s7
_LABEL_CHARACTERS = 40  # of a bar's label on one line, beside its number
_LINE_HEIGHT = 16
_BAR_HEIGHT = 14
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 46  # margins of a line chart
_PLOT_HEIGHT = 170
_HIT_RADIUS = 12  # around a point, where the pointer finds it


def draw(chart: Chart) -> str:
    """One `<svg>` element."""
    return _bar_chart(chart) if isinstance(chart, BarChart) else _line_chart(chart)


def legend(chart: Chart) -> list[tuple[int, bool, str]]:
    """(colour, dashed, name) of a picture's lines or named parts; empty for plain bars."""
    if isinstance(chart, LineChart):
        names = [(line.name, line.dashed) for line in chart.lines]
    else:
        names = [(name, False) for name in _part_names(chart) if name]
    return [(index % COLOURS, dashed, name) for index, (name, dashed) in enumerate(names)]


def _svg(chart: Chart, height: float, body: Sequence[str]) -> str:
    label = escape(f"{chart.title}, {chart.unit}; the numbers are in the table of this section")
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">' + "".join(body) + "</svg>"
    )


def _text(x: float, y: float, text: str, css: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}">{escape(text)}</text>'


def _part_names(chart: BarChart) -> list[str]:
    return list(dict.fromkeys(name for bar in chart.bars for name, _ in bar.parts))


def _bar_chart(chart: BarChart) -> str:
    """Each bar below its label, which has the whole width; the number stands at the right."""
    longest = max((max(bar.length, bar.high or 0.0) for bar in chart.bars), default=0.0) or 1.0
    colours = {name: index % COLOURS for index, name in enumerate(_part_names(chart))}
    body, y = [], 0.0
    for bar in chart.bars:
        ends = (
            "" if bar.low is None or bar.high is None else f", 95 %: {figure(bar.low)} to {figure(bar.high)}"
        )
        parts = ", ".join(f"{name} {figure(length)}" for name, length in bar.parts if name)
        body.append(f"<g><title>{escape(f'{bar.label}: {parts or bar.shown}{ends} ({chart.unit})')}</title>")
        for line in textwrap.wrap(_unbroken(bar.label), _LABEL_CHARACTERS) or [""]:
            y += _LINE_HEIGHT
            body.append(_text(0, y - 4, line))
        body.append(_text(WIDTH, y - 4, bar.shown, "end strong"))
        body.append(f'<rect x="0" y="{y:.1f}" width="{WIDTH}" height="{_BAR_HEIGHT}" class="track"/>')
        x = 0.0
        for name, length in bar.parts:
            width = WIDTH * length / longest
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR_HEIGHT}" '
                f'class="f{colours[name]}"/>'
            )
            x += width
        if bar.low is not None and bar.high is not None:
            body.append(_whisker(WIDTH * bar.low / longest, WIDTH * bar.high / longest, y + _BAR_HEIGHT / 2))
        body.append("</g>")
        y += _BAR_HEIGHT + 8
    return _svg(chart, y, body)


def _unbroken(label: str) -> str:
    """So that "2 × H200" and "9 runs" stay on one line."""
    return label.replace(" × ", "\u00a0×\u00a0").replace(" runs", "\u00a0runs")


def _whisker(low: float, high: float, y: float) -> str:
    """A 95 % interval that lies flat; at least as wide as can be seen, and inside the picture."""
    low, high = min(low, WIDTH - 2), min(high, WIDTH - 0.5)
    return f'<path d="M{low:.1f} {y - 4}v8M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 4}v8" class="whisker"/>'


def _line_chart(chart: LineChart) -> str:
    """Axes with round numbers, a line a series, and what each point says when it is pointed at."""
    x_of, x_ticks = _x_axis(chart)
    y_of, y_ticks = _y_axis(chart)
    bottom = _TOP + _PLOT_HEIGHT
    body = [
        f'<rect x="{x_of(a):.1f}" y="{_TOP}" width="{x_of(b) - x_of(a):.1f}" height="{_PLOT_HEIGHT}" '
        'class="span"/>'
        for a, b in chart.spans
    ]
    for value in y_ticks:
        body.append(f'<path d="M{_LEFT} {y_of(value):.1f}H{WIDTH - _RIGHT}" class="grid"/>')
        body.append(_text(_LEFT - 6, y_of(value) + 4, _tick(value), "end dim"))
    for value in x_ticks:
        body.append(f'<path d="M{x_of(value):.1f} {bottom}v5" class="axis"/>')
        body.append(_text(x_of(value), bottom + 18, _tick(value), "middle dim"))
    body.append(f'<path d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}" class="axis"/>')
    body.append(_text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 38, chart.x_label, "middle dim"))
    for index, line in enumerate(chart.lines):
        body += _line(line, index % COLOURS, x_of, y_of, chart.dots)
    if not chart.dots:
        body += _strips(chart, x_of)
    return _svg(chart, bottom + _BOTTOM, body)


def _line(
    line: Line, colour: int, x_of: Callable[[float], float], y_of: Callable[[float], float], dots: bool
) -> list[str]:
    """The line, and its points with their intervals."""
    places = [(x_of(point.x), y_of(point.y)) for point in line.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    drawn = [f'<path d="M{path}" class="l l{colour}{" dashed" if line.dashed else ""}"/>']
    if line.dashed or not dots:
        return drawn
    for point, (x, y) in zip(line.points, places, strict=True):
        whisker = ""
        if point.low is not None and point.high is not None:
            low, high = y_of(point.low), y_of(point.high)
            whisker = (
                f'<path d="M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8" '
            )
            whisker += f'class="l l{colour} thin"/>'
        drawn.append(
            f"<g><title>{escape(_point_title(point))}</title>{whisker}"
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="f{colour}"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_HIT_RADIUS}" class="hit"/></g>'
        )
    return drawn


def _point_title(point: Point) -> str:
    if point.low is None or point.high is None:
        return point.hover
    return f"{point.hover}, 95 %: {figure(point.low)} to {figure(point.high)}"


def _strips(chart: LineChart, x_of: Callable[[float], float]) -> list[str]:
    """Invisible columns over a chart without dots: each says what all lines are there."""
    guide = max(chart.lines, key=lambda line: len(line.points)).points
    edges = [x_of(guide[0].x), *((x_of(a.x) + x_of(b.x)) / 2 for a, b in itertools.pairwise(guide))]
    strips = []
    for point, left, right in zip(guide, edges, [*edges[1:], x_of(guide[-1].x)], strict=True):
        said = "\n".join(
            f"{line.name}, {min(line.points, key=lambda other: abs(other.x - point.x)).hover}"
            for line in chart.lines
        )
        strips.append(
            f'<rect x="{left:.1f}" y="{_TOP}" width="{max(right - left, 0.5):.1f}" height="{_PLOT_HEIGHT}" '
            f'class="hit"><title>{escape(said)}</title></rect>'
        )
    return strips


def _x_axis(chart: LineChart) -> tuple[Callable[[float], float], list[float]]:
    """Where an x lies, and which are named."""
    values = sorted(
        {point.x for line in chart.lines for point in line.points} | {x for s in chart.spans for x in s}
    )
    scale: Callable[[float], float] = math.log2 if chart.doubling or chart.log_log else float
    first, last = scale(values[0]), scale(values[-1])
    inset = 14 if chart.dots else 0  # so that first and last points keep clear of the edges
    width = WIDTH - _LEFT - _RIGHT - 2 * inset
    ticks = _apart(values, scale) if chart.dots else round_numbers(values[0], values[-1], 5)
    ticks = _powers_of_ten(values[0], values[-1]) if chart.log_log else ticks

    def place(x: float) -> float:
        share = (scale(x) - first) / (last - first) if last > first else 0.5
        return _LEFT + inset + width * share

    return place, [tick for tick in ticks if values[0] <= tick <= values[-1]]


def _apart(values: Sequence[float], scale: Callable[[float], float]) -> list[float]:
    """Of ordered values, those whose names do not touch each other."""
    gap = (scale(values[-1]) - scale(values[0])) / 8
    kept: list[float] = []
    for value in values:
        if not kept or scale(value) - scale(kept[-1]) >= gap:
            kept.append(value)
    return kept


def _powers_of_ten(low: float, high: float) -> list[float]:
    """From at most `low` to at least `high`, two or more."""
    first = math.floor(math.log10(low))
    return [10.0**power for power in range(first, max(math.ceil(math.log10(high)), first + 1) + 1)]


def _y_axis(chart: LineChart) -> tuple[Callable[[float], float], list[float]]:
    """Where a y lies, and which are named: round numbers from below the least to above the most."""
    points = [point for line in chart.lines for point in line.points]
    heights = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    scale: Callable[[float], float] = math.log10 if chart.log_log else float
    if chart.log_log:
        ticks = _powers_of_ten(min(heights), max(heights))
    else:
        low, high = (0.0 if chart.from_zero else min(heights)), max(heights)
        ticks = round_numbers(low, high, 4, outside=True)
    bottom, top = scale(ticks[0]), scale(ticks[-1])

    def place(y: float) -> float:
        return _TOP + _PLOT_HEIGHT * (1 - (scale(y) - bottom) / (top - bottom))

    return place, ticks


def round_numbers(low: float, high: float, count: int, outside: bool = False) -> list[float]:
    """About `count` multiples of 1, 2 or 5 × 10ⁿ between `low` and `high`, or so that they enclose both."""
    if not high > low:
        low, high = low - 0.5 * (abs(low) or 1.0), low + 0.5 * (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = low / step, high / step
    # A hair of tolerance, so that 0.3 ÷ 0.1 counts as 3.
    if outside:
        start, end = math.floor(first + 1e-9), math.ceil(last - 1e-9)
    else:
        start, end = math.ceil(first - 1e-9), math.floor(last + 1e-9)
    return [index * step for index in range(start, end + 1)]


def _tick(value: float) -> str:
    """A round number as short as it goes."""
    text = f"{value:,.6f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
