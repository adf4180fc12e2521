"""`python -m tfbench.report FILE…`: what results files say, in the terminal, Markdown or one HTML page.

FILE is a runs.csv, or a folder that holds one; a micro.csv beside it, or named itself, is read too. Exit
code: 0; 1 for a regression against --baseline; 2 for refused flags, files without rows, and a baseline with
nothing to compare.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from rich.console import Console
from rich.text import Text

from tfbench.microbench.rows import MicroSchemaError
from tfbench.records import SchemaError
from tfbench.reporting import build, compare, cost, load, markdown, page, prices, terminal

EXIT_REGRESSION = 1
EXIT_REFUSED = 2
_FILES = "a runs.csv that python -m tfbench.train has written, or a folder that holds one"

_MARKDOWN = flags.DEFINE_string("markdown", None, "File to write the report to as Markdown.")
_HTML = flags.DEFINE_string("html", None, "File to write the report to as one page that needs nothing else.")
_BASELINE = flags.DEFINE_string(
    "baseline",
    None,
    "Results file to compare with, row by row of equal run keys; a regression exits with 1, and so does a "
    "configuration that was ok there and is not here.",
)
_PRICES = flags.DEFINE_string(
    "prices",
    None,
    f"File with what a GPU costs per hour, for the costs: {','.join(prices.COLUMNS)}; the card as nvidia-smi "
    "names it or as tfbench/hardware/specs.csv does. tfbench/hardware/prices_example.csv shows the form.",
)
# What is computed from the prices, each a field of cost.Plan.
_PLAN = {
    "budget_gpu_hours": flags.DEFINE_float(
        "budget_gpu_hours", None, "Show what so many hours of one GPU cost and buy on each card."
    ),
    "train_samples": flags.DEFINE_integer(
        "train_samples", None, "Show time and cost of a training on so many samples, all epochs together."
    ),
    "budget": flags.DEFINE_float(
        "budget", None, "The most that the training may cost, in the currency of the prices."
    ),
    "deadline_hours": flags.DEFINE_float(
        "deadline_hours", None, "The most hours that the training may take."
    ),
    "failures_per_1000_gpu_hours": flags.DEFINE_float(
        "failures_per_1000_gpu_hours", None, "Failures that stop the training, in 1000 hours of one GPU."
    ),
    "checkpoint_minutes": flags.DEFINE_float(
        "checkpoint_minutes", None, "Minutes that the training stands still to write a checkpoint."
    ),
    "restart_minutes": flags.DEFINE_float(
        "restart_minutes", None, "Minutes from a failure until the training goes on; without it, none."
    ),
}


class ReportError(ValueError):
    """Why there is no report: the message names the file or flag and what to do."""


def report(argv: list[str]) -> int:
    """Read the files of the command line and show the report; returns the exit code."""
    console = Console()
    try:
        return _report(argv[1:], console)
    except (ReportError, SchemaError, MicroSchemaError, prices.CostError, OSError) as error:
        Console(stderr=True).print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)
        return EXIT_REFUSED


@contextlib.contextmanager
def _naming(argument: str, accepted: str) -> Iterator[None]:
    """Says of a file that cannot be read or written which argument named it, and what that takes.

    Raises:
        ReportError: there was an OSError.
    """
    try:
        yield
    except OSError as error:
        where = f"{argument}={error.filename}" if error.filename else argument  # a full disk names no file
        raise ReportError(f"{where}: {error.strerror}; it takes {accepted}") from error


def _report(files: Sequence[str], console: Console) -> int:
    """The exit code.

    Raises:
        ReportError: there is nothing to report or to compare.
        SchemaError: a file holds no rows of this schema.
        MicroSchemaError: likewise, one of tfbench.micro.
        CostError: the prices, or what is to be computed from them, are refused.
        OSError: the terminal cannot be written to.
    """
    if not files:
        raise ReportError(
            "no FILE: name results files, such as python -m tfbench.report tfbench_results/runs.csv"
        )
    plan = _plan()
    with _naming("FILE", _FILES):
        runs, sentences = load.read_runs([file for file in files if not load.is_micro(file)])
        measured, said = load.read_micro(files)
    if not runs and not measured:
        raise ReportError(
            f"no rows in {', '.join(files)}: python -m tfbench.train writes those of runs.csv, "
            "python -m tfbench.micro those of micro.csv"
        )
    comparisons = _compare(runs, _BASELINE.value) if _BASELINE.value is not None else []
    built = build.build(runs, [*sentences, *said], comparisons, _BASELINE.value or "", plan, measured)
    files_written = []
    for flag, renderer in ((_MARKDOWN, markdown), (_HTML, page)):
        if flag.value is not None:
            with _naming(f"--{flag.name}", "a file to write, in a folder that exists"):
                Path(flag.value).write_text(renderer.render(built), encoding="utf-8")
            files_written.append(flag.value)
    terminal.show(built, console)  # last: its reader may go away (`| head`)
    for name in files_written:
        console.print(Text(f"written: {name}"), soft_wrap=True)
    return EXIT_REGRESSION if any(map(compare.is_worse, comparisons)) else 0


def _plan() -> cost.Plan | None:
    """What to compute from which prices; None without prices.

    Raises:
        CostError: the flags or the file of prices are refused.
        ReportError: the file cannot be read.
    """
    given: dict[str, Any] = {name: flag.value for name, flag in _PLAN.items() if flag.value is not None}
    if _PRICES.value is not None:
        with _naming("--prices", f"a CSV file of {','.join(prices.COLUMNS)}"):
            return cost.Plan(prices=prices.read(_PRICES.value), **given)
    if given:
        raise prices.CostError(f"--{next(iter(given))} needs --prices: name a file of prices")
    return None


def _compare(runs: Sequence[load.Run], baseline: str) -> list[compare.Comparison]:
    """Comparisons with the baseline file.

    Raises:
        ReportError: no row can be compared, which must not look like a pass, or the file cannot be read.
        SchemaError: the file holds no rows of this schema.
    """
    with _naming("--baseline", _FILES):
        before, _ = load.read_runs([baseline])
    comparisons = compare.compare([run.row for run in runs], [run.row for run in before])
    if all(each.now is None for each in comparisons):
        raise ReportError(
            f"--baseline={baseline}: no row that ended ok among its {len(before)} has the run key of a row "
            "of the files: repeat a run of it with python -m tfbench.train --flagfile=RUN/flags.txt"
        )
    return comparisons


def parse(argv: list[str]) -> list[str]:
    """As absl's parser, but a refused flag ends with one message and its own exit code."""
    try:
        return list(flags.FLAGS(argv))
    except flags.Error as error:
        Console(stderr=True).print(
            Text.assemble(("error:", "red"), f" {error}\nSee python -m tfbench.report --help"), soft_wrap=True
        )
        sys.exit(EXIT_REFUSED)


def main() -> None:
    """Console entry point."""
    app.run(report, flags_parser=parse)


if __name__ == "__main__":
    main()
