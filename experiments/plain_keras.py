"""The training that a user of Keras would write, for `xla.py` to compare with; leaves a row as tfbench does.

    python experiments/plain_keras.py --model=resnet50 --gpus=1 --precision=mixed_float16 --noxla

The same net as tfbench's out of Keras' own layers (keras.applications has only ResNet v1, with biases), its
SGD without weight decay and LossScaleOptimizer, a custom step in a tf.function, on one batch that is already
on the device. Rows go into a runs.csv of their own folder.
"""

import datetime
import os
import shlex
from pathlib import Path
from typing import Any

import tfbench.flags
from tfbench import devices, outcome, precision, records, study
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.defaults import complete
from tfbench.hardware.gpus import this_machine
from tfbench.measure import statistics
from tfbench.measure.timing import WindowTimer
from tfbench.models import resnet

SHAPES = {"resnet50": resnet.RESNET50_SHAPE, "resnet_tiny": resnet.RESNET_TINY_SHAPE}


def build(shape: resnet.ResNetShape, size: int) -> Any:
    """ResNet v1.5 with Keras' layers; float32 logits."""
    from keras import Input, Model, layers

    def convolved(x: Any, filters: int, kernel: int, stride: int = 1) -> Any:
        x = layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    images = Input((size, size, 3))
    x = layers.ReLU()(convolved(images, shape.width, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, blocks in enumerate(shape.blocks):
        width = shape.width * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = layers.ReLU()(convolved(x, width, 1))
            y = layers.ReLU()(convolved(y, width, 3, stride))
            y = convolved(y, width * resnet.EXPANSION, 1)
            x = x if block else convolved(x, width * resnet.EXPANSION, 1, stride)
            x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return Model(images, layers.Dense(shape.num_classes, dtype="float32")(x))


def compiled_step(model: Any, config: BenchmarkConfig) -> Any:
    """(images, labels) → loss, after one update."""
    import keras
    import tensorflow as tf

    optimizer: Any = keras.optimizers.SGD(config.learning_rate, momentum=0.9)
    if config.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, [v.value for v in model.trainable_variables]))
        return loss

    return tf.function(step, jit_compile=config.xla)


def train(config: BenchmarkConfig, row: records.RunRecord) -> None:
    """Train, time, fill the row."""
    (device,) = devices.open_devices(config)
    precision.apply(config.precision)
    import tensorflow as tf

    with tf.device(device):
        model = build(SHAPES[config.model], config.image_size or 0)
        shape = (config.per_replica_batch_size, config.image_size, config.image_size, 3)
        images = tf.cast(tf.random.stateless_normal(shape, (0, 0)), model.compute_dtype)
        labels = tf.random.stateless_uniform(shape[:1], (0, 1), 0, SHAPES[config.model].num_classes, tf.int32)
        step = compiled_step(model, config)
        losses = [step(images, labels) for _ in range(config.warmup_steps)]
        devices.reset_peak_memory(config.gpus)
        timer = WindowTimer(devices.synchronize)
        for steps in config.steps_of_windows:
            with timer.window() as counted:
                losses += [step(images, labels) for _ in range(steps)]
                counted.add(steps, steps * config.global_batch_size)
            print(f"window {len(timer.windows)} of {config.windows}", flush=True)  # a sign of life
    row.num_params = sum(v.shape.num_elements() for v in model.trainable_variables)
    row.samples_per_sec = statistics.samples_per_sec(timer.windows)
    row.samples_per_sec_low, row.samples_per_sec_high = statistics.rate_interval(timer.windows) or (
        None,
        None,
    )
    row.step_time_ms_mean = statistics.step_time_ms(timer.windows).mean
    row.peak_memory_gib = devices.peak_memory_gib(config.gpus)
    row.loss_first, row.loss_last, row.status = float(losses[0]), float(losses[-1]), "ok"


def main(argv: list[str]) -> int:
    """One run, one row."""
    study.refuse_flags_of_runs()
    config, _ = complete(tfbench.flags.choices_from_flags(), this_machine())
    if config.model not in SHAPES or config.num_replicas > 1:
        raise ConfigError("model", config.model, f"one of {', '.join(SHAPES)}, on one GPU or the CPU")
    now = datetime.datetime.now(datetime.UTC)
    row = records.RunRecord(
        run_id=f"{now:%Y%m%d-%H%M%S}-plain_keras-{config.run_key[:6]}-{os.getpid()}",
        run_key=config.run_key,
        started_at=now.isoformat(timespec="milliseconds"),
        model=config.model,
        precision=config.precision,
        xla=config.xla,
        num_gpus=config.gpus,
        num_replicas=1,
        per_replica_batch_size=config.per_replica_batch_size,
        global_batch_size=config.global_batch_size,
        image_size=config.image_size,
        tag=config.tag,
        flags=shlex.join(tfbench.flags.to_flags(config)),
    )
    devices.set_environment(config)
    Path(config.results_dir).mkdir(parents=True, exist_ok=True)
    try:
        train(config, row)
    except BaseException as error:
        row.status, row.note = outcome.classify(error)
        raise
    finally:
        records.append(Path(config.results_dir) / "runs.csv", row)
    return 0


if __name__ == "__main__":
    study.start(main)
