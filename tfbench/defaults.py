"""From the choices a user made to a complete, checked run on this machine. TensorFlow-free.

Defaults depend on the model and on the device: a GPU measures for real, a CPU shrinks the run so that it
ends in about two minutes.
"""

import dataclasses
from typing import Any

from tfbench.config import SYNTHETIC_LR_WARMUP_STEPS, BenchmarkConfig, ConfigError, rows_of_window
from tfbench.data import (
    parse,
    require_dali,
    require_data_service,
    require_image_files,
    require_text_files,
    require_tfds,
)
from tfbench.hardware.gpus import Machine
from tfbench.kernels import obstacle
from tfbench.models import MODELS, ModelSpec
from tfbench.models.spec import Defaults
from tfbench.precision import PRECISIONS, fastest_precision

MEMORY_SHARE = 0.8  # of a GPU's memory that a default batch may take; the rest is weights and workspaces
TARGET_INTERVAL_PERCENT = 0.5  # on GPUs; nvbench's default stopping rule is of the same size
LR_WARMUP_SHARE = 0.1  # of all updates of a run that has something to learn
FUSED_TRAINED = (9, "mixed_float16")  # major compute capability (Hopper) and precision, on H200s


def complete(choices: dict[str, Any], machine: Machine) -> tuple[BenchmarkConfig, list[str]]:
    """Fill in what was not chosen, and check everything that can be checked without TensorFlow.

    Args:
        choices: BenchmarkConfig's fields by name, None where the user made no choice; `gpus` may be "auto".
        machine: the devices that are there.

    Returns:
        The configuration, and sentences for the user about what was decided and what looks wrong.

    Raises:
        ConfigError: a choice that this machine, the model or the data rules out.
    """
    chosen = {name: value for name, value in choices.items() if value is not None}
    spec = MODELS[chosen["model"]]
    gpus, sentences = _gpus(chosen.pop("gpus", "auto"), machine)
    compute_capability = _least_capability(machine, gpus)
    chosen.setdefault("precision", fastest_precision(compute_capability if gpus else None))
    _refuse_precision(chosen["precision"], gpus, compute_capability)
    sizes = _sizes(spec.on_gpu if gpus else spec.on_cpu, chosen)
    if not gpus:
        sentences.append(_shrunk(spec, sizes))
    sized = sizes | chosen
    config = BenchmarkConfig(**_other_defaults(spec, sized, bool(gpus)) | sized | {"gpus": gpus})
    _refuse_sizes(config, spec)
    _refuse_loss_scale(config)
    config = dataclasses.replace(config, kernels=_kernels(config, spec, compute_capability))
    if "per_replica_batch_size" not in chosen:
        fits = _batch_that_fits(config, spec, machine)
        config = dataclasses.replace(config, per_replica_batch_size=fits)
    dataset_spec, _ = parse(config.data)
    dataset_spec.check(config, spec)
    require_image_files(config, dataset_spec)
    require_text_files(config)
    require_tfds(config)
    require_dali(config, dataset_spec)
    require_data_service(config, dataset_spec)
    return config, [*filter(None, sentences), *_doubts(config, compute_capability)]


def _gpus(asked: str | int, machine: Machine) -> tuple[int, list[str]]:
    """How many GPUs to use, and what to say about it.

    Raises:
        ConfigError: more than there are, or not a number.
    """
    present = len(machine.gpus)
    if asked == "auto":
        return present, [] if present else [f"No GPU is used: {machine.reason_without_gpu}."]
    try:
        gpus = int(asked)
    except ValueError:
        raise ConfigError("gpus", asked, "a whole number, or auto for all that are visible") from None
    if gpus > 1 and any(gpu.is_mig for gpu in machine.gpus):  # of which the probe never gives more than one
        raise ConfigError("gpus", gpus, "CUDA opens one MIG slice in a process: use --gpus=1")
    if gpus > present:
        why = f"only {present} visible" if present else f"none is visible: {machine.reason_without_gpu}"
        raise ConfigError("gpus", gpus, f"{why}. --gpus=auto takes what is there, --gpus=0 the CPU")
    return gpus, []


