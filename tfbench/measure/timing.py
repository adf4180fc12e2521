"""Timed windows: blocks of training steps between two synchronised readings of one monotonic clock."""

import contextlib
import csv
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence

WINDOW_COLUMNS = (
    "index",
    "steps",
    "samples",
    "start_s",
    "seconds",
    "samples_per_sec",
    "step_time_ms",
    "loss",
)


@dataclasses.dataclass(frozen=True)
class Window:
    """One timed block of steps.

    Attributes:
        index: place among the run's windows, from 0.
        steps: optimizer updates counted inside.
        samples: samples of all replicas counted inside.
        start_s: monotonic clock at the synchronised start, seconds.
        end_s: monotonic clock at the synchronised end, seconds.
    """

    index: int
    steps: int
    samples: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Wall time of the window."""
        return self.end_s - self.start_s


@dataclasses.dataclass
class Counted:
    """What ran inside the open window so far."""

    steps: int = 0
    samples: int = 0

    def add(self, steps: int, samples: int) -> None:
        """Counts work that was done: `steps` optimizer updates over `samples` samples of all replicas."""
        self.steps += steps
        self.samples += samples


class WindowTimer:
    """Times windows and keeps the whole ones.

    An accelerator runs behind the host, so the clock is read only after `synchronize` returned, at both
    edges: otherwise the time would be that of enqueuing the work.

    Usage:
        timer = WindowTimer(synchronize)
        with timer.window() as counted:
            counted.add(steps, samples)  # after each call that ran them

    Args:
        synchronize: blocks until the devices have done all work given to them.
        clock: monotonic seconds; telemetry samples must carry the same clock.
    """

    def __init__(self, synchronize: Callable[[], None], clock: Callable[[], float] = time.monotonic):
        self._synchronize = synchronize
        self._clock = clock
        self.windows: list[Window] = []

    @contextlib.contextmanager
    def window(self) -> Iterator[Counted]:
        """Times the block inside; a block that raises is no window.

        Yields:
            The counter to which the block adds what it ran.

        Raises:
            ValueError: the block counted no step or no sample.
        """
        counted = Counted()
        self._synchronize()
        start_s = self._clock()
        yield counted
        self._synchronize()
        end_s = self._clock()
        if counted.steps < 1 or counted.samples < 1:
            raise ValueError(
                f"window {len(self.windows)} counted {counted.steps} steps and {counted.samples} samples; "
                "a window needs at least one of each: call add() with what ran"
            )
        self.windows.append(Window(len(self.windows), counted.steps, counted.samples, start_s, end_s))


def write_windows_csv(
    path: str | os.PathLike[str], windows: Sequence[Window], losses: Sequence[float | None]
) -> None:
    """Writes one line per window, with the columns `WINDOW_COLUMNS`.

    Args:
        path: file to (over)write, in an existing folder.
        windows: the run's windows.
        losses: one per window; None leaves the cell empty.

    Raises:
        ValueError: not as many losses as windows.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(WINDOW_COLUMNS)
        for window, loss in zip(windows, losses, strict=True):
            rate = window.samples / window.seconds
            step_time_ms = 1e3 * window.seconds / window.steps
            counted = (window.index, window.steps, window.samples)
            writer.writerow([*counted, window.start_s, window.seconds, rate, step_time_ms, loss])
