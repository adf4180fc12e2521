"""The step on 1, 2 and 4 replicas: against plain Keras, across replicas, and when a gradient overflows."""

import dataclasses
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_helpers import (
    IMAGE,
    NUM_CLASSES,
    TEXT,
    TOY,
    TOY_WITHOUT_NORM,
    Training,
    dtype_policy,
    image_batch,
    start,
    text_batch,
    times,
    toy_batch,
)
from tensorflow.python.eager import context  # public API has no other way to a function's parts

from tfbench import precision
from tfbench import step as step_module
from tfbench.config import BenchmarkConfig
from tfbench.journal import Observed
from tfbench.models.losses import IMAGE_MEAN, IMAGE_STANDARD_DEVIATION, PerExample
from tfbench.models.spec import Batch, ModelSpec
from tfbench.stages import look_at_state, measure
from tfbench.step import HostLoop, Totals

STEPS = 5
ROW = 4  # steps that are traced one after the other


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished training, and where it started."""

    initial: list[np.ndarray]
    losses: list[float]
    training: Training

    @property
    def weights(self) -> list[np.ndarray]:
        return self.training.weights()


def train(spec: ModelSpec, batches: list[Batch], num_replicas: int = 1, **choices: Any) -> Outcome:
    training = start(spec, batches, num_replicas, **choices)
    return Outcome(training.weights(), training.losses(STEPS), training)


def assert_same_weights(ours: Outcome, theirs: Outcome, atol: float = 1e-5) -> None:
    """`theirs` has moved, and `ours` to the same place."""
    for index, (weight, expected, before) in enumerate(
        zip(ours.weights, theirs.weights, theirs.initial, strict=True)
    ):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=atol, err_msg=str(index))
        assert np.abs(expected - before).max() > 10 * atol or not expected.any(), index


# A warm-up of two updates, then a cosine that reaches 0 at update 6 = one of warm-up and five measured.
SCHEDULED = {"lr_schedule": "cosine", "lr_warmup_steps": 2, "steps": 5, "learning_rate": 0.1}
RATES = [0.05, 0.1, 0.1, 0.1 * 0.853553391, 0.05]
TEXT_RUN = {"optimizer": "sgd", "weight_decay": 0.01} | SCHEDULED
TEXT_BATCHES = [text_batch(8, seed) for seed in range(STEPS)]
IMAGE_BATCHES = [image_batch(8, seed) for seed in range(STEPS)]
# Batch statistics are of a replica: alike on any number of them only where all get the same two samples.
ALIKE_BATCHES = [
    {name: np.concatenate([value] * 4) for name, value in image_batch(2, seed).items()}
    for seed in range(STEPS)
]
TOY_BATCHES = [toy_batch(8, seed) for seed in range(STEPS)]


@pytest.fixture(scope="module")
def texts() -> dict[int, Outcome]:
    """The same global batches on each number of replicas."""
    return {n: train(TEXT, TEXT_BATCHES, n, **TEXT_RUN) for n in (1, 2, 4)}


def test_a_schedule_ends_with_the_last_window_that_there_may_be() -> None:
    """One warm-up step, two windows of two and at most two more: the line reaches 0 at update 9."""
    line = {"lr_schedule": "linear", "target_interval_percent": 0.5, "windows": 2, "max_windows": 4}
    step = start(TOY_WITHOUT_NORM, TOY_BATCHES, steps=4, learning_rate=0.9, **line).step
    rates = []
    for iteration in (0, 5, 8, 9):
        step.iterations.assign(iteration)
        rates.append(float(step._hyperparameters().learning_rate))
    assert rates == pytest.approx([0.9, 0.4, 0.1, 0.0])


# Against an independent step.


def text_loss(model: Any, batch: Batch) -> Any:
    logits = model(batch, training=True)
    each = keras.losses.sparse_categorical_crossentropy(batch["masked_ids"], logits, from_logits=True)
    weight = batch["masked_weights"]
    return tf.reduce_mean(tf.reduce_sum(each * weight, 1) / tf.reduce_sum(weight, 1))


def image_loss(model: Any, batch: Batch) -> Any:
    """Of uint8 pixels, or of floats that are standardised already."""
    image = batch["image"]
    if image.dtype == np.uint8:
        image = ((image - np.array(IMAGE_MEAN)) / IMAGE_STANDARD_DEVIATION).astype("float32")
    smooth = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return smooth(tf.one_hot(batch["label"], NUM_CLASSES), model(image, training=True))


def train_with_keras(
    outcome: Outcome,
    batches: list[Batch],
    loss_of: Any,
    optimizer: Any,
    rates: list[float],
    l2: float = 0.0,
    loss_factor: float = 1.0,
) -> tuple[list[float], list[np.ndarray]]:
    """Losses and weights of plain steps on one device; `l2` is the decay that is part of the gradient."""
    model = outcome.training.step.spec.build(outcome.training.config)
    variables = model.trainable_variables
    for variable, value in zip(variables, outcome.initial, strict=True):
        variable.assign(value)
    optimizer.build(variables)
    losses = []
    for batch, rate in zip(batches, rates, strict=True):
        with tf.GradientTape() as tape:
            loss = loss_factor * loss_of(model, batch)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, [v.value for v in variables])]
        decayed = [g + l2 * v if len(v.shape) > 1 else g for g, v in zip(gradients, variables, strict=True)]
        optimizer.learning_rate = rate
        optimizer.apply(decayed)
        losses.append(float(loss))
    return losses, [variable.numpy() for variable in variables]


def assert_trained(outcome: Outcome, expected: tuple[list[float], list[np.ndarray]]) -> None:
    losses, weights = expected
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-5)
    for variable, ours, theirs in zip(
        outcome.training.step.model.trainable_variables, outcome.weights, weights, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=variable.path)


def test_text_steps_are_keras_steps(texts: dict[int, Outcome]) -> None:
    sgd = keras.optimizers.SGD(momentum=0.9)
    assert_trained(texts[1], train_with_keras(texts[1], TEXT_BATCHES, text_loss, sgd, RATES, l2=0.01))


def test_image_steps_are_keras_steps() -> None:
    outcome = train(IMAGE, IMAGE_BATCHES, weight_decay=0.01, **SCHEDULED)
    sgd = keras.optimizers.SGD(momentum=0.9)
    assert_trained(outcome, train_with_keras(outcome, IMAGE_BATCHES, image_loss, sgd, RATES, l2=0.01))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_adamw_steps_are_keras_steps(num_replicas: int) -> None:
    """The loss is 1e5 times as large, so that Keras' other place of epsilon makes no difference."""
    spec = times(1e5, TOY_WITHOUT_NORM)
    outcome = train(spec, TOY_BATCHES, num_replicas, optimizer="adamw", weight_decay=0.1, learning_rate=0.01)
    adamw = keras.optimizers.AdamW(weight_decay=0.1, epsilon=1e-6)
    adamw.exclude_from_weight_decay(var_names=["bias"])
    expected = train_with_keras(outcome, TOY_BATCHES, image_loss, adamw, [0.01] * STEPS, loss_factor=1e5)
    assert_trained(outcome, expected)


