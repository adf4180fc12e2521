"""Images in files: every record once, what is unreadable, what is kept in RAM; against Pillow and struct."""

import logging
import os
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from data_helpers import IMAGE_MODEL, check, config_of, make, stages_of
from PIL import Image
from run_helpers import machine, only_row, train
from step_helpers import strategy_of
from test_data_images import encode, write_records

from tfbench import defaults
from tfbench.config import ConfigError
from tfbench.data import InputLog, Shard, image_shards, open_input, pipeline, tolerant
from tfbench.data.spec import UnreadableError

NUM_IMAGES = 12
GREY = 20  # levels between two images


def grey(index: int) -> np.ndarray:
    return np.full((40 + index, 60, 3), GREY * (index + 1), np.uint8)


def make_folder(root: Path) -> None:
    """Four classes of 1, 2, 4 and 5 images, PNG and JPEG, with files beside them that are none."""
    index = 0
    for name, size in (("b", 2), ("a", 1), ("d", 5), ("c", 4)):
        (root / name).mkdir(parents=True)
        for number in range(size):
            suffix, file_format = [("png", "PNG"), ("jpg", "JPEG"), ("JPEG", "JPEG")][index % 3]
            (root / name / f"{number}.{suffix}").write_bytes(encode(grey(index), file_format))
            index += 1
        (root / name / "notes.txt").write_text("no image")
    (root / ".hidden").mkdir()
    (root / "labels.csv").write_text("no class")


def folder_by_pillow(root: Path) -> Counter:
    """(nearest grey step, label) of every image."""
    seen: Counter = Counter()
    classes = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    for path in root.glob("*/*"):
        if path.suffix.lower() in (".png", ".jpg", ".jpeg"):
            seen[step_of(np.asarray(Image.open(path))), classes.index(path.parent.name)] += 1
    return seen


def records_by_struct(folder: Path) -> Counter:
    """(nearest grey step, label from 0) of every record, its framing read by hand."""
    seen: Counter = Counter()
    for path in folder.glob("train-*"):
        data, offset = path.read_bytes(), 0
        while offset < len(data):
            (length,) = struct.unpack_from("<Q", data, offset)
            features = tf.train.Example.FromString(data[offset + 12 : offset + 12 + length]).features.feature
            encoded = features["image/encoded"].bytes_list.value[0]
            (path.parent / "one").write_bytes(encoded)
            image = np.asarray(Image.open(path.parent / "one"))
            seen[step_of(image), features["image/class/label"].int64_list.value[0] - 1] += 1
            offset += 12 + length + 4
    return seen


def step_of(image: np.ndarray) -> int:
    assert int(image.max()) - int(image.min()) <= 2
    return round(float(image.mean()) / GREY)


