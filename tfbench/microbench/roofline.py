"""The roofline of the card: measured and data-sheet limits, and where models' steps stand."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfbench.hardware.specs import GpuSpec
from tfbench.microbench.matmul import FORMAT_OF_TRAINING, SIZE, SIZE_ON_CPU, peak_of
from tfbench.microbench.rows import MicroRow
from tfbench.records import RunRecord

_MODELS = ("resnet50", "bert_large", "bert_base")
INTENSITIES = (0.25, 8192.0)  # FLOP per byte, left and right edge
CEILING_CASES = tuple("x".join([str(size)] * 3) for size in (SIZE, SIZE_ON_CPU))


@dataclasses.dataclass(frozen=True)
class Step:
    """A model's training step on the picture."""

    label: str
    number_format: str | None  # of its products
    flop_per_byte: float  # FLOP of the model ÷ bytes that its memory really moved
    tflops: float


@dataclasses.dataclass(frozen=True)
class Roofs:
    """Measured limits: of the memory in GB/s, None where not measured; of each number format in TFLOP/s."""

    gb_per_s: float | None
    tflops: dict[str, float]


def roofs(measured: Sequence[MicroRow]) -> Roofs:
    """The best memory rate and the best square product of each floating-point format."""
    bandwidths = [
        row.rate
        for row in measured
        if row.benchmark == "memory" and row.case in ("copy", "triad") and row.rate
    ]
    tflops: dict[str, float] = {}
    for row in measured:
        if row.benchmark != "matmul" or row.case not in CEILING_CASES or row.unit == "TOP/s":
            continue
        if row.rate and row.precision:
            tflops[row.precision] = max(row.rate, tflops.get(row.precision, 0.0))
    return Roofs(max(bandwidths, default=None), tflops)


def attainable_tflops(flop_per_byte: float, gb_per_s: float, tflops: float) -> float:
    """What a program of this intensity can reach: the memory's limit or the units', whichever is lower."""
    return min(flop_per_byte * gb_per_s / 1e3, tflops)


def steps(
    runs: Sequence[RunRecord], gpu_name: str | None, spec: GpuSpec | None
) -> tuple[list[Step], list[str]]:
    """Where models stand, by the memory traffic that the card counted, and why others do not.

    Bytes are dram_active × the data sheet's bandwidth. Bytes that a model needs by its shapes are not used:
    what XLA fuses decides them, so a point would be the guess and not the run.

    Args:
        runs: rows of runs.csv.
        gpu_name: only rows of this card count.
        spec: its data sheet.

    Returns:
        The newest good row of each model and precision, and a sentence for each model that has none.
    """
    if gpu_name is None:
        return [], ["no model is placed: a CPU does not count its memory's traffic"]
    found, sentences = [], []
    for model in _MODELS:
        alike = [
            row for row in runs if row.model == model and row.status == "ok" and row.gpu_name == gpu_name
        ]
        usable = [row for row in alike if row.dram_active and row.tflops_per_gpu]
        if spec is None or spec.mem_bw_gbs is None:
            sentences.append(f"{model} is not placed: the card's memory bandwidth is not in the data sheets")
        elif not usable:
            lack = "no row counts the memory's traffic (dram_active)" if alike else "no good row of this card"
            sentences.append(f"{model} is not placed: {lack} is in the runs.csv that was read")
        else:
            newest = {row.precision: row for row in sorted(usable, key=lambda row: row.started_at or "")}
            found += [_step(row, spec.mem_bw_gbs) for row in newest.values()]
    return found, sentences


def _step(row: RunRecord, mem_bw_gbs: float) -> Step:
    assert row.dram_active is not None
    assert row.tflops_per_gpu is not None
    gb_per_s = row.dram_active * mem_bw_gbs
    label = f"{row.model}, batch {row.per_replica_batch_size}, {row.precision}"
    return Step(
        label,
        FORMAT_OF_TRAINING.get(row.precision or ""),
        1e3 * row.tflops_per_gpu / gb_per_s,
        row.tflops_per_gpu,
    )


def draw(
    path: Path, measured: Sequence[MicroRow], placed: Sequence[Step], spec: GpuSpec | None, title: str
) -> bool:
    """Writes the picture.

    Args:
        path: PNG file.
        measured: rows of this run.
        placed: steps of models.
        spec: the card's data sheet, drawn dashed.
        title: of the picture.

    Returns:
        False where the memory's or every format's rate is missing, so that there is no roof.
    """
    limits = roofs(measured)
    if limits.gb_per_s is None or not limits.tflops:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte of device memory", ylabel="TFLOP/s", title=title
    )
    _draw_roofs(axes, limits, spec)
    for benchmark, marker in (("matmul", "s"), ("conv", ".")):
        points = [
            (row.flop_per_byte, row.rate)
            for row in measured
            if row.benchmark == benchmark and row.flop_per_byte and row.rate and row.unit == "TFLOP/s"
        ]
        for place, point in enumerate(points):
            label = None if place else f"{benchmark} cases, least bytes"
            axes.plot(*point, marker, color="0.6", label=label, zorder=1)
    for step in placed:
        axes.plot([step.flop_per_byte], [step.tflops], "*", markersize=14, label=step.label)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True


def _draw_roofs(axes: Any, limits: Roofs, spec: GpuSpec | None) -> None:
    """Measured roofs in full lines, the data sheet's dashed, a colour for each number format."""
    assert limits.gb_per_s is not None
    intensities = np.geomspace(*INTENSITIES, 200)

    def roof(gb_per_s: float, tflops: float) -> list[float]:
        return [attainable_tflops(float(each), gb_per_s, tflops) for each in intensities]

    for place, (precision, tflops) in enumerate(sorted(limits.tflops.items(), key=lambda item: -item[1])):
        colour = f"C{place % 10}"
        label = f"{precision}: {tflops:,.3g} TFLOP/s, {limits.gb_per_s:,.4g} GB/s measured"
        axes.plot(intensities, roof(limits.gb_per_s, tflops), color=colour, label=label)
        peak = peak_of(spec, precision)
        if spec is not None and spec.mem_bw_gbs and peak:
            axes.plot(intensities, roof(spec.mem_bw_gbs, peak), "--", color=colour, linewidth=0.8)
    lowest = attainable_tflops(INTENSITIES[0], limits.gb_per_s, math.inf)
    axes.set_ylim(bottom=lowest / 2)
