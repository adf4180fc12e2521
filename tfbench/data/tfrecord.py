"""TFRecord files in the layout of ImageNet's: Examples of a JPEG and a label that counts from 1."""

import functools
import glob
import os
from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig
from tfbench.data.spec import DatasetSpec, Shard, argument_of, data_error, require_kind
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf

FILES_AT_ONCE = 16  # read in turn by one pipeline, so that neighbouring samples come from different files

# A record is its length (uint64), 4 bytes of CRC, the data, 4 bytes of CRC:
# https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
_LENGTH_BYTES = 8
_CRC_BYTES = 4


def _files(config: BenchmarkConfig) -> list[str]:
    return sorted(path for path in glob.glob(os.path.expanduser(argument_of(config))) if os.path.isfile(path))


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    require_kind(config, spec, "image")
    files = _files(config)
    if not files:
        raise data_error(
            config,
            f"no file matches {os.path.abspath(os.path.expanduser(argument_of(config)))}; expected a glob of "
            "TFRecord files, as in tfrecord:/data/imagenet/train-*",
        )
    for path in files:
        if os.path.getsize(path) == 0:
            raise data_error(config, f"{path} is empty: write it again or leave it out")
    if not _starts_with_a_record(files[0]):
        raise data_error(config, f"{files[0]} is not an uncompressed TFRecord file, or it is cut short")


def _starts_with_a_record(path: str) -> bool:
    """Returns whether the length that the first record states fits in the file."""
    with open(path, "rb") as file:
        header = file.read(_LENGTH_BYTES)
    if len(header) < _LENGTH_BYTES:
        return False
    data_bytes = int.from_bytes(header, "little")
    return _LENGTH_BYTES + _CRC_BYTES + data_bytes + _CRC_BYTES <= os.path.getsize(path)


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    from tfbench.data import pipeline

    records = _read(_files(config), config, spec, shard)
    return pipeline.image_batches(records, config, shard, augment=True)


def _read(paths: list[str], config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    """One epoch of (encoded image, label from 0) of a shard: of its own files where there are enough."""
    import tensorflow as tf

    shard_files = len(paths) >= shard.count
    files = tf.data.Dataset.from_tensor_slices(paths)
    if shard_files:
        files = files.shard(shard.count, shard.index)
    files = files.shuffle(len(paths), seed=config.seed, reshuffle_each_iteration=True)
    records = files.interleave(
        tf.data.TFRecordDataset,
        cycle_length=min(FILES_AT_ONCE, len(paths)),
        num_parallel_calls=tf.data.AUTOTUNE,
        # Pipelines that share files must agree on the order of the records.
        deterministic=config.deterministic or not shard_files,
    )
    if not shard_files:
        records = records.shard(shard.count, shard.index)

    assert spec.num_classes is not None
    parse = functools.partial(_parse, num_classes=spec.num_classes)
    return records.map(parse, num_parallel_calls=tf.data.AUTOTUNE)


def _parse(serialized: "tf.Tensor", num_classes: int) -> tuple["tf.Tensor", "tf.Tensor"]:
    """Reads an Example; a label outside [1, num_classes] ends in InvalidArgumentError."""
    import tensorflow as tf

    example = tf.io.parse_single_example(
        serialized,
        {
            "image/encoded": tf.io.FixedLenFeature([], tf.string),
            "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        },
    )
    stored = example["image/class/label"]
    in_range = tf.debugging.Assert(
        (stored >= 1) & (stored <= num_classes),
        [f"--data=tfrecord: image/class/label must be within [1, {num_classes}], a record has", stored],
    )
    with tf.control_dependencies([in_range]):
        return example["image/encoded"], stored - 1


TFRECORD = DatasetSpec(
    name="tfrecord",
    kinds=frozenset({"image"}),
    takes_argument=True,
    help="a glob of TFRecord files in ImageNet's layout: image/encoded, image/class/label from 1",
    check=_check,
    make=_make,
)
