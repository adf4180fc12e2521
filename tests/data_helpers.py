"""Small models' specs and runs for the tests of the data. TensorFlow-free."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfbench.config import BenchmarkConfig
from tfbench.data import DATASETS, Shard
from tfbench.models.spec import Defaults, ModelSpec

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf
    from PIL import Image

NUM_IMAGES, NUM_CLASSES = 400, 4  # numbered images; number n is of class n mod 4

_DEFAULTS = Defaults(
    per_replica_batch_size=1, image_size=8, seq_length=8, steps=1, warmup_steps=1, windows=1, steps_per_loop=1
)


def _never(*_: Any) -> Any:
    raise AssertionError("the data must not call the model")


IMAGE_MODEL = ModelSpec(
    name="image_model",
    kind="image",
    num_classes=12,
    build=_never,
    loss=_never,
    flops_per_sample=_never,
    on_gpu=_DEFAULTS,
    on_cpu=_DEFAULTS,
    activation_mib_per_sample=1.0,
    optimizer="sgd",
    learning_rate=0.1,
    weight_decay=0.0,
)
TEXT_MODEL = dataclasses.replace(
    IMAGE_MODEL, name="text_model", kind="text", num_classes=None, vocab_size=3000, max_seq_length=512
)


def config_of(data: str, **choices: Any) -> BenchmarkConfig:
    """A run of batch size 1 on 16-pixel images or 32-token sequences."""
    sizes = {"seq_length": 32} if data.startswith(("pydoc", "text", "tokens")) else {"image_size": 16}
    return BenchmarkConfig(model="any", data=data, **{**sizes, **choices})


def check(config: BenchmarkConfig, spec: ModelSpec = IMAGE_MODEL) -> None:
    DATASETS[config.data.partition(":")[0]].check(config, spec)


def make(config: BenchmarkConfig, spec: ModelSpec = IMAGE_MODEL, shard: Shard = Shard(0, 1)) -> Any:  # noqa: B008
    return DATASETS[config.data.partition(":")[0]].make(config, spec, shard)


def epoch(config: BenchmarkConfig, num_samples: int, count: int, spec: ModelSpec = IMAGE_MODEL) -> list[Any]:
    """The first `num_samples` batches of 1, drawn from `count` shards in turn."""
    streams = [iter(make(config, spec, Shard(index, count)).as_numpy_iterator()) for index in range(count)]
    return [next(streams[sample % count]) for sample in range(num_samples)]


def stages_of(dataset: "tf.data.Dataset", folder: Path) -> list[str]:
    """What TensorFlow makes of a pipeline when it runs, the last stage first, as its profiler sees it."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    iterator = iter(dataset)
    next(iterator)
    with tf.profiler.experimental.Profile(f"{folder}"):
        for _ in range(5):
            next(iterator)
    (path,) = folder.rglob("*.xplane.pb")
    names = {
        event.name.partition("#")[0]
        for plane in XSpace.FromString(path.read_bytes()).planes
        for event in plane.event_metadata.values()
    }
    return max((name for name in names if name.startswith("Iterator::Root::")), key=len).split("::")[2:]


def numbered_image(number: int) -> "Image.Image":
    """An image that tells its number in every crop."""
    from PIL import Image

    return Image.new("RGB", (20, 24), (number % 256, number // 256, 99))


def numbers_of(images: "np.ndarray") -> "np.ndarray":
    """Numbers of a batch of such images, which must be plain."""
    assert (images == images[:, :1, :1]).all()
    assert (images[..., 2] == 99).all()
    return images[:, 0, 0, 0] + 256 * images[:, 0, 0, 1].astype(int)


def write_numbered_images(root: Path) -> Path:
    """PNG files in a folder for each class."""
    for number in range(NUM_IMAGES):
        (root / f"class{number % NUM_CLASSES}").mkdir(exist_ok=True)
        numbered_image(number).save(root / f"class{number % NUM_CLASSES}" / f"{number:03d}.png")
    return root


def write_numbered_records(images: Path, root: Path) -> Path:
    """The same images in eight TFRecord files."""
    import tensorflow as tf

    for file in range(8):
        with tf.io.TFRecordWriter(str(root / f"train-{file}")) as writer:
            for number in range(file, NUM_IMAGES, 8):
                label = number % NUM_CLASSES
                png = (images / f"class{label}" / f"{number:03d}.png").read_bytes()
                example = tf.train.Example()
                example.features.feature["image/encoded"].bytes_list.value.append(png)
                example.features.feature["image/class/label"].int64_list.value.append(label + 1)
                writer.write(example.SerializeToString())
    return root
