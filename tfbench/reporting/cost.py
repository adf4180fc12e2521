"""What measured rates cost at given prices: a million samples, GPU-hours, a training with its failures."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfbench.measure import restarts
from tfbench.records import RunRecord
from tfbench.reporting.document import (
    Bar,
    BarChart,
    Cell,
    Section,
    Table,
    count,
    figure,
    interval,
    number,
    percent,
    words,
)
from tfbench.reporting.naming import MachineNames, grouped, setup, workload
from tfbench.reporting.prices import CostError, Price, Prices
from tfbench.reporting.repeats import Repeats, labelled, newest_repeats, repeats
from tfbench.reporting.sections import MOST_BARS

_INTRO = (
    "Prices are those of the file that --prices names, for one GPU and hour. Rates and their 95 % intervals "
    "are those of the ranking and are taken to hold all the time; energy, storage and evaluation are not in "
    "it."
)
_INTRO_OF_FAILURES = (
    " Failures come at random at the given rate per GPU and cost the work since the last checkpoint; "
    "checkpoints are as far apart as makes the whole shortest (Young 1974, Daly 2006)."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What shall be computed, in the words of the flags.

    Raises:
        CostError: a number that is not positive, or flags that need another one.
    """

    prices: Prices
    budget_gpu_hours: float | None = None
    train_samples: int | None = None
    budget: float | None = None  # in the currency of the prices
    deadline_hours: float | None = None
    failures_per_1000_gpu_hours: float | None = None
    checkpoint_minutes: float | None = None  # writing one
    restart_minutes: float | None = None  # from a failure until the work goes on

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if name != "prices" and value is not None}
        for name, value in given.items():
            if not 0 < value < math.inf and not (name == "restart_minutes" and value == 0):
                raise CostError(f"--{name}={value}: a number above 0")
        for name, needed in (
            ("budget", "train_samples"),
            ("deadline_hours", "train_samples"),
            ("failures_per_1000_gpu_hours", "train_samples"),
            ("failures_per_1000_gpu_hours", "checkpoint_minutes"),
            ("checkpoint_minutes", "failures_per_1000_gpu_hours"),
            ("restart_minutes", "failures_per_1000_gpu_hours"),
        ):
            if name in given and needed not in given:
                raise CostError(f"--{name} needs --{needed}: give both, or leave it out")


