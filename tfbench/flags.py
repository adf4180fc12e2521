"""absl flags ↔ BenchmarkConfig. TensorFlow-free: --help and a refused flag answer at once."""

import dataclasses
import re
from typing import Any

from absl import flags

from tfbench.config import (
    CACHES,
    COLLECTIVES,
    INPUTS,
    KERNELS,
    LEARNING_RATE_SCHEDULES,
    ON_BAD_RECORD,
    SCALING_MODES,
    SYNTHETIC_LR_WARMUP_STEPS,
    BenchmarkConfig,
    ConfigError,
)
from tfbench.data import DATASETS
from tfbench.models import MODELS
from tfbench.optimizers import OPTIMIZERS
from tfbench.precision import PRECISIONS

FLAGS = flags.FLAGS
_AUTO = " Default: fits the model and the device."
_ACCEPTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}  # by absl's type


def _data_help() -> str:
    usages = (
        f"{spec.name}{':ARGUMENT' if spec.takes_argument else ''} ({spec.help})" for spec in DATASETS.values()
    )
    return "Training data: " + "; ".join(usages)


flags.DEFINE_enum("model", "resnet50", list(MODELS), "What to train.")
flags.DEFINE_string("data", "synthetic", _data_help())
flags.DEFINE_string("data_dir", None, "Of --data=tfds:NAME: folder of prepared ones. Default: their own.")
flags.DEFINE_enum(
    "cache",
    "none",
    CACHES,
    "Of images read from files. ram: each is decoded once and kept with its short side at 8/7 of "
    "--image_size, every visit crops and flips it anew; auto: ram where that fits.",
)
flags.DEFINE_enum(
    "on_bad_record",
    "fail",
    ON_BAD_RECORD,
    "An image that cannot be read, named in any case. fail: it ends the run; skip: it is left out, counted.",
)
flags.DEFINE_enum(
    "input",
    "tfdata",
    INPUTS,
    "Who decodes images. tfdata: the host's cores; dali: NVIDIA DALI on the GPUs, of folder: and tfrecord: "
    "(pip install --no-build-isolation 'tfbench[dali]').",
)
flags.DEFINE_string(
    "data_service",
    None,
    "grpc://HOST:PORT of a tf.data service whose workers read and decode the images instead of this process; "
    "python -m tfbench.data_service starts one. Files are dealt to the workers as they ask for them "
    "(ShardingPolicy.DYNAMIC): every record once an epoch, in no fixed order; one that finds no more begins "
    "the next epoch. A worker that is lost ends the run.",
)
flags.DEFINE_string(
    "vocab",
    None,
    "Of --data=text:GLOB: a file as BERT's vocab.txt. Default: a WordPiece trained on the text.",
)
flags.DEFINE_bool("pack", False, "Of --data=text:GLOB: documents share sequences, so that none is padded.")
flags.DEFINE_integer("image_size", None, "Pixels on each side of an image." + _AUTO)
flags.DEFINE_integer("seq_length", None, "Tokens of a sequence." + _AUTO)

flags.DEFINE_string("gpus", "auto", "Number of GPUs; auto: all that are visible; 0: the CPU.")
flags.DEFINE_integer("cpu_replicas", 1, "With --gpus=0: logical CPU devices that stand for GPUs.")

