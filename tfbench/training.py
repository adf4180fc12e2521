"""What trains, and how steps of it are run. TensorFlow-free: it only holds TensorFlow's objects."""

import dataclasses
from typing import Any

from tfbench.config import calls_of
from tfbench.data import Input


@dataclasses.dataclass(frozen=True)
class Training:
    """What a run has built."""

    strategy: Any  # tf.distribute.Strategy
    step: Any  # step.TrainStep
    source: Input
    loop: Any  # step.HostLoop over step and source


def run_steps(loop: Any, steps: int, steps_per_call: int) -> list[Any]:
    """Start `steps` updates in calls of `steps_per_call`; their totals, still on the device."""
    return [loop(count) for count in calls_of(steps, steps_per_call)]
