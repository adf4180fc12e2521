"""Masked language modelling: which tokens of a sequence are hidden, drawn anew on every visit.

Imports TensorFlow.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfbench.config import BenchmarkConfig
from tfbench.data import pipeline
from tfbench.data.spec import Shard
from tfbench.data.wordpiece import Vocabulary
from tfbench.models.bert import masked_positions
from tfbench.models.spec import Batch

# Devlin et al. 2018 (arXiv:1810.04805, section 3.1): what stands at a place to predict.
SHARE_MASK = 0.8
SHARE_RANDOM = 0.1  # the rest keeps its token
SEQUENCES_AT_ONCE = 64  # read and masked in one go: an operation costs about as much for many as for one


def mask(ids: tf.Tensor, uniform: tf.Tensor, places: int, vocabulary: Vocabulary) -> Batch:
    """Draws the places of sequences to predict and hides their tokens.

    A sequence without padding has all `places` to predict, a padded one its proportional share, rounded up.

    Args:
        ids: int32 [B, S], S static: rows of `wordpiece.sequences`.
        uniform: float32 [B, S + 2K] in [0, 1), the random numbers to use.
        places: K, at most S − 2.
        vocabulary: of the ids; special tokens are neither predicted nor drawn.

    Returns:
        The text batch that `ModelSpec` describes. Used places are in increasing order; unused ones, at the
        end, have position 0, id 0 and weight 0.
    """
    length = ids.shape[1]
    order, choice, token = tf.split(uniform, [length, places, places], axis=1)
    is_word = tf.reduce_all(ids[..., None] != tf.constant(vocabulary.special_ids), axis=-1)
    num_words = tf.math.count_nonzero(is_word, axis=1, keepdims=True, dtype=tf.int32)
    used = tf.range(places) < -(-places * num_words // (length - 2))

    drawn = tf.math.top_k(tf.where(is_word, order, -1.0), places).indices
    positions = tf.where(used, tf.sort(tf.where(used, drawn, length)), 0)
    original = tf.gather(ids, positions, batch_dims=1)

    shown = tf.where(choice < SHARE_MASK + SHARE_RANDOM, _random_words(token, vocabulary), original)
    shown = tf.where(choice < SHARE_MASK, vocabulary.mask_id, shown)
    # Unused places write back what position 0 holds.
    shown = tf.where(used, shown, original)
    rows = tf.broadcast_to(tf.range(tf.shape(ids)[0])[:, None], tf.shape(positions))
    return {
        "input_ids": tf.tensor_scatter_nd_update(ids, tf.stack([rows, positions], axis=-1), shown),
        "attention_mask": tf.cast(ids != vocabulary.pad_id, tf.int32),
        "masked_positions": positions,
        "masked_ids": tf.where(used, original, 0),
        "masked_weights": tf.cast(used, tf.float32),
    }


def _random_words(uniform: tf.Tensor, vocabulary: Vocabulary) -> tf.Tensor:
    """Ids that are not special, drawn evenly with float32 numbers in [0, 1) of any shape."""
    special_ids = sorted(vocabulary.special_ids)
    number = tf.cast(uniform * (vocabulary.size - len(special_ids)), tf.int32)
    # The n-th id that is not special has so many special ones before it.
    ordinary_before = tf.constant([special_id - place for place, special_id in enumerate(special_ids)])
    return number + tf.math.count_nonzero(number[..., None] >= ordinary_before, axis=-1, dtype=tf.int32)


def batches(
    num_sequences: int,
    read: Callable[[tf.Tensor], tf.Tensor],
    vocabulary: Vocabulary,
    config: BenchmarkConfig,
    shard: Shard,
) -> tf.data.Dataset:
    """Masked batches of sequences, each visited once per epoch by one of the shards.

    Args:
        num_sequences: of one epoch.
        read: int64 [N] numbers of sequences → int32 [N, S], S = config.seq_length.
        vocabulary: of the sequences.
        config: gives the batch size and the seed.
        shard: the part of the visits to read.

    Returns:
        Endless data set as `ModelSpec` describes it. A visit's masks depend on the seed and on its number
        over all shards alone.
    """
    assert config.seq_length is not None
    length, places = config.seq_length, masked_positions(config.seq_length)

    def draw(visit: tf.Tensor, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.stack([tf.constant(config.seed, tf.int64), visit])
        return index, tf.random.stateless_uniform([length + 2 * places], seed)

    def read_and_mask(indices: tf.Tensor, uniform: tf.Tensor) -> Batch:
        rows = tf.ensure_shape(read(indices), [SEQUENCES_AT_ONCE, length])
        return mask(rows, uniform, places, vocabulary)

    samples = (
        pipeline.visits(num_sequences, config.seed, shard)
        .map(draw, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(SEQUENCES_AT_ONCE, drop_remainder=True)  # of endless visits
        .map(read_and_mask, num_parallel_calls=tf.data.AUTOTUNE)
        .unbatch()
    )
    return pipeline.batches(samples, config, reproducible=True)


def batches_of_rows(
    rows: np.ndarray, vocabulary: Vocabulary, config: BenchmarkConfig, shard: Shard
) -> tf.data.Dataset:
    """As `batches`, of sequences int32 [N, S] in memory."""
    kept = tf.constant(rows)
    return batches(len(rows), lambda indices: tf.gather(kept, indices), vocabulary, config, shard)