# Across replicas.


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_text_trains_alike_on_any_number_of_replicas(texts: dict[int, Outcome], num_replicas: int) -> None:
    assert_same_weights(texts[num_replicas], texts[1])
    np.testing.assert_allclose(texts[num_replicas].losses, texts[1].losses, rtol=1e-5)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_every_step_is_one_iteration(texts: dict[int, Outcome], num_replicas: int) -> None:
    assert texts[num_replicas].training.counts() == (STEPS, 0, 1.0)


@pytest.fixture(scope="module")
def images() -> dict[int, Outcome]:
    """The same global batches on each number of replicas."""
    return {n: train(IMAGE, ALIKE_BATCHES, n) for n in (1, 2, 4)}


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_images_train_alike_on_any_number_of_replicas(images: dict[int, Outcome], num_replicas: int) -> None:
    assert_same_weights(images[num_replicas], images[1])
    np.testing.assert_allclose(images[num_replicas].losses, images[1].losses, rtol=1e-5)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_totals_are_the_global_batchs(num_replicas: int) -> None:
    """Against NumPy, with weights that stay."""
    training = start(TOY_WITHOUT_NORM, TOY_BATCHES[:2], num_replicas, learning_rate=0.0)
    model = training.step.model
    logits = [model(batch["image"]).numpy() for batch in TOY_BATCHES[:2]]
    losses = [float(image_loss(model, batch)) for batch in TOY_BATCHES[:2]]
    right = [
        int((each.argmax(-1) == batch["label"]).sum())
        for each, batch in zip(logits, TOY_BATCHES[:2], strict=True)
    ]
    totals = training.loop(5)  # the batches a b a b a
    assert float(totals.loss_sum) == pytest.approx(3 * losses[0] + 2 * losses[1], rel=1e-5)
    assert float(totals.loss_last) == pytest.approx(losses[0], rel=1e-5)
    assert float(totals.correct) == 3 * right[0] + 2 * right[1]
    assert float(totals.predictions) == 5 * 8


