"""What a micro-benchmark is made of: a case, its result, and why there is none. TensorFlow-free."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfbench.hardware.cards import CardFacts
from tfbench.hardware.gpus import Gpu
from tfbench.hardware.specs import GpuSpec
from tfbench.measure.timing import Window

CONFIDENCE = 0.95


class NotPossibleError(Exception):
    """Why a case has no figure: what the card or TensorFlow cannot do, or what was not reached."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the cases run on.

    Attributes:
        devices: TensorFlow's names: the GPUs, or logical CPU devices.
        gpus: the same as NVML knows them; empty on the CPU.
        quick: fewer and shorter cases.
    """

    devices: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    spec: GpuSpec | None
    card: CardFacts | None
    topology: str | None
    quick: bool

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return bool(self.gpus)

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Of the first GPU; None without one, and where the driver does not say."""
        return self.gpus[0].compute_capability if self.gpus else None

    def seconds(self, full: float) -> float:
        """How long to measure what deserves `full` seconds on a GPU."""
        return min(full, 0.1) if not self.on_gpu else full * (0.5 if self.quick else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a case found.

    Attributes:
        rates: one for each window, in `unit`.
        windows: the same, for the sensors' readings inside them.
        peak: data-sheet limit in `unit`; None where unknown.
        relative_error: of the outputs against float64; None where nothing is computed.
        bound: the largest error that rounding explains.
        gb_per_s: bytes that must move at least ÷ time, 10⁹ bytes.
        flop_per_byte: FLOP ÷ those bytes.
        evidence: which unit or program did it, and how that is known.
    """

    rates: tuple[float, ...]
    unit: str
    windows: tuple[Window, ...] = ()
    peak: float | None = None
    relative_error: float | None = None
    bound: float | None = None
    gb_per_s: float | None = None
    flop_per_byte: float | None = None
    evidence: str = ""
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the outputs are further from the truth than rounding explains."""
        return self.relative_error is not None and not self.relative_error <= (self.bound or 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One figure to be measured.

    Attributes:
        benchmark: matmul, conv, memory, all_reduce, input or launch.
        name: what, in this benchmark.
        engine: "library" (TensorFlow's own operations) or "xla" (compiled).
        facts: cells of its row that differ from those of the machine, such as num_gpus.
        measure: does it; raises NotPossibleError where it cannot be done.
    """

    benchmark: str
    name: str
    precision: str = ""
    engine: str = "library"
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    measure: Callable[[], Result]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("no window was timed: there is no median")
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics that holds the median in at least 95 % of cases.

    Whatever the distribution, each value lies below its median with probability 1/2, so the interval from
    the k-th smallest to the k-th largest of n misses it with probability 2 Σ_{i<k} C(n, i) / 2ⁿ.

    Returns:
        None with fewer than six values, whose whole range holds it too rarely.
    """
    ordered, count = sorted(values), len(values)
    best, missed = 0, 0.0
    for rank in range(1, count // 2 + 1):
        missed += 2 * math.comb(count, rank - 1) / 2**count
        if missed > 1 - CONFIDENCE:
            break
        best = rank
    return (ordered[best - 1], ordered[-best]) if best else None
