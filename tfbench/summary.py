"""From what a run saw to its row and the table shown to the user. TensorFlow-free."""

import dataclasses
import math
import statistics as stdlib_statistics

from tfbench import records
from tfbench.config import BenchmarkConfig
from tfbench.hardware import references, specs
from tfbench.journal import Observed
from tfbench.measure import gates, statistics, telemetry, verdict
from tfbench.models import MODELS
from tfbench.records import RunRecord

MIN_REPEATS = 3  # of a run that say how much runs differ; of two the interval would be 12.7 deviations
# What two rows share that are repeats of one run.
REPEAT_COLUMNS = (
    "run_key", "host", "gpu_name", "gpu_uuids", "driver", "tensorflow", "environment", "status",
    "parallel_runs", "power_limit_w",
)  # fmt: skip
# Deviation within the eight groups of MIN_REPEATS and more repeats of results/h200/runs.csv, pooled.
BETWEEN_RUNS_PERCENT, BETWEEN_RUNS_FREEDOM = 0.28, 32


def fill(
    record: RunRecord, config: BenchmarkConfig, observed: Observed, earlier_rows: list[RunRecord]
) -> RunRecord:
    """Fill in every column that follows from the configuration and from what was seen.

    Args:
        record: with the columns known before the run, `status` and `note`; changed and returned.
        config: of the run.
        observed: what the run saw; a run that ended early has seen less.
        earlier_rows: of the same runs.csv, for the baseline of the scaling efficiency.
    """
    _fill_config(record, config)
    facts = observed.facts | (observed.cards.columns() if observed.cards else {})
    for name, value in facts.items():
        setattr(record, name, value)
    record.note = (
        "; ".join(filter(None, [record.note, *observed.warnings, *observed.sensor_problems])) or None
    )
    if observed.windows:
        _fill_rates(record, config, observed)
        _include_other_runs(record, earlier_rows)
        _fill_telemetry(record, observed)
        _fill_efficiency(record, earlier_rows)
        _fill_parts(record, observed)
    record.gates = "|".join(gates.evaluate(_facts(record, config, observed)))
    return record


def _fill_config(record: RunRecord, config: BenchmarkConfig) -> None:
    """Columns that are choices."""
    same = (
        "model", "data", "precision", "xla", "num_replicas", "per_replica_batch_size", "global_batch_size",
        "accumulate", "seq_length", "image_size", "optimizer", "steps_per_loop", "warmup_steps",
        "scaling_mode",
    )  # fmt: skip
    for name in same:
        setattr(record, name, getattr(config, name))
    record.requested_per_replica_batch_size = (
        config.requested_per_replica_batch_size or config.per_replica_batch_size
    )
    record.num_gpus, record.num_workers = config.gpus, 1
    record.flops_per_sample = MODELS[config.model].flops_per_sample(config)


def _fill_rates(record: RunRecord, config: BenchmarkConfig, observed: Observed) -> None:
    """Columns that follow from the windows."""
    windows = observed.windows
    record.windows = len(windows)
    record.measured_steps = sum(window.steps for window in windows)
    record.samples_per_sec = statistics.samples_per_sec(windows)
    interval = statistics.rate_interval(windows)
    if interval is not None:
        low, high = interval  # two windows that differ much bound the rate from below only
        record.samples_per_sec_low, record.samples_per_sec_high = low, high if math.isfinite(high) else None
    times = statistics.step_time_ms(windows)
    record.step_time_ms_mean, record.step_time_ms_p50 = times.mean, times.p50
    record.step_time_ms_p90, record.step_time_ms_p99 = times.p90, times.p99
    record.drift_percent = statistics.drift_percent(windows)
    record.outlier_windows = sum(statistics.outliers(windows))
    record.loss_first, record.loss_last = observed.losses[0], observed.losses[-1]
    record.accuracy_first, record.accuracy_last = observed.accuracies[0], observed.accuracies[-1]
    if observed.first_call_s is not None:
        # What the first call took beyond a step is tracing and compiling.
        record.compile_time_s = max(observed.first_call_s - times.mean / 1000, 0.0)
    if config.gpus:
        _fill_per_gpu(record, config, record.samples_per_sec / config.gpus, observed.matrix_flops)


