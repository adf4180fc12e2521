"""The configuration: sizes and key derived from it, and what it refuses."""

import dataclasses
import math

import pytest
from run_helpers import CPU_VALUES, OTHER_VALUES

from tfbench.config import DATA_OF_PATHS, BenchmarkConfig, ConfigError
from tfbench.data import DATASETS

# On two GPUs with XLA, so that each other field can change alone.
BASE = BenchmarkConfig(model="resnet50", gpus=2, xla=True, steps=100)
NEEDED = {"lr_total_steps": {"lr_schedule": "cosine"}, "max_windows": {"target_interval_percent": 1.0}}
NOT_MEASURED = {
    "compile_cache",
    "results_dir",
    "tag",
    "tensorboard",
    "profile_steps",
    "diagnose",
    "requested_per_replica_batch_size",
}


def changed(field: str) -> tuple[BenchmarkConfig, BenchmarkConfig]:
    """Two configurations that differ in one field only."""
    if field == "cpu_replicas":
        base = BenchmarkConfig(model="resnet50")
        return base, dataclasses.replace(base, cpu_replicas=CPU_VALUES["cpu_replicas"])
    value = {"gpus": 1, "xla": False}.get(field, OTHER_VALUES[field])
    base = dataclasses.replace(BASE, **NEEDED.get(field, {}))
    assert value != getattr(base, field)
    return base, dataclasses.replace(base, **{field: value})


FIELDS = [field.name for field in dataclasses.fields(BenchmarkConfig)]


@pytest.mark.parametrize("field", [name for name in FIELDS if name not in NOT_MEASURED])
def test_run_key_changes_with_every_field_that_is_measured(field):
    one, other = changed(field)
    assert one.run_key != other.run_key


@pytest.mark.parametrize("field", sorted(NOT_MEASURED))
def test_run_key_ignores_where_results_go(field):
    one, other = changed(field)
    assert one.run_key == other.run_key


def test_data_sets_of_paths_are_all_that_take_an_argument_but_tfds():
    assert {*DATA_OF_PATHS, "tfds"} == {name for name, spec in DATASETS.items() if spec.takes_argument}


def test_run_key_is_the_same_in_another_process_and_for_the_same_folder(monkeypatch, tmp_path):
    (tmp_path / "sets").mkdir()
    absolute = dataclasses.replace(BASE, data_dir=str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path)
    assert dataclasses.replace(BASE, data_dir="sets").run_key == absolute.run_key
    named = dataclasses.replace(BASE, data="tfds:birds").run_key
    for field, value in (
        ("vocab", "{}vocab.txt"),
        ("data", "folder:{}imgs"),
        ("data", "tfrecord:{}train-*"),
        ("data", "text:{}*.txt"),
        ("data", "tokens:{}tokens"),
    ):
        here = dataclasses.replace(BASE, **{field: value.format("")})
        key = here.run_key
        assert dataclasses.replace(BASE, **{field: value.format(f"{tmp_path}/")}).run_key == key
        monkeypatch.chdir(tmp_path / "sets")
        assert here.run_key != key
        assert dataclasses.replace(BASE, data="tfds:birds").run_key == named
        monkeypatch.chdir(tmp_path)
    # Rows of many runs are matched by key: it must be text that does not hang on hash seeds or field order.
    shuffled = BenchmarkConfig(**dict(reversed(BASE.to_dict().items())))
    assert shuffled.run_key == BASE.run_key
    assert len(BASE.run_key) == 12
    assert int(BASE.run_key, 16) >= 0


