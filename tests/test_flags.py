"""Flags and the configuration say the same, in both directions."""

import dataclasses

import pytest
from absl import flags
from absl.testing import flagsaver
from run_helpers import CPU_VALUES, OTHER_VALUES, fields_with_flags, machine

from tfbench import defaults
from tfbench.config import COLLECTIVES, INPUTS, KERNELS, LEARNING_RATE_SCHEDULES, BenchmarkConfig, ConfigError
from tfbench.data import DATASETS
from tfbench.flags import FLAGS, choices_from_flags, to_flags, usage_error
from tfbench.models import MODELS
from tfbench.optimizers import OPTIMIZERS
from tfbench.precision import PRECISIONS


def parsed(*arguments):
    """BenchmarkConfig's fields as these arguments set them."""
    with flagsaver.flagsaver():
        FLAGS(["train", *arguments])
        return choices_from_flags()


def test_every_field_has_a_flag():
    fields = {field.name for field in dataclasses.fields(BenchmarkConfig)}
    assert set(choices_from_flags()) == fields


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("model", MODELS),
        ("precision", PRECISIONS),
        ("optimizer", OPTIMIZERS),
        ("lr_schedule", LEARNING_RATE_SCHEDULES),
        ("kernels", KERNELS),
        ("collectives", COLLECTIVES),
        ("input", INPUTS),
    ],
)
def test_enums_are_the_registries(name, registry):
    assert FLAGS[name].parser.enum_values == list(registry)


def test_help_names_every_data_set():
    for name in DATASETS:
        assert name in FLAGS["data"].help


def test_defaults_of_flags_are_those_of_the_configuration():
    differing = {
        field.name
        for field in dataclasses.fields(BenchmarkConfig)
        if field.name in FLAGS
        and FLAGS[field.name].default is not None
        and FLAGS[field.name].default != field.default
    }
    assert differing == {"model", "gpus"}  # a model must be named in code; gpus is "auto" on the command line


@pytest.mark.parametrize("values", [OTHER_VALUES, CPU_VALUES], ids=["gpu", "cpu"])
def test_flagfile_repeats_every_choice(values, tmp_path):
    assert set(values) == {field.name for field in dataclasses.fields(BenchmarkConfig)}
    config = BenchmarkConfig(**values)
    flagfile = tmp_path / "flags.txt"
    flagfile.write_text("\n".join(to_flags(config)) + "\n")
    choices = parsed(f"--flagfile={flagfile}")
    assert choices == {name: values[name] for name in fields_with_flags()} | {"gpus": str(values["gpus"])}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model=resnet_tiny", "--data=digits"],
        ["--model=bert_tiny", "--data=pydoc", "--precision=mixed_bfloat16", "--notensorboard", "--steps=7"],
        ["--model=bert_tiny", "--learning_rate=3e-5", "--dropout=0", "--xla", "--deterministic"],
    ],
)
def test_completed_run_is_repeated_by_its_own_flags(arguments, tmp_path):
    config, _ = defaults.complete(parsed(*arguments), machine())
    flagfile = tmp_path / "flags.txt"
    flagfile.write_text("\n".join(to_flags(config)) + "\n")
    again, sentences = defaults.complete(parsed(f"--flagfile={flagfile}"), machine())
    assert again == config
    assert again.run_key == config.run_key
    assert sentences == []  # nothing was left to decide


def test_fields_without_value_are_left_out():
    names = {line.partition("=")[0] for line in to_flags(BenchmarkConfig(model="resnet50"))}
    assert "--requested_per_replica_batch_size" not in names
    assert {"--data_dir", "--image_size", "--seq_length", "--lr_total_steps"}.isdisjoint(names)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--steps=abc", ["--steps=abc", "expected a whole number"]),
        ("--steps=1.5", ["--steps=1.5", "expected a whole number"]),
        ("--seed=", ["--seed=", "expected a whole number"]),
        ("--learning_rate=x", ["--learning_rate=x", "expected a number"]),
        ("--xla=maybe", ["--xla=maybe", "expected true or false"]),
        ("--precision=fp64", ["--precision=fp64", "fp32|tf32|mixed_float16|mixed_bfloat16"]),
        ("--model=vgg", ["--model=vgg", "resnet50|resnet_tiny|bert_base"]),
        ("--stepz=4", ["stepz", "Did you mean: ", "steps"]),
        ("--steps", ["--steps", "Missing value"]),
    ],
)
def test_refused_flag_names_flag_value_and_what_is_accepted(argument, expected):
    with pytest.raises(flags.Error) as refused:
        parsed(argument)
    message, hint = usage_error(refused.value).split("\n")
    for words in expected:
        assert words in message
    assert hint == "See python -m tfbench.train --help"


def test_refused_configuration_is_shown_as_it_is():
    error = ConfigError("gpus", 2, "only 1 visible")
    assert usage_error(error) == "--gpus=2: only 1 visible\nSee python -m tfbench.train --help"
