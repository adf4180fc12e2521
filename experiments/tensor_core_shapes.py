"""What does a matrix whose sides are no multiple of 8 cost?

    python experiments/tensor_core_shapes.py --gpus=1 --precision=mixed_float16

Square products of random matrices, a little larger than a power of two each time. Tensor cores read rows in
pieces of 16 bytes (8 half-precision numbers); other rows are padded or take slower kernels.
"""

from typing import Any

from absl import flags

from tfbench import precision, study
from tfbench.defaults import fastest_precision

ON_GPU = {"gpus": "1"}
HEADER = ("side", "multiple of", "TFLOP/s", "to the power of two")
OFFSETS = (0, 1, 2, 4, 8, 64)
PRODUCTS = 10  # one after another on the device

SIDES = flags.DEFINE_list("sides", None, "Powers of two. Default: 1024,2048,4096,8192 on a GPU, 256,512 not.")


def multiple_of(side: int) -> int:
    """The largest power of two that divides a side."""
    return side & -side


def product_rate(side: int, dtype: str, xla: bool) -> study.Estimate:
    """TFLOP/s of `side`³ products in a row, each needing the one before, on random numbers."""
    import tensorflow as tf

    def chain(left: Any, right: Any) -> Any:
        for _ in tf.range(PRODUCTS):
            right = tf.matmul(left, right)
        return right

    # Scaled so that a product of any length stays standard normal.
    left = tf.cast(tf.random.stateless_normal((side, side), (0, 1)) / side**0.5, dtype)
    right = tf.cast(tf.random.stateless_normal((side, side), (2, 3)), dtype)
    run = tf.function(chain, jit_compile=xla)
    return study.timed(lambda: run(left, right)).times(PRODUCTS * 2 * side**3 / 1e12)


def main(argv: list[str]) -> int:
    """Time every side, compare with its power of two."""
    experiment = study.Experiment("tensor_core_shapes", ON_GPU, {})
    capability = experiment.machine.gpus[0].compute_capability if experiment.on_gpu else None
    name = experiment.choices["precision"] or fastest_precision(capability)
    device = experiment.open_devices()[0]
    precision.apply(name)
    import tensorflow as tf

    default = (1024, 2048, 4096, 8192) if experiment.on_gpu else (256, 512)
    sides = [int(side) for side in study.numbers(SIDES, default)]
    lines, curves = [], {f"power of two + {offset}": [] for offset in OFFSETS}
    ratios: dict[int, study.Estimate] = {}
    for side in sides:
        for offset in OFFSETS:
            with tf.device(device):
                rate = product_rate(side + offset, study.compute_dtype(name), bool(experiment.choices["xla"]))
            curves[f"power of two + {offset}"].append((side, rate))
            ratios[side + offset] = rate.over(curves["power of two + 0"][-1][1])
            lines.append((side + offset, multiple_of(side + offset), rate, ratios[side + offset]))
    figure, (axes,) = study.canvas(f"Square products, {name}, {device}")
    study.draw_lines(axes, "power of two", "TFLOP/s", curves)
    worst = min(ratios, key=lambda side: ratios[side].value)
    answer = (
        f"The most that a side costs: {worst} reaches {study.spoken(ratios[worst])} its power of two's rate."
        if ratios[worst].value < 1
        else "No side is slower than its power of two."
    )
    return experiment.finish(HEADER, lines, answer, figure)


if __name__ == "__main__":
    study.start(main)
