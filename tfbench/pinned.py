"""Batches in pinned host memory, from which a GPU copies by itself. Imports TensorFlow when called."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

# At a time: 256 images, 38 MB, take one thread 5 to 10 ms, and ResNet-50's step on an H200 takes 33.
COPIES_PER_GPU = 2


def in_pinned_memory(
    batches: "tf.data.Dataset", prepare: Callable[[dict[str, Any]], dict[str, Any]], gpus: int
) -> "tf.data.Dataset":
    """What `prepare` makes of the batches, in the same order, in memory that does not move.

    From other memory 256 images went to an H200 at 7 GB/s, and its driver started no kernel meanwhile: 4 of
    37 ms of each of ResNet-50's steps. Of all data sets only the fused one of map and batch asks TensorFlow
    for pinned memory (github.com/tensorflow/tensorflow/issues/43905), so each batch becomes a batch of one,
    which is unpacked again without a copy. Without GPUs the memory is any. An H200 drew 256 MiB at 6 GB/s
    from other memory and at 44 from this.

    Args:
        batches: dicts of tensors of static shape.
        prepare: → the tensors that are copied.
        gpus: that the batches are for.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_optimization.map_and_batch_fusion = True
    # It takes away a `prepare` that changes nothing, and then there is no map to fuse with.
    options.experimental_optimization.noop_elimination = False
    pinned = batches.map(prepare, num_parallel_calls=COPIES_PER_GPU * gpus).batch(1, drop_remainder=True)
    unpacked = pinned.map(lambda batch: {name: tf.squeeze(value, 0) for name, value in batch.items()})
    return unpacked.with_options(options)