class Estimate(NamedTuple):
    """A value with its 95 % interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    def map(self, function: Callable[[float], float]) -> "Estimate":
        """The same through a function that grows."""
        low, high = (None if end is None else function(end) for end in (self.low, self.high))
        return Estimate(function(self.value), low, high)

    def cells(self) -> list[Cell]:
        """Two: the value and the interval."""
        return [number(self.value), interval(self.low, self.high)]


class Option(NamedTuple):
    """A run, or the repeats of one configuration, with the price of its card."""

    label: str
    runs: Repeats
    price: Price

    @property
    def gpus(self) -> int:
        """Of all workers; a row with a price has some."""
        return self.runs.first.num_gpus or 1

    @property
    def price_per_hour(self) -> float:
        """Of all its GPUs."""
        return self.gpus * self.price.per_hour

    def hours(self, samples: float) -> Estimate:
        """Time for so many samples at the measured rate."""
        value, low, high = self.runs.rate, *self.runs.rate_interval
        share = samples / (3600 * self.gpus)
        if low is None or high is None or low <= 0:
            return Estimate(share / value)
        return Estimate(share / value, share / high, share / low)

    def cost_per_million(self) -> Estimate:
        """Of samples."""
        return self.hours(1e6).map(lambda hours: hours * self.price_per_hour)


@dataclasses.dataclass(frozen=True)
class Training:
    """How long a training takes on one option and what it costs, with its checkpoints and failures."""

    option: Option
    hours: Estimate
    failures: float | None = None
    checkpoint_every_minutes: float | None = None
    added: float | None = None  # by both, as a share of the time without them

    @property
    def cost(self) -> Estimate:
        """In the currency of the prices."""
        return self.hours.map(lambda hours: hours * self.option.price_per_hour)


def train(option: Option, plan: Plan) -> Training:
    """The training of a plan that says how many samples."""
    assert plan.train_samples is not None
    hours = option.hours(plan.train_samples)
    if plan.failures_per_1000_gpu_hours is None or plan.checkpoint_minutes is None:
        return Training(option, hours)
    between = restarts.mean_hours_between_failures(plan.failures_per_1000_gpu_hours, option.gpus)
    writing, restart = plan.checkpoint_minutes / 60, (plan.restart_minutes or 0.0) / 60
    every = restarts.checkpoint_interval_hours(writing, between)
    total = hours.map(lambda work: restarts.wall_hours(work, every, writing, restart, between))
    return Training(option, total, total.value / between, 60 * every, total.value / hours.value - 1)


def section(rows: Sequence[RunRecord], plan: Plan | None, machines: MachineNames) -> Section:
    """Costs of the newest configuration of each setup, by the median of its repeats, the cheapest first.

    Args:
        rows: that ended well.
        plan: prices and what to compute; None: there are no prices.
        machines: of the whole report.
    """
    if plan is None:
        missing = (
            "No prices were given. Fill it with: python -m tfbench.report --prices=FILE, a file such as "
            "tfbench/hardware/prices_example.csv with what your GPUs cost"
        )
        return Section("cost", "Cost", missing=missing)
    latest = [
        newest_repeats(group) for group in grouped(repeats(rows), lambda each: setup(each.first)).values()
    ]
    by_price = grouped(latest, lambda each: bool(each.first.num_gpus and plan.prices.of(each.first.gpu_name)))
    unpriced = [each.first for each in by_price.get(False, [])]
    priced, without = by_price.get(True, []), _without_price(unpriced, plan.prices)
    if not priced:
        cards = ", ".join(line[0].text for table in without for line in table.rows) or "no run ended well"
        return Section(
            "cost", "Cost", missing=f"No price of {plan.prices.file} is of a measured card: {cards}."
        )
    charts, tables = [], []
    for title, group in grouped(priced, lambda each: workload(each.first)).items():
        options = _options(group, plan.prices, machines)
        charts.append(_chart(title, options, plan.prices.currency))
        tables += [
            _per_million(title, options),
            *_gpu_hours(title, options, plan),
            *_trainings(title, options, plan),
        ]
    intro = _INTRO + (_INTRO_OF_FAILURES if plan.failures_per_1000_gpu_hours else "")
    return Section("cost", "Cost", intro, charts, [*tables, *without])


def _options(groups: Sequence[Repeats], prices: Prices, machines: MachineNames) -> list[Option]:
    """Configurations of one workload with their prices, the cheapest sample first."""
    named = labelled(groups, machines)
    found = [Option(label, each, price) for label, each in named if (price := prices.of(each.first.gpu_name))]
    return sorted(found, key=lambda option: option.cost_per_million().value)


def _chart(title: str, options: Sequence[Option], currency: str) -> BarChart:
    bars = [
        Bar(option.label, [("", cost.value)], figure(cost.value), cost.low, cost.high)
        for option in options[:MOST_BARS]
        for cost in [option.cost_per_million()]
    ]
    return BarChart(title, f"{currency} per million samples, less is better", bars)


def _per_million(title: str, options: Sequence[Option]) -> Table:
    currency = options[0].price.currency
    columns = ("run", f"{currency} per million samples", "95 %", "samples/s", f"{currency} per GPU and hour",
               "price of", "source of the price", "flags")  # fmt: skip
    rows = [
        [
            words(option.label),
            *option.cost_per_million().cells(),
            number(option.runs.median("samples_per_sec")),
            number(option.price.per_hour),
            words(option.price.date),
            words(option.price.source),
            option.runs.gates(),
        ]
        for option in options
    ]
    return Table(f"Cost per million samples, {title}", columns, rows)


def _gpu_hours(title: str, options: Sequence[Option], plan: Plan) -> list[Table]:
    """What a number of GPU-hours buys; no table where none was asked for."""
    gpu_hours = plan.budget_gpu_hours
    if gpu_hours is None:
        return []
    columns = ("run", "hours", f"cost, {plan.prices.currency}", "millions of samples", "95 %")
    rows = []
    for option in options:
        hours, each = gpu_hours / option.gpus, option.hours(1e6)
        ends = (None if end is None else hours / end for end in (each.high, each.low))
        millions = Estimate(hours / each.value, *ends)
        cost = gpu_hours * option.price.per_hour
        rows.append([words(option.label), number(hours), number(cost), *millions.cells()])
    return [Table(f"{gpu_hours:g} GPU-hours, {title}", columns, rows)]


def _trainings(title: str, options: Sequence[Option], plan: Plan) -> list[Table]:
    """The training on every option, and which one to take; no tables where none was asked for."""
    if plan.train_samples is None:
        return []
    trainings = sorted((train(option, plan) for option in options), key=lambda each: each.cost.value)
    columns = ("run", f"cost, {plan.prices.currency}", "95 %", "hours", "95 % of them", "GPU-hours",
               "limits", "failures", "checkpoint every, min", "both add")  # fmt: skip
    rows = [
        [
            words(each.option.label),
            *each.cost.cells(),
            *each.hours.cells(),
            number(each.hours.value * each.option.gpus),
            _limits(each, plan),
            number(each.failures, 3),
            number(each.checkpoint_every_minutes, 3),
            percent(each.added, 2),
        ]
        for each in trainings
    ]
    what = f"Training on {plan.train_samples:,} samples, {title}"
    return [Table(what, columns, rows), _choice(what, trainings, plan)]


def _over(value: float, plan_limit: float | None) -> bool:
    return plan_limit is not None and value > plan_limit


def _limits(each: Training, plan: Plan) -> Cell:
    """Whether a training keeps the budget and the deadline, and whether its whole intervals do."""
    if plan.budget is None and plan.deadline_hours is None:
        return Cell("")
    checks = (("over budget", each.cost, plan.budget), ("too late", each.hours, plan.deadline_hours))
    broken = [name for name, found, limit in checks if _over(found.value, limit)]
    if broken:
        return words(" and ".join(broken), "bad")
    maybe = [name for name, found, limit in checks if _over(found.high or found.value, limit)]
    if maybe:
        return words(f"within, but its interval reaches {' and '.join(maybe)}", "warn")
    return words("within", "good")


def _choice(what: str, trainings: Sequence[Training], plan: Plan) -> Table:
    """The cheapest and the fastest training of those that keep the limits."""
    within = [
        each
        for each in trainings
        if not _over(each.cost.value, plan.budget) and not _over(each.hours.value, plan.deadline_hours)
    ]
    limits = [
        *([f"{figure(plan.budget)} {plan.prices.currency}"] if plan.budget is not None else []),
        *([f"{figure(plan.deadline_hours)} hours"] if plan.deadline_hours is not None else []),
    ]
    columns = ("choice", "run", f"cost, {plan.prices.currency}", "hours", "GPUs")
    chosen = [
        ("cheapest", min(within, key=lambda each: each.cost.value, default=None)),
        ("fastest", min(within, key=lambda each: each.hours.value, default=None)),
    ]
    rows = [
        [words(name), words("none keeps the limits", "bad"), Cell(""), Cell(""), Cell("")]
        if each is None
        else [
            words(name),
            words(each.option.label),
            number(each.cost.value),
            number(each.hours.value),
            count(each.option.gpus),
        ]
        for name, each in chosen
    ]
    return Table(f"{what}: the choice{' within ' + ' and '.join(limits) if limits else ''}", columns, rows)


def _without_price(rows: Sequence[RunRecord], prices: Prices) -> list[Table]:
    """Measured cards that the file does not have; no table where it has all."""
    cards = grouped(rows, lambda row: (row.gpu_name or "unknown GPU") if row.num_gpus else "CPU")
    table_rows = [
        [
            words(card),
            count(len(group)),
            words("prices are of GPUs" if card == "CPU" else f"add a line for it to {prices.file}"),
        ]
        for card, group in cards.items()
    ]
    return [Table("Without a price", ("card", "rows", "why"), table_rows)] if table_rows else []
