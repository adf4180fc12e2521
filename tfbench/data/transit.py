"""How integers travel to a GPU. Imports TensorFlow when called.

TensorFlow keeps int32 tensors of a GPU in host memory, as shapes are. A compiled step that takes one has it
copied to the card before every step, behind all work that the card has been given, and the host waits for the
copy before it starts the step: the card then idles for more than a millisecond. int64 tensors stay on the
card.
"""

from tfbench.models.spec import Batch


def departing(batch: Batch) -> Batch:
    """The batch with its int32 parts as int64: what is laid into a GPU's memory."""
    import tensorflow as tf

    return {
        name: tf.cast(value, tf.int64) if value.dtype == tf.int32 else value for name, value in batch.items()
    }


def arrived(batch: Batch) -> Batch:
    """The batch as `ModelSpec` tells it, inside the compiled step: int64 parts are int32 again."""
    import tensorflow as tf

    return {
        name: tf.cast(value, tf.int32) if value.dtype == tf.int64 else value for name, value in batch.items()
    }
