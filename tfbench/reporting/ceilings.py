"""What a machine reaches at one thing at a time, from micro.csv, and where models' steps stand below it."""

from collections.abc import Iterable, Sequence

from tfbench.hardware.specs import find
from tfbench.microbench import all_reduce, matmul, roofline
from tfbench.microbench.rows import MicroRow
from tfbench.records import RunRecord
from tfbench.reporting.document import (
    Bar,
    BarChart,
    Chart,
    Line,
    LineChart,
    Point,
    Section,
    Table,
    figure,
    interval,
    number,
    percent,
    words,
)
from tfbench.reporting.naming import grouped

_INTRO = (
    "The newest measurement of each case, on random numbers. Of the two ways to multiply, TensorFlow's own "
    "operation (library) and XLA's, the faster one is shown, as it is sustained; after rests a card that its "
    "power limit slows down is faster for some milliseconds. Sizes, convolutions, input and launches "
    "are in the files only."
)


def section(measured: Sequence[MicroRow], runs: Sequence[RunRecord]) -> Section:
    """Matrix products, memory and links, all-reduce and roofline of every card that was measured.

    Args:
        measured: rows of micro.csv files.
        runs: what may be placed below the rooflines.
    """
    charts: list[Chart] = []
    tables: list[Table] = []
    sentences = []
    cards = grouped(_newest(measured), lambda row: (row.gpu_name, row.host))
    for name, rows in zip(_names(list(cards)), cards.values(), strict=True):
        parts = (_products(name, rows), _memory(name, rows), _all_reduce(name, rows))
        for part in (*parts, _roofline(name, rows, runs)):
            charts += part.charts
            tables += part.tables
            sentences += [part.intro] if part.intro else []
    missing = "No rows of a micro.csv lie beside the files. Fill it with: python -m tfbench.micro"
    intro = " ".join([_INTRO, *sentences])
    title = "Ceilings of the machine"
    return Section("ceilings", title, intro, charts, tables, "" if tables else missing)


def _newest(measured: Iterable[MicroRow]) -> list[MicroRow]:
    """Of rows of one case on one machine that which was started last."""
    latest: dict[tuple[object, ...], MicroRow] = {}
    for row in sorted(measured, key=lambda row: row.started_at):
        case = (row.benchmark, row.case, row.precision, row.engine)
        latest[(*case, row.gpu_name, row.num_gpus, row.host)] = row
    return list(latest.values())


def _names(cards: Sequence[tuple[str | None, str | None]]) -> list[str]:
    """The card, and its host where several hosts have one."""
    names = [(gpu or "CPU").removeprefix("NVIDIA ") for gpu, _ in cards]
    return [
        f"{name} of {host}" if names.count(name) > 1 else name
        for name, (_, host) in zip(names, cards, strict=True)
    ]


def _part(charts: Sequence[Chart], tables: Sequence[Table], sentence: str = "") -> Section:
    """What one kind of measurement adds to the section."""
    return Section("", "", sentence, charts, tables)


def _remark(row: MicroRow) -> str:
    return "; ".join(filter(None, (row.note, row.evidence, (row.throttle_reasons or "").replace("|", ", "))))


def _products(name: str, rows: Sequence[MicroRow]) -> Section:
    """The square product of each number format by its faster engine; without any, why."""
    squares = [row for row in rows if row.benchmark == "matmul" and row.case in roofline.CEILING_CASES]
    rested = {
        row.precision: row.rate
        for row in rows
        if row.benchmark == "matmul"
        and row.case in (f"{case} {matmul.RESTED}" for case in roofline.CEILING_CASES)
    }
    by_format = grouped(squares, lambda row: row.precision or "")
    bars, lines = [], []
    for number_format in (each for each in matmul.FORMATS if each in by_format):
        tried = by_format[number_format]
        best = max(tried, key=lambda row: row.rate or 0.0)
        if best.rate is None:
            why = "; ".join(f"{row.engine}: {row.note}" for row in tried)
            lines.append([words(number_format), *[words("")] * 8, words(why)])
            continue
        share = "" if best.share_of_peak is None else f", {100 * best.share_of_peak:.0f} % of peak"
        bars.append(Bar(number_format, [("", best.rate)], figure(best.rate) + share, best.low, best.high))
        lines.append(
            [
                words(number_format),
                number(best.rate),
                words(best.unit),
                interval(best.low, best.high),
                percent(best.share_of_peak),
                number(rested.get(number_format)),
                words(best.engine),
                number(best.sm_clock_mhz_mean),
                number(best.power_w_mean),
                words(_remark(best)),
            ]
        )
    title = f"Matrix products, {name}"
    columns = ("format", "rate", "unit", "95 %", "of peak", "after rests", "by", "SM clock, MHz", "power, W",
               "remark")  # fmt: skip
    return _part(
        [BarChart(title, "TFLOP/s; int8: TOP/s", bars)] if bars else [],
        [Table(title, columns, lines)] if lines else [],
    )


