"""The table of input_race.sh: rates with real input over those with synthetic input and of the input alone.

    python benchmarks/input_table.py FOLDER

Reads FOLDER/runs.csv, whose tags are MODEL-KIND, and FOLDER/input.csv, whose tags are input-KIND; of equal
tags the last row. `/least` is the rate over the lower one of synthetic input and the input alone, which a
training can reach at most. The 95 % intervals of both ratios hold those of the two rates.
"""

import csv
import os
import sys

from tfbench.measure import statistics


def rows(path: str) -> dict[str, dict[str, str]]:
    """Rows of a file by tag; none where there is no file."""
    if not os.path.exists(path):
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        return {row["tag"]: row for row in csv.DictReader(file)}


def number(row: dict[str, str] | None, column: str) -> float | None:
    """A cell; None where it is empty or the row is missing."""
    return float(row[column]) if row and row.get(column) else None


def ratio(above: dict[str, str] | None, below: dict[str, str] | None) -> tuple[float | None, ...]:
    """One row's rate over another's, and the interval's ends; None for what is not known.

    A row over itself is 1 and has no interval.
    """
    rates, found = [], []
    for row in (above, below):
        value, low, high = (number(row, f"samples_per_sec{end}") for end in ("", "_low", "_high"))
        if value is None:
            return None, None, None
        rates.append(value)
        if low is not None and high is not None and above is not below:
            found.append((value, low, high))
    ends = statistics.ratio_interval(*found) if len(found) == 2 else (None, None)
    return rates[0] / rates[1], *ends


def cell(value: float | None, form: str, width: int) -> str:
    """A number for people; a missing one is a dash."""
    return f"{'-' if value is None else format(value, form):>{width}}"


def shared(tag: str, row: dict[str, str]) -> str:
    """First columns of both tables."""
    names = ("samples_per_sec", "samples_per_sec_low", "samples_per_sec_high")
    return f"{tag:24}" + "".join(cell(number(row, name), ",.0f", 10) for name in names)


def input_lines(inputs: dict[str, dict[str, str]]) -> list[str]:
    """What each input gives alone."""
    head = (
        f"{'input alone':24}{'samples/s':>10}{'95 % low':>10}{'high':>10}{'cores':>8}{'/core/s':>9}  status"
    )
    return [head] + [
        shared(tag, row)
        + cell(number(row, "cores_busy"), ".2f", 8)
        + cell(number(row, "samples_per_core_per_sec"), ",.0f", 9)
        + f"  {row['status']} {row['note'][:80]}"
        for tag, row in inputs.items()
    ]


def training_lines(runs: dict[str, dict[str, str]], inputs: dict[str, dict[str, str]]) -> list[str]:
    """What each training gives, and what of its limits."""
    head = (
        f"{'training':24}{'samples/s':>10}{'95 % low':>10}{'high':>10}{'/synthetic':>12}{'low':>7}{'high':>7}"
        f"{'/least':>8}{'low':>7}{'high':>7}{'waiting':>9}  status"
    )
    lines = [head]
    for tag, row in runs.items():
        model, _, kind = tag.partition("-")
        limits = [runs.get(f"{model}-synthetic"), inputs.get(f"input-{kind}")]
        known = [limit for limit in limits if number(limit, "samples_per_sec") is not None]
        least = None
        if len(known) == len(limits):
            least = min(known, key=lambda limit: number(limit, "samples_per_sec") or 0.0)
        ratios = [*ratio(row, limits[0]), *ratio(row, least)]
        lines.append(
            shared(tag, row)
            + "".join(
                cell(each, ".3f", width) for each, width in zip(ratios, (12, 7, 7, 8, 7, 7), strict=True)
            )
            + cell(number(row, "input_wait_fraction"), ".3f", 9)
            + f"  {row['status']} {unlike(row, limits[0])}{row['note'][:80]}"
        )
    return lines


def unlike(row: dict[str, str], synthetic: dict[str, str] | None) -> str:
    """What makes a rate beside synthetic input's one of other weights, and so perhaps of another clock."""
    name = "lr_warmup_steps"
    if synthetic is None or row.get(name) == synthetic.get(name):
        return ""
    return f"({name} {row.get(name)}, synthetic {synthetic.get(name)}) "


def main() -> None:
    """Print both tables."""
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.exit(f"{sys.argv[1:]}: one folder is accepted, that of input_race.sh")
    runs, inputs = (rows(os.path.join(sys.argv[1], name)) for name in ("runs.csv", "input.csv"))
    print(*input_lines(inputs), "", *training_lines(runs, inputs), sep="\n")


if __name__ == "__main__":
    main()
