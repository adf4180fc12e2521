"""Optimizer updates as plain functions of tensors, so that they compile into the step of every replica.

Keras' optimizers all-reduce inside `apply`, read the loss scale of replica 0 only and make dozens of
unfused operations for each variable. These make the same updates (tests compare them with Keras'); the
caller reduces first and decides whether to keep the result. Known without TensorFlow.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

MOMENTUM = 0.9  # ResNet's published recipes
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-6  # BERT's published recipe


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Values of one update: float32 scalars, `step` the number of this update from 1."""

    step: Any
    learning_rate: Any
    weight_decay: float


Update = Callable[[Any, Any, tuple[Any, ...], Hyperparameters], tuple[Any, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer: slots it keeps for a variable; (variable, gradient, slots, …) → new ones."""

    num_slots: int
    update: Update


def _sgd(variable: Any, gradient: Any, slots: tuple[Any, ...], hyper: Hyperparameters) -> Any:
    """Momentum; the decay is part of the gradient (L2), as in ResNet's recipes."""
    (velocity,) = slots
    gradient = gradient + hyper.weight_decay * variable
    velocity = MOMENTUM * velocity - hyper.learning_rate * gradient
    return variable + velocity, (velocity,)


def _moments(gradient: Any, slots: tuple[Any, ...]) -> tuple[Any, Any]:
    """Running means of the gradient and of its square."""
    first, second = slots
    return BETA_1 * first + (1 - BETA_1) * gradient, BETA_2 * second + (1 - BETA_2) * gradient * gradient


def _adam_direction(first: Any, second: Any, step: Any) -> Any:
    """Bias-corrected first moment over the root of the bias-corrected second."""
    corrected = first / (1 - BETA_1**step)
    return corrected / ((second / (1 - BETA_2**step)) ** 0.5 + EPSILON)


def _adamw(variable: Any, gradient: Any, slots: tuple[Any, ...], hyper: Hyperparameters) -> Any:
    """Adam with decoupled decay."""
    first, second = _moments(gradient, slots)
    direction = _adam_direction(first, second, hyper.step) + hyper.weight_decay * variable
    return variable - hyper.learning_rate * direction, (first, second)


def _lamb(variable: Any, gradient: Any, slots: tuple[Any, ...], hyper: Hyperparameters) -> Any:
    """AdamW's direction, scaled for each variable to the length of the variable."""
    import tensorflow as tf

    first, second = _moments(gradient, slots)
    direction = _adam_direction(first, second, hyper.step) + hyper.weight_decay * variable
    length, step_length = tf.norm(variable), tf.norm(direction)
    trust = tf.where((length > 0) & (step_length > 0), tf.math.divide_no_nan(length, step_length), 1.0)
    return variable - hyper.learning_rate * trust * direction, (first, second)


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "sgd": OptimizerSpec(1, _sgd),
    "adamw": OptimizerSpec(2, _adamw),
    "lamb": OptimizerSpec(2, _lamb),
}


def learning_rate_at(iteration: Any, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> Any:
    """Learning rate of the update after `iteration` updates, float32 scalar.

    Linear from peak / warmup_steps to peak over the warm-up, then as `schedule` says: constant, or
    cosine or linear down to 0 at total_steps.
    """
    import math

    import tensorflow as tf

    done = tf.cast(iteration, tf.float32)
    warming = tf.minimum((done + 1) / max(warmup_steps, 1), 1.0)
    share = tf.clip_by_value((done - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
    decay = {
        "constant": lambda: 1.0,
        "cosine": lambda: 0.5 * (1 + tf.cos(math.pi * share)),
        "linear": lambda: 1 - share,
    }[schedule]()
    return peak * warming * decay
