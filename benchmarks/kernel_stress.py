"""Are the gradients of --kernels=fused the same every time, and those of --kernels=plain?

    python benchmarks/kernel_stress.py --model=bert_large --gpus=1 --per_replica_batch_size=256 [--alone]

With --alone: every kernel on its own, which takes seconds. Computes the gradients of random inputs over and
over, and before each time those of NaN: what a program leaves in shared memory and the next one reads too
early is then seen. Prints how many elements differed from the first execution, and how many were not finite.

Without: computes the gradients of the first step over and over, with the same weights, batch and dropout
mask, and compares each message with its first execution where it lies, on the GPU. Prints for each set of
kernels how many messages differed, the worst of them with their names, and how far the first execution is
from the plain kernels', as the largest difference of a message over its largest element. Atomic sums of the
embedding's gradient make differences of rounding. An error of a layer's product stays in its own gradient,
one of attention or norm goes through all layers before it.

With --train: makes real steps, and says of each step whose gradients are not finite which ones.

One process for each set: --sets names them.
"""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
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
TRAIN = flags.DEFINE_bool("train", False, "Real steps, as many as --executions.")
CHILD = flags.DEFINE_string("child", None, "Internal: the set of this process.")
WORST_SHOWN = 8  # messages
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


def build(names: list[str]) -> Any:
    """The training of a set, ready to step."""
    from tfbench import devices, stages
    from tfbench.journal import Observed

    config = prepare(names)
    return stages.build(config, devices.build_strategy(devices.open_devices(config)), Observed())


def gradients(step: Any, batch: Any) -> tuple[Any, list[Any]]:
    """Loss and messages of one execution, in a replica."""
    import tensorflow as tf

    from tfbench.step import Totals

    totals = Totals(*[tf.constant(0.0)] * len(Totals._fields))
    totals, messages = step._program("gradients", step.gradients)(batch, tf.identity(step.loss_scale), totals)
    return totals.loss_last, messages


def message_names(step: Any) -> list[str]:
    """Of the messages, in their order: each large variable's, then all small ones'."""
    from tfbench.step import _is_large

    variables = step.model.trainable_variables
    large = [variable.path for variable in variables if _is_large(variable.shape)]
    return large + ["the small ones"] * (len(large) < len(variables))


def broken_in(tensor: Any) -> Any:
    """How many elements are not finite, int64."""
    import tensorflow as tf

    return tf.math.count_nonzero(~tf.math.is_finite(tensor))


def repeated(training: Any, executions: int) -> tuple[list[Any], np.ndarray]:
    """The first execution's messages; of each message over all later ones [messages, 4]: executions that
    differ, elements that differ in all, elements not finite in all, largest difference over largest element.
    """
    import tensorflow as tf

    def facts(again: Any, first: Any) -> list[Any]:
        bits = tf.int16 if first.dtype.size == 2 else tf.int32  # NaN is not equal to itself, its bits are
        differ = tf.math.count_nonzero(tf.bitcast(again, bits) != tf.bitcast(first, bits))
        apart = tf.reduce_max(tf.abs(tf.cast(again, tf.float32) - tf.cast(first, tf.float32)))
        largest = tf.maximum(tf.reduce_max(tf.abs(tf.cast(first, tf.float32))), 1e-30)
        counts = [tf.minimum(differ, 1), differ, broken_in(again)]
        return [*(tf.cast(count, tf.float32) for count in counts), apart / largest]

    @tf.function
    def run(count: Any) -> tuple[list[Any], Any]:
        def replica(batch: Any) -> tuple[list[Any], Any]:
            first = gradients(training.step, batch)[1]
            sums = tf.zeros([len(first), 4])
            for _ in tf.range(count):
                again = gradients(training.step, batch)[1]
                new = tf.stack([tf.stack(facts(a, f)) for a, f in zip(again, first, strict=True)])
                sums = tf.concat([sums[:, :3] + new[:, :3], tf.maximum(sums[:, 3:], new[:, 3:])], 1)
            return first, sums

        return training.strategy.run(replica, args=(training.source.next(),))

    first, sums = training.strategy.experimental_local_results(run(tf.constant(executions - 1)))[0]
    return first, sums.numpy()


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
    """One set: prints a line and the worst messages; keeps the plain gradients, or compares with them."""
    training = build(name.split("+"))
    first, facts = repeated(training, EXECUTIONS.value)
    messages = [np.asarray(message, np.float32) for message in first]
    kept, from_plain = "kernel_stress_plain.npz", float("nan")
    if name == "plain":
        np.savez(kept, *messages)
    elif os.path.exists(kept):
        plain = list(np.load(kept).values())
        from_plain = max(
            np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in zip(messages, plain, strict=True)
        )
    differ, broken = (facts[:, 0] > 0).sum(), (facts[:, 2] > 0).sum()
    print(f"RESULT {name}: in {EXECUTIONS.value} executions {differ} of {len(facts)} messages differ, "
          f"{broken} are not finite; from plain {from_plain:.2e}", flush=True)  # fmt: skip
    names = message_names(training.step)
    for index in [i for i in np.argsort(-facts[:, 3]) if facts[i, 0]][:WORST_SHOWN]:
        executions, elements, broken, apart = facts[index]
        print(f"RESULT   {names[index]}: in {executions:.0f} executions, {elements / executions:.0f} of its "
              f"elements, by {apart:.2e} at most; not finite {broken:.0f}", flush=True)  # fmt: skip


def train(name: str) -> None:
    """Real steps of one set: a line for each whose gradients are not finite, and one at the end."""
    import tensorflow as tf

    training = build(name.split("+"))
    step, names, skipped = training.step, message_names(training.step), 0

    @tf.function(autograph=False)
    def once() -> tuple[Any, list[Any]]:
        def replica(batch: Any) -> tuple[Any, list[Any]]:
            scale = tf.identity(step.loss_scale)
            loss, messages = gradients(step, batch)
            broken = [broken_in(message) for message in messages]
            step._program("update", step.update)(messages, scale)
            return loss, broken

        return training.strategy.run(replica, args=(training.source.next(),))

    for number in range(1, EXECUTIONS.value + 1):
        loss, counts = training.strategy.experimental_local_results(once())[0]
        broken = {message: int(count) for message, count in zip(names, counts, strict=True) if int(count)}
        if broken:
            skipped += 1
            shown = ", ".join(f"{message} {count}" for message, count in list(broken.items())[:WORST_SHOWN])
            print(f"RESULT {name}: step {number}, loss {float(loss):.4f}: not finite in {len(broken)} "
                  f"messages: {shown}", flush=True)  # fmt: skip
    print(
        f"RESULT {name}: {skipped} of {EXECUTIONS.value} steps not finite, last loss {float(loss):.6f}",
        flush=True,
    )


def main(argv: list[str]) -> None:
    """Run every set in its own process."""
    if CHILD.value:
        (alone if ALONE.value else train if TRAIN.value else child)(CHILD.value)
        return
    for name in SETS.value:
        run = subprocess.run(
            [sys.executable, *sys.argv, f"--child={name}"], capture_output=True, text=True, check=False
        )
        results = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
        print(*results or [f"{name}: rc {run.returncode}: {run.stderr[-1500:]}"], sep="\n", flush=True)


if __name__ == "__main__":
    app.run(main)
