"""--input=dali: NVIDIA DALI decodes the images on the GPUs that train. TensorFlow-free to import.

Each replica has a DALI pipeline of its own, on its own GPU, over its own shard of the files.
"""

import contextlib
import importlib.util
import os
import random
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.data import folder, tfrecord
from tfbench.data.spec import DatasetSpec, InputLog, Shard
from tfbench.models.spec import Batch

if TYPE_CHECKING:
    import tensorflow as tf

# The plugin is compiled against the TensorFlow that it finds.
_INSTALL = "pip install --no-build-isolation 'tfbench[dali]'"
READ_BY_DALI = (folder.FOLDER.name, tfrecord.TFRECORD.name)
Reader = Callable[[Shard], tuple[Any, Any]]  # inside a DALI pipeline: → encoded image, label


def require_dali(config: BenchmarkConfig, dataset_spec: DatasetSpec) -> None:
    """Refuses --input=dali where it cannot be.

    Raises:
        ConfigError: the data, the device or another flag rules it out, or DALI is not installed.
    """
    if config.input != "dali":
        return
    if dataset_spec.name not in READ_BY_DALI:
        accepted = " and ".join(f"--data={name}:…" for name in READ_BY_DALI)
        raise ConfigError("input", "dali", f"goes with {accepted}, not with --data={config.data}: tfdata")
    if not config.gpus:
        raise ConfigError("input", "dali", "decodes on GPUs, and --gpus=0 has none: tfdata")
    if missing := [name for name in ("nvidia.dali", "nvidia.dali_tf_plugin") if not _is_installed(name)]:
        raise ConfigError("input", "dali", f"needs {' and '.join(missing)}: {_INSTALL}, or tfdata")
    alone = {"deterministic": "false", "cache": "none", "on_bad_record": "fail", "data_service": "none"}
    for flag, needed in alone.items():
        if (value := f"{getattr(config, flag)}".lower()) != needed:
            raise ConfigError(flag, value, f"not with --input=dali: {needed}")


def _is_installed(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # of its parent
        return importlib.util.find_spec(module) is not None
    return False


def open_dali(
    config: BenchmarkConfig, strategy: "tf.distribute.Strategy", log: InputLog
) -> Callable[[], Batch]:
    """Opens --data for the replicas, whose batches never leave their GPUs.

    Args:
        config: has passed `require_dali`.
        strategy: over GPUs of one host; on logical CPU devices the CPU decodes.
        log: is told what was opened.

    Returns:
        What gives the next batch of every replica, also inside a tf.function.
    """
    import nvidia.dali
    import tensorflow as tf

    reader, devices = reader_of(config), strategy.extended.worker_devices

    def dataset_fn(context: "tf.distribute.InputContext") -> "tf.data.Dataset":
        shard = Shard(context.input_pipeline_id, context.num_input_pipelines, log)
        with tf.device(devices[shard.index]):
            return dataset(config, reader, shard, gpu=shard.index if config.gpus else None)

    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_place_dataset_on_device=True,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )
    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn, options))

    def next_batch() -> Batch:
        image, label = next(iterator)  # a data set on a GPU cannot be mapped to a dict
        return {"image": image, "label": label}

    log.notes.append(f"input: DALI {nvidia.dali.__version__} decodes on {', '.join(devices)}")
    return next_batch


def dataset(config: BenchmarkConfig, reader: Reader, shard: Shard, *, gpu: int | None) -> "tf.data.Dataset":
    """Endless batches (image uint8 [B, S, S, 3], label int64 [B]), cropped as `pipeline.image_batches` does.

    Labels are int64, as `models.transit.departing` makes them: int32 ones would be copied to the GPU at every
    step.

    Args:
        config: gives sizes and the seed.
        reader: of the files.
        shard: of the replica.
        gpu: that decodes; None: the CPU.
    """
    import tensorflow as tf
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.tf import DALIDataset

    from tfbench.data import pipeline, tolerant

    size, batch = config.image_size, config.samples_per_replica_per_step
    threads = max(1, tolerant.usable_cores() // shard.count)

    @pipeline_def(batch_size=batch, num_threads=threads, device_id=gpu, seed=config.seed + shard.index)
    def images_and_labels() -> tuple[Any, Any]:
        encoded, label = reader(shard)
        image = fn.decoders.image_random_crop(
            encoded,
            device="cpu" if gpu is None else "mixed",
            random_area=pipeline.CROP_AREA,
            random_aspect_ratio=pipeline.CROP_ASPECT_RATIO,
        )
        image = fn.resize(image, size=[size, size], antialias=False, interp_type=types.INTERP_LINEAR)
        image = fn.flip(image, horizontal=fn.random.coin_flip())
        label = fn.cast(fn.squeeze(label, axes=[0]), dtype=types.INT64)
        return image, label if gpu is None else label.gpu()

    return DALIDataset(
        pipeline=images_and_labels(),
        batch_size=batch,
        num_threads=threads,
        device_id=gpu,
        output_shapes=((batch, size, size, 3), (batch,)),
        output_dtypes=(tf.uint8, tf.int64),
    )


def reader_of(config: BenchmarkConfig) -> Reader:
    """What reads the files of --data in a shuffled order, which is another one in every epoch.

    To be kept until the iterators are made: only then DALI opens the files, of which some go with it.
    """
    return _folder_reader(config) if config.data.startswith(folder.FOLDER.name) else _tfrecord_reader(config)


def _shuffled(config: BenchmarkConfig, shard: Shard) -> dict[str, Any]:
    """Arguments of DALI's readers. Shards change places every epoch."""
    return {
        "random_shuffle": True,
        "initial_fill": shard.tuning.shuffle_records,
        "seed": config.seed,
        "shard_id": shard.index,
        "num_shards": shard.count,
    }


def _folder_reader(config: BenchmarkConfig) -> Reader:
    labelled = folder.labelled(config)
    random.Random(config.seed).shuffle(labelled)  # the buffer alone would hold files of a few classes only
    paths, labels = map(list, zip(*labelled, strict=True))

    def read(shard: Shard) -> tuple[Any, Any]:
        from nvidia.dali import fn

        encoded, label = fn.readers.file(files=paths, labels=labels, **_shuffled(config, shard))
        return encoded, label

    return read


def _tfrecord_reader(config: BenchmarkConfig) -> Reader:
    paths = tfrecord.files_of(config)
    random.Random(config.seed).shuffle(paths)
    indexes = tempfile.TemporaryDirectory(prefix="tfbench-dali-")  # is removed with `read`
    index_paths = [os.path.join(indexes.name, f"{number}.idx") for number in range(len(paths))]
    for path, index_path in zip(paths, index_paths, strict=True):
        _write_index(path, index_path)

    def read(shard: Shard) -> tuple[Any, Any]:
        from nvidia.dali import fn
        from nvidia.dali import tfrecord as dali_tfrecord

        assert indexes
        features = {
            "image/encoded": dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, ""),
            "image/class/label": dali_tfrecord.FixedLenFeature([1], dali_tfrecord.int64, 0),
        }
        record = fn.readers.tfrecord(
            path=paths, index_path=index_paths, features=features, **_shuffled(config, shard)
        )
        return record["image/encoded"], record["image/class/label"] - 1

    return read


def _write_index(path: str, index_path: str) -> None:
    """A line for each record, as DALI's reader wants them: where it begins, and its bytes."""
    begin = 0
    with open(index_path, "w", encoding="ascii") as index:
        for record_bytes in tfrecord.record_sizes(path):
            index.write(f"{begin} {record_bytes}\n")
            begin += record_bytes
