"""What rows have in common and what tells them apart: machines, workloads, labels."""

import shlex
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from tfbench.records import RunRecord, side_by_side

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
MachineNames = dict[tuple[object, ...], str]  # as `machine_of` has them → letter

# What makes two machines the same, column by column.
MACHINE_COLUMNS = (
    "gpu_name", "compute_capability", "driver", "cuda", "cudnn", "nccl", "tensorflow", "keras", "python",
    "tfbench_version", "host", "environment",
)  # fmt: skip
# A row that a sweep writes for a run that died has these and lacks most of the others. An unknown
# environment, as of older rows, is no wildcard: it would make theirs somebody's XLA_FLAGS.
_ALWAYS_KNOWN = ("host", "environment")
# Limits of the cards: rows of older versions do not have them, so they do not tell machines apart.
LIMIT_COLUMNS = ("power_limit_w", "sm_clock_mhz_max", "pcie_link")

# Flags without a column of their own that change a step's time, and BenchmarkConfig's default for rows
# that were written before the flag existed.
_FLAGS = {"collectives": "outside", "kernels": "plain", "dropout": "0.0", "deterministic": "false"}
_SETUP_COLUMNS = (
    "model", "image_size", "seq_length", "data", "precision", "xla", "strategy", "scaling_mode",
    "num_workers", "num_gpus", "num_replicas", "per_replica_batch_size", "accumulate",
    "optimizer", "steps_per_loop",
    *MACHINE_COLUMNS,
)  # fmt: skip


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def newest(rows: Iterable[RunRecord]) -> RunRecord:
    """The row that was started last."""
    return max(rows, key=lambda row: row.started_at or "")


def setup(row: RunRecord, *free: str) -> tuple[object, ...]:
    """All that decides a step's time, but what is in `free`: rows with equal ones may be compared."""
    columns = tuple(getattr(row, name) for name in _SETUP_COLUMNS if name not in free)
    return (*columns, side_by_side(row), *(flag_of(row, name) for name in _FLAGS if name not in free))


def on_cpu(rows: Sequence[RunRecord]) -> bool:
    """Whether there are rows and none of them asked for a GPU."""
    return bool(rows) and all(row.num_gpus == 0 for row in rows)


def likeness(one: RunRecord, other: RunRecord) -> tuple[bool, ...]:
    """How far two rows ran under like conditions, what changes a rate most first: greater is more alike."""
    same = [
        getattr(one, name) == getattr(other, name)
        for name in ("host", "gpu_uuids", "power_limit_w", "sm_clock_mhz_max")
    ]
    return (one.gpu_name == other.gpu_name, side_by_side(one) == side_by_side(other), *same)


def cards(row: RunRecord) -> str:
    """The GPUs used by the beginnings of their UUIDs, in their order; "" where they are not known."""
    return ",".join(sorted(uuid[:12] for uuid in (row.gpu_uuids or "").split(",")))


def flag_of(row: RunRecord, name: str) -> str:
    """Value of one of the flags that have no column."""
    given = (flag.lstrip("-").partition("=") for flag in shlex.split(row.flags or ""))
    return {flag: value for flag, _, value in given}.get(name, _FLAGS[name])


def machine_of(row: RunRecord) -> tuple[object, ...]:
    """What was computed on and with, in the order of MACHINE_COLUMNS."""
    return tuple(getattr(row, name) for name in MACHINE_COLUMNS)


