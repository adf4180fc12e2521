"""The tf.data steps that data sets share. Imports TensorFlow."""

import tensorflow as tf

from tfbench.config import BenchmarkConfig
from tfbench.data.spec import Shard

# Encoded records waiting in the shuffle buffer of a pipeline: about 0.45 GB of ImageNet JPEGs (110 kB each).
SHUFFLE_BUFFER_RECORDS = 4096

# Random resized crop of Szegedy et al. 2014 (arXiv:1409.4842, section 6): share of the image's area, and
# width / height.
CROP_AREA = (0.08, 1.0)
CROP_ASPECT_RATIO = (3 / 4, 4 / 3)


def visits(num_samples: int, seed: int, shard: Shard) -> tf.data.Dataset:
    """Endless shuffled epochs over samples in memory, dealt to the shards in turn.

    The order over all shards together does not depend on their number.

    Returns:
        Data set of (visit, sample): int64 scalars, the place in the order of all shards, counted from 0
        over all epochs, and an index in [0, num_samples).
    """
    order = tf.data.Dataset.range(num_samples).shuffle(num_samples, seed=seed, reshuffle_each_iteration=True)
    return order.repeat().enumerate().shard(shard.count, shard.index)


def batches(samples: tf.data.Dataset, config: BenchmarkConfig, *, reproducible: bool) -> tf.data.Dataset:
    """Batches endless samples and prepares them ahead of the step.

    Args:
        samples: data set of dicts of tensors of static shape.
        config: gives the batch size, samples_per_replica_per_step.
        reproducible: keep the order of the samples, at the price that a slow one holds up the others.
    """
    options = tf.data.Options()
    options.deterministic = reproducible
    return (
        samples.batch(
            config.samples_per_replica_per_step, drop_remainder=True, num_parallel_calls=tf.data.AUTOTUNE
        )
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )


def image_batches(
    records: tf.data.Dataset, config: BenchmarkConfig, shard: Shard, *, augment: bool
) -> tf.data.Dataset:
    """Shuffles encoded images, then decodes them to batches.

    Args:
        records: one epoch of (encoded image, label), a string and an integer scalar.
        config: gives batch size, image_size, seed and whether the order must be reproducible.
        shard: the part of the data that `records` holds.
        augment: crop and flip at random; otherwise the whole image is resized.

    Returns:
        Endless data set of image batches as `ModelSpec` describes them.
    """
    image_size = config.image_size
    assert image_size is not None

    def decode(visit: tf.Tensor, record: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        encoded, label = record
        seed = tf.stack([tf.constant(config.seed, tf.int64), visit * shard.count + shard.index])
        image = random_crop(encoded, seed) if augment else decode_whole(encoded)
        return {"image": resize(image, image_size), "label": tf.cast(label, tf.int32)}

    samples = (
        records.shuffle(SHUFFLE_BUFFER_RECORDS, seed=config.seed, reshuffle_each_iteration=True)
        .repeat()
        .enumerate()
        .map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    )
    return batches(samples, config, reproducible=config.deterministic)


def resize(image: tf.Tensor, size: int) -> tf.Tensor:
    """Resizes [..., H, W, C], of any numeric type with values 0 to 255, to uint8 [..., size, size, C]."""
    return tf.cast(tf.round(tf.image.resize(image, [size, size])), tf.uint8)


def decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes JPEG, PNG, GIF or BMP bytes, told apart by their content, to uint8 [height, width, 3]."""
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def random_crop(encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Decodes a random part of an image, mirrored half of the time.

    Args:
        encoded: as for `decode_whole`; among ImageNet's JPEG files is a PNG.
        seed: integers [2]; equal seeds crop equally.

    Returns:
        uint8 [height, width, 3].
    """
    crop_seed, flip_seed = tf.unstack(tf.random.split(seed, 2))

    def crop_jpeg() -> tf.Tensor:
        # Only the blocks that the crop touches are decoded.
        window = _random_window(tf.io.extract_jpeg_shape(encoded), crop_seed)
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3, dct_method="INTEGER_FAST")

    def crop_other() -> tf.Tensor:
        image = decode_whole(encoded)
        top, left, height, width = tf.unstack(_random_window(tf.shape(image), crop_seed))
        return image[top : top + height, left : left + width]

    image = tf.cond(tf.io.is_jpeg(encoded), crop_jpeg, crop_other)
    return tf.image.stateless_random_flip_left_right(image, flip_seed)


def _random_window(image_shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns int32 [top, left, height, width] of a random part of an image of [H, W, C]."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        image_shape,
        bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),  # the whole image
        seed=seed,
        min_object_covered=0.0,
        aspect_ratio_range=CROP_ASPECT_RATIO,
        area_range=CROP_AREA,
    )
    return tf.concat([begin[:2], size[:2]], axis=0)
