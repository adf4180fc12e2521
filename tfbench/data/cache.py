"""Whether the decoded images of a data set are kept in RAM: measured, never guessed. Imports TensorFlow."""

from collections.abc import Callable

import psutil
import tensorflow as tf

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.data import tolerant
from tfbench.data.spec import InputLog, Shard

GIB = 2**30
SAMPLED_RECORDS = 64
# Of the memory available when the run starts; the rest is for the model, shuffling and batches.
MEMORY_SHARE = 0.8


def wanted(
    config: BenchmarkConfig,
    shard: Shard,
    records: tf.data.Dataset,
    decode: Callable[..., dict[str, tf.Tensor]],
    num_records: int,
) -> bool:
    """Decides --cache by the size of some decoded samples and the memory that is available.

    Args:
        config: gives the wish.
        shard: its log takes the decision's reason.
        records: one epoch, as for `tolerant.read_each`.
        decode: → the sample that would be kept.
        num_records: of the epoch.

    Returns:
        Whether to keep the samples.

    Raises:
        ConfigError: --cache=ram, and they do not fit.
    """
    if config.cache == "none":
        return False
    needed_gib = mean_sample_bytes(records, decode, shard) * num_records / GIB
    available_gib = psutil.virtual_memory().available / GIB
    figures = (
        f"about {num_records:,} decoded images take {needed_gib:,.2f} GiB, and {MEMORY_SHARE:.0%} of the "
        f"{available_gib:,.2f} GiB of RAM available may be used"
    )
    fits = needed_gib <= MEMORY_SHARE * available_gib
    if not fits and config.cache == "ram":
        raise ConfigError("cache", "ram", f"does not fit: {figures}. --cache=none reads them again each time")
    if fits:
        # The window's rate is the disk's and the decoder's until everything has been seen once.
        steps = -(-num_records // (config.global_batch_size))
        shard.log.steps_to_fill_cache = steps
        shard.log.notes.append(
            f"cache: in RAM ({figures}); it fills in the first {steps:,} steps, give --warmup_steps as many "
            "to measure what follows"
        )
    else:
        shard.log.notes.append(f"cache: none, it does not fit ({figures})")
    return fits


def mean_sample_bytes(
    records: tf.data.Dataset, decode: Callable[..., dict[str, tf.Tensor]], shard: Shard
) -> float:
    """Mean size of the first readable samples, all their tensors together.

    Raises:
        ConfigError: none is readable.
    """
    # Found again, and judged, when they are read for the run.
    log = InputLog("skip")
    samples = tolerant.read_each(
        records.take(SAMPLED_RECORDS), decode, Shard(shard.index, shard.count, log), keep_order=False
    )
    sizes = [sum(value.nbytes for value in sample.values()) for sample in samples.as_numpy_iterator()]
    if not sizes:
        raise ConfigError("cache", "ram", f"nothing to keep: {log.warning() or 'there are no records'}")
    return sum(sizes) / len(sizes)
