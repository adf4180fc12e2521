"""--input=dali: what is refused, and its pipelines decoding on the CPU against what Pillow wrote.

Decoding on GPUs needs some; the CPU's pipelines differ from it in the decoder's device alone.
"""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import step_helpers  # noqa: F401, gives the process its CPU devices
import tensorflow as tf
from data_helpers import (
    IMAGE_MODEL,
    NUM_CLASSES,
    NUM_IMAGES,
    config_of,
    numbers_of,
    write_numbered_images,
    write_numbered_records,
)
from PIL import Image
from run_helpers import python

from tfbench.config import ConfigError
from tfbench.data import Shard, dali, open_input, parse, require_dali
from tfbench.devices import build_strategy

needs_dali = pytest.mark.skipif(not dali._is_installed("nvidia.dali_tf_plugin"), reason="extra dali")


def refusal_of(data: str = "folder:/images", gpus: int = 1, **choices: Any) -> str:
    config = config_of(data, input="dali", gpus=gpus, **choices)
    with pytest.raises(ConfigError) as refused:
        require_dali(config, parse(config.data)[0])
    return f"{refused.value}"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "_is_installed", lambda module: True)


@pytest.mark.parametrize("data", ["synthetic", "digits", "tfds:imagenet2012", "pydoc"])
def test_other_data(data: str) -> None:
    expected = "--input=dali: goes with --data=folder:… and --data=tfrecord:…, not with --data="
    assert refusal_of(data).startswith(f"{expected}{data}")


def test_without_a_gpu() -> None:
    assert refusal_of(gpus=0) == "--input=dali: decodes on GPUs, and --gpus=0 has none: tfdata"


@pytest.mark.parametrize("parent_too", [True, False])
def test_without_dali(parent_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        if parent_too:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert refusal_of() == (
        "--input=dali: needs nvidia.dali and nvidia.dali_tf_plugin: pip install --no-build-isolation "
        "'tfbench[dali]', or tfdata"
    )


def test_readers_are_told_shard_seed_and_buffer() -> None:
    """Needs no DALI, so that this is seen wherever tests run."""
    shard = Shard(1, 4)
    assert dali._shuffled(config_of("folder:/images", seed=7), shard) == {
        "random_shuffle": True,
        "initial_fill": shard.tuning.shuffle_records,
        "seed": 7,
        "shard_id": 1,
        "num_shards": 4,
    }


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("deterministic", True),
        ("cache", "ram"),
        ("on_bad_record", "skip"),
        ("data_service", "grpc://localhost:1"),
    ],
)
def test_choices_that_do_not_go_with_it(flag: str, value: Any) -> None:
    assert refusal_of(**{flag: value}).startswith(f"--{flag}={value}".lower() + ": not with --input=dali: ")


@pytest.mark.usefixtures("installed")
def test_accepted() -> None:
    for data in ("folder:/images", "tfrecord:/records/*"):
        config = config_of(data, input="dali", gpus=2)
        require_dali(config, parse(data)[0])
    require_dali(config_of("digits"), parse("digits")[0])


def test_the_input_alone_is_the_hosts(tmp_path: Path) -> None:
    done = python("-m", "tfbench.input", "--data=folder:x", "--input=dali", cwd=tmp_path)
    assert done.returncode == 2
    assert "--input=dali: only tfdata, the host's part, is measured alone" in done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    images = write_numbered_images(tmp_path_factory.mktemp("images"))
    records = write_numbered_records(images, tmp_path_factory.mktemp("records"))
    return {"folder": f"folder:{images}", "tfrecord": f"tfrecord:{records}/train-*"}


def test_index_names_every_record(data: dict[str, str], tmp_path: Path) -> None:
    path = data["tfrecord"].removeprefix("tfrecord:").replace("*", "3")
    dali._write_index(path, str(tmp_path / "idx"))
    contents, file = list(tf.data.TFRecordDataset(path).as_numpy_iterator()), Path(path).read_bytes()
    lines = [tuple(map(int, line.split())) for line in (tmp_path / "idx").read_text().splitlines()]
    assert [file[begin + 12 : begin + size - 4] for begin, size in lines] == contents


