"""TensorBoard curves of a run, one point a window."""

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tfbench.config import BenchmarkConfig
from tfbench.journal import Observed
from tfbench.measure.gpm import METRICS
from tfbench.measure.telemetry import summarize


class Curves:
    """Scalars in the run's folder, unless --notensorboard. Written between windows only."""

    def __init__(self, config: BenchmarkConfig, folder: Path):
        self._config, self._folder = config, folder
        self._files = contextlib.ExitStack()
        self._writer: Any = None

    def __enter__(self) -> Self:
        if self._config.tensorboard:
            import tensorflow as tf

            self._writer = tf.summary.create_file_writer(str(self._folder))
            self._files.callback(self._writer.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def add(self, observed: Observed) -> None:
        """The window that has just ended, at the number of steps run so far."""
        if self._writer is None:
            return
        import tensorflow as tf

        window = observed.windows[-1]
        gpu = summarize(observed.telemetry, [window])
        points = {
            "train/loss": observed.losses[-1],
            "train/accuracy": observed.accuracies[-1],
            "throughput/samples_per_sec": window.samples / window.seconds,
            "throughput/step_time_ms": 1000 * window.seconds / window.steps,
            "gpu/utilization_percent": gpu.gpu_util_mean,
            "gpu/memory_used_gib": gpu.memory_used_gib_max,
            "gpu/power_w": gpu.power_w_mean,
            "gpu/sm_clock_mhz": gpu.sm_clock_mhz_mean,
            "gpu/temperature_c": gpu.temperature_c_max,
        } | {f"gpu/{name}": getattr(gpu, name) for name in METRICS}
        with self._writer.as_default():
            for name, value in points.items():
                if value is not None:
                    tf.summary.scalar(name, value, step=observed.steps_run)
        self._writer.flush()
