"""Published training results to stand beside a measured one. TensorFlow-free."""

import csv
import dataclasses
import functools
import math
import re
from importlib import resources

from tfbench.hardware import specs

# The card in specs.csv that a source means. NVIDIA's sources ran on DGX machines, which have SXM cards; a
# bare "V100" is taken for one too.
_CARD = {
    "V100": "V100-SXM2",
    "V100-16GB": "V100-SXM2",
    "V100-32GB": "V100-SXM2",
    "A100-40GB": "A100-SXM4-40GB",
    "A100-40GB-PCIe": "A100-PCIe-40GB",
    "A100-80GB": "A100-SXM4-80GB",
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "H100-PCIe": "H100-PCIe",
    "H100-SXM": "H100-SXM",
    "H200-SXM": "H200-SXM",
    "B200": "B200-SXM",
    "B200-SXM": "B200-SXM",
    "L40S": "L40S",
    "RTX-3090": "RTX-3090",
}

# tfbench's precision that a source's word comes nearest to.
_PRECISION = {
    "fp32": "fp32",
    "tf32": "tf32",
    "amp": "mixed_float16",
    "amp-fp16": "mixed_float16",
    "fp16": "mixed_float16",
    "mixed": "mixed_float16",
    "fp8-TE": "fp8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """One row of references.csv."""

    workload: str
    metric: str  # unit of `total` and `per_gpu`
    gpu: str  # as the source calls it
    n_gpu: int
    precision: str  # as the source calls it
    batch_per_gpu: str  # as the source writes it, e.g. "256", "48x2", "5 (accum 11)"; "" if unknown
    framework: str
    data: str  # "real" or "synthetic"
    total: float
    per_gpu: float
    source: str

    @property
    def card(self) -> str:
        """The card's name in specs.csv."""
        return _CARD[self.gpu]

    @property
    def precision_class(self) -> str:
        """The nearest of tfbench's precisions, or "fp8"."""
        return _PRECISION[self.precision]

    @property
    def micro_batch_size(self) -> int | None:
        """Samples per GPU and micro-batch: the number that `batch_per_gpu` starts with."""
        number = re.match(r"\d+", self.batch_per_gpu)
        return None if number is None else int(number[0])

    @property
    def seq_length(self) -> int | None:
        """Tokens per sequence, from the workload's name; None for images and packed sequences."""
        number = re.search(r"seq(\d+)", self.workload)
        return None if number is None else int(number[1])


@functools.cache
def load() -> tuple[Reference, ...]:
    """Every row of references.csv.

    Raises:
        ValueError: A cell is not of its column's kind.
    """
    text = resources.files("tfbench.hardware").joinpath("references.csv").read_text(encoding="utf-8")
    return tuple(_reference(row) for row in csv.DictReader(text.splitlines()))


def _reference(row: dict[str, str]) -> Reference:
    numbers = {"n_gpu": int(row["n_gpu"]), "total": float(row["total"]), "per_gpu": float(row["per_gpu"])}
    return Reference(**{**row, **numbers})  # type: ignore[arg-type]


def nearest(
    workloads: tuple[str, ...],
    gpu_name: str | None,
    precision: str,
    num_gpus: int,
    seq_length: int | None,
    *,
    per_replica_batch_size: int | None = None,
    data: str = "synthetic",
) -> tuple[Reference, list[str]] | None:
    """The published result that comes nearest to a run, and in words what is different about it.

    In this order: the same card (or the one with the nearest peak), the same number of GPUs, the same
    precision, the workload named first, TensorFlow, the higher rate, the nearest batch: to stand beside a
    slow result because its batch is nearer would flatter the run.

    Args:
        workloads: Names of references.csv that are the run's model, the nearest first.
        gpu_name: The card's NVML name.
        precision: tfbench's name.
        num_gpus: GPUs of the run; a CPU run (0) has no reference.
        seq_length: Tokens; another length is another workload and never compared. None for images.
        per_replica_batch_size: Samples per GPU and micro-batch, if it should count.
        data: The run's data; everything but "synthetic" is real.

    Returns:
        None where nothing comparable was published.
    """
    candidates = [r for r in load() if r.workload in workloads and r.seq_length == seq_length]
    if not candidates or num_gpus < 1:
        return None
    spec = specs.find(gpu_name)

    def distance(reference: Reference) -> tuple[float, ...]:
        return (
            _card_distance(reference, spec),
            abs(math.log(reference.n_gpu / num_gpus)),
            _precision_distance(reference, precision),
            workloads.index(reference.workload),
            not _is_tensorflow(reference),
            -reference.per_gpu,
            _batch_distance(reference, per_replica_batch_size),
        )

    best = min(candidates, key=distance)
    differences = [
        *_card_difference(best, spec),
        *_run_differences(best, precision, num_gpus, per_replica_batch_size, data),
        *([f"workload {best.workload}"] if best.workload != workloads[0] else []),
    ]
    return best, differences


def _card_distance(reference: Reference, spec: specs.GpuSpec | None) -> float:
    """0 for the same card; for another one 1 and more, growing with the ratio of the half-precision peaks."""
    theirs = next(s for s in specs.load() if s.gpu == reference.card)
    if spec is None or spec.fp16_tflops is None or theirs.fp16_tflops is None:
        return math.inf
    if spec.gpu == theirs.gpu:
        return 0.0
    return 1.0 + abs(math.log(theirs.fp16_tflops / spec.fp16_tflops))


def _precision_distance(reference: Reference, precision: str) -> int:
    """0 for the same precision, 1 for the other 16-bit one, 2 for the rest."""
    if reference.precision_class == precision:
        return 0
    return 1 if (reference.precision_class, precision) == ("mixed_float16", "mixed_bfloat16") else 2


def _batch_distance(reference: Reference, batch_size: int | None) -> float:
    if batch_size is None:
        return 0.0
    theirs = reference.micro_batch_size
    return math.inf if theirs is None else abs(math.log(theirs / batch_size))


def _is_tensorflow(reference: Reference) -> bool:
    return reference.framework.lower().startswith("tf")


def _card_difference(reference: Reference, spec: specs.GpuSpec | None) -> list[str]:
    same = spec is not None and spec.gpu == reference.card
    return [] if same else [f"another card: {reference.gpu}"]


def _run_differences(
    reference: Reference, precision: str, num_gpus: int, batch_size: int | None, data: str
) -> list[str]:
    """What is different in the software and its settings."""
    differences = []
    if not _is_tensorflow(reference):
        differences.append(f"{reference.framework}, not TensorFlow")
    elif not reference.framework.startswith("TF2"):
        differences.append(f"an older TensorFlow: {reference.framework}")
    if reference.n_gpu != num_gpus:
        differences.append(f"{reference.n_gpu} GPU{'s, per GPU' if reference.n_gpu > 1 else ''}")
    if reference.precision_class != precision:
        differences.append(f"another precision: {reference.precision}")
    if batch_size is not None and reference.micro_batch_size != batch_size:
        differences.append(f"batch {reference.batch_per_gpu or 'unknown'} per GPU")
    if (reference.data == "synthetic") != (data == "synthetic"):
        differences.append(f"{reference.data} data")
    return differences
