"""From made-up observations to the row and the table, with the arithmetic done by hand."""

import dataclasses
import math
import re
import shlex

import numpy as np
import pytest
from run_helpers import ROOT

from tfbench import records, summary
from tfbench.config import BenchmarkConfig
from tfbench.flags import to_flags
from tfbench.journal import Observed
from tfbench.measure.telemetry import TelemetrySample
from tfbench.measure.timing import Window
from tfbench.records import RunRecord

# 4,089,184,256 multiply-accumulates: what fvcore counts for torchvision's ResNet-50 at 224×224 pixels.
# Forward and backward are three times that, 2 FLOPs each.
RESNET50_FLOPS = 4_089_184_256 * 6
H200_PEAK_TFLOPS = 989.5  # float16, dense, by the data sheet

TWO_GPUS = BenchmarkConfig(
    model="resnet50",
    image_size=224,
    gpus=2,
    per_replica_batch_size=256,
    precision="mixed_float16",
    xla=True,
    steps=20,
    warmup_steps=2,
    windows=4,
    steps_per_loop=5,
)
ONE_GPU = dataclasses.replace(TWO_GPUS, gpus=1, steps=30, windows=3)
ON_CPU = dataclasses.replace(TWO_GPUS, gpus=0, cpu_replicas=2, precision="fp32", xla=False, image_size=32)
MACHINE_FACTS = {"gpu_name": "NVIDIA H200", "driver": "580.1", "tensorflow": "2.21.0", "keras": "3.15.1"}


def windows(*seconds: float, steps: int = 5, samples: int = 2560) -> list[Window]:
    """Windows of these lengths, a second apart, from t = 10 s."""
    start_s, made = 10.0, []
    for index, length in enumerate(seconds):
        made.append(Window(index, steps, samples, start_s, start_s + length))
        start_s += length + 1.0
    return made


# 20 steps of 512 samples in 2.5 s.
FOUR_WINDOWS = windows(0.5, 0.75, 0.5, 0.75)


def telemetry() -> list[TelemetrySample]:
    """Two cards, one sample a quarter second: 500 W and 300 W by their energy counters."""
    times = [9.0 + 0.25 * index for index in range(40)]
    return [
        TelemetrySample(
            t_s=t,
            gpu=gpu,
            utilization_percent=(100, 80)[gpu] if 10.0 <= t <= 15.5 else 1,
            power_w=watts,
            energy_j=watts * t,
            temperature_c=(50, 70)[gpu],
            sm_clock_mhz=(1980, 1900)[gpu],
            throttle_reasons=0,
        )
        for t in times
        for gpu, watts in enumerate((500.0, 300.0))
    ]


def observed(**fields) -> Observed:
    """A whole good run on two cards."""
    seen = {
        "windows": FOUR_WINDOWS,
        "losses": [7.0, 6.0, 5.0, 4.0],
        "accuracies": [0.1, 0.2, 0.3, 0.4],
        "telemetry": telemetry(),
        "facts": {
            **MACHINE_FACTS,
            "peak_memory_gib": 33.5,
            "steps_skipped": 0,
            "weights_finite": True,
            "input_wait_fraction": 0.25,
            "time_to_first_step_s": 40.0,
            "host_rss_gib": 3.0,
        },
        "first_call_s": 30.125,
        "steps_run": 22,
        "iterations": 22,
        "retraces": 0,
        "weights_changed": True,
        "replicas_agree": True,
    }
    return Observed(**seen | fields)


def filled(config: BenchmarkConfig, seen: Observed, earlier: list[RunRecord] | None = None) -> RunRecord:
    record = RunRecord(status="ok", run_id="this", flags=shlex.join(to_flags(config)))
    return summary.fill(record, config, seen, earlier or [])


def baseline(window_s: float = 1.0, **changes) -> RunRecord:
    """One card alone: 3 windows of 2,560 samples in 1 s each, 2,560 samples/s."""
    lengths = (window_s,) * 3
    seen = observed(windows=windows(*lengths, steps=10), losses=[7.0, 6.0, 5.0], accuracies=[0.1, 0.2, 0.3])
    record = filled(dataclasses.replace(ONE_GPU, **changes), seen)
    record.run_id, record.started_at = (
        "-".join(["the-baseline", *map(str, changes.values())]),
        "2024-01-01T00:00:00+00:00",
    )
    return record


