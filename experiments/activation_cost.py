"""What does GELU cost against ReLU in BERT's perceptron?

    python experiments/activation_cost.py --gpus=1

Forward and backward pass of hidden → 4 × hidden → activation → hidden, in the compute dtype, compiled by XLA
on a GPU. The two products dominate on a card with fast matrix units; what an activation adds is memory.
"""

from collections.abc import Callable
from typing import Any

from absl import flags

from tfbench import precision, study
from tfbench.defaults import fastest_precision

ON_GPU = {"gpus": "1", "per_replica_batch_size": 64, "seq_length": 128, "xla": True}
ON_CPU = {"per_replica_batch_size": 2, "seq_length": 64}
HEADER = ("activation", "µs forward and backward", "steps/s", "time to ReLU's")

HIDDEN = flags.DEFINE_integer("hidden", None, "Width. Default: BERT-large's 1024 on a GPU, 128 not.")


def activations() -> dict[str, Callable[[Any], Any]]:
    """By name; tfbench's own is the exact one with a backward pass that keeps less."""
    import tensorflow as tf

    from tfbench.models import layers

    return {
        "ReLU": tf.nn.relu,
        "GELU, tanh": lambda x: tf.nn.gelu(x, approximate=True),
        "GELU, exact": lambda x: tf.nn.gelu(x, approximate=False),
        "GELU, exact, tfbench's": layers.gelu,
    }


def step_rate(activation: Callable[[Any], Any], tokens: int, hidden: int, dtype: str, xla: bool) -> Any:
    """Forward and backward passes/s of the perceptron over [tokens, hidden] random numbers."""
    import tensorflow as tf

    def normal(rows: int, columns: int, seed: int) -> Any:
        numbers = tf.random.stateless_normal((rows, columns), (seed, 0))
        return tf.cast(numbers if rows == tokens else numbers / rows**0.5, dtype)

    inputs = [normal(tokens, hidden, 0), normal(hidden, 4 * hidden, 1), normal(4 * hidden, hidden, 2)]
    upstream = normal(tokens, hidden, 3)

    @tf.function(jit_compile=xla)
    def step(x: Any, rising: Any, falling: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, rising, falling])
            y = activation(x @ rising) @ falling
        return y, tape.gradient(y, [x, rising, falling], output_gradients=upstream)

    return study.timed(lambda: step(*inputs))


def main(argv: list[str]) -> int:
    """Time every activation, compare with ReLU."""
    experiment = study.Experiment("activation_cost", ON_GPU, ON_CPU)
    capability = experiment.machine.gpus[0].compute_capability if experiment.on_gpu else None
    name = experiment.choices["precision"] or fastest_precision(capability)
    device = experiment.open_devices()[0]
    precision.apply(name)
    import tensorflow as tf

    tokens = experiment.choices["per_replica_batch_size"] * experiment.choices["seq_length"]
    hidden = HIDDEN.value or (1024 if experiment.on_gpu else 128)
    rates, dtype, xla = {}, study.compute_dtype(name), bool(experiment.choices["xla"])
    with tf.device(device):
        for activation, function in activations().items():
            rates[activation] = step_rate(function, tokens, hidden, dtype, xla)
    costs = {activation: rates["ReLU"].over(rate) for activation, rate in rates.items()}
    lines = [(each, 1e6 / rate.value, rate, costs[each]) for each, rate in rates.items()]
    figure, (axes,) = study.canvas(f"{tokens} tokens, hidden {hidden}, {name}", bars=len(rates))
    study.draw_bars(axes, "time, ReLU = 1", costs)
    dearest = max(costs, key=lambda each: costs[each].value)
    answer = f"The dearest, {dearest}, makes the perceptron take {study.spoken(costs[dearest])} ReLU's time."
    return experiment.finish(HEADER, lines, answer, figure)


if __name__ == "__main__":
    study.start(main)