def _memory(name: str, rows: Sequence[MicroRow]) -> Section:
    """The device's memory, its link to the host, and what starting work costs."""
    found = [row for row in rows if row.benchmark == "memory"]
    columns = ("what", "by", "rate", "unit", "95 %", "of peak", "remark")
    lines = [
        [
            words(row.case.replace("_", " ")),
            words(row.engine),
            number(row.rate),
            words(row.unit),
            interval(row.low, row.high),
            percent(row.share_of_peak),
            words(_remark(row)),
        ]
        for row in found
    ]
    return _part([], [Table(f"Memory, links and latencies, {name}", columns, lines)] if lines else [])


def _all_reduce(name: str, rows: Sequence[MicroRow]) -> Section:
    """Bus bandwidth against the size of the message, for each number of devices."""
    found = [row for row in rows if row.benchmark == "all_reduce"]
    charts, tables, sentences = [], [], []
    columns = ("message", "format", "by", "bus bandwidth, GB/s", "95 %", "of the link", "remark")
    for gpus, same in grouped(found, lambda row: row.num_gpus or 0).items():
        title = f"All-reduce, {f'{gpus} × ' if gpus else ''}{name}"
        if all(row.rate is None for row in same):
            sentences.append(f"{title}: {'; '.join(dict.fromkeys(_remark(row) for row in same))}.")
            continue
        lines = [
            [
                words(row.case),
                words(row.precision),
                words(row.engine),
                number(row.rate),
                interval(row.low, row.high),
                percent(row.share_of_peak),
                words(_remark(row)),
            ]
            for row in same
        ]
        charts.append(_bandwidth_chart(title, [row for row in same if row.rate is not None]))
        tables.append(Table(title, columns, lines))
    return _part(charts, tables, " ".join(sentences))


def _bandwidth_chart(title: str, rows: Sequence[MicroRow]) -> LineChart:
    """A line for each format and way to sum."""
    curves = grouped(rows, lambda row: f"{row.precision}, {row.engine}")
    lines = []
    for curve, members in curves.items():
        points = [
            Point(
                all_reduce.size_of(row.case) / 2**20,
                row.rate or 0.0,
                f"{curve}, {row.case}: {figure(row.rate or 0.0)} GB/s",
                row.low,
                row.high,
            )
            for row in members
        ]
        lines.append(Line(curve, sorted(points, key=lambda point: point.x)))
    return LineChart(title, "GB/s, bus bandwidth", "message, MiB", lines, doubling=True)


def _roofline(name: str, rows: Sequence[MicroRow], runs: Sequence[RunRecord]) -> Section:
    """Measured roofs, and the steps of models whose memory traffic the card counted."""
    limits = roofline.roofs(rows)
    bandwidth = limits.gb_per_s
    if bandwidth is None or not limits.tflops:
        sentence = (
            f"No roofline of {name}: it needs the rates of python -m tfbench.micro --only=matmul,memory."
        )
        return _part([], [], sentence)
    gpu = rows[0].gpu_name
    steps, sentences = roofline.steps(runs, gpu, find(gpu))
    title = f"Roofline, {name}"
    columns = ("what", "FLOP per byte", "TFLOP/s", "of what its roof allows")
    lines = [
        [
            words(f"{each}: edge of the roof, {figure(bandwidth)} GB/s below it"),
            number(1e3 * tflops / bandwidth),
            number(tflops),
            words(""),
        ]
        for each, tflops in limits.tflops.items()
    ]
    for step in steps:
        roof = limits.tflops.get(step.number_format or "")
        allowed = None if roof is None else roofline.attainable_tflops(step.flop_per_byte, bandwidth, roof)
        share = percent(None if allowed is None else step.tflops / allowed)
        lines.append([words(step.label), number(step.flop_per_byte), number(step.tflops), share])
    charts = [_roofline_chart(title, bandwidth, limits.tflops, steps)]
    return _part(charts, [Table(title, columns, lines)], " ".join(f"{each}." for each in sentences))


def _roofline_chart(
    title: str, bandwidth: float, tflops: dict[str, float], steps: Sequence[roofline.Step]
) -> LineChart:
    """A roof for each format, the highest first, and a dot for each step."""
    lines = []
    for each, top in sorted(tflops.items(), key=lambda item: -item[1]):
        left, right = roofline.INTENSITIES
        places = sorted({left, min(max(1e3 * top / bandwidth, left), right), right})
        heights = [roofline.attainable_tflops(place, bandwidth, top) for place in places]
        points = [
            Point(x, y, f"{each}: {figure(y)} TFLOP/s at {figure(x)} FLOP per byte")
            for x, y in zip(places, heights, strict=True)
        ]
        lines.append(Line(each, points))
    for step in steps:
        hover = f"{step.label}: {figure(step.tflops)} TFLOP/s at {figure(step.flop_per_byte)} FLOP per byte"
        lines.append(Line(step.label, [Point(step.flop_per_byte, step.tflops, hover)]))
    unit, x_label = "TFLOP/s", "FLOP per byte of device memory"
    return LineChart(title, unit, x_label, lines, log_log=True)
