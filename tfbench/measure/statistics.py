"""Pure arithmetic from windows to the figures of a row: rates, intervals, step times, MFU, efficiency."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from scipy.special import stdtrit

from tfbench.measure.timing import Window

_LEAST_RUNS = 3  # from which on the interval over runs is Student's


class Timed(Protocol):
    """Anything that carries a reading of the windows' monotonic clock."""

    @property
    def t_s(self) -> float:
        """Monotonic clock, seconds."""


TimedT = TypeVar("TimedT", bound=Timed)


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Wall time per step, milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


def samples_per_sec(windows: Sequence[Window]) -> float:
    """Rate of the whole run, samples of all replicas per second: Σ samples ÷ Σ seconds.

    The mean of the windows' rates would be too high (Jensen): windows of 1, 1, 1 and 7 s at 10 samples are
    40 samples in 10 s = 4.0 samples/s, while their rates average 7.86.

    Raises:
        ValueError: there is no window, or they took no time.
    """
    _, samples, seconds = _totals(windows)
    return samples / seconds


def student_quantile(freedom: float, confidence: float) -> float:
    """Half-width of Student's two-sided interval in standard errors, for any degrees of freedom above 0."""
    return float(stdtrit(freedom, (1 + confidence) / 2))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean of independent values, such as the rates of several runs.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} values have no spread: at least 2 are needed")
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half_width = student_quantile(len(values) - 1, confidence) * error
    return mean - half_width, mean + half_width


def interval_over_runs(
    rates: Sequence[float], ends: Sequence[tuple[float | None, float | None]]
) -> tuple[float, float] | None:
    """95 % interval of the mean rate of runs of one configuration; None where there is no positive one.

    From three runs on Student's of the runs, which holds what differs between them; of fewer runs from the
    lowest to the highest end of their own intervals.

    Args:
        rates: of the runs, samples/s.
        ends: (low, high) of each run's own interval; None: not known.
    """
    if len(rates) >= _LEAST_RUNS:
        low, high = mean_interval(rates)
    else:
        lows = [low for low, _ in ends if low is not None]
        highs = [high for _, high in ends if high is not None]
        if not ends or len(lows) < len(ends) or len(highs) < len(ends):
            return None
        low, high = min(lows), max(highs)
    return (low, high) if low > 0 else None


def ratio_interval(
    above: tuple[float, float, float], below: tuple[float, float, float]
) -> tuple[float, float]:
    """Interval of the ratio of two independent positive figures, each (value, low, high).

    The relative half-widths add in quadrature, in logarithms, so that the interval of a/b is that of b/a
    upside down.

    Raises:
        ValueError: a figure is not positive, or not inside its interval.
    """
    for value, low, high in (above, below):
        if not 0 < low <= value <= high:
            raise ValueError(f"{low} to {high} is no interval of a positive {value}")
    down = math.hypot(math.log(above[0] / above[1]), math.log(below[2] / below[0]))
    up = math.hypot(math.log(above[2] / above[0]), math.log(below[0] / below[1]))
    ratio = above[0] / below[0]
    return ratio * math.exp(-down), ratio * math.exp(up)


def widened(value: float, low: float, high: float, percent: float) -> tuple[float, float]:
    """Interval of a positive value after a further, independent ± percent: in quadrature, in logarithms."""
    further = math.log1p(percent / 100)
    down, up = math.hypot(math.log(value / low), further), math.hypot(math.log(high / value), further)
    return value * math.exp(-down), value * math.exp(up)


