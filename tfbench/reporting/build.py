"""From runs to the report."""

from collections.abc import Sequence

from tfbench.microbench.rows import MicroRow
from tfbench.reporting import ceilings, compare, cost, machines, sections, sensors
from tfbench.reporting.document import Report
from tfbench.reporting.load import Run
from tfbench.reporting.naming import machine_names


def build(
    runs: Sequence[Run],
    sentences: Sequence[str],
    comparisons: Sequence[compare.Comparison] = (),
    baseline: str = "",
    plan: cost.Plan | None = None,
    measured: Sequence[MicroRow] = (),
) -> Report:
    """Every section, those without data with a line that says which run would fill them.

    Args:
        runs: at least one, or there is something measured.
        sentences: on what was read.
        comparisons: with the baseline; empty: none was asked for.
        baseline: its file.
        plan: prices and what to compute from them; None: there are no prices.
        measured: rows of micro.csv files.
    """
    rows = [run.row for run in runs]
    good = [row for row in rows if compare.usable(row)]
    rest = [row for row in rows if not compare.usable(row)]
    names = machine_names(rows)
    lead = [
        f"{_counted(len(rows), 'run')}, {len(good)} of them ended well, "
        f"on {_counted(len(set(names.values())), 'machine')}.",
        *sentences,
    ]
    return Report(
        "tfbench report",
        lead,
        [
            *([compare.section(comparisons, baseline, names)] if comparisons else []),
            sections.ranking(good, names),
            sections.scaling(good, rows),
            sections.batches(good, names),
            sections.precisions(good, names),
            sections.parts(good, names),
            sections.energy(good, names),
            cost.section(good, plan, names),
            ceilings.section(measured, rows),
            sensors.over_time(runs, names),
            machines.flagged(good, names),
            machines.failed(rest),
            machines.environment(rows),
        ],
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
