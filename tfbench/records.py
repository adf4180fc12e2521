"""One run = one row of runs.csv: the columns, a safe append, a typed read, and the row to scale against.

`python -m tfbench.records` prints the table of columns, `--migrate=FILE` rewrites a file of an older schema.
"""

import contextlib
import csv
import dataclasses
import fcntl
import io
import logging
import math
import operator
import os
import pathlib
import shlex
import shutil
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from absl import app, flags

SCHEMA_VERSION = 4

_LOG = logging.getLogger(__name__)


class SchemaError(ValueError):
    """A results file that does not hold rows of this schema; it was left as it is."""


def _column(unit: str, meaning: str, default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"unit": unit, "help": meaning})


@dataclasses.dataclass(kw_only=True, slots=True)
class RunRecord:
    """One row: what ran, what was measured and on what. None is an empty cell: not known, not measured.

    Text cells do not distinguish "" from None. `python -m tfbench.records` explains every column.
    """

    run_id: str | None = _column("", "name of the run and of its folder")
    run_key: str | None = _column("", "hash of the configuration: equal keys are repeats")
    started_at: str | None = _column("", "start of the run, ISO 8601 in UTC, so that it sorts as text")
    schema_version: int | None = _column("", "version of these columns", SCHEMA_VERSION)
    tfbench_version: str | None = _column("", "version of tfbench")
    tag: str | None = _column("", "the user's own label")
    status: str | None = _column(
        "",
        "how the run ended: ok, oom, host_oom, hang, no_update, short_data, unsupported_gpu, failed "
        "or interrupted",
    )
    note: str | None = _column("", "warnings and, where the run failed, why")

    model: str | None = _column("", "what was trained")
    num_params: int | None = _column("parameters", "parameters of the model")
    data: str | None = _column("", "where the samples came from")
    precision: str | None = _column("", "precision that really ran; fp32 and tf32 are two")
    xla: bool | None = _column("", "whether the step was compiled by XLA")
    strategy: str | None = _column("", "TensorFlow's distribution strategy")
    scaling_mode: str | None = _column(
        "", "weak: the per-replica batch is kept as replicas grow; strong: the global batch is"
    )
    num_workers: int | None = _column("processes", "processes that trained together")
    num_gpus: int | None = _column("GPUs", "GPUs of all workers; 0 on the CPU")
    parallel_runs: int | None = _column(
        "runs", "runs of a sweep side by side on the machine, this one included; 1 outside a sweep"
    )
    num_replicas: int | None = _column("replicas", "copies of the model, all workers together")
    per_replica_batch_size: int | None = _column("samples", "samples a replica sees in one micro-batch")
    requested_per_replica_batch_size: int | None = _column(
        "samples", "the per-replica batch that was asked for, where a search changed it"
    )
    global_batch_size: int | None = _column(
        "samples", "samples of one optimizer update, all replicas together"
    )
    accumulate: int | None = _column("micro-batches", "micro-batches summed into one optimizer update")
    seq_length: int | None = _column("tokens", "sequence length of a text model")
    image_size: int | None = _column("pixels", "side of the images of an image model")
    optimizer: str | None = _column("", "optimizer")
    steps_per_loop: int | None = _column("steps", "steps inside one call of the compiled loop")
    warmup_steps: int | None = _column("steps", "untimed first steps that were made")
    measured_steps: int | None = _column("steps", "timed steps that really ran, all windows together")
    windows: int | None = _column("windows", "timed blocks of steps, synchronised at both edges")

    samples_per_sec: float | None = _column(
        "samples/s", "Σ samples ÷ Σ seconds over the windows, all replicas together"
    )
    samples_per_sec_low: float | None = _column("samples/s", "lower end of its 95 % interval")
    samples_per_sec_high: float | None = _column("samples/s", "upper end of its 95 % interval")
    samples_per_sec_per_gpu: float | None = _column("samples/s", "samples_per_sec ÷ GPUs")
    step_time_ms_mean: float | None = _column("ms", "Σ seconds ÷ Σ steps")
    step_time_ms_p50: float | None = _column("ms", "median over the windows' mean step times")
    step_time_ms_p90: float | None = _column("ms", "90th percentile over the windows' mean step times")
    step_time_ms_p99: float | None = _column("ms", "99th percentile over the windows' mean step times")
    between_runs_percent: float | None = _column(
        "%",
        "standard deviation between earlier runs that the interval of the rate includes; empty: it has none",
    )
    drift_percent: float | None = _column(
        "%", "change of the rate from the first window to the last, along their line; negative: slower"
    )
    outlier_windows: int | None = _column(
        "windows", "whose step time lies far from the others'; they stay in every figure"
    )
    compile_time_s: float | None = _column("s", "tracing and compiling the step, where it can be told apart")
    time_to_first_step_s: float | None = _column("s", "start of the build to the end of the first step")
    cache_state: str | None = _column(
        "",
        "warm: every compiled program came from the cache; tuned: some were compiled, with all of XLA's "
        "tuning from tfbench's own files; partly: with some tuning known; cold: without; empty: no cache",
    )

    flops_per_sample: int | None = _column(
        "FLOP", "forward and backward of one sample, matmul and convolution only, 1 MAC = 2 FLOPs"
    )
    tflops_per_gpu: float | None = _column("TFLOP/s", "samples_per_sec_per_gpu times flops_per_sample")
    mfu: float | None = _column("share", "tflops_per_gpu ÷ the card's dense peak at that precision")
    mfu_achievable: float | None = _column("share", "tflops_per_gpu ÷ the matmul rate measured here")
    weak_scaling_efficiency: float | None = _column(
        "share", "(rate on N ÷ N) ÷ rate on one, at the same per-replica batch"
    )
    strong_scaling_efficiency: float | None = _column(
        "share", "step time on one ÷ N ÷ step time on N, at the same global batch"
    )
    weak_scaling_efficiency_low: float | None = _column(
        "share", "lower end of the 95 % interval of weak_scaling_efficiency"
    )
    weak_scaling_efficiency_high: float | None = _column("share", "its upper end")
    strong_scaling_efficiency_low: float | None = _column(
        "share", "lower end of the 95 % interval of strong_scaling_efficiency"
    )
    strong_scaling_efficiency_high: float | None = _column("share", "its upper end")
    baseline_run_id: str | None = _column(
        "", "the one-GPU row that the efficiency compares with; of several cards joined by |"
    )

    gpu_util_mean: float | None = _column("%", "share of time a kernel ran, mean over GPUs and samples")
    gpu_util_max: float | None = _column("%", "its highest sample")
    graphics_active: float | None = _column("share", "time in which anything ran on a GPU, by its counters")
    tensor_active: float | None = _column("share", "time in which the tensor cores computed")
    dram_active: float | None = _column("share", "used bandwidth of the GPU's memory")
    sm_active: float | None = _column("share", "multiprocessors that had work")
    sm_occupancy: float | None = _column("share", "warps on the multiprocessors ÷ the most that fit")
    pcie_rx_gb_per_s: float | None = _column("GB/s", "PCIe traffic to one GPU, 10⁹ bytes")
    pcie_tx_gb_per_s: float | None = _column("GB/s", "PCIe traffic from one GPU")
    nvlink_rx_gb_per_s: float | None = _column("GB/s", "NVLink traffic to one GPU, all its links together")
    nvlink_tx_gb_per_s: float | None = _column("GB/s", "NVLink traffic from one GPU")
    pcie_link: str | None = _column(
        "", "PCIe generation x lanes right after the windows, such as 5x16; different ones joined by |"
    )
    power_w_mean: float | None = _column("W", "power of one GPU, mean over GPUs and samples")
    power_limit_w: float | None = _column("W", "enforced power limit; the lowest of the GPUs")
    energy_j_per_sample: float | None = _column("J", "energy of all GPUs inside the windows ÷ samples")
    samples_per_joule: float | None = _column("samples/J", "its inverse")
    energy_source: str | None = _column("", "counter: the card's own; integrated_power: from power samples")
    sm_clock_mhz_mean: float | None = _column("MHz", "clock of the multiprocessors")
    sm_clock_mhz_max: float | None = _column("MHz", "highest clock they allow; the lowest of the GPUs")
    temperature_c_max: float | None = _column("°C", "highest temperature of a GPU")
    throttle_reasons: str | None = _column(
        "", "why clocks were lowered inside the windows, joined by |; empty where never or not readable"
    )
    ecc_errors: int | None = _column("errors", "uncorrected memory errors of all GPUs during the run")
    peak_memory_gib: float | None = _column("GiB", "highest use of one GPU by the allocator, after warm-up")
    memory_used_gib_max: float | None = _column(
        "GiB", "highest use of one GPU inside the windows, by all processes, TensorFlow's pool included"
    )
    host_rss_gib: float | None = _column("GiB", "resident memory of the process")
    input_wait_fraction: float | None = _column("share", "share of the windows spent waiting for input")

    input_wait_ms: float | None = _column("ms", "of a step: what goes away without input (--diagnose)")
    compute_ms: float | None = _column("ms", "of a step: what none of the other parts is (--diagnose)")
    exposed_communication_ms: float | None = _column(
        "ms", "of a step: what goes away without the all-reduce (--diagnose)"
    )
    host_gap_ms: float | None = _column(
        "ms", "of a step: the host between calls of compiled steps; empty in windows of 1 step (--diagnose)"
    )
    verdict: str | None = _column("", "what holds the run back most (--diagnose)")

    loss_first: float | None = _column("", "mean loss of the first window")
    loss_last: float | None = _column("", "mean loss of the last window")
    accuracy_first: float | None = _column("share", "predictions that were right in the first window")
    accuracy_last: float | None = _column("share", "predictions that were right in the last window")
    records_skipped: int | None = _column("records", "input records dropped because they were unreadable")
    steps_skipped: int | None = _column("steps", "updates dropped because a gradient was not finite")
    loss_scale_final: float | None = _column("", "loss scale after the last step")
    weights_finite: bool | None = _column("", "whether every weight is finite after the run")
    gates: str | None = _column("", "plausibility gates that the row trips, joined by |; empty where none")

    gpu_name: str | None = _column("", "name of the GPU")
    compute_capability: str | None = _column("", "compute capability of the GPU")
    gpu_indices: str | None = _column("", "numbers of the GPUs used, by NVML, joined by commas")
    gpu_uuids: str | None = _column(
        "", "UUIDs of the GPUs used, by NVML, joined by commas: cards of one kind differ"
    )
    topology: str | None = _column(
        "",
        "link of the worst connected pair of these GPUs, as in nvidia-smi topo -m: NV18, PIX, SYS, …; empty "
        "with fewer than two",
    )
    driver: str | None = _column("", "version of the NVIDIA driver")
    cuda: str | None = _column("", "version of CUDA")
    cudnn: str | None = _column("", "version of cuDNN")
    nccl: str | None = _column("", "version of NCCL")
    tensorflow: str | None = _column("", "version of TensorFlow")
    keras: str | None = _column("", "version of Keras")
    python: str | None = _column("", "version of Python")
    host: str | None = _column("", "name of the machine")
    cpu_cores: int | None = _column("cores", "CPU cores that the process may use")
    environment: str | None = _column(
        "", "variables of the user's that change how CUDA, TensorFlow, XLA or NCCL work; none: there are none"
    )
    flags: str | None = _column("", "every flag as --name=value, quoted as a shell would need it")


