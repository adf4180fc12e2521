"""One run of the benchmark: every choice it makes, checked, with the sizes and the key derived from it.

TensorFlow-free, and knows nothing of the registries: names are checked against them by `tfbench.flags`.
"""

import dataclasses
import hashlib
import json
import os
from typing import Any

# Fields that do not change what is measured: where results go and what is looked at outside the windows.
_NOT_IN_RUN_KEY = frozenset(
    {
        "results_dir",
        "tag",
        "tensorboard",
        "profile_steps",
        "diagnose",
        "requested_per_replica_batch_size",
        "compile_cache",
    }
)

# Where replicas sum gradients. "outside": between two compiled programs. "update": in the update's program,
# which the host then starts without waiting for the sums. "inside": in one program, the whole step.
# The two latter are faster; crashes and hangs of sums in programs were reported (tensorflow#56423, #61314).
COLLECTIVES = ("outside", "update", "inside")
# "fused": what memory limits is one kernel of tfbench's own each way, see tfbench.kernels. "plain": formulas,
# which XLA makes its kernels of.
KERNELS = ("fused", "plain")
# Steps that are traced one after the other: BERT-large takes 0.15 s of tracing for each.
LONGEST_ROW = 20
# A card at its power limit is faster or slower with the values that it computes: BERT-large on an H200 took
# 138 ms a step near the weights it begins with, and 135, then 130 further on, where it is not stable. Runs on
# synthetic data stay near the first, as a real training does in its first steps: with the warm-up that BERT
# was published with (Devlin et al., 2019).
SYNTHETIC_LR_WARMUP_STEPS = 10_000
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MAX_CPU_REPLICAS = 64  # each has its own threads and traced step: hundreds show nothing for minutes
MAX_SEED = 2**32 - 1  # NumPy's, which Keras seeds too
# "ram": images are decoded and resized once and kept, "auto": where they fit. See tfbench.data.cache.
CACHES = ("none", "ram", "auto")
INPUTS = ("tfdata", "dali")  # who decodes: tf.data on the host's cores, NVIDIA DALI on the GPUs
ON_BAD_RECORD = ("fail", "skip")  # an unreadable record ends the run, or is left out and counted
DATA_OF_PATHS = ("tfrecord", "folder", "text", "tokens")  # whose argument in --data is a path or a glob
# What stays as replicas are added, "weak": the per-replica batch, "strong": the global batch. Only the
# baseline that the efficiency compares with depends on it.
SCALING_MODES = ("weak", "strong")
LEARNING_RATE_SCHEDULES = ("constant", "cosine", "linear")


def calls_of(num_steps: int, steps_per_call: int) -> list[int]:
    """Steps of each call of the loop that makes `num_steps` updates."""
    calls, rest = divmod(num_steps, steps_per_call)
    return [steps_per_call] * calls + [rest] * bool(rest)


def rows_of(call: int, steps_per_call: int) -> list[int]:
    """Steps of each row, traced once and started by the host, in a call of the loop for `call` updates.

    Rows are as long as most calls, but LONGEST_ROW at most; what is left is made one by one.
    """
    length = min(steps_per_call, LONGEST_ROW)
    rows, rest = divmod(call, length)
    return [length] * rows + [1] * rest


def rows_of_window(num_steps: int, steps_per_call: int) -> list[int]:
    """Steps of each row of a window of `num_steps` updates."""
    return [row for call in calls_of(num_steps, steps_per_call) for row in rows_of(call, steps_per_call)]


