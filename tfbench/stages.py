"""The stages of a run, in their order; `tfbench.runner` strings them together."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tfbench import devices, summary
from tfbench.config import BenchmarkConfig
from tfbench.curves import Curves
from tfbench.data import Input, open_input
from tfbench.display import Display, StepProgress
from tfbench.hardware import environment, gpus
from tfbench.journal import Journal, Observed
from tfbench.measure import statistics
from tfbench.measure.telemetry import preexisting_load
from tfbench.measure.timing import WindowTimer
from tfbench.models import MODELS
from tfbench.records import RunRecord, baseline_command

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Training:
    """What trains: made by `build`."""

    strategy: Any  # tf.distribute.Strategy
    step: Any  # step.TrainStep
    source: Input
    loop: Any  # step.HostLoop over step and source


def look_around(
    config: BenchmarkConfig, journal: Journal, observed: Observed, display: Display
) -> list[gpus.Gpu]:
    """The machine as it is before TensorFlow touches it; returns the GPUs of the run."""
    description = environment.describe()
    journal.write_system(description)
    observed.facts |= {
        "host": description["hostname"],
        "python": description["python"],
        "tensorflow": description["packages"]["tensorflow"],
        "keras": description["packages"]["keras"],
    }
    probe = gpus.probe()
    visible = list(probe.gpus[: config.gpus])
    if visible:
        capability = visible[0].compute_capability
        observed.facts |= {
            "gpu_name": visible[0].name,
            "compute_capability": ".".join(map(str, capability)) if capability else None,
            "driver": probe.driver,
        }
        observed.warnings += preexisting_load(visible)
    for sentence in observed.warnings:
        display.warn(sentence)
    return visible


def announcement(config: BenchmarkConfig, names: list[str], visible: list[gpus.Gpu]) -> str:
    """What is about to run, with the batch in all its sizes."""
    where = f"{len(visible)} × {visible[0].name}" if visible else f"the CPU as {len(names)} replica(s)"
    accumulated = f" × {config.accumulate} micro-batches" if config.accumulate > 1 else ""
    return (
        f"{config.model} on {where}: {config.precision}, XLA {'on' if config.xla else 'off'}, data "
        f"{config.data}; batch {config.per_replica_batch_size} a replica{accumulated} × "
        f"{config.num_replicas} = {config.global_batch_size}. The first step compiles and takes longest."
    )


def build(config: BenchmarkConfig, strategy: Any, observed: Observed) -> Training:
    """Model, step and input in the strategy's scope."""
    import keras

    from tfbench.step import HostLoop, TrainStep

    keras.utils.set_random_seed(config.seed)
    spec = MODELS[config.model]
    with strategy.scope():
        model = spec.build(config)
        step = TrainStep(model, spec, config)
    observed.facts |= devices.library_versions() | {
        "strategy": type(strategy).__name__,
        "num_params": step.num_params,
    }
    source = open_input(config, spec, strategy)
    return Training(strategy, step, source, HostLoop(strategy, step, source.next))


def warm_up(
    config: BenchmarkConfig,
    training: Training,
    observed: Observed,
    progress: StepProgress,
    build_start_s: float,
) -> None:
    """The first step, which compiles, and the other untimed ones; then the memory's peak starts anew."""
    observed.weights_before = training.step.fingerprint()
    call_start_s = time.monotonic()
    first = training.loop(1)
    loss = float(first.loss_last)
    end_s = time.monotonic()
    observed.facts |= {"time_to_first_step_s": end_s - build_start_s}
    observed.first_call_s = end_s - call_start_s
    observed.steps_run = 1
    progress.advance(1, "warm-up", f"loss {loss:.4f}")
    _run_steps(config, training, config.warmup_steps - 1, observed)
    devices.synchronize()
    progress.advance(config.warmup_steps - 1, "warm-up")
    devices.reset_peak_memory(config.gpus)