def test_golden_row_of_two_gpus():
    record = filled(TWO_GPUS, observed(), [baseline()])
    golden = {
        "num_gpus": 2,
        "num_replicas": 2,
        "num_workers": 1,
        "scaling_mode": "weak",
        "global_batch_size": 512,
        "requested_per_replica_batch_size": 256,
        "windows": 4,
        "measured_steps": 20,
        "samples_per_sec": 10240 / 2.5,  # 4,096
        "samples_per_sec_per_gpu": 2048.0,
        "step_time_ms_mean": 125.0,
        "step_time_ms_p50": 100.0,  # half of the steps were in windows of 100 ms a step
        "step_time_ms_p90": 150.0,
        "step_time_ms_p99": 150.0,
        "compile_time_s": 30.0,  # the first call less one step
        "flops_per_sample": RESNET50_FLOPS,
        "tflops_per_gpu": 50.247896137728,  # 2,048 × 24.535105536 GFLOP
        "mfu": 50.247896137728 / H200_PEAK_TFLOPS,  # 5.08 %
        "weak_scaling_efficiency": 0.8,  # 4,096 ÷ 2 ÷ 2,560
        "baseline_run_id": "the-baseline",
        "gpu_util_mean": 90.0,
        "gpu_util_max": 100.0,
        "power_w_mean": 400.0,
        "energy_j_per_sample": 800.0 * 2.5 / 10240,  # 0.1953125 J
        "energy_source": "counter",
        "sm_clock_mhz_mean": 1940.0,
        "temperature_c_max": 70.0,
        "throttle_reasons": "",
        "loss_first": 7.0,
        "loss_last": 4.0,
        "accuracy_first": 0.1,
        "accuracy_last": 0.4,
        "peak_memory_gib": 33.5,
        "gates": "",
        "note": None,
    }
    found = {name: getattr(record, name) for name in golden}
    approximate = {name: value for name, value in golden.items() if isinstance(value, float)}
    assert {name: found[name] for name in golden.keys() - approximate} == {
        name: golden[name] for name in golden.keys() - approximate
    }
    assert {name: found[name] for name in approximate} == pytest.approx(approximate, rel=1e-9)


def test_interval_of_the_rate():
    # Seconds per sample are 0.625/2,560 in the mean, ± 3.182446 (Student, 3 degrees) × 0.0721688/2,560.
    record = filled(ON_CPU, observed())
    assert record.between_runs_percent is None
    assert record.samples_per_sec_low == pytest.approx(2560 / (0.625 + 0.229673), rel=1e-4)
    assert record.samples_per_sec_high == pytest.approx(2560 / (0.625 - 0.229673), rel=1e-4)


AGREEING = windows(1.0, 1.0, 1.0)  # 2,560 samples/s to the last digit: the run's own interval has no width


def test_interval_holds_what_differs_between_runs():
    """Earlier runs of 2,550, 2,560 and 2,570 samples/s: deviation 10, Student's of 2 degrees 4.302653."""
    alone = filled(ONE_GPU, observed(windows=AGREEING, losses=[1.0] * 3, accuracies=[1.0] * 3))
    assert alone.between_runs_percent == summary.BETWEEN_RUNS_PERCENT  # on GPUs that of the shipped repeats
    wide = summary.BETWEEN_RUNS_PERCENT / 100 * 2.036933  # 32 degrees
    assert alone.samples_per_sec_high == pytest.approx(2560 * (1 + wide), rel=1e-6)
    assert alone.samples_per_sec_low == pytest.approx(2560 / (1 + wide), rel=1e-6)

    earlier = [dataclasses.replace(alone, samples_per_sec=rate) for rate in (2550.0, 2560.0, 2570.0)]
    others = [
        dataclasses.replace(alone, samples_per_sec=9000.0, **change)
        for change in (
            {"status": "failed"}, {"run_key": "another"}, {"host": "another"}, {"driver": "1"},
            {"gpu_uuids": "GPU-b"}, {"parallel_runs": 8}, {"power_limit_w": 400.0},
        )
    ]  # fmt: skip
    seen = observed(windows=AGREEING, losses=[1.0] * 3, accuracies=[1.0] * 3)
    record = filled(ONE_GPU, seen, [*earlier, *others])
    assert record.between_runs_percent == pytest.approx(100 * 10 / 2560)
    assert record.samples_per_sec_high == pytest.approx(2560 + 43.02653, rel=1e-6)
    assert summary.table(record)[0][2].endswith("3 windows, 0.39 % between runs")
    record = filled(ONE_GPU, seen, [*earlier[:2], *others])
    assert record.between_runs_percent == summary.BETWEEN_RUNS_PERCENT  # two do not say how much runs differ


