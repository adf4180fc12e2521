"""What does mixed precision buy me: speed, memory, energy; and is the loss the same?

    python experiments/precision_speedup.py --gpus=1

The same training in every precision that the device has. ResNet-50 on a GPU, a small ResNet on the CPU,
where half precision is emulated and slow.
"""

from tfbench import study
from tfbench.precision import PRECISIONS

ON_GPU = {"model": "resnet50", "gpus": "1", **study.GPU_STEPS}
ON_CPU = {"model": "resnet_tiny", "per_replica_batch_size": 8, **study.CPU_STEPS}
HEADER = ("precision", "status", "samples/s", "to fp32", "memory, GiB", "J per sample", "loss", "off fp32, %")

MEANS = {"peak memory, GiB": "peak_memory_gib", "energy, J per sample": "energy_j_per_sample"}


def main(argv: list[str]) -> int:
    """Run, compare with fp32, answer."""
    experiment = study.Experiment("precision_speedup", ON_GPU, ON_CPU)
    rows = experiment.rows({name: {"precision": name} for name in PRECISIONS})
    rates = {name: study.rate_of(own) for name, own in rows.items()}
    loss = study.mean_of(rows.get("fp32", []), "loss_last")
    ratios, lines = {}, []
    for name, own in rows.items():
        rate, own_loss = rates[name], study.mean_of(own, "loss_last")
        ratios[name] = rate.over(rates.get("fp32")) if rate else None
        lines.append(
            (
                name,
                study.status_of(own),
                rate and rate.value,
                ratios[name],
                study.mean_of(own, "peak_memory_gib"),
                study.mean_of(own, "energy_j_per_sample"),
                own_loss,
                100 * (own_loss / loss - 1) if own_loss is not None and loss else None,
            )
        )
    panels = {"samples/s": rates}
    for unit, column in MEANS.items():
        means = {name: study.mean_of(own, column) for name, own in rows.items()}
        if any(means.values()):
            panels[unit] = {name: mean and study.Estimate(mean) for name, mean in means.items()}
    figure, all_axes = study.canvas("What precision buys", len(panels), bars=len(rows))
    for axes, (unit, bars) in zip(all_axes, panels.items(), strict=True):
        study.draw_bars(axes, unit, bars)
    known = {name: ratio for name, ratio in ratios.items() if ratio and name != "fp32"}
    best = max(known, key=lambda name: known[name].value, default="")
    answer = (
        f"The fastest of the others, {best}, is {study.spoken(known[best])} as fast as fp32." if best else ""
    )
    return experiment.finish(HEADER, lines, answer or "Nothing to compare: see the statuses.", figure)


if __name__ == "__main__":
    study.start(main)