def batches(config: Any, shard: Shard) -> Any:
    reader = dali.reader_of(config)
    with tf.device("CPU:0"):
        yield from dali.dataset(config, reader, shard, gpu=None).as_numpy_iterator()


@needs_dali
@pytest.mark.parametrize("name", ["folder", "tfrecord"])
def test_shards_read_every_image_once_per_epoch(name: str, data: dict[str, str]) -> None:
    config = config_of(data[name], input="dali", gpus=2, per_replica_batch_size=8)
    streams = [batches(config, Shard(index, 2)) for index in range(2)]
    orders = []
    for _ in range(3):
        seen: list[int] = []
        for _ in range(NUM_IMAGES // 16):
            for image, label in map(next, streams):
                assert (image.shape, image.dtype, label.dtype) == ((8, 16, 16, 3), np.uint8, np.int64)
                np.testing.assert_array_equal(label, numbers_of(image) % NUM_CLASSES)
                seen += numbers_of(image).tolist()
        assert Counter(seen) == Counter(range(NUM_IMAGES))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    assert sorted(orders[0][:50]) != orders[0][:50]


@needs_dali
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_replicas_of_a_strategy_in_a_loop(kind: str, num_replicas: int, data: dict[str, str]) -> None:
    if len(tf.config.list_logical_devices(kind)) < num_replicas:
        pytest.skip(f"needs {num_replicas} {kind}(s)")
    field = {"CPU": "cpu_replicas", "GPU": "gpus"}[kind]
    config = config_of(data["tfrecord"], input="dali", per_replica_batch_size=10, **{field: num_replicas})
    strategy = build_strategy([f"{kind}:{index}" for index in range(num_replicas)])
    source = open_input(config, IMAGE_MODEL, strategy)
    batch = strategy.experimental_local_results(source.next()["image"])
    assert [kind in image.device for image in batch] == [True] * num_replicas

    def numbers_and_labels(batch: Any) -> Any:
        first = tf.cast(batch["image"][:, 0, 0, :2], tf.int32)
        return tf.stack([first[:, 0] + 256 * first[:, 1], tf.cast(batch["label"], tf.int32)])

    @tf.function
    def loop() -> Any:
        parts = tf.TensorArray(tf.int32, size=5)
        for step in tf.range(5):
            seen = strategy.run(numbers_and_labels, args=(source.next(),))
            parts = parts.write(step, tf.concat(strategy.experimental_local_results(seen), axis=1))
        return parts.stack()

    calls = [loop().numpy() for _ in range(NUM_IMAGES // (5 * config.global_batch_size))]
    numbers, labels = np.concatenate([call.transpose(1, 0, 2).reshape(2, -1) for call in calls], axis=1)
    np.testing.assert_array_equal(labels, numbers % NUM_CLASSES)
    # The first batch is not among them, but one of the next epoch.
    assert len(set(numbers.tolist())) >= NUM_IMAGES - config.global_batch_size


@needs_dali
def test_photographs_are_cropped_anew_and_mirrored(tmp_path: Path) -> None:
    photograph = Path(sklearn.datasets.__file__).parent / "images" / "china.jpg"
    (tmp_path / "class0").mkdir()
    (tmp_path / "class0" / "0.jpg").write_bytes(photograph.read_bytes())
    config = config_of(f"folder:{tmp_path}", input="dali", gpus=1, image_size=32, per_replica_batch_size=32)
    (images, labels) = next(batches(config, Shard(0, 1)))
    assert len({image.tobytes() for image in images}) == 32
    assert not labels.any()
    whole = np.asarray(Image.open(photograph))
    assert np.abs(images.mean(axis=(0, 1, 2)) - whole.mean(axis=(0, 1))).max() < 20  # crops differ in it
    sides = images[:, :, :16].mean(axis=(1, 2, 3)) - images[:, :, 16:].mean(axis=(1, 2, 3))
    assert (sides > 0).any()
    assert (sides < 0).any()
