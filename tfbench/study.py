"""What the experiments share: choices, rows, ratios with their intervals, the table and the picture.

TensorFlow-free.
"""

import csv
import dataclasses
import gc
import math
import os
import shlex
import statistics as stdlib_statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tfbench.flags
from tfbench import devices, records
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.defaults import complete
from tfbench.display import Display
from tfbench.hardware.gpus import this_machine
from tfbench.measure import statistics
from tfbench.measure.timing import WindowTimer
from tfbench.precision import PRECISIONS
from tfbench.records import RunRecord
from tfbench.sweeping import loop, plan
from tfbench.sweeping.child import Limits
from tfbench.sweeping.matrix import Point
from tfbench.sweeping.scaling import rate_of_runs
from tfbench.sweeping.stopping import StopRequests

flags.adopt_module_key_flags(tfbench.flags)
_REUSE = flags.DEFINE_list("reuse", [], "Results files (runs.csv) to take the rows from; nothing is trained.")
_REPEATS = flags.DEFINE_integer(
    "repeats",
    1,
    "Runs of every point: all points once, then all again.",
    lower_bound=1,
    allow_override=True,  # a process that imports other commands too, as the tests do, has theirs
)
_RETRY = flags.DEFINE_enum(
    "retry", "failed", list(plan.RETRIES), "As of python -m tfbench.sweep.", allow_override=True
)
_POINT_TIMEOUT_S = flags.DEFINE_float(
    "point_timeout_s", 0.0, "Longest that a run may take; 0: no limit.", lower_bound=0, allow_override=True
)
_PLAN_S = flags.DEFINE_float(
    "plan_s",
    None,
    "Only say how many runs are missing, and how long they take at so many seconds each.",
    lower_bound=0,
)
_ONLY = flags.DEFINE_list("only", [], "Only the points whose name contains one of these texts.")

# Of a training run. Short enough for a sweep, and no longer where the rate scatters: losses are compared, so
# every point makes the same number of updates.
GPU_STEPS: dict[str, Any] = {
    "steps": 100, "warmup_steps": 20, "windows": 10, "steps_per_loop": 10, "target_interval_percent": 0.0,
}  # fmt: skip
CPU_STEPS: dict[str, Any] = {"steps": 20, "warmup_steps": 2, "windows": 10, "steps_per_loop": 1}
EXIT_REFUSED, EXIT_INTERRUPTED = 2, 130
HANG_TIMEOUT_S = 900.0  # of silence: as the sweep's own

WINDOWS, WINDOW_S = 10, 0.2  # of what is timed in this process
# Okabe and Ito's colours, which the colour-blind tell apart, from the darkest; markers for black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
SHORT_BAR = 0.2  # of the longest one
# By point a script that takes train's flags and leaves its row in a folder of the script's name: its points
# may have the run keys of tfbench's.
Programs = Mapping[str, Path]
NO_PROGRAMS: Programs = {}
_BAR_INCHES, _MARGIN_INCHES, _PANEL_INCHES = 0.4, 1.3, 5.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A positive figure with its 95 % interval; None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> "Estimate":
        """The figure in another unit."""
        ends = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, *ends)

    def over(self, other: "Estimate | None") -> "Estimate | None":
        """How many times the other it is; None without another, and exactly 1 to itself."""
        if other is None or other is self:
            return other and Estimate(1.0)
        if None in (self.low, self.high, other.low, other.high):
            return Estimate(self.value / other.value)
        low, high = statistics.ratio_interval(dataclasses.astuple(self), dataclasses.astuple(other))
        return Estimate(self.value / other.value, low, high)


def spoken(estimate: Estimate | None, unit: str = "times") -> str:
    """A figure in a sentence."""
    if estimate is None:
        return "not measured"
    ends = "" if estimate.low is None else f" (95 %: {_shown(estimate.low)} to {_shown(estimate.high)})"
    return f"{_shown(estimate.value)} {unit}{ends}"