def _kinds() -> dict[str, type]:
    """The type of each column's values, without None."""
    hints = typing.get_type_hints(RunRecord)
    return {
        field.name: next(kind for kind in typing.get_args(hints[field.name]) if kind is not types.NoneType)
        for field in dataclasses.fields(RunRecord)
    }


_KINDS = _kinds()
COLUMNS: tuple[str, ...] = tuple(_KINDS)
_HEADER = ",".join(COLUMNS).encode() + b"\n"

# Columns that each schema added to the one before it; older files are read with these empty.
_ADDED_BY = {
    2: frozenset(
        {"parallel_runs", "between_runs_percent", "records_skipped", "gpu_indices", "topology", "cpu_cores"}
    ),
    3: frozenset({"strong_scaling_efficiency_low", "strong_scaling_efficiency_high", "gpu_uuids"}),
    4: frozenset({"environment", "graphics_active"}),
}


def append(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Adds one row, whole and on disk when this returns; several processes may append to one file.

    A missing or empty file gets the folder and the header first. A last line that a killed process left
    unfinished is cut off with a warning.

    Args:
        path: results file.
        record: the row; line breaks in its texts become spaces, so that a row is always one line.

    Raises:
        SchemaError: the file holds another schema; it is left as it is.
        TypeError: a value that its column cannot hold, such as a fraction for a count.
        OSError: the file cannot be written.
    """
    line = _to_line(record)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        content = file.read()
        _require_current(path, content)
        lines, torn = _split_torn(content)
        if torn:
            _LOG.warning(
                "%s: cut off its unfinished last line, left by a writer that was stopped: %r", path, torn
            )
            file.truncate(len(lines))
        file.write((b"" if lines else _HEADER) + line)
        file.flush()
        os.fsync(file.fileno())


def check_appendable(path: str | os.PathLike[str]) -> None:
    """Refuses a results file that `append` would refuse, before there is a row to be lost.

    Raises:
        SchemaError: the file holds another schema; an older one can be migrated, the message says how.
        OSError: the file cannot be read; none at all is no error.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        _require_current(path, file.read())


def read(path: str | os.PathLike[str]) -> list[RunRecord]:
    """Rows of a results file with typed values; an unfinished last line is reported and dropped.

    Files of older schemas are read too: what they lack is None, and their rows keep their `schema_version`.

    Raises:
        SchemaError: the file holds another schema, or a row that does not fit it.
        FileNotFoundError: there is no such file.
    """
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # a row that is being written is not a torn one
        content = file.read()
    return _parse(path, content)


def migrate(path: str | os.PathLike[str]) -> pathlib.Path | None:
    """Rewrites a file of an older schema with this one's columns, in one atomic step.

    The old file stays beside it, such as runs.csv.v1. An unfinished last line is only in there.

    Returns:
        The old file's new place; None where the file is of this schema already and was left as it is.

    Raises:
        SchemaError: the file holds what is no schema of tfbench, or a row that does not fit it.
        FileExistsError: there is another file at the old file's new place.
        OSError: a file cannot be read or written; the old file is where it was.
    """
    path = pathlib.Path(path)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # nobody adds a row to the file that is about to be set aside
        content = file.read()
        version, _ = _schema(path, content)
        if version == SCHEMA_VERSION:
            return None
        backup = path.with_name(f"{path.name}.v{version}")
        if backup.exists() and backup.read_bytes() != content:  # equal: of a try that failed after it
            raise FileExistsError(f"{backup} is in the way of the old {path}: move it, then migrate again")
        rows = _parse(path, content)
        lines = [_to_line(dataclasses.replace(row, schema_version=SCHEMA_VERSION)) for row in rows]
        _write_whole(backup, content, path)
        _write_whole(path, b"".join([_HEADER, *lines]), path)
    return backup


def _write_whole(path: pathlib.Path, content: bytes, mode_of: pathlib.Path) -> None:
    """Writes a file in one atomic step, with another one's mode; where this fails, nothing has changed."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(new, "wb") as output:
            output.write(content)
            output.flush()
            os.fsync(output.fileno())
        shutil.copymode(mode_of, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _parse(path: str | os.PathLike[str], content: bytes) -> list[RunRecord]:
    """Rows of a results file's content.

    Raises:
        SchemaError: it is of another schema, or a row does not fit it.
    """
    lines, torn = _split_torn(content)
    _, columns = _schema(path, content)
    if torn:
        _LOG.warning(
            "%s: ignored its unfinished last line, left by a writer that was stopped: %r", path, torn
        )
    try:
        text = lines.decode()
    except UnicodeDecodeError as error:
        raise SchemaError(f"{path} holds what is no text: {error}. The file was not changed") from error
    rows = csv.reader(io.StringIO(text, newline=""))
    next(rows, None)  # the header, already checked
    return [_from_cells(path, rows.line_num, columns, cells) for cells in rows]


def _split_torn(content: bytes) -> tuple[bytes, bytes]:
    """Whole lines of a results file, and what follows its last line break."""
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]


def _schema(path: str | os.PathLike[str], content: bytes) -> tuple[int, tuple[str, ...]]:
    """Version and columns of a results file, by its header and the version in its first row.

    Raises:
        SchemaError: it is none that tfbench ever wrote.
    """
    lines, torn = _split_torn(content)
    if not lines and _HEADER.startswith(torn):  # an unfinished header is ours, any other single line is not
        return SCHEMA_VERSION, COLUMNS
    header, *first_row = (lines or torn).decode(errors="replace").splitlines()[:2]
    columns = tuple(header.split(","))
    cells = next(csv.reader(first_row), [])
    stated = dict(zip(columns, cells, strict=False)).get("schema_version", "")
    for version in range(SCHEMA_VERSION, 0, -1):
        if columns == _columns(version) and stated in ("", str(version)):
            return version, columns
    missing = [name for name in COLUMNS if name not in columns]
    unknown = [name for name in columns if name not in COLUMNS]
    raise SchemaError(
        f"{path} has schema version {stated or 'unknown'} with {len(columns)} columns; this tfbench writes "
        f"version {SCHEMA_VERSION} with {len(COLUMNS)} (missing in the file: {_some(missing)}; not known "
        f"here: {_some(unknown)}). The file was not changed: choose another --results_dir, or move the file"
    )


def _require_current(path: str | os.PathLike[str], content: bytes) -> None:
    """Raises SchemaError unless a results file's content is of this schema."""
    version, _ = _schema(path, content)
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"{path} is of schema version {version}, this tfbench writes version {SCHEMA_VERSION}. The file "
            "was not changed: bring it up to date, keeping the old one, with python -m tfbench.records "
            f"--migrate={shlex.quote(os.fspath(path))}, or choose another --results_dir"
        )


