"""What the rows that ended well say: ranking, scaling, batch, precision, parts of a step, energy."""

import itertools
import math
from collections.abc import Callable, Sequence

from tfbench.hardware import references
from tfbench.measure import statistics
from tfbench.models import MODELS
from tfbench.records import RunRecord, find_baseline, mean_of_cards
from tfbench.reporting.document import (
    Bar,
    BarChart,
    Cell,
    Line,
    LineChart,
    Point,
    Section,
    Table,
    count,
    figure,
    interval,
    number,
    percent,
    percent_interval,
    words,
)
from tfbench.reporting.naming import (
    MachineNames,
    batch,
    cards,
    devices,
    flag_of,
    full_labels,
    grouped,
    labels,
    likeness,
    newest,
    on_cpu,
    setup,
    started,
    workload,
    workload_and_precision,
)
from tfbench.reporting.repeats import Repeats, labelled, newest_repeats, repeats

MOST_BARS = 12
_OF_REPEATS = (
    "Runs of one configuration on the same cards are one line with the median of each of their figures."
)
# Rows of these are what a faster precision is compared with.
FULL_PRECISIONS = ("fp32", "tf32")
PARTS = (
    ("compute", "compute_ms"),
    ("all-reduce not hidden", "exposed_communication_ms"),
    ("waiting for input", "input_wait_ms"),
    ("host between calls", "host_gap_ms"),
)

Triple = tuple[float, float, float]  # value, ends of its 95 % interval
Pair = tuple[RunRecord, RunRecord]  # a row and the one-GPU row that it is compared with


def rate_with_interval(row: RunRecord) -> Triple | None:
    """samples_per_sec with both ends of its interval, where it has them."""
    rate_all, low, high = row.samples_per_sec, row.samples_per_sec_low, row.samples_per_sec_high
    if rate_all is None or low is None or high is None or not 0 < low <= rate_all <= high:
        return None
    return rate_all, low, high


def ratio(above: RunRecord, below: RunRecord) -> tuple[float, float | None, float | None]:
    """How many times as fast one row is as another, with the 95 % interval where both rows have one."""
    assert above.samples_per_sec
    assert below.samples_per_sec
    value = above.samples_per_sec / below.samples_per_sec
    theirs, ours = rate_with_interval(below), rate_with_interval(above)
    if theirs is None or ours is None:
        return value, None, None
    return value, *statistics.ratio_interval(ours, theirs)


def published(row: RunRecord) -> tuple[references.Reference, list[str]] | None:
    """The nearest published result and what is different about it; None where there is none."""
    spec = MODELS.get(row.model or "")
    if spec is None or not row.num_gpus or row.precision is None:
        return None
    return references.nearest(
        spec.references,
        row.gpu_name,
        row.precision,
        row.num_gpus,
        row.seq_length,
        per_replica_batch_size=row.per_replica_batch_size,
        data=row.data or "",
    )


def ranking(rows: Sequence[RunRecord], machines: MachineNames) -> Section:
    """Who is fastest, by workload and precision."""
    charts, tables = [], []
    for title, group in grouped(rows, workload_and_precision).items():
        ranked = labelled(sorted(repeats(group), key=lambda each: each.rate, reverse=True), machines)
        charts.append(
            bars(title, "samples/s per GPU", ranked, lambda each: each.rate, lambda each: each.rate_interval)
        )
        tables += [_ranking_table(title, ranked), *_published_table(title, ranked)]
    return Section(
        "ranking",
        "Ranking",
        "Samples per second of one GPU (on the CPU: of all replicas), the fastest first, with the 95 % "
        "interval from the windows of the run and, where it is known, what differs between runs "
        f"(between_runs_percent). {_OF_REPEATS} Their interval is that of the mean over runs: Student's from "
        "three runs on; of two it reaches from the lowest to the highest end of both. Behind a flag stands "
        "how many of them have it. The published result is the nearest that is known, never quite the same "
        "run. Shares of it and of the peak (MFU) have the rate's interval.",
        charts,
        tables,
        "" if tables else "No run ended well. Fill it with: python -m tfbench.train --model=resnet50",
    )


