"""Where a step's time goes, and what holds a run back: arithmetic and rules, no device.

A diagnosed run is measured in variants that each leave one thing out. With s(v) the step time of a variant:

    input wait             s(as is) − s(resident batch)
    host gap               h · r, from s(r rows a step) = c + h · r, measured at the run's r and at another
    exposed communication  s(resident batch) − s(no all-reduce)
    compute                what is left of s(as is)
"""

import dataclasses
import math
from collections.abc import Sequence

from tfbench.measure import statistics
from tfbench.measure.timing import Window

# A part of a step from this share on is worth a user's time before anything else is.
WORTH_SHARE = 0.10
# Below this the multiprocessors wait for work most of the time, whatever NVML's "utilisation" says.
IDLE_SM_SHARE = 0.5
IDLE_UTILIZATION_PERCENT = 60.0
# A card that holds less than this share of its top clock is slowed down, not just capped for moments.
SLOWED_CLOCK_SHARE = 0.9
# An input that alone is so many times as fast as the run has its batches ready in time.
AMPLE_INPUT = 1.5
THERMAL_REASONS = ("sw_thermal_slowdown", "hw_thermal_slowdown")
POWER_REASONS = ("sw_power_cap", "hw_power_brake_slowdown", "hw_slowdown")


@dataclasses.dataclass(frozen=True)
class Part:
    """Milliseconds of a step with the 95 % interval; the interval is None where it is unknown."""

    ms: float
    low_ms: float | None = None
    high_ms: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a step. None: not measured, because the run has no such part."""

    step: Part
    compute: Part
    input_wait: Part | None = None
    exposed_communication: Part | None = None
    host_gap: Part | None = None
    samples_per_sec: float | None = None  # of the run as it is
    input_samples_per_sec: float | None = None  # of the input pipeline alone

    def share(self, part: Part | None) -> float:
        """Of the step; 0 for a part that the run has not."""
        return 0.0 if part is None else part.ms / self.step.ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensors:
    """What the GPUs showed inside the windows; None where they did not say."""

    gpu_util_mean: float | None = None  # percent
    sm_active: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    sm_clock_mhz_mean: float | None = None
    sm_clock_mhz_max: float | None = None
    throttle_reasons: str | None = None  # joined by "|"
    mfu: float | None = None


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that holds the run back, and what to do about it.

    `gain_share` is the step's share that would go away at best; None where it cannot be said.
    """

    verdict: str
    because: str
    next_step: str
    gain_share: float | None = None


def difference(longer: Sequence[Window], shorter: Sequence[Window]) -> Part:
    """Step time of one variant less that of another, never below 0; Welch's interval over their windows.

    Raises:
        ValueError: a variant has no windows.
    """
    means = [statistics.step_time_ms(windows).mean for windows in (longer, shorter)]
    errors = [_standard_error_ms(windows) for windows in (longer, shorter)]
    ms = means[0] - means[1]
    if any(error is None for error in errors):
        return Part(max(ms, 0.0))
    variances = [error**2 for error in errors if error is not None]
    half = _welch_quantile(variances, [len(longer) - 1, len(shorter) - 1]) * math.sqrt(sum(variances))
    return Part(max(ms, 0.0), max(ms - half, 0.0), max(ms + half, 0.0))


def _standard_error_ms(windows: Sequence[Window]) -> float | None:
    """Of the mean step time; None for a single window."""
    if len(windows) < 2:
        return None
    times = [1000 * window.seconds / window.steps for window in windows]
    mean = sum(times) / len(times)
    variance = sum((time - mean) ** 2 for time in times) / (len(times) - 1)
    return math.sqrt(variance / len(times))


def _welch_quantile(variances: Sequence[float], freedoms: Sequence[int]) -> float:
    """Two-sided 95 % quantile of Student's t with Welch's degrees of freedom."""
    total = sum(variances)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True) if v)
    return statistics.student_quantile(freedom, 0.95)


def host_gap(
    as_run: Sequence[Window], other: Sequence[Window], rows_per_step: float, other_rows_per_step: float
) -> Part | None:
    """Milliseconds of the host in a step as it was run: h · r of s(r) = c + h · r.

    Args:
        as_run: windows of the run as it is.
        other: of a loop in other rows.
        rows_per_step: rows of steps that the host started ÷ steps in them.
        other_rows_per_step: likewise the other's.

    Returns:
        None where both are the same: nothing can be told apart.
    """
    apart_rows = rows_per_step - other_rows_per_step
    if not apart_rows:
        return None
    apart = difference(as_run, other) if apart_rows > 0 else difference(other, as_run)
    factor = rows_per_step / abs(apart_rows)
    scaled = [None if value is None else value * factor for value in (apart.low_ms, apart.high_ms)]
    return Part(apart.ms * factor, *scaled)


