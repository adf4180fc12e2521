"""Making TFRecord files in ImageNet's layout: images that look like its photographs, and smaller copies.

Shards are written under a temporary name and entered in `manifest.json` when they are whole, so that a call
that was stopped goes on where it was. TensorFlow is imported by what writes them only.
"""

import dataclasses
import fnmatch
import glob
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

MANIFEST = "manifest.json"
FORMAT = 1
PHOTOGRAPHS = ("china.jpg", "flower.jpg")  # ship with scikit-learn
ENCODINGS = ("jpeg", "raw")
RESIZED_QUALITY = 90  # of JPEG

# ImageNet's training images are mostly 500 pixels long and 110 kB (138 GB in 1,281,167 files).
LONG_SIDE = 500
SHORT_SIDES = (333, 417)  # drawn from; 375 in the mean
QUALITY = 92
NOISE = (10.0, 25.0)  # standard deviation in grey levels; makes the files as large as those of photographs
CROP_SIDE = (0.5, 1.0)  # of the photograph's

# Where the header of a raw image says its size; the rest of it is blanks and the largest value, 255.
PPM_MAGIC = b"P6 "
PPM_WIDTH = slice(3, 9)
PPM_HEIGHT = slice(9, 15)
_PPM_END = b" 255\n"


class ShardsError(ValueError):
    """Shards that cannot be made or are not what the manifest says."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What decides every byte of a folder of shards.

    Attributes:
        kind: "images" or "resized".
        settings: of the kind, as JSON can hold them.
        files: names of the shards.
    """

    kind: str
    settings: dict[str, Any]
    files: tuple[str, ...]


def images_recipe(num: int, num_shards: int, num_classes: int, seed: int) -> Recipe:
    """`num` images of `num_classes` classes in `num_shards` files.

    Raises:
        ShardsError: a number that cannot be.
    """
    if not 1 <= num_shards <= num:
        raise ShardsError(f"--shards={num_shards}: from 1 to --num={num}")
    if num_classes < 1:
        raise ShardsError(f"--num_classes={num_classes}: at least 1")
    files = tuple(f"train-{index:05d}-of-{num_shards:05d}" for index in range(num_shards))
    return Recipe("images", {"num": num, "num_classes": num_classes, "seed": seed}, files)


def resized_recipe(sources: list[str], short_side: int, encoding: str) -> Recipe:
    """A smaller copy of every source file, under the same name.

    Raises:
        ShardsError: two sources have one name, or a choice cannot be.
    """
    if encoding not in ENCODINGS:
        raise ShardsError(f"--encoding={encoding}: one of {', '.join(ENCODINGS)}")
    if short_side < 8:
        raise ShardsError(f"--short_side={short_side}: at least 8 pixels")
    files = tuple(os.path.basename(path) for path in sources)
    if len(set(files)) < len(files):
        raise ShardsError("--source: two files have the same name")
    paths = [os.path.abspath(path) for path in sources]
    settings = {"sources": paths, "short_side": short_side, "encoding": encoding}
    if encoding == "raw":
        settings["layout"] = "PPM"  # was BMP once: no folder has both
    return Recipe("resized", settings, files)


def make(recipe: Recipe, out: Path, processes: int, progress: Callable[..., Any] | None = None) -> int:
    """Writes the shards that are missing, each read back before it counts.

    Args:
        recipe: what to make.
        out: folder, made where it is missing.
        processes: to work in; 1: this one.
        progress: wraps an iterable of finished shards, as rich's `track` does; called with `total`.

    Returns:
        Number of shards written.

    Raises:
        ShardsError: `out` holds something made otherwise, or a source cannot be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    done = _finished(recipe, out)
    missing = [index for index, name in enumerate(recipe.files) if name not in done]
    _write_manifest(recipe, out, done)
    entries: Iterable[dict[str, Any]] = _written(recipe, out, missing, processes)
    for entry in progress(entries, total=len(missing)) if progress else entries:
        done[entry["file"]] = entry
        _write_manifest(recipe, out, done)
    return len(missing)


def how_to_train(out: Path, files: Sequence[str]) -> str:
    """A hint with a glob of the files that leaves the manifest out."""
    prefix = os.path.commonprefix(files).rstrip("0123456789")  # noqa: RUF071  characters, not folders
    suffixes = {Path(name).suffix for name in files}
    suffix = suffixes.pop() if len(suffixes) == 1 else ""
    for pattern in (f"{glob.escape(prefix)}*", f"*{glob.escape(suffix)}"):
        if not fnmatch.fnmatchcase(MANIFEST, pattern):
            return f"Train on them with --data=tfrecord:{out}/{pattern}"
    return f"Train on them with --data=tfrecord:GLOB that matches them and not {MANIFEST}"


def verify(out: Path) -> tuple[int, list[str]]:
    """Compares every shard of a folder with its manifest.

    Returns:
        Number of shards, and what is wrong with them.

    Raises:
        ShardsError: there is no manifest.
    """
    manifest = _read_manifest(out)
    shards = manifest["shards"]
    problems = [] if manifest["complete"] else [f"{out}: not complete; give the command that made it again"]
    for entry in shards:
        path = out / entry["file"]
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{path}: has {path.stat().st_size} bytes, was made with {entry['bytes']}")
        elif _sha256(path) != entry["sha256"]:
            problems.append(f"{path}: its SHA-256 is not the manifest's")
    return len(shards), problems


def _written(recipe: Recipe, out: Path, indices: list[int], processes: int) -> Iterator[dict[str, Any]]:
    """Entries of shards as they are finished."""
    if min(processes, len(indices)) <= 1:
        yield from (_write_shard(recipe, out, index) for index in indices)
        return
    # Not forked: TensorFlow's threads do not survive that.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(indices)), context, initializer=_start_worker) as pool:
        futures = [pool.submit(_write_shard, recipe, out, index) for index in indices]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """The cores are shared by the processes: each computes on one, and on no GPU."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)