flags.DEFINE_integer("per_replica_batch_size", None, "Samples a GPU sees in one step." + _AUTO)
flags.DEFINE_integer(
    "requested_per_replica_batch_size", None, "Only recorded: what was asked for, where a search changed it."
)
flags.DEFINE_integer("accumulate", 1, "Micro-batches summed into one optimizer update.")
flags.DEFINE_enum(
    "precision", None, list(PRECISIONS), "Number format. Default: the fastest that the device runs well."
)
flags.DEFINE_bool("xla", None, "Compile the step with XLA. Default: on a GPU.")
flags.DEFINE_enum(
    "kernels",
    None,
    KERNELS,
    "Of text models. plain: XLA's; fused: attention, GELU, and dropout with layer norm in kernels of "
    "tfbench's own, in half precision with XLA on GPUs from Ampere on. Default: fused on Hopper in "
    "mixed_float16, plain elsewhere.",
)
flags.DEFINE_enum(
    "collectives",
    "outside",
    COLLECTIVES,
    "Where replicas sum gradients: between two compiled programs, in the second one, that of the update, or "
    "inside one program of the whole step (both faster; hangs of XLA's sums were reported in public).",
)
flags.DEFINE_enum(
    "scaling_mode",
    "weak",
    SCALING_MODES,
    "A run on one GPU to compare with has the same batch per GPU (weak) or the same global batch (strong).",
)
flags.DEFINE_enum("optimizer", None, list(OPTIMIZERS), "Default: the model's published one.")
flags.DEFINE_float("learning_rate", None, "Peak learning rate. Default: the model's.")
flags.DEFINE_enum("lr_schedule", "constant", LEARNING_RATE_SCHEDULES, "After the learning rate's warm-up.")
flags.DEFINE_integer(
    "lr_warmup_steps",
    None,
    "Updates in which the learning rate rises. Default: a tenth of the run; with synthetic data and a "
    f"constant rate {SYNTHETIC_LR_WARMUP_STEPS}, so that the weights, and with them the card's power, stay "
    "as they begin.",
)
flags.DEFINE_integer(
    "lr_total_steps",
    None,
    "Update at which cosine and linear reach 0. Default: the last of as many windows as there may be.",
)
flags.DEFINE_float("weight_decay", None, "Not on norms and biases. Default: the model's.")
flags.DEFINE_float("dropout", None, "Rate of every dropout of the model. Default: the model's.")
flags.DEFINE_float("initial_loss_scale", 32768.0, "First loss scale of mixed_float16.")
flags.DEFINE_integer("seed", 0, "Of weights, data order and dropout.")
flags.DEFINE_bool("deterministic", False, "The same numbers in every run, at the cost of speed.")
flags.DEFINE_bool(
    "compile_cache", True, "Keep compiled programs in ~/.cache/tfbench for the next run; on GPUs with XLA."
)

flags.DEFINE_integer("steps", None, "Timed optimizer updates, all windows together." + _AUTO)
flags.DEFINE_integer(
    "warmup_steps", None, "Untimed updates before them; at least one and a call of --steps_per_loop." + _AUTO
)
flags.DEFINE_integer("windows", None, "Timed blocks that the steps are dealt into." + _AUTO)
flags.DEFINE_integer("steps_per_loop", None, "Updates in one call of the compiled loop." + _AUTO)

flags.DEFINE_float(
    "target_interval_percent",
    None,
    "Add windows until the 95 % interval of the rate is within ± this; 0: do not. Default: 0.5 on GPUs.",
)
flags.DEFINE_integer(
    "max_windows", None, "That --target_interval_percent may go on to. Default: 3 × --windows."
)
flags.DEFINE_bool(
    "diagnose", False, "After the windows, measure where a step's time goes, and say what to try."
)

flags.DEFINE_string("results_dir", "tfbench_results", "Folder of runs.csv and of a folder for each run.")
flags.DEFINE_string("tag", "", "Your own label for the row.")
flags.DEFINE_bool("tensorboard", True, "Write TensorBoard curves into the run's folder.")
flags.DEFINE_integer("profile_steps", 0, "Steps to trace for TensorBoard's profiler, after the windows.")


def choices_from_flags(values: flags.FlagValues = FLAGS) -> dict[str, Any]:
    """BenchmarkConfig's fields as the flags have them; None where the user made no choice."""
    return {field.name: values[field.name].value for field in dataclasses.fields(BenchmarkConfig)}


def to_flags(config: BenchmarkConfig) -> list[str]:
    """The configuration as --name=value, so that a flagfile of these lines repeats it.

    Fields without a value are left out.
    """
    lines = []
    for name, value in config.to_dict().items():
        if value is None:
            continue
        lines.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    return lines


def usage_error(error: ConfigError | flags.Error) -> str:
    """The one message of a refused flag: absl's own do not say what a number or a switch may be."""
    refused = re.match(r"flag --(\w+)=", f"{error}")
    accepted = _ACCEPTED.get(FLAGS[refused[1]].flag_type()) if refused else None
    expected = f"; expected {accepted}" if accepted else ""
    return f"{error}{expected}\nSee python -m tfbench.train --help"


def refusal(error: ConfigError | flags.Error) -> str:
    """The refusal itself, without the pointer to train's help, for the other commands."""
    return usage_error(error).splitlines()[0]