def test_a_slower_run_does_not_hide_itself():
    """Half the rate of three earlier runs: the deviation is theirs, 10 of 2,560, and not that to this run."""
    seen = observed(windows=AGREEING, losses=[1.0] * 3, accuracies=[1.0] * 3)
    first = filled(ONE_GPU, seen)
    earlier = [dataclasses.replace(first, samples_per_sec=rate) for rate in (2550.0, 2560.0, 2570.0)]
    slow = windows(2.0, 2.0, 2.0)
    record = filled(ONE_GPU, observed(windows=slow, losses=[1.0] * 3, accuracies=[1.0] * 3), earlier)
    assert record.samples_per_sec == 1280.0
    assert record.between_runs_percent == pytest.approx(100 * 10 / 2560)
    assert record.samples_per_sec_high == pytest.approx(1280 * (1 + 4.302653 * 10 / 2560), rel=1e-6)


def test_the_deviation_that_ships_is_that_of_the_committed_repeats():
    groups: dict[tuple, list[float]] = {}
    for row in records.read(ROOT / "results" / "h200" / "runs.csv"):
        if row.status == "ok":
            key = tuple(getattr(row, name) for name in summary.REPEAT_COLUMNS)
            groups.setdefault(key, []).append(row.samples_per_sec)
    repeated = [np.array(rates) for rates in groups.values() if len(rates) >= 3]
    freedom = sum(len(rates) - 1 for rates in repeated)
    squares = sum((((rates / rates.mean()) - 1) ** 2).sum() for rates in repeated)
    assert freedom == summary.BETWEEN_RUNS_FREEDOM
    assert 100 * math.sqrt(squares / freedom) == pytest.approx(summary.BETWEEN_RUNS_PERCENT, abs=0.005)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "failed"},
        {"num_gpus": 2},
        {"per_replica_batch_size": 128},
        {"xla": False},
        {"precision": "mixed_bfloat16"},
        {"gpu_name": "NVIDIA H100 80GB HBM3"},
        {"driver": "570.1"},
        {"samples_per_sec": None},
    ],
)
def test_no_efficiency_against_a_row_that_is_not_comparable(changes):
    record = filled(TWO_GPUS, observed(), [dataclasses.replace(baseline(), **changes)])
    assert (record.weak_scaling_efficiency, record.baseline_run_id) == (None, None)


@pytest.mark.parametrize("facts", [{}, {"gpu_name": None}, {"gpu_name": "NVIDIA H200 MIG 1g.18gb"}])
def test_unknown_card_has_a_rate_but_no_mfu(facts):
    record = filled(TWO_GPUS, observed(facts=facts))
    assert record.samples_per_sec_per_gpu == 2048.0
    assert record.tflops_per_gpu == pytest.approx(50.2479, rel=1e-5)
    assert record.mfu is None


GPU_COLUMNS = (
    "samples_per_sec_per_gpu", "tflops_per_gpu", "mfu", "mfu_achievable", "weak_scaling_efficiency",
    "weak_scaling_efficiency_low", "weak_scaling_efficiency_high", "strong_scaling_efficiency",
    "strong_scaling_efficiency_low", "strong_scaling_efficiency_high", "baseline_run_id", "gpu_util_mean",
    "gpu_util_max", "power_w_mean",
    "energy_j_per_sample", "energy_source", "sm_clock_mhz_mean", "temperature_c_max", "throttle_reasons",
    "peak_memory_gib", "gpu_name", "compute_capability", "driver",
)  # fmt: skip


def test_cpu_row_has_empty_gpu_columns():
    seen = observed(telemetry=[], facts={"peak_memory_gib": None, "steps_skipped": 0})
    record = filled(ON_CPU, seen, [baseline()])
    assert {name: getattr(record, name) for name in GPU_COLUMNS} == dict.fromkeys(GPU_COLUMNS)
    assert (record.num_gpus, record.num_replicas) == (0, 2)
    assert record.samples_per_sec == pytest.approx(4096.0)


def test_run_that_ended_before_any_window():
    record = filled(TWO_GPUS, Observed(facts=dict(MACHINE_FACTS), steps_run=1))
    assert record.gpu_name == "NVIDIA H200"
    assert record.per_replica_batch_size == 256
    assert record.flops_per_sample == RESNET50_FLOPS
    assert record.gates == ""
    for name in ("windows", "measured_steps", "samples_per_sec", "step_time_ms_mean", "mfu", "loss_first"):
        assert getattr(record, name) is None
    assert summary.table(record) == []