def rate_interval(windows: Sequence[Window], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's interval of `samples_per_sec`, from how much the windows differ among themselves.

    It is built on seconds per sample, x = seconds ÷ samples of each window, weighted by its samples n: the
    weighted mean of x is Σ seconds ÷ Σ samples, the inverse of the rate that is reported. With k windows the
    variance of one sample is Σ n·(x − mean)² ÷ (k − 1), that of the mean is this ÷ Σ n, and the quantile is
    Student's with k − 1 degrees of freedom. Windows count as independent: a drift over the run (heat, another
    process) widens the interval but is not modelled.

    Args:
        windows: the run's windows, of any lengths.
        confidence: share of such intervals that hold the true rate, above 0 and below 1.

    Returns:
        Lower and upper rate in samples/s; the upper one is infinite where the interval of the seconds per
        sample reaches 0. None with fewer than two windows, which say nothing of their spread.

    Raises:
        ValueError: `confidence` is out of range, or the windows took no time.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: above 0 and below 1, such as 0.95")
    if len(windows) < 2:
        return None
    _, samples, seconds = _totals(windows)
    mean = seconds / samples
    freedom = len(windows) - 1
    variance = sum(w.samples * (w.seconds / w.samples - mean) ** 2 for w in windows) / freedom
    half_width = student_quantile(freedom, confidence) * math.sqrt(variance / samples)
    fastest = mean - half_width
    rate = samples / seconds  # windows that all agree leave no width, but a rounding error either way
    return min(1 / (mean + half_width), rate), max(1 / fastest, rate) if fastest > 0 else math.inf


def step_time_ms(windows: Sequence[Window]) -> StepTimes:
    """Mean and percentiles of the wall time per step, milliseconds.

    The mean is Σ seconds ÷ Σ steps. Steps inside a window are not observed one by one, so each stands with
    its window's mean: the percentiles are those of the windows' mean step times, weighted by their steps, and
    a single slow step shows only as far as it slows its window. A percentile is always a value that some
    window had (the inverse of the empirical distribution), never interpolated.

    Raises:
        ValueError: there is no window, or they took no time.
    """
    steps, _, seconds = _totals(windows)
    per_window_ms = [1e3 * window.seconds / window.steps for window in windows]
    per_step_ms = np.repeat(per_window_ms, [window.steps for window in windows])
    p50, p90, p99 = np.quantile(per_step_ms, (0.5, 0.9, 0.99), method="inverted_cdf")
    return StepTimes(mean=1e3 * seconds / steps, p50=float(p50), p90=float(p90), p99=float(p99))


def drift_percent(windows: Sequence[Window]) -> float | None:
    """Change of the rate over the run in percent, along the least-squares line of the windows' step times.

    Negative: the run became slower. None with fewer than three windows, which lie on a line too easily.
    """
    if len(windows) < 3:
        return None
    times_s = [(window.start_s + window.end_s) / 2 for window in windows]
    steps_s = [window.seconds / window.steps for window in windows]
    slope, at_zero = np.polyfit(np.array(times_s) - times_s[0], steps_s, 1)
    first_s, last_s = at_zero, at_zero + slope * (times_s[-1] - times_s[0])
    return float(100 * (first_s / last_s - 1))


def outliers(windows: Sequence[Window]) -> list[bool]:
    """Which windows' step times lie far from the others; they are shown, and stay in every figure.

    By Iglewicz and Hoaglin's rule: a modified z-score, 0.6745 × distance from the median ÷ median distance,
    above 3.5.
    """
    steps_s = np.array([window.seconds / window.steps for window in windows])
    distances = np.abs(steps_s - np.median(steps_s))
    return [bool(each) for each in 0.6745 * distances > 3.5 * np.median(distances)]


def tflops_per_gpu(samples_per_sec_per_gpu: float, flops_per_sample: float) -> float:
    """Model TFLOP/s that one GPU sustains.

    Args:
        samples_per_sec_per_gpu: samples/s of one GPU.
        flops_per_sample: forward and backward, matmul and convolution only, 1 MAC = 2 FLOPs.
    """
    return samples_per_sec_per_gpu * flops_per_sample / 1e12


