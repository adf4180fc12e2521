"""Are the gradients of --kernels=fused the same every time, and those of --kernels=plain?

    python benchmarks/kernel_stress.py --model=bert_large --gpus=1 --per_replica_batch_size=256 [--alone]

With --alone: every kernel on its own, which takes seconds. Computes the gradients of random inputs over and
over, and before each time those of NaN: what a program leaves in shared memory and the next one reads too
early is then seen. Prints how many elements differed from the first execution, and how many were not finite.

Without: computes the gradients of the first step over and over, with the same weights, batch and dropout
mask, and prints for each set of kernels how many executions were not finite, how far the executions differ
from the first one and how far the first is from the plain kernels', as the largest difference of a message
over its largest element. Atomic sums of the embedding's gradient make differences of rounding.

One process for each set: --sets names them.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from absl import app, flags

import tfbench.flags

flags.adopt_module_key_flags(tfbench.flags)
EXECUTIONS = flags.DEFINE_integer("executions", 60, "Of the gradients' program, for each set.", lower_bound=2)
SETS = flags.DEFINE_list(
    "sets",
    ["plain", "attention", "norm", "gelu", "attention+norm+gelu"],
    "Kernels that are fused, joined by +. Variants are attention-pipelined, whose loads are asynchronous "
    "copies ahead of time as the shipped kernel's are not, and norm-plainloop, the reverse.",
)
ALONE = flags.DEFINE_bool("alone", False, "Each kernel of a set on its own, after the same kernel on NaN.")
CHILD = flags.DEFINE_string("child", None, "Internal: the set of this process.")
PLACES = {
    "attention": ("attention", "fused_attention"), "norm": ("residual_norm", "fused_residual_norm"),
    "gelu": ("linear_gelu", "fused_linear_gelu"),
}  # fmt: skip


def use(names: list[str]) -> None:
    """Let the fused kernels that are not named be the plain formulas, and the variants what they are."""
    from tfbench import kernels
    from tfbench.models import bert_model

    for name in set(PLACES) - {name.split("-")[0] for name in names}:
        _, fused = PLACES[name]
        setattr(bert_model, fused, getattr(bert_model, fused.replace("fused", "plain")))
    shipped, stages = kernels._kernel, {"backward_tile": 2, "forward_blocks": 3, "backward_blocks": 3}
    if "attention-pipelined" in names:
        kernels._kernel = lambda name, *rest: dataclasses.replace(
            shipped(name, *rest), num_stages=stages.get(name, 1)
        )
    text = kernels._text
    if "norm-plainloop" in names:
        kernels._text = lambda *stem: text(*stem).replace("tt.num_stages = 3", "tt.num_stages = 1")


def prepare(names: list[str]) -> Any:
    """The run's configuration, with the kernels of a set in use."""
    from tfbench import devices, precision
    from tfbench.defaults import complete
    from tfbench.flags import choices_from_flags
    from tfbench.hardware.gpus import this_machine

    fused = {"kernels": "fused"} if names != ["plain"] else {"kernels": "plain"}
    config, _ = complete(choices_from_flags() | fused, this_machine())
    devices.set_environment(config)
    precision.apply(config.precision)
    use(names)
    return config


def gradients_of(names: list[str]) -> Iterator[list[Any]]:
    """Messages of each execution, NumPy float32."""
    import numpy as np
    import tensorflow as tf

    from tfbench import devices, stages
    from tfbench.journal import Observed

    config = prepare(names)
    training = stages.build(config, devices.build_strategy(devices.open_devices(config)), Observed())
    step = training.step

    @tf.function
    def once():
        def replica(batch):
            from tfbench.step import Totals

            totals = Totals(*[tf.constant(0.0)] * 4)
            return step._program("gradients", step.gradients)(batch, tf.identity(step.loss_scale), totals)[1]

        return training.strategy.experimental_local_results(training.strategy.run(replica, args=(batch,)))[0]

    batch = training.source.next()
    for _ in range(EXECUTIONS.value):
        yield [np.asarray(message, np.float32) for message in once()]