class ConfigError(ValueError):
    """A flag value that cannot be: the message names the flag, the value and what would be accepted."""

    def __init__(self, flag: str, value: object, accepted: str):
        super().__init__(f"--{flag}={value}: {accepted}")
        self.flag = flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Every choice of a run. Complete: nothing is decided later, so the row can say what really ran.

    Raises:
        ConfigError: a value that cannot be, or two values that cannot be together.
    """

    # What is trained.
    model: str  # a name in tfbench.models.MODELS
    data: str = "synthetic"  # a name in tfbench.data.DATASETS, with ":ARGUMENT" where it takes one
    data_dir: str | None = None  # folder of prepared TensorFlow Datasets; None: their default folder
    cache: str = "none"  # of images read from files: see CACHES
    on_bad_record: str = "fail"  # among images read from files: see ON_BAD_RECORD
    input: str = "tfdata"  # see INPUTS
    data_service: str | None = None  # grpc://HOST:PORT that images read from files come from; None: this host
    vocab: str | None = None  # file as BERT's vocab.txt, for plain text; None: trained on the text
    pack: bool = False  # plain text: several documents may share a sequence
    image_size: int | None = None  # pixels on each side; None for text models
    seq_length: int | None = None  # tokens; None for image models

    # On what.
    gpus: int = 0  # number of GPUs; 0: the CPU
    cpu_replicas: int = 1  # logical CPU devices that stand for replicas; only with gpus == 0

    # How it is trained.
    per_replica_batch_size: int = 1  # samples a replica sees in one step (one micro-batch)
    requested_per_replica_batch_size: int | None = None  # what was asked for, where a search changed it
    accumulate: int = 1  # micro-batches summed into one optimizer update
    precision: str = "fp32"  # a name in tfbench.precision.PRECISIONS
    xla: bool = False
    kernels: str | None = None  # of text models: see KERNELS; None for image models
    collectives: str = "outside"  # where gradients are summed over replicas: see COLLECTIVES
    scaling_mode: str = "weak"  # see SCALING_MODES
    optimizer: str = "sgd"  # a name in tfbench.optimizers.OPTIMIZERS
    learning_rate: float = 0.1  # peak, reached at the end of the warm-up
    lr_schedule: str = "constant"  # after the warm-up
    lr_warmup_steps: int = 0  # linear from 0 to learning_rate
    lr_total_steps: int | None = None  # where cosine and linear reach 0; None: the last of most_steps
    weight_decay: float = 0.0  # not on normalisation parameters and biases
    dropout: float = 0.0  # rate of every dropout of the model
    initial_loss_scale: float = 32768.0  # only mixed_float16 scales its loss
    seed: int = 0
    deterministic: bool = False
    compile_cache: bool = True  # keep compiled programs for the next run; on GPUs with XLA

    # What is measured.
    steps: int = 1  # timed optimizer updates, all windows together
    warmup_steps: int = 1  # untimed updates before them; the first one compiles
    windows: int = 1  # timed blocks of steps, synchronised at both edges
    steps_per_loop: int = 1  # updates inside one tf.function call
    target_interval_percent: float = (
        0.0  # windows go on until the rate's 95 % interval is within ± this; 0: no
    )
    max_windows: int | None = None  # that they go on to at most; None: three times `windows`

    # Where it is written.
    results_dir: str = "tfbench_results"
    tag: str = ""
    tensorboard: bool = True
    profile_steps: int = 0  # updates traced by the profiler, after the windows; 0: none
    diagnose: bool = False  # after the windows, measure where a step's time goes

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_rates(self)
        if self.gpus and self.cpu_replicas != 1:
            raise ConfigError("cpu_replicas", self.cpu_replicas, "goes with --gpus=0 only")
        if self.cpu_replicas > MAX_CPU_REPLICAS:
            raise ConfigError(
                "cpu_replicas", self.cpu_replicas, f"a whole number from 1 to {MAX_CPU_REPLICAS}"
            )
        if self.steps < self.windows:
            raise ConfigError("windows", self.windows, f"at most --steps={self.steps}: a window needs a step")
        if self.lr_schedule not in LEARNING_RATE_SCHEDULES:
            raise ConfigError("lr_schedule", self.lr_schedule, f"one of {', '.join(LEARNING_RATE_SCHEDULES)}")
        _check_schedule(self)
        if self.collectives not in COLLECTIVES:
            raise ConfigError("collectives", self.collectives, f"one of {', '.join(COLLECTIVES)}")
        if self.kernels not in (None, *KERNELS):
            raise ConfigError("kernels", self.kernels, f"one of {', '.join(KERNELS)}")
        if self.scaling_mode not in SCALING_MODES:
            raise ConfigError("scaling_mode", self.scaling_mode, f"one of {', '.join(SCALING_MODES)}")
        if self.cache not in CACHES:
            raise ConfigError("cache", self.cache, f"one of {', '.join(CACHES)}")
        if self.input not in INPUTS:
            raise ConfigError("input", self.input, f"one of {', '.join(INPUTS)}")
        if self.on_bad_record not in ON_BAD_RECORD:
            raise ConfigError("on_bad_record", self.on_bad_record, f"one of {', '.join(ON_BAD_RECORD)}")
        if self.collectives != "outside" and not (self.xla and self.gpus):
            raise ConfigError("collectives", self.collectives, "goes with --xla on GPUs only")
        if self.max_windows is not None and not self.target_interval_percent:
            raise ConfigError("max_windows", self.max_windows, "goes with --target_interval_percent above 0")
        if not self.results_dir:
            raise ConfigError("results_dir", "", "a folder; . is the current one")
        if any(character in self.tag for character in "\n\r\0"):
            raise ConfigError("tag", repr(self.tag), "one line of text")

    @property
    def num_replicas(self) -> int:
        """Model copies: GPUs, or logical CPU devices with --gpus=0."""
        return self.gpus or self.cpu_replicas

    @property
    def samples_per_replica_per_step(self) -> int:
        """Samples one replica sees between two optimizer updates."""
        return self.per_replica_batch_size * self.accumulate

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer update over all replicas and micro-batches."""
        return self.samples_per_replica_per_step * self.num_replicas

    @property
    def untimed_steps(self) -> int:
        """Optimizer updates before the windows: the warm-up, with a row of steps where windows have rows.

        TensorFlow sets a row up when it is first run, and only then: 10 s for five steps of resnet_tiny on
        two cores, 28 s with two replicas.
        """
        row = max(rows_of_window(self.steps_of_windows[0], self.steps_per_loop))
        return max(self.warmup_steps, 1 + row) if row > 1 else self.warmup_steps

    @property
    def total_steps(self) -> int:
        """Optimizer updates before the windows and in them."""
        return self.untimed_steps + self.steps

    @property
    def most_windows(self) -> int:
        """Windows that a run measures at most."""
        return self.max_windows or 3 * self.windows

    @property
    def most_steps(self) -> int:
        """Optimizer updates of warm-up and of as many windows as the run may have."""
        added = self.most_windows - self.windows if self.target_interval_percent else 0
        return self.total_steps + added * self.steps_of_windows[-1]

    @property
    def steps_of_windows(self) -> tuple[int, ...]:
        """Steps of each window: `steps` dealt as evenly as they go, the longer windows first."""
        each, longer = divmod(self.steps, self.windows)
        return tuple(each + (index < longer) for index in range(self.windows))

    @property
    def run_key(self) -> str:
        """Hash of everything that changes what is measured: equal keys are repeats of one configuration."""
        choices = {k: v for k, v in dataclasses.asdict(self).items() if k not in _NOT_IN_RUN_KEY}
        for name in ("data_dir", "vocab"):
            if choices[name] is not None:
                choices[name] = _absolute(choices[name])
        name, _, path = self.data.partition(":")
        if name in DATA_OF_PATHS:
            choices["data"] = f"{name}:{_absolute(path)}"
        return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as the flags spell them."""
        return dataclasses.asdict(self)


def _absolute(path: str) -> str:
    """The same from every working directory; a glob stays one."""
    return os.path.abspath(os.path.expanduser(path))


def _check_counts(config: BenchmarkConfig) -> None:
    """Whole numbers with a least value.

    Raises:
        ConfigError: one is below it.
    """
    least = {
        "gpus": 0, "cpu_replicas": 1, "per_replica_batch_size": 1, "accumulate": 1, "steps": 1,
        "requested_per_replica_batch_size": 1,
        "warmup_steps": 1, "windows": 1, "steps_per_loop": 1, "lr_warmup_steps": 0, "profile_steps": 0,
        "seed": 0, "image_size": 8, "seq_length": 8, "lr_total_steps": 1,
        "max_windows": config.windows,
    }  # fmt: skip
    for flag, minimum in least.items():
        value = getattr(config, flag)
        if value is not None and value < minimum:
            why = ": the first step compiles and is never timed" if flag == "warmup_steps" else ""
            raise ConfigError(flag, value, f"a whole number of at least {minimum}{why}")
    if config.seed > MAX_SEED:
        raise ConfigError("seed", config.seed, f"a whole number from 0 to {MAX_SEED}")


def _check_schedule(config: BenchmarkConfig) -> None:
    """Where the learning rate reaches 0.

    Raises:
        ConfigError: nowhere, or before the warm-up has ended.
    """
    end = config.lr_total_steps
    if end is None:
        return
    if config.lr_schedule == "constant":
        raise ConfigError("lr_total_steps", end, "goes with --lr_schedule=cosine or linear only")
    if end <= config.lr_warmup_steps:
        warm_up = f"--lr_warmup_steps={config.lr_warmup_steps}"
        raise ConfigError("lr_total_steps", end, f"more than {warm_up}: the rate falls after its warm-up")


def _check_rates(config: BenchmarkConfig) -> None:
    """Real numbers with a range.

    Raises:
        ConfigError: one is outside it.
    """
    for flag in ("learning_rate", "weight_decay"):
        value = getattr(config, flag)
        if not 0 <= value <= FLOAT32_MAX:  # written so that NaN is refused
            raise ConfigError(flag, value, "a float32 of at least 0")
    for flag, upper in (("dropout", 1.0), ("target_interval_percent", 100.0)):
        value = getattr(config, flag)
        if not 0 <= value < upper:
            raise ConfigError(flag, value, f"a number of at least 0 and below {upper:g}")
    if not 1 <= config.initial_loss_scale <= FLOAT32_MAX:
        raise ConfigError("initial_loss_scale", config.initial_loss_scale, "a float32 of at least 1")