@pytest.mark.parametrize(
    ("choices", "num_replicas", "a_step", "global_batch_size"),
    [
        ({"gpus": 4, "per_replica_batch_size": 256}, 4, 256, 1024),
        ({"gpus": 1, "per_replica_batch_size": 12, "accumulate": 5}, 1, 60, 60),
        ({"gpus": 3, "per_replica_batch_size": 7, "accumulate": 2}, 3, 14, 42),
        ({"cpu_replicas": 2, "per_replica_batch_size": 16}, 2, 16, 32),
        ({}, 1, 1, 1),
    ],
)
def test_batch_in_all_its_sizes(choices, num_replicas, a_step, global_batch_size):
    config = BenchmarkConfig(model="any", **choices)
    assert config.num_replicas == num_replicas
    assert config.samples_per_replica_per_step == a_step
    assert config.global_batch_size == global_batch_size


@pytest.mark.parametrize(
    ("steps", "windows", "expected"),
    [
        (20, 5, (4, 4, 4, 4, 4)),
        (23, 5, (5, 5, 5, 4, 4)),
        (5, 5, (1, 1, 1, 1, 1)),
        (7, 1, (7,)),
        (400, 3, (134, 133, 133)),
    ],
)
def test_steps_are_dealt_evenly_to_windows(steps, windows, expected):
    config = BenchmarkConfig(model="any", steps=steps, windows=windows, warmup_steps=3, steps_per_loop=1)
    assert config.steps_of_windows == expected
    assert config.total_steps == steps + 3


