"""One run as a process that cannot outlive the sweep, hang unseen or leave anything behind. TensorFlow-free.

The child leads a session of its own, so that Ctrl-C reaches it only through the sweep, and everything that it
starts is in its process group and is killed with it. Should the sweep itself be killed, even by SIGKILL, the
kernel kills the child (PR_SET_PDEATHSIG): nobody else would be left to do so.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from tfbench.config import BenchmarkConfig
from tfbench.sweeping.placement import Place
from tfbench.sweeping.stopping import StopRequests

POLL_S = 0.1  # between two looks at a child: far below the seconds that limits are made of
STACK_DUMP_S = 5.0  # that a hung child gets to write where it hangs
GRACE_S = 60.0  # that an interrupted child gets to write its row; a compilation cannot be interrupted
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a run may take; 0: no limit."""

    point_timeout_s: float = 0.0  # altogether
    hang_timeout_s: float = 0.0  # without a sign of life


@dataclasses.dataclass(frozen=True)
class Launch:
    """A child and where its traces are."""

    config: BenchmarkConfig
    started: datetime.datetime  # UTC
    pid: int
    output: Path  # what it prints

    def is_own(self, run_id: str | None) -> bool:
        """Whether a run is this child's: `Journal` names runs by time, model, key and process."""
        if run_id is None or not run_id.endswith(f"-{self.config.run_key[:6]}-{self.pid}"):
            return False
        return run_id[:15] >= f"{self.started:%Y%m%d-%H%M%S}"  # process numbers come again

    def folder(self) -> Path | None:
        """The run's folder, once the child has made it."""
        results_dir = Path(self.config.results_dir)
        pattern = f"*-{self.config.run_key[:6]}-{self.pid}"
        return next((path for path in results_dir.glob(pattern) if self.is_own(path.name)), None)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a child ended."""

    launch: Launch
    exit_code: int  # negative: the signal that ended it
    status: str | None = None  # where the sweep ended it: "hang" or "interrupted"
    reason: str = ""  # why the sweep ended it
    oom_kills: int | None = None  # by the kernel, on the whole machine, meanwhile; None: not known


class Watchdog:
    """Finds a child that has taken too long, altogether or since its last line."""

    def __init__(self, limits: Limits, start_s: float):
        self._limits, self._start_s, self._heard_s, self._size = limits, start_s, start_s, 0

    def complaint(self, now_s: float, size: int) -> str:
        """Why the child is to be ended; "" while it is not.

        Args:
            now_s: on the clock of `start_s`.
            size: bytes that the child has written so far.
        """
        if size != self._size:
            self._heard_s, self._size = now_s, size
        silent_s, allowed_s = now_s - self._heard_s, self._limits.hang_timeout_s
        if allowed_s and silent_s > allowed_s:
            return f"no line for {silent_s:.0f} s (--hang_timeout_s={allowed_s:g})"
        if self._limits.point_timeout_s and now_s - self._start_s > self._limits.point_timeout_s:
            return f"not done in time (--point_timeout_s={self._limits.point_timeout_s:g})"
        return ""


def run(
    command: Sequence[str],
    config: BenchmarkConfig,
    output: Path,
    lock: int,
    limits: Limits,
    stop: StopRequests,
    place: Place,
) -> Generator[None, None, Ended]:
    """Run a command to its end, giving way between two looks at it so that several can run side by side.

    Nothing of its process group is left when this returns, raises or is closed.

    Args:
        command: program and arguments.
        config: what it runs.
        output: new file for what it prints.
        lock: file descriptor that stays open as long as the child lives.
        limits: beyond which it is ended.
        stop: the user's requests: one ends it gently, a second at once.
        place: the devices and cores that it may use.
    """
    started, kills_before = datetime.datetime.now(datetime.UTC), kernel_oom_kills()
    with open(output, "xb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Stacks before train.log takes them over.
            env=os.environ | {"PYTHONFAULTHANDLER": "1"} | place.environment(),
            start_new_session=True,
            pass_fds=(lock,),
            preexec_fn=_tie_to(os.getpid(), place.cores),
        )
    launch = Launch(config, started, process.pid, output)
    try:
        status, reason = yield from _watch(process, launch, limits, stop)
    finally:
        _kill_group(process)
    kills = kernel_oom_kills()
    more = None if kills is None or kills_before is None else kills - kills_before
    return Ended(launch, process.returncode, status, reason, more)


def _tie_to(parent: int, cores: frozenset[int]) -> Callable[[], None]:
    """What the child does before it becomes the command: die with its parent, keep to its cores.

    The library is loaded here because the child of a fork must not.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def tie() -> None:
        if prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
        if os.getppid() != parent:  # it died before the kernel was told
            os.kill(os.getpid(), signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    return tie


def _watch(
    process: subprocess.Popen[bytes], launch: Launch, limits: Limits, stop: StopRequests
) -> Generator[None, None, tuple[str | None, str]]:
    """Wait for the child; status and reason where it has to be ended."""
    watchdog = Watchdog(limits, time.monotonic())
    folder = None
    while process.poll() is None:
        if stop.count:
            return "interrupted", (yield from _interrupt(process, stop))
        folder = folder or launch.folder()
        logs = [path for path in (launch.output, folder and folder / "train.log") if path and path.exists()]
        complaint = watchdog.complaint(time.monotonic(), sum(path.stat().st_size for path in logs))
        if complaint:
            # faulthandler writes every thread's stack, also of one that is stuck in C++.
            process.send_signal(signal.SIGABRT)
            yield from _wait(process, STACK_DUMP_S)
            return "hang", f"{complaint}; stacks: {logs[-1]}"
        yield
    return None, ""


def _interrupt(process: subprocess.Popen[bytes], stop: StopRequests) -> Generator[None, None, str]:
    """End a run as Ctrl-C does, with its row; a second request or too long a wait ends the patience.

    SIGTERM, because a child of a job in the background ignores SIGINT.
    """
    process.send_signal(signal.SIGTERM)
    yield from _wait(process, GRACE_S, lambda: stop.count > 1)
    return "stopped by the user"


def _wait(
    process: subprocess.Popen[bytes], timeout_s: float, enough: Callable[[], bool] = lambda: False
) -> Generator[None, None, None]:
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and not enough() and time.monotonic() < deadline_s:
        yield


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child and of all that it started, and wait for the child."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kernel_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Processes that the kernel has killed for want of memory since boot; None where it does not say."""
    try:
        counters = dict(line.split() for line in vmstat.read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return int(counters["oom_kill"]) if "oom_kill" in counters else None
