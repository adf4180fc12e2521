"""Can tfbench's numbers be trusted? Three checks on one run, each against something independent.

    python experiments/measurement_truth.py --model=resnet50 --gpus=1

1. What does watching the GPU cost? Windows with and without the sampler, in turn.
2. Does the clock agree with the device? The same steps, timed by tfbench and by the profiler's device trace.
3. Does the energy counter agree with the power sensor, integrated over the windows?
"""

import csv
import pathlib
import statistics as stdlib_statistics

from absl import flags

from tfbench import device_trace, devices, study
from tfbench.config import BenchmarkConfig
from tfbench.defaults import complete
from tfbench.display import Display
from tfbench.flags import choices_from_flags
from tfbench.hardware.gpus import this_machine
from tfbench.journal import Observed
from tfbench.measure import statistics, telemetry
from tfbench.measure.timing import Window, WindowTimer
from tfbench.runner import run
from tfbench.training import Training, run_steps

ROUNDS = flags.DEFINE_integer("rounds", 30, "Pairs of windows, sampled and not.", lower_bound=2)
TRACED_STEPS = flags.DEFINE_integer("traced_steps", 20, "Steps under the profiler.", lower_bound=1)


def window_of(config: BenchmarkConfig, training: Training, steps: int) -> Window:
    """One timed window of the training."""
    timer = WindowTimer(devices.synchronize)
    with timer.window() as counted:
        run_steps(training.loop, steps, config.steps_per_loop)
        counted.add(steps, steps * config.global_batch_size)
    return timer.windows[0]


def observer_cost_percent(config: BenchmarkConfig, training: Training) -> tuple[float, float, float]:
    """Mean and 95 % interval of the time that sampling adds, over pairs of windows in alternating order."""
    visible, costs = this_machine().gpus[: config.gpus], []
    for pair in range(ROUNDS.value):
        seconds = {}
        for sampled in (True, False) if pair % 2 else (False, True):
            if sampled:
                with telemetry.Sampler(visible):
                    seconds[sampled] = window_of(config, training, config.steps_of_windows[0]).seconds
            else:
                seconds[sampled] = window_of(config, training, config.steps_of_windows[0]).seconds
        costs.append(100 * (seconds[True] / seconds[False] - 1))
    return stdlib_statistics.fmean(costs), *statistics.mean_interval(costs)


def traced_ratio(config: BenchmarkConfig, training: Training, folder: pathlib.Path) -> float:
    """Seconds of a window by tfbench's clock ÷ from the first to the last device event of the same steps."""
    import tensorflow as tf

    tf.profiler.experimental.start(str(folder))
    window = window_of(config, training, TRACED_STEPS.value)
    tf.profiler.experimental.stop()
    return window.seconds / device_trace.busy_span_s(folder)


def main(argv: list[str]) -> int:
    """Run, check, print, and write measurement_truth.csv into the results folder."""
    study.refuse_flags_of_runs()
    display, found = Display(), {}
    config, _ = complete(choices_from_flags(), this_machine())

    def check(training: Training, observed: Observed) -> None:
        counter_j, integrated_j = telemetry.energies_j(observed.telemetry, observed.windows)
        found["energy counter ÷ integrated power"] = (
            (counter_j / integrated_j, None, None) if counter_j and integrated_j else (None, None, None)
        )
        found["observer cost, percent"] = observer_cost_percent(config, training)
        ratio = traced_ratio(config, training, pathlib.Path(config.results_dir) / "trace")
        found["clock ÷ device trace"] = (ratio, None, None)

    record = run(config, display, afterwards=check)
    rows = [(name, *values) for name, values in found.items()]
    with open(pathlib.Path(config.results_dir) / "measurement_truth.csv", "w", newline="") as file:
        csv.writer(file).writerows([("check", "value", "low", "high"), *rows])
    display.table(
        f"checks of {record.run_id}",
        [
            (
                name,
                "" if value is None else f"{value:.4f}",
                "" if low is None else f"95 %: {low:.3f} to {high:.3f}",
            )
            for name, value, low, high in rows
        ],
    )
    return {"ok": 0, "interrupted": study.EXIT_INTERRUPTED}.get(record.status, 1)


if __name__ == "__main__":
    study.start(main)