def test_moving_statistics_read_outside_are_the_mean_over_replicas() -> None:
    batch = toy_batch(8)
    batch["image"][4:] += 5  # the second replica's
    training = start(TOY, [batch], 2)
    dense, norm = training.step.model.first, training.step.model.norm
    hidden = batch["image"].reshape(8, 48) @ dense.kernel.numpy() + dense.bias.numpy()
    training.loop(1)
    means = [0.1 * hidden[:4].mean(0), 0.1 * hidden[4:].mean(0)]
    variances = [0.9 + 0.1 * part.var(0, ddof=1) for part in (hidden[:4], hidden[4:])]
    for statistic, expected in ((norm.moving_mean, means), (norm.moving_variance, variances)):
        np.testing.assert_allclose(training.copies(statistic), expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(statistic), np.mean(expected, 0), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_accumulated_micro_batches_are_one_batch(num_replicas: int) -> None:
    options = {"optimizer": "adamw", "learning_rate": 0.01}
    whole = train(TOY_WITHOUT_NORM, TOY_BATCHES, num_replicas, **options)
    parts = train(TOY_WITHOUT_NORM, TOY_BATCHES, num_replicas, accumulate=2, **options)
    assert parts.training.config.per_replica_batch_size == 4 // num_replicas
    assert_same_weights(parts, whole)
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-5)
    assert parts.training.counts() == (STEPS, 0, 1.0)


# Dropout.


def reports_seed(model: Any, batch: Batch, training: bool, seed: Any) -> PerExample:
    """Reports a number drawn with the seed: as `correct` in the first micro-batch, else as `predictions`.

    The label of the one sample says which micro-batch it is.
    """
    drawn = tf.random.stateless_uniform([1], seed)
    first = tf.cast(batch["label"] == 0, tf.float32)
    loss = tf.reduce_sum(model(batch["image"], training=training), -1)
    return PerExample(loss, drawn * first, drawn * (1 - first))


def seeds_drawn(**choices: Any) -> list[float]:
    """Of 2 replicas × 2 micro-batches over 3 steps, the second of which is skipped."""
    batch = toy_batch(4)
    batch["label"][:] = [0, 1, 0, 1]
    bad = batch | {"image": np.full_like(batch["image"], np.inf)}
    spec = dataclasses.replace(TOY_WITHOUT_NORM, loss=reports_seed)
    training = start(spec, [batch, bad, batch], 2, accumulate=2, **choices)
    reports = [report for _ in range(3) for report in training.totals_of_replicas()]
    assert training.counts()[:2] == (2, 1)
    return [number for report in reports for number in (report.correct, report.predictions)]


def test_seeds_differ_between_replicas_micro_batches_steps_and_runs() -> None:
    drawn = seeds_drawn()
    assert len(set(drawn + seeds_drawn(seed=1))) == 24
    assert seeds_drawn() == drawn


def test_dropout_differs_between_replicas_and_steps() -> None:
    """Identical samples, weights that stay: only the masks differ."""
    sample = text_batch(1)
    batch = {name: np.concatenate([value] * 2) for name, value in sample.items()}
    training = start(TEXT, [batch], 2, dropout=0.5, learning_rate=0.0)
    losses = [report.loss_last for _ in range(2) for report in training.totals_of_replicas()]
    assert len(set(losses)) == 4


