"""Runs of one configuration on the same cards, which a report shows as one line."""

import dataclasses
import statistics as stdlib_statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from tfbench.measure import statistics
from tfbench.records import RunRecord
from tfbench.reporting.document import Cell, words
from tfbench.reporting.naming import MachineNames, grouped, labels, setup, started

# What makes a run another one although run key and setup are the same: its user's label, runs beside it on
# the machine, and the card with its limits.
_APART = ("run_key", "tag", "parallel_runs", "gpu_uuids", "power_limit_w", "sm_clock_mhz_max")


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Rows of one configuration on the same cards, at least one, in the order of their start.

    Of several rows every figure is the median of those that have it; of one it is the row's own.
    """

    rows: Sequence[RunRecord]

    @property
    def first(self) -> RunRecord:
        """For what the rows have in common."""
        return self.rows[0]

    @property
    def counted(self) -> str:
        """Of several runs how many, to go behind a name."""
        return f", {len(self.rows)} runs" if len(self.rows) > 1 else ""

    @property
    def rate(self) -> float:
        """What is ranked: samples/s of one GPU; of all replicas together on the CPU."""
        found = self.median("samples_per_sec")
        assert found is not None  # the report keeps rows without a rate out of the rankings
        return found / (self.first.num_gpus or 1)

    @property
    def rate_interval(self) -> tuple[float | None, float | None]:
        """Ends of the 95 % interval of `rate`: over the runs where they are several, else that of the row."""
        ends = [(row.samples_per_sec_low, row.samples_per_sec_high) for row in self.rows]
        if len(self.rows) == 1:
            low, high = ends[0]
        else:
            rates = [row.samples_per_sec for row in self.rows if row.samples_per_sec is not None]
            low, high = statistics.interval_over_runs(rates, ends) or (None, None)
        gpus = self.first.num_gpus or 1
        return None if low is None else low / gpus, None if high is None else high / gpus

    def median(self, column: str) -> float | None:
        """Of a column of numbers; None where no row has it."""
        values = [value for row in self.rows if (value := getattr(row, column)) is not None]
        return stdlib_statistics.median(values) if values else None

    def joined(self, column: str) -> str:
        """What the rows say in a column of words, joined where they say several things."""
        return " or ".join(dict.fromkeys(value for row in self.rows if (value := getattr(row, column))))

    def gates(self) -> Cell:
        """The flags of the rows and, where they are several, how many have each: "throttled (9)"."""
        found = Counter(gate for row in self.rows if row.gates for gate in row.gates.split("|"))
        several = len(self.rows) > 1
        said = [f"{gate} ({runs})" if several else gate for gate, runs in found.most_common()]
        return words(", ".join(said), "warn" if said else "")

    def name_cell(self, label: str) -> Cell:
        """The label, and the starts of several runs for who points at it."""
        several = len(self.rows) > 1
        return Cell(label, hover=f"started {', '.join(map(started, self.rows))}" if several else "")


def repeats(rows: Iterable[RunRecord]) -> list[Repeats]:
    """Rows with equal run key, cards and all else that decides a step's time together; others alone.

    Args:
        rows: that ended well.
    """
    ordered = sorted(rows, key=lambda row: row.started_at or "")
    groups = grouped(ordered, lambda row: (*_apart(row), *setup(row)))
    return [Repeats(group) for group in groups.values()]


def newest_repeats(groups: Iterable[Repeats]) -> Repeats:
    """The configuration that was run last."""
    return max(groups, key=lambda each: each.rows[-1].started_at or "")


def _apart(row: RunRecord) -> tuple[object, ...]:
    """A row without a run key is like no other."""
    return tuple(getattr(row, name) for name in _APART) if row.run_key else (id(row),)


def labelled(groups: Sequence[Repeats], machines: MachineNames) -> list[tuple[str, Repeats]]:
    """Each with a label that tells it from the others and says how many runs it is."""
    firsts, counts = [each.first for each in groups], [len(each.rows) for each in groups]
    return list(zip(labels(firsts, machines, counts), groups, strict=True))
