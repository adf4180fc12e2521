"""How much faster do several GPUs train?

    python experiments/scaling.py --modes=weak,strong --precisions=mixed_float16,mixed_bfloat16

Weak scaling: the same batch on each of 1, 2, 4, … replicas; strong: the batch of one dealt out to them. Both
against as many times the rate of one, which has nothing to sum. On GPUs with the all-reduce between the
compiled programs, in the second one, and in one program. The most replicas are run first.
"""

import itertools
from typing import Any, NamedTuple

from absl import flags

from tfbench import study
from tfbench.config import COLLECTIVES, SCALING_MODES
from tfbench.precision import PRECISIONS
from tfbench.study import Estimate
from tfbench.sweeping import scaling

# After each window the host starts anew: two GPUs stand still for some 15 ms (ResNet-50; BERT-large 25),
# one for 3 to 5, so that windows of ten steps take 2 % from two of them.
ON_GPU = {"model": "resnet50", "diagnose": True, **study.GPU_STEPS, "steps": 200, "windows": 5}
ON_CPU = {
    "model": "resnet_tiny", "gpus": "0", "cpu_replicas": 2, "per_replica_batch_size": 8, **study.CPU_STEPS,
}  # fmt: skip
ALONE = "alone"
HEADER = (
    "mode", "precision", "collectives", "replicas", "status", "samples/s", "efficiency",
    "exposed all-reduce, ms", "link",
)  # fmt: skip
MODES = flags.DEFINE_list("modes", "weak", "Some of weak, strong.")
FORMATS = flags.DEFINE_list("precisions", None, "Some of those of --precision, which is the default.")
PLACES = flags.DEFINE_list("places", None, "Some of those of --collectives. Default: all on GPUs.")


class Spot(NamedTuple):
    """A point; `where` is ALONE or one of COLLECTIVES."""

    mode: str
    precision: str
    where: str
    replicas: int


def points_of(experiment: study.Experiment) -> dict[Spot, dict[str, Any]]:
    """Choices of each point in the order of the runs.

    Raises:
        ConfigError: a flag's value is not possible.
    """
    choices, device = experiment.choices, "gpus" if experiment.on_gpu else "cpu_replicas"
    most = max((row.num_replicas or 1 for row in experiment.reused), default=0)
    asked = f"{most}" if most and experiment.on_gpu else choices["gpus"]
    counts = scaling.replica_counts(asked, most or choices["cpu_replicas"], experiment.machine)
    places = study.some_of(PLACES, COLLECTIVES, COLLECTIVES if experiment.on_gpu else COLLECTIVES[:1])
    formats = study.some_of(FORMATS, PRECISIONS, [choices["precision"]])
    points = {}
    for precision, mode in itertools.product(formats, study.some_of(MODES, SCALING_MODES)):
        base = {"scaling_mode": mode, "precision": precision, "collectives": COLLECTIVES[0]}
        alone = base | {device: 1, "diagnose": False}
        if (single := experiment.example(alone)) is None:
            continue
        base["precision"], batch = single.precision, single.per_replica_batch_size
        points[Spot(mode, single.precision, ALONE, 1)] = alone
        for count, where in itertools.product(reversed(counts[1:]), places):
            each = scaling.share(batch, count) if mode == "strong" else batch
            own = {"collectives": where, device: count, "per_replica_batch_size": each}
            points[Spot(mode, single.precision, where, count)] = base | own
    return points


def efficiency(rate: Estimate | None, alone: Estimate | None, replicas: int) -> Estimate | None:
    """Share of `replicas` times the rate of one; strong scaling's t₁ ÷ (N tₙ) is the same ratio."""
    ratio = rate.over(alone) if rate else None
    return ratio.times(1 / replicas) if ratio else None


def draw(axes: Any, shares: dict[Spot, Estimate | None]) -> None:
    """A mode's panel: how many times the rate of one replica."""
    curves: dict[str, list[tuple[int, Estimate | None]]] = {}
    for spot in (spot for spot in shares if spot.where != ALONE):
        curve = curves.setdefault(f"{spot.precision}, {spot.where}", [(1, Estimate(1.0))])
        curve.append((spot.replicas, shares[spot] and shares[spot].times(spot.replicas)))
    study.draw_lines(axes, "replicas", "times the rate of one", curves)
    counts = sorted({spot.replicas for spot in shares})
    axes.plot(counts, counts, "--", color="0.3", label="ideal")
    axes.set(title=min(shares).mode, ylim=(0, 1.1 * counts[-1]))
    axes.legend(frameon=False)


def main(argv: list[str]) -> int:
    """Run every number of replicas, compare with one, answer."""
    experiment = study.Experiment("scaling", ON_GPU, ON_CPU)
    points = points_of(experiment)
    rows = experiment.rows({" ".join(map(str, spot)): choices for spot, choices in points.items()})
    rates, shares, lines = {}, {}, []
    for spot in sorted(points, key=lambda spot: (spot.mode != "weak", spot)):
        own = rows.get(" ".join(map(str, spot)), [])
        rate = rates[spot] = study.rate_of(own)
        shares[spot] = efficiency(rate, rates[spot._replace(where=ALONE, replicas=1)], spot.replicas)
        exposed, link = study.estimate_of(own, "exposed_communication_ms"), own[-1].topology if own else None
        lines.append((*spot, study.status_of(own), rate and rate.value, shares[spot], exposed, link))
    modes = list(dict.fromkeys(spot.mode for spot in shares))
    figure, panels = study.canvas("Scaling", len(modes))
    for mode, axes in zip(modes, panels, strict=True):
        draw(axes, {spot: share for spot, share in shares.items() if spot.mode == mode})
    known = sorted(
        (s for s in shares if shares[s] and s.where != ALONE), key=lambda s: (s[3], shares[s].value)
    )
    answer = "; ".join(
        f"{spot.replicas} replicas ({spot.mode}, {spot.precision}, {spot.where}) keep "
        f"{study.spoken(shares[spot].times(100), '%')} of their rate alone"
        for spot in {spot[:2]: spot for spot in known}.values()  # of each the most replicas, at their best
    )
    on_cpu = "" if experiment.on_gpu else " Replicas on a CPU share its cores: this says nothing of GPUs."
    return experiment.finish(
        HEADER, lines, f"{answer or 'Nothing to compare: see the statuses'}.{on_cpu}", figure
    )


if __name__ == "__main__":
    study.start(main)