def measure(
    config: BenchmarkConfig, training: Training, observed: Observed, progress: StepProgress, curves: Curves
) -> None:
    """The timed windows. Whatever is read, written or shown happens between them.

    Raises:
        RuntimeError: the step was traced again inside a window.
    """
    timer = WindowTimer(devices.synchronize)
    observed.windows = timer.windows
    traces = training.loop.num_traces
    for steps in config.steps_of_windows:
        before = observed.steps_run
        with timer.window() as counted:
            totals = _run_steps(config, training, steps, observed)
            done = observed.steps_run - before
            counted.add(done, done * config.global_batch_size)
        observed.losses.append(sum(float(each.loss_sum) for each in totals) / done)
        right = sum(float(each.correct) for each in totals)
        observed.accuracies.append(right / sum(float(each.predictions) for each in totals))
        rate = statistics.samples_per_sec(timer.windows)
        figures = f"{rate:,.1f} samples/s  loss {observed.losses[-1]:.4f}"
        progress.advance(done, "measuring", figures)
        curves.add(observed)
    observed.retraces = training.loop.num_traces - traces
    observed.facts["peak_memory_gib"] = devices.peak_memory_gib(config.gpus)
    if observed.retraces:
        raise RuntimeError("the step was traced again inside a timed window: its time holds a compilation")


def _run_steps(config: BenchmarkConfig, training: Training, steps: int, observed: Observed) -> list[Any]:
    """`steps` updates in calls of steps_per_loop; their totals, still on the device."""
    totals = []
    while steps:
        chunk = min(steps, config.steps_per_loop)
        totals.append(training.loop(chunk))
        observed.steps_run += chunk
        steps -= chunk
    return totals


def look_at_state(training: Training, observed: Observed) -> None:
    """What the updates did to the weights and to the step's own counters."""
    step = training.step
    after = step.fingerprint()
    observed.iterations = int(step.iterations.numpy())
    observed.weights_changed = bool((after != observed.weights_before).any())
    observed.facts |= {
        "steps_skipped": int(step.skipped.numpy()),
        "loss_scale_final": float(step.loss_scale.numpy()) if step.scales_loss else None,
        "weights_finite": bool(after.sum() - after.sum() == 0),
    }


def look_at_host(observed: Observed) -> None:
    """The process's own memory; most of the input pipeline's is in it."""
    observed.facts["host_rss_gib"] = psutil.Process().memory_info().rss / GIB


def measure_input_wait(
    config: BenchmarkConfig, training: Training, observed: Observed, display: Display
) -> None:
    """Share of a step that waits for input: one more window's steps on a batch that stays on the device.

    Synthetic data is such a batch already and waits for nothing.
    """
    from tfbench.step import HostLoop

    if training.source.resident:
        observed.facts["input_wait_fraction"] = 0.0
        return
    display.say("The same steps without input, to see how long a step waits for it.")
    batch = training.source.next()
    resident = dataclasses.replace(training, loop=HostLoop(training.strategy, training.step, lambda: batch))
    unseen = Observed()
    _run_steps(config, resident, config.steps_per_loop, unseen)  # traces the loop; compiles nothing anew
    timer = WindowTimer(devices.synchronize)
    with timer.window() as counted:
        _run_steps(config, resident, config.steps_of_windows[0], unseen)
        counted.add(config.steps_of_windows[0], config.steps_of_windows[0] * config.global_batch_size)
    with_input_ms = statistics.step_time_ms(observed.windows).mean
    without_ms = statistics.step_time_ms(timer.windows).mean
    observed.facts["input_wait_fraction"] = max(1 - without_ms / with_input_ms, 0.0)


def profile(config: BenchmarkConfig, training: Training, observed: Observed, folder: Path) -> None:
    """Trace some steps for TensorBoard's profiler: after the windows, because tracing slows the step."""
    if not config.profile_steps:
        return
    with _profiler(folder, observed):
        training.loop(config.profile_steps)
        devices.synchronize()


@contextlib.contextmanager
def _profiler(folder: Path, observed: Observed) -> Iterator[None]:
    """A trace of the block; a profiler that fails costs the trace, not the run."""
    import tensorflow as tf

    try:
        tf.profiler.experimental.start(str(folder))
        yield
        tf.profiler.experimental.stop()
    except tf.errors.OpError as error:
        observed.warnings.append(
            f"no profile: {error.message} (reading GPU counters may need root or the driver option "
            "NVreg_RestrictProfilingToAdminUsers=0)"
        )


def show(record: RunRecord, journal: Journal, display: Display) -> None:
    """The table, and where to look next."""
    if record.samples_per_sec is not None:
        display.table(f"{record.model}, {record.status}", summary.table(record))
    display.say(f"row: {journal.rows_path}   run: {journal.folder}")
    if journal.config.tensorboard and record.windows:
        display.say(f"curves: tensorboard --logdir {journal.config.results_dir}")
    if record.status == "ok" and record.num_gpus and record.num_gpus > 1 and not record.baseline_run_id:
        display.say(f"scaling efficiency needs a baseline: {baseline_command(record)}")
