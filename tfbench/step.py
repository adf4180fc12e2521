"""The compiled train step of a replica, and the loop that runs many of them without the host.

Outside: `strategy.run`. Inside, on each replica: one compiled program for forward and backward pass, the
all-reduce, and one compiled program for the finite check and the update; or, by choice, all of it in one.
Compiling around `strategy.run` instead fails with two replicas ("access resource … located in device").
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops  # public API has no other way to TensorFlow's numbers

from tfbench.config import BenchmarkConfig, rows_of
from tfbench.models.spec import Batch, ModelSpec
from tfbench.models.transit import arrived
from tfbench.optimizers import OPTIMIZERS, Hyperparameters, learning_rate_at
from tfbench.precision import PRECISIONS

LOSS_SCALE_GROWTH_STEPS = 2000  # finite steps before the scale doubles: Keras' and NVIDIA's usual value
LARGE_GRADIENT_ELEMENTS = 2**20  # BERT-large's matrices are, of ResNet-50's layers the last
# For the functions that are traced before a program and inside it; to count over them takes 20 ms.
NUMBERS_OF_A_PROGRAM = 100_000


class Totals(NamedTuple):
    """Sums over the steps of a loop, float32 scalars; summed over replicas they are the global batch's."""

    loss_sum: Any  # of the steps' mean losses
    loss_last: Any  # mean loss of the last step
    correct: Any  # right predictions
    predictions: Any  # predictions made


