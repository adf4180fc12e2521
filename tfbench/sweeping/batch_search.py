"""--find_max_batch: the largest batch that trains, a fresh process for every try. TensorFlow-free."""

import dataclasses
from collections.abc import Mapping, Sequence

from tfbench.config import BenchmarkConfig
from tfbench.display import Display
from tfbench.records import RunRecord
from tfbench.sweeping import loop, plan
from tfbench.sweeping.matrix import Point
from tfbench.sweeping.stopping import StopRequests

MULTIPLE = 8  # of samples: what tensor cores want of a dimension
TAG = "find_max_batch"
_TOO_LARGE = frozenset({"oom", "host_oom"})
_HEADER = ("batch", "samples/s", "95 %", "peak memory, GiB", "status")


def next_batch(trains: Mapping[int, bool], start: int, most: int | None) -> int | None:
    """The batch to try next; None when the search is at its end.

    From `start` it doubles while it trains, up to `most`; then the gap between the largest that trains and
    the smallest that does not is halved, at multiples of 8, until no multiple of 8 lies inside it.

    Args:
        trains: whether each batch tried so far trains.
        start: the first to try, at most `most`.
        most: the largest to try; None: whatever fits.
    """
    low = max((batch for batch, good in trains.items() if good), default=0)
    high = min((batch for batch, good in trains.items() if not good and batch > low), default=None)
    if high is None:
        doubled = 2 * low if low else start
        wanted = doubled if most is None else min(doubled, most)
        return wanted if wanted > low else None
    middle = (low + high) // 2 // MULTIPLE * MULTIPLE
    if middle <= low:
        middle += MULTIPLE
    return middle if low < middle < high else None


def outcomes(points: Mapping[int, Point], rows: Sequence[RunRecord]) -> dict[int, bool]:
    """Whether each batch trains, by the rows; a batch that ended in another way is as if never tried."""
    known = {}
    for batch, point in points.items():
        ends = {row.status for row in rows if row.run_key == point.config.run_key}
        if ends & ({"ok"} | _TOO_LARGE):
            known[batch] = "ok" in ends
    return known


@dataclasses.dataclass
class Search:
    """The search of one point: its configuration at any batch."""

    point: Point
    most: int | None
    tried: dict[int, Point] = dataclasses.field(default_factory=dict)

    def at(self, batch: int) -> Point:
        """The point at this batch per replica; its row says what was asked for and that a search did it."""
        if batch not in self.tried:
            config = self.point.config
            asked = config.requested_per_replica_batch_size or config.per_replica_batch_size
            changed: BenchmarkConfig = dataclasses.replace(
                config,
                per_replica_batch_size=batch,
                requested_per_replica_batch_size=asked,
                tag=" ".join(filter(None, [config.tag, TAG])),
            )
            name = " ".join(filter(None, [self.point.name, f"per_replica_batch_size={batch}"]))
            self.tried[batch] = Point(name, changed)
        return self.tried[batch]

    def next(self, rows: Sequence[RunRecord]) -> Point | None:
        """The next try; None at the end. Tries of an earlier search are found in `rows`."""
        while True:
            known = outcomes(self.tried, rows)
            batch = next_batch(known, self.point.config.per_replica_batch_size, self.most)
            if batch is None or batch in self.tried:
                return None if batch is None else self.tried[batch]
            self.at(batch)
            if batch not in outcomes(self.tried, rows):
                return self.tried[batch]

    def largest(self, rows: Sequence[RunRecord]) -> int | None:
        """The largest batch that trains, once the search is at its end."""
        return max((batch for batch, good in outcomes(self.tried, rows).items() if good), default=None)


def search(work: loop.Sweep, most: int | None, display: Display) -> int:
    """Search every point, one after the other, and show the curve on the way and the batches found.

    Returns:
        0 where every point has its largest batch, 1 where some have, 2 where none has.

    Raises:
        ConfigError: the results folder cannot be used, or another sweep is at work in it.
    """
    found: list[tuple[str, str, str]] = []
    good = 0
    with StopRequests() as stop, loop.folder(work.results_dir, stop) as lock:
        for point in work.points:
            each = Search(point, most)
            complaint = _search_point(each, work, lock, stop, display)
            rows = work.rows()
            largest = each.largest(rows)
            display.grid(f"batches of {point.name}", _HEADER, _curve(each, rows))
            good += not complaint
            remark = complaint or _remark(largest, most)
            found.append((point.name, "" if largest is None else f"{largest}", remark))
            if stop.count:
                display.warn("stopped by the user: the same command goes on where this one ended")
                break
    display.table("largest batch", found)
    return plan.exit_code_of(good, len(work.points))


def _search_point(each: Search, work: loop.Sweep, lock: int, stop: StopRequests, display: Display) -> str:
    """Try batches until the end is found; returns why it was not, "" where it was."""
    while (point := each.next(work.rows())) is not None:
        if stop.count:
            return "stopped by the user"
        display.say(f"now {point.name}")
        row = loop.run_alone(point, work, lock, stop)
        rate = _figures(row)[0]
        said = [f"{point.name}:", row.status, rate and f"{rate} samples/s", row.note if not rate else ""]
        display.say("  ".join(filter(None, said)))
        if row.status not in {"ok"} | _TOO_LARGE:
            return f"batch {point.config.per_replica_batch_size} ended as {row.status}: {row.note}"
    return "" if each.largest(work.rows()) else "none trains"


def _remark(largest: int | None, most: int | None) -> str:
    return f"not more than --max_batch={most} was tried" if largest == most else ""


def _curve(each: Search, rows: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """A line for every batch that has a row, the smallest first."""
    lines: list[tuple[str, ...]] = []
    for batch, point in sorted(each.tried.items()):
        own = [row for row in rows if row.run_key == point.config.run_key]
        if own:
            row = next((row for row in reversed(own) if row.status == "ok"), own[-1])
            lines.append((f"{batch}", *_figures(row), row.status or ""))
    return lines


def _figures(row: RunRecord) -> tuple[str, str, str]:
    """Rate, its interval and the memory: a GPU's, or on the CPU the process's own."""
    memory_gib = row.peak_memory_gib if row.num_gpus else row.host_rss_gib
    rate = "" if row.samples_per_sec is None else f"{row.samples_per_sec:,.1f}"
    low, high = row.samples_per_sec_low, row.samples_per_sec_high
    interval = "" if low is None or high is None else f"{low:,.1f} to {high:,.1f}"
    return rate, interval, "" if memory_gib is None else f"{memory_gib:.2f}"
