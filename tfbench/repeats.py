"""One configuration in several fresh processes: what differs between runs, which no single run can know.

TensorFlow-free.
"""

import datetime
import signal
import statistics as stdlib_statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tfbench import records
from tfbench.config import BenchmarkConfig
from tfbench.display import Display
from tfbench.flags import to_flags
from tfbench.measure import statistics
from tfbench.records import RunRecord


def repeat(config: BenchmarkConfig, count: int, display: Display) -> int:
    """Run `config` in `count` processes after each other and show how much they differ.

    Returns:
        0 where every run ended ok, 130 where one was interrupted (the rest is not run), else 1.
    """
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    command = [sys.executable, "-m", "tfbench.train", *to_flags(config)]
    codes: list[int] = []
    with _Stoppable() as series:
        for number in range(count):
            display.say(f"run {number + 1} of {count}")
            codes.append(_run(command, series))
            if series.stopped or codes[-1] == 130:
                break
    rows = _rows_since(config, started)
    if len(rows) > 1:
        display.table(f"{len(rows)} runs of {config.model}", table(rows))
    if series.stopped or 130 in codes:
        return 130
    return 0 if not any(codes) else 1


class _Stoppable:
    """A series of children that Ctrl-C and SIGTERM end in a `with` block.

    The child that runs ends with a row, so it is waited for. A terminal's Ctrl-C reaches it by itself;
    SIGTERM, which a scheduler may send to this process alone, is handed on.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.child: subprocess.Popen[bytes] | None = None
        self._told = False  # to end by SIGTERM
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as in a background job of a script
                self._kept[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if number == signal.SIGTERM:
            self._told = True
            self.tell()

    def tell(self) -> None:
        """Hands a SIGTERM on, if there was one."""
        if self._told and self.child is not None:
            self.child.terminate()


def _run(command: Sequence[str], series: _Stoppable) -> int:
    """Exit code of a child of the series."""
    with subprocess.Popen(command) as child:
        series.child = child
        series.tell()  # of what came while the child began
        return child.wait()


def _rows_since(config: BenchmarkConfig, started: str) -> list[RunRecord]:
    """The ok rows of these runs."""
    path = Path(config.results_dir) / "runs.csv"
    if not path.exists():
        return []
    return [
        row
        for row in records.read(path)
        if row.run_key == config.run_key and row.status == "ok" and (row.started_at or "") >= started
    ]


def table(rows: Sequence[RunRecord]) -> list[tuple[str, str, str]]:
    """The runs together as (name, value, remark): the median, the mean with its interval, the spread."""
    rates = [row.samples_per_sec for row in rows if row.samples_per_sec is not None]
    median = stdlib_statistics.median(rates)
    interval = statistics.interval_over_runs(
        rates, [(row.samples_per_sec_low, row.samples_per_sec_high) for row in rows]
    )
    between = "95 %: {:,.1f} to {:,.1f}".format(*interval) if interval else "95 %: not known of these runs"
    spread = (max(rates) - min(rates)) / median
    holding = sum(
        1
        for row in rows
        if (row.samples_per_sec_low or 0) <= median <= (row.samples_per_sec_high or float("inf"))
    )
    return [
        ("samples/s", f"{median:,.1f}", "median of the runs"),
        ("mean of the runs", f"{stdlib_statistics.fmean(rates):,.1f}", between),
        ("spread", f"{100 * spread:.2f} %", f"{min(rates):,.1f} to {max(rates):,.1f}"),
        ("intervals", f"{holding} of {len(rows)}", "single runs' 95 % intervals that hold the median"),
    ]
