"""What is odd: flagged rows, runs that did not end well, and how the machines differ."""

from collections.abc import Sequence

from tfbench.measure import gates
from tfbench.records import RunRecord
from tfbench.reporting.document import Cell, Section, Table, count, number, words
from tfbench.reporting.naming import (
    LIMIT_COLUMNS,
    MACHINE_COLUMNS,
    MachineNames,
    batch,
    devices,
    full_labels,
    grouped,
    machine_names,
    machine_of,
    workload_and_precision,
)

_TITLES = {
    "gpu_name": "GPU",
    "compute_capability": "compute capability",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "python": "Python",
    "tfbench_version": "tfbench",
    "power_limit_w": "power limit, W",
    "sm_clock_mhz_max": "highest SM clock, MHz",
    "pcie_link": "PCIe generation x lanes",
}


def flagged(rows: Sequence[RunRecord], machines: MachineNames) -> Section:
    """Rows whose numbers are doubtful, and why."""
    # Named among all rows: the others may be repeats of them, which the start tells apart.
    doubtful = [
        (row, label) for row, label in zip(rows, full_labels(rows, machines), strict=True) if row.gates
    ]
    table_rows = [
        [
            words(label),
            words(gate, "warn"),
            words(gates.EXPLANATIONS.get(gate, "A gate that this version of tfbench does not know.")),
            words((row.throttle_reasons or "").replace("|", ", ") if gate == "throttled" else ""),
        ]
        for row, label in doubtful
        for gate in (row.gates or "").split("|")
    ]
    columns = ("run", "gate", "what it means", "evidence")
    return Section(
        "flagged",
        "Flagged rows",
        "Plausibility gates mark a row and never drop it: it is in the rankings above, alone or among "
        "its repeats.",
        tables=[Table("Gates that rows tripped", columns, table_rows)] if table_rows else [],
        missing="" if table_rows else "No row trips a gate.",
    )


def failed(rows: Sequence[RunRecord]) -> Section:
    """Runs that did not end ok."""
    columns = ("run", "status", "why", "workload", "devices", "batch", "samples/s until then", "steps")
    table_rows = [
        [
            words(row.run_id),
            words(row.status or "unknown", "bad"),
            words(row.note),
            words(workload_and_precision(row)),
            words(devices(row)),
            words(batch(row)),
            number(row.samples_per_sec),
            count(row.measured_steps),
        ]
        for row in rows
    ]
    return Section(
        "failed",
        "Runs that did not end well",
        "They are in no ranking; a rate is that of the windows before the end.",
        tables=[Table("Status and reason", columns, table_rows)] if table_rows else [],
        missing="" if table_rows else "Every run ended ok.",
    )


def environment(rows: Sequence[RunRecord]) -> Section:
    """What each machine is, side by side."""
    names = machine_names(rows)
    groups = grouped(rows, lambda row: names[machine_of(row)])
    table_rows = []
    for column in (*MACHINE_COLUMNS, *LIMIT_COLUMNS):
        values = [_values(group, column) for group in groups.values()]
        differ = len(set(values)) > 1
        mark = " (differs)" if differ else ""
        cells = [Cell(value or "not known", mark="warn" if differ else "") for value in values]
        table_rows.append([words(_TITLES.get(column, column) + mark), *cells])
    table_rows.append([words("rows"), *(words(len(group)) for group in groups.values())])
    return Section(
        "environment",
        "Environment",
        "Rows with the same versions on the same host, as far as they are known, are one machine here.",
        tables=[Table("Machines", ("", *(f"machine {name}" for name in groups)), table_rows)],
    )


def _values(rows: Sequence[RunRecord], column: str) -> str:
    """What the rows of one machine say, joined where they say several things."""
    found = dict.fromkeys(getattr(row, column) for row in rows)
    return " or ".join(
        f"{value:g}" if isinstance(value, float) else str(value) for value in found if value not in (None, "")
    )
