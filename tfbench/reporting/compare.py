"""Rows against those of a baseline file with the same configuration."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tfbench.records import RunRecord
from tfbench.reporting.document import Bar, BarChart, Cell, Mark, Section, Table, interval, number, words
from tfbench.reporting.naming import (
    LIMIT_COLUMNS,
    MACHINE_COLUMNS,
    MachineNames,
    full_labels,
    grouped,
    machine_of,
    newest,
)
from tfbench.reporting.sections import MOST_BARS, ratio

Outcome = Literal["regression", "faster", "no difference shown", "no interval", "fails now"]
_MARKS: dict[Outcome, Mark] = {
    "regression": "bad",
    "fails now": "bad",
    "faster": "good",
    "no interval": "warn",
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row, the baseline's row of the same configuration, and how the first compares.

    `ratio` is rate now ÷ rate before with its 95 % interval; None where there is no rate or no interval.
    """

    now: RunRecord
    before: RunRecord
    outcome: Outcome
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare(rows: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> list[Comparison]:
    """The newest good row of each configuration and machine against that of the baseline.

    Configurations are equal where the run key is. Where the baseline has several machines, the same host and
    card is preferred. A configuration that has no good row any more is compared too.
    """
    before = grouped((row for row in baseline if usable(row) and row.run_key), lambda row: row.run_key)
    groups = grouped(
        (row for row in rows if row.run_key in before), lambda row: (row.run_key, machine_of(row))
    )
    return [
        _compare(newest([row for row in group if usable(row)] or group), before[key])
        for (key, _), group in groups.items()
    ]


def usable(row: RunRecord) -> bool:
    """Whether the row ended well and has a rate."""
    return row.status == "ok" and bool(row.samples_per_sec)


def _compare(now: RunRecord, candidates: Sequence[RunRecord]) -> Comparison:
    same = [row for row in candidates if (row.host, row.gpu_name) == (now.host, now.gpu_name)]
    before = newest(same or candidates)
    if not usable(now):
        return Comparison(now, before, "fails now")
    times, low, high = ratio(now, before)
    outcome: Outcome = "no difference shown"
    if low is None or high is None:
        outcome = "no interval"
    elif high < 1:
        outcome = "regression"
    elif low > 1:
        outcome = "faster"
    return Comparison(now, before, outcome, times, low, high)


def is_worse(comparison: Comparison) -> bool:
    """What a continuous integration must not let through."""
    return comparison.outcome in ("regression", "fails now")


def environment_differences(now: RunRecord, before: RunRecord) -> list[str]:
    """What is known to be different around two runs, such as "driver 580.1 → 590.2"."""
    return [
        f"{column} {old} → {new}"
        for column in (*MACHINE_COLUMNS, *LIMIT_COLUMNS)
        if (old := getattr(before, column)) != (new := getattr(now, column)) and None not in (old, new)
    ]


def section(comparisons: Sequence[Comparison], baseline: str, machines: MachineNames) -> Section:
    """Every comparison, the slowest first, with what differs in the environment."""
    ordered = sorted(comparisons, key=lambda each: each.ratio or 0.0)
    named = list(zip(full_labels([each.now for each in ordered], machines), ordered, strict=True))
    chart_bars = [
        Bar(label, [("", each.ratio)], f"{each.ratio:.3f}", each.low, each.high)
        for label, each in named
        if each.ratio is not None
    ]
    title = f"Rate now ÷ rate in {baseline}"
    columns = (
        "run",
        "outcome",
        "ratio",
        "95 %",
        "samples/s now",
        "samples/s before",
        "environment before → now",
    )
    return Section(
        "baseline",
        "Against the baseline",
        "Rows with the same run key, the newest good one of each. A regression is a ratio whose 95 % "
        "interval lies below 1; the interval comes from the windows of the two runs and, where it is known, "
        "what differs between runs (between_runs_percent).",
        [BarChart(title, "1 is as fast as before", chart_bars[:MOST_BARS])] if chart_bars else [],
        [Table(title, columns, [_row(label, each) for label, each in named])],
    )


def _row(label: str, each: Comparison) -> list[Cell]:
    why = f" ({each.now.status})" if each.outcome == "fails now" else ""
    return [
        words(label),
        words(each.outcome + why, _MARKS.get(each.outcome, "")),
        Cell("") if each.ratio is None else Cell(f"{each.ratio:.3f}", each.ratio),
        interval(each.low, each.high),
        number(each.now.samples_per_sec),
        number(each.before.samples_per_sec),
        words("; ".join(environment_differences(each.now, each.before)) or "no difference known"),
    ]