def _ranking_table(title: str, ranked: Sequence[tuple[str, Repeats]]) -> Table:
    columns = ("run", "samples/s per GPU", "95 %", "samples/s", "step, ms", "MFU", "of the nearest published",
               "peak memory, GiB", "flags")  # fmt: skip
    rows = [
        [
            each.name_cell(label),
            number(each.rate),
            interval(*each.rate_interval),
            number(each.median("samples_per_sec")),
            number(each.median("step_time_ms_mean")),
            percent(each.median("mfu")),
            _published_share(each),
            number(each.median("peak_memory_gib"), 3),
            each.gates(),
        ]
        for label, each in ranked
    ]
    return Table(title, columns, rows)


def _published_share(each: Repeats) -> Cell:
    """Always with the card's name: the nearest result may be another card's."""
    found = published(each.first)
    if found is None:
        return Cell("")
    share = each.rate / found[0].per_gpu
    return Cell(f"{100 * share:.0f} % of {found[0].gpu}", share)


def _published_table(title: str, ranked: Sequence[tuple[str, Repeats]]) -> list[Table]:
    """Which results the shares are of; no table where nothing was published."""
    columns = ("run", "published, per GPU", "unit", "card", "GPUs", "framework", "different there", "source")
    rows = [
        [
            each.name_cell(label),
            number(reference.per_gpu),
            words(reference.metric),
            words(reference.gpu),
            count(reference.n_gpu),
            words(reference.framework),
            words("; ".join(differences)),
            words(reference.source),
        ]
        for label, each in ranked
        if (found := published(each.first)) is not None
        for reference, differences in [found]
    ]
    return [Table(f"Published beside {title}", columns, rows)] if rows else []


def bars(
    title: str,
    unit: str,
    ranked: Sequence[tuple[str, Repeats]],
    value: Callable[[Repeats], float],
    ends: Callable[[Repeats], tuple[float | None, float | None]] = lambda each: (None, None),
) -> BarChart:
    """One bar a configuration, no more than fit on a screen."""
    shown = ranked[:MOST_BARS]
    left_out = f" (the first {len(shown)} of {len(ranked)})" if len(shown) < len(ranked) else ""
    return BarChart(
        title + left_out,
        unit,
        [Bar(label, [("", value(each))], figure(value(each)), *ends(each)) for label, each in shown],
    )


def scaling(rows: Sequence[RunRecord], all_rows: Sequence[RunRecord]) -> Section:
    """Rate over GPUs at the same per-replica batch and at the same global one, against the ideal."""
    pairs = [(row, baseline) for row in rows if (baseline := _baseline(row, all_rows)) is not None]
    charts, tables = [], []
    for group in grouped(pairs, lambda pair: (pair[0].scaling_mode, setup(pair[1]))).values():
        group.sort(key=lambda pair: (pair[0].num_gpus or 0, pair[0].started_at or ""))
        strong = group[0][0].scaling_mode == "strong"
        title = _scaling_title(group[0][1], strong)
        charts.append(_scaling_chart(title, group))
        tables.append(_scaling_table(title, group))
    return Section(
        "scaling",
        "Scaling",
        "Samples per second of all GPUs as their number grows. Weak: the batch of each GPU stays the same; "
        "strong: the global batch does, so that each has less to do. Ideal is so many times the one-GPU row, "
        "the efficiency the share of it that is reached; its 95 % interval holds those of both rates. Lines "
        "join the newest runs.",
        charts,
        tables,
        "" if tables else _no_scaling(all_rows),
    )


def _no_scaling(rows: Sequence[RunRecord]) -> str:
    if on_cpu(rows):
        return "No run used a GPU, and it is they whose number grows: replicas on the CPU share its cores."
    return (
        "No run on several GPUs has a one-GPU row to compare with. Fill it with: "
        "python -m tfbench.train --gpus=1, then the same with --gpus=2; or all of a curve with: "
        "python -m tfbench.sweep --scaling=weak, or strong"
    )


def _scaling_title(baseline: RunRecord, strong: bool) -> str:
    what = workload_and_precision(baseline)
    if strong:
        return f"Strong scaling: {what}, global batch {baseline.global_batch_size}"
    return f"Weak scaling: {what}, {batch(baseline)} per GPU"


def _baseline(row: RunRecord, rows: Sequence[RunRecord]) -> RunRecord | None:
    """The one-GPU row that the row's efficiency was computed from, else the newest that would do.

    Of several cards it is one row too, their mean.
    """
    if (row.num_gpus or 0) < 2:
        return None
    wanted = (row.baseline_run_id or "").split("|")
    named = [each for each in rows if each.run_id and each.run_id in wanted]
    found = mean_of_cards(named) if named else find_baseline(rows, row)
    return found if found is not None and found.samples_per_sec else None


