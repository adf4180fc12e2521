"""The updates against Keras' optimizers and the published formulas in float64; learning-rate schedules."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfbench.optimizers import OPTIMIZERS, Hyperparameters, learning_rate_at

STEPS, DECAY = 10, 0.05
RATE = 2.0**-7  # exact in float32, in which Keras keeps it
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-6
SHAPE = (5, 3)

Trajectory = list[np.ndarray]


def gradients_of(scale: float) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [scale * rng.standard_normal(SHAPE) for _ in range(STEPS)]


def initial() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SHAPE)


def ours(name: str, gradients: list[np.ndarray], decay: float, dtype: str = "float64") -> Trajectory:
    """The variable after each update."""
    optimizer = OPTIMIZERS[name]
    variable = tf.constant(initial(), dtype)
    slots: Any = (tf.zeros(SHAPE, dtype),) * optimizer.num_slots
    trajectory = []
    for index, gradient in enumerate(gradients):
        hyper = Hyperparameters(tf.constant(index + 1.0, dtype), tf.constant(RATE, dtype), decay)
        variable, slots = optimizer.update(variable, tf.constant(gradient, dtype), slots, hyper)
        trajectory.append(variable.numpy())
    return trajectory


def with_keras(optimizer: Any, gradient_of: Callable[[Any, np.ndarray], Any], gradients: Any) -> Trajectory:
    """The same with a Keras optimizer, fed with `gradient_of(variable, gradient)`.

    Right to 1e-7 only: Keras keeps the momentum and the betas in float32.
    """
    variable = keras.Variable(initial(), dtype="float64")
    optimizer.build([variable])
    trajectory = []
    for gradient in gradients:
        optimizer.apply([gradient_of(variable.value, gradient)])
        trajectory.append(variable.numpy())
    return trajectory


def published(gradients: list[np.ndarray], decay: float, layerwise: bool) -> Trajectory:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2); LAMB (You et al. 2020, algorithm 2) if layerwise."""
    x, first, second = initial(), np.zeros(SHAPE), np.zeros(SHAPE)
    trajectory = []
    for t, g in enumerate(gradients, start=1):
        first += (1 - BETA_1) * (g - first)
        second += (1 - BETA_2) * (g**2 - second)
        ratio = (first / (1 - BETA_1**t)) / (np.sqrt(second / (1 - BETA_2**t)) + EPSILON)
        direction = ratio + decay * x
        trust = np.linalg.norm(x) / np.linalg.norm(direction) if layerwise else 1.0
        x = x - RATE * trust * direction
        trajectory.append(x)
    return trajectory


def plain(_: Any, gradient: np.ndarray) -> Any:
    return tf.constant(gradient)


@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-7), ("float32", 1e-6)])
def test_sgd_is_keras_momentum_on_the_gradient_with_decay(dtype: str, atol: float) -> None:
    gradients = gradients_of(1.0)
    expected = with_keras(
        keras.optimizers.SGD(RATE, momentum=0.9),
        lambda variable, gradient: gradient + DECAY * variable,
        gradients,
    )
    np.testing.assert_allclose(ours("sgd", gradients, DECAY, dtype), expected, rtol=0, atol=atol)


# Keras adds epsilon before the bias correction: with gradients of 1000 it does not matter where.
@pytest.mark.parametrize(
    ("name", "make", "decay"),
    [("adamw", keras.optimizers.AdamW, DECAY), ("lamb", keras.optimizers.Lamb, 0.0)],
)
def test_adaptive_updates_are_keras(name: str, make: Any, decay: float) -> None:
    gradients = gradients_of(1000.0)
    optimizer = make(RATE, beta_1=BETA_1, beta_2=BETA_2, epsilon=EPSILON, weight_decay=decay or None)
    expected = with_keras(optimizer, plain, gradients)
    np.testing.assert_allclose(ours(name, gradients, decay), expected, rtol=0, atol=1e-6)


# Gradients of epsilon's own size: here it matters where epsilon is added.
@pytest.mark.parametrize("scale", [1.0, 1e-6])
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize(("name", "layerwise"), [("adamw", False), ("lamb", True)])
def test_adaptive_updates_are_the_published_ones(
    name: str, layerwise: bool, decay: float, scale: float
) -> None:
    gradients = gradients_of(scale)
    np.testing.assert_allclose(
        ours(name, gradients, decay), published(gradients, decay, layerwise), rtol=1e-11
    )


def test_lamb_moves_a_variable_of_zeros_and_stays_where_nothing_pulls() -> None:
    """A trust ratio of 0 / 0 or 0 / x would keep it there or make it NaN."""
    lamb = OPTIMIZERS["lamb"].update
    hyper = Hyperparameters(tf.constant(1.0), tf.constant(0.5), 0.0)
    zeros, ones = tf.zeros(4), tf.ones(4)
    moved, _ = lamb(zeros, ones, (zeros, zeros), hyper)
    np.testing.assert_allclose(moved, -0.5, rtol=1e-5)  # the first direction is the gradient's sign
    kept, _ = lamb(ones, zeros, (zeros, zeros), hyper)
    np.testing.assert_array_equal(kept, ones)


@pytest.mark.parametrize(
    ("schedule", "warmup", "total", "expected"),
    [
        ("constant", 0, 4, [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("constant", 4, 9, [0.5, 1.0, 1.5, 2.0, 2.0]),
        ("linear", 0, 4, [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        ("linear", 2, 4, [1.0, 2.0, 2.0, 1.0, 0.0, 0.0]),
        ("cosine", 0, 4, [2.0, 1.70710678, 1.0, 0.29289322, 0.0, 0.0]),
        ("cosine", 2, 6, [1.0, 2.0, 2.0, 1.70710678, 1.0, 0.29289322, 0.0]),
        ("linear", 3, 3, [0.66666667, 1.33333333, 2.0, 2.0, 0.0]),  # the warm-up is the whole run
    ],
)
def test_learning_rates(schedule: str, warmup: int, total: int, expected: list[float]) -> None:
    iterations = [tf.constant(index, tf.int64) for index in range(len(expected))]
    rates = [float(learning_rate_at(iteration, 2.0, schedule, warmup, total)) for iteration in iterations]
    np.testing.assert_allclose(rates, expected, atol=1e-7)
