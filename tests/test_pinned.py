"""Batches in pinned memory: the same ones, to their end, with their errors."""

from collections.abc import Callable

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from tfbench.pinned import in_pinned_memory


def numbered(count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).map(lambda number: {"number": tf.fill([3], number)})


def test_all_batches_come_once_and_in_order() -> None:
    pinned = in_pinned_memory(numbered(20), lambda batch: {"number": 2 * batch["number"]}, gpus=4)
    assert [batch["number"].tolist() for batch in pinned.as_numpy_iterator()] == [
        3 * [2 * number] for number in range(20)
    ]


def test_a_batch_that_cannot_be_made_says_why() -> None:
    def whole(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        with tf.control_dependencies(
            [tf.debugging.assert_less(batch["number"], tf.constant(2, tf.int64), "record 2 is torn")]
        ):
            return {"number": tf.identity(batch["number"])}

    batches = in_pinned_memory(numbered(4).map(whole), lambda batch: batch, gpus=1).as_numpy_iterator()
    assert [next(batches)["number"][0] for _ in range(2)] == [0, 1]
    with pytest.raises(tf.errors.InvalidArgumentError, match="record 2 is torn"):
        next(batches)


def unchanged(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return batch


def doubled(batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {"number": 2 * batch["number"]}


@pytest.mark.parametrize("prepare", [unchanged, doubled])
def test_map_and_batch_are_one_because_only_that_one_asks_for_pinned_memory(
    prepare: Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]],
) -> None:
    batches = numbered(2).apply(testing.assert_next(["MapAndBatch"]))
    assert len(list(in_pinned_memory(batches, prepare, gpus=1))) == 2