def _include_other_runs(record: RunRecord, earlier_rows: list[RunRecord]) -> None:
    """Widen the interval of the rate by what differs between runs, which no run's own windows show.

    From the earlier repeats of this run on these cards where there are MIN_REPEATS, else from the repeats on
    H200s that tfbench ships; on the CPU there is no such figure and nothing is included. The run itself is
    left out: one that has become slower would widen its own interval until nothing shows.
    """
    rate, low, high = record.samples_per_sec, record.samples_per_sec_low, record.samples_per_sec_high
    if rate is None or low is None:
        return
    rates = [
        row.samples_per_sec
        for row in earlier_rows
        if row.samples_per_sec and all(getattr(row, name) == getattr(record, name) for name in REPEAT_COLUMNS)
    ]
    if len(rates) >= MIN_REPEATS:
        percent, freedom = (
            100 * stdlib_statistics.stdev(rates) / stdlib_statistics.fmean(rates),
            len(rates) - 1,
        )
    elif record.num_gpus:
        percent, freedom = BETWEEN_RUNS_PERCENT, BETWEEN_RUNS_FREEDOM
    else:
        return
    further = percent * statistics.student_quantile(freedom, 0.95)
    low, upper = statistics.widened(rate, low, rate if high is None else high, further)
    record.samples_per_sec_low, record.samples_per_sec_high = low, None if high is None else upper
    record.between_runs_percent = percent


def _fill_per_gpu(
    record: RunRecord, config: BenchmarkConfig, rate: float, matrix_flops: float | None
) -> None:
    """Columns of one GPU: its rate, and the shares of its peaks."""
    flops = record.flops_per_sample
    assert flops is not None
    spec = specs.find(record.gpu_name)
    peak = specs.peak_flops(spec, config.precision) if spec else None
    record.samples_per_sec_per_gpu = rate
    record.tflops_per_gpu = statistics.tflops_per_gpu(rate, flops)
    record.mfu = statistics.mfu(rate, flops, peak)
    record.mfu_achievable = statistics.mfu(rate, flops, matrix_flops)


def _fill_telemetry(record: RunRecord, observed: Observed) -> None:
    """Columns that follow from the GPUs' sensors inside the windows."""
    seen = telemetry.summarize(observed.telemetry, observed.windows)
    same = (
        "gpu_util_mean", "gpu_util_max", "power_w_mean", "energy_source", "sm_clock_mhz_mean",
        "temperature_c_max", "throttle_reasons", "memory_used_gib_max", "graphics_active", "sm_active",
        "sm_occupancy", "tensor_active", "dram_active", "pcie_rx_gb_per_s", "pcie_tx_gb_per_s",
        "nvlink_rx_gb_per_s", "nvlink_tx_gb_per_s",
    )  # fmt: skip
    for name in same:
        setattr(record, name, getattr(seen, name))
    record.energy_j_per_sample = statistics.energy_j_per_sample(seen.energy_j, observed.windows)
    record.samples_per_joule = statistics.samples_per_joule(seen.energy_j, observed.windows)


def _fill_efficiency(record: RunRecord, earlier_rows: list[RunRecord]) -> None:
    """Efficiency against the newest comparable one-GPU row, where there is one."""
    baseline = records.find_baseline(earlier_rows, record)
    if baseline is None or baseline.samples_per_sec is None:
        return
    assert record.samples_per_sec is not None
    assert record.num_gpus is not None
    record.baseline_run_id = baseline.run_id
    # At the same global batch the step times are to each other as the rates upside down: both efficiencies
    # are the ratio of the rates ÷ GPUs, and so are the ends of their intervals.
    low, high = _ratio_interval(record, baseline)
    ends = [None if end is None else end / record.num_gpus for end in (low, high)]
    if record.scaling_mode == "strong":
        record.strong_scaling_efficiency = statistics.strong_scaling_efficiency(
            1 / baseline.samples_per_sec, record.num_gpus, 1 / record.samples_per_sec
        )
        record.strong_scaling_efficiency_low, record.strong_scaling_efficiency_high = ends
    else:
        record.weak_scaling_efficiency = statistics.weak_scaling_efficiency(
            record.samples_per_sec, record.num_gpus, baseline.samples_per_sec
        )
        record.weak_scaling_efficiency_low, record.weak_scaling_efficiency_high = ends


def _ratio_interval(above: RunRecord, below: RunRecord) -> tuple[float | None, float | None]:
    """95 % interval of the ratio of two rows' rates; None and None where one of them has no interval."""
    intervals = [_rate_and_interval(row) for row in (above, below)]
    if None in intervals:
        return None, None
    return statistics.ratio_interval(*filter(None, intervals))


def _rate_and_interval(row: RunRecord) -> tuple[float, float, float] | None:
    """A row's rate with both ends of its interval, where it has them."""
    rate, low, high = row.samples_per_sec, row.samples_per_sec_low, row.samples_per_sec_high
    return None if rate is None or low is None or high is None else (rate, low, high)


