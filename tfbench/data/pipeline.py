"""The tf.data steps that data sets share. Imports TensorFlow."""

from collections.abc import Callable

import tensorflow as tf

from tfbench.config import BenchmarkConfig
from tfbench.data import cache, image_shards, service, tolerant
from tfbench.data.spec import Shard

# Put together side by side, for each replica: 256 images are 38 MB, which took one thread 17 ms to copy to
# new memory on a busy host, half of a step of ResNet-50 on an H200.
BATCHES_AT_ONCE = 4

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


def batches(
    samples: tf.data.Dataset, config: BenchmarkConfig, *, reproducible: bool, into_batch: bool = False
) -> tf.data.Dataset:
    """Batches endless samples and prepares them ahead of the step.

    Args:
        samples: data set of dicts of tensors of static shape.
        config: gives the batch size, samples_per_replica_per_step.
        reproducible: keep the order of the samples, at the price that a slow one holds up the others.
        into_batch: `samples` ends in a parallel map, whose calls lay their samples into the batch: none goes
            through the one thread that puts a batch together. The order is kept anyway.
    """
    options = tf.data.Options()
    options.deterministic = reproducible
    # Threads of their own: decoding does not queue behind the step's operations, nor they behind it. The
    # samples are the parallelism; an operation that splits itself up would only add to the threads.
    # 0: as many as the cores of whichever host runs this.
    options.threading.private_threadpool_size = 0 if config.data_service else tolerant.usable_cores()
    options.threading.max_intra_op_parallelism = 1
    return (
        samples.batch(
            config.samples_per_replica_per_step,
            drop_remainder=True,
            # With a number nothing is fused.
            num_parallel_calls=None if into_batch else BATCHES_AT_ONCE * config.num_replicas,
        )
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )


def image_batches(
    records: tf.data.Dataset,
    unpack: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    config: BenchmarkConfig,
    shard: Shard,
    *,
    augment: bool,
    num_records: int,
) -> tf.data.Dataset:
    """Shuffles encoded images, then decodes them to batches.

    With --cache the order is the other way round: every image is decoded and resized once, kept in RAM, and
    each visit takes another crop of what is kept.

    Args:
        records: one epoch of (path, number, …), as for `tolerant.read_each`, with what `unpack` takes.
        unpack: → (encoded image, label), a string and an integer scalar.
        config: gives batch size, image_size, seed, the cache and whether the order must be reproducible.
        shard: the part of the data that `records` holds; its log names what cannot be read.
        augment: crop and flip at random; otherwise the whole image is resized.
        num_records: of one epoch, as far as known.

    Returns:
        Endless data set of image batches as `ModelSpec` describes them.
    """
    image_size = config.image_size
    assert image_size is not None

    crop = random_crop if shard.tuning.fused_decode else crop_of_whole

    def seed_of(visit: tf.Tensor) -> tf.Tensor:
        return tf.stack([tf.constant(config.seed, tf.int64), visit * shard.count + shard.index])

    def decode(*record_and_visit: tf.Tensor) -> dict[str, tf.Tensor]:
        *record, visit = record_and_visit
        encoded, label = unpack(*record)
        if augment:
            seed = seed_of(visit)
            image = mirror(resize(crop(encoded, seed), image_size), seed)
        else:
            image = resize(decode_whole(encoded), image_size)
        return {"image": image, "label": tf.cast(label, tf.int32)}

    def decode_to_keep(*record: tf.Tensor) -> dict[str, tf.Tensor]:
        encoded, label = unpack(*record)
        image = decode_whole(encoded)
        kept = resize_short_side(image, kept_side(image_size)) if augment else resize(image, image_size)
        return {"image": kept, "label": tf.cast(label, tf.int32)}

    def crop_kept(visit: tf.Tensor, sample: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        seed = seed_of(visit)
        image = mirror(resize(cut(sample["image"], seed), image_size), seed)
        return {"image": image, "label": sample["label"]}

    def decode_in_service(_path: tf.Tensor, _number: tf.Tensor, *record: tf.Tensor) -> dict[str, tf.Tensor]:
        return decode(*record, service.any_visit())

    def shuffled(samples: tf.data.Dataset) -> tf.data.Dataset:
        mixed = samples.shuffle(shard.tuning.shuffle_records, seed=config.seed, reshuffle_each_iteration=True)
        return mixed.repeat()

    def endless(samples: tf.data.Dataset) -> tf.data.Dataset:
        return shuffled(samples).enumerate()

    into_batch = False
    if config.data_service:
        samples = shuffled(records).map(decode_in_service, num_parallel_calls=tf.data.AUTOTUNE)
    elif cache.wanted(config, shard, records, decode_to_keep, num_records):
        kept = tolerant.read_each(records, decode_to_keep, shard, keep_order=config.deterministic).cache()
        if augment:
            # Calls in turn fill one batch: with as many as workers, some of these wait for the slowest.
            calls = 2 * (shard.tuning.workers or tolerant.usable_cores())
            samples, into_batch = endless(kept).map(crop_kept, num_parallel_calls=calls), True
        else:
            samples = endless(kept).map(lambda _, sample: sample)
    else:
        # Numbered without a function, whose call for each record would wait for a thread that decodes.
        visited = tf.data.Dataset.zip((shuffled(records), tf.data.Dataset.range(tf.int64.max)))
        samples = tolerant.read_each(visited, decode, shard, keep_order=config.deterministic)
    options = tf.data.Options()
    # The workers are given, so that nothing is left to tune; to tune, every data set reads the clock for each
    # record, which took 3 to 5 % of the CPU time of an image. A worker of a service finds its own number.
    options.autotune.enabled = bool(config.data_service)
    # Said after the batch: between the map and the batch it would keep the two apart.
    batched = batches(samples, config, reproducible=config.deterministic, into_batch=into_batch)
    return batched.with_options(options)


def kept_side(image_size: int) -> int:
    """Pixels of the short side of a cached image: 256 for 224, the ratio of ImageNet's usual evaluation."""
    return round(image_size * 256 / 224)


def resize_short_side(image: tf.Tensor, side: int) -> tf.Tensor:
    """Resizes [H, W, 3] to uint8 whose shorter side has `side` pixels, the shape kept; never enlarges."""
    shape = tf.shape(image)[:2]
    scale = tf.minimum(tf.cast(side, tf.float32) / tf.cast(tf.reduce_min(shape), tf.float32), 1.0)
    size = tf.maximum(tf.cast(tf.round(tf.cast(shape, tf.float32) * scale), tf.int32), 1)
    return tf.cast(tf.round(tf.image.resize(image, size, antialias=True)), tf.uint8)


def resize(image: tf.Tensor, size: int) -> tf.Tensor:
    """Resizes [..., H, W, C], of any numeric type with values 0 to 255, to uint8 [..., size, size, C].

    In float32 from the start: the same pixels as from uint8, but TensorFlow's kernel for uint8 took 310 µs
    where this takes 190, the conversion included (256 × 341 to 224, one core). To add a half and cut off
    rounds as `tf.round` does but for ties, in 20 µs less.
    """
    return tf.cast(tf.image.resize(tf.cast(image, tf.float32), [size, size]) + 0.5, tf.uint8)


def decode_whole(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes JPEG, PNG, GIF, BMP or `image_shards.ppm`'s bytes, told apart by their content.

    Returns:
        uint8 [height, width, 3].
    """

    def whole_ppm() -> tf.Tensor:
        rows, header_rows = _rows_of_ppm(encoded)
        return rows[header_rows:]

    def by_its_decoder() -> tf.Tensor:
        return tf.io.decode_image(encoded, channels=3, expand_animations=False)

    return tf.cond(_is_ppm(encoded), whole_ppm, by_its_decoder)


def _is_ppm(encoded: tf.Tensor) -> tf.Tensor:
    return tf.strings.substr(encoded, 0, len(image_shards.PPM_MAGIC)) == image_shards.PPM_MAGIC


def _rows_of_ppm(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Header and pixels of `image_shards.ppm`'s bytes, and the number of rows that are header.

    They are not parted here: the pixels alone would be a copy, and what is cut out of them another.

    Returns:
        uint8 [rows, width, 3] and int32 scalar.
    """

    def number(place: slice) -> tf.Tensor:
        digits = tf.strings.substr(encoded, place.start, place.stop - place.start)
        return tf.strings.to_number(digits, tf.int32)

    width, height = number(image_shards.PPM_WIDTH), number(image_shards.PPM_HEIGHT)
    header_rows = image_shards.ppm_header_rows(width)
    # Refuses bytes that are not as many as the header says.
    shape = tf.stack([header_rows + height, width, 3])
    return tf.reshape(tf.io.decode_raw(encoded, tf.uint8), shape), header_rows


def random_crop(encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Decodes a random part of an image.

    Args:
        encoded: as for `decode_whole`; among ImageNet's JPEG files is a PNG.
        seed: integers [2]; equal seeds crop equally.

    Returns:
        uint8 [height, width, 3].
    """

    def crop_jpeg() -> tf.Tensor:
        # Only the blocks that the crop touches are decoded.
        window = _random_window(tf.io.extract_jpeg_shape(encoded), seed)
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3, dct_method="INTEGER_FAST")

    def crop_ppm() -> tf.Tensor:
        rows, header_rows = _rows_of_ppm(encoded)
        window = _random_window(tf.shape(rows) - [header_rows, 0, 0], seed)
        return _part(rows, tf.add(window, [header_rows, 0, 0, 0]))

    def crop_other() -> tf.Tensor:
        return tf.cond(_is_ppm(encoded), crop_ppm, lambda: crop_of_whole(encoded, seed))

    return tf.cond(tf.io.is_jpeg(encoded), crop_jpeg, crop_other)


def crop_of_whole(encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """As `random_crop`, but decodes the whole image first, JPEGs too."""
    return cut(decode_whole(encoded), seed)


def cut(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Cuts the part of a decoded image [H, W, 3] that `random_crop` would."""
    return _part(image, _random_window(tf.shape(image), seed))


def _part(image: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """The part of [H, W, C] that a window [top, left, height, width] shows."""
    top, left, height, width = tf.unstack(window)
    return image[top : top + height, left : left + width]


def mirror(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Mirrors an image half of the time, whatever else the seed decides. Cheapest once it is small."""
    own_seed = tf.random.experimental.stateless_fold_in(seed, 1)
    return tf.image.stateless_random_flip_left_right(image, own_seed)


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
