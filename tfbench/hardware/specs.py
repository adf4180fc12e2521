"""Data-sheet figures of GPUs by their NVML name. TensorFlow-free.

`specs.csv` holds NVIDIA's data sheets: dense rates (no sparsity), half precision with float32 accumulation.
"""

import csv
import dataclasses
import functools
from importlib import resources

# Which data-sheet rate is the peak of a training precision: what its matrix products run on.
_PEAK_FIELD = {
    "fp32": "fp32_tflops",
    "tf32": "tf32_tflops",
    "mixed_float16": "fp16_tflops",
    "mixed_bfloat16": "bf16_tflops",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One row of specs.csv; None where the data sheet has no such figure."""

    gpu: str  # short name
    nvml_names: tuple[str, ...]  # what nvmlDeviceGetName says, over the driver's releases
    fp32_tflops: float | None
    tf32_tflops: float | None
    fp16_tflops: float | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    fp64_tflops: float | None
    fp64_tensor_tflops: float | None
    mem_gb: tuple[float, ...]  # 10^9 bytes, of each variant
    mem_bw_gbs: float | None  # 10^9 bytes/s
    nvlink_gbs_bidir: float | None  # 10^9 bytes/s, both directions together
    nvlinks: float | None  # links that carry them, as the generation's link rate and the total say
    pcie: str  # generation and lanes, e.g. "5.0x16"
    tdp_w: float | None
    note: str


@functools.cache
def load() -> tuple[GpuSpec, ...]:
    """Every row of specs.csv.

    Raises:
        ValueError: A cell is not of its column's kind.
    """
    text = resources.files("tfbench.hardware").joinpath("specs.csv").read_text(encoding="utf-8")
    return tuple(_spec(row) for row in csv.DictReader(text.splitlines()))


def _spec(row: dict[str, str]) -> GpuSpec:
    number = {
        column: float(cell) if cell else None
        for column, cell in row.items()
        if column not in ("gpu", "nvml_names", "mem_gb", "pcie", "note")
    }
    return GpuSpec(
        gpu=row["gpu"],
        nvml_names=tuple(row["nvml_names"].split("|")),
        mem_gb=tuple(float(cell) for cell in row["mem_gb"].split("|")),
        pcie=row["pcie"],
        note=row["note"],
        **number,
    )


def find(nvml_name: str | None) -> GpuSpec | None:
    """The data sheet of a card.

    Args:
        nvml_name: What NVML calls it. Only the exact name counts, upper and lower case aside: a card that
            only looks alike (A100 and A100X, H200 and H200 NVL) has another peak.

    Returns:
        None for an unknown card and for a MIG instance, which has only a part of the card's peak.
    """
    if nvml_name is None:
        return None
    wanted = nvml_name.casefold()
    return next((spec for spec in load() if wanted in map(str.casefold, spec.nvml_names)), None)


def peak_flops(spec: GpuSpec, precision: str) -> float | None:
    """Dense peak of one GPU in FLOP/s, 1 MAC = 2 FLOPs; None where the card has no unit for it.

    Args:
        spec: The card's data sheet.
        precision: fp32, tf32, mixed_float16 or mixed_bfloat16.

    Raises:
        ValueError: Another precision.
    """
    if precision not in _PEAK_FIELD:
        raise ValueError(f"precision {precision!r} has no peak: known are {', '.join(_PEAK_FIELD)}")
    tflops: float | None = getattr(spec, _PEAK_FIELD[precision])
    return None if tflops is None else tflops * 1e12