# Gradients that are not finite.

SCALED = {"precision": "mixed_float16", "initial_loss_scale": 1024.0}


def state_of(training: Training) -> list[np.ndarray]:
    """Every replica's copy of the weights and of the optimizer's slots."""
    slots = [slot for slots in training.step.slots for slot in slots]
    variables = [*training.step.model.trainable_variables, *slots]
    return [copy for variable in variables for copy in training.copies(variable)]


def with_infinity(batch: Batch, sample: int) -> Batch:
    image = batch["image"].copy()
    image[sample, 0, 0, 0] = np.inf
    return batch | {"image": image}


@pytest.mark.parametrize(("num_replicas", "bad_replica"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_infinity_on_one_replica_skips_the_step_on_all(num_replicas: int, bad_replica: int) -> None:
    good = toy_batch(8)
    bad = with_infinity(good, bad_replica * 8 // num_replicas)
    training = start(TOY, [good, bad, good], num_replicas, **SCALED)
    training.loop(1)
    before = state_of(training)
    training.loop(1)
    for copy, old in zip(state_of(training), before, strict=True):
        np.testing.assert_array_equal(copy, old)
    assert [int(n) for n in training.copies(training.step.skipped)] == [1] * num_replicas
    assert training.counts() == (1, 1, 512.0)
    training.loop(1)
    assert training.counts() == (2, 1, 512.0)
    assert all(np.isfinite(copy).all() for copy in state_of(training))
    assert len(training.weights()) == 6  # and every replica has the same
    assert np.abs(state_of(training)[0] - before[0]).max() > 1e-4


def test_infinity_in_float32_is_skipped_too() -> None:
    good = toy_batch(8)
    training = start(TOY, [good, with_infinity(good, 7)], 2)
    training.loop(4)
    assert training.counts() == (2, 2, 1.0)
    assert all(np.isfinite(copy).all() for copy in state_of(training))
    statistics = training.step.model.non_trainable_variables
    assert all(np.isfinite(copy).all() for variable in statistics for copy in training.copies(variable))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_overflow_from_a_large_scale_leaves_no_weight_without_a_number(seed: int) -> None:
    """Dense – batch norm – Dense on two replicas, where Keras' LossScaleOptimizer ends in NaN."""
    batches = [toy_batch(16, seed=10 * seed + index) for index in range(4)]
    training = start(
        TOY, batches, 2, precision="mixed_float16", initial_loss_scale=2.0**24, seed=seed, learning_rate=0.01
    )
    for step in range(1, 21):
        training.loop(1)
        assert all(np.isfinite(copy).all() for copy in state_of(training)), step
        iterations, skipped, scale = training.counts()
        assert iterations + skipped == step
        assert scale == 2.0 ** (24 - skipped)
    assert skipped > 0
    assert iterations > 5
    assert np.isfinite(training.step.fingerprints()).all()


def test_loss_scale_grows_after_finite_steps_and_stays_above_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "LOSS_SCALE_GROWTH_STEPS", 3)
    good = toy_batch(4)
    bad = with_infinity(good, 3)
    training = start(
        TOY_WITHOUT_NORM,
        [good] * 7 + [bad, good, good, bad, good, good, good] + [bad] * 5,
        precision="mixed_float16",
        initial_loss_scale=2.0,
        learning_rate=1e-3,
    )
    scales = []
    for _ in range(19):
        training.loop(1)
        scales.append(training.counts()[2])
    assert scales[:7] == [2, 2, 4, 4, 4, 8, 8]
    assert scales[7:14] == [4, 4, 4, 2, 2, 2, 4]  # a skipped step starts the count anew
    assert scales[14:] == [2, 1, 1, 1, 1]


# Precision.


@pytest.mark.parametrize("name", list(precision.PRECISIONS))
def test_apply_sets_policy_and_tensor_float_32(name: str) -> None:
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    try:
        with dtype_policy("float32"):
            precision.apply(name)
            assert keras.config.dtype_policy().name == ("float32" if name in ("fp32", "tf32") else name)
            assert tf.config.experimental.tensor_float_32_execution_enabled() == (name != "fp32")
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(tf32)


@pytest.mark.parametrize(
    ("spec", "batch", "rate"),
    [(IMAGE, image_batch(8), 0.05), (TEXT, text_batch(8), 0.03)],  # 0.1 jumps about, and magnifies rounding
    ids=["image", "text"],
)
def test_mixed_precision_follows_float32(spec: ModelSpec, batch: Batch, rate: float) -> None:
    """Over ten steps; float16 keeps 11 bits of a number, bfloat16 8."""
    # A scale without overflow: a skipped step would shift the curve.
    options = {"optimizer": "sgd", "learning_rate": rate, "initial_loss_scale": 1024.0}
    exact = start(spec, [batch], **options).losses(10)
    assert exact[-1] < 0.8 * exact[0]
    for name, rtol in (("mixed_float16", 0.005), ("mixed_bfloat16", 0.03)):
        training = start(spec, [batch], precision=name, **options)
        np.testing.assert_allclose(training.losses(10), exact, rtol=rtol, err_msg=name)
        assert training.counts()[:2] == (10, 0)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", "float32"), ("mixed_float16", "float16")])
def test_gradients_travel_in_the_compute_dtype_and_scaled(name: str, dtype: str) -> None:
    """The loss is twice the sum of the logits: the last bias has the gradient 2, times the scale 16."""

    def loss(model: Any, batch: Batch, training: bool, seed: Any) -> PerExample:
        logits = model(batch["image"], training=training)
        return PerExample(2 * tf.reduce_sum(logits, -1), logits[:, 0], logits[:, 0])

    spec = dataclasses.replace(TOY_WITHOUT_NORM, loss=loss)
    training = start(spec, TOY_BATCHES[:1], accumulate=2, precision=name)
    zero = Totals(*[tf.constant(0.0)] * 4)
    gradients = training.strategy.run(
        lambda batch: training.step.gradients(batch, tf.constant(16.0), zero)[1],
        args=(training.loop.next_batch(),),
    )
    (message,) = gradients
    assert message.dtype.name == dtype
    assert message.shape == [training.step.num_params]
    np.testing.assert_array_equal(message[-NUM_CLASSES:], np.full(NUM_CLASSES, 32.0))  # times the scale


@pytest.mark.parametrize(("least", "messages"), [(1, 4), (100, 3), (10**9, 1)])
def test_how_gradients_are_packed_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, least: int, messages: int
) -> None:
    expected = start(TOY_WITHOUT_NORM, TOY_BATCHES[:1], 2).losses(5)
    monkeypatch.setattr(step_module, "LARGE_GRADIENT_ELEMENTS", least)
    training = start(TOY_WITHOUT_NORM, TOY_BATCHES[:1], 2)
    assert training.losses(5) == expected
    gradients = [tf.zeros(variable.shape) for variable in training.step.model.trainable_variables]
    assert len(training.step._packed(gradients)) == messages


def test_gradients_that_underflow_survive_with_a_loss_scale() -> None:
    spec = times(1e-7, TOY_WITHOUT_NORM)
    options = {"learning_rate": 1e6, "weight_decay": 0.0}
    exact = train(spec, TOY_BATCHES, **options)
    scaled = train(spec, TOY_BATCHES, precision="mixed_float16", initial_loss_scale=2.0**15, **options)
    assert_same_weights(scaled, exact, atol=3e-3)
    lost = train(spec, TOY_BATCHES, precision="mixed_float16", initial_loss_scale=1.0, **options)
    for weight, before in zip(lost.weights, lost.initial, strict=True):
        np.testing.assert_array_equal(weight, before)


# The loop and what is compiled.


@pytest.mark.slow
def test_xla_changes_nothing_for_text(texts: dict[int, Outcome]) -> None:
    compiled = train(TEXT, TEXT_BATCHES, 2, xla=True, **TEXT_RUN)
    assert_same_weights(compiled, texts[2])
    np.testing.assert_allclose(compiled.losses, texts[2].losses, rtol=1e-5)


@pytest.mark.slow
def test_xla_changes_nothing_for_images(images: dict[int, Outcome]) -> None:
    compiled = train(IMAGE, ALIKE_BATCHES, 2, xla=True)
    assert_same_weights(compiled, images[2])
    np.testing.assert_allclose(compiled.losses, images[2].losses, rtol=1e-5)


def test_steps_per_loop_changes_nothing_and_nothing_is_traced_twice() -> None:
    single = train(TOY, TOY_BATCHES, 2)
    together = start(TOY, TOY_BATCHES, 2)
    totals = [together.loop(1)]
    traces = together.loop.num_traces
    totals.append(together.loop(4))
    assert [float(t.loss_last) for t in totals] == [single.losses[0], single.losses[4]]
    assert float(totals[1].loss_sum) == pytest.approx(sum(single.losses[1:]), rel=1e-6)
    for ours, theirs in zip(together.weights(), single.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert together.loop.num_traces == traces


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_calls_of_any_length_are_the_same_steps(num_replicas: int) -> None:
    """More than a row of steps, and what is left of it."""
    single, together = (start(TOY, TOY_BATCHES, num_replicas, steps_per_loop=each) for each in (1, ROW))
    losses = single.losses(ROW + 5)
    totals = [together.loop(2), together.loop(ROW + 3)]
    assert float(totals[0].loss_sum) == pytest.approx(sum(losses[:2]), rel=1e-6)  # a later call left it alone
    assert float(totals[1].loss_sum) == pytest.approx(sum(losses[2:]), rel=1e-6)
    assert together.counts()[0] == ROW + 5
    for ours, theirs in zip(together.weights(), single.weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_first_step_is_one_and_leaves_tracing_for_later(num_replicas: int) -> None:
    single, ours = (start(TOY, TOY_BATCHES, num_replicas, steps_per_loop=each) for each in (1, ROW))
    first = ours.loop.first_step()
    assert float(first.loss_sum) == float(first.loss_last) == single.losses(1)[0]
    traces = ours.loop.num_traces
    ours.loop.trace()
    rest = ours.loop.num_traces - traces
    assert rest == 1  # steps in a row
    ours.loop(ROW + 1)
    assert ours.loop.num_traces == traces + rest
    assert ours.counts()[0] == ROW + 2


def test_nothing_but_gradients_travels_between_replicas() -> None:
    """Whatever else did would make the host wait for the devices in every step."""
    training = start(TOY, TOY_BATCHES, 2, xla=True)
    batch = training.loop.next_batch()
    loop = HostLoop(training.strategy, training.step, lambda: batch, ROW)
    collector = context.context()
    collector.enable_graph_collection()
    try:
        loop(ROW)
        graphs = collector.export_run_metadata().function_graphs
    finally:
        collector.disable_graph_collection()
    parts = [part for graph in graphs for part in graph.partition_graphs]
    sent = [
        node.attr["tensor_name"].s.decode().split("_", 2)[2]  # after "edge", its number
        for part in parts
        for node in part.node
        if node.op.endswith("Send")
    ]
    # The toy's gradients are one message: to the first replica, and their sum back.
    assert sum(name.startswith("replica_1/") for name in sent) == ROW
    assert sum(name.startswith("AddN") for name in sent) == ROW
    assert len(sent) < 3 * ROW  # but for one, which brings the test's batch to where it is read


def test_totals_stay_on_their_replicas_until_they_are_read() -> None:
    training = start(TOY, TOY_BATCHES, 2)
    for total in training.loop(1):
        assert [part.device[-5:] for part in total._parts] == ["CPU:0", "CPU:1"]


def test_collectives_sum_each_message_on_its_own() -> None:
    """TensorFlow's way for sums in a program, here outside one: it would copy all messages into one first."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # without an algorithm: by its collectives
    messages = [tf.ones(size) for size in (3, 5, 7)]

    def replica() -> list[Any]:
        return step_module._all_reduce([message * 2 for message in messages])

    sums = tf.function(lambda: strategy.run(replica)).get_concrete_function()
    kinds = [node.type for node in sums.graph.get_operations()]
    assert kinds.count("CollectiveReduceV2") == 2 * len(messages)
    for found, message in zip(sums(), messages, strict=True):
        for local in strategy.experimental_local_results(found):
            np.testing.assert_array_equal(local, 4 * message)


def test_a_second_loop_over_the_same_step_compiles_nothing_again() -> None:
    training = start(TOY, TOY_BATCHES, 2)
    training.loop(1)
    before = dict(training.step._compiled)
    assert set(before) == {(name, replica) for name in ("gradients", "update") for replica in (0, 1)}
    other = HostLoop(training.strategy, training.step, training.loop.next_batch)
    other(2)
    traces = other.num_traces
    other(2)
    assert other.num_traces == traces
    assert training.step._compiled == before  # the same programs, and each traced once
    assert [program.experimental_get_tracing_count() for program in before.values()] == [1] * 4
    assert training.counts()[0] == 5


def test_programs_have_the_same_names_whatever_was_traced_before() -> None:
    """The names are part of the compile cache's keys."""

    def names_after(functions: int) -> list[list[int]]:
        training = start(TOY, TOY_BATCHES, 2)
        for _ in range(functions):
            tf.function(lambda: tf.constant(0)).get_concrete_function()
        training.loop(1)
        return [
            [
                int(concrete.name.decode().rpartition("_")[2]) - training.step._first_number
                for concrete in program._list_all_concrete_functions()
            ]
            for program in training.step._compiled.values()
        ]

    assert names_after(functions=0) == names_after(functions=20)


def test_parameters_are_counted_and_a_step_moves_every_fingerprint() -> None:
    training = start(TOY_WITHOUT_NORM, TOY_BATCHES, 2)
    assert training.step.num_params == 48 * 16 + 16 + 16 * 10 + 10
    before = training.step.fingerprints()
    np.testing.assert_allclose(before, [[np.abs(w).sum() for w in training.weights()]] * 2, rtol=1e-6)
    training.loop(1)
    assert (training.step.fingerprints() != before).all()
    bias = training.step.model.last.bias
    bias.assign([np.nan] + [0.0] * 9)
    assert np.isfinite(training.step.fingerprints()).tolist() == [[True, True, True, False]] * 2


def test_a_copy_of_a_weight_that_differs_is_noticed() -> None:
    training = start(TOY_WITHOUT_NORM, TOY_BATCHES, 2)
    observed = Observed(weights_before=training.step.fingerprints())
    training.loop(1)
    look_at_state(training, observed)
    assert observed.replicas_agree
    _, second = training.strategy.experimental_local_results(training.step.model.last.kernel.value)
    second.assign(second * 1.001)
    look_at_state(training, observed)
    assert not observed.replicas_agree


def test_a_window_without_predictions_has_no_accuracy() -> None:
    predictions = iter([4.0, 0.0])
    loop = mock.Mock(num_traces=0, side_effect=lambda _: Totals(2.0, 2.0, 0.0, next(predictions)))
    config = BenchmarkConfig(model="bert_tiny", steps=2, windows=2)
    observed = Observed()
    measure(config, mock.Mock(loop=loop), observed, mock.Mock(), mock.Mock())
    assert observed.accuracies == [0.0, None]


@pytest.mark.parametrize("place", ["outside", "update", "inside"])
def test_every_message_is_summed_once_wherever_it_is(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """One replica; a sum with an equal partner would double what plain SGD's first step does."""
    summed: list[int] = []

    def with_an_equal_partner(messages: list[Any]) -> list[Any]:
        summed.append(len(messages))
        return [2 * message for message in messages]

    monkeypatch.setattr(step_module, "LARGE_GRADIENT_ELEMENTS", 100)
    moved = []
    for all_reduce in (lambda messages: messages, with_an_equal_partner):
        monkeypatch.setattr(step_module, "_all_reduce", all_reduce)
        training = start(TOY_WITHOUT_NORM, TOY_BATCHES, optimizer="sgd")
        object.__setattr__(training.config, "collectives", place)  # which its own check grants to GPUs only
        before = training.weights()
        training.loop(1)
        moved.append([new - old for new, old in zip(training.weights(), before, strict=True)])
    assert summed == [3]  # two matrices, and the biases in one
    for alone, doubled in zip(*moved, strict=True):
        assert np.abs(alone).max() > 0
        np.testing.assert_allclose(doubled, 2 * alone, rtol=1e-3, atol=1e-7)
