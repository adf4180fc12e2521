"""The sweep itself: a fresh process for every run that is missing, and a row for each. TensorFlow-free."""

import collections
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import itertools
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from tfbench import records
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.display import Display
from tfbench.flags import to_flags
from tfbench.hardware.gpus import Machine
from tfbench.records import RunRecord
from tfbench.sweeping import child, plan
from tfbench.sweeping.child import Limits
from tfbench.sweeping.matrix import Point
from tfbench.sweeping.placement import EVERYTHING, Place, places
from tfbench.sweeping.plan import Try
from tfbench.sweeping.progress import SweepProgress, table
from tfbench.sweeping.stopping import StopRequests

TRAINER = (sys.executable, "-m", "tfbench.train")
_ENDED = object()
LOCK_WAIT_S = 10.0  # for the last child of a sweep that was killed a moment ago


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What to run, where and for how long."""

    points: Sequence[Point]  # at least one; all have one results_dir
    tries: Sequence[Try]  # runs of the points, in their order
    machine: Machine
    retry: str = "failed"  # a name in plan.RETRIES
    limits: Limits = dataclasses.field(default_factory=Limits)
    parallel: int | None = 1  # runs side by side at most; None: one on each GPU
    trainer: Sequence[str] | None = None  # what is run with a point's flags; None: TRAINER

    @property
    def results_dir(self) -> Path:
        """The one folder of all points."""
        return Path(self.points[0].config.results_dir)

    def rows(self) -> list[RunRecord]:
        """Of the results folder so far.

        Raises:
            ConfigError: its runs.csv is of another schema.
        """
        path = self.results_dir / "runs.csv"
        try:
            records.check_appendable(path)
            return records.read(path) if path.exists() else []
        except records.SchemaError as error:
            raise ConfigError("results_dir", self.results_dir, f"cannot be used: {error}") from error

    def places(self, config: BenchmarkConfig) -> list[Place]:
        """Of runs like this one: as many for what is left of a sweep as for all of it."""
        if self.parallel == 1:
            return [EVERYTHING]
        alike = [each.config for each in self.points if min(each.config.gpus, 2) == min(config.gpus, 2)]
        return places(alike, self.parallel, self.machine)

    def beside(self, config: BenchmarkConfig) -> bool:
        """Whether runs of it are beside others."""
        return len(self.places(config)) > 1

    def missing(self, retry: str | None = None) -> list[Try]:
        """The runs to make by the rows so far; `retry` in the place of the sweep's own."""
        return plan.missing(self.tries, self.rows(), retry or self.retry, self.beside)

    def exit_code(self) -> int:
        """0 where every run has its ok row, 1 where some have, 2 where none has."""
        return plan.exit_code_of(len(self.tries) - len(self.missing("failed")), len(self.tries))


def sweep(work: Sweep, display: Display, stop: StopRequests | None = None) -> int:
    """Run what is missing.

    Args:
        work: what to run.
        display: where to show it.
        stop: the user's requests, where somebody counts them already.

    Returns:
        0 where every point has its ok rows, 1 where some of them are there, 2 where none is.

    Raises:
        ConfigError: the results folder cannot be used, or another sweep is at work in it.
    """
    counting = contextlib.nullcontext(stop) if stop else StopRequests()
    with counting as stop, folder(work.results_dir, stop) as lock:
        tries = work.missing()
        batches = _batches(tries, work)
        total = len(work.tries)
        display.say(
            f"points: {len(work.points)}, runs: {total}; {len(tries)} runs to make, "
            f"{total - len(tries)} of {total} already in {work.results_dir / 'runs.csv'}"
        )
        with SweepProgress(display, total, total - len(tries)) as progress:
            for batch, spots in batches:
                if len(spots) > 1:
                    display.say(f"{len(spots)} runs side by side, cores of each: {_shares(spots)}")
                _run_batch(batch, spots, work, lock, stop, progress)
        display.table("sweep", table(work.points, work.rows(), work.beside))
        if stop.count:
            display.warn("stopped by the user: the same command runs what is missing")
        return work.exit_code()


