"""Digits, TFRecord files and TensorFlow Datasets against what scikit-learn, NumPy and Pillow read."""

import io
import itertools
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf
import tensorflow_datasets as tfds
from data_helpers import IMAGE_MODEL, check, config_of, epoch, make
from PIL import Image

from tfbench.data import Shard, image_shards, pipeline, synthetic_batch
from tfbench.data.spec import Tuning

NUM_DIGITS = 1797


def encode(pixels: np.ndarray, file_format: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, file_format, **({"quality": 95} if file_format == "JPEG" else {}))
    return buffer.getvalue()


def counted(samples: Any) -> Counter:
    return Counter((image.tobytes(), int(label)) for image, label in samples)


def images_and_labels(batches: list[Any]) -> list[tuple[np.ndarray, int]]:
    return [(batch["image"][0], batch["label"][0]) for batch in batches]


# --- synthetic


def test_synthetic_images() -> None:
    config = config_of("synthetic", per_replica_batch_size=200, accumulate=2)
    batch = synthetic_batch(config, IMAGE_MODEL, seed=3)
    image, label = batch["image"].numpy(), batch["label"].numpy()
    assert (image.shape, image.dtype) == ((400, 16, 16, 3), np.uint8)
    assert (label.shape, label.dtype) == ((400,), np.int32)
    assert (image.min(), image.max()) == (0, 255)
    assert set(label) == set(range(12))
    np.testing.assert_array_equal(image, synthetic_batch(config, IMAGE_MODEL, seed=3)["image"])
    assert (image != synthetic_batch(config, IMAGE_MODEL, seed=4)["image"].numpy()).mean() > 0.9


# --- digits


def digits_by_pillow(size: int) -> list[tuple[np.ndarray, int]]:
    digits = sklearn.datasets.load_digits()
    samples = []
    for image, label in zip(digits.images, digits.target, strict=True):
        grey = Image.fromarray((image * 255 / 16).astype(np.float32)).resize((size, size), Image.BILINEAR)
        samples.append((np.repeat(np.rint(np.asarray(grey)).astype(np.uint8)[..., None], 3, axis=2), label))
    return samples


@pytest.mark.parametrize(("count", "image_size"), [(1, 16), (2, 8), (4, 16)])
def test_digits_every_sample_once_per_epoch(count: int, image_size: int) -> None:
    read = epoch(config_of("digits", image_size=image_size), NUM_DIGITS, count)
    assert counted(images_and_labels(read)) == counted(digits_by_pillow(image_size))


def test_digits_order_is_the_seeds_alone() -> None:
    def labels(count: int, seed: int) -> list[int]:
        return [int(b["label"][0]) for b in epoch(config_of("digits", seed=seed), 300, count)]

    assert labels(1, 5) == labels(1, 5) == labels(2, 5) == labels(4, 5)
    assert labels(1, 5) != labels(1, 6)


def test_digits_epochs_differ_in_order_and_batches_cross_them() -> None:
    config = config_of("digits", image_size=8, per_replica_batch_size=100)
    labels = np.concatenate([b["label"] for b in make(config).take(36).as_numpy_iterator()])
    first, second = labels[:NUM_DIGITS], labels[NUM_DIGITS : 2 * NUM_DIGITS]
    assert (first != second).any()
    np.testing.assert_array_equal(np.bincount(first), np.bincount(second))


def test_batches_are_static() -> None:
    spec = make(config_of("digits", per_replica_batch_size=3, accumulate=2)).element_spec
    assert spec["image"] == tf.TensorSpec([6, 16, 16, 3], tf.uint8)
    assert spec["label"] == tf.TensorSpec([6], tf.int32)


# --- decoding


def test_decode_photograph_as_pillow_does() -> None:
    path = Path(sklearn.datasets.__file__).parent / "images" / "china.jpg"
    decoded = pipeline.decode_whole(path.read_bytes()).numpy().astype(int)
    assert np.abs(decoded - np.asarray(Image.open(path)).astype(int)).mean() < 2  # the DCTs differ


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "PPM"])  # BMP: raw records were that once
def test_random_crop_is_a_window_of_the_image(file_format: str) -> None:
    """Red is the column and green the row, so that a crop tells where it was cut."""
    height, width = 200, 250
    rows, columns = np.mgrid[:height, :width].astype(np.uint8)
    pixels = np.stack([columns, rows, np.zeros_like(rows)], axis=-1)
    encoded = image_shards.ppm(pixels) if file_format == "PPM" else encode(pixels, file_format)
    windows, mirrored = set(), 0
    for index in range(300):
        seed = tf.constant([7, index], tf.int64)
        crop = pipeline.mirror(pipeline.random_crop(encoded, seed), seed).numpy()
        h, w, _ = crop.shape
        mirrored += int(w > 1 and crop[0, 0, 0] > crop[0, -1, 0])
        left, top = int(crop[0, :, 0].min()), int(crop[0, 0, 1])
        expected = np.arange(left, left + w)
        np.testing.assert_array_equal(np.sort(crop[0, :, 0]), expected)
        np.testing.assert_array_equal(crop[:, 0, 1], np.arange(top, top + h))
        # One pixel of rounding on each side.
        assert (h + 1) * (w + 1) >= 0.08 * height * width
        assert (w + 1) / (h - 1) >= 3 / 4
        assert (w - 1) / (h + 1) <= 4 / 3
        windows.add((left, top, h, w))
    assert len(windows) > 290
    # Binomial(300, 1/2): five standard deviations are 43.
    assert 107 < mirrored < 193


