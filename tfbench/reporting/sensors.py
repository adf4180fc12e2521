"""What the GPUs' sensors said over a run, from the telemetry.csv and windows.csv in its folder."""

import math
from collections.abc import Sequence

import numpy as np

from tfbench.reporting.document import (
    Cell,
    Chart,
    Line,
    LineChart,
    Point,
    Section,
    Table,
    count,
    figure,
    number,
    words,
)
from tfbench.reporting.load import Curve, Run, Spans, read_telemetry, read_windows
from tfbench.reporting.naming import MachineNames, full_labels, on_cpu

MOST_RUNS = 6
MOST_POINTS = 90  # of a line: more cannot be told apart in a picture of this size

# title, unit, from zero, and columns with their names and what their values are multiplied by.
_CHARTS: tuple[tuple[str, str, bool, tuple[tuple[str, str, float], ...]], ...] = (
    (
        "Utilisation",
        "%",
        True,
        (
            ("utilization_percent", "a kernel ran", 1.0),
            ("sm_active", "multiprocessors", 100.0),
            ("dram_active", "memory bandwidth", 100.0),
            ("tensor_active", "tensor cores", 100.0),
        ),
    ),
    ("Power", "W", True, (("power_w", "power", 1.0),)),
    ("SM clock", "MHz", False, (("sm_clock_mhz", "SM clock", 1.0),)),
    ("Temperature", "°C", False, (("temperature_c", "temperature", 1.0),)),
)


def over_time(runs: Sequence[Run], machines: MachineNames) -> Section:
    """Utilisation, power, clock and temperature of the newest runs that kept them."""
    charts: list[Chart] = []
    tables, problems = [], []
    kept = [run for run in runs if (run.folder / "telemetry.csv").is_file()]
    shown = kept[-MOST_RUNS:]
    for run, title in zip(shown, full_labels([run.row for run in shown], machines), strict=True):
        try:
            curves, windows = read_telemetry(run), read_windows(run)
        except (OSError, ValueError) as error:
            problems.append(f"Left out, cannot be read: {error}.")
            continue
        if curves:
            charts += _charts(title, curves, windows)
            tables += _table(title, curves, windows)
    left_out = f" Shown are the newest {MOST_RUNS} of {len(kept)} runs." if len(kept) > MOST_RUNS else ""
    return Section(
        "sensors",
        "Sensors over time",
        " ".join(
            [
                "Readings of the GPUs; the timed windows are shaded, and time counts from the first of them. "
                f"A line of many readings is drawn as at most {MOST_POINTS} means.{left_out}",
                *problems,
            ]
        ),
        charts,
        tables,
        ""
        if charts
        else "No run folder with a telemetry.csv that has readings lies beside the files: "
        + (
            "they are those of NVIDIA GPUs, and no run used one."
            if on_cpu([run.row for run in runs])
            else "fill it with python -m tfbench.train --gpus=1, and keep its folder beside runs.csv"
        ),
    )


def _charts(title: str, curves: dict[str, dict[int, Curve]], windows: Spans) -> list[LineChart]:
    """One picture a kind of quantity; only what was answered."""
    first_s = (
        windows[0][0] if windows else min(c[0].start_s for by_gpu in curves.values() for c in by_gpu.values())
    )
    charts = []
    for name, unit, from_zero, columns in _CHARTS:
        lines = [
            Line(who, _points(curve, first_s, factor, label, unit))
            for column, label, factor in columns
            for who, curve in _named_curves(label, curves.get(column, {}), pooled=len(columns) > 1)
        ]
        if lines:
            spans = [(start - first_s, end - first_s) for start, end in windows]
            heading = f"{name}, {title}"
            charts.append(LineChart(heading, unit, "seconds", lines, False, from_zero, spans, dots=False))
    return charts


def _named_curves(label: str, by_gpu: dict[int, Curve], pooled: bool) -> list[tuple[str, Curve]]:
    """A curve for each GPU; one of all GPUs' readings where a picture has several quantities already."""
    if len(by_gpu) < 2:
        return [(label, curve) for curve in by_gpu.values()]
    if pooled:
        together = sorted(reading for curve in by_gpu.values() for reading in curve)
        return [(f"{label}, mean of {len(by_gpu)} GPUs", together)]
    return [(f"GPU {gpu}, {label}", curve) for gpu, curve in sorted(by_gpu.items())]


def _points(curve: Curve, first_s: float, factor: float, label: str, unit: str) -> list[Point]:
    """Means of as many neighbours as it takes to be few enough."""
    parts = np.array_split(np.array(curve), min(len(curve), MOST_POINTS))
    means = [(float(part[:, :2].mean()) - first_s, float(part[:, 2].mean()) * factor) for part in parts]
    return [Point(x, y, f"{x:.1f} s: {label} {figure(y, 3)} {unit}") for x, y in means]


def _table(title: str, curves: dict[str, dict[int, Curve]], windows: Spans) -> list[Table]:
    """Mean, least and most of the readings inside the windows, GPU by GPU; no table where there are none.

    A run that ended before its first window has those of all its time.
    """
    spans = windows or [(-math.inf, math.inf)]
    columns = ("quantity", "GPU", "mean", "least", "most", "readings")
    rows: list[list[Cell]] = []
    for _, unit, _, quantities in _CHARTS:
        for column, label, factor in quantities:
            for gpu, curve in sorted(curves.get(column, {}).items()):
                inside = [r for r in curve if any(a <= r.start_s and r.end_s <= b for a, b in spans)]
                if inside:
                    rows.append([words(f"{label}, {unit}"), count(gpu), *_summary(inside, factor)])
    when = "Inside the windows" if windows else "Before any window"
    return [Table(f"{when}, {title}", columns, rows)] if rows else []


def _summary(inside: Curve, factor: float) -> list[Cell]:
    """Mean (of readings over intervals: by their length, as in the row), least, most and number."""
    lengths = [reading.end_s - reading.start_s for reading in inside]
    values = [reading.value * factor for reading in inside]
    mean = float(np.average(values, weights=lengths if any(lengths) else None))
    return [number(mean), number(min(values)), number(max(values)), count(len(values))]
