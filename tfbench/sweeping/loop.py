"""The sweep itself: a fresh process for every run that is missing, and a row for each. TensorFlow-free."""

import contextlib
import dataclasses
import datetime
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfbench import records
from tfbench.config import ConfigError
from tfbench.display import Display
from tfbench.flags import to_flags
from tfbench.records import RunRecord
from tfbench.sweeping import child, plan
from tfbench.sweeping.child import Limits
from tfbench.sweeping.matrix import Point
from tfbench.sweeping.progress import SweepProgress, table
from tfbench.sweeping.stopping import StopRequests

TRAINER = (sys.executable, "-m", "tfbench.train")
LOCK_WAIT_S = 10.0  # for the last child of a sweep that was killed a moment ago


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What to run."""

    points: Sequence[Point]  # at least one; all have one results_dir
    repeats: int = 1
    retry: str = "failed"  # a name in plan.RETRIES
    limits: Limits = dataclasses.field(default_factory=Limits)

    @property
    def results_dir(self) -> Path:
        """The one folder of all points."""
        return Path(self.points[0].config.results_dir)

    def rows(self) -> list[RunRecord]:
        """Of the results folder so far.

        Raises:
            records.SchemaError: its runs.csv is of another schema.
        """
        path = self.results_dir / "runs.csv"
        return records.read(path) if path.exists() else []


def sweep(work: Sweep, display: Display) -> int:
    """Run what is missing.

    Returns:
        0 where every point has its ok rows, 1 where some of them are there, 2 where none is.

    Raises:
        ConfigError: the results folder cannot be used, or another sweep is at work in it.
    """
    with _folder(work.results_dir) as lock, StopRequests() as stop:
        try:
            tries = plan.schedule(work.points, work.repeats, work.rows(), work.retry)
        except records.SchemaError as error:
            raise ConfigError("results_dir", work.results_dir, f"cannot be used: {error}") from error
        total = work.repeats * len(work.points)
        display.say(
            f"points: {len(work.points)}, runs of each: {work.repeats}; {len(tries)} runs to make, "
            f"{total - len(tries)} of {total} already in {work.results_dir / 'runs.csv'}"
        )
        with SweepProgress(display, total, total - len(tries)) as progress:
            for each in tries:
                if stop.count:
                    break
                name = each.point.name + (f" (run {each.number})" if work.repeats > 1 else "")
                progress.start(name)
                start_s = time.monotonic()
                row = _run(each.point, work, lock, stop, progress)
                progress.finish(name, row, time.monotonic() - start_s)
        rows = work.rows()
        display.table("sweep", table(work.points, rows))
        if stop.count:
            display.warn("stopped by the user: the same command runs what is missing")
        return plan.exit_code(work.points, work.repeats, rows)


def _run(point: Point, work: Sweep, lock: int, stop: StopRequests, progress: SweepProgress) -> RunRecord:
    """One run to its row, which the child has written or, where it could not, is written here."""
    config = point.config
    now = datetime.datetime.now(datetime.UTC)
    output = work.results_dir / "sweep_logs" / f"{now:%Y%m%d-%H%M%S-%f}-{config.run_key[:6]}.log"
    command = [*TRAINER, *to_flags(config)]
    ended = child.run(command, config, output, lock, work.limits, stop, progress.tick)
    own = [row for row in work.rows() if ended.launch.is_own(row.run_id)]
    if own:
        return own[-1]
    from tfbench.sweeping import postmortem  # brings SciPy: a sweep that is refused does without

    row = postmortem.row_of(ended)
    records.append(work.results_dir / "runs.csv", row)
    return row


@contextlib.contextmanager
def _folder(results_dir: Path) -> Iterator[int]:
    """The results folder, for one sweep at a time: the lock's file descriptor.

    Children inherit it, so that it is free only when the last process of a killed sweep has ended.

    Raises:
        ConfigError: it cannot be written, or another sweep is at work in it.
    """
    try:
        (results_dir / "sweep_logs").mkdir(parents=True, exist_ok=True)
        lock = os.open(results_dir / "sweep.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError("results_dir", results_dir, f"cannot be used: {error}") from error
    try:
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while not _locked(lock):
            if time.monotonic() > deadline_s:
                raise ConfigError("results_dir", results_dir, "another sweep is at work in this folder")
            time.sleep(child.POLL_S)
        yield lock
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    """Takes the lock, where it is free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