def findings(parts: Parts, sensors: Sensors, steps_per_loop: int) -> list[Finding]:
    """What holds the run back, the largest expected gain first; the first is the verdict."""
    found = [*_waits(parts, steps_per_loop), *_slowed(sensors)]
    found.sort(key=lambda finding: -(finding.gain_share or 0.0))
    # A wait that was measured explains idle multiprocessors better than their sensors do.
    return found or _idle(sensors) or [_bound_by_the_card(sensors)]


def _waits(parts: Parts, steps_per_loop: int) -> list[Finding]:
    """Parts of the step in which the GPU waits for something else."""
    rate = parts.input_samples_per_sec
    alone = f"; alone the input gives {rate:,.0f} samples/s" if rate else ""
    help_input = "give the input more cores, cache or pre-resize the data, or compare with --data=synthetic"
    if rate and parts.samples_per_sec and rate > AMPLE_INPUT * parts.samples_per_sec:
        help_input = (
            "the batches are ready in time, so it is their way to the GPU or the cores that both need: look "
            "at the PCIe columns and at --profile_steps"
        )
    candidates = (
        (parts.input_wait, "input bound", "waits for input" + alone, help_input),
        (parts.host_gap, "host bound", "waits for the host between calls of the loop",
         f"raise --steps_per_loop={steps_per_loop} and with it the steps of a window (--steps ÷ --windows), "
         "and keep Python out of the loop"),
        (parts.exposed_communication, "communication bound", "waits for the all-reduce",
         "a larger --per_replica_batch_size, --accumulate, or --collectives=update"),
    )  # fmt: skip
    return [
        Finding(verdict, f"{100 * parts.share(part):.0f} % of the step {why}", advice, parts.share(part))
        for part, verdict, why, advice in candidates
        if parts.share(part) >= WORTH_SHARE
    ]


def _slowed(sensors: Sensors) -> list[Finding]:
    """A card that does not hold its clock."""
    mean, top = sensors.sm_clock_mhz_mean, sensors.sm_clock_mhz_max
    reasons = (sensors.throttle_reasons or "").split("|")
    if mean is None or top is None:
        return []
    lost = 1 - mean / top
    clocks = f"the SM clock was {mean:.0f} of {top:.0f} MHz"
    if any(reason in reasons for reason in THERMAL_REASONS):
        return [
            Finding("thermally throttled", f"{clocks} because of heat", "look at cooling and airflow", lost)
        ]
    if any(reason in reasons for reason in POWER_REASONS) and mean < SLOWED_CLOCK_SHARE * top:
        return [
            Finding("power capped", f"{clocks} at the power limit", "this is the card at its limit", lost)
        ]
    return []


def _idle(sensors: Sensors) -> list[Finding]:
    """A card that is given too little to do at a time."""
    if sensors.sm_active is not None and sensors.sm_active < IDLE_SM_SHARE:
        idle, said = 1 - sensors.sm_active, f"the multiprocessors were busy {100 * sensors.sm_active:.0f} %"
    elif sensors.sm_active is None and (sensors.gpu_util_mean or 100.0) < IDLE_UTILIZATION_PERCENT:
        assert sensors.gpu_util_mean is not None
        idle, said = 1 - sensors.gpu_util_mean / 100, f"utilisation was {sensors.gpu_util_mean:.0f} %"
    else:
        return []
    advice = "a larger --per_replica_batch_size, and --xla, so that each launch does more"
    return [Finding("host bound", f"{said}: launches are too small or too far apart", advice, idle)]


def _bound_by_the_card(sensors: Sensors) -> Finding:
    """Nothing waits: the card itself is the limit; which unit of it?"""
    tensor, dram, mfu = sensors.tensor_active, sensors.dram_active, sensors.mfu
    arithmetic = tensor if tensor is not None else mfu
    if dram is None and arithmetic is None:
        return Finding("compute bound", "nothing waits, and no sensor tells more", "see --profile_steps")
    if arithmetic is None or (dram is not None and dram >= arithmetic):
        return Finding(
            "memory-bandwidth bound",
            f"the card's memory was busy {100 * (dram or 0):.0f} %, its matrix units "
            f"{'unknown' if arithmetic is None else f'{100 * arithmetic:.0f} %'}",
            "fewer passes over activations: mixed precision, --xla, fused layers",
        )
    return Finding(
        "arithmetic bound",
        f"the matrix units were busy {100 * arithmetic:.0f} %",
        "a lower precision; otherwise this is the card's limit",
    )
