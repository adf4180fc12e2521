"""Handwritten digits that ship with scikit-learn: real images without a download."""

from typing import TYPE_CHECKING

from tfbench.config import BenchmarkConfig
from tfbench.data.spec import DatasetSpec, Shard, require_classes, require_kind, require_packages
from tfbench.models.spec import Batch, ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf

NUM_CLASSES = 10
BRIGHTEST = 16  # grey levels of sklearn.datasets.load_digits are 0 to 16


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    require_kind(config, spec, "image")
    require_packages(config, "sklearn")
    require_classes(config, spec, NUM_CLASSES)


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    """The 1,797 images of 8×8 stay in memory as they are; each visit resizes them."""
    import sklearn.datasets
    import tensorflow as tf

    from tfbench.data import pipeline

    image_size = config.image_size
    assert image_size is not None
    digits = sklearn.datasets.load_digits()
    images = tf.constant(digits.images[..., None] * (255 / BRIGHTEST), tf.float32)
    labels = tf.constant(digits.target, tf.int32)

    def sample(_: tf.Tensor, index: tf.Tensor) -> Batch:
        image = pipeline.resize(images[index], image_size)
        return {"image": tf.repeat(image, 3, axis=-1), "label": labels[index]}

    samples = pipeline.visits(len(digits.target), config.seed, shard).map(
        sample, num_parallel_calls=tf.data.AUTOTUNE
    )
    return pipeline.batches(samples, config, reproducible=True)


DIGITS = DatasetSpec(
    name="digits",
    kinds=frozenset({"image"}),
    takes_argument=False,
    help="scikit-learn's 1,797 handwritten digits, resized",
    check=_check,
    make=_make,
)
