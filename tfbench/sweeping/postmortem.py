"""The row of a run whose process could not write it. TensorFlow-free."""

import os
import platform
import signal
import socket
from pathlib import Path

from tfbench import outcome, summary
from tfbench.hardware import environment
from tfbench.journal import Observed, identify, run_id
from tfbench.records import RunRecord
from tfbench.sweeping.child import Ended, Launch
from tfbench.sweeping.placement import EVERYTHING, Place

_TAIL_BYTES = 8192  # of a log: some fifty of TensorFlow's lines, in which it says why it gives up
# TensorFlow's allocator says "ran out of memory" also where it then does with less.
_HARMLESS = "not a failure"
_EXIT_INTERRUPTED = 130


def row_of(ended: Ended, place: Place = EVERYTHING) -> RunRecord:
    """What is known of the run: its configuration, where it ran and how it ended."""
    launch, folder = ended.launch, ended.launch.folder()
    config = launch.config
    record = RunRecord(host=socket.gethostname(), python=platform.python_version())
    name = folder.name if folder else run_id(config, launch.started, launch.pid)
    record.parallel_runs = place.parallel_runs
    record.cpu_cores = len(place.cores or os.sched_getaffinity(0))
    record.environment = environment.settings()
    identify(record, config, name, launch.started)
    record.status, record.note = _status(ended)
    return summary.fill(record, config, Observed(), [])


def _status(ended: Ended) -> tuple[str, str]:
    """Status and note of a run that left no row."""
    if ended.status is not None:
        return ended.status, ended.reason
    if ended.exit_code == _EXIT_INTERRUPTED:
        return "interrupted", "stopped before the run began"
    lines = _last_lines(ended.launch)
    for line in reversed(lines):
        status, note = outcome.classify(RuntimeError(line))
        if status != "failed":
            return status, note
    if ended.exit_code == -signal.SIGKILL:
        return _killed(ended.oom_kills)
    how = f"exit code {ended.exit_code}"
    if ended.exit_code < 0:
        how = f"ended by {signal.Signals(-ended.exit_code).name}"
    last = f"; last line: {lines[-1][: outcome.NOTE_LENGTH]}" if lines else ""
    return "failed", f"the process left no row: {how}{last}; output: {ended.launch.output}"


def _killed(oom_kills: int | None) -> tuple[str, str]:
    """Of a process that got a SIGKILL which the sweep did not send."""
    if oom_kills == 0:
        return "failed", "ended by SIGKILL from outside; the kernel counts no kill for want of memory"
    knows = "the kernel killed it" if oom_kills else "ended by SIGKILL, most likely by the kernel"
    return "host_oom", f"the host has no memory left: {knows}"


def _last_lines(launch: Launch) -> list[str]:
    """The ends of train.log, where TensorFlow's libraries write, and of the output."""
    folder = launch.folder()
    paths = [*([folder / "train.log"] if folder else []), launch.output]
    text = "\n".join(_tail(path) for path in paths if path.exists())
    return [line.strip() for line in text.splitlines() if line.strip() and _HARMLESS not in line]


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