def mfu(samples_per_sec_per_gpu: float, flops_per_sample: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation: model FLOP/s of one GPU ÷ its peak; 1.0 would be the peak.

    Args:
        samples_per_sec_per_gpu: samples/s of one GPU.
        flops_per_sample: forward and backward, matmul and convolution only, 1 MAC = 2 FLOPs.
        peak_flops: FLOP/s at this precision, dense, of the data sheet (`mfu`) or measured with a matmul
            (`mfu_achievable`); None where unknown.

    Returns:
        The share, or None where the peak is unknown: another card's peak would be a wrong number.

    Raises:
        ValueError: the peak is not positive.
    """
    if peak_flops is None:
        return None
    if not peak_flops > 0:
        raise ValueError(f"peak_flops={peak_flops}: a positive number of FLOP/s, or None where unknown")
    return samples_per_sec_per_gpu * flops_per_sample / peak_flops


def weak_scaling_efficiency(rate_n: float, n: int, rate_1: float) -> float:
    """Share of the one-replica rate that each of `n` replicas keeps at the same per-replica batch.

    Args:
        rate_n: samples/s of all `n` replicas together.
        n: number of replicas.
        rate_1: samples/s of one replica alone.
    """
    return rate_n / n / rate_1


def strong_scaling_efficiency(t_1: float, n: int, t_n: float) -> float:
    """Speed-up over one replica ÷ `n`, at the same global batch.

    Args:
        t_1: time of a step on one replica.
        n: number of replicas.
        t_n: time of a step on `n` replicas, in the unit of `t_1`.
    """
    return t_1 / (n * t_n)


def energy_j_per_sample(energy_j: float | None, windows: Sequence[Window]) -> float | None:
    """Energy of all GPUs inside the windows ÷ the windows' samples, joules.

    Args:
        energy_j: joules of all GPUs over exactly these windows; None where it could not be measured.
        windows: the run's windows.

    Raises:
        ValueError: there is no window, or they took no time.
    """
    if energy_j is None:
        return None
    _, samples, _ = _totals(windows)
    return energy_j / samples


def samples_per_joule(energy_j: float | None, windows: Sequence[Window]) -> float | None:
    """Samples of the windows ÷ energy of all GPUs inside them, the inverse of `energy_j_per_sample`.

    Args:
        energy_j: joules of all GPUs over exactly these windows; None where it could not be measured.
        windows: the run's windows.

    Raises:
        ValueError: there is no window, or they took no time.
    """
    per_sample_j = energy_j_per_sample(energy_j, windows)
    return 1 / per_sample_j if per_sample_j else None


def step_time_difference(windows: Sequence[Window]) -> float | None:
    """How much the step time depends on when, or in how long a window, it was measured.

    If time is linear in steps, every set of windows has the same Σ seconds ÷ Σ steps. Compared are the
    earlier with the later half of the windows (a middle one counts as later), and the windows of at most half
    as many steps as the longest with the others, where there are such. 0.1 means that one set's step time is
    10 % above the other's.

    Returns:
        The larger of the two differences; None with fewer than two windows.

    Raises:
        ValueError: a set of windows took no time.
    """
    if len(windows) < 2:
        return None
    half = len(windows) // 2
    longest = max(window.steps for window in windows)
    short = [window for window in windows if 2 * window.steps <= longest]
    pairs = [(windows[:half], windows[half:])]
    if short:
        pairs.append((short, [window for window in windows if 2 * window.steps > longest]))
    times_ms = [sorted(step_time_ms(part).mean for part in pair) for pair in pairs]
    return max(slow / fast - 1 for fast, slow in times_ms)


def within(samples: Iterable[TimedT], windows: Sequence[Window]) -> list[TimedT]:
    """Telemetry samples taken inside a window, edges included, in their order and each once."""
    return [sample for sample in samples if any(w.start_s <= sample.t_s <= w.end_s for w in windows)]


def _totals(windows: Sequence[Window]) -> tuple[int, int, float]:
    """Steps, samples and seconds of all windows together.

    Raises:
        ValueError: there is no window, or they took no time.
    """
    seconds = math.fsum(window.seconds for window in windows)
    if not seconds > 0:
        raise ValueError(f"{len(windows)} windows of {seconds} s together: nothing was timed")
    return sum(window.steps for window in windows), sum(window.samples for window in windows), seconds
