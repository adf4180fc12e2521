"""From a configuration to the row of its input. TensorFlow is imported when something is measured."""

import dataclasses
import datetime
import gc
import os
import platform
import shlex
from pathlib import Path
from typing import Any

import psutil

from tfbench import devices, outcome, records
from tfbench.config import BenchmarkConfig
from tfbench.data import InputLog
from tfbench.display import Display, interval
from tfbench.flags import to_flags
from tfbench.hardware.gpus import Machine
from tfbench.inputbench import feeding, row
from tfbench.inputbench.drain import Drained, Plan
from tfbench.inputbench.feeding import GpuRate
from tfbench.journal import run_id

GIB = 2**30


@dataclasses.dataclass
class Seen:
    """What is known of the input so far."""

    log: InputLog
    gpu_rate: GpuRate | None = None
    tensorflow: str | None = None  # version
    bytes_per_sample: float = 0.0
    whole: Drained | None = None
    host_rss_gib: float | None = None
    stages: dict[str, Drained] = dataclasses.field(default_factory=dict)  # each with all before it

    @property
    def all_stages(self) -> dict[str, Drained]:
        """The whole input is the last of them."""
        return self.stages | ({"to the replicas": self.whole} if self.whole else {})


def run(
    config: BenchmarkConfig, seconds: float, gpu_rate: float | None, machine: Machine, display: Display
) -> row.InputRow:
    """Measure, show, and write the row, whatever ends it.

    Args:
        config: complete and checked; its windows and warm-up steps apply, its steps do not.
        seconds: of the whole input's windows together, and of each stage's.
        gpu_rate: samples/s of one GPU; None: looked up in the results folder.
        machine: what is there.
        display: where to show it.

    Returns:
        The row as written.

    Raises:
        InputSchemaError: input.csv has other columns; nothing was measured.
        OSError: the results folder cannot be used.
    """
    started = datetime.datetime.now(datetime.UTC)
    path = Path(config.results_dir) / "input.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    row.check(path, row.InputRow)
    plan = Plan(seconds, config.windows, config.warmup_steps * config.global_batch_size)
    seen, status, note = Seen(InputLog(config.on_bad_record)), "ok", None
    try:
        seen.gpu_rate = _rate_of_a_gpu(config, gpu_rate, display)
        with devices.native_messages_to(path.with_suffix(".log")), seen.log.explained():
            _measure(config, plan, seen, display)
        _show(config, seen, machine, display)
    except (Exception, KeyboardInterrupt) as error:
        status, note = outcome.classify(error)
        outcome.log_traceback(error)
        display.error(note)
    # TensorFlow waits for ever for an input iterator that is still alive when the interpreter ends.
    gc.collect()
    asked = identity(config, machine, started, f"--seconds={seconds:g}")
    done = row.InputRow(status=status, note=note, **asked, **_figures(seen))
    row.append(path, done)
    display.say(f"row: {path}")
    return done


def _rate_of_a_gpu(config: BenchmarkConfig, given: float | None, display: Display) -> GpuRate | None:
    """What the user gave, or the newest run has; None where there is neither, which is said."""
    if given is not None:
        return GpuRate(given, "--gpu_rate")
    path = Path(config.results_dir) / "runs.csv"
    try:
        found = feeding.newest_rate(records.read(path) if path.exists() else [], config)
    except records.SchemaError as error:
        display.warn(f"{error}")
        found = None
    if found is None:
        size = f"image_size={config.image_size}" if config.image_size else f"seq_length={config.seq_length}"
        display.say(
            f"How many GPUs this feeds is left out: {path} has no good run of {config.model} on GPUs with "
            f"--data=synthetic --{size}. Give the samples/s of one GPU as --gpu_rate."
        )
    return found


def _measure(config: BenchmarkConfig, plan: Plan, seen: Seen, display: Display) -> None:
    """The whole input first, then its pipeline cut after each stage."""
    devices.set_environment(config)
    strategy = devices.build_strategy(devices.open_devices(config))
    import tensorflow as tf

    from tfbench.inputbench.pipeline import Pipeline

    seen.tensorflow = tf.__version__
    pipeline = Pipeline(config, seen.log)
    for note in seen.log.notes:
        display.say(note)
    display.say(f"measuring for {plan.seconds:g} s, and as long for each stage, after half of it to warm up")
    seen.bytes_per_sample = pipeline.bytes_per_sample
    seen.whole = pipeline.whole(strategy, plan)
    seen.host_rss_gib = psutil.Process().memory_info().rss / GIB
    gc.collect()  # a compiled loop and what it calls refer to each other: its pipeline ends here
    for name, drained in pipeline.stages(plan):
        seen.stages[name] = drained


