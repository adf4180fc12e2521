"""Runs the doctor's child process: its stages as they come, a deadline that holds. TensorFlow-free."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from tfbench.checks.child import PREFIX
from tfbench.checks.deadline import within
from tfbench.checks.facts import TensorFlow
from tfbench.hardware.cards import CardFacts, card_facts
from tfbench.hardware.gpus import Gpu
from tfbench.measure.telemetry import Sampler

# TensorFlow names a library that it cannot open only at this verbosity.
_MESSAGES = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1"}
_MESSAGES_KEPT = 20_000  # characters, from the end
_CARDS_S = 5.0  # seconds that NVML gets to answer under load


class Watch:
    """Samples the cards while the child loads them, and reads their links halfway."""

    def __init__(self, gpus: tuple[Gpu, ...], nvml: Any):
        self._gpus, self._nvml = gpus, nvml
        self.sampler: Sampler | None = None
        self.halfway: list[CardFacts] = []

    def on_stage(self, stage: str) -> None:
        """Called as the child tells a stage, and with "" when it has ended."""
        # A driver that hangs under load leaves the cards without figures, not the doctor without an end.
        with contextlib.suppress(TimeoutError):
            if stage == "load_begins":
                sampler = Sampler(self._gpus, clock=time.monotonic, nvml=self._nvml)
                within(_CARDS_S, sampler.start)
                self.sampler = sampler
            elif stage == "load_half":
                self.halfway = within(_CARDS_S, lambda: [card_facts(gpu, self._nvml) for gpu in self._gpus])
            elif stage in ("load", "") and self.sampler is not None:
                within(_CARDS_S, self.sampler.stop)


def run_child(
    command: list[str], deadline_s: float, on_stage: Callable[[str], None], environ: Mapping[str, str]
) -> TensorFlow:
    """Runs the command until it ends or the deadline has come, then kills it with all its children.

    Args:
        command: What to run; it writes stages as `tfbench.checks.child` does.
        deadline_s: Time on the monotonic clock.
        on_stage: Called with the name of each stage, and at last with "".
        environ: Environment for it; log levels of TensorFlow are added.
    """
    stages: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=messages,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **_MESSAGES},
        )
        try:
            in_time = _follow(process, deadline_s, stages, on_stage)
        finally:
            ended = _end(process)
            on_stage("")
        messages.seek(0)
        text = messages.read()[-_MESSAGES_KEPT:]
    if not in_time:
        ended = "no end in time"
    return TensorFlow(stages=stages, messages=text, ended=ended, in_time=in_time)


def _follow(
    process: subprocess.Popen[str],
    deadline_s: float,
    stages: dict[str, dict[str, Any]],
    on_stage: Callable[[str], None],
) -> bool:
    """Takes the child's lines as they come; False if the deadline came first.

    A thread reads, because a process that hangs in a driver cannot be killed and never closes its output.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(deadline_s - time.monotonic(), 0))
        except queue.Empty:
            return False
        if line is None:
            return True
        if line.startswith(PREFIX) and line.endswith("\n"):  # not one that a crash has torn
            told = json.loads(line.removeprefix(PREFIX))
            stage = told.pop("stage")
            stages[stage] = told
            on_stage(stage)


def _read(output: IO[str], lines: "queue.Queue[str | None]") -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> str:
    """Makes sure that nothing of the child goes on; how it ended by itself, "" if well."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    with contextlib.suppress(ProcessLookupError):  # it has ended, and nothing that it started is left
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    code = process.returncode
    if code is None:
        return "hangs in the driver and cannot be killed"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""
