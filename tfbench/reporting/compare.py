"""Rows against those of a baseline file with the same configuration."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tfbench.records import RunRecord, side_by_side
from tfbench.reporting.document import Bar, BarChart, Cell, Mark, Section, Table, interval, number, words
from tfbench.reporting.naming import (
    LIMIT_COLUMNS,
    MACHINE_COLUMNS,
    MachineNames,
    cards,
    full_labels,
    grouped,
    likeness,
    machine_names,
    machine_of,
    may_be_same,
    newest,
)
from tfbench.reporting.sections import MOST_BARS, ratio

Outcome = Literal[
    "regression", "faster", "no difference shown", "no interval", "not comparable", "fails now", "not run now"
]
_MARKS: dict[Outcome, Mark] = {
    "regression": "bad",
    "fails now": "bad",
    "not run now": "bad",
    "not comparable": "warn",
    "faster": "good",
    "no interval": "warn",
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row, the baseline's row of the same configuration, and how the first compares.

    `now` is None where no row has the configuration any more. `ratio` is rate now ÷ rate before with its 95 %
    interval; None where there is no rate or no interval, or the two rates are not comparable.
    """

    now: RunRecord | None
    before: RunRecord
    outcome: Outcome
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare(rows: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> list[Comparison]:
    """The newest good row of each configuration and machine against that of the baseline.

    Configurations are equal where the run key is, and runs side by side on a machine are apart from those
    that are alone. Of the baseline's rows the newest of those under the most like conditions is taken. A
    configuration that has no good row any more, or no row at all, is compared too; a failed try is not
    where there is a good row on a machine which, as far as is known, is the same.
    """
    before = grouped((row for row in baseline if usable(row) and row.run_key), lambda row: row.run_key)
    names = machine_names(rows)
    groups = grouped(
        (row for row in rows if row.run_key in before),
        lambda row: (row.run_key, names[machine_of(row)], side_by_side(row) if usable(row) else None),
    )
    good = grouped(filter(usable, rows), lambda row: row.run_key)
    found = [
        _compare(now, before[key])
        for (key, *_), group in groups.items()
        if usable(now := newest(group)) or not _runs_there(now, good.get(key, []))
    ]
    there = {row.run_key for row in rows}
    return found + [
        Comparison(None, newest(candidates), "not run now")
        for key, candidates in before.items()
        if key not in there
    ]


def _runs_there(failed: RunRecord, good: Sequence[RunRecord]) -> bool:
    """Whether one of the good rows may be of the machine of a failed one, of which little may be known."""
    return any(may_be_same(machine_of(row), machine_of(failed)) for row in good)


def usable(row: RunRecord) -> bool:
    """Whether the row ended well and has a rate."""
    return row.status == "ok" and bool(row.samples_per_sec)


def _compare(now: RunRecord, candidates: Sequence[RunRecord]) -> Comparison:
    before = max(candidates, key=lambda row: (*likeness(row, now), row.started_at or ""))
    if not usable(now):
        return Comparison(now, before, "fails now")
    other_card = now.gpu_name != before.gpu_name and None not in (now.gpu_name, before.gpu_name)
    if other_card or side_by_side(now) != side_by_side(before):
        return Comparison(now, before, "not comparable")
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
    return comparison.outcome in ("regression", "fails now", "not run now")


def environment_differences(now: RunRecord, before: RunRecord) -> list[str]:
    """What is known to be different around two runs, such as "driver 580.1 → 590.2"."""
    found = [
        f"{column} {old} → {new}"
        for column in (*MACHINE_COLUMNS, *LIMIT_COLUMNS, "cpu_cores")
        if (old := getattr(before, column)) != (new := getattr(now, column)) and None not in (old, new)
    ]
    if (runs := side_by_side(now)) != (others := side_by_side(before)):
        found.insert(0, f"runs side by side {others} → {runs}")
    if (here := cards(now)) != (there := cards(before)) and here and there:
        found.insert(0, f"cards {there} → {here}")
    return found


def section(comparisons: Sequence[Comparison], baseline: str, machines: MachineNames) -> Section:
    """Every comparison, the slowest first, with what differs in the environment."""
    ordered = sorted(comparisons, key=lambda each: each.ratio or 0.0)
    named = list(
        zip(full_labels([each.now or each.before for each in ordered], machines), ordered, strict=True)
    )
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
        "Rows with the same run key, the newest good one of each; of the baseline the one on the same cards "
        "and under the same limits where there is one. Rates on another model of card, or with another "
        "number of runs side by side, are not comparable. What was ok and is not run now counts as a "
        "regression: after a deliberate change, take a new baseline. A regression is a ratio whose 95 % "
        "interval lies below 1; the interval comes from the windows of the two runs and, where it is known, "
        "what differs between runs (between_runs_percent).",
        [BarChart(title, "1 is as fast as before", chart_bars[:MOST_BARS])] if chart_bars else [],
        [Table(title, columns, [_row(label, each) for label, each in named])],
    )


def _row(label: str, each: Comparison) -> list[Cell]:
    now = each.now
    why = f" ({now.status})" if now is not None and each.outcome == "fails now" else ""
    differences = [] if now is None else environment_differences(now, each.before)
    unknown = "" if now is None else "no difference known"
    return [
        words(label),
        words(each.outcome + why, _MARKS.get(each.outcome, "")),
        Cell("") if each.ratio is None else Cell(f"{each.ratio:.3f}", each.ratio),
        interval(each.low, each.high),
        number(None if now is None else now.samples_per_sec),
        number(each.before.samples_per_sec),
        words("; ".join(differences) or unknown),
    ]