@pytest.mark.parametrize(
    ("warmup", "steps", "windows", "per_loop", "untimed"),
    [
        (2, 20, 4, 5, 6),  # the first, and a row
        (6, 20, 4, 5, 6),
        (30, 20, 4, 5, 30),
        (2, 20, 4, 1, 2),
        (2, 8, 4, 5, 2),  # no window has a row
        (2, 9, 2, 5, 6),  # one has
        (2, 100, 2, 50, 21),  # rows are of 20 at most
    ],
)
def test_no_window_has_the_first_row(warmup, steps, windows, per_loop, untimed):
    config = BenchmarkConfig(
        model="any", warmup_steps=warmup, steps=steps, windows=windows, steps_per_loop=per_loop
    )  # fmt: skip
    assert config.untimed_steps == untimed


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({}, 3 + 23),
        ({"target_interval_percent": 0.5}, 3 + 23 + 10 * 4),  # 15 windows: the added ones are as the last
        ({"target_interval_percent": 0.5, "max_windows": 6}, 3 + 23 + 4),
    ],
)
def test_most_steps_are_those_of_the_most_windows(choices, expected):
    config = BenchmarkConfig(model="any", steps=23, windows=5, warmup_steps=3, **choices)
    assert config.most_steps == expected


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"gpus": -1}, "--gpus=-1: a whole number of at least 0"),
        ({"cpu_replicas": 0}, "--cpu_replicas=0: a whole number of at least 1"),
        ({"cpu_replicas": 65}, "--cpu_replicas=65: a whole number from 1 to 64"),
        ({"gpus": 1, "cpu_replicas": 2}, "--cpu_replicas=2: goes with --gpus=0 only"),
        ({"per_replica_batch_size": 0}, "--per_replica_batch_size=0: a whole number of at least 1"),
        ({"per_replica_batch_size": -8}, "--per_replica_batch_size=-8: a whole number of at least 1"),
        ({"accumulate": 0}, "--accumulate=0: a whole number of at least 1"),
        ({"steps": 0}, "--steps=0: a whole number of at least 1"),
        ({"warmup_steps": 0}, "--warmup_steps=0: a whole number of at least 1: the first step compiles"),
        ({"windows": 0}, "--windows=0: a whole number of at least 1"),
        ({"steps": 4, "windows": 5}, "--windows=5: at most --steps=4: a window needs a step"),
        ({"steps_per_loop": 0}, "--steps_per_loop=0: a whole number of at least 1"),
        ({"lr_warmup_steps": -1}, "--lr_warmup_steps=-1: a whole number of at least 0"),
        ({"lr_total_steps": 0}, "--lr_total_steps=0: a whole number of at least 1"),
        ({"profile_steps": -1}, "--profile_steps=-1: a whole number of at least 0"),
        ({"seed": -1}, "--seed=-1: a whole number of at least 0"),
        ({"seed": 2**32}, "--seed=4294967296: a whole number from 0 to 4294967295"),
        ({"image_size": 7}, "--image_size=7: a whole number of at least 8"),
        ({"seq_length": 7}, "--seq_length=7: a whole number of at least 8"),
        ({"learning_rate": -0.1}, "--learning_rate=-0.1: a float32 of at least 0"),
        ({"learning_rate": NAN}, "--learning_rate=nan: a float32 of at least 0"),
        ({"learning_rate": INF}, "--learning_rate=inf: a float32 of at least 0"),
        ({"weight_decay": -1.0}, "--weight_decay=-1.0: a float32 of at least 0"),
        ({"weight_decay": NAN}, "--weight_decay=nan: a float32 of at least 0"),
        ({"learning_rate": 1e39}, "--learning_rate=1e+39: a float32 of at least 0"),
        ({"weight_decay": 3.5e38}, "--weight_decay=3.5e+38: a float32 of at least 0"),
        (
            {"lr_schedule": "cosine", "lr_warmup_steps": 5, "lr_total_steps": 5},
            "--lr_total_steps=5: more than --lr_warmup_steps=5",
        ),
        ({"lr_total_steps": 9}, "--lr_total_steps=9: goes with --lr_schedule=cosine or linear only"),
        ({"dropout": 1.0}, "--dropout=1.0: a number of at least 0 and below 1"),
        ({"dropout": -0.5}, "--dropout=-0.5: a number of at least 0 and below 1"),
        ({"dropout": NAN}, "--dropout=nan: a number of at least 0 and below 1"),
        (
            {"target_interval_percent": 100.0},
            "--target_interval_percent=100.0: a number of at least 0 and below",
        ),
        ({"target_interval_percent": NAN}, "--target_interval_percent=nan: a number of at least 0 and below"),
        ({"steps": 9, "windows": 9, "max_windows": 8}, "--max_windows=8: a whole number of at least 9"),
        ({"max_windows": 3}, "--max_windows=3: goes with --target_interval_percent above 0"),
        ({"results_dir": ""}, "--results_dir=: a folder"),
        ({"initial_loss_scale": 0.5}, "--initial_loss_scale=0.5: a float32 of at least 1"),
        ({"initial_loss_scale": NAN}, "--initial_loss_scale=nan: a float32 of at least 1"),
        ({"initial_loss_scale": 1e39}, "--initial_loss_scale=1e+39: a float32 of at least 1"),
        ({"lr_schedule": "step"}, "--lr_schedule=step: one of constant, cosine, linear"),
        ({"collectives": "between"}, "--collectives=between: one of outside, update, inside"),
        ({"collectives": "inside", "xla": True}, "--collectives=inside: goes with --xla on GPUs only"),
        ({"collectives": "inside", "gpus": 2}, "--collectives=inside: goes with --xla on GPUs only"),
        ({"kernels": "flash"}, "--kernels=flash: one of fused, plain"),
        ({"tag": "two\nlines"}, r"--tag='two\nlines': one line of text"),
    ],
)
def test_refusal_names_flag_value_and_what_is_accepted(choices, message):
    with pytest.raises(ConfigError) as refused:
        BenchmarkConfig(model="any", **choices)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    assert refused.value.flag == message.removeprefix("--").partition("=")[0]


@pytest.mark.parametrize(
    "choices",
    [
        {"steps": 5, "windows": 5},
        {"dropout": 0.0, "learning_rate": 0.0, "weight_decay": 0.0},
        {"initial_loss_scale": 1.0, "seed": 2**32 - 1, "image_size": 8, "seq_length": 8},
        OTHER_VALUES,
        CPU_VALUES,
    ],
)
def test_limits_themselves_are_accepted(choices):
    config = BenchmarkConfig(**{"model": "any"} | choices)
    assert config.to_dict().items() >= choices.items()