def _batches(tries: Sequence[Try], work: Sweep) -> list[tuple[list[Try], list[Place]]]:
    """Runs that may be side by side, with their places.

    With places for several runs those of one kind are brought together, within their round; else the order
    is kept.
    """

    def kind(each: Try) -> tuple[int, int]:
        return each.number, min(each.point.config.gpus, 2)

    ordered = list(tries) if work.parallel == 1 else sorted(tries, key=kind)
    if work.parallel == 1:
        return [(ordered, [EVERYTHING])] if ordered else []
    groups = [list(group) for _, group in itertools.groupby(ordered, key=kind)]
    return [(group, work.places(group[0].point.config)) for group in groups]


def _shares(spots: Sequence[Place]) -> str:
    """Cores of a place: one number, or the least and the most."""
    return " to ".join(map(str, sorted({len(place.cores) for place in spots})))


def _run_batch(
    tries: Sequence[Try],
    spots: Sequence[Place],
    work: Sweep,
    lock: int,
    stop: StopRequests,
    progress: SweepProgress,
) -> None:
    """A run in every place until all are made; those that have begun end before this returns or raises."""
    waiting, free = collections.deque(tries), collections.deque(spots)
    running: dict[Place, Generator[None, None, None]] = {}
    try:
        while running or (waiting and not stop.count):
            while waiting and free and not stop.count:
                place = free.popleft()
                running[place] = _run_try(waiting.popleft(), place, work, lock, stop, progress)
            for place, run in list(running.items()):
                if next(run, _ENDED) is _ENDED:
                    del running[place]
                    free.append(place)
            progress.tick()
            if running:
                time.sleep(child.POLL_S)
    finally:
        for run in running.values():
            run.close()  # kills the child


def _run_try(
    each: Try, place: Place, work: Sweep, lock: int, stop: StopRequests, progress: SweepProgress
) -> Generator[None, None, None]:
    """One run, from its line of progress to its row."""
    several = any(other.number > 1 for other in work.tries)
    name = each.point.name + (f" (run {each.number})" if several else "")
    progress.start(name)
    start_s = time.monotonic()
    row = yield from run_point(each.point, work, lock, stop, place)
    progress.finish(name, row, time.monotonic() - start_s, place.parallel_runs)


def run_point(
    point: Point, work: Sweep, lock: int, stop: StopRequests, place: Place = EVERYTHING
) -> Generator[None, None, RunRecord]:
    """One run to its row, which the child has written or, where it could not, is written here."""
    config = point.config
    now = datetime.datetime.now(datetime.UTC)
    output = work.results_dir / "sweep_logs" / f"{now:%Y%m%d-%H%M%S-%f}-{config.run_key[:6]}.log"
    command = [*(work.trainer or TRAINER), *to_flags(config)]
    ended = yield from child.run(command, config, output, lock, work.limits, stop, place)
    own = [row for row in work.rows() if ended.launch.is_own(row.run_id)]
    if own:
        return own[-1]
    from tfbench.sweeping import postmortem  # brings SciPy: a sweep that is refused does without

    row = postmortem.row_of(ended, place)
    records.append(work.results_dir / "runs.csv", row)
    return row


def run_alone(point: Point, work: Sweep, lock: int, stop: StopRequests) -> RunRecord:
    """One run with the whole machine, to its row."""
    run = run_point(point, work, lock, stop)
    try:
        while True:
            next(run)
            time.sleep(child.POLL_S)
    except StopIteration as end:
        row: RunRecord = end.value
        return row
    finally:
        run.close()


@contextlib.contextmanager
def folder(results_dir: Path, stop: StopRequests) -> Iterator[int]:
    """The results folder, for one sweep at a time: the lock's file descriptor.

    A wish to stop ends the wait for another sweep.

    Children inherit it, so that it is free only when the last process of a killed sweep has ended.

    Raises:
        ConfigError: it cannot be written, now or within the block, or another sweep is at work in it.
    """
    try:
        (results_dir / "sweep_logs").mkdir(parents=True, exist_ok=True)
        lock = os.open(results_dir / "sweep.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError("results_dir", results_dir, f"cannot be used: {error}") from error
    try:
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while not _locked(lock):
            if stop.count or time.monotonic() > deadline_s:
                raise ConfigError("results_dir", results_dir, "another sweep is at work in this folder")
            time.sleep(child.POLL_S)
        yield lock
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            "results_dir",
            results_dir,
            f"cannot be written: {error}; the same command goes on with what is missing",
        ) from error
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    """Takes the lock, where it is free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
