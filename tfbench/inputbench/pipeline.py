"""The input of a run as its replicas get it, and its pipeline cut after each stage. Imports TensorFlow."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfbench import devices
from tfbench.config import BenchmarkConfig
from tfbench.data import InputLog, Shard, parse, service, source
from tfbench.inputbench.cuts import cuts
from tfbench.inputbench.drain import Drained, Plan, drain
from tfbench.models import MODELS

# Samples of a stage for each call from Python, which costs about 50 µs.
SAMPLES_PER_CALL = 64
# A call that takes steps of the whole input costs about 1 ms, so one that is shorter gets more steps.
SHORT_CALL_S = 0.05


class Pipeline:
    """The data set of a run, made once: text is tokenised when it is made.

    Args:
        config: names the data.
        log: takes what the pipeline has to say.
    """

    def __init__(self, config: BenchmarkConfig, log: InputLog):
        self.config = config
        dataset_spec, _ = parse(config.data)
        shard = Shard(0, 1, log)
        self._dataset = service.computed(
            dataset_spec.make(config, MODELS[config.model], shard), config, shard
        )

    @property
    def bytes_per_sample(self) -> float:
        """Of the tensors that the model takes."""
        sizes = (
            spec.dtype.size * np.prod(spec.shape.as_list())
            for spec in tf.nest.flatten(self._dataset.element_spec)
        )
        return float(sum(sizes)) / self.config.samples_per_replica_per_step

    def whole(self, strategy: tf.distribute.Strategy, plan: Plan) -> Drained:
        """Batches of every replica in its device's memory, as `tfbench.data.open_input` gives them."""
        batches = source.in_turn(strategy, lambda _: source.for_devices(self._dataset, self.config))
        steps = 1

        def in_a_loop(count: tf.Tensor) -> None:
            for _ in tf.range(count):
                next(batches)

        take_steps = tf.function(in_a_loop)

        def take() -> int:
            nonlocal steps
            start_s, taken = time.monotonic(), steps
            take_steps(tf.constant(taken))
            if time.monotonic() - start_s < SHORT_CALL_S:
                steps *= 2
            return taken * self.config.global_batch_size

        return drain(take, plan, devices.synchronize)

    def stages(self, plan: Plan) -> Iterator[tuple[str, Drained]]:
        """Name and figures of each stage with all before it, on the host."""
        for cut in cuts(self._dataset, self.config.samples_per_replica_per_step):
            dataset = cut.dataset.with_options(self._dataset.options())
            yield cut.name, drain(taker(dataset, cut.samples_per_element), plan)


def taker(dataset: tf.data.Dataset, samples_per_element: int) -> Callable[[], int]:
    """A function that takes some elements of a data set, on the host, and returns the number of samples."""
    elements = -(-SAMPLES_PER_CALL // samples_per_element)
    # A shard of one in `elements` takes all of them, and passes one on to Python.
    iterator: Any = iter(dataset.repeat().shard(elements, elements - 1))

    def take() -> int:
        next(iterator)
        return elements * samples_per_element

    return take
