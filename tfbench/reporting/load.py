"""Results files and the run folders beside them, as they are read for a report."""

import csv
import dataclasses
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tfbench import records
from tfbench.measure import gpm
from tfbench.microbench import rows as micro_rows
from tfbench.microbench.rows import MicroRow
from tfbench.records import RunRecord

Spans = list[tuple[float, float]]  # (start, end), seconds


class Reading(NamedTuple):
    """A value of a sensor, which holds from its start to its end; a moment's value has both the same."""

    start_s: float  # on the windows' clock
    end_s: float
    value: float


Curve = list[Reading]

_PLACE = frozenset({"t_s", "gpu", "gpm_start_s", "gpm_end_s"})  # columns that say where a reading belongs


@dataclasses.dataclass(frozen=True)
class Run:
    """A row and the folder where its windows and its sensors' readings are, if they were kept."""

    row: RunRecord
    folder: Path


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Run], list[str]]:
    """Every row of the files, each run once, in the order they were started.

    Args:
        paths: results files, or folders that hold a runs.csv.

    Returns:
        The runs, and sentences on what was read and what is odd about it.

    Raises:
        SchemaError: a file holds no rows of this schema.
        OSError: a file cannot be read.
    """
    runs: dict[str, Run] = {}
    sentences = []
    for path in map(Path, paths):
        file = path / "runs.csv" if path.is_dir() else path
        rows = records.read(file)
        known = sum(row.run_id in runs for row in rows)
        for number, row in enumerate(rows):
            runs.setdefault(row.run_id or f"{file}:{number}", Run(row, file.parent / (row.run_id or "")))
        again = f", {known} of them already read" if known else ""
        sentences.append(f"{file}: {len(rows)} row{'' if len(rows) == 1 else 's'}{again}")
    return sorted(runs.values(), key=lambda run: run.row.started_at or ""), sentences


def is_micro(path: str | os.PathLike[str]) -> bool:
    """Whether a file of the command line holds measurements of tfbench.micro, not runs.

    Told by its name or its header; a folder is one of them where it holds a micro.csv and no runs.csv.
    """
    path = Path(path)
    if path.is_dir():
        return (path / "micro.csv").is_file() and not (path / "runs.csv").exists()
    return path.is_file() and (path.name == "micro.csv" or micro_rows.has_header(path))


def read_micro(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[MicroRow], list[str]]:
    """Every row of the micro.csv files that are named, and of those that lie beside the results files.

    Args:
        paths: as the command line has them.

    Returns:
        The rows, each once, and sentences on what was read. One that nobody named and that cannot be read is
        left out with a sentence.

    Raises:
        MicroSchemaError: a file that was named holds no rows of this schema.
        OSError: a file that was named cannot be read.
    """
    found: dict[tuple[object, ...], MicroRow] = {}
    sentences: dict[Path, str] = {}
    for path in map(Path, paths):
        named = is_micro(path)
        file = path if named and path.is_file() else (path if path.is_dir() else path.parent) / "micro.csv"
        if file.resolve() in sentences or not (named or file.is_file()):
            continue
        try:
            rows = micro_rows.read(file) if file.stat().st_size else []
        except (micro_rows.MicroSchemaError, OSError) as error:
            if named:
                raise
            sentences[file.resolve()] = f"left out: {error}"
            continue
        for row in rows:
            found.setdefault((row.run_id, row.benchmark, row.case, row.precision, row.engine), row)
        sentences[file.resolve()] = f"{file}: {len(rows)} row{'' if len(rows) == 1 else 's'} of tfbench.micro"
    return list(found.values()), list(sentences.values())


def read_windows(run: Run) -> Spans:
    """(start, end) of each timed window, seconds; empty where they were not kept.

    Raises:
        ValueError: the file is not one of windows; the message names it.
    """
    path = run.folder / "windows.csv"
    return [
        (cells["start_s"], cells["start_s"] + cells["seconds"])
        for cells in _read_numbers(path, ("start_s", "seconds"))
    ]


def read_telemetry(run: Run) -> dict[str, dict[int, Curve]]:
    """The sensors' readings: column → GPU → curve. Columns that were never answered are missing.

    Raises:
        ValueError: the file is not one of readings; the message names it.
    """
    curves: dict[str, dict[int, Curve]] = defaultdict(lambda: defaultdict(list))
    for cells in _read_numbers(run.folder / "telemetry.csv", ("t_s", "gpu")):
        moment = (cells["t_s"], cells["t_s"])
        interval = (cells.get("gpm_start_s", moment[0]), cells.get("gpm_end_s", moment[1]))
        for column in cells.keys() - _PLACE:
            where = interval if column in gpm.METRICS else moment
            curves[column][int(cells["gpu"])].append(Reading(*where, cells[column]))
    return curves


def _read_numbers(path: Path, needed: Sequence[str]) -> list[dict[str, float]]:
    """Lines of a file of numbers, empty cells left out; none where there is no file.

    Raises:
        ValueError: a column is missing, or a cell is no number; the message names the file.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, restkey="", restval="")
        try:
            lines = [{name: float(cell) for name, cell in line.items() if cell} for line in reader]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    if any(name not in line for line in lines for name in needed):
        raise ValueError(f"{path}: a line has no {' or no '.join(needed)}")
    return lines