def test_random_crop_of_jpeg_is_the_same_window() -> None:
    path = Path(sklearn.datasets.__file__).parent / "images" / "flower.jpg"
    png = encode(np.asarray(Image.open(path)), "PNG")
    for index in range(10):
        seed = tf.constant([1, index], tf.int64)
        from_jpeg = pipeline.random_crop(path.read_bytes(), seed).numpy().astype(int)
        from_png = pipeline.random_crop(png, seed).numpy().astype(int)
        assert from_jpeg.shape == from_png.shape
        assert np.abs(from_jpeg - from_png).mean() < 2


# --- TFRecord files: 12 plain images, the grey level of label l (from 1) is 20·l; two are PNG


def write_records(path: Path, labels: list[int], encoded: dict[int, bytes] | None = None) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for label in labels:
            file_format = "PNG" if label % 6 == 0 else "JPEG"
            image = (encoded or {}).get(label) or encode(
                np.full((40 + label, 60, 3), 20 * label, np.uint8), file_format
            )
            feature = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                "image/filename": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"unused"])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("records")
    for file in range(4):
        write_records(folder / f"train-{file}-of-4", [3 * file + 1, 3 * file + 2, 3 * file + 3])
    write_records(folder / "validation-0-of-1", [1])
    return f"tfrecord:{folder}/train-*"


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8])  # 5 and 8: more pipelines than files
def test_tfrecord_every_sample_once_per_epoch(count: int, records: str) -> None:
    config = config_of(records, deterministic=True)
    check(config)
    assert make(config).element_spec["image"] == tf.TensorSpec([1, 16, 16, 3], tf.uint8)
    labels = []
    for index in range(count):
        size = len(range(index, 12, count))
        for batch in make(config, shard=Shard(index, count)).take(size).as_numpy_iterator():
            label = int(batch["label"][0])
            labels.append(label)
            # Every crop of a plain image is plain; the stored label is one more. JPEG may be off by one.
            assert np.abs(batch["image"].astype(int) - 20 * (label + 1)).max() <= 1
    assert sorted(labels) == list(range(12))


