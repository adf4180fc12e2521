"""What the harness needs to know of a data set. TensorFlow-free."""

import contextlib
import dataclasses
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf

Kind = Literal["image", "text"]
MAX_REASON_CHARACTERS = 200  # of TensorFlow's messages, which carry parts of graphs


class UnreadableError(ValueError):
    """Input that cannot be read, which ends the run."""


class InputLog:
    """What the input pipelines of a run have to say: what was decided, and which records are unreadable.

    Args:
        on_bad_record: "fail" ends the run at the first unreadable record, "skip" leaves it out.
    """

    def __init__(self, on_bad_record: str = "fail"):
        self.on_bad_record = on_bad_record
        self.notes: list[str] = []  # sentences for the user
        self.steps_to_fill_cache = 0  # 0: there is none
        self._unreadable: dict[str, str] = {}  # why, by name, in the order of their first appearance
        self._refusal: str | None = None
        self._lost_chunks = 0
        self._lock = threading.Lock()  # the pipelines' threads report

    @property
    def records_skipped(self) -> int:
        """Different records that were left out; one that is left out in every epoch counts once."""
        return len(self._unreadable)

    def add_unreadable(self, name: str, why: str) -> None:
        """Name a record that cannot be read.

        Raises:
            UnreadableError: it may not be left out.
        """
        why = why[:MAX_REASON_CHARACTERS]
        with self._lock:
            is_new = name not in self._unreadable
            self._unreadable.setdefault(name, why)
        if is_new:
            logging.getLogger("tfbench").warning("unreadable record: %s: %s", name, why)
        if self.on_bad_record == "fail":
            self.refuse(
                f"unreadable record: {name}: {why}. --on_bad_record=skip leaves such records out and counts "
                "them"
            )

    def add_chunk(self, *, lost: bool, limit: int) -> None:
        """Count a chunk of records with unreadable ones.

        Raises:
            UnreadableError: nothing could be read of `limit` chunks, so reading goes on in vain.
        """
        with self._lock:
            self._lost_chunks += lost
        if self._lost_chunks >= limit:
            self.refuse(
                f"{self.records_skipped} unreadable records, the first is {next(iter(self._unreadable))}: "
                "this data cannot be read"
            )

    def refuse(self, why: str) -> None:
        """End the run for a reason that its row gives.

        Raises:
            UnreadableError: always.
        """
        self._refusal = self._refusal or why
        raise UnreadableError(why)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """An error that a refusal of this log ends in inside the block is raised as this refusal.

        TensorFlow makes another error of it on the way through a pipeline, which names no record.
        """
        try:
            yield
        except Exception as error:
            if self._refusal is None:
                raise
            raise UnreadableError(self._refusal) from error

    def warning(self) -> str | None:
        """A sentence about the records left out; None where there are none."""
        if not self._unreadable:
            return None
        name, why = next(iter(self._unreadable.items()))
        return f"{self.records_skipped} unreadable record(s) left out, the first is {name}: {why}"


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How image files are read, whatever they give; `tfbench.input --compare` alone departs from this."""

    fused_decode: bool = True  # of a JPEG, only the blocks that the crop touches are decoded
    shuffle_records: int = 4096  # encoded ones in the buffer: about 0.45 GB of ImageNet's, 110 kB each
    workers: int | None = None  # that decode; None: one for each usable core


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a data set that one of `count` input pipelines reads; 0 <= index < count."""

    index: int
    count: int
    log: InputLog = dataclasses.field(default_factory=InputLog, compare=False)
    tuning: Tuning = Tuning()


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
    image_files: bool = False  # reads encoded images from files: --cache and --on_bad_record apply
    check: Callable[[BenchmarkConfig, ModelSpec], None]
    make: Callable[[BenchmarkConfig, ModelSpec, Shard], "tf.data.Dataset"]


def argument_of(config: BenchmarkConfig) -> str:
    """Returns what follows the first colon of --data."""
    return config.data.partition(":")[2]


def data_error(config: BenchmarkConfig, accepted: str) -> ConfigError:
    """Returns the error to raise where --data cannot be used; `accepted` says why and what to do.

    A file's name that is not UTF-8 is made one that can be printed.
    """
    data, why = (os.fsencode(text).decode(errors="replace") for text in (config.data, accepted))
    return ConfigError("data", data, why)


def require_kind(config: BenchmarkConfig, spec: ModelSpec, kind: Kind) -> None:
    """Refuses a model that reads something else.

    Raises:
        ConfigError: the model is not of this kind.
    """
    if spec.kind != kind:
        holds = {"image": "images", "text": "text"}
        name = config.data.partition(":")[0]
        others = {
            "image": "digits, tfds:NAME, tfrecord:GLOB, folder:PATH",
            "text": "pydoc, text:GLOB, tokens:PATH",
        }
        raise data_error(
            config,
            f"{name} has {holds[kind]}, {spec.name} reads {holds[spec.kind]}: "
            f"{others[spec.kind]} or synthetic would do",
        )


def require_image_files(config: BenchmarkConfig, dataset_spec: DatasetSpec) -> None:
    """Refuses choices about reading images from files where none are read.

    Raises:
        ConfigError: one was made.
    """
    for flag, default in (("cache", "none"), ("on_bad_record", "fail")):
        value = getattr(config, flag)
        if value != default and not dataset_spec.image_files:
            raise ConfigError(
                flag, value, f"goes with images read from files, not with --data={config.data}: {default}"
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