def test_run_that_ended_after_some_windows():
    seen = observed(
        windows=windows(0.5, 0.525),
        losses=[7.0, 6.0],
        accuracies=[0.1, 0.2],
        iterations=None,
        weights_changed=None,
    )
    record = filled(TWO_GPUS, seen)
    assert (record.windows, record.measured_steps) == (2, 10)
    assert record.samples_per_sec == pytest.approx(5120 / 1.025)
    assert (record.loss_first, record.loss_last) == (7.0, 6.0)
    assert record.gates == ""


def test_requested_batch_is_kept_where_a_search_changed_it():
    record = filled(dataclasses.replace(TWO_GPUS, requested_per_replica_batch_size=512), observed())
    assert (record.requested_per_replica_batch_size, record.per_replica_batch_size) == (512, 256)


def test_note_holds_the_reason_and_the_warnings():
    record = RunRecord(status="oom", note="out of GPU memory")
    summary.fill(record, TWO_GPUS, Observed(warnings=["GPU 0 was in use", "no profile"]), [])
    assert record.note == "out of GPU memory; GPU 0 was in use; no profile"


NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "facts", "gate"),
    [
        ({"iterations": 44}, {}, "steps_mismatch"),  # once per replica
        ({"iterations": 20}, {"steps_skipped": 1}, "steps_mismatch"),
        ({"losses": [7.0, NAN, 5.0, 4.0]}, {}, "loss_not_finite"),
        ({}, {"weights_finite": False}, "weights_not_finite"),
        ({"weights_changed": False}, {}, "weights_unchanged"),
        ({"replicas_agree": False}, {}, "replicas_differ"),
        ({"retraces": 1}, {}, "retrace_in_window"),
        ({"windows": windows(0.5, 0.75, 0.5, 0.75, samples=2559)}, {}, "samples_mismatch"),
        ({"windows": windows(0.5, 0.5, 0.75, 0.75)}, {}, "time_not_linear_in_steps"),
        ({"windows": windows(0.001, 0.001, 0.001, 0.001)}, {}, "mfu_above_1"),
    ],
)
def test_implausible_runs_trip_their_gate(fields, facts, gate):
    seen = observed(**fields)
    seen.facts |= facts
    record = filled(TWO_GPUS, seen)
    assert record.gates == gate
    assert (f"! {gate}", "") in [row[:2] for row in summary.table(record)]


def test_skipped_steps_are_no_mismatch():
    seen = observed(iterations=19)
    seen.facts["steps_skipped"] = 3
    record = filled(TWO_GPUS, seen)
    assert record.gates == "steps_skipped"  # 3 of 22
    assert ("steps skipped", "3") in [row[:2] for row in summary.table(record)]


@pytest.mark.parametrize(
    "changes", [{}, {"scaling_mode": "strong", "per_replica_batch_size": 512}], ids=["weak", "strong"]
)
def test_efficiency_above_105_percent_is_flagged(changes):
    config = dataclasses.replace(TWO_GPUS, scaling_mode=changes.get("scaling_mode", "weak"))
    slow = baseline(window_s=1.3125, **changes)  # 2,048 ÷ (2,560 ÷ 1.3125) = 105.0 %, and no more
    assert filled(config, observed(), [slow]).gates == ""
    slow = baseline(window_s=1.32, **changes)  # 105.6 %
    assert filled(config, observed(), [slow]).gates == "efficiency_above_105_percent"


def test_strong_scaling_compares_with_the_same_global_batch():
    record = filled(dataclasses.replace(TWO_GPUS, scaling_mode="strong"), observed(), [
        baseline(scaling_mode="strong"),  # 256 samples in a step, half of two cards'
        same := baseline(scaling_mode="strong", per_replica_batch_size=512),
    ])  # fmt: skip
    assert record.strong_scaling_efficiency == pytest.approx(0.8)  # 4,096 ÷ 2,560 times as fast on 2
    assert record.baseline_run_id == same.run_id
    assert {name: getattr(record, f"weak_{name}") for name in EFFICIENCY} == dict.fromkeys(EFFICIENCY)
    rows = {name: value for name, value, _ in summary.table(record)}
    assert rows["strong-scaling efficiency"] == "80.0 %"
    assert "weak-scaling efficiency" not in rows


