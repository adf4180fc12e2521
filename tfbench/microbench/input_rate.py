"""How fast the host can feed a training: JPEG decoding per core, and reading of records.

Imports TensorFlow when something is measured.
"""

import dataclasses
import glob
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tfbench.data import tfrecord
from tfbench.measure.timing import Window
from tfbench.microbench.case import Case, Machine, Result
from tfbench.microbench.timed import WINDOWS

IMAGE = (375, 500)  # pixels, ImageNet's most frequent size
IMAGE_SIZE = 224  # after the crop
DIFFERENT_IMAGES = 32
SECONDS = 2.0  # on any device: it is the host that is measured
SECONDS_SHORT = 0.3
_MADE_FILES, _MADE_RECORDS, _RECORD_BYTES = 8, 64, 110_000  # ImageNet's mean record is about 110 kB


def cases(machine: Machine, files: Sequence[str] | None) -> Iterator[Case]:
    """Decoding on one core and on all, and reading records.

    Args:
        machine: says how long to measure.
        files: TFRecord files to read; None: small ones are made.
    """
    seconds = SECONDS if machine.on_gpu and not machine.quick else SECONDS_SHORT
    cores = len(os.sched_getaffinity(0))
    for per_core in (True, False):
        what = "per core" if per_core else f"on {cores} cores"
        yield Case(
            benchmark="input",
            name=f"JPEG decode and crop to {IMAGE_SIZE}, {what}",
            measure=partial(decode, cores, seconds, per_core),
        )
    yield Case(benchmark="input", name="record reading", measure=partial(read, files, cores, seconds))


def decode(cores: int, seconds: float, per_core: bool) -> Result:
    """Images per second of the training's own fused decode-and-crop, and resize, on all cores.

    Args:
        cores: threads that decode.
        seconds: of measuring.
        per_core: by this process's CPU time, not the clock, so that cores which others hold do not count.
    """
    import tensorflow as tf

    from tfbench.data import pipeline

    encoded = [_jpeg(seed) for seed in range(DIFFERENT_IMAGES)]
    images = tf.constant(encoded)

    def one(visit: Any) -> Any:
        image = pipeline.random_crop(images[visit % DIFFERENT_IMAGES], tf.stack([visit, visit]))
        return tf.cast(pipeline.resize(image, IMAGE_SIZE)[0, 0, 0], tf.int64)

    options = tf.data.Options()
    options.threading.private_threadpool_size = cores
    options.threading.max_intra_op_parallelism = 1
    with tf.device("CPU:0"):
        decoded = tf.data.Dataset.range(2**40).map(one, num_parallel_calls=cores, deterministic=False)
        drained = _drain(decoded.batch(DIFFERENT_IMAGES).with_options(options), seconds)
    return Result(
        rates=tuple(
            each.window.steps * DIFFERENT_IMAGES / (each.cpu_s if per_core else each.window.seconds)
            for each in drained
        ),
        unit="images/s per core" if per_core else "images/s",
        windows=tuple(each.window for each in drained),
        note=f"{IMAGE[1]}x{IMAGE[0]} JPEGs of noise over a gradient, {len(encoded[0])} bytes",
    )


def _jpeg(seed: int) -> bytes:
    """An image with fine and coarse structure, so that it compresses about as photographs do."""
    import tensorflow as tf

    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[0 : IMAGE[0], 0 : IMAGE[1]]
    smooth = 128 + 60 * np.sin(rows / 40 + seed)[..., None] + 40 * np.cos(columns / 25)[..., None]
    pixels = np.clip(smooth + generator.normal(0, 12, (*IMAGE, 3)), 0, 255).astype(np.uint8)
    encoded: bytes = tf.io.encode_jpeg(pixels, quality=90).numpy()
    return encoded


def read(files: Sequence[str] | None, cores: int, seconds: float) -> Result:
    """MB per second of reading TFRecord files, several at once.

    Args:
        files: TFRecord files; None: small ones in a temporary folder, which stay in the page cache.
        cores: files read at once.
        seconds: of measuring.

    Raises:
        tf.errors.DataLossError: a record is damaged.
    """
    if files is not None:
        where = f"{len(files)} files of {os.path.dirname(os.path.abspath(files[0]))}"
        return _read(files, cores, seconds, f"{where}; what was read before is cached")
    with tempfile.TemporaryDirectory(prefix="tfbench_micro_") as folder:
        return _read(_make(Path(folder)), cores, seconds, "small files, made here and cached by the system")


def files_of(data: str) -> list[str]:
    """TFRecord files of a glob, or in a folder; what else is there, such as a manifest, is left out."""
    path = os.path.expanduser(data)
    pattern = os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path
    files = filter(os.path.isfile, glob.glob(pattern))
    return sorted(filter(tfrecord.starts_with_a_record, files))


def _make(folder: Path) -> list[str]:
    """Files of random records, which compress as little as JPEGs."""
    import tensorflow as tf

    generator = np.random.default_rng(0)
    paths = [str(folder / f"part-{index}.tfrecord") for index in range(_MADE_FILES)]
    for path in paths:
        with tf.io.TFRecordWriter(path) as writer:
            for _ in range(_MADE_RECORDS):
                writer.write(generator.bytes(_RECORD_BYTES))
    return paths


def _read(paths: Sequence[str], cores: int, seconds: float, note: str) -> Result:
    """MB/s of all files, over and over."""
    import tensorflow as tf

    with tf.device("CPU:0"):
        files = tf.data.Dataset.from_tensor_slices(list(map(os.fsencode, paths))).repeat()
        records = files.interleave(
            tf.data.TFRecordDataset, cycle_length=min(cores, len(paths)), num_parallel_calls=cores
        )
        sizes = records.map(lambda record: tf.cast(tf.strings.length(record), tf.int64)).batch(64)
        drained = _drain(sizes, seconds)
    return Result(
        rates=tuple(each.total / 1e6 / each.window.seconds for each in drained),
        unit="MB/s",
        windows=tuple(each.window for each in drained),
        note=note,
    )


@dataclasses.dataclass(frozen=True)
class _Drained:
    """One window of taking batches."""

    window: Window  # counts batches
    total: int  # sum of the batches' numbers
    cpu_s: float  # of all threads of this process


def _drain(dataset: Any, seconds: float) -> list[_Drained]:
    """Takes batches of integers for about `seconds`.

    The host does the work, so there is no device to wait for; one batch is taken before the clock starts.
    """
    iterator = iter(dataset)
    next(iterator)
    drained = []
    for index in range(WINDOWS):
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        batches, total = 0, 0
        while not batches or time.monotonic() - start_s < seconds / WINDOWS:
            total += int(np.sum(next(iterator).numpy(), dtype=np.int64))
            batches += 1
        window = Window(index, batches, batches, start_s, time.monotonic())
        drained.append(_Drained(window, total, time.process_time() - start_cpu_s))
    return drained
