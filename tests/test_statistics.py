import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from tfbench.measure import statistics
from tfbench.measure.timing import Window


def make_windows(seconds, samples, steps=None):
    """Windows of these lengths with a second of something else between them."""
    windows, now_s = [], 50.0
    for index, (length, count) in enumerate(zip(seconds, samples, strict=True)):
        windows.append(Window(index, steps[index] if steps else 1, count, now_s, now_s + length))
        now_s += length + 1.0
    return windows


def test_rate_is_samples_over_seconds_and_not_the_mean_of_rates():
    assert statistics.samples_per_sec(make_windows([1, 1, 1, 7], [10] * 4)) == 4.0


def test_rate_of_windows_of_different_sizes():
    assert statistics.samples_per_sec(make_windows([2.0, 0.5], [64, 16])) == 32.0


@pytest.mark.parametrize("windows", [[], [Window(0, 1, 8, 3.0, 3.0)]])
@pytest.mark.parametrize(
    "figure",
    [
        statistics.samples_per_sec,
        statistics.step_time_ms,
        lambda windows: statistics.energy_j_per_sample(1.0, windows),
    ],
)
def test_nothing_timed_is_an_error(figure, windows):
    with pytest.raises(ValueError, match="nothing was timed"):
        figure(windows)


# By hand. x = seconds per sample.
# 1.0, 1.1, 0.9 s at 100: x = .010, .011, .009; mean .01, error .001/√3; t(2, .975) = 4.302653.
# 1 s at 100 and 6 s at 300: mean 7/400 = .0175; 100·.0075² + 300·.0025² = .0075, one degree of freedom;
# error √(.0075/400) = .00433013; t(1, .75) = 1 exactly.
@pytest.mark.parametrize(
    ("seconds", "samples", "confidence", "low", "high"),
    [
        ([1.0, 1.1, 0.9], [100] * 3, 0.95, 80.1016, 133.0519),
        ([1.0, 6.0], [100, 300], 0.5, 45.80826, 75.93091),
        ([2.0, 2.0, 2.0], [100] * 3, 0.95, 50.0, 50.0),
    ],
)
def test_interval_by_hand(seconds, samples, confidence, low, high):
    interval = statistics.rate_interval(make_windows(seconds, samples), confidence)
    assert interval == pytest.approx((low, high), rel=1e-5)


def test_interval_is_students_for_equal_windows():
    seconds = np.array([1.02, 0.97, 1.05, 0.99, 1.01])
    per_sample = seconds / 256
    slow, fast = stats.t.interval(0.9, 4, loc=per_sample.mean(), scale=stats.sem(per_sample))
    low, high = statistics.rate_interval(make_windows(seconds, [256] * 5), 0.9)
    assert (low, high) == pytest.approx((1 / fast, 1 / slow), rel=1e-9)


def test_interval_is_that_of_a_weighted_fit_of_a_constant():
    seconds, samples = [1.0, 2.3, 0.45, 3.1], np.array([100, 220, 50, 310])
    (center,), ((variance,),) = np.polyfit(
        np.zeros(4), np.array(seconds) / samples, 0, w=np.sqrt(samples), cov=True
    )
    half_width = stats.t.ppf(0.975, 3) * math.sqrt(variance)
    low, high = statistics.rate_interval(make_windows(seconds, samples.tolist()))
    assert (low, high) == pytest.approx((1 / (center + half_width), 1 / (center - half_width)), rel=1e-9)


def test_interval_without_upper_end_is_infinite():
    # x = .1, .1, .1, .7: mean .25, error .15, t(3, .975) = 3.182446: .25 ± .477367 reaches below 0.
    low, high = statistics.rate_interval(make_windows([1, 1, 1, 7], [10] * 4))
    assert low == pytest.approx(1 / 0.727367, rel=1e-5)
    assert high == math.inf


@pytest.mark.parametrize("count", [0, 1])
def test_one_window_says_nothing_of_its_spread(count):
    assert statistics.rate_interval(make_windows([1.0] * count, [10] * count)) is None


@pytest.mark.parametrize("confidence", [0, 1, 95, float("nan")])
def test_confidence_is_a_share(confidence):
    with pytest.raises(ValueError, match="confidence="):
        statistics.rate_interval(make_windows([1, 2], [1, 1]), confidence)


@pytest.mark.parametrize(
    ("rates", "ends", "expected"),
    [
        # Mean 100, standard error 1 / √3, Student's quantile for 2 degrees of freedom 4.3027.
        ([99.0, 100.0, 101.0], [(None, None)] * 3, (100 - 4.3027 / 3**0.5, 100 + 4.3027 / 3**0.5)),
        ([99.0, 101.0], [(98.0, 100.0), (99.5, 102.5)], (98.0, 102.5)),
        ([99.0], [(98.0, 100.0)], (98.0, 100.0)),
        ([99.0, 101.0], [(98.0, 100.0), (99.5, None)], None),
        ([1.0, 1.0, 1000.0], [(None, None)] * 3, None),  # Student's reaches below 0
        ([], [], None),
    ],
)
def test_interval_over_runs(rates, ends, expected):
    found = statistics.interval_over_runs(rates, ends)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-3))