def _show(config: BenchmarkConfig, seen: Seen, machine: Machine, display: Display) -> None:
    """The figures as tables, the answer and where to look next as sentences."""
    whole, warning = seen.whole, seen.log.warning()
    assert whole is not None
    if warning:
        display.warn(warning)
    costs = feeding.cost_of_each(seen.all_stages)
    lines = [_line(name, drained, costs[name]) for name, drained in seen.all_stages.items()]
    header = ("up to", "samples/s", "95 %", "cores busy", "CPU µs/sample", "of it this stage")
    display.grid(f"{config.data} for {config.model}", header, lines)
    read, batches = whole.read_bytes_per_sec, seen.bytes_per_sample * whole.samples_per_sec
    display.table(
        "the whole input",
        [
            ("samples per core", f"{1e6 / whole.cpu_us_per_sample:,.0f} /s", "of CPU time"),
            ("batches", f"{batches / 1e6:,.1f} MB/s", "to the replicas"),
            ("read", "" if read is None else f"{read / 1e6:,.1f} MB/s", "by read calls, cached files too"),
            ("busiest thread", _percent(whole.busiest_thread), "of a core"),
            ("memory", f"{seen.host_rss_gib:.2f} GiB", "of the process"),
        ],
    )
    if config.data_service:
        display.say(
            "No stages: the workers of the data service compute them, and their cores are not counted."
        )
    elif not seen.stages:
        display.say("No stages: this pipeline is built in a way that is not followed.")
    display.say(feeding.verdict(whole, machine.cpu_cores, seen.gpu_rate))
    display.say(feeding.limit(whole, seen.all_stages, machine.cpu_cores))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _line(name: str, drained: Drained, cost: float) -> tuple[str, ...]:
    """A line of the table of stages."""
    low, high = drained.interval
    return (
        name,
        f"{drained.samples_per_sec:,.0f}",
        interval(low, high),
        f"{drained.cores_busy:.2f}",
        f"{drained.cpu_us_per_sample:,.1f}",
        f"{cost:,.1f}",
    )


def _figures(seen: Seen) -> dict[str, Any]:
    """Columns of what was measured; empty where it was not."""
    if (whole := seen.whole) is None:
        return {"tensorflow": seen.tensorflow, "records_skipped": seen.log.records_skipped}
    low, high = whole.interval
    stages = (f"{n}={d.samples_per_sec:.6g} {d.cpu_us_per_sample:.4g}" for n, d in seen.all_stages.items())
    return {
        "tensorflow": seen.tensorflow,
        "windows": len(whole.windows),
        "seconds": whole.seconds,
        "samples_per_sec": whole.samples_per_sec,
        "samples_per_sec_low": low,
        "samples_per_sec_high": high,
        "batch_bytes_per_sec": whole.samples_per_sec * seen.bytes_per_sample,
        "read_bytes_per_sec": whole.read_bytes_per_sec,
        "cores_busy": whole.cores_busy,
        "cores_busy_by_others": whole.cores_busy_by_others,
        "samples_per_core_per_sec": 1e6 / whole.cpu_us_per_sample,
        "host_rss_gib": seen.host_rss_gib,
        "records_skipped": seen.log.records_skipped,
        "stages": "|".join(stages),
        **(feeding.gpus_fed(whole, seen.gpu_rate) if seen.gpu_rate else {}),
    }


def identity(
    config: BenchmarkConfig, machine: Machine, started: datetime.datetime, *own_flags: str
) -> dict[str, Any]:
    """Columns of what was asked, and where.

    Args:
        config: of the run.
        machine: what is there.
        started: when.
        own_flags: of this command, besides those of the configuration.
    """
    same = ("tag", "model", "data", "cache", "image_size", "seq_length", "num_replicas")
    sizes = ("per_replica_batch_size", "global_batch_size")
    return {name: getattr(config, name) for name in (*same, *sizes)} | {
        "run_id": run_id(config, started, os.getpid()),
        "started_at": started.isoformat(timespec="milliseconds"),
        "num_gpus": config.gpus,
        "gpu_name": machine.gpus[0].name if config.gpus else None,
        "cpu_cores": machine.cpu_cores,
        "host": platform.node(),
        "flags": shlex.join([*to_flags(config), *own_flags]),
    }
