"""How much faster than Keras as it comes does ResNet train, and which step of the way brings what?

    python experiments/xla.py --gpus=1

Keras' layers and optimizer (plain_keras.py) without XLA, as under tf.distribute, and with it, as `fit` has it
on one GPU; then tfbench: fused batch norm without XLA, XLA, XLA with a loop over steps on the host's side.
"""

from pathlib import Path
from typing import Any

from tfbench import study

ON_GPU = {"model": "resnet50", "gpus": "1", "precision": "mixed_float16", **study.GPU_STEPS}
ON_CPU = {"model": "resnet_tiny", "precision": "fp32", "per_replica_batch_size": 8, **study.CPU_STEPS}
ON_CPU |= {"steps": 50, "windows": 5}  # a window holds a call of 10
HEADER = ("training", "status", "samples/s", "to Keras as it comes", "memory, GiB")
KERAS = Path(__file__).with_name("plain_keras.py")
AS_IT_COMES = "Keras as it comes"
PLAIN_CHOICES: dict[str, Any] = {"steps_per_loop": 1, "tag": KERAS.stem, "diagnose": False}
PLAIN: dict[str, dict[str, Any]] = {
    AS_IT_COMES: {"xla": False, **PLAIN_CHOICES},
    "Keras, XLA": {"xla": True, **PLAIN_CHOICES},
}
OURS: dict[str, dict[str, Any]] = {
    "tfbench, no XLA": {"xla": False, "steps_per_loop": 1},
    "tfbench, XLA": {"xla": True, "steps_per_loop": 1},
    "tfbench, XLA, 10 steps a call": {"xla": True, "steps_per_loop": 10},
}


def main(argv: list[str]) -> int:
    """Run the ladder, compare with its lowest step, answer."""
    experiment = study.Experiment("xla", ON_GPU, ON_CPU)
    tag = {"tag": experiment.choices["tag"]}  # tells reused rows of tfbench from those of plain Keras
    ours = {name: choices | tag for name, choices in OURS.items()}
    rows = experiment.rows(PLAIN | ours, programs=dict.fromkeys(PLAIN, KERAS))
    rates = {name: study.rate_of(own) for name, own in rows.items()}
    ratios = {name: rate and rate.over(rates.get(AS_IT_COMES)) for name, rate in rates.items()}
    lines = [
        (
            name,
            study.status_of(own),
            rates[name],
            ratios[name],
            study.mean_of(own, "peak_memory_gib"),
        )
        for name, own in rows.items()
    ]
    figure, (axes,) = study.canvas("From Keras as it comes to tfbench's default", bars=len(rows))
    study.draw_bars(axes, "samples/s", rates)
    default = list(OURS)[-1 if experiment.on_gpu else 0]
    faster = ratios.get(default)
    answer = f"tfbench's default ({default}) trains {study.spoken(faster)} as fast as {AS_IT_COMES}."
    if faster is None:
        answer = f"{default} and {AS_IT_COMES} did not both run: nothing to compare."
    on_cpu = "" if experiment.on_gpu else " A small net on a CPU says nothing of GPUs."
    return experiment.finish(HEADER, lines, answer + on_cpu, figure)


if __name__ == "__main__":
    study.start(main)