def _write_shard(recipe: Recipe, out: Path, index: int) -> dict[str, Any]:
    """Writes one shard and reads it back; returns the manifest's entry."""
    import tensorflow as tf

    path = out / recipe.files[index]
    partial = path.with_name(f".{path.name}.partial")
    examples = _images(recipe, index) if recipe.kind == "images" else _resized(recipe, index)
    num_records = 0
    with tf.device("CPU"), tf.io.TFRecordWriter(str(partial)) as writer:
        for example in examples:
            writer.write(example.SerializeToString(deterministic=True))  # features are a map
            num_records += 1
    read_back = sum(1 for _ in tf.data.TFRecordDataset(str(partial)))  # compares checksums
    if read_back != num_records:
        raise ShardsError(f"{partial}: {num_records} records were written, {read_back} can be read")
    entry = {
        "file": path.name,
        "records": num_records,
        "bytes": partial.stat().st_size,
        "sha256": _sha256(partial),
    }
    partial.replace(path)
    return entry


def _images(recipe: Recipe, shard: int) -> Iterator["tf.train.Example"]:
    """Every `num_shards`-th image from `shard` on; classes are equally frequent and in random order."""
    import numpy as np
    import sklearn.datasets

    photographs = [sklearn.datasets.load_sample_image(name) for name in PHOTOGRAPHS]
    num, num_classes, seed = (recipe.settings[name] for name in ("num", "num_classes", "seed"))
    labels = np.random.default_rng(seed).permutation(np.arange(num) % num_classes)
    for index in range(shard, num, len(recipe.files)):
        label = int(labels[index])
        image = _draw(
            photographs, np.random.default_rng([seed, 1, label]), np.random.default_rng([seed, 2, index])
        )
        yield _example(image, _jpeg(image, QUALITY), label + 1, f"{index:08d}.JPEG")


def _draw(
    photographs: list["np.ndarray"], of_class: "np.random.Generator", of_image: "np.random.Generator"
) -> "np.ndarray":
    """A noisy crop, uint8 [H, W, 3]; the class decides photograph and colours, so it can be learned."""
    import numpy as np
    import tensorflow as tf

    photograph = photographs[of_class.integers(len(photographs))]
    gains = of_class.uniform(0.6, 1.4, 3)
    size = [int(of_image.integers(*SHORT_SIDES, endpoint=True)), LONG_SIDE]
    if of_image.random() < 0.25:  # upright
        size.reverse()
    height, width = (int(side * of_image.uniform(*CROP_SIDE)) for side in photograph.shape[:2])
    top = of_image.integers(photograph.shape[0] - height, endpoint=True)
    left = of_image.integers(photograph.shape[1] - width, endpoint=True)
    crop = tf.image.resize(photograph[top : top + height, left : left + width], size).numpy()
    noise = of_image.standard_normal(crop.shape, np.float32) * of_image.uniform(*NOISE)
    return np.clip(crop * gains + of_image.uniform(-20, 20) + noise, 0, 255).astype(np.uint8)


def _resized(recipe: Recipe, shard: int) -> Iterator["tf.train.Example"]:
    """The source file's records with smaller images.

    Raises:
        ShardsError: a record cannot be read; names it.
    """
    import tensorflow as tf

    from tfbench.data import pipeline

    source = recipe.settings["sources"][shard]
    num_read = 0
    try:
        for serialized in tf.data.TFRecordDataset(source).as_numpy_iterator():
            example = tf.train.Example.FromString(serialized)
            encoded = example.features.feature["image/encoded"].bytes_list.value
            if not encoded:
                raise ShardsError(f"--source: {source}, record {num_read}: has no feature image/encoded")
            decoded = pipeline.decode_whole(encoded[0])
            image = pipeline.resize_short_side(decoded, recipe.settings["short_side"]).numpy()
            raw = recipe.settings["encoding"] == "raw"
            _replace_image(example, image, ppm(image) if raw else _jpeg(image, RESIZED_QUALITY), raw)
            yield example
            num_read += 1
    except tf.errors.OpError as error:
        raise ShardsError(f"--source: {source}, record {num_read}: {error}") from error