def _columns(version: int) -> tuple[str, ...]:
    """Columns of a schema, in their order."""
    later = frozenset[str]().union(*(names for added_by, names in _ADDED_BY.items() if added_by > version))
    return tuple(name for name in COLUMNS if name not in later)


def _some(names: Sequence[str]) -> str:
    """The first few names of a list that may be long."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(name[:40] for name in names[:5]) + more) or "none"


def _to_line(record: RunRecord) -> bytes:
    """The row as one CSV line, UTF-8."""
    text = io.StringIO()
    cells = [_to_cell(kind, getattr(record, name)) for name, kind in _KINDS.items()]
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def as_csv(record: RunRecord) -> str:
    """The text of a results file with this one row."""
    return (_HEADER + _to_line(record)).decode()


def _to_cell(kind: type, value: Any) -> str:
    """One value as text, without loss for numbers; None is empty."""
    if value is None:
        return ""
    if kind is float:
        return repr(float(value))  # float() also turns NumPy's scalars into plain ones
    if kind is bool:
        return str(bool(value))
    if kind is int:
        return str(operator.index(value))  # unlike int(), does not cut a fraction off silently
    # A file name of a message may hold bytes that are no UTF-8; they must not cost the row.
    one_line = " ".join(value.encode(errors="backslashreplace").decode().splitlines())
    return one_line[: csv.field_size_limit()]  # readers refuse longer cells


def _from_cells(
    path: str | os.PathLike[str], line: int, columns: Sequence[str], cells: Sequence[str]
) -> RunRecord:
    """The row of one line of the file.

    Raises:
        SchemaError: a cell too many or too few, or one that is no value of its column.
    """
    if len(cells) != len(columns):
        raise SchemaError(f"{path}, line {line}: {len(cells)} cells for {len(columns)} columns")
    values = {}
    for name, cell in zip(columns, cells, strict=True):
        try:
            values[name] = _from_cell(_KINDS[name], cell)
        except ValueError as error:
            raise SchemaError(
                f"{path}, line {line}: {name}={cell!r} is no {_KINDS[name].__name__}"
            ) from error
    return RunRecord(**values)


def _from_cell(kind: type, cell: str) -> Any:
    """The value of a cell.

    Raises:
        ValueError: it is none of this kind.
    """
    if not cell:
        return None
    if kind is bool:
        return ("False", "True").index(cell) == 1
    return kind(cell)


# What a one-GPU row must share with a row of N GPUs, besides the batch and the flags, to be its baseline.
_ALIKE = (
    "model", "data", "precision", "xla", "scaling_mode", "accumulate", "seq_length", "image_size",
    "optimizer", "steps_per_loop", "gpu_name", "driver", "tensorflow", "keras", "host",
)  # fmt: skip

# Likewise, where both rows say it: older rows lack some of these. The cores are not among them: N GPUs may
# well have those of N runs on one.
_ALIKE_WHERE_KNOWN = ("environment", "cudnn", "power_limit_w", "sm_clock_mhz_max")

# Flags that may differ: those that do not change a step's time (the cache of compiled programs is not in the
# run key either), where gradients are summed, of which a single GPU has none to sum, and the batch, which has
# its own columns. With synthetic data the weights' pace may not: what a card at its power limit makes of them
# depends on how far they have come.
_FREE_FLAGS = frozenset(
    {"gpus", "seed", "steps", "windows", "warmup_steps", "tag", "results_dir", "tensorboard", "profile_steps",
     "per_replica_batch_size", "requested_per_replica_batch_size", "learning_rate", "lr_schedule",
     "lr_warmup_steps", "lr_total_steps", "weight_decay", "initial_loss_scale", "diagnose",
     "target_interval_percent", "max_windows", "collectives", "compile_cache"}
)  # fmt: skip


def find_baseline(rows: Iterable[RunRecord], record: RunRecord) -> RunRecord | None:
    """The newest good one-GPU row that `record` may be compared with, for its scaling efficiency.

    Where several of the record's cards have such a row, the mean of them, as one row.
    All that changes the time of a step must be alike but the number of replicas. The batch is compared per
    replica, or globally where `record` scales strongly. A row that ran beside others shared cores, memory and
    perhaps power with them: it is none. Cards of one kind differ by some per cent, so the one GPU must be one
    of the record's, where both rows say which they used.

    Returns:
        The row; None where there is none, and for a record of one GPU or of the CPU, which scales nothing.
    """
    if not record.num_gpus or record.num_gpus < 2:
        return None
    wanted = _baseline_key(record)
    candidates = [
        row
        for row in rows
        if row.status == "ok"
        and row.num_gpus == 1
        and row.samples_per_sec
        and side_by_side(row) == 1
        and _baseline_key(row) == wanted
        and on_its_cards(row, record)
        and all(
            getattr(row, name) == getattr(record, name) or None in (getattr(row, name), getattr(record, name))
            for name in _ALIKE_WHERE_KNOWN
        )
    ]
    by_card = {row.gpu_uuids: row for row in sorted(candidates, key=lambda row: row.started_at or "")}
    if record.gpu_uuids and len(by_card) > 1:
        by_card.pop(None, None)  # of whatever card it is, others are of the record's
        return mean_of_cards(list(by_card.values()))
    return max(candidates, key=lambda row: row.started_at or "", default=None)


def mean_of_cards(rows: Sequence[RunRecord]) -> RunRecord:
    """One-GPU rows of different cards as one: the newest, with the mean rate and that one's 95 % interval.

    Cards of one kind differ by some per cent; so many GPUs can at best do what each of them does alone.
    """
    last = max(rows, key=lambda row: row.started_at or "")
    if len(rows) == 1:
        return last
    rates = [row.samples_per_sec or 0.0 for row in rows]
    rate = math.fsum(rates) / len(rates)

    def end(name: str, sign: int) -> float | None:
        """Of the mean: the distances of the rows' own ends in quadrature."""
        ends = [getattr(row, name) for row in rows]
        if None in ends:
            return None
        return rate + sign * math.hypot(*(a - b for a, b in zip(ends, rates, strict=True))) / len(rows)

    return dataclasses.replace(
        last,
        run_id="|".join(sorted(row.run_id or "" for row in rows)),
        samples_per_sec=rate,
        samples_per_sec_low=end("samples_per_sec_low", -1),
        samples_per_sec_high=end("samples_per_sec_high", 1),
        samples_per_sec_per_gpu=rate,
        step_time_ms_mean=last.global_batch_size and 1000 * last.global_batch_size / rate,
    )


