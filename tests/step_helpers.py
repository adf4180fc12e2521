"""Small models, their batches and runs on logical CPU devices, for the tests that train.

Importing this gives the process four CPU devices, which stand for replicas.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfbench.config import BenchmarkConfig
from tfbench.devices import build_strategy
from tfbench.models.bert import BERT_TINY, BertShape
from tfbench.models.bert_model import Bert
from tfbench.models.layers import FusedBatchNorm, Linear
from tfbench.models.losses import classification_loss
from tfbench.models.resnet import RESNET_TINY, ResNetShape
from tfbench.models.resnet_model import ResNet
from tfbench.models.spec import Batch, ModelSpec
from tfbench.precision import PRECISIONS
from tfbench.step import HostLoop, Totals, TrainStep

# Before anything runs on a device: later it cannot be changed.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)

IMAGE_SIZE, SEQ_LENGTH, PLACES, NUM_CLASSES, VOCAB_SIZE = 16, 16, 4, 10, 64


class Toy(keras.Model):
    """Dense – batch norm (or not) – ReLU – Dense on 4×4 images; float32 logits."""

    def __init__(self, norm: bool):
        super().__init__()
        self.first, self.last = Linear(48, 16, 0.3), Linear(16, NUM_CLASSES, 0.3)
        self.norm = FusedBatchNorm(16) if norm else None
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        x = tf.reshape(self.first(tf.reshape(x, [-1, 48])), [-1, 1, 1, 16])
        if self.norm is not None:
            x = self.norm(x, training=training)
        return tf.cast(self.last(tf.reshape(tf.nn.relu(x), [-1, 16])), tf.float32)


TOY = dataclasses.replace(RESNET_TINY, name="toy", num_classes=NUM_CLASSES, build=lambda _: Toy(norm=True))
TOY_WITHOUT_NORM = dataclasses.replace(TOY, build=lambda _: Toy(norm=False))
IMAGE = dataclasses.replace(
    RESNET_TINY,
    name="image",
    num_classes=NUM_CLASSES,
    build=lambda config: ResNet(ResNetShape((1, 1), 4, NUM_CLASSES), config.image_size),
)
TEXT = dataclasses.replace(
    BERT_TINY,
    name="text",
    vocab_size=VOCAB_SIZE,
    max_seq_length=SEQ_LENGTH,
    build=lambda config: Bert(BertShape(1, 32, 2, VOCAB_SIZE, SEQ_LENGTH), config.dropout),
)


def times(factor: float, spec: ModelSpec) -> ModelSpec:
    """An image model whose loss, and so every gradient, is `factor` times as large."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        each = classification_loss(*args, **kwargs)
        return each._replace(loss=each.loss * factor)

    return dataclasses.replace(spec, loss=loss)


def toy_batch(samples: int, seed: int = 0) -> Batch:
    """4×4 images of floats."""
    rng = np.random.default_rng(seed)
    return {
        "image": rng.standard_normal((samples, 4, 4, 3)).astype("float32"),
        "label": rng.integers(0, NUM_CLASSES, samples, "int32"),
    }


def image_batch(samples: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (samples, IMAGE_SIZE, IMAGE_SIZE, 3), "uint8"),
        "label": rng.integers(0, NUM_CLASSES, samples, "int32"),
    }


def text_batch(samples: int, seed: int = 0) -> Batch:
    """Sequences of 10 to 16 tokens; each uses 1 to 4 of its masked places."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(10, SEQ_LENGTH + 1, (samples, 1))
    used = rng.integers(1, PLACES + 1, (samples, 1))
    return {
        "input_ids": rng.integers(0, VOCAB_SIZE, (samples, SEQ_LENGTH), "int32"),
        "attention_mask": (np.arange(SEQ_LENGTH) < tokens).astype("int32"),
        "masked_positions": np.tile(np.array([1, 4, 6, 9], "int32"), (samples, 1)),
        "masked_ids": rng.integers(0, VOCAB_SIZE, (samples, PLACES), "int32"),
        "masked_weights": (np.arange(PLACES) < used).astype("float32"),
    }


@contextlib.contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    """Keras' policy for the models built in the block."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def strategy_of(num_replicas: int) -> tf.distribute.Strategy:
    return build_strategy([f"CPU:{index}" for index in range(num_replicas)])


