"""Folders of JPEG and PNG files, one a class, in the layout of Keras and torchvision."""

import os
from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig
from tfbench.data import service
from tfbench.data.spec import DatasetSpec, Shard, argument_of, data_error, require_classes, require_kind
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf

NO_NUMBER = -1  # of a record that its path names
# To a worker of a tf.data service, which asks its dispatcher for them.
FILES_DEALT_AT_ONCE = 64
SUFFIXES = (".jpg", ".jpeg", ".png")  # in any case


def _classes(config: BenchmarkConfig) -> list[tuple[str, list[str]]]:
    """Class folders and the paths of their images, both sorted by name; hidden entries are passed over.

    Raises:
        ConfigError: there are no class folders, or one holds no images.
    """
    root = os.path.abspath(os.path.expanduser(argument_of(config)))
    if not os.path.isdir(root):
        raise data_error(config, f"{root} is not a folder; expected folder:PATH with a folder for each class")
    names = sorted(e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise data_error(config, f"{root} has no folders in it; expected one for each class")
    return [(name, _images(config, os.path.join(root, name))) for name in names]


def _images(config: BenchmarkConfig, folder: str) -> list[str]:
    files = sorted(e.path for e in os.scandir(folder) if e.is_file() and not e.name.startswith("."))
    images = [path for path in files if path.lower().endswith(SUFFIXES)]
    if not images:
        held = (
            f"it has {len(files)} other file(s), such as {os.path.basename(files[0])}" if files else "empty"
        )
        raise data_error(
            config, f"{folder} has no {', '.join(SUFFIXES)} file ({held}): add some or remove it"
        )
    return images


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    require_kind(config, spec, "image")
    require_classes(config, spec, len(_classes(config)))


def labelled(config: BenchmarkConfig) -> list[tuple[str, int]]:
    """Path and label of every image: labels count the class folders by name from 0.

    Raises:
        ConfigError: as for `_classes`.
    """
    return [(path, label) for label, (_, paths) in enumerate(_classes(config)) for path in paths]


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    """The order of each epoch is over all files."""
    import tensorflow as tf

    from tfbench.data import pipeline

    paths, labels = map(list, zip(*labelled(config), strict=True))
    paths = list(map(os.fsencode, paths))  # a name need not be UTF-8, TensorFlow's strings are bytes
    if config.data_service:
        files = service.dealt((paths, labels), config, shard, at_once=FILES_DEALT_AT_ONCE)
    else:
        files = (
            tf.data.Dataset.from_tensor_slices((paths, labels))
            .shuffle(len(paths), seed=config.seed, reshuffle_each_iteration=True)
            .shard(shard.count, shard.index)
        )
    return pipeline.image_batches(
        files.map(lambda path, label: (path, NO_NUMBER, path, label)),
        lambda path, label: (tf.io.read_file(path), label),
        config,
        shard,
        augment=True,
        num_records=-(-len(paths) // shard.count),
    )


FOLDER = DatasetSpec(
    name="folder",
    kinds=frozenset({"image"}),
    takes_argument=True,
    image_files=True,
    help="a folder with a folder of JPEG and PNG files for each class, labelled by the order of their names",
    check=_check,
    make=_make,
)
