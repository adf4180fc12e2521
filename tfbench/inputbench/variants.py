"""The input of a run with one thing changed at a time. Imports TensorFlow."""

import dataclasses
import functools
import os
from collections.abc import Iterator

import tensorflow as tf

from tfbench.config import BenchmarkConfig
from tfbench.data import InputLog, Shard, parse, pipeline
from tfbench.data.spec import Tuning
from tfbench.data.tolerant import usable_cores
from tfbench.inputbench.compare import BASELINE, Variant
from tfbench.inputbench.cuts import cuts
from tfbench.inputbench.pipeline import taker
from tfbench.models import MODELS

RECORDS_IN_MEMORY = 512  # that the bare decoders read again and again: 56 MB of ImageNet's
_TUNINGS = {
    "decode whole": ("each image is decoded whole, then cropped", Tuning(fused_decode=False)),
    "one worker": ("one chunk of records is decoded at a time", Tuning(workers=1)),
    "workers x 2": ("two workers for each core", Tuning(workers=2 * usable_cores())),
    "no shuffle": ("the records come as they lie", Tuning(shuffle_records=1)),
}


def variants(config: BenchmarkConfig, others: list[str]) -> Iterator[Variant]:
    """What applies to the data, the input as it is first.

    Args:
        config: of the run.
        others: further values of --data to put beside its own.
    """
    yield _variant(BASELINE, "", config)
    dataset_spec, _ = parse(config.data)
    if dataset_spec.image_files:
        for name, (change, tuning) in _TUNINGS.items():
            if config.cache == "none" or not tuning.fused_decode:
                yield _variant(name, change, config, tuning)
        other_cache = "ram" if config.cache == "none" else "none"
        cached = dataclasses.replace(config, cache=other_cache)
        yield _variant(f"cache {other_cache}", f"--cache={other_cache}", cached)
    kept = dataclasses.replace(config, deterministic=not config.deterministic)
    yield _variant("any order" if config.deterministic else "order kept", "the other --deterministic", kept)
    yield from _of_the_end(config)
    for number, other in enumerate(others, start=1):
        yield _variant(f"other data {number}", f"--data={other}", dataclasses.replace(config, data=other))
    if dataset_spec.name == "tfrecord":
        yield from _plain(config)


def _variant(name: str, change: str, config: BenchmarkConfig, tuning: Tuning | None = None) -> Variant:
    log = InputLog(config.on_bad_record)
    return _of_batches(name, change, config, _made(config, log, tuning or Tuning()), log)


def _made(config: BenchmarkConfig, log: InputLog, tuning: Tuning) -> tf.data.Dataset:
    return parse(config.data)[0].make(config, MODELS[config.model], Shard(0, 1, log, tuning))


def _of_batches(
    name: str, change: str, config: BenchmarkConfig, dataset: tf.data.Dataset, log: InputLog
) -> Variant:
    start = functools.partial(taker, dataset, config.samples_per_replica_per_step)
    return Variant(name, change, start, log.steps_to_fill_cache * config.global_batch_size, log)


def _of_the_end(config: BenchmarkConfig) -> Iterator[Variant]:
    """Without the last buffer, and all in one thread."""
    log = InputLog(config.on_bad_record)
    dataset = _made(config, log, Tuning())
    for cut in cuts(dataset, config.samples_per_replica_per_step)[-1:]:
        unbuffered = cut.dataset.with_options(dataset.options())
        yield _of_batches("no prefetch", "no batch is made ahead", config, unbuffered, log)
    one = tf.data.Options()
    one.threading.private_threadpool_size = 1
    log = InputLog(config.on_bad_record)
    threaded = _made(config, log, Tuning()).with_options(one)
    yield _of_batches("one thread", "one thread for all of the input", config, threaded, log)


def _plain(config: BenchmarkConfig) -> Iterator[Variant]:
    """What a first try with tf.data looks like, and what the decoder alone can do."""
    size, log = config.image_size, InputLog()
    assert size is not None
    records = tf.data.TFRecordDataset(
        tf.data.Dataset.list_files(os.path.expanduser(parse(config.data)[1] or ""), seed=config.seed),
        num_parallel_reads=tf.data.AUTOTUNE,
    )

    def naive(number: tf.Tensor, serialized: tf.Tensor) -> dict[str, tf.Tensor]:
        encoded, label = _unpacked(serialized)
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        image = tf.image.resize(pipeline.cut(image, _seed(number)), [size, size])
        image = tf.image.stateless_random_flip_left_right(image, _seed(number))
        return {"image": tf.cast(image, tf.uint8), "label": label}

    mixed = records.shuffle(Tuning().shuffle_records).repeat().enumerate()
    batches = mixed.map(naive, tf.data.AUTOTUNE).batch(config.samples_per_replica_per_step)
    change = "a plain tf.data pipeline: whole images decoded, AUTOTUNE for all"
    yield _of_batches("naive", change, config, batches.prefetch(tf.data.AUTOTUNE), log)

    encoded = records.take(RECORDS_IN_MEMORY).map(lambda record: _unpacked(record)[0])
    kept = tf.data.Dataset.from_tensor_slices(list(encoded.as_numpy_iterator())).repeat().enumerate()
    threads = tf.data.Options()
    threads.deterministic = False
    threads.threading.private_threadpool_size = usable_cores()
    threads.threading.max_intra_op_parallelism = 1

    def whole(_: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
        return pipeline.decode_whole(image)

    def crop(number: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
        return pipeline.random_crop(image, _seed(number))

    def crop_and_resize(number: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
        return pipeline.resize(crop(number, image), size)

    for name, change, call in (
        ("bare decode, whole", "whole images decoded from records in memory, nothing else", whole),
        ("bare decode", "crops decoded from records in memory, nothing else", crop),
        ("bare decode, resize", "crops decoded and resized from records in memory", crop_and_resize),
    ):
        samples = kept.map(call, usable_cores()).with_options(threads)
        yield Variant(name, change, functools.partial(taker, samples, 1), 0, log)


def _unpacked(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Encoded image and label of an Example in ImageNet's layout."""
    features = {"image/encoded": tf.string, "image/class/label": tf.int64}
    example = tf.io.parse_single_example(
        serialized, {name: tf.io.FixedLenFeature([], dtype) for name, dtype in features.items()}
    )
    return example["image/encoded"], example["image/class/label"] - 1


def _seed(number: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.zeros([], tf.int64), number])