class Experiment:
    """One question: where its rows come from and where its answer goes.

    Args:
        name: of the files it writes.
        on_gpu: its own choices where the user made none, by field of BenchmarkConfig, with GPUs.
        on_cpu: the same without.
        reuse: files to take rows from where the user names none.
        own_folder: keep the rows apart from those of other experiments.
    """

    def __init__(
        self,
        name: str,
        on_gpu: Mapping[str, Any],
        on_cpu: Mapping[str, Any],
        *,
        reuse: Sequence[str | os.PathLike[str]] = (),
        own_folder: bool = False,
    ):
        self.name, self.display, self.machine = name, Display(), this_machine()
        self.reused = [row for path in _REUSE.value or reuse for row in records.read(path)]
        chosen = tfbench.flags.choices_from_flags()
        with_gpus = bool(self.machine.gpus) and chosen["gpus"] != "0"
        self.on_gpu = any(row.num_gpus for row in self.reused) if self.reused else with_gpus
        own = on_gpu if self.on_gpu else on_cpu
        self.asked = {name for name in chosen if flags.FLAGS[name].present}
        self.choices = chosen | {name: value for name, value in own.items() if name not in self.asked}
        self.folder = Path(self.choices["results_dir"]) / (name if own_folder else "")
        self.choices["results_dir"] = f"{self.folder}"
        self.code, self.good_points = 0, 0  # of its runs, by `rows`
        self._left_out: set[str] = set()  # run ids that the user has been told of

    def rows(
        self,
        points: Mapping[str, Mapping[str, Any]],
        least_repeats: int = 1,
        programs: Programs = NO_PROGRAMS,
    ) -> dict[str, list[RunRecord]]:
        """Rows of each point: its choices in a fresh process, or found in the files of --reuse.

        Points that a killed experiment has made are not run again. What cannot be run on this machine is
        said and has no rows. With --plan_s the program ends here.

        Args:
            points: choices by name, that win over the experiment's.
            least_repeats: runs of each where --repeats does not say more.
            programs: scripts that train in tfbench's stead, by point; see `Programs`.

        Raises:
            ConfigError: --only names no point, or the results folder cannot be used.
        """
        wanted = {name: points[name] for name in only(points)}
        if self.reused and _PLAN_S.value is not None:
            raise ConfigError("plan_s", _PLAN_S.value, "goes without --reuse, with which nothing is run")
        if self.reused:
            rows = {name: self.found(choices) for name, choices in wanted.items()}
        else:
            works = self._works(wanted, max(_REPEATS.value, least_repeats), programs)
            if _PLAN_S.value is not None:
                self._say_plan(works, _PLAN_S.value)
                raise SystemExit(0)
            self.code = self._run(works)
            made = {point.name: (work, point) for work in works for point in work.points}
            rows = {name: _rows_of(*made[name]) if name in made else [] for name in wanted}
        self.good_points = sum(status_of(own) == "ok" for own in rows.values())
        if not self.good_points:
            self.code = self.code or plan.EXIT_NONE_OK
        return rows

    def _works(
        self, wanted: Mapping[str, Mapping[str, Any]], repeats: int, programs: Programs
    ) -> list[loop.Sweep]:
        """What is to be run: a sweep for each program."""
        made: dict[Path | None, list[Point]] = {}
        for name, choices in wanted.items():
            program = programs.get(name)
            own = {"results_dir": f"{self.folder / program.stem}"} if program else {}
            try:
                config, _ = complete(self.choices | dict(choices) | own, self.machine)
            except ConfigError as error:
                self.display.warn(f"{name} is left out: {error}")
                continue
            made.setdefault(program, []).append(Point(name, config))
        limits = Limits(_POINT_TIMEOUT_S.value, HANG_TIMEOUT_S)
        return [
            loop.Sweep(
                points,
                plan.rounds(points, repeats),
                self.machine,
                _RETRY.value,
                limits,
                trainer=(sys.executable, f"{program}") if program else None,
            )
            for program, points in made.items()
        ]

    def _run(self, works: Sequence[loop.Sweep]) -> int:
        """Run what is missing, with several programs round by round; the exit code."""
        parts = works
        if len(works) > 1:
            numbers = sorted({each.number for work in works for each in work.tries})
            parts = [_round(work, number) for number in numbers for work in works]
        with StopRequests() as stop:
            for part in parts:
                if not stop.count:
                    loop.sweep(part, self.display, stop)
        total = sum(len(work.tries) for work in works)
        code = plan.exit_code_of(total - sum(_missing(work, "failed") for work in works), total)
        return EXIT_INTERRUPTED if stop.count and code else code

    def _say_plan(self, works: Sequence[loop.Sweep], run_s: float) -> None:
        missing = sum(_missing(work, work.retry) for work in works)
        minutes = math.ceil(missing * run_s / 60)
        self.display.say(
            f"{self.name}, {self.choices['model']}: {missing} of {sum(len(work.tries) for work in works)} "
            f"runs missing, about {minutes} min at {run_s:g} s each"
        )

    def example(self, choices: Mapping[str, Any]) -> BenchmarkConfig | RunRecord | None:
        """A point as it is completed here, or a reused row of it; None: there is no such row.

        Raises:
            ConfigError: it cannot be run on this machine.
        """
        if self.reused:
            return next(iter(self.found(choices)), None)
        return complete(self.choices | dict(choices), self.machine)[0]

    def found(self, choices: Mapping[str, Any]) -> list[RunRecord]:
        """Reused rows whose flags say these choices and the user's; of several configurations the newest.

        Of the experiment's own choices model and precision: they are what it asks about, its steps are not.
        By flags and not by run key: another machine completes the same choices to another key.
        """
        told = {name: self.choices[name] for name in ("model", "precision", *self.asked)} | dict(choices)
        told = {
            k: v for k, v in told.items() if k not in ("results_dir", "diagnose") and v not in (None, "auto")
        }
        lines = {f"--{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in told.items()}
        alike = [row for row in self.reused if lines <= set(shlex.split(row.flags or ""))]
        newest = max(alike, key=lambda row: row.started_at or "", default=None)
        return self._of_one_machine([row for row in alike if newest and row.run_key == newest.run_key])

    def _of_one_machine(self, rows: list[RunRecord]) -> list[RunRecord]:
        """Without the good rows of other machines than the newest one's, which no mean joins; says which."""
        good = [row for row in rows if row.status == "ok"]
        newest = max(good, key=lambda row: row.started_at or "", default=None)
        others = [row for row in good if newest and _machine_of(row) != _machine_of(newest)]
        news = {f"{row.run_id}" for row in others} - self._left_out
        if newest and news:
            self._left_out |= news
            self.display.warn(
                f"--reuse: left out, as not of the machine of {newest.run_id} (GPU, host, TensorFlow, runs "
                f"side by side), the newest of their configuration: {', '.join(sorted(news))}"
            )
        return [row for row in rows if row not in others]

    def open_devices(self, cpu_replicas: int = 1) -> list[str]:
        """TensorFlow's names of the devices to measure on in this process, as many as --gpus says.

        Args:
            cpu_replicas: logical devices where there is no GPU.

        Raises:
            ConfigError: more GPUs than there are, or a flag of experiments that train.
        """
        refuse_flags_of_runs()
        devices_asked = {"gpus": self.choices["gpus"], "cpu_replicas": 1 if self.on_gpu else cpu_replicas}
        config, _ = complete({"model": self.choices["model"], **devices_asked}, self.machine)
        self.folder.mkdir(parents=True, exist_ok=True)
        devices.set_environment(config)
        with devices.native_messages_to(self.folder / f"{self.name}.log"):
            return devices.open_devices(config)

    def finish(
        self, header: Sequence[str], lines: Sequence[Sequence[Any]], answer: str, figure: Figure
    ) -> int:
        """Show the table and the answer; write the table as CSV and the picture beside it.

        An Estimate is one cell on the screen and three columns of the CSV. An earlier answer stays where
        Ctrl-C has left nothing to compare.

        Returns:
            The exit code: 0 where every run ended ok, 1 where some did, 2 where none did, 130 after Ctrl-C.

        Raises:
            ConfigError: the files cannot be written.
        """
        self.display.grid(self.name, tuple(header), [tuple(map(_shown, line)) for line in lines])
        self.display.say(answer)
        self.folder.mkdir(parents=True, exist_ok=True)
        table, picture = (self.folder / f"{self.name}.{kind}" for kind in ("csv", "png"))
        if self.code == EXIT_INTERRUPTED and self.good_points < 2 and table.exists():
            self.display.say(f"{table} is left as it was")
            return self.code
        try:
            with open(table, "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(_spread(header, lines))
            figure.savefig(picture, dpi=150)
        except OSError as error:
            raise ConfigError("results_dir", self.folder, f"the answer is not written: {error}") from error
        self.display.say(f"table: {table}   picture: {picture}")
        return self.code


def start(main: Callable[[list[str]], int]) -> None:
    """Run an experiment, which gives the exit code; what the user can mend is one line and exit code 2."""

    def guarded(argv: list[str]) -> int:
        try:
            code = main(argv)
        except (ConfigError, records.SchemaError, OSError) as error:
            Display().error(f"{error}")
            return EXIT_REFUSED
        except KeyboardInterrupt:
            Display().error("stopped by the user")
            return EXIT_INTERRUPTED
        gc.collect()  # TensorFlow waits for an input iterator that lives until the interpreter ends
        return code

    app.run(guarded)


def refuse_flags_of_runs(*but: str) -> None:
    """For experiments that start no runs: they would pass over what these flags ask for.

    Args:
        but: names of those that it reads all the same.

    Raises:
        ConfigError: names the first that was given.
    """
    for holder in (_PLAN_S, _REPEATS, _ONLY, _REUSE, _RETRY, _POINT_TIMEOUT_S):
        if holder.present and holder.name not in but:
            value = ",".join(holder.value) if isinstance(holder.value, list) else holder.value
            raise ConfigError(holder.name, value, "not here: this experiment starts no runs; leave it out")


def _round(work: loop.Sweep, number: int) -> loop.Sweep:
    """The sweep with one round of its runs."""
    return dataclasses.replace(work, tries=[each for each in work.tries if each.number == number])


def _missing(work: loop.Sweep, retry: str) -> int:
    return len(work.missing(retry))


def _machine_of(row: RunRecord) -> tuple[Any, ...]:
    return row.gpu_name, row.host, row.tensorflow, records.side_by_side(row)


def _rows_of(work: loop.Sweep, point: Point) -> list[RunRecord]:
    return plan.rows_of(point.config, work.rows(), beside=False)


def numbers(flag: flags.FlagHolder[Any], default: Sequence[float]) -> list[float]:
    """The positive numbers of a list flag, the smallest first.

    Raises:
        ConfigError: one is none.
    """
    try:
        found = sorted({float(text) for text in flag.value or default})
    except ValueError:
        found = []
    if not found or not 0 < found[0] <= found[-1] < math.inf:
        raise ConfigError(flag.name, ",".join(flag.value), "positive numbers such as 8,32")
    return found


def some_of(
    flag: flags.FlagHolder[Any], accepted: Iterable[str], default: Sequence[Any] = ()
) -> Sequence[Any]:
    """The words of a list flag in their order, each once; the default where the flag has no value.

    Raises:
        ConfigError: there is none, or one is not accepted.
    """
    if flag.value is None:
        return default
    if not flag.value or not set(flag.value) <= set(accepted):
        raise ConfigError(flag.name, ",".join(flag.value), f"some of {','.join(accepted)}")
    return list(dict.fromkeys(flag.value))


def only(names: Iterable[str]) -> list[str]:
    """The names of points that --only leaves.

    Raises:
        ConfigError: one of its texts is in no name.
    """
    names = list(names)
    if not all(any(text in name for name in names) for text in _ONLY.value):
        raise ConfigError("only", ",".join(_ONLY.value), f"parts of the names {', '.join(names)}")
    return [name for name in names if not _ONLY.value or any(text in name for text in _ONLY.value)]


def rate_of(rows: Sequence[RunRecord]) -> Estimate | None:
    """Samples/s of the good rows of one point; see `statistics.interval_over_runs` for the interval."""
    good = [row for row in rows if row.status == "ok" and row.samples_per_sec]
    if not good:
        return None
    known = rate_of_runs(good)
    return Estimate(*known) if known else Estimate(mean_of(good, "samples_per_sec") or 0.0)


def estimate_of(rows: Sequence[RunRecord], column: str) -> Estimate | None:
    """Mean of a column over the good rows that have it; with an interval, of the runs, from three on."""
    known = [value for row in rows if row.status == "ok" and (value := getattr(row, column)) is not None]
    ends = statistics.interval_over_runs(known, []) or (None, None)
    return Estimate(stdlib_statistics.fmean(known), *ends) if known else None


def mean_of(rows: Sequence[RunRecord], column: str) -> float | None:
    """Mean of a column over the good rows that have it."""
    values = [getattr(row, column) for row in rows if row.status == "ok"]
    known = [value for value in values if value is not None]
    return stdlib_statistics.fmean(known) if known else None


def status_of(rows: Sequence[RunRecord]) -> str:
    """How a point ended: ok where one of its runs did, else as the newest."""
    ends = [row.status or "failed" for row in rows]
    return "ok" if "ok" in ends else ends[-1] if ends else "not run"


def timed(call: Callable[[], object], windows: int = WINDOWS, calls: int | None = None) -> Estimate:
    """Calls/s of a function, after two that are not timed (the first may compile).

    Args:
        call: starts the work; it may end later, on a device.
        windows: timed blocks.
        calls: in each of them; None: as many as take WINDOW_S by the trial before.
    """
    call()
    devices.synchronize()
    start_s = time.monotonic()
    call()
    devices.synchronize()
    calls = calls or math.ceil(WINDOW_S / (time.monotonic() - start_s))
    timer = WindowTimer(devices.synchronize)
    for _ in range(windows):
        with timer.window() as counted:
            for _ in range(calls):
                call()
            counted.add(calls, calls)
    interval = statistics.rate_interval(timer.windows) or (None, None)
    return Estimate(statistics.samples_per_sec(timer.windows), *interval)


def compute_dtype(precision: str) -> str:
    """Name of the dtype that a precision multiplies in."""
    return PRECISIONS[precision].policy.removeprefix("mixed_")


def canvas(title: str, panels: int = 1, bars: int = 10) -> tuple[Figure, list[Axes]]:
    """A picture with panels side by side, high enough for `bars` bars."""
    height = max(_MARGIN_INCHES + bars * _BAR_INCHES, 0.5 * _PANEL_INCHES)
    figure = Figure(figsize=(_PANEL_INCHES * max(panels, 1.6), height), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def draw_bars(axes: Axes, unit: str, bars: Mapping[str, Estimate | None]) -> None:
    """A horizontal bar for each name, from the top, with its figure and interval; none where not measured."""
    axes.set(xlabel=unit, yticks=range(len(bars)), yticklabels=list(bars))
    axes.set_ylim(len(bars) - 0.4, -0.6)
    longest = max((estimate.value for estimate in bars.values() if estimate), default=0.0)
    for place, estimate in enumerate(bars.values()):
        if estimate is None:
            axes.text(0, place, " not measured", va="center", color="0.4")
            continue
        axes.barh(place, estimate.value, color=COLOURS[0], height=0.6)
        _whiskers(axes, estimate, estimate.value, place, across=True)
        beside = estimate.value < SHORT_BAR * longest  # its figure would hang over the end
        axes.text(
            max(estimate.value, estimate.high or 0.0) if beside else 0,
            place,
            f"  {_shown(estimate.value)}",
            va="center",
            color=COLOURS[-1] if beside else "white",
            fontweight="bold",
        )
    _tidy(axes, "x")


def draw_lines(
    axes: Axes, x: str, y: str, lines: Mapping[str, Sequence[tuple[float, Estimate | None]]]
) -> None:
    """A line for each name through its points (position, figure), with intervals; positions go by powers."""
    for number, (name, points) in enumerate(lines.items()):
        known = [(place, estimate) for place, estimate in points if estimate is not None]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        values = [each.value for _, each in known]
        axes.plot([place for place, _ in known], values, label=name, color=colour, marker=marker)
        for place, estimate in known:
            _whiskers(axes, estimate, place, estimate.value, across=False, colour=colour)
    places = sorted({place for points in lines.values() for place, _ in points})
    axes.set_xscale("log", base=2)
    axes.set(xlabel=x, ylabel=y, xticks=places, xticklabels=[_shown(place) for place in places])
    axes.minorticks_off()
    heights = [each.value for points in lines.values() for _, each in points if each is not None]
    axes.set_ylim(0, 1.2 * max(heights, default=1.0))  # a wide interval of one point would flatten the rest
    axes.legend(frameon=False)
    _tidy(axes, "y")


def _whiskers(
    axes: Axes, estimate: Estimate, x: float, y: float, across: bool, colour: str = "black"
) -> None:
    """The interval, where it has two finite ends."""
    if estimate.low is None or estimate.high is None or not math.isfinite(estimate.high):
        return
    ends = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
    axes.errorbar(x, y, xerr=ends if across else None, yerr=None if across else ends, color=colour, capsize=3)


def _tidy(axes: Axes, values: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=values, color="0.9")
    axes.set_axisbelow(True)


def _spread(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The table with value, low and high of Estimates in columns of their own."""
    wide = [any(isinstance(line[place], Estimate) for line in lines) for place in range(len(header))]
    spread: list[list[Any]] = [
        [text for name, three in zip(header, wide, strict=True) for text in _columns(name, three)]
    ]
    for line in lines:
        spread.append([])
        for cell, three in zip(line, wide, strict=True):
            spread[-1] += _three(cell) if three else (cell,)
    return spread


def _columns(name: str, three: bool) -> tuple[str, ...]:
    return (name, f"{name}, low", f"{name}, high") if three else (name,)


def _three(cell: Estimate | None) -> tuple[float | None, ...]:
    return (None, None, None) if cell is None else dataclasses.astuple(cell)


def _shown(cell: Any) -> str:
    """A cell of the table: three or four digits are enough to read, the CSV has them all."""
    if cell is None:
        return ""
    if isinstance(cell, Estimate):
        ends = "" if cell.low is None else f" ({_shown(cell.low)} to {_shown(cell.high)})"
        return f"{_shown(cell.value)}{ends}"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell}"
