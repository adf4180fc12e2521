"""`python -m tfbench.train` as its users run it: good runs, runs that end early, and input that cannot be."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from absl.testing import flagsaver
from run_helpers import (
    DEADLINE_S,
    environment,
    environment_without_tensorflow,
    only_row,
    python,
    run_folder,
    train,
)

from tfbench import records, runner
from tfbench import train as command
from tfbench.config import ConfigError
from tfbench.records import RunRecord

GPU_COLUMNS = {
    "samples_per_sec_per_gpu", "tflops_per_gpu", "mfu", "mfu_achievable", "weak_scaling_efficiency",
    "weak_scaling_efficiency_low", "weak_scaling_efficiency_high", "strong_scaling_efficiency",
    "strong_scaling_efficiency_low", "strong_scaling_efficiency_high", "baseline_run_id", "gpu_util_mean",
    "gpu_util_max", "tensor_active",
    "dram_active", "power_w_mean", "energy_j_per_sample", "energy_source", "sm_clock_mhz_mean",
    "temperature_c_max", "throttle_reasons", "peak_memory_gib", "gpu_name", "compute_capability", "driver",
    "cuda", "cudnn", "nccl",
}  # fmt: skip
# Of DESIGN's columns those that a good run of an image model on the CPU has.
FILLED = {
    "run_id", "run_key", "started_at", "schema_version", "tfbench_version", "tag", "status", "model",
    "num_params", "data", "precision", "xla", "strategy", "scaling_mode", "num_workers", "num_gpus",
    "num_replicas", "per_replica_batch_size", "requested_per_replica_batch_size", "global_batch_size",
    "accumulate", "image_size", "optimizer", "steps_per_loop", "warmup_steps", "measured_steps", "windows",
    "samples_per_sec", "samples_per_sec_low", "samples_per_sec_high", "step_time_ms_mean", "step_time_ms_p50",
    "step_time_ms_p90", "step_time_ms_p99", "compile_time_s", "time_to_first_step_s", "flops_per_sample",
    "host_rss_gib", "input_wait_fraction", "loss_first", "loss_last", "steps_skipped", "loss_scale_final",
    "weights_finite", "tensorflow", "keras", "python", "host", "flags",
}  # fmt: skip


def windows_of(folder: Path) -> list[dict[str, float]]:
    """windows.csv as numbers."""
    with open(folder / "windows.csv", newline="") as file:
        return [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


# ---------------------------------------------------------------------------------------- a good run

GOOD = (
    "--model=resnet_tiny", "--data=digits", "--image_size=16", "--gpus=0", "--cpu_replicas=2",
    "--precision=mixed_float16", "--per_replica_batch_size=8", "--steps=18", "--warmup_steps=3",
    "--windows=4", "--steps_per_loop=2", "--deterministic", "--profile_steps=2", "--tag=it's [1/2] of 100 %",
    "--results_dir=out",
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The process of a good run and its results folder."""
    folder = tmp_path_factory.mktemp("good")
    done = train(*GOOD, cwd=folder, env=environment() | {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=true"})
    assert done.returncode == 0, output_of(done)
    return done, folder / "out"


@pytest.mark.slow
class TestGoodRun:
    def test_row_says_what_ran(self, good):
        row = only_row(good[1])
        expected = {
            "status": "ok",
            "model": "resnet_tiny",
            "data": "digits",
            "precision": "mixed_float16",
            "xla": False,
            "strategy": "MirroredStrategy",
            "num_gpus": 0,
            "num_replicas": 2,
            "per_replica_batch_size": 8,
            "global_batch_size": 16,
            "image_size": 16,
            "warmup_steps": 3,
            "measured_steps": 18,
            "windows": 4,
            "steps_skipped": 0,
            "weights_finite": True,
            "loss_scale_final": 32768.0,
            "tag": "it's [1/2] of 100 %",
            "schema_version": records.SCHEMA_VERSION,
            # The user's own, not what the run sets for itself.
            "environment": "XLA_FLAGS=--xla_cpu_use_fusion_emitters=true",
        }
        assert {name: getattr(row, name) for name in expected} == expected
        # Few steps on a busy machine may differ in speed; nothing else may be doubtful.
        assert set((row.gates or "").split("|")) <= {"", "time_not_linear_in_steps"}

    def test_row_is_complete(self, good):
        row = only_row(good[1])
        assert {name for name in FILLED if getattr(row, name) is None} == set()

    def test_gpu_columns_are_empty(self, good):
        row = only_row(good[1])
        assert {name for name in GPU_COLUMNS if getattr(row, name) is not None} == set()

    def test_loss_falls(self, good):
        row = only_row(good[1])
        assert row.loss_last < row.loss_first - 0.5
        assert row.accuracy_last > row.accuracy_first

    def test_folder_holds_everything(self, good):
        names = {path.name for path in run_folder(good[1]).iterdir()}
        assert names >= {"flags.txt", "windows.csv", "telemetry.csv", "system.json", "train.log"}
        assert any(name.startswith("events.out.tfevents") for name in names)
        assert {path.name for path in good[1].iterdir()} == {"runs.csv", only_row(good[1]).run_id}

    def test_windows_sum_to_the_row(self, good):
        row, windows = only_row(good[1]), windows_of(run_folder(good[1]))
        assert [window["steps"] for window in windows] == [5, 5, 4, 4]
        assert [window["samples"] for window in windows] == [80, 80, 64, 64]
        seconds = sum(window["seconds"] for window in windows)
        assert row.samples_per_sec == pytest.approx(288 / seconds, rel=1e-9)
        assert row.step_time_ms_mean == pytest.approx(1000 * seconds / 18, rel=1e-9)
        assert (row.loss_first, row.loss_last) == (windows[0]["loss"], windows[-1]["loss"])

    def test_telemetry_without_a_gpu_is_a_header(self, good):
        (header,) = (run_folder(good[1]) / "telemetry.csv").read_text().splitlines()
        assert header.startswith("t_s,gpu,utilization_percent")

    def test_system_is_described(self, good):
        system = json.loads((run_folder(good[1]) / "system.json").read_text())
        row = only_row(good[1])
        assert system["packages"]["tensorflow"] == row.tensorflow
        assert (system["hostname"], system["python"]) == (row.host, row.python)
        assert system["gpus"] == []

    def test_curves_have_a_point_for_each_window(self, good):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray

        events = EventAccumulator(str(run_folder(good[1])))
        events.Reload()
        windows = windows_of(run_folder(good[1]))
        for tag, column in (
            ("train/loss", "loss"),
            ("throughput/samples_per_sec", "samples_per_sec"),
            ("throughput/step_time_ms", "step_time_ms"),
        ):
            points = events.Tensors(tag)
            assert [point.step for point in points] == [3 + 5, 3 + 10, 3 + 14, 3 + 18]
            values = [float(make_ndarray(point.tensor_proto)) for point in points]
            assert values == pytest.approx([window[column] for window in windows], rel=1e-6)
        assert len(events.Tensors("train/accuracy")) == 4
        assert not [tag for tag in events.Tags()["tensors"] if tag.startswith("gpu/")]

    def test_profile_is_there(self, good):
        (trace,) = run_folder(good[1]).glob("plugins/profile/*/*.xplane.pb")
        assert trace.stat().st_size > 0

    def test_output_is_plain_lines_and_a_table(self, good):
        stdout = good[0].stdout
        assert "\x1b" not in stdout
        lines = stdout.splitlines()
        steps = [line.partition("  ")[0] for line in lines if line.startswith("step ")]
        assert steps == ["step 1/21", "step 3/21", "step 8/21", "step 13/21", "step 17/21", "step 21/21"]
        assert "batch 8 a replica × 2 = 16" in stdout
        for cell in ("resnet_tiny, ok", "samples/s", "step time", "host memory", "waiting for input", "loss"):
            assert cell in stdout
        for gpu_cell in ("MFU", "utilisation", "GiB per GPU", "efficiency"):
            assert gpu_cell not in stdout
        assert f"row: out/runs.csv   run: out/{only_row(good[1]).run_id}" in stdout

    def test_log_holds_the_run(self, good):
        log = (run_folder(good[1]) / "train.log").read_text()
        assert "INFO step 21/21  measuring" in log
        assert "INFO row written: ok" in log
        assert good[0].stderr == ""  # TensorFlow's greetings are in the log, not on the terminal

    def test_flagfile_of_a_deterministic_run_repeats_it_to_the_last_digit(self, good, tmp_path):
        flagfile = run_folder(good[1]) / "flags.txt"
        done = train(
            f"--flagfile={flagfile}",
            "--results_dir=again",
            "--profile_steps=0",
            "--notensorboard",
            cwd=tmp_path,
        )
        assert done.returncode == 0, output_of(done)
        first, again = only_row(good[1]), only_row(tmp_path / "again")
        assert again.run_key == first.run_key
        assert again.run_id != first.run_id
        assert (again.tag, again.data, again.precision) == (first.tag, first.data, first.precision)
        losses = [
            [window["loss"] for window in windows_of(run_folder(folder))]
            for folder in (good[1], tmp_path / "again")
        ]
        assert losses[0] == losses[1]
        assert not list(run_folder(tmp_path / "again").glob("events.*"))


# ------------------------------------------------------------------------------- runs that end early


def started(folder, flags):
    """A training in `folder`, with what it shows as its `stdout`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tfbench.train", *flags],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A job in the background of a script ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A long run of BERT on text that gets Ctrl-C after two windows: exit code, output and results folder."""
    folder = tmp_path_factory.mktemp("stopped")
    flags = (
        "--model=bert_tiny", "--data=pydoc", "--gpus=0", "--seq_length=16", "--per_replica_batch_size=4",
        "--steps=1000000", "--windows=200000", "--warmup_steps=2", "--results_dir=out",
    )  # fmt: skip
    process = started(folder, flags)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "measuring" in line and "step 12/" in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, "".join(lines) + rest, folder / "out"


@pytest.mark.slow
def test_sigterm_to_repeats_alone_ends_the_run_and_the_series(tmp_path):
    flags = (
        "--repeats=3", "--model=resnet_tiny", "--gpus=0", "--image_size=8", "--per_replica_batch_size=4",
        "--steps=1000000", "--windows=200000", "--warmup_steps=2", "--results_dir=out",
    )  # fmt: skip
    process = started(tmp_path, flags)
    output = ""
    for line in process.stdout:
        output += line
        if "measuring" in line:
            break
    process.send_signal(signal.SIGTERM)  # the child is not in the way of this one
    rest, _ = process.communicate(timeout=DEADLINE_S)
    output += rest
    assert process.returncode == 130, output
    assert only_row(tmp_path / "out").status == "interrupted"
    assert "run 2 of 3" not in output


@pytest.mark.slow
class TestCtrlC:
    def test_exit_code_is_the_shells(self, stopped):
        assert stopped[0] == 130, stopped[1]

    def test_one_sentence_and_no_traceback(self, stopped):
        assert stopped[1].count("error: stopped by the user") == 1
        assert "Traceback" not in stopped[1]

    def test_row_has_the_windows_so_far(self, stopped):
        row, windows = only_row(stopped[2]), windows_of(run_folder(stopped[2]))
        assert (row.status, row.note) == ("interrupted", "stopped by the user")
        assert len(windows) >= 2
        assert row.windows == len(windows)
        assert row.measured_steps == sum(window["steps"] for window in windows) == 5 * len(windows)
        assert row.samples_per_sec == pytest.approx(
            row.measured_steps * 4 / sum(window["seconds"] for window in windows), rel=1e-9
        )
        assert row.loss_last == windows[-1]["loss"]

    def test_table_shows_them(self, stopped):
        assert "bert_tiny, interrupted" in stopped[1]
        assert "samples/s" in stopped[1]


# Several runs in one process, each of which something ends. Prints {name: {"status", "output"}}.
ENDINGS = """
import contextlib, dataclasses, io, itertools, json
from pathlib import Path
from unittest import mock

import tensorflow as tf
from rich.console import Console

from tfbench import devices, journal, records, runner, stages, step
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.data import DATASETS, synthetic_batch
from tfbench.display import Display

SMALL = dict(
    model="resnet_tiny", image_size=8, per_replica_batch_size=2, cpu_replicas=2, steps=20, warmup_steps=2,
    windows=5, steps_per_loop=2, learning_rate=0.001, tensorboard=False,
)
ends = {}

def run(name, *patches, **choices):
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        config = BenchmarkConfig(**SMALL | choices | {"results_dir": name})
        try:
            status = runner.run(config, Display(Console(file=output, width=300))).status
        except ConfigError as error:
            status = f"{error}"
    ends[name] = {"status": status, "output": output.getvalue()}

def twelve_steps_of_data(config, spec, shard):
    # Two replicas × (3 untimed steps + 2 windows of 4 + half of the third).
    return tf.data.Dataset.from_tensors(synthetic_batch(config, spec, 0)).repeat(2 * (3 + 4 + 4 + 2))

DATASETS["short"] = dataclasses.replace(DATASETS["synthetic"], name="short", make=twelve_steps_of_data)
run("short_data", data="short")

# 2^127, halved at each of the 23 steps, is far above what float16 holds at every one.
run("no_update", precision="mixed_float16", initial_loss_scale=2.0**127, cpu_replicas=1)

def overflow(config, training, *others, measure=stages.measure):
    assert training.step.iterations.numpy() == 2
    training.step.loss_scale.assign(2.0**127)
    measure(config, training, *others)

run(
    "no_update_in_windows", mock.patch.object(stages, "measure", overflow),
    precision="mixed_float16", cpu_replicas=1,
)

busy = tf.errors.UnavailableError(None, None, "another profiler is running")
run(
    "no_profile",
    mock.patch("tensorflow.profiler.experimental.start", side_effect=busy),
    profile_steps=2, cpu_replicas=1,
)

class CtrlC:
    def __float__(self):
        raise KeyboardInterrupt

real, calls = stages.run_steps, itertools.count()

def ctrl_c_after_the_third_window(*arguments):
    totals = real(*arguments)
    return [total._replace(correct=CtrlC()) for total in totals] if next(calls) == 3 else totals

run("half_a_window", mock.patch.object(stages, "run_steps", ctrl_c_after_the_third_window), cpu_replicas=1)

traces = mock.PropertyMock(side_effect=itertools.count())
run("retraced", mock.patch.object(step.HostLoop, "num_traces", traces), cpu_replicas=1)

full = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor by allocator GPU_0_bfc")
run("oom", mock.patch.object(stages, "build", side_effect=full))

log_to = journal._log_to
run(
    "full_disk",
    mock.patch.object(records, "append", side_effect=OSError(28, "No space left on device")),
    mock.patch.object(journal, "_log_to", lambda path: log_to(Path("/dev/full"))),
    cpu_replicas=1,
)

# More than TensorFlow sees, asked for in code, where no flag is checked against the driver.
run("too_many_gpus", cpu_replicas=1, gpus=2)

def fails(a, b):
    raise tf.errors.InternalError(None, None, "no kernel image is available")

devices.check_devices(["CPU:0", "CPU:1"], xla=False)
for name, product in {"broken": fails, "wrong": tf.add}.items():
    with mock.patch.object(tf, "matmul", product):
        try:
            devices.check_devices(["CPU:1"], xla=False)
        except devices.DeviceError as error:
            ends[name] = {"output": str(error)}
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """How each run of ENDINGS ended, and the folder of their results folders."""
    folder = tmp_path_factory.mktemp("endings")
    done = python("-c", ENDINGS, cwd=folder)
    assert done.returncode == 0, output_of(done)
    return json.loads(done.stdout.splitlines()[-1]), folder


@pytest.mark.slow
class TestEndings:
    @pytest.mark.parametrize(
        ("name", "status"),
        [
            ("short_data", "short_data"),
            ("no_update", "no_update"),
            ("no_update_in_windows", "no_update"),
            ("no_profile", "ok"),
            ("half_a_window", "interrupted"),
            ("retraced", "failed"),
            ("oom", "oom"),
            ("too_many_gpus", "failed"),
        ],
    )
    def test_status_is_returned_and_written(self, endings, name, status):
        results, folder = endings
        assert results[name]["status"] == status, results[name]["output"]
        row = only_row(folder / name)
        assert row.status == status
        assert row.flags.startswith("--model=resnet_tiny")
        assert row.host_rss_gib > 0
        assert (run_folder(folder / name) / "windows.csv").exists()

    @pytest.mark.parametrize(
        ("name", "whole_windows"), [("short_data", 2), ("half_a_window", 2), ("oom", 0), ("no_profile", 5)]
    )
    def test_windows_so_far_are_kept_and_only_whole_ones(self, endings, name, whole_windows):
        row, windows = only_row(endings[1] / name), windows_of(run_folder(endings[1] / name))
        assert len(windows) == whole_windows
        if whole_windows:
            assert (row.windows, row.measured_steps) == (whole_windows, 4 * whole_windows)
            assert row.samples_per_sec > 0
        else:
            assert (row.windows, row.measured_steps, row.samples_per_sec) == (None, None, None)

    def test_no_step_was_finite(self, endings):
        row = only_row(endings[1] / "no_update")
        assert row.steps_skipped == 23
        assert row.loss_scale_final == 2.0 ** (127 - 23)
        assert row.weights_finite is True
        assert "weights_unchanged" in row.gates.split("|")
        assert "steps skipped" in endings[0]["no_update"]["output"]

    def test_failed_profiler_is_a_warning_with_the_hint(self, endings):
        row = only_row(endings[1] / "no_profile")
        assert "no profile: another profiler is running" in row.note
        assert "NVreg_RestrictProfilingToAdminUsers" in row.note
        assert "warning: no profile: another profiler is running" in endings[0]["no_profile"]["output"]

    def test_retrace_inside_a_window_fails_the_run(self, endings):
        row = only_row(endings[1] / "retraced")
        assert "traced again inside a timed window" in row.note
        assert "retrace_in_window" in row.gates.split("|")

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("short_data", "error: the data ended before the steps did"),
            (
                "oom",
                "error: out of GPU memory; a smaller --per_replica_batch_size may fit: OOM when allocating",
            ),
            ("too_many_gpus", "--gpus=2: TensorFlow sees 0"),
            ("half_a_window", "error: stopped by the user"),
        ],
    )
    def test_user_is_told_why(self, endings, name, words):
        output = endings[0][name]["output"]
        assert output.count(words) == 1
        assert "Traceback" not in output

    def test_a_warm_up_without_a_row_of_steps_is_longer_and_the_row_says_so(self, endings):
        assert only_row(endings[1] / "no_profile").warmup_steps == 3
        assert "step 23/23  measuring" in endings[0]["no_profile"]["output"]

    def test_a_full_disk_does_not_cost_the_result(self, endings, tmp_path):
        full = "[Errno 28] No space left on device"
        ended = endings[0]["full_disk"]
        assert ended["status"] == f"--results_dir=full_disk: not written: runs.csv: {full}; train.log: {full}"
        table, _, row = ended["output"].partition("the row, as a results file:\n")
        assert "resnet_tiny, ok" in table
        (tmp_path / "runs.csv").write_text(row.rstrip("\n") + "\n")
        assert only_row(tmp_path).status == "ok"
        assert only_row(tmp_path).samples_per_sec > 0

    def test_traceback_is_in_the_log(self, endings):
        log = (run_folder(endings[1] / "oom") / "train.log").read_text()
        assert "Traceback" in log
        assert "ResourceExhaustedError" in log

    def test_device_that_cannot_compute_is_named(self, endings):
        messages = [endings[0][name]["output"] for name in ("broken", "wrong")]
        assert messages[0].startswith("CPU:1 cannot multiply two matrices: no kernel image is available")
        assert messages[1] == "CPU:1 multiplies wrongly: 64 ones times 64 ones gave 2.0"


# ------------------------------------------------------------------------------------------ learning

# Every model on every number of replicas in one process. Prints [[model, replicas, {column: value}], …].
LEARNING = """
import dataclasses, io, json
from unittest import mock

from rich.console import Console

from tfbench import runner, stages
from tfbench.config import BenchmarkConfig
from tfbench.display import Display

COMMON = dict(warmup_steps=1, tensorboard=False)
MODELS = {
    "resnet_tiny": dict(data="digits", image_size=16, optimizer="sgd", steps=20, windows=5),
    "bert_tiny": dict(data="pydoc", seq_length=32, optimizer="adamw", dropout=0.1, steps=20, windows=5),
}
RATE = {"resnet_tiny": 0.1, "bert_tiny": 0.001}
rows = []
for replicas in (4, 2, 1):  # a process decides once how many devices it has
    for model, choices in MODELS.items():
        config = BenchmarkConfig(
            model=model, learning_rate=RATE[model], cpu_replicas=replicas,
            per_replica_batch_size=16 // replicas, results_dir=f"{model}{replicas}", **COMMON, **choices,
            # Steps of four replicas in a row take TensorFlow 14 s to set up where nothing is compiled.
            steps_per_loop=4 if replicas == 1 else 1,
        )
        with mock.patch.object(stages, "look_closer"):  # only takes time here
            record = runner.run(config, Display(Console(file=io.StringIO())))
        rows.append([model, replicas, dataclasses.asdict(record)])
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def learning(tmp_path_factory):
    """Rows by model and number of replicas."""
    done = python("-c", LEARNING, cwd=tmp_path_factory.mktemp("learning"))
    assert done.returncode == 0, output_of(done)
    return {(model, replicas): row for model, replicas, row in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("model", ["resnet_tiny", "bert_tiny"])
def test_models_learn_from_real_data_on_any_number_of_replicas(learning, model, replicas):
    row = learning[model, replicas]
    assert row["status"] == "ok", row["note"]
    assert (row["num_replicas"], row["global_batch_size"], row["xla"]) == (replicas, 16, False)
    assert row["loss_last"] < row["loss_first"] - 0.5


# ---------------------------------------------------------------------------- input that cannot be


@pytest.fixture(scope="module")
def without_tensorflow(tmp_path_factory):
    """Environment of a child process that cannot import TensorFlow."""
    return environment_without_tensorflow(tmp_path_factory.mktemp("blocker"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus=2"], ["--gpus=2", "none is visible", "--gpus=0"]),
        (["--gpus=-1"], ["--gpus=-1", "at least 0"]),
        (["--gpus=two"], ["--gpus=two", "a whole number, or auto"]),
        (["--model=vgg"], ["--model=vgg", "resnet50|"]),
        (["--precision=fp64"], ["--precision=fp64", "fp32|"]),
        (["--precision=tf32"], ["--precision=tf32", "CPU"]),
        (["--data=imagenet"], ["--data=imagenet", "one of synthetic"]),
        (["--data=tfds:"], ["--data=tfds:", "needs an argument"]),
        (["--data=tfds:imagenet2012", "--data_dir=/nowhere"], ["/nowhere/imagenet2012", "tfds build"]),
        (["--data=tfrecord:/nowhere/*"], ["--data=tfrecord:/nowhere/*", "no file matches /nowhere/*"]),
        (["--model=bert_tiny", "--data=digits"], ["--data=digits", "bert_tiny reads text", "pydoc"]),
        (["--per_replica_batch_size=0"], ["--per_replica_batch_size=0", "at least 1"]),
        (["--per_replica_batch_size=-8"], ["--per_replica_batch_size=-8", "at least 1"]),
        (["--model=bert_tiny", "--seq_length=4096"], ["--seq_length=4096", "at most 512"]),
        (["--seq_length=128"], ["--seq_length=128", "resnet50 reads images"]),
        (["--steps=0"], ["--steps=0", "at least 1"]),
        (["--steps=many"], ["--steps=many", "a whole number"]),
        (["--windows=0"], ["--windows=0", "at least 1"]),
        (["--steps=4", "--windows=5"], ["--windows=5", "at most --steps=4"]),
        (["--warmup_steps=0"], ["--warmup_steps=0", "the first step compiles"]),
        (["--learning_rate=nan"], ["--learning_rate=nan", "at least 0"]),
        (["--stepz=3"], ["stepz", "Did you mean: steps"]),
        (["resnet50"], ["'resnet50' is not a flag"]),
        (["--flagfile=/nowhere/flags.txt"], ["/nowhere/flags.txt"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_ends_with_one_message(tmp_path, without_tensorflow, flags, words):
    done = train(*flags, cwd=tmp_path, env=without_tensorflow)
    assert done.returncode == 2, output_of(done)
    (message,) = [line for line in output_of(done).splitlines() if "error: " in line]
    for word in words:
        assert word in message
    assert "Traceback" not in output_of(done)
    assert os.listdir(tmp_path) == []


def test_results_file_of_another_schema_is_left_as_it_is(tmp_path, without_tensorflow):
    (tmp_path / "out").mkdir()
    rows = tmp_path / "out" / "runs.csv"
    rows.write_text("model,images_per_sec\nresnet50,123\n")
    done = train("--results_dir=out", cwd=tmp_path, env=without_tensorflow)
    assert done.returncode == 2, output_of(done)
    (message,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert message.startswith("error: --results_dir=out: cannot be used: out/runs.csv has schema version")
    assert "Traceback" not in output_of(done)
    assert rows.read_text() == "model,images_per_sec\nresnet50,123\n"
    assert os.listdir(tmp_path / "out") == ["runs.csv"]


def test_results_folder_that_cannot_be_written(tmp_path, without_tensorflow):
    (tmp_path / "file").write_text("not a folder")
    done = train("--results_dir=file/out", cwd=tmp_path, env=without_tensorflow)
    assert done.returncode == 2, output_of(done)
    (message,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: --results_dir=file/out: cannot be used: .*Not a directory", message)
    assert "Traceback" not in output_of(done)
    assert os.listdir(tmp_path) == ["file"]


# -------------------------------------------------------------------------------------- exit codes


@pytest.fixture
def _parsed_flags():
    """Flags of a run on the CPU, and the signal handlers of before."""
    handler = signal.getsignal(signal.SIGTERM)
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with flagsaver.flagsaver():
        command.flags.FLAGS(["train", "--model=resnet_tiny", "--gpus=0"])
        yield
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, ctrl_c)


@pytest.mark.usefixtures("_parsed_flags")
@pytest.mark.parametrize(
    ("status", "code"),
    [("ok", 0), ("interrupted", 130), ("oom", 1), ("failed", 1), ("no_update", 1), ("short_data", 1)],
)
def test_exit_code_follows_the_status(monkeypatch, status, code):
    monkeypatch.setattr(runner, "run", lambda config, display: RunRecord(status=status))
    assert command.train(["train"]) == code


@pytest.mark.usefixtures("_parsed_flags")
def test_refused_results_folder_is_a_refusal(monkeypatch, capsys):
    def refuse(config, display):
        raise ConfigError("results_dir", "x", "cannot be used: full")

    monkeypatch.setattr(runner, "run", refuse)
    assert command.train(["train"]) == 2
    assert "error: --results_dir=x: cannot be used: full" in capsys.readouterr().out


@pytest.mark.usefixtures("_parsed_flags")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_end_of_a_schedulers_time_is_like_ctrl_c(monkeypatch, number):
    def run(config, display):
        os.kill(os.getpid(), number)
        return RunRecord(status="ok")

    monkeypatch.setattr(runner, "run", run)
    assert command.train(["train"]) == 130
