"""Which card trains a model how fast?

    python experiments/gpu_generations.py --model=resnet50 --reuse=h200/runs.csv,a100/runs.csv

Nothing is run. The best good row of every card and number of GPUs in the files, by samples/s per GPU, in one
ranking with what others have published for the same model (tfbench/hardware/references.csv; other software,
other settings, never measured here: marked as published).
"""

from pathlib import Path

from tfbench import study
from tfbench.config import ConfigError
from tfbench.hardware import references
from tfbench.models import MODELS

OWN = Path(__file__).parents[1] / "results" / "h200" / "runs.csv"
HEADER = ("card", "GPUs", "origin", "per GPU, samples/s", "to the first", "precision, batch, software")


def measured(rows: list) -> list[tuple]:
    """The fastest row of each card and number of GPUs, in the columns of HEADER without the ratio."""
    best = {}
    for row in rows:
        place = (row.gpu_name, row.num_gpus)
        if place not in best or row.samples_per_sec_per_gpu > best[place].samples_per_sec_per_gpu:
            best[place] = row
    return [
        (
            name, gpus, "measured", study.rate_of([row]).times(1 / gpus),
            f"{row.precision}, {row.per_replica_batch_size}, TensorFlow {row.tensorflow}, run {row.run_id}",
        )
        for (name, gpus), row in best.items()
    ]  # fmt: skip


def published(model: str, seq_length: int | None) -> list[tuple]:
    """The fastest published result of each card and number of GPUs, in the same columns."""
    best = {}
    for each in references.load():
        if each.workload in MODELS[model].references and each.seq_length == seq_length:
            place = (each.gpu, each.n_gpu)
            if place not in best or each.per_gpu > best[place].per_gpu:
                best[place] = each
    return [
        (
            gpu, count, "published", study.Estimate(each.per_gpu),
            f"{each.precision}, {each.batch_per_gpu or '?'}, {each.framework}, {each.data} data",
        )
        for (gpu, count), each in best.items()
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    """Read, rank, answer."""
    study.refuse_flags_of_runs("reuse")
    experiment = study.Experiment("gpu_generations", {}, {}, reuse=[OWN])
    model, seq_length = experiment.choices["model"], experiment.choices["seq_length"]
    if MODELS[model].kind == "text":
        seq_length = seq_length or MODELS[model].on_gpu.seq_length
    rows = [
        row
        for row in experiment.reused
        if row.status == "ok" and row.model == model and row.num_gpus and row.seq_length == seq_length
    ]
    own = measured(rows)
    ranking = sorted([*own, *published(model, seq_length)], key=lambda line: -line[3].value)
    if not ranking:
        raise ConfigError("reuse", model, "no good row of it on a GPU, and nothing was published for it")
    first = ranking[0][3]
    lines = [(*line[:4], line[3].over(first), *line[4:]) for line in ranking]
    figure, (axes,) = study.canvas(f"{model}: samples/s per GPU (grey: published by others)", bars=len(lines))
    names = [
        f"{place}. {line[1]} × {line[0]}, {line[5].split(', ')[0]}"
        for place, line in enumerate(lines, start=1)
    ]
    study.draw_bars(axes, "samples/s per GPU", dict(zip(names, (line[3] for line in lines), strict=True)))
    for bar, line in zip(axes.patches, lines, strict=True):
        bar.set_facecolor(study.COLOURS[0] if line[2] != "published" else "0.5")
    top, others = lines[0], len(lines) - len(own)
    answer = f"First of {len(own)} measured and {others} published is {top[1]} × {top[0]} ({top[2]})."
    return experiment.finish(HEADER, lines, answer, figure)


if __name__ == "__main__":
    study.start(main)
