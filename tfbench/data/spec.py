"""What the harness needs to know of a data set. TensorFlow-free."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf

Kind = Literal["image", "text"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a data set that one of `count` input pipelines reads; 0 <= index < count."""

    index: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """One source of training batches.

    `check` looks, in seconds and without the network, for everything `make` needs, and raises ConfigError
    where it is missing. `make` returns an endless data set of batches as `tfbench.models.spec.ModelSpec`
    describes them, each of `config.samples_per_replica_per_step` samples and of static shape.
    """

    name: str
    kinds: frozenset[Kind]  # of the models that can read it
    takes_argument: bool  # --data=NAME:ARGUMENT
    help: str  # one line
    check: Callable[[BenchmarkConfig, ModelSpec], None]
    make: Callable[[BenchmarkConfig, ModelSpec, Shard], "tf.data.Dataset"]


def argument_of(config: BenchmarkConfig) -> str:
    """Returns what follows the first colon of --data."""
    return config.data.partition(":")[2]


def data_error(config: BenchmarkConfig, accepted: str) -> ConfigError:
    """Returns the error to raise where --data cannot be used; `accepted` says why and what to do."""
    return ConfigError("data", config.data, accepted)


def require_kind(config: BenchmarkConfig, spec: ModelSpec, kind: Kind) -> None:
    """Refuses a model that reads something else.

    Raises:
        ConfigError: the model is not of this kind.
    """
    if spec.kind != kind:
        holds = {"image": "images", "text": "text"}
        name = config.data.partition(":")[0]
        others = {"image": "digits, tfds:NAME, tfrecord:GLOB", "text": "pydoc"}
        raise data_error(
            config,
            f"{name} has {holds[kind]}, {spec.name} reads {holds[spec.kind]}: "
            f"{others[spec.kind]} or synthetic would do",
        )


def require_classes(config: BenchmarkConfig, spec: ModelSpec, num_classes: int) -> None:
    """Refuses a model with too few outputs for the labels.

    Raises:
        ConfigError: a label could be `spec.num_classes` or more.
    """
    if spec.num_classes is None or num_classes > spec.num_classes:
        raise data_error(
            config, f"has {num_classes} classes, {spec.name} tells only {spec.num_classes} apart"
        )


def require_packages(config: BenchmarkConfig, *modules: str) -> None:
    """Refuses to go on without packages of the `data` extra, without importing them.

    Raises:
        ConfigError: one is not installed.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise data_error(config, f"needs {', '.join(missing)}: pip install 'tfbench[data]'")