def test_step_times_weigh_windows_by_their_steps():
    # 89 steps of 10 ms, 10 of 20 ms, 1 of 500 ms: the 90th and 99th of 100 steps are 20 ms.
    windows = make_windows([0.89, 0.2, 0.5], [1, 1, 1], steps=[89, 10, 1])
    times = statistics.step_time_ms(windows)
    assert times.mean == pytest.approx(15.9)
    assert (times.p50, times.p90, times.p99) == pytest.approx((10.0, 20.0, 20.0))


def test_step_time_percentile_reaches_the_slowest_window():
    # 98 steps of 10 ms and 2 of 500 ms: the 99th of 100 steps is 500 ms.
    windows = make_windows([0.98, 1.0], [1, 1], steps=[98, 2])
    assert statistics.step_time_ms(windows).p99 == pytest.approx(500.0)


def test_step_time_percentile_is_a_value_that_was_seen():
    assert statistics.step_time_ms(make_windows([1.0, 2.0], [1, 1])).p50 in (1000.0, 2000.0)


def test_tflops_and_mfu():
    # 2,500 images/s × 24.6 GFLOP = 61.5 TFLOP/s, of a peak of 989.5 TFLOP/s.
    assert statistics.tflops_per_gpu(2500, 24.6e9) == pytest.approx(61.5)
    assert statistics.mfu(2500, 24.6e9, 989.5e12) == pytest.approx(61.5 / 989.5)


def test_mfu_of_an_unknown_peak_is_unknown():
    assert statistics.mfu(2500, 24.6e9, None) is None


@pytest.mark.parametrize("peak", [0.0, -1.0, float("nan")])
def test_mfu_refuses_an_impossible_peak(peak):
    with pytest.raises(ValueError, match="peak_flops="):
        statistics.mfu(2500, 24.6e9, peak)


def test_weak_scaling_efficiency():
    # Four GPUs do 3,600 samples/s together, 900 each, where one alone did 1,000.
    assert statistics.weak_scaling_efficiency(3600.0, 4, 1000.0) == 0.9


def test_strong_scaling_efficiency():
    # A step of 800 ms takes 250 ms on four: 3.2 times as fast.
    assert statistics.strong_scaling_efficiency(800.0, 4, 250.0) == 0.8


def test_energy_per_sample():
    windows = make_windows([1.0, 3.0], [100, 300])
    assert statistics.energy_j_per_sample(1000.0, windows) == 2.5
    assert statistics.energy_j_per_sample(None, windows) is None


def test_samples_per_joule():
    windows = make_windows([1.0, 3.0], [100, 300])
    assert statistics.samples_per_joule(1000.0, windows) == 0.4
    assert statistics.samples_per_joule(None, windows) is None


@pytest.mark.parametrize(
    ("seconds", "steps", "difference"),
    [
        ([2.0, 2.0, 2.0, 2.0], [20] * 4, 0.0),
        ([2.0, 2.0, 2.5, 2.5], [20] * 4, 0.25),  # slower towards the end: 100 → 125 ms
        ([2.5, 2.5, 2.0, 2.0], [20] * 4, 0.25),  # or faster
        ([2.0, 2.4, 2.4], [20] * 3, 0.2),  # the middle one counts as later
        ([2.5, 2.0, 2.5, 2.0], [20] * 4, 0.0),  # noise has no direction
        ([1.0, 2.0, 1.0, 2.0], [10, 20, 10, 20], 0.0),  # linear
        ([1.0, 1.0, 1.0, 1.0], [10, 20, 10, 20], 1.0),  # the clock does not see the steps: 100 and 50 ms
        ([1.5, 2.5, 1.5, 2.5], [10, 20, 10, 20], 0.2),  # 0.5 s a window beside 100 ms a step: 150 and 125 ms
        ([1.5, 1.6, 1.5, 1.6], [11, 20, 11, 20], 0.0),  # lengths too close to tell
    ],
)
def test_step_times_that_depend_on_when_or_how_long(seconds, steps, difference):
    windows = make_windows(seconds, [1] * len(steps), steps)
    assert statistics.step_time_difference(windows) == pytest.approx(difference)


@pytest.mark.parametrize("count", [0, 1])
def test_one_window_has_nothing_to_differ_from(count):
    assert statistics.step_time_difference(make_windows([1.0] * count, [1] * count)) is None


@dataclasses.dataclass(frozen=True)
class Reading:
    t_s: float


def test_within_keeps_edges_and_drops_what_lies_between_windows():
    windows = [Window(0, 1, 1, 10.0, 20.0), Window(1, 1, 1, 20.0, 30.0), Window(2, 1, 1, 40.0, 50.0)]
    times = (9.99, 10.0, 15.0, 20.0, 30.0, 30.01, 39.0, 40.0, 50.0, 51.0)
    kept = statistics.within([Reading(t) for t in times], windows)
    assert [reading.t_s for reading in kept] == [10.0, 15.0, 20.0, 30.0, 40.0, 50.0]


def test_within_no_window_is_nothing():
    assert statistics.within([Reading(1.0)], []) == []
