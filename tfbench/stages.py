"""The stages of a run, in their order; `tfbench.runner` strings them together."""

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tfbench import devices, outcome, records, summary
from tfbench.compile_cache import CompileCache, open_cache
from tfbench.config import BenchmarkConfig
from tfbench.curves import Curves
from tfbench.data import open_input
from tfbench.display import Display, StepProgress
from tfbench.hardware import environment, gpus, topology
from tfbench.journal import Journal, Observed
from tfbench.measure import statistics
from tfbench.measure.card_watch import CardWatch
from tfbench.measure.telemetry import preexisting_load
from tfbench.measure.timing import WindowTimer
from tfbench.models import MODELS
from tfbench.records import RunRecord, baseline_command
from tfbench.training import Training, run_steps


def look_around(
    config: BenchmarkConfig, journal: Journal, observed: Observed, display: Display
) -> list[gpus.Gpu]:
    """The machine as it is before TensorFlow touches it; returns the GPUs of the run."""
    description = environment.describe()
    journal.write_system(description)
    observed.packages = description["packages"]
    observed.facts |= {
        "host": description["hostname"],
        "python": description["python"],
        "tensorflow": description["packages"]["tensorflow"],
        "keras": description["packages"]["keras"],
        "parallel_runs": environment.parallel_runs(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "environment": environment.settings(),
    }
    probe = gpus.probe()
    visible = list(probe.gpus[: config.gpus])
    if visible:
        capability = visible[0].compute_capability
        observed.facts |= {
            "gpu_name": visible[0].name,
            "compute_capability": ".".join(map(str, capability)) if capability else None,
            "driver": probe.driver,
            "gpu_indices": ",".join(f"{gpu.index}" for gpu in visible),
            "gpu_uuids": ",".join(gpu.uuid or "" for gpu in visible),
            "topology": topology.topology(visible),
        }
        load = preexisting_load(visible)
        observed.warnings += load
        observed.other_process_on_gpu = bool(load)
        observed.cards = CardWatch(visible)
    for sentence in observed.warnings:
        display.warn(sentence)
    return visible


def open_compile_cache(config: BenchmarkConfig, observed: Observed) -> CompileCache | None:
    """Before TensorFlow starts: where it finds and leaves compiled programs."""
    parts = ("gpu_name", "compute_capability", "driver")
    return open_cache(config, {name: observed.facts.get(name) for name in parts} | observed.packages)


def announcement(config: BenchmarkConfig, names: list[str], visible: list[gpus.Gpu]) -> str:
    """What is about to run, with the batch in all its sizes."""
    where = f"{len(visible)} × {visible[0].name}" if visible else f"the CPU as {len(names)} replica(s)"
    accumulated = f" × {config.accumulate} micro-batches" if config.accumulate > 1 else ""
    return (
        f"{config.model} on {where}: {config.precision}, XLA {'on' if config.xla else 'off'}, data "
        f"{config.data}; batch {config.per_replica_batch_size} a replica{accumulated} × "
        f"{config.num_replicas} = {config.global_batch_size}. The first step compiles and takes longest."
    )


def measure_ceiling(
    config: BenchmarkConfig, visible: list[gpus.Gpu], observed: Observed, display: Display
) -> None:
    """The matrix rate of this very card, for the share of it that the training reaches; seconds, once.

    After the training's programs are compiled: TensorFlow numbers its functions in the order of their
    tracing, the numbers are part of the programs' keys in the compile cache, and only some runs measure.
    """
    from tfbench import ceilings

    if not visible:
        return
    versions = {name: observed.facts[name] for name in ("driver", "tensorflow")}
    try:
        observed.matrix_flops = ceilings.matrix_flops(visible[0], config.precision, versions)
    except Exception as error:
        if outcome.classify(error)[0] != "oom":
            raise
        display.warn("the card's matrix rate is not measured: the training leaves no memory for it")
        return
    display.say(f"matrix product here: {observed.matrix_flops / 1e12:,.0f} TFLOP/s at {config.precision}")


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
    return Training(strategy, step, source, HostLoop(strategy, step, source.next, config.steps_per_loop))


def warm_up(
    config: BenchmarkConfig,
    training: Training,
    observed: Observed,
    progress: StepProgress,
    build_start_s: float,
) -> None:
    """The first step, which compiles, and the other untimed ones; then the memory's peak starts anew."""
    steps = config.untimed_steps
    observed.facts["warmup_steps"] = steps
    observed.weights_before = training.step.fingerprints()
    call_start_s = time.monotonic()
    with _without_garbage_collection():
        first = training.loop.first_step()
        loss = float(first.loss_last)
        end_s = time.monotonic()
        training.loop.trace()
    observed.facts |= {"time_to_first_step_s": end_s - build_start_s}
    observed.first_call_s = end_s - call_start_s
    observed.steps_run = 1
    progress.advance(1, "warm-up", f"loss {loss:.4f}")
    run_steps(training.loop, steps - 1, config.steps_per_loop)
    observed.steps_run = steps
    devices.synchronize()
    observed.iterations_before = int(training.step.iterations.numpy())
    progress.advance(steps - 1, "warm-up")
    devices.reset_peak_memory(config.gpus)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Tracing makes a million objects that stay: to look through them again and again was a tenth of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def measure(
    config: BenchmarkConfig, training: Training, observed: Observed, progress: StepProgress, curves: Curves
) -> None:
    """The timed windows. Whatever is read, written or shown happens between them.

    Raises:
        RuntimeError: the step was traced again inside a window.
    """
    timer = WindowTimer(devices.synchronize)
    traces = training.loop.num_traces
    for steps in _steps_of_windows(config, observed, progress):
        with timer.window() as counted:
            totals = run_steps(training.loop, steps, config.steps_per_loop)
            counted.add(steps, steps * config.global_batch_size)
        observed.steps_run += steps
        loss = sum(float(each.loss_sum) for each in totals) / steps
        right = sum(float(each.correct) for each in totals)
        predictions = sum(float(each.predictions) for each in totals)
        observed.add_window(timer.windows[-1], loss, right / predictions if predictions else None)
        rate = statistics.samples_per_sec(observed.windows)
        figures = f"{rate:,.1f} samples/s  loss {observed.losses[-1]:.4f}"
        progress.advance(steps, "measuring", figures)
        curves.add(observed)
    if observed.cards is not None:
        observed.cards.look_again()
    observed.retraces = training.loop.num_traces - traces
    observed.facts["peak_memory_gib"] = devices.peak_memory_gib(config.gpus)
    if observed.retraces:
        raise RuntimeError("the step was traced again inside a timed window: its time holds a compilation")


def _steps_of_windows(config: BenchmarkConfig, observed: Observed, progress: StepProgress) -> Iterator[int]:
    """The windows asked for, then more of them until the rate is known as well as asked for."""
    yield from config.steps_of_windows
    steps = config.steps_of_windows[-1]
    while config.target_interval_percent and len(observed.windows) < config.most_windows:
        interval = statistics.rate_interval(observed.windows)
        rate = statistics.samples_per_sec(observed.windows)
        if (
            interval
            and max(interval[1] - rate, rate - interval[0]) <= config.target_interval_percent / 100 * rate
        ):
            return
        progress.extend(steps)
        yield steps


def announce_input(training: Training, display: Display) -> None:
    """What opening the input has decided."""
    for sentence in training.source.log.notes:
        display.say(sentence)


def look_at_input(training: Training, observed: Observed, display: Display) -> None:
    """What the input left out."""
    log = training.source.log
    observed.facts["records_skipped"] = log.records_skipped
    warning = log.warning()
    if warning:
        observed.warnings.append(warning)
        display.warn(warning)


def look_at_state(training: Training, observed: Observed) -> None:
    """What the updates did to the weights and to the step's own counters."""
    step = training.step
    after = step.fingerprints()
    observed.iterations = int(step.iterations.numpy())
    observed.weights_changed = bool((after != observed.weights_before).any())
    observed.replicas_agree = all(np.array_equal(each, after[0], equal_nan=True) for each in after)
    observed.facts |= {
        "steps_skipped": int(step.skipped.numpy()),
        "loss_scale_final": float(step.loss_scale.numpy()) if step.scales_loss else None,
        "weights_finite": bool(np.isfinite(after).all()),
    }


def look_at_host(observed: Observed) -> None:
    """The process's own memory; most of the input pipeline's is in it."""
    observed.facts["host_rss_gib"] = psutil.Process().memory_info().rss / gpus.GIB


def look_closer(config: BenchmarkConfig, training: Training, observed: Observed, display: Display) -> None:
    """Where a step's time goes: all of it with --diagnose, else only the wait for input."""
    from tfbench import diagnose

    if config.diagnose:
        observed.parts = diagnose.measure_parts(config, training, display)
        observed.facts["input_wait_fraction"] = observed.parts.share(observed.parts.input_wait)
    else:
        observed.facts["input_wait_fraction"] = diagnose.measure_input_wait(config, training, observed)


def profile(
    config: BenchmarkConfig, training: Training, observed: Observed, folder: Path, display: Display
) -> None:
    """Trace some steps for TensorBoard's profiler: after the windows, because tracing slows the step.

    A profiler that fails costs the trace, not the run.
    """
    if not config.profile_steps:
        return
    import tensorflow as tf

    try:
        tf.profiler.experimental.start(str(folder))
        for step in range(config.profile_steps):
            with tf.profiler.experimental.Trace("train", step_num=step, _r=1):  # the viewer's mark of a step
                training.loop(1)
        devices.synchronize()
        tf.profiler.experimental.stop()
    except tf.errors.OpError as error:
        observed.warnings.append(
            f"no profile: {error.message} (reading GPU counters may need root or the driver option "
            "NVreg_RestrictProfilingToAdminUsers=0)"
        )
        display.warn(observed.warnings[-1])


def show(record: RunRecord, observed: Observed, journal: Journal, display: Display) -> None:
    """The table, where the time goes, and where to look next."""
    for problem in observed.sensor_problems:
        display.warn(problem)
    if record.samples_per_sec is not None:
        display.table(f"{record.model}, {record.status}", summary.table(record))
    if observed.parts is not None:
        display.table(f"a step of {observed.parts.step.ms:.2f} ms", summary.parts_table(observed.parts))
        for finding in summary.findings(record, observed.parts):
            display.say(f"{finding.verdict}: {finding.because}. Next: {finding.next_step}.")
    if journal.unwritten:
        display.say(f"the row, as a results file:\n{records.as_csv(record)}")
    else:
        display.say(f"row: {journal.rows_path}   run: {journal.folder}")
    if journal.config.tensorboard and record.windows:
        display.say(f"curves: tensorboard --logdir {journal.config.results_dir}")
    if record.status == "ok" and record.num_gpus and record.num_gpus > 1 and not record.baseline_run_id:
        display.say(f"scaling efficiency needs a baseline: {baseline_command(record)}")
