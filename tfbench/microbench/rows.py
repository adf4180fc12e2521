"""One case = one row of micro.csv: the columns, a safe append, a typed read. TensorFlow-free."""

import csv
import dataclasses
import fcntl
import io
import os
import typing
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


class MicroSchemaError(ValueError):
    """A file that does not hold rows of this schema; it was left as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroRow:
    """What was measured and on what; None is an empty cell: not known, not measured, not possible.

    A case that is not possible has no `rate`, and the reason in `note`.
    """

    run_id: str
    started_at: str  # of the run, ISO 8601 in UTC
    schema_version: int = SCHEMA_VERSION
    benchmark: str
    case: str
    precision: str | None = None
    engine: str | None = None  # library: TensorFlow's operations; xla: compiled
    rate: float | None = None  # median over the windows
    unit: str | None = None  # of rate, low and high
    low: float | None = None  # 95 % interval of the median
    high: float | None = None
    windows: int | None = None
    share_of_peak: float | None = None  # of the data sheet's dense peak, of the memory's or the link's limit
    relative_error: float | None = None  # largest, against float64, in units of the outputs' root mean square
    bound: float | None = None  # the largest that rounding explains
    gb_per_s: float | None = None  # least bytes ÷ time, 10⁹ bytes
    flop_per_byte: float | None = None
    sm_clock_mhz_mean: float | None = None  # of the GPUs inside the windows
    power_w_mean: float | None = None
    throttle_reasons: str | None = None
    evidence: str | None = None  # which unit or program did it
    note: str | None = None
    gpu_name: str | None = None
    num_gpus: int | None = None
    topology: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    tensorflow: str | None = None
    host: str | None = None


COLUMNS = tuple(field.name for field in dataclasses.fields(MicroRow))
_HEADER = ",".join(COLUMNS) + "\n"


def _kind(hint: Any) -> type:
    """The type of a column's values, without None."""
    kinds: list[type] = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    return kinds[0]


_KINDS = {name: _kind(hint) for name, hint in typing.get_type_hints(MicroRow).items()}


def append(path: str | os.PathLike[str], row: MicroRow) -> None:
    """Adds one row, whole and on disk when this returns; a missing or empty file gets its header first.

    What a killed writer left of a last line is cut off.

    Raises:
        MicroSchemaError: the file has other columns; it is left as it is.
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([_cell(getattr(row, name)) for name in COLUMNS])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if whole or not _HEADER.encode().startswith(content):  # a header that was cut off is ours
            _check_header(path, content)
        file.truncate(len(whole))
        file.write(((_HEADER if not whole else "") + text.getvalue()).encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: str | os.PathLike[str]) -> list[MicroRow]:
    """Rows with typed values; an unfinished last line is left out.

    Raises:
        MicroSchemaError: the file has other columns, or a cell is no value of its column.
        FileNotFoundError: there is no such file.
    """
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # a row that is being written is not a torn one
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    _check_header(path, whole)
    rows = csv.DictReader(io.StringIO(whole.decode(errors="replace"), newline=""))
    try:
        return [MicroRow(**{n: _value(_KINDS[n], cell) for n, cell in row.items()}) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise MicroSchemaError(f"{path}, line {rows.line_num}: {error}") from error


def has_header(path: str | os.PathLike[str]) -> bool:
    """Whether a file's first line is that of a micro.csv, of this schema or another one.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        return {"benchmark", "case", "rate"} <= set(file.readline().rstrip("\n").split(","))


def _check_header(path: str | os.PathLike[str], content: bytes) -> None:
    """Raises MicroSchemaError unless the first line is this schema's header."""
    if not content.startswith(_HEADER.encode()):
        raise MicroSchemaError(
            f"{path} does not have the columns of micro.csv version {SCHEMA_VERSION}. The file was not "
            "changed: move it away, or let tfbench.micro write to another --results_dir"
        )


def _cell(value: Any) -> str:
    """One value as text, without loss for numbers; line breaks become spaces, so a row is one line."""
    if value is None:
        return ""
    return repr(float(value)) if isinstance(value, float) else " ".join(str(value).splitlines())


def _value(kind: type, cell: str) -> Any:
    return kind(cell) if cell else None
