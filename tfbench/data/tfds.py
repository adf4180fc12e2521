"""Images prepared by TensorFlow Datasets. Read from their folder, never downloaded."""

import json
import os
import pathlib
import re
from typing import TYPE_CHECKING, Any

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.data.spec import (
    DatasetSpec,
    Shard,
    argument_of,
    data_error,
    require_classes,
    require_kind,
    require_packages,
)
from tfbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import tensorflow as tf

NAME = "tfds"
SPLIT = "train"
NO_NUMBER = -1  # of a record: the tfds_id that stands for its path has it

_NAME = re.compile(r"(?P<name>[a-z]\w*)(/(?P<config>[\w.+-]+))?(:(?P<version>\d+\.\d+\.\d+))?")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def require_tfds(config: BenchmarkConfig) -> None:
    """Refuses a folder of prepared data sets where none is read.

    Raises:
        ConfigError: one was named.
    """
    if config.data_dir is not None and config.data.partition(":")[0] != NAME:
        raise ConfigError(
            "data_dir", config.data_dir, f"goes with --data=tfds:NAME, not with --data={config.data}"
        )


def _data_dir(config: BenchmarkConfig) -> pathlib.Path:
    """The folder of prepared data sets, by the rule of TensorFlow Datasets itself."""
    data_dir = config.data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return pathlib.Path(data_dir).expanduser().absolute()


def _prepared_folder(config: BenchmarkConfig) -> pathlib.Path:
    """Finds DATA_DIR/NAME[/CONFIG]/VERSION, the newest version unless the argument names one.

    Raises:
        ConfigError: there is none; the message says how to prepare it.
    """
    argument = argument_of(config)
    match = _NAME.fullmatch(argument)
    if match is None:
        raise data_error(config, "expected tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:VERSION")
    parent = _data_dir(config).joinpath(*filter(None, (match["name"], match["config"])))
    versions = {
        file.parent.name: file.parent
        for file in parent.glob("*/features.json")
        if (file.parent / "dataset_info.json").is_file()
        and _VERSION.fullmatch(file.parent.name)
        and match["version"] in (None, file.parent.name)
    }
    if versions:
        return versions[max(versions, key=lambda version: [int(part) for part in version.split(".")])]
    raise data_error(config, _not_prepared(config, match, parent))


def _not_prepared(config: BenchmarkConfig, match: re.Match[str], parent: pathlib.Path) -> str:
    """Says what was looked for and what to do."""
    data_dir = _data_dir(config)
    configs = sorted({path.parent.parent.name for path in parent.glob("*/*/features.json")})
    if configs and match["config"] is None:
        return f"{parent} holds configurations: choose one of tfds:{match['name']}/{{{','.join(configs)}}}"
    wanted = parent / (match["version"] or "VERSION")
    advice = (
        f"no prepared data set in {wanted}. Prepare it with: tfds build {argument_of(config)} "
        f"--data_dir={data_dir}, or name the folder that holds it with --data_dir"
    )
    if match["name"] == "imagenet2012":
        advice += (
            ". First download ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar by hand from "
            f"https://image-net.org into {data_dir / 'downloads' / 'manual'}"
        )
    return advice


def _check(config: BenchmarkConfig, spec: ModelSpec) -> None:
    require_kind(config, spec, "image")
    # importlib_resources: needed by tensorflow-datasets 4.9.10 on Python 3.11, which does not declare it.
    require_packages(config, "tensorflow_datasets", "importlib_resources")
    folder = _prepared_folder(config)
    require_classes(config, spec, _num_classes(config, folder))
    _check_files(config, folder)


def _num_classes(config: BenchmarkConfig, folder: pathlib.Path) -> int:
    """Reads the number of classes from a data set's description.

    Raises:
        ConfigError: it does not hold 8-bit images with a class each.
    """
    description = json.loads((folder / "features.json").read_text())
    features: dict[str, Any] = description.get("featuresDict", {}).get("features", {})
    image, label = (features.get(name, {}) for name in ("image", "label"))
    is_image = image.get("pythonClassName", "").endswith(".Image") and (
        image.get("image", {}).get("dtype", "uint8") == "uint8"
    )
    num_classes = int(label.get("classLabel", {}).get("numClasses", 0))
    if not is_image or not num_classes:
        raise data_error(
            config,
            f"its features are {', '.join(sorted(features)) or 'unknown'} ({folder}); expected an 8-bit "
            "`image` with a class `label`: text and other data sets of TensorFlow Datasets are not read",
        )
    return num_classes


def _check_files(config: BenchmarkConfig, folder: pathlib.Path) -> None:
    """Looks for every file of the training split.

    Raises:
        ConfigError: there is no such split, it is stored in another format, or files are missing.
    """
    info = json.loads((folder / "dataset_info.json").read_text())
    splits = {split["name"]: split for split in info.get("splits", [])}
    if SPLIT not in splits:
        raise data_error(
            config,
            f"{folder} has splits {', '.join(sorted(splits)) or 'of no name'}; expected {SPLIT}",
        )
    file_format = info.get("fileFormat", "tfrecord")
    if file_format != "tfrecord":
        raise data_error(config, f"{folder} is stored as {file_format}; build it with --file_format=tfrecord")
    num_files = len(splits[SPLIT]["shardLengths"])
    template = splits[SPLIT].get("filepathTemplate", "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}")
    names = (
        template.format(
            DATASET=info["name"],
            SPLIT=SPLIT,
            FILEFORMAT=file_format,
            SHARD_X_OF_Y=f"{index:05d}-of-{num_files:05d}",
        )
        for index in range(num_files)
    )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise data_error(
            config,
            f"{len(missing)} of {num_files} files are missing in {folder}, the first is {missing[0]}: "
            "copy them or build the data set again",
        )


def _make(config: BenchmarkConfig, spec: ModelSpec, shard: Shard) -> "tf.data.Dataset":
    """Photographs, whose size varies, are cropped as ImageNet's are; images of one size are only resized."""
    import tensorflow_datasets as tfds

    from tfbench.data import pipeline

    builder = tfds.builder_from_directory(_prepared_folder(config))
    # Workers of a service are dealt the files: each has a part of them, and shuffling would ask for all.
    in_service = config.data_service is not None
    records = builder.as_dataset(
        split=tfds.even_splits(SPLIT, shard.count)[shard.index],
        shuffle_files=not in_service,
        decoders=tfds.decode.PartialDecoding(
            {"image": True, "label": True}, decoders={"image": tfds.decode.SkipDecoding()}
        ),
        read_config=tfds.ReadConfig(
            try_autocache=False,
            skip_prefetch=True,
            add_tfds_id=True,
            assert_cardinality=not in_service,
            shuffle_seed=config.seed,
            shuffle_reshuffle_each_iteration=True,
        ),
    )
    named = records.map(lambda record: (record["tfds_id"], NO_NUMBER, record["image"], record["label"]))
    return pipeline.image_batches(
        named,
        lambda encoded, label: (encoded, label),
        config,
        shard,
        augment=None in builder.info.features["image"].shape[:2],
        num_records=builder.info.splits[SPLIT].num_examples // shard.count,
    )


TFDS = DatasetSpec(
    name=NAME,
    kinds=frozenset({"image"}),
    takes_argument=True,
    image_files=True,
    help="NAME[/CONFIG][:VERSION] of an image data set prepared by TensorFlow Datasets under --data_dir",
    check=_check,
    make=_make,
)
