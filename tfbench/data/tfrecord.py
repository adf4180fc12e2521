"""TFRecord files in the layout of ImageNet's: Examples of a JPEG and a label that counts from 1."""

import functools
import glob
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig
from tfbench.data import service
from tfbench.data.spec import DatasetSpec, Shard, argument_of, data_error, require_kind
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf

FILES_AT_ONCE = 16  # read in turn by one pipeline, so that neighbouring samples come from different files
# Of a file one after the other: to wake a reader for each record takes 5 to 8 % more CPU time. They are
# shuffled afterwards.
RECORDS_IN_TURN = 8

NO_NUMBER = -1  # of a record that is not counted
SAMPLED_RECORDS = 64  # whose sizes say how many there are
MAX_RECORDS_OF_A_FILE = 2**62

# A record is its length (uint64), 4 bytes of CRC, the data, 4 bytes of CRC:
# https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
_LENGTH_BYTES = 8
_CRC_BYTES = 4


def files_of(config: BenchmarkConfig) -> list[str]:
    """Files that match the glob of --data, sorted."""
    return sorted(path for path in glob.glob(os.path.expanduser(argument_of(config))) if os.path.isfile(path))


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    require_kind(config, spec, "image")
    files = files_of(config)
    if not files:
        raise data_error(
            config,
            f"no file matches {os.path.abspath(os.path.expanduser(argument_of(config)))}; expected a glob of "
            "TFRecord files, as in tfrecord:/data/imagenet/train-*",
        )
    for path in files:
        if os.path.getsize(path) == 0:
            raise data_error(config, f"{path} is empty: write it again or leave it out")
    if not starts_with_a_record(files[0]):
        raise data_error(config, f"{files[0]} is not an uncompressed TFRecord file, or it is cut short")


def starts_with_a_record(path: str) -> bool:
    """Returns whether the length that the first record states fits in the file."""
    with open(path, "rb") as file:
        header = file.read(_LENGTH_BYTES)
    if len(header) < _LENGTH_BYTES:
        return False
    data_bytes = int.from_bytes(header, "little")
    return _LENGTH_BYTES + _CRC_BYTES + data_bytes + _CRC_BYTES <= os.path.getsize(path)


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    from tfbench.data import pipeline

    assert spec.num_classes is not None
    paths = files_of(config)
    return pipeline.image_batches(
        _read(paths, config, shard),
        functools.partial(_parse, num_classes=spec.num_classes),
        config,
        shard,
        augment=True,
        num_records=-(-_estimate_records(paths) // shard.count),
    )


def _estimate_records(paths: list[str]) -> int:
    """Number of records of all files, by the first records' mean size."""
    sizes = list(itertools.islice(record_sizes(paths[0]), SAMPLED_RECORDS))
    return round(sum(os.path.getsize(path) for path in paths) * len(sizes) / sum(sizes))


def record_sizes(path: str | bytes) -> Iterator[int]:
    """Bytes of each record of a file, its framing included."""
    size, end = os.path.getsize(path), 0
    with open(path, "rb", buffering=0) as file:  # a buffer would be filled for 8 bytes of it
        while end < size and len(header := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            record_bytes = _LENGTH_BYTES + _CRC_BYTES + int.from_bytes(header, "little") + _CRC_BYTES
            end += record_bytes
            yield record_bytes
            if end < size:
                file.seek(end)


def _read(paths: list[str], config: BenchmarkConfig, shard: Shard) -> "tf.data.Dataset":
    """One epoch of (path, number, serialized Example) of a shard: of its own files where there are enough."""
    import tensorflow as tf

    names = list(map(os.fsencode, paths))  # need not be UTF-8, TensorFlow's strings are bytes
    if config.data_service:
        return service.dealt((names,), config, shard, at_once=1).interleave(
            _read_file_in_service,
            cycle_length=min(FILES_AT_ONCE, len(paths)),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    shard_files = len(paths) >= shard.count
    files = tf.data.Dataset.from_tensor_slices(names)
    if shard_files:
        files = files.shard(shard.count, shard.index)
    files = files.shuffle(len(paths), seed=config.seed, reshuffle_each_iteration=True)
    records = files.interleave(
        functools.partial(_read_file, shard=shard),
        cycle_length=min(FILES_AT_ONCE, len(paths)),
        block_length=RECORDS_IN_TURN,
        num_parallel_calls=tf.data.AUTOTUNE,
        # Pipelines that share files must agree on the order of the records.
        deterministic=config.deterministic or not shard_files,
    )
    return records if shard_files else records.shard(shard.count, shard.index)


def _read_file(path: "tf.Tensor", shard: Shard) -> "tf.data.Dataset":
    """(path, number, serialized Example) of a file.

    What follows a broken record cannot be found: it is reported as the place where the file was left.
    """
    import tensorflow as tf

    from tfbench.data import tolerant

    def count(name: bytes) -> int:
        num_records, end = _whole_records(name)
        if end != os.path.getsize(name):
            place = f"{tolerant.name_of(name, NO_NUMBER)} at byte {end}"
            shard.log.add_unreadable(place, f"cut short or corrupt after {num_records} records")
        return num_records

    def report(name: bytes) -> None:
        num_read = sum(1 for _ in tf.data.TFRecordDataset(name).ignore_errors())
        reason = "its checksum is wrong, and the rest of the file is left out"
        shard.log.add_unreadable(tolerant.name_of(name, num_read), reason)

    num_records = tf.ensure_shape(tf.numpy_function(count, [path], tf.int64), [])
    records = tf.data.TFRecordDataset(path, buffer_size=0)  # a buffer is one more copy of 100 kB and more
    data = tolerant.complete(records.ignore_errors(), num_records, report, (path,))
    paths = tf.data.Dataset.from_tensors(path).repeat()
    return tf.data.Dataset.zip((paths, tf.data.Dataset.range(MAX_RECORDS_OF_A_FILE), data))


def _read_file_in_service(path: "tf.Tensor") -> "tf.data.Dataset":
    """As `_read_file`, without the Python that a worker of a tf.data service does not have: no numbers."""
    import tensorflow as tf

    return tf.data.TFRecordDataset(path).map(lambda data: (path, NO_NUMBER, data))


def _whole_records(path: str | bytes) -> tuple[int, int]:
    """Number of records that a file holds whole, by the lengths that they state, and where the last ends."""
    ends = list(itertools.accumulate(record_sizes(path)))
    size = os.path.getsize(path)
    whole = [end for end in ends if end <= size]
    return len(whole), whole[-1] if whole else 0


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
    image_files=True,
    help="a glob of TFRecord files in ImageNet's layout: image/encoded, image/class/label from 1",
    check=_check,
    make=_make,
)
