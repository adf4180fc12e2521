"""At which batch does mixed precision pay, and where does it stop?

    python experiments/batch_size.py --gpus=1 --batches=8,32,128,512

Every batch in single precision (TF32 where the device has it) and in mixed precision. In practice the gain
grows with the batch: a small one leaves the matrix units waiting for the host and for memory.
"""

from absl import flags

from tfbench import study

ON_GPU = {"model": "resnet50", "gpus": "1", **study.GPU_STEPS}
ON_CPU = {"model": "resnet_tiny", **study.CPU_STEPS}
HEADER = ("batch", "precision", "status", "samples/s", "ratio", "memory, GiB")

BATCHES = flags.DEFINE_list("batches", None, "Per-replica batches. Default: 8 to 512 on a GPU, 4 to 16 not.")
SINGLE = flags.DEFINE_enum("single", None, ["fp32", "tf32"], "Compared with. Default: tf32 on a GPU.")
MIXED = flags.DEFINE_enum("mixed", "mixed_float16", ["mixed_float16", "mixed_bfloat16"], "What may pay.")


def main(argv: list[str]) -> int:
    """Run both precisions at every batch, compare, answer."""
    experiment = study.Experiment("batch_size", ON_GPU, ON_CPU)
    single = SINGLE.value or ("tf32" if experiment.on_gpu else "fp32")
    default = (8, 32, 128, 512) if experiment.on_gpu else (4, 16)
    batches = [int(batch) for batch in study.numbers(BATCHES, default)]
    points = {
        f"batch {batch} {precision}": {"per_replica_batch_size": batch, "precision": precision}
        for batch in batches
        for precision in (single, MIXED.value)
    }
    rows = experiment.rows(points)
    rates = {name: study.rate_of(own) for name, own in rows.items()}
    ratios, lines = {}, []
    for name, own in rows.items():
        batch, precision = points[name]["per_replica_batch_size"], points[name]["precision"]
        rate = rates[name]
        ratio = rate.over(rates.get(f"batch {batch} {single}")) if rate else None
        if precision == MIXED.value:
            ratios[batch] = ratio
        memory = study.mean_of(own, "peak_memory_gib")
        lines.append((batch, precision, study.status_of(own), rate and rate.value, ratio, memory))
    figure, (speed, gain) = study.canvas("Mixed precision against the batch", panels=2)
    curves = {
        precision: [(batch, rates.get(f"batch {batch} {precision}")) for batch in batches]
        for precision in (single, MIXED.value)
    }
    study.draw_lines(speed, "samples a replica sees in a step", "samples/s", curves)
    study.draw_lines(
        gain, "samples a replica sees in a step", "ratio", {f"{MIXED.value} ÷ {single}": list(ratios.items())}
    )
    gain.axhline(1, color="0.5", linestyle="--")
    return experiment.finish(HEADER, lines, answer(ratios, single, MIXED.value), figure)


def answer(ratios: dict[int, study.Estimate | None], single: str, mixed: str) -> str:
    """Where it pays: a ratio whose whole interval is above 1, or the ratio where there is none."""
    pays = [batch for batch, r in ratios.items() if r and (r.value if r.low is None else r.low) > 1]
    known = {batch: ratio for batch, ratio in ratios.items() if ratio}
    if not known:
        return "Nothing to compare: see the statuses."
    best = max(known, key=lambda batch: known[batch].value)
    where = f"from batch {min(pays)}" if pays else "at none of these batches"
    return (
        f"{mixed} pays {where}; at its best, batch {best}, it is {study.spoken(known[best])} {single}'s rate."
    )


if __name__ == "__main__":
    study.start(main)
