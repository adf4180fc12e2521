"""The same configuration measured with one thing left out at a time: where a step's time goes.

All variants run in the process of the run, on the programs that it has compiled (with --collectives=update
one more, the update without sums), in turn, so that a slow moment of the machine falls on all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

from tfbench import devices
from tfbench.config import BenchmarkConfig, rows_of_window
from tfbench.display import Display
from tfbench.journal import Observed
from tfbench.measure import statistics, verdict
from tfbench.measure.timing import Window, WindowTimer
from tfbench.training import Training, run_steps

ROUNDS = 6  # windows of each variant
OTHER_STEPS_PER_CALL = 10  # at most; compared with a loop that starts every step by itself
OTHER_LOOP = "in other rows"


def measure_parts(config: BenchmarkConfig, training: Training, display: Display) -> verdict.Parts:
    """Measure every variant that the run has; spoils the weights, so it comes last.

    Returns:
        The parts of a step, with intervals over ROUNDS windows of each variant.
    """
    variants = _variants(config, training)
    display.say(f"diagnosing: {', '.join(variants)}; {ROUNDS} windows of each, in turn")
    return _parts(config, _measure(config, variants, ROUNDS))


def measure_input_wait(config: BenchmarkConfig, training: Training, observed: Observed) -> float:
    """Share of a step that waits for input: one window of the same steps without input, after the run's own.

    Synthetic data is on the device already and waits for nothing.
    """
    if training.source.resident:
        return 0.0
    variants = {"without input": _without_input(config, training)[0]}
    without_ms = statistics.step_time_ms(_measure(config, variants, 1)["without input"]).mean
    return max(1 - without_ms / statistics.step_time_ms(observed.windows).mean, 0.0)


def _measure(config: BenchmarkConfig, variants: dict[str, Any], rounds: int) -> dict[str, list[Window]]:
    """`rounds` windows of each variant, in turn."""
    timers = {name: WindowTimer(devices.synchronize) for name in variants}
    steps = config.steps_of_windows[0]
    for loop in variants.values():  # every call that a window makes, once: TensorFlow sets it up then
        run_steps(loop, min(steps, loop.steps_per_call + steps % loop.steps_per_call), loop.steps_per_call)
    for _ in range(rounds):
        for name, loop in variants.items():
            with timers[name].window() as counted:
                run_steps(loop, steps, loop.steps_per_call)
                counted.add(steps, steps * config.global_batch_size)
    return {name: timer.windows for name, timer in timers.items()}


def _variants(config: BenchmarkConfig, training: Training) -> dict[str, Any]:
    """What this run can be compared with."""
    from tfbench.step import HostLoop

    variants = {"as it is": training.loop}
    loop = functools.partial(HostLoop, training.strategy)
    next_batch = training.source.next
    if not training.source.resident:
        variants["input alone"] = loop(_only_read, next_batch, config.steps_per_loop)
        variants["without input"], next_batch = _without_input(config, training)
    if config.num_replicas > 1 and config.collectives != "inside":
        alone = functools.partial(training.step, reduce=False)
        variants["without all-reduce"] = loop(alone, next_batch, config.steps_per_loop)
    other = _other_steps_per_call(config)
    if _rows_per_step(config, other) != _rows_per_step(config, config.steps_per_loop):
        variants[OTHER_LOOP] = loop(training.step, next_batch, other)
    return variants


def _rows_per_step(config: BenchmarkConfig, steps_per_call: int) -> float:
    """Rows that the host starts ÷ steps, in a window of `_measure`."""
    steps = config.steps_of_windows[0]
    return len(rows_of_window(steps, steps_per_call)) / steps


def _other_steps_per_call(config: BenchmarkConfig) -> int:
    """Of a loop that makes other rows than the run's: single steps, else a row that fits into a window."""
    if _rows_per_step(config, config.steps_per_loop) < 1:
        return 1
    return min(OTHER_STEPS_PER_CALL, config.steps_of_windows[0])


def _without_input(config: BenchmarkConfig, training: Training) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """The step on one batch of the data that stays on the devices, and what gives this batch."""
    from tfbench.step import HostLoop

    batch = training.source.next()

    def resident() -> dict[str, Any]:
        return batch

    return HostLoop(training.strategy, training.step, resident, config.steps_per_loop), resident


def _only_read(batch: dict[str, Any], totals: Any) -> Any:
    """A step that takes its batch and does nothing with it but make sure that it is there."""
    import tensorflow as tf

    seen = tf.add_n([tf.cast(tf.reshape(value, [-1])[0], tf.float32) for value in batch.values()])
    return totals._replace(loss_last=seen)


def _parts(config: BenchmarkConfig, windows: dict[str, list[Window]]) -> verdict.Parts:
    """From the variants' windows to the parts of a step."""
    as_is, other_loop = windows["as it is"], windows.get(OTHER_LOOP)
    resident = windows.get("without input", as_is)
    alone = windows.get("without all-reduce")
    rows_per_step = [
        _rows_per_step(config, each) for each in (config.steps_per_loop, _other_steps_per_call(config))
    ]
    waits = {
        "input_wait": verdict.difference(as_is, resident) if "without input" in windows else None,
        "exposed_communication": verdict.difference(resident, alone) if alone else None,
        "host_gap": verdict.host_gap(resident, other_loop, *rows_per_step) if other_loop else None,
    }
    step_ms = statistics.step_time_ms(as_is).mean
    rest_ms = step_ms - sum(part.ms for part in waits.values() if part is not None)
    only_input = windows.get("input alone")
    return verdict.Parts(
        step=verdict.Part(step_ms),
        compute=verdict.Part(max(rest_ms, 0.0)),
        samples_per_sec=statistics.samples_per_sec(as_is),
        input_samples_per_sec=statistics.samples_per_sec(only_input) if only_input else None,
        **waits,
    )
