"""Windows over calls that queue work on the devices. Imports TensorFlow when it is used."""

import time
from collections.abc import Callable

from tfbench import devices
from tfbench.measure.timing import Window, WindowTimer

WINDOWS = 9  # whose 2nd and 8th value enclose the median in 96 % of cases
_WARM_SHARE = 0.25  # of the measuring time goes to warming up and to counting calls


def time_calls(call: Callable[[], object], seconds: float, windows: int = WINDOWS) -> tuple[Window, ...]:
    """Times a call over and over, with no host read between the calls of a window.

    Untimed first: the call that compiles, then calls until they took long enough to say how many fill a
    window.

    Args:
        call: queues the work, or does it.
        seconds: of all windows together, about.
        windows: how many; each counts its calls as steps and as samples.
    """
    call()
    calls = 1
    while True:
        trial = WindowTimer(devices.synchronize)
        with trial.window() as counted:
            _repeat(call, calls)
            counted.add(calls, calls)
        taken_s = trial.windows[0].seconds
        if taken_s >= _WARM_SHARE * seconds:
            break
        calls *= 2 if taken_s * 4 > _WARM_SHARE * seconds else 4
    calls = max(1, round(calls * seconds / windows / taken_s))
    timer = WindowTimer(devices.synchronize)
    for _ in range(windows):
        with timer.window() as counted:
            _repeat(call, calls)
            counted.add(calls, calls)
    return tuple(timer.windows)


def time_rested_calls(
    call: Callable[[], object], calls: int, rest_s: float, windows: int = WINDOWS
) -> tuple[Window, ...]:
    """Times a few calls at a time after a rest, before the card is warm and its power limit slows it down.

    Args:
        call: queues the work.
        calls: in a window, behind an untimed one that wakes the card.
        rest_s: before each window.
        windows: how many.
    """
    call()
    timer = WindowTimer(devices.synchronize)
    for _ in range(windows):
        devices.synchronize()
        time.sleep(rest_s)
        call()
        with timer.window() as counted:
            _repeat(call, calls)
            counted.add(calls, calls)
    return tuple(timer.windows)


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def rates(windows: tuple[Window, ...], work: float) -> tuple[float, ...]:
    """Work per second of each window.

    Args:
        windows: each counts calls.
        work: of one call.
    """
    return tuple(window.steps * work / window.seconds for window in windows)