def side_by_side(row: RunRecord) -> int:
    """Runs on the machine at that time, this one included; 1 where older rows do not say."""
    return row.parallel_runs or 1


def on_its_cards(row: RunRecord, record: RunRecord) -> bool:
    """Whether a row used no other GPU than the record did, as far as they say."""
    ours, theirs = ({*(each.gpu_uuids or "").split(",")} - {""} for each in (record, row))
    return not ours or theirs <= ours


def baseline_command(record: RunRecord) -> str:
    """The command line that makes the one-GPU row which `find_baseline` looks for.

    Raises:
        ValueError: the record has no flags.
    """
    if record.flags is None:
        raise ValueError(f"run {record.run_id} has no flags to repeat")
    batch = record.per_replica_batch_size
    if record.scaling_mode == "strong" and record.global_batch_size and record.accumulate:
        batch = record.global_batch_size // record.accumulate
    changed = {"requested_per_replica_batch_size", "gpus", "collectives"} | (
        {"per_replica_batch_size"} if batch else set()
    )
    kept = [flag for flag in shlex.split(record.flags) if _flag_name(flag) not in changed]
    batch_flag = [f"--per_replica_batch_size={batch}"] if batch else []
    return shlex.join(["python", "-m", "tfbench.train", *kept, *batch_flag, "--gpus=1"])


