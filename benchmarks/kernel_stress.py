"""Are the gradients of --kernels=fused the same every time, and those of --kernels=plain?

    python benchmarks/kernel_stress.py --model=bert_large --gpus=1 --per_replica_batch_size=256

Computes the gradients of the first step over and over, with the same weights, batch and dropout mask, and
prints for each set of kernels how many executions were not finite, how far the executions differ from the
first one and how far the first is from the plain kernels', as the largest difference of a message over its
largest element. Atomic sums of the embedding's gradient make differences of rounding. One process for each
set: --sets names them.
"""

import subprocess
import sys

from absl import app, flags

import tfbench.flags

flags.adopt_module_key_flags(tfbench.flags)
EXECUTIONS = flags.DEFINE_integer("executions", 60, "Of the gradients' program, for each set.", lower_bound=2)
SETS = flags.DEFINE_list(
    "sets",
    ["plain", "attention", "norm", "gelu", "attention+norm+gelu"],
    "Kernels that are fused, joined by +.",
)
CHILD = flags.DEFINE_string("child", None, "Internal: the set of this process.")
PLACES = {
    "attention": ("attention", "fused_attention"), "norm": ("residual_norm", "fused_residual_norm"),
    "gelu": ("linear_gelu", "fused_linear_gelu"),
}  # fmt: skip


def use(names: list[str]) -> None:
    """Let the fused kernels that are not named be the plain formulas."""
    from tfbench.models import bert_model

    for name in set(PLACES) - set(names):
        _, fused = PLACES[name]
        setattr(bert_model, fused, getattr(bert_model, fused.replace("fused", "plain")))


def gradients_of(names: list[str]) -> list:
    """Messages of each execution, NumPy float32."""
    import numpy as np
    import tensorflow as tf

    from tfbench import devices, precision, stages
    from tfbench.defaults import complete
    from tfbench.flags import choices_from_flags
    from tfbench.hardware.gpus import this_machine
    from tfbench.journal import Observed

    fused = {"kernels": "fused"} if names != ["plain"] else {"kernels": "plain"}
    config, _ = complete(choices_from_flags() | fused, this_machine())
    devices.set_environment(config)
    precision.apply(config.precision)
    use(names)
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
        child(CHILD.value)
        return
    for name in SETS.value:
        run = subprocess.run(
            [sys.executable, *sys.argv, f"--child={name}"], capture_output=True, text=True, check=False
        )
        results = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
        print(*results or [f"{name}: rc {run.returncode}: {run.stderr[-1500:]}"], flush=True)


if __name__ == "__main__":
    app.run(main)
