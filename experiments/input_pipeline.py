"""What does each switch of tf.data bring when a model waits for JPEGs?

    python experiments/input_pipeline.py --per_replica_batch_size=256 --step_ms=34

Nothing is trained: a stand-in for the accelerator takes a batch and is busy for --step_ms (34 ms is a step of
ResNet-50 at batch 256 on an H200). The switches are turned on one after another and stay on: prefetch,
parallel map (a call on each core), AUTOTUNE instead of both numbers, cache of the decoded images (which
freezes their random crops, and must fit into memory). TensorFlow puts parallel maps and a prefetch into plain
pipelines by itself; that is off in these, lest it hide the switches, and the last line shows it alone.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from tfbench import study

ON_GPU = {"gpus": "1", "per_replica_batch_size": 256, "image_size": 224, "windows": 5}
ON_CPU = {"per_replica_batch_size": 8, "image_size": 96, "windows": 5}
HEADER = ("pipeline", "images/s", "to the first", "of the time waiting, %")
BATCHES = 4  # in a window
FIRST = "one image at a time"
WIDTH, HEIGHT = 500, 375  # pixels of a typical ImageNet photo

STEP_MS = flags.DEFINE_float("step_ms", 20.0, "Time that the accelerator takes for a batch.", lower_bound=0)
IMAGES = flags.DEFINE_integer("images", None, "JPEGs to make. Default: two batches.", lower_bound=1)


def write_jpegs(folder: Path, count: int) -> list[str]:
    """Made-up photos with smooth areas and grain, which compress as photos do (about 100 kB)."""
    import tensorflow as tf

    numbers, paths = np.random.default_rng(0), []
    for index in range(count):
        coarse = numbers.uniform(0, 255, (1, 12, 16, 3)).astype(np.float32)
        photo = tf.image.resize(coarse, (HEIGHT, WIDTH), "bicubic")[0]
        photo += numbers.normal(0, 12, photo.shape).astype(np.float32)
        paths.append(os.fspath(folder / f"{index}.jpg"))
        tf.io.write_file(paths[-1], tf.io.encode_jpeg(tf.cast(tf.clip_by_value(photo, 0, 255), tf.uint8)))
    return paths


def pipelines(paths: list[str], batch: int, size: int) -> dict[str, Any]:
    """Endless batches uint8 [batch, size, size, 3] with more and more switched on."""
    import tensorflow as tf

    def decoded(path: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, dct_method="INTEGER_FAST")
        return tf.cast(tf.image.resize(image, (size, size)), tf.uint8)

    def built(calls: int | None, prefetched: int, cached: bool = False, rewritten: bool = False) -> Any:
        images = tf.data.Dataset.from_tensor_slices(paths).map(decoded, num_parallel_calls=calls)
        images = (images.cache() if cached else images).repeat().batch(batch, drop_remainder=True)
        options = tf.data.Options()
        options.experimental_optimization.map_parallelization = rewritten
        options.experimental_optimization.inject_prefetch = rewritten
        return (images.prefetch(prefetched) if prefetched else images).with_options(options)

    cores, autotune = len(os.sched_getaffinity(0)), tf.data.AUTOTUNE
    return {
        FIRST: built(None, 0),
        "+ prefetch 2": built(None, 2),
        f"+ parallel map {cores}": built(cores, 2),
        "+ AUTOTUNE": built(autotune, autotune),
        "+ cache": built(autotune, autotune, cached=True),
        "none, TensorFlow's own rewrites": built(None, 0, rewritten=True),
    }


def main(argv: list[str]) -> int:
    """Time every pipeline before the same consumer."""
    experiment = study.Experiment("input_pipeline", ON_GPU, ON_CPU)
    batch, size, windows = (experiment.choices[name] for name in ON_CPU)
    experiment.open_devices()
    step_s, rates, lines = STEP_MS.value / 1e3, {}, []
    with tempfile.TemporaryDirectory() as folder:
        paths = write_jpegs(Path(folder), IMAGES.value or 2 * batch)
        for name, pipeline in pipelines(paths, batch, size).items():
            batches = iter(pipeline)
            for _ in range(len(paths) // batch + 1):
                next(batches)  # fills the cache; AUTOTUNE learns

            def step(batches: Any = batches) -> None:
                next(batches)
                time.sleep(step_s)

            batch_rate = study.timed(step, windows, calls=BATCHES)
            rates[name] = batch_rate.times(batch)
            ratio = rates[name].over(rates[FIRST])
            lines.append((name, rates[name], ratio, 100 * (1 - step_s * batch_rate.value)))
    figure, (axes,) = study.canvas(
        f"Input for steps of {STEP_MS.value:g} ms (dashed: never waiting)", bars=len(rates)
    )
    study.draw_bars(axes, "images/s", rates)
    if step_s:
        axes.axvline(batch / step_s, color="0.3", linestyle="--")
    best = max((name for name in rates if name.startswith("+")), key=lambda name: rates[name].value)
    ratio = study.spoken(rates[best].over(rates[FIRST]))
    return experiment.finish(
        HEADER, lines, f"With all up to '{best}' images come at {ratio} the first rate.", figure
    )


if __name__ == "__main__":
    study.start(main)
