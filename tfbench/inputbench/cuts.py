"""A tf.data pipeline cut after each of its stages.

Needs no help from the pipeline: TensorFlow's data sets know their inputs. That this is no public interface
shows in the leading underscores; what cannot be followed is not cut. TensorFlow-free: it only looks at
TensorFlow's objects.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

# Data sets that give single elements of what they get, by the names of TensorFlow's classes.
_SINGLE = frozenset(
    {"_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset", "_UnbatchDataset"}
)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A pipeline up to one stage, this one included."""

    name: str
    dataset: Any  # tf.data.Dataset
    samples_per_element: int


def cuts(dataset: Any, batch_size: int) -> list[Cut]:
    """Cuts a pipeline after each stage that works in parallel, from its source on, and after its batching.

    What works in one thread is cheap and counts with the next stage: shuffling, repeating, numbering.

    Args:
        dataset: tf.data.Dataset of batches.
        batch_size: samples of one batch.

    Returns:
        The cuts; none where the samples of the elements do not add up to batches, so that the pipeline is of
        a kind that cannot be followed.
    """
    found: list[Cut] = []
    samples = 1
    stages = list(_upstream(dataset))
    last_batch = next((stage for stage in stages if hasattr(stage, "_batch_size")), None)
    for stage in reversed(stages):
        if hasattr(stage, "_batch_size"):
            samples *= int(stage._batch_size)
        elif type(stage).__name__ in _SINGLE:
            samples = 1
        if stage is last_batch or getattr(stage, "_num_parallel_calls", None) is not None:
            found.append(Cut(_name(stage), stage, samples))
    return found if samples == batch_size else []


def _upstream(dataset: Any) -> Iterator[Any]:
    """The data set and what it takes its elements from, as far as this is one other.

    Bare sources do not count: they are no stage, and `enumerate` has one for the numbers.
    """
    yield dataset
    while len(inputs := [each for each in dataset._inputs() if each._inputs()]) == 1:
        dataset = inputs[0]
        yield dataset


def _name(stage: Any) -> str:
    """What the stage calls for each element, such as "read and mask"."""
    functions = stage._functions()
    if not functions:
        return "batch"
    function = functions[0]._func
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)  # an object may be called too
    return str(name).strip("_").replace("_", " ")