def _fill_parts(record: RunRecord, observed: Observed) -> None:
    """Where the time of a step goes, of a run that was diagnosed."""
    parts = observed.parts
    if parts is None:
        return
    record.compute_ms = parts.compute.ms
    for name in ("input_wait", "exposed_communication", "host_gap"):
        part = getattr(parts, name)
        setattr(record, f"{name}_ms", None if part is None else part.ms)
    record.verdict = findings(record, parts)[0].verdict


def findings(record: RunRecord, parts: verdict.Parts) -> list[verdict.Finding]:
    """What holds a diagnosed run back, by its parts and its row's sensors."""
    sensors = {field.name: getattr(record, field.name) for field in dataclasses.fields(verdict.Sensors)}
    return verdict.findings(parts, verdict.Sensors(**sensors), record.steps_per_loop or 1)


def _facts(record: RunRecord, config: BenchmarkConfig, observed: Observed) -> gates.Facts:
    """What the plausibility gates look at."""
    windows = observed.windows
    return gates.Facts(
        weak_scaling_efficiency=record.weak_scaling_efficiency,
        strong_scaling_efficiency=record.strong_scaling_efficiency,
        mfu=record.mfu,
        mfu_achievable=record.mfu_achievable,
        precision=record.precision,
        measured_steps=record.measured_steps,
        measured_samples=sum(window.samples for window in windows) if windows else None,
        global_batch_size=config.global_batch_size,
        total_steps=observed.steps_run if observed.iterations is not None else None,
        optimizer_iterations=observed.iterations,
        steps_skipped=record.steps_skipped,
        losses=observed.losses or None,
        weights_finite=record.weights_finite,
        weights_changed=observed.weights_changed,
        replicas_agree=observed.replicas_agree,
        retraces_in_windows=observed.retraces,
        throttle_reasons=record.throttle_reasons,
        other_process_on_gpu=observed.other_process_on_gpu,
        sm_clock_mhz_mean=record.sm_clock_mhz_mean,
        sm_clock_mhz_max=record.sm_clock_mhz_max,
        gpu_util_mean=record.gpu_util_mean,
        tensor_active=record.tensor_active,
        step_time_difference=statistics.step_time_difference(windows),
        ecc_errors=record.ecc_errors,
    )


def table(record: RunRecord) -> list[tuple[str, str, str]]:
    """The result as (name, value, remark); what was not measured has no line."""
    rows = [
        ("samples/s", _number(record.samples_per_sec, 1), _interval(record)),
        ("samples/s per GPU", _number(record.samples_per_sec_per_gpu, 1), ""),
        ("step time", _number(record.step_time_ms_mean, 2, " ms"), _percentiles(record)),
        ("weak-scaling efficiency", *_efficiency(record, "weak")),
        ("strong-scaling efficiency", *_efficiency(record, "strong")),
        ("TFLOP/s per GPU", _number(record.tflops_per_gpu, 1), ""),
        ("of the card's peak (MFU)", _percent(record.mfu), _peak(record)),
        ("of this card's matrix rate", _percent(record.mfu_achievable), "measured on this machine"),
        ("nearest published result", *_published(record)),
        ("GPU utilisation", _number(record.gpu_util_mean, 0, " %"), _most(record)),
        ("tensor cores active", _percent(record.tensor_active), _activity(record)),
        ("power per GPU", _number(record.power_w_mean, 0, " W"), _energy(record)),
        ("SM clock", _number(record.sm_clock_mhz_mean, 0, " MHz"), record.throttle_reasons or ""),
        ("peak memory per GPU", _number(record.peak_memory_gib, 1, " GiB"), "by the allocator"),
        ("host memory", _number(record.host_rss_gib, 1, " GiB"), ""),
        ("first step after", _number(record.time_to_first_step_s, 1, " s"), _compile(record)),
        ("waiting for input", _percent(record.input_wait_fraction), "of the step"),
        ("loss", _number(record.loss_last, 4), _from(record.loss_first, 4) + _memorised(record)),
        ("accuracy", _percent(record.accuracy_last), _from_percent(record.accuracy_first)),
        ("steps skipped", _number(record.steps_skipped or None, 0), "a gradient was not finite"),
    ]
    marked = [(f"! {gate}", "", gates.EXPLANATIONS[gate]) for gate in (record.gates or "").split("|") if gate]
    return [row for row in rows if row[1]] + marked