def seen_in(batches: list[dict[str, np.ndarray]]) -> Counter:
    return Counter(
        (step_of(image), int(label))
        for batch in batches
        for image, label in zip(batch["image"], batch["label"], strict=True)
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    make_folder(folder / "classes")
    (folder / "records").mkdir()
    for file in range(4):
        write_records(folder / "records" / f"train-{file}", [3 * file + 1, 3 * file + 2, 3 * file + 3])
    return folder


def data_and_truth(kind: str, root: Path) -> tuple[str, Counter]:
    if kind == "folder":
        return f"folder:{root}/classes", folder_by_pillow(root / "classes")
    return f"tfrecord:{root}/records/train-*", records_by_struct(root / "records")


@pytest.mark.parametrize("kind", ["folder", "tfrecord"])
@pytest.mark.parametrize("cache", ["none", "ram"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_an_epoch_over_replicas_is_every_record_once(
    kind: str, cache: str, replicas: int, root: Path
) -> None:
    data, truth = data_and_truth(kind, root)
    config = config_of(data, cpu_replicas=replicas, deterministic=True, cache=cache)
    check(config)
    strategy = strategy_of(replicas)
    source = open_input(config, IMAGE_MODEL, strategy)
    for _ in range(2):
        batches = []
        for _ in range(NUM_IMAGES // replicas):
            batch = source.next()
            parts = {name: strategy.experimental_local_results(value) for name, value in batch.items()}
            batches += [{name: parts[name][replica].numpy() for name in parts} for replica in range(replicas)]
        assert seen_in(batches) == truth
    assert sum(truth.values()) == NUM_IMAGES


@pytest.mark.parametrize("kind", ["folder", "tfrecord"])
def test_an_epoch_over_two_workers_is_every_record_once(kind: str, root: Path) -> None:
    data, truth = data_and_truth(kind, root)
    config = config_of(data, deterministic=True)
    batches: list[Any] = []
    for index in range(2):
        batches += make(config, shard=Shard(index, 2)).take(NUM_IMAGES // 2).as_numpy_iterator()
    assert seen_in(batches) == truth


def test_folder_order_changes_with_epoch_and_seed(root: Path) -> None:
    def steps(seed: int) -> list[int]:
        config = config_of(f"folder:{root}/classes", deterministic=True, seed=seed)
        return [step_of(b["image"][0]) for b in make(config).take(2 * NUM_IMAGES).as_numpy_iterator()]

    once, other = steps(1), steps(2)
    assert once == steps(1)
    assert once[:NUM_IMAGES] != once[NUM_IMAGES:]
    assert once != other


# --- what is refused


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "is not a folder"),
        ([], "has no folders in it"),
        (["a/"], "/a has no .jpg, .jpeg, .png file (empty)"),
        (
            ["a/1.jpg", "b/1.webp", "b/2.webp"],
            "/b has no .jpg, .jpeg, .png file (it has 2 other file(s), such",
        ),
        ([f"{label:02d}/1.jpg" for label in range(13)], "has 13 classes, image_model tells only 12 apart"),
    ],
)
def test_folder_that_cannot_be_used(files: list[str] | None, message: str, tmp_path: Path) -> None:
    root = tmp_path / "classes"
    for name in files or []:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (root / name).write_bytes(b"any")
        else:
            (root / name).mkdir()
    if files == []:
        root.mkdir()
    with pytest.raises(ConfigError) as refusal:
        check(config_of(f"folder:{root}"))
    assert f"--data=folder:{root}: " in str(refusal.value)
    assert message in str(refusal.value)


# --- kinds of images


@pytest.mark.parametrize(
    ("mode", "color", "file_format", "expected"),
    [
        ("L", 90, "JPEG", (90, 90, 90)),
        ("CMYK", (0, 0, 0, 155), "JPEG", (100, 100, 100)),
        ("L", 90, "PNG", (90, 90, 90)),
        ("RGBA", (10, 120, 200, 40), "PNG", (10, 120, 200)),  # alpha is dropped, not blended
        ("P", 0, "PNG", (0, 0, 0)),
    ],
)
@pytest.mark.parametrize("cache", ["none", "ram"])
def test_kinds_of_images_become_rgb(
    mode: str, color: Any, file_format: str, expected: tuple[int, ...], cache: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"1.{file_format.lower()}"
    Image.new(mode, (30, 20), color).save(
        path.with_suffix(".jpg" if file_format == "JPEG" else ".png"), file_format
    )
    (batch,) = make(config_of(f"folder:{tmp_path}", cache=cache)).take(1).as_numpy_iterator()
    assert np.abs(batch["image"].astype(int) - expected).max() <= 3


# --- names that are not UTF-8


@pytest.fixture
def latin_1(tmp_path: Path) -> Path:
    """A folder with a folder of the name é in Latin-1."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system wants UTF-8")
    return tmp_path


@pytest.mark.parametrize("service", [None, "grpc://any:1"])
def test_names_that_are_not_utf_8_are_read(service: str | None, latin_1: Path) -> None:
    (folder,) = latin_1.iterdir()
    (folder / os.fsdecode(b"\xe9.jpg")).write_bytes(WHOLE_JPEG)
    write_records(latin_1 / "record", [7])
    (latin_1 / "record").rename(folder / os.fsdecode(b"\xe9-0"))
    for data, label in ((f"folder:{latin_1}", 0), (f"tfrecord:{folder}/?-0", 6)):
        config = config_of(data, data_service=service)
        check(config)
        (batch,) = make(config).take(1).as_numpy_iterator()
        assert batch["label"].tolist() == [label]


def test_names_that_are_not_utf_8_can_be_printed(latin_1: Path) -> None:
    (folder,) = latin_1.iterdir()
    with pytest.raises(ConfigError, match="caf\ufffd has no "):
        check(config_of(f"folder:{latin_1}"))
    broken = folder / os.fsdecode(b"\xe9-0")
    write_records(latin_1 / "record", [1, 2])
    (latin_1 / "record").rename(broken)
    broken.write_bytes(broken.read_bytes()[:-1])
    log = InputLog("skip")
    next(iter(make(config_of(f"tfrecord:{folder}/*"), shard=Shard(0, 1, log)).take(2)))
    assert "caf\ufffd/\ufffd-0 at byte " in (log.warning() or "")


# --- unreadable records

WHOLE_JPEG = encode(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), "JPEG")
WHOLE_PNG = encode(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), "PNG")
UNREADABLE = {
    "empty": b"",
    "text": b"this is no image",
    "JPEG cut short": WHOLE_JPEG[: len(WHOLE_JPEG) // 2],
    "JPEG without its header": WHOLE_JPEG[:20] + bytes(200) + WHOLE_JPEG[220:],
    "PNG cut short": WHOLE_PNG[: len(WHOLE_PNG) // 2],
    "raw image cut short": image_shards.ppm(np.zeros((64, 64, 3), np.uint8))[:-1],
    "PNG of damaged pixels": WHOLE_PNG[:500] + bytes(100) + WHOLE_PNG[600:],
}


def folder_with(broken: dict[str, bytes], root: Path, classes: Path) -> Path:
    shutil.copytree(classes, root)
    for name, content in broken.items():
        (root / "a" / name).write_bytes(content)
    return root


@pytest.mark.parametrize("content", list(UNREADABLE.values()), ids=list(UNREADABLE))
@pytest.mark.parametrize("cache", ["none", "ram"])
def test_unreadable_image_is_left_out_and_named(
    content: bytes, cache: str, root: Path, tmp_path: Path
) -> None:
    folder = folder_with({"broken.jpg": content}, tmp_path / "classes", root / "classes")
    config = config_of(f"folder:{folder}", deterministic=True, cache=cache)
    log = InputLog("skip")
    batches = list(make(config, shard=Shard(0, 1, log)).take(3 * NUM_IMAGES).as_numpy_iterator())
    assert seen_in(batches) == Counter({key: 3 for key in folder_by_pillow(root / "classes")})
    assert log.records_skipped == 1
    assert f"1 unreadable record(s) left out, the first is {folder}/a/broken.jpg: " in (log.warning() or "")


@pytest.mark.parametrize("content", list(UNREADABLE.values()), ids=list(UNREADABLE))
def test_unreadable_image_ends_the_run_and_is_named(content: bytes, root: Path, tmp_path: Path) -> None:
    folder = folder_with({"broken.png": content}, tmp_path / "classes", root / "classes")
    config = config_of(f"folder:{folder}")
    log = InputLog(config.on_bad_record)
    with pytest.raises(UnreadableError) as ending, log.explained():
        list(make(config, shard=Shard(0, 1, log)).take(20 * NUM_IMAGES).as_numpy_iterator())
    assert f"unreadable record: {folder}/a/broken.png: " in str(ending.value)
    assert "--on_bad_record=skip" in str(ending.value)


def test_reason_and_label_out_of_range_are_named(tmp_path: Path) -> None:
    write_records(tmp_path / "train-0", [1, 2, 13, 4], {13: encode(grey(0), "JPEG")})
    log = InputLog("skip")
    config = config_of(f"tfrecord:{tmp_path}/train-0", deterministic=True)
    labels = [int(b["label"][0]) for b in make(config, shard=Shard(0, 1, log)).take(3).as_numpy_iterator()]
    assert sorted(labels) == [0, 1, 3]
    assert f"{tmp_path}/train-0, record 2: " in (log.warning() or "")
    assert "image/class/label must be within [1, 12], a record has] [13]" in (log.warning() or "")


def damaged(kind: str, data: bytes) -> tuple[bytes, int, str]:
    """A file of three records damaged in its second or third: content, records left, what is said."""
    ends = []
    while not ends or ends[-1] < len(data):
        start = ends[-1] if ends else 0
        ends.append(start + 16 + struct.unpack_from("<Q", data, start)[0])
    content = bytearray(data)
    if kind == "cut short":
        return bytes(content[: ends[1] + 30]), 2, f" at byte {ends[1]}: cut short or corrupt after 2 records"
    if kind == "length":
        content[ends[0] + 6] ^= 1  # of the second record: now larger than the file
        return bytes(content), 1, f" at byte {ends[0]}: cut short or corrupt after 1 records"
    content[ends[0] + 40] ^= 1
    return bytes(content), 1, ", record 1: its checksum is wrong, and the rest of the file is left out"


@pytest.mark.parametrize("kind", ["cut short", "length", "checksum"])
@pytest.mark.parametrize("mode", ["skip", "fail"])
def test_damaged_record_file(kind: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "train-1"
    write_records(tmp_path / "train-0", [1, 2, 3])
    write_records(path, [4, 5, 7])
    content, left, sentence = damaged(kind, path.read_bytes())
    path.write_bytes(content)
    config = config_of(f"tfrecord:{tmp_path}/train-*", deterministic=True, on_bad_record=mode)
    log = InputLog(mode)
    samples = make(config, shard=Shard(0, 1, log)).take(2 * (3 + left)).as_numpy_iterator()
    if mode == "fail":
        with pytest.raises(UnreadableError) as ending, log.explained():
            list(samples)
        assert f"{path}{sentence}" in str(ending.value)
        return
    assert Counter(int(b["label"][0]) for b in samples) == dict.fromkeys([0, 1, 2, *range(3, 3 + left)], 2)
    assert log.records_skipped == 1
    assert f"{path}{sentence}" in (log.warning() or "")


def test_nothing_readable_does_not_go_on_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerant, "MAX_LOST_CHUNKS", 5)
    (tmp_path / "a").mkdir()
    for number in range(3):
        (tmp_path / "a" / f"{number}.jpg").write_bytes(b"none")
    log = InputLog("skip")
    samples = make(config_of(f"folder:{tmp_path}"), shard=Shard(0, 1, log)).as_numpy_iterator()
    with (
        pytest.raises(UnreadableError, match=r"3 unreadable records, the first is .*: this data cannot"),
        log.explained(),
    ):
        next(samples)


def test_a_record_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    log = InputLog("skip")
    with caplog.at_level(logging.WARNING, "tfbench"):
        logging.getLogger("tfbench").addHandler(caplog.handler)
        for _ in range(3):
            log.add_unreadable("x.jpg", "no image")
        logging.getLogger("tfbench").removeHandler(caplog.handler)
    assert len({id(record) for record in caplog.records}) == 1
    assert log.records_skipped == 1


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), InputLog("skip").explained():
        _ = 1 / 0


# --- the cache


class _Memory:
    def __init__(self, available: float):
        self.available = available


def noted(config: Any) -> list[str]:
    log = InputLog()
    make(config, shard=Shard(0, 1, log))
    return log.notes


def test_cache_decides_by_measured_size(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of 60 × (40 to 51) are kept with a short side of 18 (16 · 8/7), and a label of 4 bytes."""
    kept = [18 * round(60 * 18 / (40 + index)) * 3 + 4 for index in range(NUM_IMAGES)]
    needed = sum(kept)
    config = config_of(f"folder:{root}/classes", cache="auto")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: _Memory(needed / 0.8 * 1.01))
    (note,) = noted(config)
    assert "cache: in RAM (about 12 decoded images" in note
    assert "first 12 steps" in note
    monkeypatch.setattr(psutil, "virtual_memory", lambda: _Memory(needed / 0.8 * 0.99))
    (note,) = noted(config)
    assert "cache: none, it does not fit" in note
    with pytest.raises(ConfigError, match="--cache=ram: does not fit: about 12 decoded images take"):
        make(config_of(f"folder:{root}/classes", cache="ram"))


def test_crops_of_cached_images_are_laid_into_the_batch(root: Path, tmp_path: Path) -> None:
    dataset = make(config_of(f"folder:{root}/classes", per_replica_batch_size=2, cache="ram"))
    assert stages_of(dataset, tmp_path)[:2] == ["Prefetch", "MapAndBatch"]


def test_cached_images_are_decoded_once_and_cropped_anew(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode_whole = pipeline.decode_whole

    def counted(encoded: tf.Tensor) -> tf.Tensor:
        tf.py_function(lambda: decoded.append(1), [], [])
        return decode_whole(encoded)

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(WHOLE_PNG)
    (tmp_path / "a" / "2.jpg").write_bytes(WHOLE_JPEG)
    config = config_of(f"folder:{tmp_path}", image_size=32, deterministic=True, cache="ram")
    monkeypatch.setattr(pipeline, "decode_whole", counted)
    samples = make(config)
    decoded.clear()  # of the sample whose size was measured
    images = {batch["image"].tobytes() for batch in samples.take(20).as_numpy_iterator()}
    assert len(decoded) == 2
    assert len(images) == 20


# --- a whole run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fail", "skip"])
def test_run_over_an_unreadable_image(mode: str, root: Path, tmp_path: Path) -> None:
    folder = folder_with({"broken.jpg": UNREADABLE["JPEG cut short"]}, tmp_path / "classes", root / "classes")
    done = train(
        "--model=resnet_tiny", f"--data=folder:{folder}", "--cache=auto", f"--on_bad_record={mode}",
        "--image_size=32", "--per_replica_batch_size=4", "--steps=4", "--warmup_steps=4", "--gpus=0",
        "--results_dir=out", cwd=tmp_path,
    )  # fmt: skip
    row = only_row(tmp_path / "out")
    assert "cache: in RAM (about 13 decoded images take" in done.stdout
    assert f"{folder}/a/broken.jpg: " in (row.note or "")
    if mode == "fail":
        assert (done.returncode, row.status) == (1, "failed")
        assert f"unreadable record: {folder}/a/broken.jpg: " in (row.note or "")
    else:
        assert (done.returncode, row.status, row.records_skipped) == (0, "ok", 1)
        assert "warning: 1 unreadable record(s) left out" in done.stdout


def test_choices_about_files_are_refused_where_there_are_none() -> None:
    for flag, value in (("cache", "auto"), ("on_bad_record", "skip")):
        with pytest.raises(
            ConfigError, match=f"--{flag}={value}: goes with images read from files, not with"
        ):
            defaults.complete({"model": "resnet_tiny", "data": "digits", flag: value}, machine())