class TrainStep:
    """State and program of one optimizer update. Construct it, like the model, in the strategy's scope.

    The loss is the per-example sum ÷ the global batch, so that summing gradients over replicas gives the
    same update on any number of them.
    """

    def __init__(self, model: keras.Model, spec: ModelSpec, config: BenchmarkConfig):
        self.model, self.spec, self.config = model, spec, config
        self.optimizer = OPTIMIZERS[config.optimizer]
        self.scales_loss = PRECISIONS[config.precision].scales_loss
        self.slots = [
            [_state(tf.zeros(variable.shape, variable.dtype)) for _ in range(self.optimizer.num_slots)]
            for variable in model.trainable_variables
        ]
        self.iterations = _count()  # updates made
        self.skipped = _count()  # updates dropped because a gradient was not finite
        self.loss_scale = _state(config.initial_loss_scale if self.scales_loss else 1.0)
        self.finite_streak = _count()  # finite steps since the scale last changed
        # Traced once for all variables of a shape; XLA sees each written out.
        self._updated = tf.function(self._new_state, autograph=False)
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}
        self._first_number = ops.uid()
        self._strategy = tf.distribute.get_strategy()

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Batch, totals: Totals, reduce: bool = True) -> Totals:
        """Make one update from this replica's samples; call it through `strategy.run`.

        Args:
            batch: samples_per_replica_per_step samples; see ModelSpec.
            totals: of the steps before.
            reduce: False leaves the all-reduce out, to measure what it costs; replicas then part ways.

        Returns:
            totals with this step added.
        """
        if self.config.collectives == "inside":
            return self._program("whole", self._whole)(batch, totals)
        scale = tf.identity(self.loss_scale)
        totals, gradients = self._program("gradients", self.gradients)(batch, scale, totals)
        if self.config.collectives == "update" and reduce:
            self._program("reduced update", self._reduced_update)(gradients, scale)
            return totals
        gradients = _all_reduce(gradients) if reduce else gradients
        self._program("update", self.update)(gradients, scale)
        return totals

    def _reduced_update(self, messages: list[Any], scale: Any) -> None:
        """All-reduce and update as one program: the host need not wait for the sums to start the update."""
        self.update(_all_reduce(messages), scale)

    def _whole(self, batch: Batch, totals: Totals) -> Totals:
        """The step as one program."""
        scale = tf.identity(self.loss_scale)
        totals, gradients = self.gradients(batch, scale, totals)
        self.update(_all_reduce(gradients), scale)
        return totals

    @property
    def num_params(self) -> int:
        """Trainable parameters."""
        return sum(variable.shape.num_elements() for variable in self.model.trainable_variables)

    def fingerprints(self) -> np.ndarray:
        """Sum of absolute values of each trainable variable on each replica, float64 [replicas, variables].

        It moves with any update, is not finite where a weight is not, and is the same on every replica.
        """
        sums = []
        for variable in self.model.trainable_variables:
            for copy in self._strategy.experimental_local_results(variable.value):
                with tf.device(copy.device):
                    sums.append(tf.reduce_sum(tf.abs(copy)))
        return np.array([float(value) for value in sums]).reshape(len(self.model.trainable_variables), -1).T

    def gradients(self, batch: Batch, scale: Any, totals: Totals) -> tuple[Totals, list[Any]]:
        """Forward and backward pass of every micro-batch.

        Returns:
            totals; the packed gradients, times the loss scale. They are summed in float32 here and travel
            in the compute dtype, half the bytes under mixed precision.
        """
        micro_batches = _split(arrived(batch), self.config.accumulate)
        summed: list[Any] = []
        totals = totals._replace(loss_last=tf.zeros_like(totals.loss_last))
        for index, micro_batch in enumerate(micro_batches):
            totals, gradients = self._forward_backward(micro_batch, scale, self._seed(index), totals)
            summed = [a + b for a, b in zip(summed, gradients, strict=True)] if summed else gradients
        return totals, self._packed([tf.cast(gradient, self.model.compute_dtype) for gradient in summed])

    def _packed(self, gradients: list[Any]) -> list[Any]:
        """Large gradients as they are, then all small ones in one vector: the messages to other replicas.

        ResNet-50's update was 376 kernels, a quarter of a step's, with each gradient on its own and 31 with
        all in one vector; but to pack BERT-large's large matrices too cost 5 ms of 91 on an H200.
        """
        small = [tf.reshape(gradient, [-1]) for gradient in gradients if not _is_large(gradient)]
        return [*filter(_is_large, gradients), *([tf.concat(small, 0)] if small else [])]

    def _unpacked(self, messages: list[Any]) -> list[Any]:
        """The gradient of each variable."""
        shapes = [variable.shape for variable in self.model.trainable_variables]
        sizes = [shape.num_elements() for shape in shapes if not _is_large(shape)]
        small = iter(tf.split(messages[-1], sizes) if sizes else [])
        large = iter(messages)
        return [next(large) if _is_large(shape) else tf.reshape(next(small), shape) for shape in shapes]

    def _forward_backward(self, batch: Batch, scale: Any, seed: Any, totals: Totals) -> Any:
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            each = self.spec.loss(self.model, batch, training=True, seed=seed)
            loss = tf.reduce_sum(each.loss) / self.config.global_batch_size
            scaled = loss * tf.cast(scale, loss.dtype)
        gradients = tape.gradient(scaled, [variable.value for variable in variables])
        unused = [v.path for v, gradient in zip(variables, gradients, strict=True) if gradient is None]
        assert not unused, f"the loss does not depend on {unused}"
        loss = tf.cast(loss, tf.float32)
        totals = Totals(
            totals.loss_sum + loss,
            totals.loss_last + loss,
            totals.correct + tf.reduce_sum(each.correct),
            totals.predictions + tf.reduce_sum(each.predictions),
        )
        return totals, [tf.convert_to_tensor(gradient) for gradient in gradients]

    def update(self, messages: list[Any], scale: Any) -> None:
        """Apply summed, packed gradients, or skip them all when one is not finite anywhere.

        Runs after the all-reduce on the same sums everywhere, so every replica decides alike: a
        not-finite gradient of any one replica is not finite in the sum.
        """
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(message)) for message in messages])
        hyper = self._hyperparameters()
        for variable, slots, gradient in zip(
            self.model.trainable_variables, self.slots, self._unpacked(messages), strict=True
        ):
            decay = hyper.weight_decay if variable.shape.rank > 1 else 0.0  # not on norms and biases
            states = [variable.value, *slots]
            old = [tf.convert_to_tensor(state) for state in states]
            new = self._updated(old, gradient, finite, scale, hyper.step, hyper.learning_rate, decay)
            for state, value in zip(states, new, strict=True):
                state.assign(value)
        self.iterations.assign_add(tf.cast(finite, tf.int64))
        self.skipped.assign_add(tf.cast(~finite, tf.int64))
        if self.scales_loss:
            self._adapt_loss_scale(finite, scale)

    def _new_state(
        self, old: list[Any], gradient: Any, finite: Any, scale: Any, step: Any, rate: Any, decay: float
    ) -> list[Any]:
        """What replaces a variable and its slots, `old`; themselves where `finite` is false."""
        variable, *slots = old
        dtype = variable.dtype
        gradient = tf.cast(gradient, dtype) / tf.cast(scale, dtype)
        own = Hyperparameters(tf.cast(step, dtype), tf.cast(rate, dtype), decay)
        new, new_slots = self.optimizer.update(variable, gradient, tuple(slots), own)
        return [tf.where(finite, *pair) for pair in zip([new, *new_slots], old, strict=True)]

    def _hyperparameters(self) -> Hyperparameters:
        config = self.config
        rate = learning_rate_at(
            self.iterations,
            config.learning_rate,
            config.lr_schedule,
            config.lr_warmup_steps,
            config.lr_total_steps or config.most_steps,
        )
        return Hyperparameters(tf.cast(self.iterations + 1, tf.float32), rate, config.weight_decay)

    def _adapt_loss_scale(self, finite: Any, scale: Any) -> None:
        """Halve after a skipped step, double after LOSS_SCALE_GROWTH_STEPS finite ones."""
        zero = tf.zeros((), tf.int64)
        streak = tf.where(finite, self.finite_streak + 1, zero)
        grow = streak >= LOSS_SCALE_GROWTH_STEPS
        kept = tf.where(grow, scale * 2, scale)
        self.loss_scale.assign(tf.where(finite, kept, tf.maximum(scale / 2, 1.0)))
        self.finite_streak.assign(tf.where(grow, zero, streak))

    def _seed(self, micro_batch: int) -> Any:
        """Seed of this replica's dropout in this step, int32 [2]: no two masks of a run are alike."""
        fold_in = tf.random.experimental.stateless_fold_in
        seed = fold_in(tf.constant([self.config.seed, 0]), self.iterations + self.skipped)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return fold_in(fold_in(seed, replica), micro_batch)

    def _program(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` compiled for the replica that asks: each has its own variables in its program.

        Kept, so that a second loop over the same step compiles nothing again.
        """
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        key = (name, int(tf.get_static_value(replica_id)))
        if key not in self._compiled:
            _go_on_to_number(self._first_number + (len(self._compiled) + 1) * NUMBERS_OF_A_PROGRAM)
            self._compiled[key] = tf.function(function, jit_compile=self.config.xla, autograph=False)
        return self._compiled[key]


class HostLoop:
    """Runs many steps in one call, with no host read between them.

    The host is to hand out steps ahead of the devices, so nothing may travel between devices but gradients:
    it would wait for each such message until the devices have done all that they were given. The totals are
    variables, each replica's on its own device, and read there. Steps are traced one after the other, in
    rows: a loop's condition would live on one device and be told to the others at every turn, and a single
    GPU in a loop was slower than each of two in rows.

    Args:
        step: (batch, totals) → totals on each replica: a TrainStep built in `strategy`'s scope.
        next_batch: gives the next per-replica batch, inside the compiled loop.
        steps_per_call: what most calls ask for. Rows of so many steps are traced, but of LONGEST_ROW at most;
            what is left of a call is made one by one.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: Callable[..., Totals],
        next_batch: Callable[[], Any],
        steps_per_call: int = 1,
    ):
        self.strategy, self.step, self.next_batch = strategy, step, next_batch
        self.steps_per_call = steps_per_call
        with strategy.scope():
            self._totals = Totals(*[_state(0.0) for _ in Totals._fields])
        self._start = tf.function(self._zero_totals, autograph=False)
        self._row = tf.function(self._run_in_a_row, autograph=False)
        self._untraced = {*rows_of(steps_per_call, steps_per_call), 1}

    def __call__(self, num_steps: int) -> Totals:
        """Start `num_steps` updates.

        Returns:
            Their totals over all replicas, still on the devices: `float()` waits for one and reads it.
        """
        self.trace()
        return self._started(num_steps)

    def first_step(self) -> Totals:
        """As a call for one update, but nothing is traced that it does not need: `trace` does the rest."""
        return self._started(1)

    def trace(self) -> None:
        """Trace what any call needs, lest it be done in a timed one."""
        while self._untraced:
            self._row.get_concrete_function(self._untraced.pop())

    def _started(self, num_steps: int) -> Totals:
        self._start()
        for length in rows_of(num_steps, self.steps_per_call):
            self._row(length)
        each = map(self.strategy.experimental_local_results, self._totals)
        return Totals(*[_Sum([_read(own) for own in total]) for total in each])

    @property
    def num_traces(self) -> int:
        """How often steps were traced; more after a later call means that a step was not the one compiled."""
        return sum(function.experimental_get_tracing_count() for function in (self._start, self._row))

    def _run_in_a_row(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.strategy.run(self._step, args=(self.next_batch(),))

    def _step(self, batch: Batch) -> None:
        self._set_totals(self.step(batch, Totals(*map(tf.convert_to_tensor, self._totals))))

    def _zero_totals(self) -> None:
        self.strategy.run(lambda: self._set_totals(Totals(*[tf.constant(0.0)] * len(Totals._fields))))

    def _set_totals(self, totals: Totals) -> None:
        for kept, total in zip(self._totals, totals, strict=True):
            kept.assign(total)


def _read(variable: Any) -> Any:
    """The value on the variable's device.

    Elsewhere `read_value` copies it to the first device, and the host waits until the variable's one has
    done all that it was given: it then stands still while the next steps are handed out.
    """
    with tf.device(variable.device):
        return variable.read_value()


class _Sum:
    """Of one number of every replica, added up when it is read: the host would wait for a sum over GPUs."""

    def __init__(self, parts: Sequence[Any]):
        self._parts = parts

    def __float__(self) -> float:
        return float(sum(float(part) for part in self._parts))


def _is_large(gradient: Any) -> bool:
    """Whether a gradient, or a shape, travels on its own."""
    shape = getattr(gradient, "shape", gradient)
    return shape.num_elements() >= LARGE_GRADIENT_ELEMENTS


def _all_reduce(gradients: list[Any]) -> list[Any]:
    """Sums over replicas, on every replica."""
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return gradients
    # Inside a program TensorFlow would join all messages in one, at the cost of copying them twice.
    apart = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients, apart)


def _go_on_to_number(number: int) -> None:
    """Lets TensorFlow number what is traced next from here on, unless it is past that.

    The numbers are in functions' names and so in the keys under which compiled programs are kept: the step
    is to find its programs whatever the input has traced before them.
    """
    while ops.uid() < number:
        pass


def _state(initial: Any) -> tf.Variable:
    """A variable of the step; each replica updates its own copy, all in the same way."""
    return tf.Variable(initial, trainable=False)


def _count() -> tf.Variable:
    """A counter from 0; int64, because TensorFlow keeps int32 variables of a GPU on the host."""
    return _state(tf.zeros((), tf.int64))


def _split(batch: Batch, count: int) -> list[Batch]:
    """The batch as `count` equal micro-batches."""
    if count == 1:
        return [batch]
    parts = {name: tf.split(value, count) for name, value in batch.items()}
    return [{name: values[index] for name, values in parts.items()} for index in range(count)]