def parts_table(parts: verdict.Parts) -> list[tuple[str, str, str]]:
    """The parts of a step as (name, milliseconds, bar of its share and interval)."""
    named = (
        ("compute", parts.compute),
        ("waiting for input", parts.input_wait),
        ("all-reduce not hidden", parts.exposed_communication),
        ("host between calls", parts.host_gap),
    )
    return [
        (name, f"{part.ms:.2f} ms", f"{_bar(parts.share(part))} {100 * parts.share(part):.1f} %{_ends(part)}")
        for name, part in named
        if part is not None
    ]


def _bar(share: float, width: int = 24) -> str:
    """A share of 1 as so many blocks."""
    return "█" * round(width * share) + "·" * (width - round(width * share))


def _ends(part: verdict.Part) -> str:
    if part.low_ms is None or part.high_ms is None:
        return ""
    return f"   95 %: {part.low_ms:.2f} to {part.high_ms:.2f} ms"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:,.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _interval(record: RunRecord) -> str:
    if record.samples_per_sec_low is None:
        return ""
    high = record.samples_per_sec_high
    upper = "any rate: too few windows" if high is None else f"{high:,.1f}"
    between = record.between_runs_percent
    runs = "this run alone" if between is None else f"{between:.2f} % between runs"
    return f"95 %: {record.samples_per_sec_low:,.1f} to {upper}; {record.windows} windows, {runs}"


def _percentiles(record: RunRecord) -> str:
    if record.step_time_ms_p50 is None or record.step_time_ms_p99 is None:
        return ""
    return f"p50 {record.step_time_ms_p50:.2f}, p99 {record.step_time_ms_p99:.2f} over the windows"


def _efficiency(record: RunRecord, mode: str) -> tuple[str, str]:
    """One mode's efficiency, and its interval with the row that it compares with."""
    value, low, high = (getattr(record, f"{mode}_scaling_efficiency{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f"95 %: {100 * low:.1f} to {100 * high:.1f}; "
    return _percent(value), f"{interval}against {record.baseline_run_id}"


def _share_ends(record: RunRecord, share: float | None) -> list[str]:
    """The interval of a share that is the rate ÷ something that has none; nothing where the rate has none."""
    found = _rate_and_interval(record)
    if share is None or found is None:
        return []
    rate, low, high = found
    return [f"95 %: {100 * share * low / rate:.1f} to {100 * share * high / rate:.1f}"]


def _peak(record: RunRecord) -> str:
    spec = specs.find(record.gpu_name)
    peak = specs.peak_flops(spec, record.precision) if spec and record.precision else None
    if not peak:
        return ""
    return "; ".join(
        [*_share_ends(record, record.mfu), f"{peak / 1e12:,.1f} TFLOP/s dense, {record.precision}"]
    )


def _published(record: RunRecord) -> tuple[str, str]:
    """Share of the nearest published result, and what is different about it."""
    if record.samples_per_sec_per_gpu is None or record.model is None or record.precision is None:
        return "", ""
    found = references.nearest(
        MODELS[record.model].references,
        record.gpu_name,
        record.precision,
        record.num_gpus or 0,
        record.seq_length,
        per_replica_batch_size=record.per_replica_batch_size,
        data=record.data or "",
    )
    if found is None:
        return "", ""
    reference, differences = found
    share = record.samples_per_sec_per_gpu / reference.per_gpu
    source = (
        f"of {reference.per_gpu:,.0f} {reference.metric} per GPU ({reference.gpu}, {reference.framework})"
    )
    return f"{100 * share:.1f} %", "; ".join([*_share_ends(record, share), source, *differences])


def _most(record: RunRecord) -> str:
    parts = []
    if record.gpu_util_max is not None:
        parts.append(f"at most {record.gpu_util_max:.0f} %")
    if record.graphics_active is not None:
        parts.append(f"something ran {100 * record.graphics_active:.1f} % of the time")
    return "; ".join(parts)


def _activity(record: RunRecord) -> str:
    parts = [("memory bandwidth", record.dram_active), ("multiprocessors", record.sm_active)]
    return ", ".join(f"{name} {_percent(share)}" for name, share in parts if share is not None)


def _energy(record: RunRecord) -> str:
    if record.energy_j_per_sample is None:
        return ""
    return f"{record.energy_j_per_sample:.3f} J per sample ({record.energy_source})"


def _compile(record: RunRecord) -> str:
    if record.compile_time_s is None:
        return ""
    return f"{record.compile_time_s:.1f} s of it tracing and compiling"


def _memorised(record: RunRecord) -> str:
    return "; one batch over and over: says nothing of learning" if record.data == "synthetic" else ""


def _from(value: float | None, digits: int) -> str:
    return "" if value is None else f"last window; {value:.{digits}f} in the first"


def _from_percent(value: float | None) -> str:
    return "" if value is None else f"last window; {100 * value:.1f} % in the first"
