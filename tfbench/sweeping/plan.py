"""Which runs of a sweep are still to be made, by the rows that are there. TensorFlow-free."""

import dataclasses
from collections.abc import Iterable, Sequence

from tfbench.records import RunRecord
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
    number: int  # 1 … repeats


def settled(rows: Iterable[RunRecord], run_key: str, retry: str) -> int:
    """Rows of a configuration that stand: ok ones, and those whose end is not to be tried again."""
    again = RETRIES[retry]
    return sum(
        row.status == "ok" or (again is not None and row.status not in again | {"interrupted"})
        for row in rows
        if row.run_key == run_key
    )


def schedule(points: Sequence[Point], repeats: int, rows: Sequence[RunRecord], retry: str) -> list[Try]:
    """The runs to make: every point once, then every point again (A B A B), without those that stand."""
    standing = {point.config.run_key: settled(rows, point.config.run_key, retry) for point in points}
    return [
        Try(point, number)
        for number in range(1, repeats + 1)
        for point in points
        if number > standing[point.config.run_key]
    ]


def exit_code(points: Sequence[Point], repeats: int, rows: Sequence[RunRecord]) -> int:
    """0 where every point has its ok rows, 1 where some of them are there, 2 where none is."""
    good = sum(min(settled(rows, point.config.run_key, "failed"), repeats) for point in points)
    if good == repeats * len(points):
        return EXIT_ALL_OK
    return EXIT_SOME_OK if good else EXIT_NONE_OK