def _scaling_chart(title: str, pairs: Sequence[Pair]) -> LineChart:
    """The newest run at each number of GPUs, beside the newest of the one-GPU rows."""
    baseline = newest(baseline for _, baseline in pairs)
    by_gpus = grouped(pairs, lambda pair: pair[0].num_gpus or 0)
    latest = [max(same, key=lambda pair: pair[0].started_at or "") for same in by_gpus.values()]
    one = baseline.samples_per_sec
    assert one is not None
    ideal = [Point(n, n * one, f"ideal, {n} GPUs: {figure(n * one)}") for n in (1, *by_gpus)]
    measured = [
        Point(
            row.num_gpus or 0,
            row.samples_per_sec or 0.0,
            f"{devices(row)}: {figure(row.samples_per_sec or 0.0)} samples/s, "
            f"{_with_ends(*_efficiency(row, its_baseline))} of ideal",
            row.samples_per_sec_low,
            row.samples_per_sec_high,
        )
        for row, its_baseline in ((baseline, baseline), *latest)
    ]
    return LineChart(title, "samples/s", "GPUs", [Line("measured", measured), Line("ideal", ideal, True)])


def _efficiency(row: RunRecord, baseline: RunRecord) -> tuple[float, float | None, float | None]:
    """Share of the ideal with its 95 % interval, where both rows have one; a row is exactly its own ideal.

    It is the same for both modes: at the same global batch, step times are to each other as the rates upside
    down.
    """
    assert row.samples_per_sec
    assert baseline.samples_per_sec
    if row is baseline:
        return 1.0, None, None
    gpus = row.num_gpus or 1
    _, low, high = ratio(row, baseline)
    value = statistics.weak_scaling_efficiency(row.samples_per_sec, gpus, baseline.samples_per_sec)
    return value, None if low is None else low / gpus, None if high is None else high / gpus


def _with_ends(share: float, low: float | None, high: float | None) -> str:
    """A share as per cent with its 95 % interval, where it has one."""
    ends = "" if low is None or high is None else f" ({100 * low:.1f} to {100 * high:.1f})"
    return f"{100 * share:.1f} %{ends}"


def _scaling_table(title: str, pairs: Sequence[Pair]) -> Table:
    """Every run, the one-GPU rows first."""
    columns = ("devices", "started", "batch per GPU", "samples/s", "95 %", "step, ms", "efficiency",
               "95 % of it", "all-reduce not hidden, ms")  # fmt: skip
    ones = {baseline.run_id or id(baseline): (baseline, baseline) for _, baseline in pairs}
    lines = [*sorted(ones.values(), key=lambda pair: pair[0].started_at or ""), *pairs]
    repeated = len({row.num_gpus for row, _ in lines}) < len(lines)
    rows = []
    for row, baseline in lines:
        value, low, high = _efficiency(row, baseline)
        rows.append(
            [
                words(devices(row)),
                words(started(row) if repeated else ""),
                count(row.per_replica_batch_size),
                number(row.samples_per_sec),
                interval(row.samples_per_sec_low, row.samples_per_sec_high),
                number(row.step_time_ms_mean),
                words("baseline") if row is baseline else percent(value),
                percent_interval(low, high),
                number(row.exposed_communication_ms, 3),
            ]
        )
    return Table(title, columns, rows)


def batches(rows: Sequence[RunRecord], machines: MachineNames) -> Section:
    """Rate over the per-replica batch."""
    free = ("per_replica_batch_size",)
    curves = [
        group
        for group in grouped(rows, lambda row: setup(row, *free)).values()
        if len({row.per_replica_batch_size for row in group}) > 1
    ]
    charts, tables = [], []
    for title, members in grouped(curves, lambda group: workload_and_precision(group[0])).items():
        names = _curve_names(members, machines)
        charts.append(
            LineChart(
                title,
                "samples/s per GPU",
                "samples per replica and step",
                [Line(name, _batch_points(group)) for name, group in zip(names, members, strict=True)],
                doubling=True,
            )
        )
        tables.append(_batch_table(title, names, members))
    return Section(
        "batch",
        "Throughput against batch",
        "Samples per second of one GPU as the batch grows. The line joins the newest configuration at each "
        f"batch. {_OF_REPEATS}",
        charts,
        tables,
        ""
        if tables
        else "No two runs differ in the batch only. Fill it with: python -m tfbench.train "
        "--per_replica_batch_size=64, then the same with 128, 256, …",
    )


