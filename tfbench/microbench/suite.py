"""All cases in turn: measured, written at once, shown. Imports TensorFlow when something is measured."""

import datetime
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tfbench.display import Bar, Display
from tfbench.hardware import topology
from tfbench.hardware.cards import card_facts
from tfbench.hardware.gpus import Probe
from tfbench.hardware.specs import find
from tfbench.measure.telemetry import Sampler, TelemetrySummary, summarize
from tfbench.microbench import all_reduce, conv, input_rate, launch, matmul, memory, rows
from tfbench.microbench.case import Case, Machine, NotPossibleError, Result, median, median_interval

BENCHMARKS = ("matmul", "conv", "memory", "all_reduce", "input", "launch")
_SAMPLE_PERIOD_S = 0.1  # a case may last no longer than half a second
_NUMBERS = ("rate", "95 %", "of peak", "error", "MHz", "W")  # columns of the tables shown
_WIDE_ONLY = ("95 %", "error", "MHz", "W")
_WIDE_TABLE = 120  # characters

log = logging.getLogger("tfbench")


class CaseProgress(Bar):
    """Cases done and the one that is measured; a line for each where there is no terminal."""

    def __init__(self, display: Display, total: int):
        text = TextColumn("{task.description}")
        # Redrawn between cases only, so that no thread of its own disturbs one.
        super().__init__(
            display, text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), auto_refresh=False
        )
        self.total, self.done = total, 0
        self._task = self._bar.add_task("", total=total)

    def begin(self, case: Case) -> None:
        """`case` is measured next."""
        self._bar.update(self._task, description=f"{case.benchmark} {case.name} {case.precision}")
        self._bar.refresh()

    def end(self, row: rows.MicroRow) -> None:
        """`row` is done."""
        self.done += 1
        self._bar.update(self._task, advance=1)
        found = "no figure" if row.rate is None else f"{row.rate:,.4g} {row.unit}"
        name = " ".join(filter(None, (row.benchmark, row.case, row.precision, row.engine)))
        log.info("%s: %s", name, found)
        if not self.on_terminal:
            self.display.console.print(Text(f"{self.done}/{self.total}  {name}  {found}"), soft_wrap=True)


def machine_of(devices: Sequence[str], probe: Probe, gpus: int, quick: bool) -> Machine:
    """What the cases need to know of the machine.

    Args:
        devices: TensorFlow's names.
        probe: the driver's view.
        gpus: how many of them are used.
        quick: fewer and shorter cases.
    """
    used = probe.gpus[:gpus]
    return Machine(
        devices=tuple(devices),
        gpus=used,
        spec=find(used[0].name) if used and not used[0].is_mig else None,
        card=card_facts(used[0]) if used else None,
        topology=topology.topology(used),
        quick=quick,
    )


def cases(machine: Machine, only: Iterable[str], files: Sequence[str] | None) -> list[Case]:
    """Cases of the benchmarks named, in the order of BENCHMARKS.

    Args:
        machine: what they run on.
        only: names of benchmarks.
        files: TFRecord files to read; None: small ones are made.
    """
    makers: dict[str, Callable[[], Iterator[Case]]] = {
        "matmul": lambda: matmul.cases(machine),
        "conv": lambda: conv.cases(machine),
        "memory": lambda: memory.cases(machine),
        "all_reduce": lambda: all_reduce.cases(machine),
        "input": lambda: input_rate.cases(machine, files),
        "launch": lambda: launch.cases(machine),
    }
    return [case for name in BENCHMARKS if name in set(only) for case in makers[name]()]


def run(
    todo: Sequence[Case], machine: Machine, facts: dict[str, Any], path: Path, display: Display
) -> list[rows.MicroRow]:
    """Measures every case and appends its row as it ends.

    Args:
        todo: in their order.
        machine: what they run on.
        facts: cells that all rows share.
        path: micro.csv.
        display: where to show tables and progress.

    Returns:
        The rows, those without a rate among them.
    """
    done: list[rows.MicroRow] = []
    with Sampler(machine.gpus, period_s=_SAMPLE_PERIOD_S) as sampler, CaseProgress(display, len(todo)) as bar:
        for position, case in enumerate(todo):
            bar.begin(case)
            row = _row(case, sampler, facts)
            rows.append(path, row)
            done.append(row)
            bar.end(row)
            if position + 1 == len(todo) or todo[position + 1].benchmark != case.benchmark:
                alike = [each for each in done if each.benchmark == case.benchmark]
                display.console.print(table(alike, display.console.width))
        problems = sampler.problems
    for problem in problems:
        display.warn(problem)
    return done


