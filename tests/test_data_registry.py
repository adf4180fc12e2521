"""What --data accepts, and what is refused before anything is read. Without TensorFlow."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_helpers import IMAGE_MODEL, TEXT_MODEL, check, config_of

from tfbench.config import ConfigError
from tfbench.data import DATASETS, parse


@pytest.mark.parametrize(
    ("data", "name", "argument"),
    [
        ("synthetic", "synthetic", None),
        ("digits", "digits", None),
        ("pydoc", "pydoc", None),
        ("tfds:imagenet2012:5.1.0", "tfds", "imagenet2012:5.1.0"),
        ("tfrecord:/data/train-*", "tfrecord", "/data/train-*"),
    ],
)
def test_parse(data: str, name: str, argument: str | None) -> None:
    assert parse(data) == (DATASETS[name], argument)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("imagenet", "--data=imagenet: one of synthetic, digits, pydoc, tfds:ARGUMENT, tfrecord:ARGUMENT"),
        ("", "--data=: one of synthetic"),
        ("tfds", "--data=tfds: tfds needs an argument"),
        ("tfrecord:", "--data=tfrecord:: tfrecord needs an argument"),
        ("digits:8", "--data=digits:8: digits takes no argument"),
        ("synthetic:", "--data=synthetic:: synthetic takes no argument"),
    ],
)
def test_parse_refuses(data: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(data)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "spec", "message"),
    [
        ("digits", TEXT_MODEL, "digits has images, text_model reads text: pydoc"),
        ("tfds:mnist", TEXT_MODEL, "tfds has images, text_model reads text: pydoc"),
        ("tfrecord:/x", TEXT_MODEL, "tfrecord has images, text_model reads text: pydoc"),
        ("pydoc", IMAGE_MODEL, "pydoc has text, image_model reads images: digits"),
        (
            "digits",
            dataclasses.replace(IMAGE_MODEL, num_classes=9),
            "has 10 classes, image_model tells only 9",
        ),
        ("pydoc", dataclasses.replace(TEXT_MODEL, vocab_size=100), "at least 109 tokens, text_model has 100"),
    ],
)
def test_model_that_does_not_fit(data: str, spec: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(config_of(data), spec)
    assert f"--data={data}: " in str(refusal.value)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "spec"),
    [("synthetic", IMAGE_MODEL), ("synthetic", TEXT_MODEL), ("digits", IMAGE_MODEL), ("pydoc", TEXT_MODEL)],
)
def test_model_that_fits(data: str, spec: Any) -> None:
    check(config_of(data), spec)
    assert spec.kind in DATASETS[data].kinds


@pytest.mark.parametrize(
    ("data", "spec", "module"),
    [
        ("digits", IMAGE_MODEL, "sklearn"),
        ("pydoc", TEXT_MODEL, "tokenizers"),
        ("tfds:mnist", IMAGE_MODEL, "tensorflow_datasets"),
        ("tfds:mnist", IMAGE_MODEL, "importlib_resources"),
    ],
)
def test_missing_package(data: str, spec: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    with pytest.raises(ConfigError, match=rf"needs {module}: pip install 'tfbench\[data\]'"):
        check(config_of(data), spec)


def test_tfrecord_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(config_of(f"tfrecord:{tmp_path}/train-*"))
    assert f"no file matches {tmp_path}/train-*; expected a glob of TFRecord files" in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"short", "is not an uncompressed TFRecord file"),
        (b"\xff\xd8\xff\xe0 a JPEG file", "is not an uncompressed TFRecord file"),
        # A record of 5 bytes takes 8 + 4 + 5 + 4 = 21; one byte is missing.
        ((5).to_bytes(8, "little") + bytes(12), "or it is cut short"),
    ],
)
def test_tfrecord_of_something_else(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "train-0").write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        check(config_of(f"tfrecord:{tmp_path}/train-*"))
    assert f"{tmp_path}/train-0" in str(refusal.value)
    assert message in str(refusal.value)


IMAGE_FEATURE = {
    "pythonClassName": "tensorflow_datasets.core.features.image_feature.Image",
    "image": {"dtype": "uint8", "encodingFormat": "jpeg", "shape": {"dimensions": ["-1", "-1", "3"]}},
}
LABEL_FEATURE = {
    "pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel",
    "classLabel": {"numClasses": "10"},
}
TEXT_FEATURE = {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}


def prepare(folder: Path, *, info: dict[str, Any] | None = None, **features: Any) -> None:
    """Writes what TensorFlow Datasets writes for a data set of two training files."""
    folder.mkdir(parents=True)
    features = features or {"image": IMAGE_FEATURE, "label": LABEL_FEATURE}
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    info = {
        "name": "birds",
        "version": folder.name,
        "fileFormat": "tfrecord",
        "splits": [
            {
                "name": "train",
                "shardLengths": ["3", "3"],
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
            }
        ],
        **(info or {}),
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for index in range(2):
        (folder / f"birds-train.tfrecord-0000{index}-of-00002").write_bytes(b"")


def refusal_of(data: str, data_dir: Path) -> str:
    with pytest.raises(ConfigError) as refusal:
        check(config_of(data, data_dir=str(data_dir)))
    assert str(refusal.value).startswith(f"--data={data}: ")
    return str(refusal.value)


def test_tfds_not_prepared(tmp_path: Path) -> None:
    message = refusal_of("tfds:birds", tmp_path)
    assert f"no prepared data set in {tmp_path}/birds/VERSION" in message
    assert f"tfds build birds --data_dir={tmp_path}" in message
    assert "ILSVRC2012" not in message


def test_tfds_imagenet_names_the_archives_to_download(tmp_path: Path) -> None:
    message = refusal_of("tfds:imagenet2012", tmp_path)
    for part in ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", f"{tmp_path}/downloads/manual"):
        assert part in message


def test_tfds_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=f"no prepared data set in {tmp_path}/birds/VERSION"):
        check(config_of("tfds:birds"))
    prepare(tmp_path / "birds" / "1.0.0")
    check(config_of("tfds:birds"))


def test_tfds_newest_version_unless_named(tmp_path: Path) -> None:
    prepare(tmp_path / "birds" / "9.0.0")
    prepare(tmp_path / "birds" / "10.0.0", text=TEXT_FEATURE)
    assert f"{tmp_path}/birds/10.0.0" in refusal_of("tfds:birds", tmp_path)
    check(config_of("tfds:birds:9.0.0", data_dir=str(tmp_path)))
    assert f"no prepared data set in {tmp_path}/birds/8.0.0" in refusal_of("tfds:birds:8.0.0", tmp_path)


def test_tfds_with_configurations(tmp_path: Path) -> None:
    prepare(tmp_path / "birds" / "large" / "1.0.0")
    prepare(tmp_path / "birds" / "small" / "1.0.0")
    assert "choose one of tfds:birds/{large,small}" in refusal_of("tfds:birds", tmp_path)
    check(config_of("tfds:birds/small", data_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["../birds", "Birds", "birds/", "birds:latest", "a/b/c"])
def test_tfds_name_that_is_none(name: str, tmp_path: Path) -> None:
    assert "expected tfds:NAME" in refusal_of(f"tfds:{name}", tmp_path)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"text": TEXT_FEATURE, "label": LABEL_FEATURE}, "its features are label, text"),
        ({"image": IMAGE_FEATURE, "text": TEXT_FEATURE}, "its features are image, text"),
        (
            {"image": {**IMAGE_FEATURE, "image": {"dtype": "uint16"}}, "label": LABEL_FEATURE},
            "expected an 8-bit",
        ),
        (
            {"image": IMAGE_FEATURE, "label": {**LABEL_FEATURE, "classLabel": {"numClasses": "13"}}},
            "has 13 classes, image_model tells only 12 apart",
        ),
    ],
)
def test_tfds_that_is_not_labelled_images(features: dict[str, Any], message: str, tmp_path: Path) -> None:
    prepare(tmp_path / "birds" / "1.0.0", **features)
    assert message in refusal_of("tfds:birds", tmp_path)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"splits": [{"name": "test", "shardLengths": ["1"]}]}, "has splits test; expected train"),
        ({"fileFormat": "array_record"}, "is stored as array_record"),
        (
            {"splits": [{"name": "train", "shardLengths": ["1"] * 3}]},
            "3 of 3 files are missing in {folder}, the first is birds-train.tfrecord-00000-of-00003",
        ),
    ],
)
def test_tfds_that_cannot_be_read(info: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "birds" / "1.0.0"
    prepare(folder, info=info)
    assert message.format(folder=folder) in refusal_of("tfds:birds", tmp_path)


def test_names_and_refusals_need_no_tensorflow() -> None:
    script = (
        "import sys, data_helpers\n"
        "for data in ('tfds:none', 'tfrecord:none'):\n"
        "    try: data_helpers.check(data_helpers.config_of(data, data_dir='none'))\n"
        "    except ValueError: continue\n"
        "    raise SystemExit('not refused')\n"
        "data_helpers.check(data_helpers.config_of('pydoc'), data_helpers.TEXT_MODEL)\n"
        "data_helpers.check(data_helpers.config_of('digits'))\n"
        "slow = {'tensorflow', 'numpy', 'sklearn', 'tokenizers', 'tensorflow_datasets'}\n"
        "loaded = slow & set(sys.modules)\n"
        "sys.exit(f'imported {loaded}' if loaded else 0)\n"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