@pytest.mark.parametrize("count", [1, 4, 8])
def test_tfrecord_epochs_are_whole_in_any_order(
    count: int, records: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --deterministic samples overtake each other, also from one epoch to the next."""

    def visit_as_grey(encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return tf.fill([2, 2, 3], tf.cast(tf.minimum(seed[1] // count, 255), tf.uint8))

    monkeypatch.setattr(pipeline, "random_crop", visit_as_grey)
    labels: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for index in range(count):
        size = len(range(index, 12, count))
        # Far more than three epochs and what the workers hold, so that none of their samples is under way.
        for batch in make(config_of(records), shard=Shard(index, count)).take(600).as_numpy_iterator():
            number = int(batch["image"][0, 0, 0, 0]) // size
            if number in labels:
                labels[number].append(int(batch["label"][0]))
    assert [sorted(epoch_labels) for epoch_labels in labels.values()] == [list(range(12))] * 3


def test_tfrecord_is_reproducible_where_asked(records: str) -> None:
    def read(seed: int) -> list[Any]:
        config = config_of(records, deterministic=True, seed=seed, per_replica_batch_size=4)
        return list(make(config).take(6).as_numpy_iterator())

    once, again, other = read(0), read(0), read(1)
    for one, two in zip(once, again, strict=True):
        np.testing.assert_array_equal(one["image"], two["image"])
        np.testing.assert_array_equal(one["label"], two["label"])
    orders = [np.concatenate([b["label"] for b in batches]).tolist() for batches in (once, other)]
    assert orders[0] != orders[1]
    assert orders[0][:12] != orders[0][12:]


def test_tfrecord_crops_photographs_anew_on_every_visit(tmp_path: Path) -> None:
    images = Path(sklearn.datasets.__file__).parent / "images"
    photographs = {1: (images / "china.jpg").read_bytes(), 2: (images / "flower.jpg").read_bytes()}
    write_records(tmp_path / "train-0", [1, 2], photographs)
    config = config_of(f"tfrecord:{tmp_path}/train-0", image_size=32, deterministic=True)
    seen = images_and_labels(list(make(config).take(8).as_numpy_iterator()))
    assert len(counted(seen)) == 8
    assert Counter(int(label) for _, label in seen) == {0: 4, 1: 4}


def test_tuning_changes_how_images_are_read_and_not_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Path(sklearn.datasets.__file__).parent / "images"
    photographs = {1: (images / "china.jpg").read_bytes(), 2: (images / "flower.jpg").read_bytes()}
    write_records(tmp_path / "train-0", [1, 2], photographs)
    config = config_of(f"tfrecord:{tmp_path}/train-0", image_size=64, deterministic=True)

    def read(tuning: Tuning) -> list[tuple[np.ndarray, int]]:
        shard = Shard(0, 1, tuning=tuning)
        return images_and_labels(list(make(config, shard=shard).take(6).as_numpy_iterator()))

    usual, one_worker = read(Tuning()), read(Tuning(workers=1))
    assert [label for _, label in read(Tuning(shuffle_records=1))] == [0, 1] * 3
    monkeypatch.setattr(tf.io, "decode_and_crop_jpeg", None)
    whole = read(Tuning(fused_decode=False))
    for (image, label), *others in zip(usual, one_worker, whole, strict=True):
        for other_image, other_label in others:
            assert (
                np.abs(image.astype(int) - other_image).mean() < 1
            )  # JPEG's edges depend on what is decoded
            assert label == other_label


def test_resize_by_way_of_float_gives_the_pixels_of_uint8() -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    for size in (16, 64, 224):
        exact = tf.image.resize(image, [size, size]).numpy().astype(np.float64)
        expected = np.floor(exact + 0.5)  # a half goes up
        np.testing.assert_array_equal(pipeline.resize(tf.constant(image), size), expected)


@pytest.mark.parametrize("label", [0, 13, -1])
def test_tfrecord_label_out_of_range(label: int, tmp_path: Path) -> None:
    plain = encode(np.zeros((20, 20, 3), np.uint8), "JPEG")
    write_records(tmp_path / "train-0", [label], {label: plain})
    with pytest.raises(tf.errors.InvalidArgumentError) as failure:
        next(make(config_of(f"tfrecord:{tmp_path}/train-0")).as_numpy_iterator())
    assert "image/class/label must be within [1, 12], a record has" in str(failure.value)
    assert f"[{label}]" in str(failure.value)


# --- TensorFlow Datasets: a photograph of label l has grey level 20·l; all are in one file


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    FEATURE: Any
    NUM_IMAGES = 12

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": self.FEATURE,
            "label": tfds.features.ClassLabel(num_classes=12),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Any:
        for index in range(self.NUM_IMAGES):
            yield index, {"image": self.image(index), "label": index, "file_name": f"{index}.jpg"}


class TinyPhotos(_Builder, skip_registration=True):
    FEATURE = tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg")

    @staticmethod
    def image(index: int) -> np.ndarray:
        return np.full((30 + index, 40, 3), 20 * index, np.uint8)


class TinyIcons(_Builder, skip_registration=True):
    FEATURE = tfds.features.Image(shape=(16, 16, 1), encoding_format="png")

    @staticmethod
    def image(index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 256, (16, 16, 1), np.uint8)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tensorflow_datasets"))
    for builder in (TinyPhotos, TinyIcons):
        builder(data_dir=folder).download_and_prepare()
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("reached for the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_tfds_photographs_once_per_epoch(count: int, data_dir: str) -> None:
    config = config_of("tfds:tiny_photos", data_dir=data_dir, deterministic=True)
    check(config)
    assert make(config).element_spec["image"] == tf.TensorSpec([1, 16, 16, 3], tf.uint8)
    labels = []
    for index in range(count):
        for batch in make(config, shard=Shard(index, count)).take(12 // count).as_numpy_iterator():
            label = int(batch["label"][0])
            labels.append(label)
            assert np.abs(batch["image"].astype(int) - 20 * label).max() <= 1
    assert sorted(labels) == list(range(12))


@pytest.mark.usefixtures("no_network")
def test_tfds_images_of_one_size_are_whole(data_dir: str) -> None:
    config = config_of("tfds:tiny_icons", data_dir=data_dir, deterministic=True)
    check(config)
    assert make(config).element_spec["image"] == tf.TensorSpec([1, 16, 16, 3], tf.uint8)
    expected = [(np.repeat(TinyIcons.image(index), 3, axis=2), index) for index in range(12)]
    assert counted(images_and_labels(list(make(config).take(12).as_numpy_iterator()))) == counted(expected)


def test_tfds_is_reproducible_where_asked(data_dir: str) -> None:
    config = config_of("tfds:tiny_photos", data_dir=data_dir, deterministic=True, seed=2)
    once, again = (list(make(config).take(24).as_numpy_iterator()) for _ in range(2))
    for one, two in itertools.zip_longest(once, again):
        np.testing.assert_array_equal(one["image"], two["image"])
        np.testing.assert_array_equal(one["label"], two["label"])
