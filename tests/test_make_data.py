"""Made data: read back by an independent reader, resumed, verified, and trained on."""

import hashlib
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import config_of, make
from PIL import Image
from run_helpers import environment_without_tensorflow, python

from tfbench.data import image_shards, pipeline
from tfbench.data.image_shards import ShardsError


def features_of(path: Path) -> list[dict[str, Any]]:
    """The features of every record, its framing read by hand."""
    data, offset, found = path.read_bytes(), 0, []
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        example = tf.train.Example.FromString(data[offset + 12 : offset + 12 + length])
        found.append(
            {
                name: [*feature.bytes_list.value, *feature.int64_list.value][0]
                for name, feature in example.features.feature.items()
            }
        )
        offset += 12 + length + 4
    return found


def picture(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    image_shards.make(image_shards.images_recipe(24, 3, 6, seed=4), out, processes=1)
    return out


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [features for path in sorted(folder.glob("train-*")) for features in features_of(path)]


def test_images_have_imagenets_layout_and_sizes(made: Path) -> None:
    records = records_of(made)
    assert len(records) == 24
    assert sorted(r["image/filename"] for r in records) == [f"{i:08d}.JPEG".encode() for i in range(24)]
    assert np.bincount([r["image/class/label"] for r in records]).tolist() == [0, 4, 4, 4, 4, 4, 4]
    for record in records:
        image = picture(record["image/encoded"])
        assert (image.format, image.mode) == ("JPEG", "RGB")
        assert image.size == (record["image/width"], record["image/height"])
        assert max(image.size) == 500
        assert 333 <= min(image.size) <= 417
        assert record["image/format"] == b"JPEG"
        assert record["image/class/synset"] == b"n%08d" % record["image/class/label"]
    # ImageNet's mean is 110 kB; files of one picture would all be alike.
    sizes = [len(record["image/encoded"]) for record in records]
    assert 90_000 < np.mean(sizes) < 130_000
    assert np.std(sizes) > 10_000
    assert len({record["image/encoded"] for record in records}) == 24


def test_equal_seeds_make_equal_files(made: Path, tmp_path: Path) -> None:
    for seed in (4, 5):
        image_shards.make(image_shards.images_recipe(24, 3, 6, seed), tmp_path / f"{seed}", processes=1)
    name = "train-00001-of-00003"
    assert (tmp_path / "4" / name).read_bytes() == (made / name).read_bytes()
    assert (tmp_path / "5" / name).read_bytes() != (made / name).read_bytes()


def test_manifest_has_every_shards_hash(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["records"] == 24
    assert [shard["file"] for shard in manifest["shards"]] == [f"train-0000{i}-of-00003" for i in range(3)]
    for shard in manifest["shards"]:
        content = (made / shard["file"]).read_bytes()
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
        assert (shard["bytes"], shard["records"]) == (len(content), 8)
    assert image_shards.verify(made) == (3, [])


def test_a_stopped_call_goes_on_and_makes_the_missing_only(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = image_shards.images_recipe(24, 3, 6, seed=4)
    write, written = image_shards._write_shard, []

    def stop_at_the_second(recipe: Any, out: Path, index: int) -> dict[str, Any]:
        if len(written) == 1:
            (out / f".{recipe.files[index]}.partial").write_bytes(b"half of it")
            raise KeyboardInterrupt
        written.append(index)
        return write(recipe, out, index)

    monkeypatch.setattr(image_shards, "_write_shard", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        image_shards.make(recipe, tmp_path, processes=1)
    assert image_shards.verify(tmp_path)[1] == [
        f"{tmp_path}: not complete; give the command that made it again"
    ]
    monkeypatch.setattr(image_shards, "_write_shard", write)
    assert image_shards.make(recipe, tmp_path, processes=1) == 2
    assert image_shards.make(recipe, tmp_path, processes=1) == 0
    for name in recipe.files:
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()
    with pytest.raises(ShardsError, match=r"made with another num \(24 there\), seed \(4 there\); choose"):
        image_shards.make(image_shards.images_recipe(30, 3, 6, seed=1), tmp_path, processes=1)


@pytest.mark.parametrize("kind", ["raw", "jpeg"])
def test_resized_keeps_everything_but_the_size(kind: str, made: Path, tmp_path: Path) -> None:
    sources = sorted(map(str, made.glob("train-*")))
    image_shards.make(image_shards.resized_recipe(sources, 100, kind), tmp_path, processes=1)
    for before, after in zip(records_of(made), records_of(tmp_path), strict=True):
        for name in ("image/class/label", "image/class/synset", "image/filename"):
            assert after[name] == before[name]
        image, original = picture(after["image/encoded"]), picture(before["image/encoded"])
        assert image.format == {"raw": "PPM", "jpeg": "JPEG"}[kind]
        assert after["image/format"] == image.format.encode()
        assert (after["image/width"], after["image/height"]) == image.size
        assert min(image.size) == 100
        assert max(image.size) == round(500 * 100 / min(original.size))
        expected = np.asarray(original.resize(image.size, Image.BILINEAR)).astype(int)
        assert np.abs(np.asarray(image).astype(int) - expected).mean() < {"raw": 2, "jpeg": 9}[kind]
    (batch,) = make(config_of(f"tfrecord:{tmp_path}/train-*")).take(1).as_numpy_iterator()
    assert batch["image"].std() > 5


@pytest.mark.parametrize("width", [1, 6, 7, 8, 300])  # up to 6 the header takes more than a row
def test_raw_image_of_any_width(width: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, width, 3), np.uint8)
    encoded = image_shards.ppm(pixels)
    np.testing.assert_array_equal(np.asarray(picture(encoded)), pixels)
    np.testing.assert_array_equal(pipeline.decode_whole(encoded), pixels)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda encoded: encoded[:-1], "requested shape"),
        (lambda encoded: encoded + bytes(3 * 8), "requested shape"),
        (lambda encoded: b"P6 8 5 255\n" + bytes(3 * 8 * 5), "StringToNumberOp"),  # of another layout
        (lambda encoded: b"P6 ", "out of range|StringToNumberOp"),
    ],
)
def test_raw_image_that_is_not_whole_is_refused(damage: Callable[[bytes], bytes], message: str) -> None:
    encoded = damage(image_shards.ppm(np.zeros((5, 8, 3), np.uint8)))
    for decode in (pipeline.decode_whole, lambda image: pipeline.random_crop(image, tf.constant([0, 0]))):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            decode(encoded)