@dataclasses.dataclass
class Training:
    """A model that trains, and what can be seen of it."""

    strategy: tf.distribute.Strategy
    config: BenchmarkConfig
    step: TrainStep
    loop: HostLoop

    def losses(self, steps: int) -> list[float]:
        """Makes `steps` steps; the reported loss of each."""
        return [float(self.loop(1).loss_last) for _ in range(steps)]

    def copies(self, variable: Any) -> list[np.ndarray]:
        """A variable as each replica has it."""
        mirrored = variable.value if isinstance(variable, keras.Variable) else variable
        return [copy.numpy() for copy in self.strategy.experimental_local_results(mirrored)]

    def weights(self) -> list[np.ndarray]:
        """Trainable variables; every replica has the same."""
        weights = []
        for variable in self.step.model.trainable_variables:
            first, *others = self.copies(variable)
            for other in others:
                np.testing.assert_array_equal(first, other, err_msg=variable.path)
            weights.append(first)
        return weights

    def counts(self) -> tuple[int, int, float]:
        """Updates made, updates skipped, loss scale."""
        step = self.step
        return int(step.iterations.numpy()), int(step.skipped.numpy()), float(step.loss_scale.numpy())

    def totals_of_replicas(self) -> list[Totals]:
        """Makes a step; what each replica reports of it."""

        @tf.function
        def run() -> Totals:
            return self.strategy.run(
                self.step, args=(self.loop.next_batch(), Totals(*[tf.constant(0.0)] * 4))
            )

        fields = [self.strategy.experimental_local_results(field) for field in run()]
        return [Totals(*(float(value) for value in replica)) for replica in zip(*fields, strict=True)]


def start(spec: ModelSpec, batches: list[Batch], num_replicas: int = 1, **choices: Any) -> Training:
    """Builds a model and its step; step k reads the k-th global batch, replicas in turn, and starts anew."""
    samples = len(next(iter(batches[0].values())))
    size = {"seq_length": SEQ_LENGTH} if spec.kind == "text" else {"image_size": IMAGE_SIZE}
    config = BenchmarkConfig(
        model=spec.name,
        cpu_replicas=num_replicas,
        per_replica_batch_size=samples // (num_replicas * choices.get("accumulate", 1)),
        **({"optimizer": spec.optimizer, "learning_rate": 0.1, "steps": 100} | size | choices),
    )
    assert config.global_batch_size == samples
    keras.utils.set_random_seed(config.seed)
    strategy = strategy_of(num_replicas)
    with strategy.scope(), dtype_policy(PRECISIONS[config.precision].policy):
        step = TrainStep(spec.build(config), spec, config)
    return Training(
        strategy, config, step, HostLoop(strategy, step, _in_turn(strategy, batches), config.steps_per_loop)
    )


def _in_turn(strategy: tf.distribute.Strategy, batches: list[Batch]) -> Callable[[], Any]:
    """The batches of the replicas, one global batch after the other and round again; inside a loop too."""

    def shard(context: tf.distribute.experimental.ValueContext) -> Batch:
        index, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
        return {
            name: tf.constant(np.stack([np.split(batch[name], count)[index] for batch in batches]))
            for name in batches[0]
        }

    steps = strategy.experimental_distribute_values_from_function(shard)
    taken = tf.Variable(0, dtype=tf.int64)

    def pick(steps: Batch, index: Any) -> Batch:
        return {name: value[index] for name, value in steps.items()}

    def next_batch() -> Any:
        index = (taken.assign_add(1) - 1) % len(batches)
        return strategy.run(pick, args=(steps, index))

    return next_batch
