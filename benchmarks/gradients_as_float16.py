"""How many gradients of activations float16 holds as zeros or subnormals, on the CPU.

    PYTHONPATH=. python benchmarks/gradients_as_float16.py --model=resnet50 --lr_warmup_steps=10000 --steps=61

Computed in float32 on one small batch of noise, scaled to what --batch samples of --size pixels would leave
of the mean's gradient for each value, times the loss scale, and rounded. Zeros need less power, and a card at
its power limit turns that into speed.
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfbench.models import MODELS, losses
from tfbench.models.bert import BERT_LARGE_SHAPE
from tfbench.models.bert_model import Bert
from tfbench.models.resnet import RESNET50_SHAPE
from tfbench.models.resnet_model import ResNet

SMALLEST_NORMAL = 2.0**-14  # of float16
TAPS = ("1.0.conv3", "1.1.conv1", "2.1.conv3", "3.2.conv2", "3.5.conv3", "4.1.conv3", "4.2.conv1")
BLOCKS = (0, 6, 12, 18, 23)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("resnet50", "bert_large"), default="resnet50")
    parser.add_argument("--samples", type=int, default=16, help="of the small batch")
    parser.add_argument("--pixels", type=int, default=64, help="of its images")
    parser.add_argument("--batch", type=int, help="that the gradients are scaled to; default: the model's")
    parser.add_argument("--size", type=int, default=224, help="of the images that they are scaled to")
    parser.add_argument("--steps", type=int, default=61)
    parser.add_argument("--lr_warmup_steps", type=int, default=10_000)
    parser.add_argument("--loss_scale", type=float, default=2.0**15)
    parser.add_argument("--last_gamma", type=float, default=1.0, help="that ResNet's blocks begin with")
    return parser.parse_args()


def resnet50(args: argparse.Namespace) -> tuple[Any, Any, Any, float]:
    """Model, a function that gives its loss, what it records, and what a gradient is scaled with."""
    model = ResNet(RESNET50_SHAPE, args.pixels)
    random = np.random.default_rng(0)
    images = random.standard_normal((args.samples, args.pixels, args.pixels, 3)).astype("float32")
    labels = random.integers(0, 1000, args.samples)
    recorded: dict[str, Any] = {}
    for name in TAPS:
        layer = model.parts[f"layer{name}"]
        layer.call = recording(layer.call, recorded, name)
    for name, layer in model.parts.items():
        if name.endswith("bn3"):
            layer.gamma.assign(tf.fill(layer.gamma.shape, args.last_gamma))

    def loss() -> Any:
        batch = {"image": images, "label": labels}
        return tf.reduce_mean(losses.classification_loss(model, batch, training=True, seed=None).loss)

    batch = args.batch or MODELS["resnet50"].on_gpu.per_replica_batch_size
    return model, loss, recorded, args.samples / batch * (args.pixels / args.size) ** 2


def bert_large(args: argparse.Namespace) -> tuple[Any, Any, Any, float]:
    """As resnet50; recorded is what goes into a block."""
    model = Bert(BERT_LARGE_SHAPE)
    random = np.random.default_rng(0)
    tokens = tf.constant(random.integers(0, 30522, (args.samples, 128)), tf.int32)
    places = np.stack([random.permutation(128)[:20] for _ in range(args.samples)])
    batch = {"input_ids": tokens, "attention_mask": tf.ones_like(tokens), "masked_positions": places}
    labels = random.integers(0, 30522, places.shape)
    recorded: dict[str, Any] = {}
    for index in BLOCKS:
        block = model.blocks[index]
        block.call = recording(block.call, recorded, f"block {index}", of_input=True)

    def loss() -> Any:
        logits = model(batch, training=True, seed=tf.constant([1, 2]))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    full = args.batch or MODELS["bert_large"].on_gpu.per_replica_batch_size
    return model, loss, recorded, args.samples / full


def recording(call: Any, recorded: dict[str, Any], name: str, of_input: bool = False) -> Any:
    """A layer's `call` that leaves its result, or its input, in `recorded`."""

    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        y = call(x, *args, **kwargs)
        recorded[name] = x if of_input else y
        return y

    return wrapped


def main() -> None:
    """Train by plain SGD with momentum; show the gradients at the first step, the 21st, … and the last."""
    args = parse()
    keras.utils.set_random_seed(0)
    model, loss_of, recorded, share = {"resnet50": resnet50, "bert_large": bert_large}[args.model](args)
    weights = [variable.value for variable in model.trainable_variables]
    velocities = [tf.zeros_like(weight) for weight in weights]
    for step in range(args.steps):
        with tf.GradientTape() as tape:
            loss = loss_of()
        names = sorted(recorded)
        taps, gradients = tape.gradient(loss, ([recorded[name] for name in names], weights))
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step + 1}, loss {float(loss):.3f}")
            for name, gradient in zip(names, taps, strict=True):
                held = np.abs(
                    (gradient.numpy() * share * args.loss_scale).astype("float16").astype("float32")
                )
                small = np.mean((held > 0) & (held < SMALLEST_NORMAL))
                print(f"  {name:10} zeros {np.mean(held == 0):6.1%}  subnormal {small:6.1%}", flush=True)
        rate = MODELS["resnet50"].learning_rate * min(1.0, (step + 1) / max(args.lr_warmup_steps, 1))
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            velocities[index] = 0.9 * velocities[index] - rate * tf.convert_to_tensor(gradient)
            weight.assign_add(velocities[index])


if __name__ == "__main__":
    main()
