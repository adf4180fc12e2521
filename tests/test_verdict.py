"""Parts of a step by hand arithmetic, and a verdict for every way to be held back."""

import dataclasses

import pytest
from scipy import stats

from tfbench.measure import verdict
from tfbench.measure.timing import Window
from tfbench.measure.verdict import Part, Parts, Sensors


def windows(*step_times_ms, steps=10):
    return [
        Window(i, steps, steps, 10.0 * i, 10.0 * i + t * steps / 1000) for i, t in enumerate(step_times_ms)
    ]


def parts(step_ms=100.0, **waits):
    waits = {name: Part(ms) for name, ms in waits.items()}
    compute = Part(step_ms - sum(part.ms for part in waits.values()))
    return Parts(step=Part(step_ms), compute=compute, **waits)


def verdicts(parts_, sensors=None):
    return [found.verdict for found in verdict.findings(parts_, sensors or Sensors(), steps_per_loop=10)]


def test_difference_has_welchs_interval():
    longer, shorter = (11.0, 12.0, 13.0, 14.0), (9.9, 10.0, 10.1)
    truth = stats.ttest_ind(longer, shorter, equal_var=False).confidence_interval(0.95)
    part = verdict.difference(windows(*longer), windows(*shorter))
    assert part.ms == pytest.approx(12.5 - 10.0)
    assert (part.low_ms, part.high_ms) == pytest.approx((truth.low, truth.high))


def test_difference_is_never_negative_and_one_window_has_no_interval():
    assert verdict.difference(windows(9.0, 9.0), windows(10.0, 10.0)) == Part(0.0, 0.0, 0.0)
    assert verdict.difference(windows(12.0), windows(10.0, 10.0)) == Part(pytest.approx(2.0))


@pytest.mark.parametrize(("run_at", "other"), [(1, 10), (10, 1)])
def test_host_gap_is_solved_from_two_lengths_of_loop(run_at, other):
    # c = 5 ms of work and h = 20 ms of host a call: s(1) = 25 ms, s(10) = 7 ms.
    times = {1: windows(25, 25), 10: windows(7, 7)}
    gap = verdict.host_gap(times[run_at], times[other], 1 / run_at, 1 / other)
    assert gap.ms == pytest.approx(20 / run_at)
    assert gap.high_ms == pytest.approx(20 / run_at)


def test_host_gap_needs_two_lengths():
    assert verdict.host_gap(windows(2, 2), windows(1, 1), 0.25, 0.25) is None


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("input_wait", "input bound"),
        ("host_gap", "host bound"),
        ("exposed_communication", "communication bound"),
    ],
)
def test_a_wait_of_a_tenth_is_named(part, named):
    assert verdicts(parts(**{part: 10.0})) == [named]
    assert named not in verdicts(parts(**{part: 9.0}))


@pytest.mark.parametrize(("alone", "words"), [(1400.0, "more cores"), (1600.0, "their way to the GPU")])
def test_an_input_that_is_fast_enough_alone_is_not_asked_to_be_faster(alone, words):
    waiting = dataclasses.replace(parts(input_wait=14.0), samples_per_sec=1000.0, input_samples_per_sec=alone)
    (found,) = verdict.findings(waiting, Sensors(), steps_per_loop=10)
    assert found.verdict == "input bound"
    assert words in found.next_step


def test_largest_gain_comes_first():
    found = verdict.findings(
        parts(input_wait=15.0, host_gap=11.0, exposed_communication=32.0), Sensors(), steps_per_loop=10
    )
    assert [each.verdict for each in found] == ["communication bound", "input bound", "host bound"]
    assert [each.gain_share for each in found] == pytest.approx([0.32, 0.15, 0.11])


def test_users_question_low_utilisation_is_my_pipeline():
    """GPU utilisation below 60 %: is it the pipeline? Yes where input waits, no where launches are small."""
    low = Sensors(gpu_util_mean=40.0)
    assert verdicts(parts(input_wait=55.0), low) == ["input bound"]
    assert verdicts(parts(input_wait=1.0), low) == ["host bound"]


@pytest.mark.parametrize(
    ("sensors", "named"),
    [
        (Sensors(sm_active=0.3, gpu_util_mean=95.0), "host bound"),  # NVML says busy, the card is not
        (Sensors(gpu_util_mean=59.0), "host bound"),
        (
            Sensors(gpu_util_mean=95.0, sm_active=0.9, dram_active=0.7, tensor_active=0.2),
            "memory-bandwidth bound",
        ),
        (Sensors(gpu_util_mean=95.0, sm_active=0.9, dram_active=0.3, tensor_active=0.6), "arithmetic bound"),
        (Sensors(gpu_util_mean=95.0, mfu=0.5), "arithmetic bound"),
        (Sensors(gpu_util_mean=95.0, dram_active=0.5), "memory-bandwidth bound"),
        (Sensors(), "compute bound"),
        (
            Sensors(sm_clock_mhz_mean=1900, sm_clock_mhz_max=1980, throttle_reasons="sw_thermal_slowdown"),
            "thermally throttled",
        ),
        (
            Sensors(sm_clock_mhz_mean=1455, sm_clock_mhz_max=1980, throttle_reasons="sw_power_cap"),
            "power capped",
        ),
    ],
)
def test_without_a_wait_the_sensors_decide(sensors, named):
    assert verdicts(parts(), sensors)[0] == named


def test_a_power_cap_that_costs_little_is_no_verdict():
    busy = {"sm_active": 0.9, "dram_active": 0.7, "tensor_active": 0.2, "throttle_reasons": "sw_power_cap"}
    sensors = Sensors(sm_clock_mhz_mean=1958, sm_clock_mhz_max=1980, **busy)
    assert verdicts(parts(), sensors) == ["memory-bandwidth bound"]


def test_every_finding_says_what_to_do():
    everything = parts(input_wait=20.0, host_gap=20.0, exposed_communication=20.0)
    hot = Sensors(sm_clock_mhz_mean=1000, sm_clock_mhz_max=1980, throttle_reasons="hw_thermal_slowdown")
    for found in verdict.findings(everything, hot, steps_per_loop=10):
        assert found.because
        assert found.next_step
