"""Young's and Daly's arithmetic against numerical minima and a simulation."""

import math
import random

import pytest
from scipy import optimize

from tfbench.measure import restarts


def test_a_job_fails_as_often_as_its_gpus_do_together():
    # One failure in 500 GPU-hours: 8 GPUs spend those in 62.5 hours.
    assert restarts.mean_hours_between_failures(2.0, 8) == 62.5


@pytest.mark.parametrize(("writing", "between"), [(0.01, 100.0), (0.1, 10.0), (0.5, 5.0)])
def test_the_interval_is_where_the_expected_time_is_least(writing, between):
    def total(interval):
        return restarts.wall_hours(1e6, interval, writing, 0.0, between)

    best = optimize.minimize_scalar(total, bounds=(1e-3, 10 * between), method="bounded")
    found = restarts.checkpoint_interval_hours(writing, between)
    assert found == pytest.approx(best.x, rel=0.01)
    assert total(found) == pytest.approx(best.fun, rel=1e-4)


def test_rare_failures_give_youngs_interval():
    # √(2 · 0.001 h · 5000 h) = √10 h; the higher orders are below a thousandth.
    assert restarts.checkpoint_interval_hours(0.001, 5000.0) == pytest.approx(math.sqrt(10), rel=1e-3)


def test_checkpoints_that_take_longer_than_two_failures_are_a_failure_apart():
    assert restarts.checkpoint_interval_hours(30.0, 10.0) == 10.0


def simulate(work, interval, writing, restart, between, rng):
    """Hours of one job whose failures are drawn one by one; it may fail while it restarts, too."""
    hours, done = 0.0, 0.0
    to_failure = rng.expovariate(1 / between)
    phase = min(interval, work) + writing
    after_failure = False
    while done < work - 1e-9:
        needed = restart if after_failure else phase
        if to_failure < needed:
            hours += to_failure
            to_failure, after_failure = rng.expovariate(1 / between), True
            continue
        hours += needed
        to_failure -= needed
        if after_failure:
            after_failure = False
        else:
            done += min(interval, work)
    return hours


@pytest.mark.parametrize("work", [40.0, 0.2])  # many checkpoints; one, at the end of a job shorter than that
def test_expected_time_is_that_of_simulated_jobs(work):
    rng = random.Random(1)
    interval, writing, restart, between = 2.0, 0.25, 0.5, 5.0
    hours = [simulate(work, interval, writing, restart, between, rng) for _ in range(6000)]
    mean = sum(hours) / len(hours)
    error = math.sqrt(sum((each - mean) ** 2 for each in hours)) / len(hours)
    expected = restarts.wall_hours(work, interval, writing, restart, between)
    assert abs(mean - expected) < 4 * error
    assert error < 0.03 * expected  # else the line above says nothing


def test_without_failures_only_the_checkpoints_take_time():
    # Ten intervals of one hour with a checkpoint of 0.1 h each.
    assert restarts.wall_hours(10.0, 1.0, 0.1, 3.0, 1e12) == pytest.approx(11.0)


def test_a_job_that_cannot_end_takes_for_ever():
    assert restarts.wall_hours(1.0, 1.0, 1000.0, 0.0, 0.1) == math.inf
