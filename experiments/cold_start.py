"""How long until the first step, and what does a second start of the same run save?

    python experiments/cold_start.py --gpus=1

Two fresh processes of one configuration, one after the other. The caches of compiled programs (tfbench's and
the driver's) begin empty, in a folder of this experiment; files stay in the system's page cache. Where
tfbench ships what XLA's tuning finds, the first start uses it and its state is "tuned", not "cold"; with
--nocompile_cache both starts are without it and without tfbench's cache.
"""

import os

from tfbench import study

ON_GPU = {"model": "resnet50", "gpus": "1", **study.GPU_STEPS, "steps": 20, "windows": 2}
ON_CPU = {"model": "resnet_tiny", "xla": True, "per_replica_batch_size": 8, **study.CPU_STEPS}
HEADER = ("start", "status", "cache", "to the first step, s", "of it compiling, s", "ratio to the first")


def main(argv: list[str]) -> int:
    """Run twice, compare, answer."""
    experiment = study.Experiment("cold_start", ON_GPU, ON_CPU, own_folder=True)
    caches = os.path.abspath(experiment.folder / "caches")
    os.environ |= {"XDG_CACHE_HOME": caches, "CUDA_CACHE_PATH": os.path.join(caches, "cuda")}
    (rows,) = experiment.rows({"start": {}}, least_repeats=2).values()
    good = [row for row in rows if row.status == "ok" and row.time_to_first_step_s is not None]
    good.sort(key=lambda row: row.started_at or "")
    lines, bars = [], {}
    for number, row in enumerate(good, start=1):
        name = f"start {number} ({row.cache_state or 'no cache'})"
        bars[name] = study.Estimate(row.time_to_first_step_s)
        ratio = row.time_to_first_step_s / good[0].time_to_first_step_s
        lines.append(
            (number, row.status, row.cache_state, row.time_to_first_step_s, row.compile_time_s, ratio)
        )
    lines += [("", row.status, row.note, None, None, None) for row in rows if row not in good]
    figure, (axes,) = study.canvas("From the start of the build to the end of the first step", bars=len(bars))
    study.draw_bars(axes, "s", bars)
    answer = "There are no two good starts to compare: see the statuses."
    if len(good) > 1:
        first_s, second_s = (row.time_to_first_step_s for row in good[:2])
        answer = (
            f"The first start ({good[0].cache_state or 'no cache'}) needs {first_s:.1f} s to its first step, "
            f"the second ({good[1].cache_state or 'no cache'}) {second_s:.1f} s: "
            f"{second_s / first_s:.2f} times; one pair of starts, so without an interval."
        )
    return experiment.finish(HEADER, lines, answer, figure)


if __name__ == "__main__":
    study.start(main)