def _replace_image(example: "tf.train.Example", image: "np.ndarray", encoded: bytes, raw: bool) -> None:
    import tensorflow as tf

    for name, value in _image_features(image, encoded, b"PPM" if raw else b"JPEG").items():
        example.features.feature[name].CopyFrom(
            tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
            if isinstance(value, bytes)
            else tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        )


def _image_features(image: "np.ndarray", encoded: bytes, file_format: bytes) -> dict[str, bytes | int]:
    return {
        "image/encoded": encoded,
        "image/format": file_format,
        "image/height": image.shape[0],
        "image/width": image.shape[1],
        "image/channels": 3,
        "image/colorspace": b"RGB",
    }


def _example(image: "np.ndarray", jpeg: bytes, label: int, filename: str) -> "tf.train.Example":
    """An Example with the features that ImageNet's usual conversion writes; `label` counts from 1."""
    import tensorflow as tf

    example = tf.train.Example()
    _replace_image(example, image, jpeg, raw=False)
    features = example.features.feature
    features["image/class/label"].int64_list.value.append(label)
    features["image/class/synset"].bytes_list.value.append(f"n{label:08d}".encode())
    features["image/class/text"].bytes_list.value.append(f"class {label}".encode())
    features["image/filename"].bytes_list.value.append(filename.encode())
    return example


def _jpeg(image: "np.ndarray", quality: int) -> bytes:
    import tensorflow as tf

    encoded: bytes = tf.io.encode_jpeg(image, quality=quality).numpy()
    return encoded


def ppm(image: "np.ndarray") -> bytes:
    """uint8 [H, W, 3] as a binary portable pixmap, a header of text and then the pixels, rows from the top.

    Blanks make the header as long as whole rows, so that a program that knows this has the pixels of a row or
    a column without copying all of them: TensorFlow took 155 µs for a bitmap of 256 × 341, and takes 27.
    https://netpbm.sourceforge.net/doc/ppm.html
    """
    height, width, _ = image.shape
    header = PPM_MAGIC + b"%6d%6d" % (width, height)
    header_bytes = 3 * width * ppm_header_rows(width)
    return header + _PPM_END.rjust(header_bytes - len(header)) + image.tobytes()


def ppm_header_rows(width: Any) -> Any:
    """Rows of pixels that the header of `ppm` takes, for a width in pixels; a number or a tensor."""
    return (PPM_HEIGHT.stop + len(_PPM_END) - 1) // (3 * width) + 1


def _finished(recipe: Recipe, out: Path) -> dict[str, dict[str, Any]]:
    """Entries of the shards that are there already, by file.

    Raises:
        ShardsError: the folder holds shards of another recipe.
    """
    if not (out / MANIFEST).exists():
        return {}
    manifest = _read_manifest(out)
    asked = _description(recipe)
    other = differences(manifest["recipe"], asked)
    if other:
        raise ShardsError(
            f"--out={out}: holds shards made with another {other}; choose another folder or remove this one"
        )
    return {
        entry["file"]: entry
        for entry in manifest["shards"]
        if (out / entry["file"]).is_file() and (out / entry["file"]).stat().st_size == entry["bytes"]
    }


def differences(there: dict[str, Any], asked: dict[str, Any]) -> str:
    """Names of the settings that differ, with the values that are there where these are short."""
    return ", ".join(
        f"{name} ({there[name]} there)" if isinstance(there.get(name), int | str) else name
        for name in asked
        if there.get(name) != asked[name]
    )


def _description(recipe: Recipe) -> dict[str, Any]:
    return {"kind": recipe.kind, **recipe.settings, "shards": len(recipe.files)}


def _read_manifest(out: Path) -> dict[str, Any]:
    path = out / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT or not {"recipe", "shards", "complete"} <= manifest.keys():
            raise ShardsError(f"{path} is no manifest of image shards of format {FORMAT}")
    except OSError as error:
        raise ShardsError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ShardsError(f"{path} is no manifest of image shards: {error!r}") from error
    return manifest


def _write_manifest(recipe: Recipe, out: Path, done: dict[str, dict[str, Any]]) -> None:
    content = {
        "format": FORMAT,
        "complete": len(done) == len(recipe.files),
        "recipe": _description(recipe),
        "records": sum(entry["records"] for entry in done.values()),
        "shards": [done[name] for name in recipe.files if name in done],
    }
    partial = out / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(out / MANIFEST)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