def parts(config: Any) -> dict[str, tuple[Any, list[Any]]]:
    """Each kernel's function and random inputs for it, as large as the model's."""
    import tensorflow as tf

    from tfbench.models import bert, bert_model
    from tfbench.models.layers import LayerNorm, Linear

    shape = getattr(bert, f"{config.model.upper()}_SHAPE")
    batch, length, hidden, heads = config.per_replica_batch_size, config.seq_length, shape.hidden, shape.heads
    seed, rate, dtype = tf.constant([3, 4]), config.dropout, keras_dtype()
    norm, linear, wide = LayerNorm(hidden, 1e-12), Linear(hidden, hidden), Linear(hidden, shape.intermediate)

    def random(*size):
        return tf.cast(tf.random.stateless_normal(size, seed), dtype)

    bias = tf.zeros([batch, length])
    x = random(batch, length, hidden)
    return {
        "attention": (
            lambda qkv: bert_model.fused_attention(qkv, bias, rate, seed, 1),
            [random(batch, length, 3, heads, hidden // heads)],
        ),
        "norm": (lambda x, y: bert_model.fused_residual_norm(x, y, linear, norm, rate, seed, 2), [x, x]),
        "gelu": (lambda x: bert_model.fused_linear_gelu(x, wide), [x]),
    }


def keras_dtype() -> str:
    """The dtype that layers compute in."""
    import keras

    return keras.config.dtype_policy().compute_dtype


def alone(name: str) -> None:
    """One set, each kernel on its own: prints a line for each."""
    import tensorflow as tf

    from tfbench import devices

    names = name.split("+")
    config = prepare(names)
    devices.open_devices(config)
    for part, (function, inputs) in parts(config).items():
        if names != ["plain"] and part not in [name.split("-")[0] for name in names]:
            continue

        @tf.function(jit_compile=config.xla)
        def outputs(inputs, function=function):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                y = function(*inputs)
                # Not the same everywhere: sums over it would cancel.
                upstream = tf.cast(tf.random.stateless_normal(y.shape, [5, 6]), y.dtype)
            return [y, *tape.gradient(y, [*inputs, *tape.watched_variables()], upstream)]

        first, poison = outputs(inputs), [x + float("nan") for x in inputs]

        @tf.function
        def repeat(count, outputs=outputs, first=first, poison=poison, inputs=inputs):
            sums = [tf.zeros((), tf.int64)] * 2
            for _ in tf.range(count):
                spoiled = outputs(poison)
                with tf.control_dependencies(spoiled):
                    again = outputs([tf.identity(x) for x in inputs])
                sums = [
                    sums[0] + sum(tf.math.count_nonzero(a != b) for a, b in zip(again, first, strict=True)),
                    sums[1] + sum(tf.math.count_nonzero(~tf.math.is_finite(a)) for a in again),
                ]
            return sums

        differ, broken = (int(total) for total in repeat(tf.constant(EXECUTIONS.value)))
        print(f"RESULT {name}: {part} alone, {EXECUTIONS.value} times after NaN: {differ} elements differ, "
              f"{broken} not finite", flush=True)  # fmt: skip


def child(name: str) -> None:
    """One set: prints a line, and keeps or compares with the plain kernels' first gradients."""
    import os

    import numpy as np

    first, worst, broken = None, 0.0, 0
    for messages in gradients_of(name.split("+")):
        if not all(np.isfinite(message).all() for message in messages):
            broken += 1
            continue
        if first is None:
            first = messages
        sizes = [max(np.abs(a).max(), 1e-30) for a in first]
        worst = max(worst, *(np.abs(a - b).max() / s for a, b, s in zip(messages, first, sizes, strict=True)))
    kept, from_plain = "kernel_stress_plain.npz", float("nan")
    if first is not None and name == "plain":
        np.savez(kept, *first)
    elif first is not None and os.path.exists(kept):
        plain = list(np.load(kept).values())
        from_plain = max(
            np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in zip(first, plain, strict=True)
        )
    print(f"RESULT {name}: {broken} of {EXECUTIONS.value} not finite; among executions {worst:.2e}; "
          f"from plain {from_plain:.2e}", flush=True)  # fmt: skip


def main(argv: list[str]) -> None:
    """Run every set in its own process."""
    if CHILD.value:
        (alone if ALONE.value else child)(CHILD.value)
        return
    for name in SETS.value:
        run = subprocess.run(
            [sys.executable, *sys.argv, f"--child={name}"], capture_output=True, text=True, check=False
        )
        results = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
        print(*results or [f"{name}: rc {run.returncode}: {run.stderr[-1500:]}"], sep="\n", flush=True)


if __name__ == "__main__":
    app.run(main)