def _baseline_key(row: RunRecord) -> tuple[object, ...]:
    """What must be equal between a row and its baseline."""
    batch = row.global_batch_size if row.scaling_mode == "strong" else row.per_replica_batch_size
    free = _FREE_FLAGS - ({"lr_warmup_steps"} if row.data == "synthetic" else set())
    flags = sorted(flag for flag in shlex.split(row.flags or "") if _flag_name(flag) not in free)
    return (batch, flags, *(getattr(row, name) for name in _ALIKE))


def _flag_name(flag: str) -> str:
    return flag.lstrip("-").partition("=")[0]


def markdown_columns() -> str:
    """The columns as a Markdown table: name, unit, meaning."""
    lines = ["| column | unit | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(RunRecord):
        meaning = field.metadata["help"].replace("|", "\\|")
        lines.append(f"| `{field.name}` | {field.metadata['unit']} | {meaning} |")
    return "\n".join(lines)


def main(argv: Sequence[str], paths: Sequence[str]) -> int:
    """Prints the columns, or migrates the files at `paths`; returns the exit code, 2 where one cannot be."""
    if argv[1:]:
        print(f"error: {shlex.join(argv[1:])}: files are named as --migrate=FILE", file=sys.stderr)
        return 2
    if not paths:
        print(markdown_columns())
    for path in paths:
        try:
            backup = migrate(path)
        except (SchemaError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        done = f"the old file is {backup}" if backup else "nothing to do"
        print(f"{path}: schema version {SCHEMA_VERSION}, {done}")
    return 0


if __name__ == "__main__":
    _MIGRATE = flags.DEFINE_multi_string(
        "migrate", [], "results file of an older schema to rewrite; may be repeated"
    )
    app.run(lambda argv: main(argv, _MIGRATE.value))
