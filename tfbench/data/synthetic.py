"""Random batches: the rate of the model alone, with no input pipeline."""

from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig
from tfbench.data.spec import DatasetSpec, Shard
from tfbench.models.spec import Batch, ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf


def synthetic_batch(config: BenchmarkConfig, spec: ModelSpec, seed: int) -> Batch:
    """Draws one replica's batch, on the current device; equal seeds give equal batches.

    Args:
        config: gives the batch size B = samples_per_replica_per_step and image_size or seq_length.
        spec: gives the kind of batch and the number of classes or the size of the vocabulary.
        seed: of this batch.

    Returns:
        A batch as `ModelSpec` describes it, every token real and every masked place used.
    """
    return _image_batch(config, spec, seed) if spec.kind == "image" else _text_batch(config, spec, seed)


def _image_batch(config: BenchmarkConfig, spec: ModelSpec, seed: int) -> Batch:
    import tensorflow as tf

    batch, size = config.samples_per_replica_per_step, config.image_size
    pixels = tf.random.stateless_uniform([batch, size, size, 3], [seed, 0], 0, 256, tf.int32)
    labels = tf.random.stateless_uniform([batch], [seed, 1], 0, spec.num_classes, tf.int32)
    return {"image": tf.cast(pixels, tf.uint8), "label": labels}


def _text_batch(config: BenchmarkConfig, spec: ModelSpec, seed: int) -> Batch:
    import tensorflow as tf

    from tfbench.models.bert import masked_positions

    assert config.seq_length is not None
    batch, length = config.samples_per_replica_per_step, config.seq_length
    places = masked_positions(length)
    # The first places of a random order of all positions: distinct without rejecting any.
    order = tf.argsort(tf.random.stateless_uniform([batch, length], [seed, 0]))
    return {
        "input_ids": tf.random.stateless_uniform([batch, length], [seed, 1], 0, spec.vocab_size, tf.int32),
        "attention_mask": tf.ones([batch, length], tf.int32),
        "masked_positions": tf.sort(order[:, :places]),
        "masked_ids": tf.random.stateless_uniform([batch, places], [seed, 2], 0, spec.vocab_size, tf.int32),
        "masked_weights": tf.ones([batch, places], tf.float32),
    }


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    """Every model can read random batches, and nothing has to be there beforehand."""


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    import tensorflow as tf

    batch = synthetic_batch(config, spec, seed=config.seed + shard.index)
    return tf.data.Dataset.from_tensors(batch).repeat()


SYNTHETIC = DatasetSpec(
    name="synthetic",
    kinds=frozenset({"image", "text"}),
    takes_argument=False,
    help="one random batch that stays on the device",
    check=_check,
    make=_make,
)
