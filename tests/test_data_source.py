"""Batches of the replicas of a strategy, on logical CPU devices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import IMAGE_MODEL, TEXT_MODEL, config_of, make, stages_of
from step_helpers import strategy_of

from tfbench.data import open_input, synthetic_batch
from tfbench.data.source import for_devices
from tfbench.models import transit
from tfbench.models.spec import ModelSpec


def batches_of(strategy: tf.distribute.Strategy, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The batch of each replica."""
    parts = {name: strategy.experimental_local_results(value) for name, value in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def test_synthetic_is_resident_and_different_on_every_replica() -> None:
    strategy = strategy_of(2)
    config = config_of("synthetic", cpu_replicas=2, per_replica_batch_size=4, seed=10)
    source = open_input(config, IMAGE_MODEL, strategy)
    assert source.resident
    batches = batches_of(strategy, source.next())
    for replica, batch in enumerate(batches):
        assert batch["image"].device.endswith(f"CPU:{replica}")
        np.testing.assert_array_equal(
            batch["image"], synthetic_batch(config, IMAGE_MODEL, seed=10 + replica)["image"]
        )
    assert (batches[0]["image"].numpy() != batches[1]["image"].numpy()).any()
    assert batches_of(strategy, source.next())[1]["image"] is batches[1]["image"]


def test_synthetic_on_one_device() -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    batch = open_input(config_of("synthetic"), IMAGE_MODEL, strategy).next()
    assert batch["label"].device.endswith("CPU:1")


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_global_batch_is_the_replicas_batches_in_turn(num_replicas: int) -> None:
    strategy = strategy_of(num_replicas)
    config = config_of("digits", cpu_replicas=num_replicas, per_replica_batch_size=8 // num_replicas)
    source = open_input(config, IMAGE_MODEL, strategy)
    assert not source.resident
    whole = make(config_of("digits", per_replica_batch_size=8))
    for expected in whole.take(3).as_numpy_iterator():
        batches = batches_of(strategy, source.next())
        for name, value in expected.items():
            np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), value)


@pytest.mark.parametrize(
    ("data", "model"), [("synthetic", IMAGE_MODEL), ("digits", IMAGE_MODEL), ("pydoc", TEXT_MODEL)]
)
def test_integers_travel_as_what_tensorflow_keeps_on_a_gpu(data: str, model: ModelSpec) -> None:
    config = config_of(data, cpu_replicas=2, per_replica_batch_size=4)
    batches = batches_of(strategy_of(2), open_input(config, model, strategy_of(2)).next())
    expected = make(config, model).as_numpy_iterator().next()
    for name, value in expected.items():
        travelled = batches[0][name]
        assert travelled.dtype == (tf.int64 if value.dtype == np.int32 else value.dtype)
    for name, value in transit.arrived(batches[0]).items():
        assert value.dtype == expected[name].dtype
        np.testing.assert_array_equal(value, batches[0][name])


def test_batches_for_gpus_end_in_what_tensorflow_lays_into_pinned_memory(tmp_path: Path) -> None:
    config = config_of("digits", gpus=1, per_replica_batch_size=4)
    leaving = for_devices(make(config), config)
    stages = [stage for stage in stages_of(leaving, tmp_path) if stage != "Prefetch"]  # TensorFlow adds some
    assert stages[1:3] == ["MapAndBatch", "ParallelBatch"]
    expected = make(config)
    assert leaving.element_spec["image"] == expected.element_spec["image"]
    leaving = for_devices(make(config), config)
    for ours, whole in zip(
        leaving.take(3).as_numpy_iterator(), expected.take(3).as_numpy_iterator(), strict=True
    ):
        assert ours["label"].dtype == np.int64
        for name, value in whole.items():
            np.testing.assert_array_equal(ours[name], value)


@pytest.mark.parametrize("data", ["synthetic", "digits"])
def test_next_inside_a_compiled_loop(data: str) -> None:
    strategy = strategy_of(2)
    config = config_of(data, cpu_replicas=2, per_replica_batch_size=4)
    source = open_input(config, IMAGE_MODEL, strategy)

    def label_sum(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.reduce_sum(batch["label"])

    @tf.function
    def loop() -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for _ in tf.range(3):
            per_replica = strategy.run(label_sum, args=(source.next(),))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)
        return total

    other = open_input(config, IMAGE_MODEL, strategy)
    expected = [
        sum(int(label_sum(part)) for _ in range(3) for part in batches_of(strategy, other.next()))
        for _ in range(2)
    ]
    assert [int(loop()), int(loop())] == expected
