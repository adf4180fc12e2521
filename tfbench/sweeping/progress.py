"""What a sweep shows while it runs: one bar on a terminal, plain lines elsewhere. TensorFlow-free."""

import collections
import statistics
from collections.abc import Callable, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from tfbench.config import BenchmarkConfig
from tfbench.display import Bar, Display
from tfbench.records import RunRecord
from tfbench.sweeping import plan
from tfbench.sweeping.matrix import Point


class SweepProgress(Bar):
    """Runs done, the current one, the time left by the runs so far, the last rate.

    Args:
        display: where to.
        total: runs of the whole sweep.
        done: of them those that need not be run.
    """

    def __init__(self, display: Display, total: int, done: int):
        self._total, self._done = total, done
        self._seconds: list[float] = []  # of each run, divided by the runs beside it
        self._now: list[str] = []
        self._last = ""
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # Redrawn by `tick` and not by a thread: a process that forks is better without one.
        super().__init__(display, *columns, auto_refresh=False)
        self._task = self._bar.add_task("", total=total, completed=done)

    def start(self, name: str) -> None:
        """A run begins."""
        self._now.append(name)
        line = "  ".join(filter(None, [" | ".join(self._now), self.eta(), self._last]))
        self._bar.update(self._task, description=line)
        if not self.on_terminal:
            self.display.say(f"{self._done}/{self._total} done  now {line}")

    def tick(self) -> None:
        """Time goes by."""
        self._bar.refresh()

    def finish(self, name: str, row: RunRecord, seconds: float, parallel_runs: int = 1) -> None:
        """A run has ended with this row after so many seconds, among so many side by side."""
        self._done += 1
        self._now.remove(name)
        self._seconds.append(seconds / parallel_runs)
        rate = "" if row.samples_per_sec is None else f"{row.samples_per_sec:,.1f} samples/s"
        self._last = f"last: {rate or row.status}"
        why = row.note if row.status != "ok" else None
        self.display.say("  ".join(filter(None, [f"{name}:", row.status, rate, why])))
        self._bar.update(self._task, completed=self._done, description=" | ".join(self._now))

    def eta(self) -> str:
        """Time left, if the other runs take as long as those of this sweep so far; "" before the first."""
        if not self._seconds:
            return ""
        left_s = round(statistics.fmean(self._seconds) * (self._total - self._done))
        return f"ETA {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02}"


def table(
    points: Sequence[Point], rows: Sequence[RunRecord], beside: Callable[[BenchmarkConfig], bool]
) -> list[tuple[str, str, str]]:
    """The sweep as (point, median rate of its ok rows, how often it ended how); see `plan.rows_of`."""
    lines = []
    for point in points:
        own = plan.rows_of(point.config, rows, beside(point.config))
        rates = [row.samples_per_sec for row in own if row.status == "ok" and row.samples_per_sec is not None]
        ends = collections.Counter(row.status or "failed" for row in own)
        remark = ", ".join(f"{count} {status}" for status, count in ends.items()) or "not run"
        rate = f"{statistics.median(rates):,.1f} samples/s" if rates else ""
        lines.append((point.name, rate, remark))
    return lines