def _curve_names(members: Sequence[Sequence[RunRecord]], machines: MachineNames) -> list[str]:
    """Names of curves, which have many batches each."""
    rows = [group[0] for group in members]
    return [
        ", ".join(part for part in label.split(", ") if not part.startswith("batch "))
        for label in labels(rows, machines)
    ]


def _newest_by_batch(group: Sequence[RunRecord]) -> list[Repeats]:
    """At each batch the runs of the configuration that was run last."""
    by_batch = grouped(repeats(group), lambda each: each.first.per_replica_batch_size or 0)
    return [newest_repeats(by_batch[size]) for size in sorted(by_batch)]


def _batch_points(group: Sequence[RunRecord]) -> list[Point]:
    return [
        Point(
            each.first.per_replica_batch_size or 0,
            each.rate,
            f"{devices(each.first)}, {batch(each.first)}{each.counted}: "
            f"{figure(each.rate)} samples/s per GPU",
            *each.rate_interval,
        )
        for each in _newest_by_batch(group)
    ]


def _batch_table(title: str, names: Sequence[str], members: Sequence[Sequence[RunRecord]]) -> Table:
    columns = ("run", "batch per replica", "runs", "samples/s per GPU", "95 %", "step, ms",
               "peak memory, GiB")  # fmt: skip
    found = [
        (name, each) for name, group in zip(names, members, strict=True) for each in _newest_by_batch(group)
    ]
    repeated = any(len(each.rows) > 1 for _, each in found)
    rows = [
        [
            each.name_cell(name),
            count(each.first.per_replica_batch_size),
            count(len(each.rows) if repeated else None),
            number(each.rate),
            interval(*each.rate_interval),
            number(each.median("step_time_ms_mean")),
            number(each.median("peak_memory_gib"), 3),
        ]
        for name, each in found
    ]
    return Table(title, columns, rows)


def precisions(rows: Sequence[RunRecord], machines: MachineNames) -> Section:
    """What a faster precision buys: speed and memory against fp32 and tf32, all else alike."""
    table_rows, chart_bars = [], []
    for group in grouped(rows, lambda row: setup(row, "precision", "kernels")).values():
        for row, full in _precision_pairs(group):
            what = f"{row.precision} against {full.precision}{_unlike(row, full)}"
            label = f"{workload(row)}, {labels([row], machines)[0]}: {what}"
            times, low, high = ratio(row, full)
            chart_bars.append(Bar(label, [("", times)], f"{times:.2f} ×", low, high))
            table_rows.append(_precision_row(label, row, full, times, low, high))
    columns = ("runs", "speed-up", "95 %", "samples/s", "samples/s of the other", "peak memory, GiB",
               "GiB of the other", "memory ratio")  # fmt: skip
    title = "Speed-up over full precision"
    return Section(
        "precision",
        "Mixed precision",
        "Rate of a run ÷ rate of the same run in fp32 or tf32, and the memory that both need. Fused kernels "
        "exist in mixed precision only; where they are compared with plain ones, the name says so.",
        [BarChart(title, "times as fast", chart_bars[:MOST_BARS])] if chart_bars else [],
        [Table(title, columns, table_rows)] if table_rows else [],
        "" if table_rows else _no_precisions(rows),
    )


def _no_precisions(rows: Sequence[RunRecord]) -> str:
    first, second = (
        ("--gpus=0 --precision=fp32", "mixed_bfloat16")
        if on_cpu(rows)
        else ("--precision=tf32", "mixed_float16")
    )
    return (
        f"No two runs differ in the precision only. Fill it with: python -m tfbench.train {first}, "
        f"then the same with --precision={second}"
    )


def _precision_pairs(rows: Sequence[RunRecord]) -> list[Pair]:
    """Each precision and kernels beside fp32 and tf32: of the rows most alike the newest."""
    variants = grouped(rows, lambda row: (row.precision, flag_of(row, "kernels")))
    pairs = []
    for precision in FULL_PRECISIONS:
        fulls = [row for row in rows if row.precision == precision]
        for (name, _), same in variants.items():
            if fulls and name != precision and (name, precision) != ("fp32", "tf32"):
                pairs.append(max(itertools.product(same, fulls), key=lambda pair: _likest(*pair)))
    return pairs


