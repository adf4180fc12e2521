"""A run's folder and its row: opened before anything long, written whatever ends the run. TensorFlow-free."""

import contextlib
import dataclasses
import datetime
import faulthandler
import json
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tfbench
from tfbench import records
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.flags import to_flags
from tfbench.measure.card_watch import CardWatch
from tfbench.measure.telemetry import TelemetrySample
from tfbench.measure.telemetry import write_csv as write_telemetry_csv
from tfbench.measure.timing import Window, write_windows_csv
from tfbench.measure.verdict import Parts
from tfbench.records import RunRecord

log = logging.getLogger("tfbench")


@dataclasses.dataclass(slots=True)
class Observed:
    """What a run has seen so far. None and empty: not seen."""

    windows: list[Window] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)  # mean of each window
    # Share right in each window; None: nothing was predicted.
    accuracies: list[float | None] = dataclasses.field(default_factory=list)
    telemetry: list[TelemetrySample] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    sensor_problems: list[str] = dataclasses.field(default_factory=list)  # of the sampler's thread
    cards: CardWatch | None = None  # of the run's GPUs
    other_process_on_gpu: bool | None = None  # before the run
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # columns of the row, by name
    packages: dict[str, str | None] = dataclasses.field(default_factory=dict)  # versions, by name
    first_call_s: float | None = None  # of the loop: tracing, compiling and one step
    steps_run: int = 0  # asked of the loop
    iterations: int | None = None  # counted by the step itself
    iterations_before: int = 0  # of them, those of the warm-up
    retraces: int | None = None  # inside the windows
    matrix_flops: float | None = None  # FLOP/s of a large product on this card
    parts: Parts | None = None  # of a step, where the run was diagnosed
    weights_before: Any = None  # TrainStep.fingerprints at the start
    weights_changed: bool | None = None
    replicas_agree: bool | None = None  # on every weight after the run, to the last bit

    def add_window(self, window: Window, loss: float, accuracy: float | None) -> None:
        """A whole window: Ctrl-C comes before this statement or after it, never between its parts."""
        self.windows, self.losses, self.accuracies = (
            [*self.windows, window],
            [*self.losses, loss],
            [*self.accuracies, accuracy],
        )


class Journal:
    """One run on disk: `results_dir/run_id/` and a line of `results_dir/runs.csv`.

    Raises:
        ConfigError: the place cannot be written, or its runs.csv has another schema.
    """

    def __init__(self, config: BenchmarkConfig):
        self.config = config
        self.started = datetime.datetime.now(datetime.UTC)
        self.run_id = run_id(config, self.started, os.getpid())
        results_dir = Path(config.results_dir)
        self.rows_path = results_dir / "runs.csv"
        self.folder = results_dir / self.run_id
        self.unwritten: list[str] = []  # by `close`: what could not be, and why
        try:
            self.folder.mkdir(parents=True)
            records.check_appendable(self.rows_path)
            self.earlier_rows = records.read(self.rows_path) if self.rows_path.exists() else []
            with open(self.rows_path, "a", encoding="utf-8"):
                pass  # so that a row that cannot be written is known now and not after the run
            self._write("flags.txt", "\n".join(to_flags(config)) + "\n")
            self._handler = _log_to(self.folder / "train.log")
        except (OSError, records.SchemaError) as error:
            _remove_if_empty(self.folder)
            raise ConfigError("results_dir", config.results_dir, f"cannot be used: {error}") from error

    def write_system(self, description: dict[str, Any]) -> None:
        """The machine and its software, as system.json."""
        self._write("system.json", json.dumps(description, indent=1, default=str) + "\n")

    def identify(self, record: RunRecord) -> None:
        """Fill in which run the row is."""
        identify(record, self.config, self.run_id, self.started)

    def close(self, record: RunRecord, observed: Observed) -> None:
        """Write what was seen, the row first, and end the log. Ctrl-C waits until it is done.

        What a full disk keeps from being written is in `unwritten`: the result can still be shown.
        """
        with _undisturbed():
            with self._noting("runs.csv"):
                records.append(self.rows_path, record)
                log.info("row written: %s", record.status)
            with self._noting("windows.csv"):
                write_windows_csv(self.folder / "windows.csv", observed.windows, observed.losses)
            with self._noting("telemetry.csv"):
                write_telemetry_csv(self.folder / "telemetry.csv", observed.telemetry)
        faulthandler.enable()
        log.removeHandler(self._handler)
        with self._noting("train.log"):
            self._handler.close()
            if self._handler.error is not None:
                raise self._handler.error

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.unwritten.append(f"{name}: {error}")

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")


def run_id(config: BenchmarkConfig, started: datetime.datetime, pid: int) -> str:
    """Name of a run and of its folder: time, model, configuration and process, so that no two are alike."""
    return f"{started:%Y%m%d-%H%M%S}-{config.model}-{config.run_key[:6]}-{pid}"


def identify(record: RunRecord, config: BenchmarkConfig, name: str, started: datetime.datetime) -> None:
    """Fill in which run a row is."""
    record.run_id, record.run_key = name, config.run_key
    record.started_at = started.isoformat(timespec="milliseconds")
    record.tfbench_version, record.tag = tfbench.__version__, config.tag
    record.flags = shlex.join(to_flags(config))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """The block runs to its end; an interrupt that comes meanwhile is raised then.

    Only the main thread may set signal handlers, and only it gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []  # signals by number
    kept = {
        number: signal.signal(number, lambda got, frame: late.append(got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    for got in late:
        signal.raise_signal(got)


class _LogFile(logging.FileHandler):
    """Keeps the first error of writing, where logging would print a traceback for every line."""

    error: OSError | None = None

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.error = self.error or error
        else:
            super().handleError(record)


def _log_to(path: Path) -> _LogFile:
    """Every message of tfbench, and a dump of all stacks on a crash, into a file."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    assert handler.stream is not None
    faulthandler.enable(handler.stream)
    return handler


def _remove_if_empty(folder: Path) -> None:
    """Leave nothing behind of a run that was refused."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
