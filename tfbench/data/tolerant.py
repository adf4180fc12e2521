"""Reading records of which some may be broken: each is named, and ends the run or is left out.

TensorFlow's own errors do not say which record they come from, and end an input pipeline. Imports TensorFlow.
"""

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfbench.data.spec import Shard

# Records that one worker reads in a row: looking for broken ones costs per chunk, not per record. Starting on
# a chunk took 0.5 ms of CPU time, which was 60 µs for each image with 8.
CHUNK_RECORDS = 32
CHUNKS_AHEAD = 2  # for each worker
# What TensorFlow's messages say of where in its own graph something happened.
_PLACE = re.compile(r"\{\{.*?\}\}\s*")
# Chunks without a readable record after which reading goes on in vain.
MAX_LOST_CHUNKS = 31


def read_each(
    records: tf.data.Dataset,
    read: Callable[..., dict[str, tf.Tensor]],
    shard: Shard,
    *,
    keep_order: bool,
) -> tf.data.Dataset:
    """Applies `read` to every record in parallel; a record that it fails on is reported to the shard's log.

    Args:
        records: data set of (path, number, …): string and integer that name a record as `name_of` does, and
            what `read` takes; in tuples of tuples too.
        read: → one sample.
        shard: its log names the records, and decides whether one ends the run.
        keep_order: samples keep the order of the records.

    Returns:
        Data set of the samples of the readable records.
    """

    def read_chunk(*nested: Any) -> tf.data.Dataset:
        chunk = tuple(tf.nest.flatten(nested))
        samples = tf.data.Dataset.from_tensor_slices(chunk).map(lambda path, number, *record: read(*record))
        return complete(samples.ignore_errors(), tf.size(chunk[0], tf.int64), report, chunk)

    traced_once = tf.function(read)

    def report(*chunk: np.ndarray) -> None:
        _report_chunk(traced_once, shard, chunk)

    workers = shard.tuning.workers or usable_cores()
    # By a thread of its own: interleaving fetches and hands out behind one lock, so that all workers would
    # wait while a chunk comes together, and at an epoch's start while the shuffle buffer fills.
    chunks = records.batch(CHUNK_RECORDS).prefetch(CHUNKS_AHEAD * workers)
    return chunks.interleave(
        read_chunk,
        cycle_length=2 * workers,
        block_length=CHUNK_RECORDS,  # whole chunks, so that the order can be kept
        num_parallel_calls=workers,
        deterministic=keep_order,
    )


def complete(
    elements: tf.data.Dataset,
    count: tf.Tensor,
    report: Callable[..., None],
    arguments: tuple[tf.Tensor, ...],
) -> tf.data.Dataset:
    """The elements as they are; `report` is called after the last one if there are fewer than `count`.

    Nothing is done for each element, so that it costs nothing where all is well.

    Args:
        elements: a finite data set.
        count: elements that there should be.
        report: called with `arguments` as NumPy values; what it raises becomes an error of the data set.
        arguments: tensors.
    """

    def call(*values: np.ndarray) -> np.bool_:
        report(*values)
        return np.False_

    def none_left(_: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(call, arguments, tf.bool), [])

    no_element = tf.nest.map_structure(zeros, elements.element_spec)
    reported = tf.data.Dataset.range(1).filter(none_left).map(lambda _: no_element)
    return elements.concatenate(reported).take(count)


def name_of(path: bytes, number: int) -> str:
    """What a record is called: its file, and its number there, from 0, unless this is negative."""
    file = path.decode(errors="replace")
    return file if number < 0 else f"{file}, record {number}"


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _report_chunk(
    read: Callable[..., dict[str, tf.Tensor]], shard: Shard, chunk: tuple[np.ndarray, ...]
) -> None:
    """Reads the records of a chunk once more, to name those that cannot be read."""
    reasons = [_why(read, [column[index] for column in chunk[2:]]) for index in range(len(chunk[0]))]
    for path, number, reason in zip(chunk[0], chunk[1], reasons, strict=True):
        if reason:
            shard.log.add_unreadable(name_of(path, number), reason)
    if not any(reasons):
        name = name_of(chunk[0][0], chunk[1][0])
        shard.log.add_unreadable(f"{name} or one soon after", "it could be read when tried again")
    shard.log.add_chunk(lost=all(reasons), limit=MAX_LOST_CHUNKS)


def _why(read: Callable[..., dict[str, tf.Tensor]], record: list[np.ndarray]) -> str:
    """What `read` says about a record; empty where it can be read."""
    try:
        read(*map(tf.convert_to_tensor, record))
    except tf.errors.OpError as error:
        # The last line that does not only say where in the graph it happened.
        lines = [_PLACE.sub("", line).strip() for line in error.message.splitlines() if "[[" not in line]
        return ["TensorFlow gives no reason", *filter(None, lines)][-1]
    return ""


def zeros(spec: tf.TensorSpec) -> tf.Tensor:
    """A value of a sample's kind, as small as its shape allows."""
    return tf.zeros([size or 0 for size in spec.shape], spec.dtype)
