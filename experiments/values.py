"""Does a card train faster where the values are cheap?

    python experiments/values.py --model=bert_large --gpus=1

A card at its power limit turns cheap values (zeros, float16's subnormals, a batch known by heart) into a
higher clock. The same step on weights near their first ones, as by default; at a full learning rate from the
first update on; and with gradients that a loss scale of 1 leaves to underflow, or one of 1,048,576 keeps from
it. Rate, clock, power and energy say what each is worth.
"""

from typing import Any

from tfbench import study
from tfbench.config import SYNTHETIC_LR_WARMUP_STEPS, BenchmarkConfig

ON_GPU = {"model": "resnet50", "gpus": "1", "precision": "mixed_float16", **study.GPU_STEPS}
ON_CPU = {"model": "resnet_tiny", "per_replica_batch_size": 8, "precision": "fp32", **study.CPU_STEPS}
COLUMNS = {
    "SM clock, MHz": "sm_clock_mhz_mean",
    "W": "power_w_mean",
    "J per sample": "energy_j_per_sample",
    "loss": "loss_last",
    "steps skipped": "steps_skipped",
}
HEADER = ("values", "status", "samples/s", "to the default", *COLUMNS)

DEFAULT = "near the first weights"
SCALES = {"loss scale 1": 1.0, "loss scale 2^20": 2.0**20}


def points_of(precision: str) -> dict[str, dict[str, Any]]:
    """Choices of each point; a loss scale is float16's alone."""
    default = {
        "precision": precision,
        "lr_warmup_steps": SYNTHETIC_LR_WARMUP_STEPS,
        "initial_loss_scale": BenchmarkConfig.initial_loss_scale,
    }
    points = {DEFAULT: default, "full learning rate": default | {"lr_warmup_steps": 0}}
    if precision == "mixed_float16":
        points |= {name: default | {"initial_loss_scale": scale} for name, scale in SCALES.items()}
    return points


def main(argv: list[str]) -> int:
    """Run, compare with the default, answer."""
    experiment = study.Experiment("values", ON_GPU, ON_CPU)
    rows = experiment.rows(points_of(experiment.choices["precision"]))
    rates = {name: study.rate_of(own) for name, own in rows.items()}
    ratios = {name: rate and rate.over(rates.get(DEFAULT)) for name, rate in rates.items()}
    lines = [
        (
            name,
            study.status_of(own),
            rates[name],
            ratios[name],
            *(study.mean_of(own, each) for each in COLUMNS.values()),
        )
        for name, own in rows.items()
    ]
    figure, (axes,) = study.canvas("The same step on other values", bars=len(rows))
    study.draw_bars(axes, "samples/s", rates)
    others = {name: ratio for name, ratio in ratios.items() if ratio and name != DEFAULT}
    answer = "Nothing to compare: see the statuses."
    if others:
        far = max(others, key=lambda name: abs(others[name].value - 1))
        answer = f"What differs most, {far}, trains {study.spoken(others[far])} as fast as {DEFAULT}."
    on_cpu = "" if experiment.on_gpu else " A CPU is seldom at its power limit."
    return experiment.finish(HEADER, lines, answer + on_cpu, figure)


if __name__ == "__main__":
    study.start(main)