def test_old_raw_records_are_not_mixed_with_new_ones(made: Path, tmp_path: Path) -> None:
    sources = sorted(map(str, made.glob("train-*")))
    recipe = image_shards.resized_recipe(sources, 100, "raw")
    image_shards.make(recipe, tmp_path, processes=1)
    manifest = tmp_path / "manifest.json"
    written = json.loads(manifest.read_text())
    del written["recipe"]["layout"]  # as with bitmaps
    manifest.write_text(json.dumps(written))
    with pytest.raises(ShardsError, match=f"--out={tmp_path}: holds shards made with another layout; choose"):
        image_shards.make(recipe, tmp_path, processes=1)


def test_unreadable_source_is_named(made: Path, tmp_path: Path) -> None:
    content = (made / "train-00000-of-00003").read_bytes()
    source = tmp_path / "train-0"
    source.write_bytes(content[: len(content) // 2])
    with pytest.raises(ShardsError, match=rf"--source: {source}, record \d: .*truncated record"):
        image_shards.make(
            image_shards.resized_recipe([str(source)], 64, "jpeg"), tmp_path / "out", processes=1
        )
    assert not (tmp_path / "out" / "train-0").exists()


def test_source_without_images_is_named(tmp_path: Path) -> None:
    source = tmp_path / "train-0"
    with tf.io.TFRecordWriter(str(source)) as writer:
        writer.write(tf.train.Example().SerializeToString())
    recipe = image_shards.resized_recipe([str(source)], 64, "jpeg")
    with pytest.raises(ShardsError, match=f"--source: {source}, record 0: has no feature image/encoded"):
        image_shards.make(recipe, tmp_path / "out", processes=1)


@pytest.mark.parametrize(
    ("files", "pattern"),
    [
        (["train-00000-of-00002", "train-00001-of-00002"], "o/train-*"),
        (["cats.tfrecord", "dogs.tfrecord"], "o/*.tfrecord"),
        (["a", "b"], "GLOB that matches them and not manifest.json"),
    ],
)
def test_the_hint_names_what_was_written(files: list[str], pattern: str) -> None:
    assert image_shards.how_to_train(Path("o"), files) == f"Train on them with --data=tfrecord:{pattern}"


def test_verify_finds_damage(made: Path, tmp_path: Path) -> None:
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first, second, third = sorted(tmp_path.glob("train-*"))
    content = bytearray(first.read_bytes())
    content[1000] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    _, problems = image_shards.verify(tmp_path)
    assert [problem.partition(": ")[0] for problem in problems] == [str(first), str(second), str(third)]
    for problem, words in zip(problems, ("SHA-256", "bytes, was made with", "missing"), strict=True):
        assert words in problem


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--kind"),
        (["--kind=images"], "--out"),
        (["--kind=videos", "--out=x"], "images|resized|tokens"),
        (["--kind=images", "--out=x", "--num=3", "--shards=4"], "--shards=4: from 1 to --num=3"),
        (["--kind=resized", "--out=x", "--source=tfrecord:none*"], "--source=tfrecord:none*: expected"),
        (
            ["--kind=images", "--out=x", "--encoding=raw"],
            "--encoding=raw: goes with --kind=resized, not with --kind=images",
        ),
        (["--kind=images", "--out=x", "--verify"], "manifest.json cannot be read"),
        (["--kind=images", "--out=x", "more"], "'more' is not a flag"),
    ],
)
def test_refused_flags(flags: list[str], message: str, tmp_path: Path) -> None:
    env = environment_without_tensorflow(tmp_path / "blocker")
    done = python("-m", "tfbench.make_data", *flags, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert message in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_command_in_several_processes_makes_the_same_files(made: Path, tmp_path: Path) -> None:
    command = ("-m", "tfbench.make_data", "--kind=images", "--out=out")
    made_now = python(
        *command, "--num=24", "--shards=3", "--num_classes=6", "--seed=4", "--processes=2", cwd=tmp_path
    )
    assert made_now.returncode == 0, made_now.stderr
    assert "3 shards written, 0 were there" in made_now.stdout
    assert made_now.stderr == ""  # TensorFlow's greetings are in a log
    assert (tmp_path / "out" / ".make_data.log").stat().st_size
    for path in made.glob("train-*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert python(*command, "--verify", cwd=tmp_path).returncode == 0
    (tmp_path / "out" / "train-00000-of-00003").unlink()
    assert python(*command, "--verify", cwd=tmp_path).returncode == 1
