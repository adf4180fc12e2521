"""Which runs of a sweep are still to be made, by the rows that are there. TensorFlow-free."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from tfbench.config import BenchmarkConfig
from tfbench.records import RunRecord, side_by_side
from tfbench.sweeping.matrix import Point

# Ends that are tried again when a sweep is started again, besides "interrupted", which always is: that run
# was stopped by the user and says nothing of the point. None: every end but "ok".
RETRIES: dict[str, frozenset[str] | None] = {
    "failed": None,
    "oom": frozenset({"oom", "host_oom"}),
    "none": frozenset(),
}
EXIT_ALL_OK, EXIT_SOME_OK, EXIT_NONE_OK = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Try:
    """One run of one point."""

    point: Point
    number: int  # 1 … runs of the point


def rows_of(config: BenchmarkConfig, rows: Iterable[RunRecord], beside: bool) -> list[RunRecord]:
    """Rows of a configuration that ran beside others, or alone: shared cores and power make another rate."""
    return [row for row in rows if row.run_key == config.run_key and (side_by_side(row) > 1) == beside]


def settled(rows: Iterable[RunRecord], config: BenchmarkConfig, retry: str, beside: bool) -> int:
    """Rows of a configuration that stand: ok ones, and those whose end is not to be tried again.

    Args:
        rows: of the results folder.
        config: of the runs; where it is to be diagnosed, an ok row without a diagnosis does not stand.
        retry: a name in RETRIES.
        beside: whether its runs are beside others.
    """
    again = RETRIES[retry]
    return sum(
        row.compute_ms is not None or not config.diagnose
        if row.status == "ok"
        else again is not None and row.status not in again | {"interrupted"}
        for row in rows_of(config, rows, beside)
    )


def rounds(points: Sequence[Point], repeats: int) -> list[Try]:
    """Every point once, then every point again (A B A B)."""
    return [Try(point, number) for number in range(1, repeats + 1) for point in points]


def around_baseline(points: Sequence[Point], repeats: int) -> list[Try]:
    """The first point before and after each run of the others (A B A C A): a machine that drifts shows."""
    baseline, others = points[0], list(points[1:]) * repeats
    tries = [Try(baseline, 1)]
    for index, point in enumerate(others):
        tries += [Try(point, index // len(points[1:]) + 1), Try(baseline, index + 2)]
    return tries


def missing(
    tries: Sequence[Try],
    rows: Sequence[RunRecord],
    retry: str,
    beside: Callable[[BenchmarkConfig], bool] = lambda config: False,
) -> list[Try]:
    """The runs to make: `tries` without those that stand."""
    configs = {each.point.config.run_key: each.point.config for each in tries}
    standing = {key: settled(rows, config, retry, beside(config)) for key, config in configs.items()}
    return [each for each in tries if each.number > standing[each.point.config.run_key]]


def exit_code_of(good: int, total: int) -> int:
    """0 where all are good, 1 where some are, 2 where none is."""
    if good == total:
        return EXIT_ALL_OK
    return EXIT_SOME_OK if good else EXIT_NONE_OK
