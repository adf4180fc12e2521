"""What each part of the input brings: one thing changed at a time, in rounds. TensorFlow-free."""

import dataclasses
import datetime
import gc
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfbench import devices, outcome
from tfbench.config import BenchmarkConfig
from tfbench.data import InputLog
from tfbench.display import Display, interval
from tfbench.hardware.gpus import Machine
from tfbench.inputbench import row
from tfbench.inputbench.drain import Drained, Plan, drain
from tfbench.inputbench.run import identity
from tfbench.measure import statistics

BASELINE = "as it is"
_HEADER = ("variant", "samples/s", "95 %", "× as it is", "95 %", "CPU µs/sample", "cores busy", "by others")


@dataclasses.dataclass
class Variant:
    """An input, and what was taken from it."""

    name: str
    change: str  # in words
    start: Callable[[], Callable[[], int]]  # → takes some samples and returns their number
    warm_up_samples: int  # before the first round: they fill a cache
    log: InputLog
    rounds: list[Drained] = dataclasses.field(default_factory=list)

    @property
    def all_rounds(self) -> Drained:
        """The rounds as one."""
        used = [drained.used for drained in self.rounds]
        total = dataclasses.replace(
            used[0],
            cpu_s=sum(each.cpu_s for each in used),
            cores_s=sum(each.cores_s for each in used),
            read_bytes=None,
            threads_s={},  # every round has its own
        )
        return Drained(tuple(window for drained in self.rounds for window in drained.windows), total)


def ratio(rates: Sequence[float], baseline: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Geometric mean of the rounds' ratios with its 95 % interval, Student's; none of one round.

    Pairs of a round share what the machine was doing then.
    """
    logs = [math.log(rate / base) for rate, base in zip(rates, baseline, strict=True)]
    mean = math.exp(sum(logs) / len(logs))
    if len(logs) < 2:
        return mean, None, None
    low, high = statistics.mean_interval(logs)
    return mean, math.exp(low), math.exp(high)


def take_turns(
    variants: Sequence[Variant], seconds: float, rounds: int, after: Callable[[int], None] = lambda _: None
) -> None:
    """Every variant once a round, each round beginning with another one.

    A variant starts anew on its turn: the threads of one that only waits would fill its buffers meanwhile.

    Args:
        variants: take their figures.
        seconds: of a variant in a round, after half of it to warm up.
        rounds: how many.
        after: called after each round with the number of those that are done.
    """
    for number in range(rounds):
        first = number % len(variants)
        for variant in [*variants[first:], *variants[:first]]:
            warm_up = 0 if number else variant.warm_up_samples
            with variant.log.explained():
                variant.rounds.append(drain(variant.start(), Plan(seconds, 1, warm_up)))
            gc.collect()  # ends its pipeline
        after(number + 1)


def run(
    config: BenchmarkConfig,
    seconds: float,
    rounds: int,
    others: list[str],
    machine: Machine,
    display: Display,
) -> str:
    """Measure, show and write the rows; rounds that were not finished are left out.

    Args:
        config: complete and checked; the batches of one replica are made.
        seconds: as for `take_turns`.
        rounds: likewise.
        others: further values of --data to put beside the run's.
        machine: what is there.
        display: where to show it.

    Returns:
        The status, as of a training run.

    Raises:
        InputSchemaError: input_compare.csv has other columns; nothing was measured.
        OSError: the results folder cannot be used.
    """
    started = datetime.datetime.now(datetime.UTC)
    path = Path(config.results_dir) / "input_compare.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    row.check(path, row.CompareRow)
    status, note, found = "ok", None, list[Variant]()
    try:
        with devices.native_messages_to(path.with_suffix(".log")):
            _measure(config, seconds, rounds, others, found, display)
    except (Exception, KeyboardInterrupt) as error:
        status, note = outcome.classify(error)
        outcome.log_traceback(error)
        display.error(note)
    whole_rounds = min((len(variant.rounds) for variant in found), default=0)
    for variant in found:
        del variant.rounds[whole_rounds:]
    if whole_rounds:
        import tensorflow as tf

        own_flags = ["--compare", f"--seconds={seconds:g}", f"--rounds={rounds}"]
        own_flags += [f"--compare_data={other}" for other in others]
        asked = identity(config, machine, started, *own_flags) | {"tensorflow": tf.__version__}
        _show(config, found, machine, display)
        for variant in found:
            figures = _figures(variant, found[0])
            row.append(path, row.CompareRow(status=status, note=note, **asked, **figures))
        display.say(f"rows: {path}")
    # TensorFlow waits for ever for an input iterator that is still alive when the interpreter ends.
    found.clear()
    gc.collect()
    return status


def _measure(
    config: BenchmarkConfig,
    seconds: float,
    rounds: int,
    others: list[str],
    found: list[Variant],
    display: Display,
) -> None:
    devices.set_environment(config)
    devices.open_devices(config)
    from tfbench.inputbench.variants import variants

    found.extend(variants(config, others))
    display.say(
        f"{len(found)} variants, {rounds} rounds of {seconds:g} s each, after half of it to warm up and "
        "what it takes to start"
    )
    take_turns(found, seconds, rounds, lambda done: display.say(f"round {done} of {rounds} is done"))


def _figures(variant: Variant, baseline: Variant) -> dict[str, Any]:
    """Columns of what was measured."""
    done = variant.all_rounds
    low, high = done.interval
    mean, ratio_low, ratio_high = ratio(
        *([drained.samples_per_sec for drained in each.rounds] for each in (variant, baseline))
    )
    return {
        "variant": variant.name,
        "change": variant.change,
        "rounds": len(variant.rounds),
        "seconds": done.seconds,
        "samples_per_sec": done.samples_per_sec,
        "samples_per_sec_low": low,
        "samples_per_sec_high": high,
        "ratio": mean,
        "ratio_low": ratio_low,
        "ratio_high": ratio_high,
        "cpu_us_per_sample": done.cpu_us_per_sample,
        "cores_busy": done.cores_busy,
        "cores_busy_by_others": done.cores_busy_by_others,
    }


def _show(config: BenchmarkConfig, found: list[Variant], machine: Machine, display: Display) -> None:
    lines = [_line(_figures(variant, found[0])) for variant in found]
    display.grid(f"{config.data} for {config.model} on {machine.cpu_cores} cores", _HEADER, lines)
    for variant in found:
        if variant.change:
            display.say(f"{variant.name}: {variant.change}")
    for warning in {variant.log.warning() for variant in found} - {None}:
        display.warn(f"{warning}")


def _line(figures: dict[str, Any]) -> tuple[str, ...]:
    return (
        figures["variant"],
        f"{figures['samples_per_sec']:,.0f}",
        interval(figures["samples_per_sec_low"], figures["samples_per_sec_high"]),
        f"{figures['ratio']:.3f}",
        interval(figures["ratio_low"], figures["ratio_high"], 3) if figures["change"] else "",
        f"{figures['cpu_us_per_sample']:,.1f}",
        f"{figures['cores_busy']:.2f}",
        f"{figures['cores_busy_by_others']:.2f}",
    )
