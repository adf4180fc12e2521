"""How much faster do several GPUs train?

    python experiments/scaling.py --gpus=auto

Weak scaling: the same batch on each of 1, 2, 4, … replicas, against as many times the rate of one, which has
nothing to sum. On GPUs with the all-reduce between the compiled programs and in them.
"""

from typing import Any

from tfbench import study
from tfbench.config import COLLECTIVES
from tfbench.sweeping.scaling import replica_counts

ON_GPU = {"model": "resnet50", **study.GPU_STEPS}
ON_CPU = {
    "model": "resnet_tiny", "gpus": "0", "cpu_replicas": 2, "per_replica_batch_size": 8, **study.CPU_STEPS,
}  # fmt: skip
ALONE = "one replica"
HEADER = ("collectives", "replicas", "status", "samples/s", "efficiency", "link")


def main(argv: list[str]) -> None:
    """Run every number of replicas, compare with one, answer."""
    experiment = study.Experiment("scaling", ON_GPU, ON_CPU)
    choices, device = experiment.choices, "gpus" if experiment.on_gpu else "cpu_replicas"
    most = max((row.num_replicas or 1 for row in experiment.reused), default=0)
    asked = f"{most}" if most and experiment.on_gpu else choices["gpus"]
    counts = replica_counts(asked, most or choices["cpu_replicas"], experiment.machine)
    places = COLLECTIVES if experiment.on_gpu else COLLECTIVES[:1]
    points: dict[str, dict[str, Any]] = {ALONE: {"collectives": places[0], device: 1}}
    points |= {
        f"{where} {count}": {"collectives": where, device: count} for where in places for count in counts[1:]
    }
    rows = experiment.rows(points)
    rates = {name: study.rate_of(own) for name, own in rows.items()}
    efficiencies, lines = {}, []
    for name, own in rows.items():
        where, count = points[name]["collectives"], points[name][device]
        rate = rates[name]
        ratio = rate.over(rates.get(ALONE)) if rate else None
        efficiencies[name] = ratio.times(1 / count) if ratio else None
        link = own[-1].topology if own else None
        shown = efficiencies[name] if count > 1 else None
        lines.append((where, count, study.status_of(own), rate and rate.value, shown, link or ""))
    figure, (axes,) = study.canvas("Weak scaling")
    curves = {
        where: [(points[name][device], rates.get(name)) for name in points if name.startswith((ALONE, where))]
        for where in places
    }
    study.draw_lines(axes, "replicas", "samples/s", curves)
    if one := rates.get(ALONE):
        axes.plot(counts, [one.value * count for count in counts], "--", color="0.3", label="ideal")
    axes.relim()
    axes.autoscale(axis="y")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    known = {name: each for name, each in efficiencies.items() if each and name != ALONE}
    answer = "; ".join(
        f"{points[name][device]} replicas ({points[name]['collectives']}) keep "
        f"{study.spoken(each.times(100), '%')} of their rate alone"
        for name, each in known.items()
    )
    on_cpu = "" if experiment.on_gpu else " Replicas on a CPU share its cores: this says nothing of GPUs."
    experiment.finish(HEADER, lines, f"{answer or 'Nothing to compare: see the statuses'}.{on_cpu}", figure)


if __name__ == "__main__":
    study.start(main)