def _likest(row: RunRecord, full: RunRecord) -> tuple[object, ...]:
    """Greater for rows that are more alike, then for newer ones."""
    kernels = flag_of(row, "kernels") == flag_of(full, "kernels")
    return kernels, *likeness(row, full), row.started_at or "", full.started_at or ""


def _unlike(row: RunRecord, full: RunRecord) -> str:
    """What else than the precision is known to differ between two rows, to go behind it."""
    ours, theirs = (flag_of(each, "kernels") for each in (row, full))
    said = [f"{ours} kernels against {theirs}"] if ours != theirs else []
    if cards(row) and cards(full) and cards(row) != cards(full):
        said.append("another card")
    if row.power_limit_w and full.power_limit_w and row.power_limit_w != full.power_limit_w:
        said.append("another power limit")
    return f" ({', '.join(said)})" if said else ""


def _precision_row(
    label: str, row: RunRecord, full: RunRecord, times: float, low: float | None, high: float | None
) -> list[Cell]:
    memory = (row.peak_memory_gib, full.peak_memory_gib)
    return [
        words(label),
        Cell(f"{times:.2f} ×", times),
        interval(low, high, 3),
        number(row.samples_per_sec),
        number(full.samples_per_sec),
        *(number(value, 3) for value in memory),
        number(memory[0] / memory[1] if memory[0] and memory[1] else None, 3),
    ]


def parts(rows: Sequence[RunRecord], machines: MachineNames) -> Section:
    """Where the time of a step goes, of runs that were diagnosed."""
    diagnosed = [row for row in rows if row.compute_ms is not None]
    named = list(zip(full_labels(diagnosed, machines), diagnosed, strict=True))
    chart_bars, table_rows = [], []
    for label, row in named:
        # A part that the run does not have (one GPU has no all-reduce) is not drawn, and its cell is empty.
        found = [(name, value) for name, column in PARTS if (value := getattr(row, column)) is not None]
        total = math.fsum(value for _, value in found)
        chart_bars.append(Bar(label, found, f"{figure(total)} ms"))
        cells = [number(getattr(row, column)) for _, column in PARTS]
        table_rows.append([words(label), words(row.verdict), number(total), *cells])
    columns = ("run", "verdict", "together, ms", *(f"{name}, ms" for name, _ in PARTS))
    title = "Parts of a step"
    return Section(
        "parts",
        "Where a step's time goes",
        "Measured after the windows by leaving one thing out at a time.",
        [BarChart(title, "ms", chart_bars[:MOST_BARS])] if chart_bars else [],
        [Table(title, columns, table_rows)] if table_rows else [],
        "" if table_rows else "No run was diagnosed. Fill it with: python -m tfbench.train --diagnose",
    )


def energy(rows: Sequence[RunRecord], machines: MachineNames) -> Section:
    """Energy of all GPUs inside the windows ÷ samples."""
    charts, tables = [], []
    measured = [row for row in rows if row.energy_j_per_sample is not None]
    for title, group in grouped(measured, workload_and_precision).items():
        ranked = labelled(sorted(repeats(group), key=_joules), machines)
        charts.append(bars(title, "J per sample, less is better", ranked, _joules))
        tables.append(_energy_table(title, ranked))
    return Section(
        "energy",
        "Energy per sample",
        f"Of the GPUs alone, inside the windows; the rest of the machine is not in it. {_OF_REPEATS}",
        charts,
        tables,
        ""
        if tables
        else "No run has energy: it takes an NVIDIA GPU whose driver answers power or energy."
        + ("" if on_cpu(rows) else " Fill it with: python -m tfbench.train --gpus=1"),
    )


def _joules(each: Repeats) -> float:
    found = each.median("energy_j_per_sample")
    assert found is not None  # rows without it are left out
    return found


def _energy_table(title: str, ranked: Sequence[tuple[str, Repeats]]) -> Table:
    columns = ("run", "J per sample", "samples per J", "W per GPU", "limit, W", "measured by")
    rows = [
        [
            each.name_cell(label),
            number(each.median("energy_j_per_sample")),
            number(each.median("samples_per_joule")),
            number(each.median("power_w_mean")),
            number(each.median("power_limit_w")),
            words(each.joined("energy_source").replace("_", " ")),
        ]
        for label, each in ranked
    ]
    return Table(title, columns, rows)
