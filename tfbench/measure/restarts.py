"""What failures cost a long training that writes checkpoints: Young's and Daly's arithmetic.

J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (9), 1974; J. T. Daly,
A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (3), 2006. Failures come
at random, at a constant rate, and cost all work since the last checkpoint. All times are hours.
"""

import math

_LARGEST_EXPONENT = 700.0  # e to this is about the largest float


def mean_hours_between_failures(failures_per_1000_gpu_hours: float, gpus: int) -> float:
    """Of a job that any failing GPU stops."""
    return 1000 / (failures_per_1000_gpu_hours * gpus)


def checkpoint_interval_hours(checkpoint_hours: float, between_failures_hours: float) -> float:
    """Work between two checkpoints that makes the whole shortest: Young's √(2 δ M), refined by Daly.

    Args:
        checkpoint_hours: writing one, δ; above 0.
        between_failures_hours: mean time between failures, M.
    """
    if checkpoint_hours >= 2 * between_failures_hours:
        return between_failures_hours
    part = math.sqrt(checkpoint_hours / (2 * between_failures_hours))
    young = math.sqrt(2 * checkpoint_hours * between_failures_hours)
    return young * (1 + part / 3 + part**2 / 9) - checkpoint_hours


def wall_hours(
    work_hours: float, interval_hours: float, checkpoint_hours: float, restart_hours: float, between: float
) -> float:
    """Expected time of a job with its checkpoints and failures, M·e^(R/M)·(e^((τ+δ)/M) − 1)·work ÷ τ (Daly).

    Args:
        work_hours: without checkpoints and failures; above 0.
        interval_hours: work between checkpoints, τ; a shorter job writes one at its end.
        checkpoint_hours: writing one, δ.
        restart_hours: from a failure until work goes on, R; it can fail too.
        between: mean time between failures, M.

    Returns:
        Infinite where failures come so often that there is no end in sight.
    """
    interval = min(interval_hours, work_hours)
    exponent = (interval + checkpoint_hours) / between
    if exponent + restart_hours / between > _LARGEST_EXPONENT:
        return math.inf
    return between * math.exp(restart_hours / between) * math.expm1(exponent) * work_hours / interval
