"""One measurement of the input = one row of a CSV file: the columns and a safe append. TensorFlow-free."""

import csv
import dataclasses
import fcntl
import io
import os
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


class InputSchemaError(ValueError):
    """A file that does not hold rows of this schema; it was left as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputRow:
    """What was read, how fast and on what; None is an empty cell: not known, not measured."""

    run_id: str
    started_at: str  # ISO 8601 in UTC
    schema_version: int = SCHEMA_VERSION
    tag: str
    status: str  # as of a training run
    note: str | None = None  # where it failed, why
    model: str
    data: str
    cache: str
    image_size: int | None
    seq_length: int | None
    num_replicas: int  # that the batches are dealt to
    num_gpus: int
    per_replica_batch_size: int
    global_batch_size: int
    windows: int | None = None
    seconds: float | None = None  # of the windows together
    samples_per_sec: float | None = None  # all replicas together, in their devices' memory
    samples_per_sec_low: float | None = None  # 95 % interval
    samples_per_sec_high: float | None = None
    batch_bytes_per_sec: float | None = None  # of the batches as the model takes them
    read_bytes_per_sec: float | None = None  # through read calls, from the page cache too
    cpu_cores: int  # that the process may use
    cores_busy: float | None = None  # CPU time ÷ wall time
    cores_busy_by_others: float | None = None  # of these cores, by other processes
    samples_per_core_per_sec: float | None = None  # samples ÷ CPU time
    host_rss_gib: float | None = None  # right after the windows
    records_skipped: int | None = None  # unreadable ones
    stages: str | None = None  # NAME=SAMPLES/S CPU_µs_PER_SAMPLE, up to each; joined by |
    gpu_rate: float | None = None  # samples/s of one GPU
    gpu_rate_source: str | None = None
    gpus_fed: float | None = None  # samples_per_sec ÷ gpu_rate
    gpus_fed_low: float | None = None  # of the interval of samples_per_sec
    gpus_fed_high: float | None = None
    gpu_name: str | None = None
    tensorflow: str | None = None
    host: str
    flags: str  # as a shell would need them


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareRow:
    """One variant of `--compare`: one row of input_compare.csv; None is an empty cell."""

    run_id: str  # of all variants that took turns
    started_at: str  # ISO 8601 in UTC
    schema_version: int = SCHEMA_VERSION
    tag: str
    status: str  # as of a training run: not ok where rounds are missing
    note: str | None = None  # where it failed, why
    model: str
    data: str
    cache: str
    image_size: int | None
    seq_length: int | None
    num_replicas: int
    num_gpus: int
    per_replica_batch_size: int
    global_batch_size: int
    variant: str
    change: str  # what differs from the input as it is
    rounds: int
    seconds: float  # of all rounds together
    samples_per_sec: float  # batches of one replica, on the host
    samples_per_sec_low: float | None = None  # 95 % interval
    samples_per_sec_high: float | None = None
    ratio: float  # to the input as it is: geometric mean over the rounds
    ratio_low: float | None = None  # 95 % interval
    ratio_high: float | None = None
    cpu_us_per_sample: float  # CPU time of the process
    cpu_cores: int  # that the process may use
    cores_busy: float  # CPU time ÷ wall time
    cores_busy_by_others: float  # of these cores, by other processes
    gpu_name: str | None = None
    tensorflow: str | None = None
    host: str
    flags: str  # as a shell would need them


Row = InputRow | CompareRow


def _header(kind: type[Row]) -> bytes:
    return (",".join(field.name for field in dataclasses.fields(kind)) + "\n").encode()


def check(path: Path, kind: type[Row]) -> None:
    """Refuse a file that `append` would refuse.

    Raises:
        InputSchemaError: it has other columns.
        OSError: it cannot be read.
    """
    _whole_lines(path, path.read_bytes() if path.exists() else b"", kind)


def append(path: Path, row: Row) -> None:
    """Adds one row, whole and on disk when this returns; a missing or empty file gets its header first.

    What a killed writer left of a last line is cut off. Several processes may append to one file.

    Raises:
        InputSchemaError: the file has other columns; it is left as it is.
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(map(_cell, dataclasses.astuple(row)))
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        whole = _whole_lines(path, file.read(), type(row))
        file.truncate(len(whole))
        file.write((b"" if whole else _header(type(row))) + text.getvalue().encode())
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(path: Path, content: bytes, kind: type[Row]) -> bytes:
    """The content without an unfinished last line.

    Raises:
        InputSchemaError: its first line is not this schema's header.
    """
    whole, header = content[: content.rfind(b"\n") + 1], _header(kind)
    if not (whole or content).startswith(header if whole else header[: len(content)]):
        raise InputSchemaError(
            f"{path} does not have the columns of {kind.__name__} version {SCHEMA_VERSION}. The file was not "
            "changed: move it away or choose another --results_dir"
        )
    return whole


def _cell(value: Any) -> str:
    """One value as text, without loss for numbers; line breaks become spaces, so a row is one line."""
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(float(value))
    return " ".join(str(value).encode(errors="backslashreplace").decode().splitlines())