def _least_capability(machine: Machine, gpus: int) -> tuple[int, int] | None:
    """Of the GPUs that are used; None without one or where the driver does not say."""
    known = [gpu.compute_capability for gpu in machine.gpus[:gpus] if gpu.compute_capability]
    return min(known, default=None)


def _refuse_precision(precision: str, gpus: int, compute_capability: tuple[int, int] | None) -> None:
    """TF32 is a switch: a device without the units would silently compute in fp32.

    Raises:
        ConfigError: tf32 without them.
    """
    if precision != "tf32":
        return
    if not gpus:
        raise ConfigError("precision", precision, "a GPU only has TF32; the CPU computes fp32")
    if compute_capability is not None and compute_capability < (8, 0):
        version = ".".join(map(str, compute_capability))
        raise ConfigError(
            "precision", precision, f"needs compute capability 8.0, this GPU has {version}: fp32"
        )


def _sizes(defaults: Defaults, chosen: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the run that the user did not choose, whatever the memory."""
    sizes = {
        field.name: getattr(defaults, field.name)
        for field in dataclasses.fields(defaults)
        if field.name not in chosen
    }
    if "steps" in chosen and "windows" not in chosen:
        sizes["windows"] = min(defaults.windows, chosen["steps"])
    return sizes


def _batch_that_fits(config: BenchmarkConfig, spec: ModelSpec, machine: Machine) -> int:
    """Samples: the config's, halved until they fit into the smallest GPU's memory, but 8 at least."""
    batch = config.per_replica_batch_size
    mib_each = _activation_mib(config, spec) * (1 if config.precision.startswith("mixed") else 2)
    memories_mib = [gpu.memory_gib * 1024 for gpu in machine.gpus[: config.gpus] if gpu.memory_gib]
    while batch > 8 and memories_mib and batch * mib_each > MEMORY_SHARE * min(memories_mib):
        batch //= 2
    return batch


def _activation_mib(config: BenchmarkConfig, spec: ModelSpec) -> float:
    """Of a sample in half precision: with an image's pixels, a sequence's tokens and their pairs."""
    at, mib = spec.on_gpu, spec.activation_mib_per_sample
    if config.image_size and at.image_size:
        return mib * (config.image_size / at.image_size) ** 2
    assert config.seq_length
    assert at.seq_length
    longer = config.seq_length / at.seq_length
    pairs = spec.attention_mib_per_sample
    return (mib - pairs) * longer + pairs * longer ** (1 if config.kernels == "fused" else 2)


def _other_defaults(spec: ModelSpec, sized: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    """Everything else that depends on the model or the device."""
    total = sized["steps"] + sized["warmup_steps"]
    chosen = {"data": BenchmarkConfig.data, "lr_schedule": BenchmarkConfig.lr_schedule} | sized
    # The other schedules fall to 0 at the run's end, which so long a warm-up would put off.
    near_first_weights = chosen["data"] == "synthetic" and chosen["lr_schedule"] == "constant"
    return {
        "optimizer": spec.optimizer,
        "learning_rate": spec.learning_rate,
        "weight_decay": spec.weight_decay,
        "dropout": spec.dropout,
        "lr_warmup_steps": SYNTHETIC_LR_WARMUP_STEPS if near_first_weights else int(LR_WARMUP_SHARE * total),
        "xla": on_gpu,
        "target_interval_percent": TARGET_INTERVAL_PERCENT if on_gpu else 0.0,
    }


def _shrunk(spec: ModelSpec, sizes: dict[str, Any]) -> str:
    """What the CPU's defaults make of the run, for the user; empty where the user chose it all."""
    names = ("per_replica_batch_size", "image_size", "seq_length", "steps")
    shrunk = [f"--{name}={sizes[name]}" for name in names if sizes.get(name)]
    if not shrunk:
        return ""
    return (
        f"On the CPU {spec.name} runs small, to end in about two minutes: {' '.join(shrunk)}. "
        "It is a try-out: compare only with rows of the same sizes."
    )


def _refuse_sizes(config: BenchmarkConfig, spec: ModelSpec) -> None:
    """Sizes that the model cannot have.

    Raises:
        ConfigError: names the first of them.
    """
    reads, unread = ("image_size", "seq_length") if spec.kind == "image" else ("seq_length", "image_size")
    if getattr(config, unread) is not None:
        holds = {"image": "images", "text": "text"}[spec.kind]
        raise ConfigError(unread, getattr(config, unread), f"{spec.name} reads {holds}: --{reads}")
    if spec.max_seq_length and config.seq_length and config.seq_length > spec.max_seq_length:
        raise ConfigError("seq_length", config.seq_length, f"at most {spec.max_seq_length} for {spec.name}")
    if spec.kind == "image" and config.dropout:
        raise ConfigError("dropout", config.dropout, f"{spec.name} has no dropout: 0")


def _refuse_loss_scale(config: BenchmarkConfig) -> None:
    """Of a precision that has none.

    Raises:
        ConfigError: one was chosen.
    """
    scale = config.initial_loss_scale
    if scale != BenchmarkConfig.initial_loss_scale and not PRECISIONS[config.precision].scales_loss:
        raise ConfigError(
            "initial_loss_scale",
            scale,
            f"goes with --precision=mixed_float16 only, {config.precision} does not scale its loss",
        )


def _kernels(
    config: BenchmarkConfig, spec: ModelSpec, compute_capability: tuple[int, int] | None
) -> str | None:
    """Whose kernels the run takes: where nothing is asked for, fused ones where they have trained before.

    Raises:
        ConfigError: fused where they cannot run, or a model that has none.
    """
    if spec.head_size is None:
        if config.kernels is not None:
            raise ConfigError("kernels", config.kernels, f"{spec.name} has no choice: leave the flag out")
        return None
    why_not = obstacle(config, spec.head_size, compute_capability)
    if config.kernels == "fused" and why_not:
        raise ConfigError("kernels", config.kernels, f"{why_not}; --kernels=plain runs everywhere")
    trained = why_not is None and _where(config, compute_capability) == FUSED_TRAINED
    return config.kernels or ("fused" if trained else "plain")


def _where(config: BenchmarkConfig, compute_capability: tuple[int, int] | None) -> tuple[int, str]:
    """What FUSED_TRAINED names; 0 for a card that is not known."""
    return compute_capability[0] if compute_capability else 0, config.precision


def _doubts(config: BenchmarkConfig, compute_capability: tuple[int, int] | None) -> list[str]:
    """What will run, but not as the user may think."""
    doubts = []
    least = PRECISIONS[config.precision].least_compute_capability
    if least and compute_capability and compute_capability < least:
        doubts.append(
            f"--precision={config.precision} will not be faster than fp32: matrix units for it come with "
            f"compute capability {least[0]}.{least[1]}, this GPU has "
            f"{compute_capability[0]}.{compute_capability[1]}."
        )
    if config.gpus and config.precision.startswith("mixed"):
        doubts += [
            f"--{name}={value} is not a multiple of 8: tensor cores run below their rate."
            for name in ("per_replica_batch_size", "seq_length")
            if (value := getattr(config, name)) and value % 8
        ]
    doubts += _loop_doubts(config)
    if config.kernels == "fused" and _where(config, compute_capability) != FUSED_TRAINED:
        doubts.append(
            "--kernels=fused has trained on Hopper in mixed_float16 only: elsewhere it may be slower than "
            "--kernels=plain, need more shared memory than the card has, or skip steps: see steps_skipped."
        )
    return doubts


def _loop_doubts(config: BenchmarkConfig) -> list[str]:
    """What --steps_per_loop makes of the first, longest window, where a user may think otherwise."""
    doubts = []
    steps, asked = config.steps_of_windows[0], config.steps_per_loop
    rows = rows_of_window(steps, asked)
    row = max(rows)
    if asked > steps:
        singles = " and single steps" if 1 in rows else ""
        runs = f"steps run in rows of {row}{singles}" if row > 1 else "every step runs by itself"
        doubts.append(f"--steps_per_loop={asked}: a window has {steps} (--steps ÷ --windows), so {runs}.")
    if config.untimed_steps > config.warmup_steps:
        doubts.append(
            f"--warmup_steps={config.warmup_steps}: {config.untimed_steps} are made, which hold the first "
            f"row of {row} steps (--steps_per_loop={asked})."
        )
    return doubts