EFFICIENCY = ("scaling_efficiency", "scaling_efficiency_low", "scaling_efficiency_high")
MODES = {"weak": baseline(), "strong": baseline(scaling_mode="strong", per_replica_batch_size=512)}


@pytest.mark.parametrize("mode", MODES)
def test_interval_of_an_efficiency_holds_the_spread_of_both_rows(mode):
    """Both rows' windows agree, so that their ends are what differs between runs: each ÷ and × 1.00570…

    0.28 % between runs × 2.036933 (Student, 32 degrees). Two such factors are one to the power of √2.
    """
    agreeing = observed(windows=windows(0.625, 0.625, 0.625, 0.625))
    record = filled(dataclasses.replace(TWO_GPUS, scaling_mode=mode), agreeing, [MODES[mode]])
    value, low, high = (getattr(record, f"{mode}_{name}") for name in EFFICIENCY)
    both = 1.00570341**2**0.5
    assert (value, low, high) == pytest.approx((0.8, 0.8 / both, 0.8 * both), rel=1e-6)
    (remark,) = (row[2] for row in summary.table(record) if row[0] == f"{mode}-scaling efficiency")
    assert remark == f"95 %: 79.4 to 80.6; against {MODES[mode].run_id}"  # 79.36 to 80.65

    other = {"weak": "strong", "strong": "weak"}[mode]
    assert {getattr(record, f"{other}_{name}") for name in EFFICIENCY} == {None}


@pytest.mark.parametrize("mode", MODES)
def test_an_efficiency_against_a_row_without_an_interval_has_none(mode):
    one = dataclasses.replace(MODES[mode], samples_per_sec_high=None)
    record = filled(dataclasses.replace(TWO_GPUS, scaling_mode=mode), observed(), [one])
    assert [getattr(record, f"{mode}_{name}") for name in EFFICIENCY] == [pytest.approx(0.8), None, None]
    (remark,) = (row[2] for row in summary.table(record) if row[0] == f"{mode}-scaling efficiency")
    assert remark == f"against {one.run_id}"


def test_table_of_a_gpu_run():
    record = filled(TWO_GPUS, observed(), [baseline()])
    rows = {name: (value, remark) for name, value, remark in summary.table(record)}
    expected = {
        "samples/s": "4,096.0",
        "samples/s per GPU": "2,048.0",
        "step time": "125.00 ms",
        "weak-scaling efficiency": "80.0 %",
        "TFLOP/s per GPU": "50.2",
        "of the card's peak (MFU)": "5.1 %",
        "GPU utilisation": "90 %",
        "power per GPU": "400 W",
        "SM clock": "1,940 MHz",
        "peak memory per GPU": "33.5 GiB",
        "host memory": "3.0 GiB",
        "first step after": "40.0 s",
        "waiting for input": "25.0 %",
        "loss": "4.0000",
        "accuracy": "40.0 %",
    }
    assert {name: value for name, (value, _) in rows.items()}.items() >= expected.items()
    assert rows["weak-scaling efficiency"][1].endswith("against the-baseline")
    # The rate's 2,995 to 6,476 of 4,096 (test_interval_of_the_rate, 0.46 % between runs add little), × 5.078.
    assert rows["of the card's peak (MFU)"][1] == "95 %: 3.7 to 8.0; 989.5 TFLOP/s dense, mixed_float16"
    assert "0.195 J per sample (counter)" in rows["power per GPU"][1]
    assert "7.0000 in the first" in rows["loss"][1]
    # Lambda's and others' ResNet-50 figures are listed for the H200: the row says which one and what differs.
    value, remark = rows["nearest published result"]
    assert value.endswith(" %")
    assert "H200" in remark
    share, low, high = map(float, re.findall(r"[\d.]+", f"{value} {remark.partition('95 %: ')[2]}")[:3])
    ends = (record.samples_per_sec_low, record.samples_per_sec_high)
    assert (low / share, high / share) == pytest.approx([end / 4096 for end in ends], rel=2e-3)


def test_table_of_a_cpu_run_has_only_what_was_measured():
    seen = observed(telemetry=[], facts={"host_rss_gib": 1.0, "steps_skipped": 0}, first_call_s=None)
    names = {row[0] for row in summary.table(filled(ON_CPU, seen))}
    assert names == {"samples/s", "step time", "host memory", "loss", "accuracy"}