def may_be_same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether two machines, as `machine_of` has them, are of one host and differ in nothing that is known."""
    return all(
        a == b or (None in (a, b) and name not in _ALWAYS_KNOWN)
        for name, a, b in zip(MACHINE_COLUMNS, one, other, strict=True)
    )


def machine_names(rows: Iterable[RunRecord]) -> MachineNames:
    """A letter for each machine, in the order they appear; after Z comes A2.

    One of which less is known is that one of the others which it may be, where there is one.
    """
    keys = list(grouped(rows, machine_of))
    whole: list[tuple[object, ...]] = []
    stands_for = {}
    for key in sorted(keys, key=lambda key: key.count(None)):
        stands_for[key] = next((each for each in whole if may_be_same(each, key)), key)
        if stands_for[key] is key:
            whole.append(key)
    order = list(dict.fromkeys(stands_for[key] for key in keys))
    letters = {
        key: chr(ord("A") + index % 26) + (str(index // 26 + 1) if index >= 26 else "")
        for index, key in enumerate(order)
    }
    return {key: letters[stands_for[key]] for key in keys}


def workload(row: RunRecord) -> str:
    """Model and size of its samples."""
    size = f", sequence {row.seq_length}" if row.seq_length else ""
    size = f", {row.image_size} px" if row.image_size else size
    return f"{row.model}{size}"


def workload_and_precision(row: RunRecord) -> str:
    """What is ranked together."""
    return f"{workload(row)}, {row.precision}"


def devices(row: RunRecord) -> str:
    """What it ran on, such as "2 × H200"."""
    if not row.num_gpus:
        return "CPU" if (row.num_replicas or 1) == 1 else f"CPU as {row.num_replicas} replicas"
    return f"{row.num_gpus} × {(row.gpu_name or 'unknown GPU').removeprefix('NVIDIA ')}"


def batch(row: RunRecord) -> str:
    """Samples of a replica's micro-batch, times the micro-batches of an update."""
    times = f" × {row.accumulate}" if (row.accumulate or 1) > 1 else ""
    return f"batch {row.per_replica_batch_size}{times}"


def started(row: RunRecord) -> str:
    """Start of a run to the second, such as "2026-01-31 09:05:00"; "" where it is not known."""
    return (row.started_at or "")[:19].replace("T", " ")


def labels(
    rows: Sequence[RunRecord], machines: MachineNames, counts: Sequence[int] | None = None
) -> list[str]:
    """A name for each row that tells it from the others: as little as that takes.

    Args:
        rows: of one kind of workload.
        machines: of the whole report; where it has several, each name of a row there says which.
        counts: of runs that each row stands for, the first of them; None: of itself only.
    """
    telling: list[list[str]] = [
        [row.model or "" for row in rows],
        [row.precision or "" for row in rows],
        [row.data or "" for row in rows],
        ["XLA" if row.xla else "no XLA" for row in rows],
        [row.optimizer or "" for row in rows],
        [f"{row.steps_per_loop} steps a call" for row in rows],
        [f"collectives {flag_of(row, 'collectives')}" for row in rows],
        [f"{flag_of(row, 'kernels')} kernels" for row in rows],
        [f"{side_by_side(row)} side by side" if side_by_side(row) > 1 else "" for row in rows],
        [row.tag or "" for row in rows],
    ]
    letters = [machines.get(machine_of(row)) for row in rows]
    where = [f"machine {name}" if name and len(set(machines.values())) > 1 else "" for name in letters]
    varying = [column for column in telling if len(set(column)) > 1]
    found = [
        ", ".join(
            filter(None, (devices(row), batch(row), where[index], *(column[index] for column in varying)))
        )
        for index, row in enumerate(rows)
    ]
    return [
        _with_runs(label, runs, started(row) if found.count(label) > 1 else "")
        for label, row, runs in zip(found, rows, counts or [1] * len(rows), strict=True)
    ]


def _with_runs(label: str, runs: int, start: str) -> str:
    """A label with how many runs it stands for, and since when where others have the same label."""
    if runs == 1:
        return f"{label}, {start}" if start else label
    return f"{label}, {runs} runs from {start}" if start else f"{label}, {runs} runs"


def full_labels(rows: Sequence[RunRecord], machines: MachineNames) -> list[str]:
    """As `labels`, for rows of several workloads: what is trained, and what tells it from its like."""
    groups = grouped(rows, workload_and_precision)
    names = {
        id(row): f"{title}: {label}"
        for title, group in groups.items()
        for row, label in zip(group, labels(group, machines), strict=True)
    }
    return [names[id(row)] for row in rows]
