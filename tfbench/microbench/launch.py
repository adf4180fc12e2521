"""What many small calls cost: one batched product against a loop of single ones, the beginner's mistake.

Imports TensorFlow when something is measured.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tfbench.microbench import timed
from tfbench.microbench.case import Case, Machine, Result

PRODUCTS = 256
SIDE = 64
SECONDS = 0.3


def cases(machine: Machine) -> Iterator[Case]:
    """The loop as Python runs it, and the same loop inside one `tf.function`."""
    for traced in (False, True):
        place = "tf.function" if traced else "Python"
        yield Case(
            benchmark="launch",
            name=f"{PRODUCTS} products of {SIDE}x{SIDE}: loop in {place} ÷ one batched call",
            precision="fp32",
            measure=partial(measure, machine, traced),
        )


def measure(machine: Machine, traced: bool) -> Result:
    """How many times longer the loop takes.

    Args:
        machine: on whose first device it runs.
        traced: the loop is unrolled in a `tf.function`; otherwise each product is a call from Python.
    """
    import tensorflow as tf

    with tf.device(machine.devices[0]):
        lefts, rights = (tf.random.stateless_normal((PRODUCTS, SIDE, SIDE), (seed, 9)) for seed in (1, 2))
        pairs = list(zip(tf.unstack(lefts), tf.unstack(rights), strict=True))

        def loop(pairs: Any) -> Any:
            return [tf.matmul(left, right) for left, right in pairs]

        single = tf.function(loop, autograph=False) if traced else loop
        batched = tf.function(tf.matmul, autograph=False)
        difference = np.abs(np.stack(single(pairs)) - batched(lefts, rights).numpy()).max()
        loop_windows = timed.time_calls(lambda: single(pairs), machine.seconds(SECONDS))
        batched_windows = timed.time_calls(lambda: batched(lefts, rights), machine.seconds(SECONDS))
    slow, fast = ([1 / rate for rate in timed.rates(each, 1)] for each in (loop_windows, batched_windows))
    # Pairs of windows in turn, as each window of one stands for any of the other.
    ratios = tuple(one / other for one, other in zip(slow, fast, strict=True))
    return Result(
        rates=ratios,
        unit="times",
        windows=(*loop_windows, *batched_windows),
        relative_error=float(difference / SIDE**0.5),
        bound=2.0**-6,  # TensorFlow may use TF32 on a GPU: 8 × 2⁻¹⁰, twice
        note=f"{1e6 * min(slow) / PRODUCTS:.3g} us a product in the loop",
    )
