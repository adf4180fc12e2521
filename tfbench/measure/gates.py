"""Plausibility gates: what makes a measured row doubtful. They mark a row and never drop it."""

import dataclasses
import math
from collections.abc import Callable, Sequence

# Clock-event reasons of NVML (nvmlClocksEventReason*) that come from heat or power. Idle, application clocks,
# sync boost and display clocks are choices, not a card that cannot keep its clock.
_HEAT_OR_POWER = frozenset(
    {
        "sw_power_cap",
        "hw_slowdown",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    }
)


# Precisions whose matrix products run on tensor cores wherever a card has them.
_ON_TENSOR_CORES = frozenset({"tf32", "mixed_float16", "mixed_bfloat16"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What the gates look at. None is unknown, and the unknown never trips a gate."""

    weak_scaling_efficiency: float | None = None
    strong_scaling_efficiency: float | None = None
    mfu: float | None = None
    mfu_achievable: float | None = None
    precision: str | None = None
    measured_steps: int | None = None  # steps counted inside the windows
    measured_samples: int | None = None  # samples of all replicas counted inside the windows
    global_batch_size: int | None = None
    total_steps: int | None = None  # steps run since the optimizer was built, warm-up included
    optimizer_iterations: int | None = None  # the optimizer's own counter after these steps
    steps_skipped: int | None = None  # of these steps, updates dropped for a gradient that is not finite
    losses: Sequence[float | None] | None = None  # reported losses, such as one per window
    weights_finite: bool | None = None
    weights_changed: bool | None = None  # any weight differs from its initial value
    replicas_agree: bool | None = None  # every replica's copy of each weight is the same
    retraces_in_windows: int | None = None
    throttle_reasons: str | None = None  # NVML's reasons inside the windows, joined by "|"
    other_process_on_gpu: bool | None = None
    sm_clock_mhz_mean: float | None = None  # inside the windows
    sm_clock_mhz_max: float | None = None  # the highest the card allows
    gpu_util_mean: float | None = None  # percent, inside the windows
    tensor_active: float | None = None  # share, inside the windows
    step_time_difference: float | None = None  # see tfbench.measure.statistics
    ecc_errors: int | None = None  # uncorrected, during the run


@dataclasses.dataclass(frozen=True)
class _Gate:
    name: str
    trips: Callable[[Facts], bool]
    explanation: str


def _any_above(values: Sequence[float | None], limit: float) -> bool:
    return any(value is not None and value > limit for value in values)


def _samples_mismatch(facts: Facts) -> bool:
    if facts.measured_samples is None or facts.measured_steps is None or facts.global_batch_size is None:
        return False
    return facts.measured_samples != facts.measured_steps * facts.global_batch_size


def _steps_mismatch(facts: Facts) -> bool:
    if facts.optimizer_iterations is None or facts.total_steps is None or facts.steps_skipped is None:
        return False
    return facts.optimizer_iterations != facts.total_steps - facts.steps_skipped


def _steps_skipped(facts: Facts) -> bool:
    if facts.steps_skipped is None or not facts.total_steps:
        return False
    return facts.steps_skipped > max(1, 0.02 * facts.total_steps)  # one is how a loss scale is found


def _clocks_below_90_percent(facts: Facts) -> bool:
    if facts.sm_clock_mhz_mean is None or facts.sm_clock_mhz_max is None:
        return False
    return facts.sm_clock_mhz_mean < 0.9 * facts.sm_clock_mhz_max


def _busy_without_tensor_cores(facts: Facts) -> bool:
    if facts.gpu_util_mean is None or facts.tensor_active is None or facts.precision is None:
        return False
    return facts.gpu_util_mean >= 50 and facts.tensor_active < 0.01 and facts.precision in _ON_TENSOR_CORES


_GATES = (
    _Gate(
        "efficiency_above_105_percent",
        lambda f: _any_above((f.weak_scaling_efficiency, f.strong_scaling_efficiency), 1.05),
        "More than 105 % scaling efficiency: the one-GPU baseline was slow or not comparable.",
    ),
    _Gate(
        "mfu_above_1",
        lambda f: _any_above((f.mfu,), 1.0),
        "More FLOP/s than the card's peak: the peak, the FLOPs per sample or the timing is wrong.",
    ),
    _Gate(
        "mfu_above_achievable",
        lambda f: _any_above((f.mfu_achievable,), 1.0),
        "More FLOP/s than a matrix product reaches on this machine: that product, the FLOPs per sample or "
        "the timing is wrong.",
    ),
    _Gate(
        "time_not_linear_in_steps",
        lambda f: _any_above((f.step_time_difference,), 0.1),
        "Step times of earlier and later, or of shorter and longer windows differ by more than 10 %: the "
        "rate depends on how long was measured.",
    ),
    _Gate(
        "samples_mismatch",
        _samples_mismatch,
        "Samples counted in the windows are not steps times global batch: the data ran short or were split "
        "unevenly.",
    ),
    _Gate(
        "steps_mismatch",
        _steps_mismatch,
        "The optimizer's iterations are not the steps run less those skipped: the state was updated once per "
        "replica, or not at all.",
    ),
    _Gate(
        "steps_skipped",
        _steps_skipped,
        "More than 2 % of the steps were skipped because a gradient was not finite: the loss scale began too "
        "high for so short a run, or a kernel computes wrongly.",
    ),
    _Gate(
        "loss_not_finite",
        lambda f: any(loss is not None and not math.isfinite(loss) for loss in f.losses or ()),
        "A reported loss is NaN or infinite: the training diverged or overflowed.",
    ),
    _Gate(
        "weights_not_finite",
        lambda f: f.weights_finite is not None and not f.weights_finite,
        "A weight is NaN or infinite after the run: the steps trained nothing.",
    ),
    _Gate(
        "weights_unchanged",
        lambda f: f.weights_changed is not None and not f.weights_changed,
        "No weight changed during the run: the steps trained nothing.",
    ),
    _Gate(
        "replicas_differ",
        lambda f: f.replicas_agree is not None and not f.replicas_agree,
        "A weight differs between replicas after the run: their gradients were not summed, or not applied "
        "alike.",
    ),
    _Gate(
        "retrace_in_window",
        lambda f: _any_above((f.retraces_in_windows,), 0),
        "The step was traced or compiled again inside a timed window: the time holds a compilation.",
    ),
    _Gate(
        "throttled",
        lambda f: not _HEAT_OR_POWER.isdisjoint((f.throttle_reasons or "").split("|")),
        "The GPU lowered its clock for heat or power inside the windows.",
    ),
    _Gate(
        "other_process_on_gpu",
        lambda f: bool(f.other_process_on_gpu),
        "Another process used the GPU: the rate is that of a shared card.",
    ),
    _Gate(
        "clocks_below_90_percent",
        _clocks_below_90_percent,
        "The mean SM clock inside the windows was below 90 % of the highest the card allows.",
    ),
    _Gate(
        "busy_without_tensor_cores",
        _busy_without_tensor_cores,
        "The GPU was busy but its tensor cores were not, in a precision that runs on them: the matrix "
        "products ran elsewhere, or not at all.",
    ),
    _Gate(
        "ecc_errors",
        lambda f: _any_above((f.ecc_errors,), 0),
        "The GPU's memory had errors during the run that could not be corrected: results may be wrong.",
    ),
)

EXPLANATIONS: dict[str, str] = {gate.name: gate.explanation for gate in _GATES}
"""Every gate's name and the sentence that says what it means, in the order of `evaluate`."""


def evaluate(facts: Facts) -> tuple[str, ...]:
    """Names of the gates that `facts` trip, in the order of `EXPLANATIONS`; empty where none does."""
    return tuple(gate.name for gate in _GATES if gate.trips(facts))
