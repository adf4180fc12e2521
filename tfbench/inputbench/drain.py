"""Taking samples from a pipeline for a given time, and what the process used meanwhile. TensorFlow-free."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from tfbench.measure import statistics
from tfbench.measure.timing import Window, WindowTimer

# Of the measured time, before it: tf.data looks for its parallelism, and buffers filled at the start run dry.
WARM_UP_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to take samples."""

    seconds: float  # of all windows together, at least
    windows: int
    warm_up_samples: int = 0  # at least, before the windows


@dataclasses.dataclass(frozen=True)
class Usage:
    """What has been used so far, counted from any start."""

    cpu_s: float  # by all threads of this process, user and system
    cores_s: float  # CPU time of all processes on the cores that this one may use
    read_bytes: int | None  # through read calls, from the page cache too; None: the system does not say
    # CPU time of this process's threads, by their numbers; empty where it is not known.
    threads_s: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Drained:
    """What was taken inside the windows, and what this took."""

    windows: tuple[Window, ...]
    used: Usage

    @property
    def samples(self) -> int:
        """Of all windows."""
        return sum(window.samples for window in self.windows)

    @property
    def seconds(self) -> float:
        """Of all windows."""
        return sum(window.seconds for window in self.windows)

    @property
    def samples_per_sec(self) -> float:
        """Σ samples ÷ Σ seconds."""
        return statistics.samples_per_sec(self.windows)

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """95 % interval of the rate; nothing with one window."""
        return statistics.rate_interval(self.windows) or (None, None)

    @property
    def cores_busy(self) -> float:
        """CPU time of this process ÷ wall time."""
        return self.used.cpu_s / self.seconds

    @property
    def cores_busy_by_others(self) -> float:
        """CPU time of other processes on the cores that this one may use ÷ wall time."""
        return max(self.used.cores_s - self.used.cpu_s, 0.0) / self.seconds

    @property
    def busiest_thread(self) -> float | None:
        """CPU time of the thread that used most ÷ wall time: at 1 it alone is the limit. None: not known."""
        return max(self.used.threads_s.values()) / self.seconds if self.used.threads_s else None

    @property
    def read_bytes_per_sec(self) -> float | None:
        """Through read calls; None: the system does not say."""
        return None if self.used.read_bytes is None else self.used.read_bytes / self.seconds

    @property
    def cpu_us_per_sample(self) -> float:
        """Microseconds of CPU time."""
        return 1e6 * self.used.cpu_s / self.samples


def usage_now() -> Usage:
    """As the system counts it, in steps of 10 ms on most."""
    process, usable = psutil.Process(), os.sched_getaffinity(0)
    times = process.cpu_times()
    try:
        read_bytes = process.io_counters().read_chars
    except (psutil.AccessDenied, OSError):  # some containers hide /proc/self/io
        read_bytes = None
    cores = [each for number, each in enumerate(psutil.cpu_times(percpu=True)) if number in usable]
    threads_s = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    return Usage(times.user + times.system, sum(map(_busy_s, cores)), read_bytes, threads_s)


def _busy_s(core: Any) -> float:
    """CPU time of a core; what a virtual machine's host took (steal) is used up too, guests are in user."""
    return float(core.user + core.nice + core.system + core.irq + core.softirq + core.steal)


def drain(
    take: Callable[[], int],
    plan: Plan,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    usage: Callable[[], Usage] = usage_now,
) -> Drained:
    """Warm up, then take samples in windows that follow each other at once.

    Args:
        take: takes some samples and returns their number.
        plan: how long.
        synchronize: as for `WindowTimer`; by default there is no device to wait for.
        clock: monotonic seconds.
        usage: reads the counters.
    """
    taken, warm_s = 0, clock() + WARM_UP_SHARE * plan.seconds
    while taken < plan.warm_up_samples or clock() < warm_s:
        taken += take()
    timer = WindowTimer(synchronize, clock)
    before = usage()
    for _ in range(plan.windows):
        with timer.window() as counted:
            end_s = clock() + plan.seconds / plan.windows
            while not counted.steps or clock() < end_s:
                counted.add(1, take())
    after = usage()
    read_bytes = None
    if before.read_bytes is not None and after.read_bytes is not None:
        read_bytes = after.read_bytes - before.read_bytes
    threads_s = {
        thread: used_s - before.threads_s.get(thread, 0.0) for thread, used_s in after.threads_s.items()
    }
    used = Usage(after.cpu_s - before.cpu_s, after.cores_s - before.cores_s, read_bytes, threads_s)
    return Drained(tuple(timer.windows), used)
