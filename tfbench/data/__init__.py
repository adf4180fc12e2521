"""The training data, by name. Known without TensorFlow: a spec's functions import it when called."""

from tfbench.config import ConfigError
from tfbench.data.dali import require_dali
from tfbench.data.digits import DIGITS
from tfbench.data.folder import FOLDER
from tfbench.data.pydoc import PYDOC
from tfbench.data.service import require_data_service
from tfbench.data.source import Input, open_input
from tfbench.data.spec import DatasetSpec, InputLog, Shard, require_image_files
from tfbench.data.synthetic import SYNTHETIC, synthetic_batch
from tfbench.data.text import TEXT, require_text_files
from tfbench.data.tfds import TFDS, require_tfds
from tfbench.data.tfrecord import TFRECORD
from tfbench.data.token_source import TOKENS

DATASETS: dict[str, DatasetSpec] = {
    spec.name: spec for spec in (SYNTHETIC, DIGITS, PYDOC, TFDS, TFRECORD, FOLDER, TEXT, TOKENS)
}

__all__ = [
    "DATASETS",
    "DatasetSpec",
    "Input",
    "InputLog",
    "Shard",
    "open_input",
    "parse",
    "require_dali",
    "require_data_service",
    "require_image_files",
    "require_text_files",
    "require_tfds",
    "synthetic_batch",
]


def parse(data: str) -> tuple[DatasetSpec, str | None]:
    """Splits a value of --data, NAME or NAME:ARGUMENT.

    Returns:
        The data set, and its argument where it takes one.

    Raises:
        ConfigError: an unknown name, or an argument that is missing or not wanted.
    """
    name, colon, argument = data.partition(":")
    if name not in DATASETS:
        usages = (f"{spec.name}:ARGUMENT" if spec.takes_argument else spec.name for spec in DATASETS.values())
        raise ConfigError("data", data, f"one of {', '.join(usages)}")
    spec = DATASETS[name]
    if spec.takes_argument and not argument:
        raise ConfigError("data", data, f"{name} needs an argument, {name}:ARGUMENT: {spec.help}")
    if colon and not spec.takes_argument:
        raise ConfigError("data", data, f"{name} takes no argument: --data={name}")
    return spec, argument or None