def shared_facts(machine: Machine, driver: str | None, versions: dict[str, str | None]) -> dict[str, Any]:
    """Cells that all rows of a run share."""
    started = datetime.datetime.now(datetime.UTC)
    return {
        "run_id": f"micro-{started:%Y%m%d-%H%M%S-%f}",
        "started_at": started.isoformat(timespec="seconds"),
        "gpu_name": machine.gpus[0].name if machine.gpus else None,
        "num_gpus": len(machine.gpus),
        "topology": machine.topology,
        "driver": driver,
        **versions,
        "host": socket.gethostname(),
    }


def _row(case: Case, sampler: Sampler, facts: dict[str, Any]) -> rows.MicroRow:
    """Measures a case; what it cannot do, or fails at, is a row without a rate."""
    import tensorflow as tf

    known = facts | {
        "benchmark": case.benchmark,
        "case": case.name,
        "precision": case.precision or None,
        "engine": case.engine,
        **case.facts,
    }
    try:
        result = case.measure()
    except NotPossibleError as reason:
        return rows.MicroRow(**known, note=str(reason))
    except tf.errors.ResourceExhaustedError:
        return rows.MicroRow(**known, note="the device's memory is too small for it")
    except (
        Exception
    ) as error:  # such as a kernel that is not there: the row says so, and the other cases go on
        log.warning("%s %s failed", case.benchmark, case.name, exc_info=True)
        return rows.MicroRow(**known, note=f"failed: {type(error).__name__}: {error}"[:300])
    return filled(result, known, summarize(list(sampler.samples), result.windows))


def filled(result: Result, known: dict[str, Any], sensors: TelemetrySummary) -> rows.MicroRow:
    """The row of a result; one that computed wrongly has no rate."""
    checked: dict[str, Any] = {
        "relative_error": result.relative_error,
        "bound": result.bound,
        "evidence": result.evidence or None,
        "sm_clock_mhz_mean": sensors.sm_clock_mhz_mean,
        "power_w_mean": sensors.power_w_mean,
        "throttle_reasons": sensors.throttle_reasons,
    }
    if result.is_wrong:
        return rows.MicroRow(**known, **checked, note="wrong: the outputs are not those of float64")
    rate, interval = median(result.rates), median_interval(result.rates)
    return rows.MicroRow(
        **known,
        **checked,
        rate=rate,
        unit=result.unit,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        windows=len(result.rates),
        share_of_peak=rate / result.peak if result.peak else None,
        gb_per_s=result.gb_per_s,
        flop_per_byte=result.flop_per_byte,
        note=result.note or None,
    )


def table(shown: Sequence[rows.MicroRow], width: int) -> Table:
    """The rows of one benchmark; what is not possible says why.

    Args:
        shown: at least one row.
        width: of the terminal; a narrow one is spared what only the file has then.
    """
    made = Table(title=Text(shown[0].benchmark), title_justify="left", pad_edge=False)
    wide = width >= _WIDE_TABLE
    made.add_column("case", overflow="fold", min_width=14)
    made.add_column("format", no_wrap=True)
    made.add_column("engine", no_wrap=True)
    of_several = len({row.num_gpus for row in shown}) > 1
    if of_several:
        made.add_column("GPUs", justify="right", no_wrap=True)
    for name in _NUMBERS if wide else (each for each in _NUMBERS if each not in _WIDE_ONLY):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("remark", overflow="fold", min_width=14, style="dim")
    for row in shown:
        interval = "" if row.low is None else f"{row.low:,.4g} to {row.high:,.4g}"
        numbers = {
            "rate": "" if row.rate is None else f"{row.rate:,.4g} {row.unit}",
            "95 %": interval,
            "of peak": "" if row.share_of_peak is None else f"{row.share_of_peak:.1%}",
            "error": "" if row.relative_error is None else f"{row.relative_error:.1e}",
            "MHz": "" if row.sm_clock_mhz_mean is None else f"{row.sm_clock_mhz_mean:,.0f}",
            "W": "" if row.power_w_mean is None else f"{row.power_w_mean:,.0f}",
        }
        remark = "; ".join(filter(None, (row.note, row.evidence, row.throttle_reasons)))
        kept = [text for name, text in numbers.items() if wide or name not in _WIDE_ONLY]
        gpus = [f"{row.num_gpus or ''}"] if of_several else []
        made.add_row(*map(Text, (row.case, row.precision or "", row.engine or "", *gpus, *kept, remark)))
    return made
