"""What a report says of its rows, section by section, in numbers worked by hand."""

import dataclasses
import io
import math
import re

import pytest
from report_helpers import cells, row, write
from rich.console import Console

from tfbench.measure import telemetry
from tfbench.measure.telemetry import TelemetrySample
from tfbench.measure.timing import Window, write_windows_csv
from tfbench.reporting import build, compare, load, machines, naming, sections, sensors, svg, terminal
from tfbench.reporting.document import Bar, BarChart, Line, LineChart, Point, figure, interval, percent

A100 = {"gpu_name": "NVIDIA A100-SXM4-80GB", "host": "right"}


def names(*rows):
    return naming.machine_names(rows)


# Numbers and labels.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7625.82, "7,626"), (1234567.0, "1,234,567"), (872.08, "872.1"), (0.0878569, "0.08786"),
        (0.0, "0.000"),
        (-5.0, "-5.000"), (9999.6, "10,000"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_figure_keeps_four_digits(value, text):
    assert figure(value) == text


def test_unknown_is_an_empty_cell():
    assert percent(None).text == interval(None, None).text == ""
    assert interval(900.0, None).text == "900.0 to ?"


def test_labels_say_as_little_as_tells_rows_apart():
    rows = [row(), row(num_gpus=2), row(per_replica_batch_size=64), row(xla=False, num_gpus=4)]
    assert naming.labels(rows[:3], names(*rows[:3])) == [
        "1 × H200, batch 256",
        "2 × H200, batch 256",
        "1 × H200, batch 64",
    ]
    assert naming.labels(rows[2:], names(*rows)) == [
        "1 × H200, batch 64, XLA",
        "4 × H200, batch 256, no XLA",
    ]


def test_repeats_are_told_apart_by_their_start():
    rows = [row(), row(started_at="2026-01-02T11:22:33.000+00:00")]
    assert naming.labels(rows, names(*rows)) == [
        "1 × H200, batch 256, 2026-01-01 10:00:00",
        "1 × H200, batch 256, 2026-01-02 11:22:33",
    ]


def test_a_machine_has_one_letter_in_the_whole_report():
    rows = [row(), row(host="right", samples_per_sec=2000.0)]
    ranked = sections.ranking(rows, names(*rows))
    assert [line["run"][0] for line in cells(ranked)[:2]] == [
        "1 × H200, batch 256, machine B",
        "1 × H200, batch 256, machine A",
    ]
    (table,) = machines.environment(rows).tables
    hosts = next(line for line in table.rows if line[0].text.startswith("host"))
    assert list(table.columns) == ["", "machine A", "machine B"]
    assert [cell.text for cell in hosts] == ["host (differs)", "left", "right"]


# Ranking and the rest of the good rows.


def test_ranking_is_by_rate_per_gpu_within_a_workload():
    rows = [row(), row(num_gpus=2, samples_per_sec=1800.0), row(precision="tf32", samples_per_sec=500.0)]
    found = sections.ranking(rows, names(*rows))
    assert [[bar.length for bar in chart.bars] for chart in found.charts] == [[1000.0, 900.0], [500.0]]
    second = found.charts[0].bars[1]
    assert (second.low, second.high) == (895.0, 905.0)  # 1790 and 1810 of two GPUs


def test_share_of_the_published_result_names_its_card():
    found = cells(sections.ranking([row(**A100, samples_per_sec=1705.26)], names(row(**A100))))
    # references.csv: MXNet 22.10 in fp16 at batch 512 on one A100-80GB is 3,410.52 img/s; ± 10 of 1,705.26.
    assert found[0]["of the nearest published"] == ("50 % of A100-80GB", 0.5)
    assert found[1]["published, per GPU"] == ("3,411", 3410.52)


def test_scaling_stands_beside_the_ideal():
    one = row(run_id="one")
    two = row(run_id="two", num_gpus=2, samples_per_sec=1800.0, baseline_run_id="one")
    four = row(run_id="four", num_gpus=4, samples_per_sec=3200.0)  # its baseline is looked for
    found = sections.scaling([four, two, one], [four, two, one])
    measured, ideal = found.charts[0].lines
    assert [(p.x, p.y) for p in measured.points] == [(1, 1000.0), (2, 1800.0), (4, 3200.0)]
    assert [(p.x, p.y) for p in ideal.points] == [(1, 1000.0), (2, 2000.0), (4, 4000.0)]
    assert [line["efficiency"] for line in cells(found)] == [
        ("baseline", None),
        ("90.0 %", 0.9),
        ("80.0 %", 0.8),
    ]


def test_strong_scaling_has_its_own_curve_beside_the_weak_one():
    def strong(gpus, rate):
        fields = {"num_gpus": gpus, "samples_per_sec": rate, "per_replica_batch_size": 256 // gpus}
        return row(run_id=f"s{gpus}", scaling_mode="strong", global_batch_size=256, **fields)

    weak = [row(run_id="w1"), row(run_id="w2", num_gpus=2, samples_per_sec=1900.0)]
    rows = [*weak, strong(1, 1000.0), strong(2, 1700.0), strong(4, 2000.0)]
    found = sections.scaling(rows, rows)
    weakly, strongly = found.charts
    assert weakly.title == "Weak scaling: resnet50, 224 px, mixed_float16, batch 256 per GPU"
    assert strongly.title == "Strong scaling: resnet50, 224 px, mixed_float16, global batch 256"
    measured, ideal = strongly.lines
    assert [(p.x, p.y, p.low, p.high) for p in measured.points] == [
        (1, 1000.0, 990.0, 1010.0),
        (2, 1700.0, 1690.0, 1710.0),
        (4, 2000.0, 1990.0, 2010.0),
    ]
    assert (ideal.dashed, [(p.x, p.y) for p in ideal.points]) == (True, [(1, 1000), (2, 2000), (4, 4000)])
    lines = cells(found)[2:]
    # ± 1 % of the one, ± 10 of 1,700 and of 2,000: √(1² + 0.59²) = 1.16 % of 85, √(1² + 0.5²) = 1.12 % of 50.
    assert [(line["batch per GPU"][1], line["efficiency"][0], line["95 % of it"][0]) for line in lines] == [
        (256, "baseline", ""),
        (128, "85.0 %", "84.0 to 86.0 %"),
        (64, "50.0 %", "49.4 to 50.6 %"),
    ]
    assert [p.hover for p in measured.points] == [
        "1 × H200: 1,000 samples/s, 100.0 % of ideal",
        "2 × H200: 1,700 samples/s, 85.0 % (84.0 to 86.0) of ideal",
        "4 × H200: 2,000 samples/s, 50.0 % (49.4 to 50.6) of ideal",
    ]


def test_repeats_are_one_curve_of_the_newest_runs():
    ones = [row(run_id=f"one{i}", started_at=f"2026-01-0{i}", samples_per_sec=900.0 + 50 * i) for i in (1, 2)]
    two = row(run_id="two", started_at="2026-01-03", num_gpus=2, samples_per_sec=1710.0)
    again = row(run_id="again", started_at="2026-01-04", num_gpus=2, samples_per_sec=1800.0)
    two.baseline_run_id, again.baseline_run_id = "one1", "one2"
    rows = [again, two, *ones]
    found = sections.scaling(rows, rows)
    measured, ideal = found.charts[0].lines
    assert [(p.x, p.y) for p in measured.points] == [(1, 1000.0), (2, 1800.0)]
    assert [(p.x, p.y) for p in ideal.points] == [(1, 1000.0), (2, 2000.0)]
    assert [(line["started"][0], line["efficiency"][0]) for line in cells(found)] == [
        ("2026-01-01", "baseline"),
        ("2026-01-02", "baseline"),
        ("2026-01-03", "90.0 %"),  # of twice 950
        ("2026-01-04", "90.0 %"),
    ]


def test_the_interval_of_an_efficiency_holds_the_spread_of_both_rows():
    one = row(run_id="one", samples_per_sec_low=970.0, samples_per_sec_high=1030.0)
    two = row(run_id="two", num_gpus=2, samples_per_sec=1800.0, samples_per_sec_low=1728.0,
              samples_per_sec_high=1872.0)  # fmt: skip
    # 3 % of the one and 4 % of the other are 5 % of their ratio of 90 %: ± 4.5.
    baseline, line = cells(sections.scaling([one, two], [one, two]))
    low, high = map(float, re.findall(r"[\d.]+", line["95 % of it"][0]))
    assert (low, high) == pytest.approx((85.5, 94.5), abs=0.3)
    assert baseline["95 % of it"][0] == ""
    two.samples_per_sec_high = None
    assert cells(sections.scaling([one, two], [one, two]))[1]["95 % of it"][0] == ""


def test_two_cards_are_compared_with_the_mean_of_both():
    ones = [row(run_id="a", samples_per_sec=900.0), row(run_id="b", samples_per_sec=1000.0)]
    two = row(run_id="two", num_gpus=2, samples_per_sec=1710.0, baseline_run_id="a|b")
    again = row(run_id="again", num_gpus=2, samples_per_sec=1805.0, baseline_run_id="a|b")
    found = sections.scaling([*ones, two, again], [*ones, two, again])
    assert [(line["samples/s"][1], line["efficiency"][0]) for line in cells(found)] == [
        (950.0, "baseline"),
        (1710.0, "90.0 %"),
        (1805.0, "95.0 %"),
    ]


def test_rows_without_a_baseline_do_not_scale():
    rows = [row(num_gpus=2), row(precision="tf32")]
    assert "--gpus=1" in sections.scaling(rows, rows).missing


def test_batch_curve_joins_the_newest_of_rows_alike():
    rows = [
        row(per_replica_batch_size=64, samples_per_sec=500.0),
        row(started_at="2026-01-01T11:00:00", samples_per_sec=990.0),
        row(samples_per_sec=970.0, run_key="other"),
        row(per_replica_batch_size=128, samples_per_sec=700.0, driver="590.2"),
    ]
    (chart,) = sections.batches(rows, names(*rows)).charts
    (line,) = chart.lines
    assert [(p.x, p.y) for p in line.points] == [(64, 500.0), (256, 990.0)]


def test_a_batch_curve_joins_no_runs_side_by_side_with_one_alone():
    rows = [row(parallel_runs=8, per_replica_batch_size=batch) for batch in (64, 128)]
    rows += [row(), row(per_replica_batch_size=512, parallel_runs=1)]
    (chart,) = sections.batches(rows, names(*rows)).charts
    found = {line.name: [p.x for p in line.points] for line in chart.lines}
    assert found == {"1 × H200, 8 side by side": [64, 128], "1 × H200": [256, 512]}


def test_speed_up_and_memory_against_full_precision():
    rows = [
        row(precision="fp32", samples_per_sec=100.0, peak_memory_gib=20.0),
        row(precision="tf32", samples_per_sec=250.0, peak_memory_gib=20.0),
        row(peak_memory_gib=12.0),
        row(precision="mixed_bfloat16", per_replica_batch_size=512),  # another batch
    ]
    found = cells(sections.precisions(rows, names(*rows)))
    assert [(line["runs"][0].rpartition(": ")[2], line["speed-up"][1]) for line in found] == [
        ("tf32 against fp32", 2.5),
        ("mixed_float16 against fp32", 10.0),
        ("mixed_float16 against tf32", 4.0),
    ]
    assert [line["memory ratio"][1] for line in found] == [1.0, 0.6, 0.6]


def test_speed_up_over_full_precision_says_what_else_differs():
    flags = "--model=bert_large --kernels=fused"
    bert = {"model": "bert_large", "image_size": None, "flags": "--kernels=plain"}
    fused = row(**bert | {"flags": flags, "samples_per_sec": 300.0, "gpu_uuids": "GPU-a"})
    full = {"precision": "tf32", **bert}
    rows = [
        row(**full, samples_per_sec=100.0, gpu_uuids="GPU-a"),
        row(**full, samples_per_sec=150.0, gpu_uuids="GPU-b", started_at="2026-01-02"),
        row(**bert, samples_per_sec=200.0, gpu_uuids="GPU-c"),
        fused,
    ]
    found = cells(sections.precisions(rows, names(*rows)))
    assert [(line["runs"][0].rpartition(": ")[2], line["speed-up"][1]) for line in found] == [
        ("mixed_float16 against tf32 (another card)", pytest.approx(200 / 150)),  # the newest of others
        ("mixed_float16 against tf32 (fused kernels against plain)", 3.0),  # that of the same card
    ]


def test_parts_that_a_run_has_not_are_empty():
    diagnosed = row(compute_ms=30.0, exposed_communication_ms=None, host_gap_ms=0.5, verdict="compute bound")
    found = sections.parts([diagnosed, row()], names(row()))
    (line,) = cells(found)
    assert line["all-reduce not hidden, ms"] == ("", None)
    assert line["together, ms"] == ("30.50", 30.5)
    assert found.charts[0].bars[0].parts == [("compute", 30.0), ("host between calls", 0.5)]


def test_energy_is_ranked_from_the_least():
    rows = [row(energy_j_per_sample=0.2), row(energy_j_per_sample=0.1, run_key="other"), row()]
    (chart,) = sections.energy(rows, names(*rows)).charts
    assert [bar.length for bar in chart.bars] == [0.1, 0.2]


# Repeats.


def repeated(*rates, **fields):
    """Runs of one configuration, an hour apart."""
    return [
        row(started_at=f"2026-01-01T1{hour}:00:00.000+00:00", samples_per_sec=rate, **fields)
        for hour, rate in enumerate(rates)
    ]


def test_three_runs_are_one_line_with_their_median_and_students_interval():
    runs = repeated(998.0, 1000.0, 1020.0, num_gpus=2)
    for run, step_ms, gates in zip(runs, (50.2, 50.1, 49.1), ("a|b", None, "b"), strict=True):
        run.step_time_ms_mean, run.gates = step_ms, gates
    found = sections.ranking(list(reversed(runs)), names(*runs))
    (bar,) = found.charts[0].bars
    (line,) = cells(found)[:1]
    assert bar.label == line["run"][0] == "2 × H200, batch 256, 3 runs"
    assert bar.length == line["samples/s per GPU"][1] == 500.0
    # Mean 1006, deviations -8, -6, 14: standard error √(296 / 2 / 3), Student's quantile 4.3027 for 2 degrees
    # of freedom; two GPUs.
    half = 4.3027 * math.sqrt(296 / 6)
    assert (bar.low, bar.high) == pytest.approx(((1006 - half) / 2, (1006 + half) / 2), abs=1e-3)
    assert line["95 %"][0] == interval(bar.low, bar.high).text == "487.9 to 518.1"
    assert (line["samples/s"][1], line["step, ms"][1]) == (1000.0, 50.1)
    assert line["flags"][0] == "b (2), a (1)"


def test_two_runs_have_what_spans_their_own_intervals():
    runs = repeated(980.0, 1000.0)
    (bar,) = sections.ranking(runs, names(*runs)).charts[0].bars
    assert (bar.label, bar.length) == ("1 × H200, batch 256, 2 runs", 990.0)
    assert (bar.low, bar.high) == (970.0, 1010.0)
    runs[0].samples_per_sec_high = None
    (bar,) = sections.ranking(runs, names(*runs)).charts[0].bars
    assert (bar.length, bar.low, bar.high) == (990.0, None, None)


def test_one_run_stays_as_it_is():
    (line,) = cells(sections.ranking([row(gates="a|b", samples_per_sec_high=None)], names(row())))[:1]
    assert [line[name][0] for name in ("run", "95 %", "flags")] == [
        "1 × H200, batch 256",
        "990.0 to ?",
        "a, b",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"run_key": "other"}, {"run_key": None}, {"host": "right"}, {"driver": "590.2"}, {"tag": "cooler"},
        {"power_limit_w": 500.0}, {"parallel_runs": 2}, {"xla": False},
    ],
)  # fmt: skip
def test_runs_of_another_configuration_or_machine_are_another_line(other):
    rows = [row(), row(), row(**other)]
    (chart,) = sections.ranking(rows, names(*rows)).charts
    assert sorted("2 runs" in bar.label for bar in chart.bars) == [False, True]


def test_rows_without_a_run_key_are_no_repeats():
    rows = repeated(980.0, 1000.0, run_key=None)
    assert len(sections.ranking(rows, names(*rows)).charts[0].bars) == 2


def test_runs_on_two_cards_are_no_repeats():
    cards = zip(repeated(980.0, 1000.0, 1020.0), "xyx", strict=True)
    rows = [dataclasses.replace(each, gpu_uuids=card) for each, card in cards]
    labels = [bar.label for bar in sections.ranking(rows, names(*rows)).charts[0].bars]
    assert sorted("2 runs" in label for label in labels) == [False, True]


def test_repeats_with_equal_names_are_told_apart_by_their_first_start():
    rows = [*repeated(1000.0, 1010.0), *repeated(1100.0, 1110.0, 1120.0, run_key="b"), row(run_key="c")]
    assert [line["run"][0] for line in cells(sections.ranking(rows, names(*rows)))[:3]] == [
        "1 × H200, batch 256, 3 runs from 2026-01-01 10:00:00",
        "1 × H200, batch 256, 2 runs from 2026-01-01 10:00:00",
        "1 × H200, batch 256, 2026-01-01 10:00:00",
    ]


def test_batch_curve_goes_through_the_median_of_repeats():
    rows = [row(per_replica_batch_size=64, samples_per_sec=500.0), *repeated(970.0, 1000.0, 990.0)]
    found = sections.batches(rows, names(*rows))
    (line,) = found.charts[0].lines
    assert [(p.x, p.y) for p in line.points] == [(64, 500.0), (256, 990.0)]
    assert line.points[1].hover == "1 × H200, batch 256, 3 runs: 990.0 samples/s per GPU"
    assert [(each["runs"][1], each["samples/s per GPU"][1]) for each in cells(found)] == [
        (1, 500.0),
        (3, 990.0),
    ]


def test_energy_of_repeats_is_their_median():
    rows = repeated(1000.0, 1000.0, 1000.0, energy_source="counter")
    for each, joules in zip(rows, (0.3, 0.1, 0.2), strict=True):
        each.energy_j_per_sample = joules
    rows[2].energy_source = "power"
    (line,) = cells(sections.energy([*rows, row()], names(*rows)))
    assert (line["run"][0], line["J per sample"][1]) == ("1 × H200, batch 256, 3 runs", 0.2)
    assert line["measured by"][0] == "counter or power"


def test_a_flagged_row_among_repeats_is_found_by_its_start():
    rows = repeated(980.0, 990.0, 1000.0)
    rows[1].gates = "throttled"
    (line,) = cells(machines.flagged(rows, names(*rows)))
    assert line["run"][0].endswith("1 × H200, batch 256, 2026-01-01 11:00:00")


def test_every_gate_of_a_row_is_explained():
    rows = [row(gates="throttled|brand_new", throttle_reasons="sw_power_cap"), row()]
    found = cells(machines.flagged(rows, names(*rows)))
    assert [(line["gate"][0], line["evidence"][0]) for line in found] == [
        ("throttled", "sw_power_cap"),
        ("brand_new", ""),
    ]
    assert "heat or power" in found[0]["what it means"][0]
    assert "does not know" in found[1]["what it means"][0]


def test_limits_do_not_tell_machines_apart():
    (table,) = machines.environment([row(), row(power_limit_w=700.0)]).tables
    limit = next(line for line in table.rows if line[0].text == "power limit, W")
    assert [cell.text for cell in limit] == ["power limit, W", "700"]


# The baseline.


@pytest.mark.parametrize(
    ("now", "outcome", "ratio"),
    [
        ({"samples_per_sec": 900.0}, "regression", (0.9, 0.89, 0.91)),
        ({"samples_per_sec": 1100.0}, "faster", (1.1, 1.09, 1.11)),
        ({"samples_per_sec": 995.0}, "no difference shown", (0.995, 0.985, 1.005)),
        ({"samples_per_sec": 1005.0}, "no difference shown", (1.005, 0.995, 1.015)),
        ({"samples_per_sec": 900.0, "samples_per_sec_high": None}, "no interval", (0.9, None, None)),
        ({"status": "failed", "samples_per_sec": None}, "fails now", (None, None, None)),
    ],
)
def test_outcome_follows_from_the_interval(now, outcome, ratio):
    exact = row(samples_per_sec_low=1000.0, samples_per_sec_high=1000.0)  # so that the ratio's is ± 10 ÷ 1000
    (found,) = compare.compare([row(**now)], [exact])
    assert found.outcome == outcome
    for value, expected in zip((found.ratio, found.low, found.high), ratio, strict=True):
        assert value == (None if expected is None else pytest.approx(expected))


def test_the_newest_of_equal_keys_on_the_same_machine_are_compared():
    before = [
        row(samples_per_sec=1.0),
        row(started_at="2026-01-02", samples_per_sec=500.0),
        row(started_at="2026-01-03", host="right", samples_per_sec=2.0),
        row(started_at="2026-01-04", status="failed", samples_per_sec=None),
        row(started_at="2026-01-05", run_key="other", samples_per_sec=3.0),
    ]
    now = [row(samples_per_sec=9.0), row(started_at="2026-02-01"), row(run_key="new")]
    found, gone = compare.compare(now, before)
    assert found.ratio == 2.0  # 1000 of February ÷ 500
    assert (gone.outcome, gone.now, gone.before.run_key) == ("not run now", None, "other")


def test_a_failed_try_beside_a_good_row_is_no_regression():
    tries = [row(), row(started_at="2026-01-02", status="interrupted", samples_per_sec=None)]
    (found,) = compare.compare(tries, [row()])
    assert found.outcome == "no difference shown"


DEAD = {"status": "hang", "samples_per_sec": None, "gpu_name": None, "driver": None, "tensorflow": None}


def test_a_row_of_which_little_is_known_is_of_a_machine_that_it_may_be():
    dead = row(run_id="dead", **DEAD)
    newer = row(driver="590.2", started_at="2026-01-02")
    assert set(names(dead, row(), newer).values()) == {"A", "B"}
    assert set(names(dead, row(**A100)).values()) == {"A", "B"}  # another host
    assert len(set(names(row(), row(environment="XLA_FLAGS=--a")).values())) == 2
    (found,) = compare.compare([dead, row()], [row()])
    assert found.outcome == "no difference shown"
    # Beside another configuration's rows of an older driver too, whose machine it may be as well.
    older = row(driver="570.1", run_key="other")
    assert [each.outcome for each in compare.compare([older, dead, row()], [row()])] == [
        "no difference shown"
    ]
    for good in (row(**A100), row(run_key="other")):
        outcomes = [each.outcome for each in compare.compare([dead, good], [row()])]
        assert "fails now" in outcomes
    (table,) = machines.environment([dead, row()]).tables
    assert list(table.columns) == ["", "machine A"]
    assert [cell.text for cell in table.rows[-1]] == ["rows", "2"]


def test_what_is_not_run_any_more_is_said_with_its_name():
    comparisons = compare.compare([row()], [row(), row(run_key="gone", model="bert_large", image_size=None)])
    (line,) = (
        line
        for line in cells(compare.section(comparisons, "before.csv", names(row())))
        if line["outcome"][0] == "not run now"
    )
    assert line["run"][0].startswith("bert_large")
    assert (line["samples/s now"][0], line["samples/s before"][1]) == ("", 1000.0)
    assert list(map(compare.is_worse, comparisons)) == [False, True]


@pytest.mark.parametrize(
    ("other", "outcome", "said"),
    [
        ({"gpu_uuids": "GPU-bbbbbbbb-1"}, "regression", "cards GPU-aaaaaaaa → GPU-bbbbbbbb"),
        ({"parallel_runs": 8, "cpu_cores": 2}, "not comparable", "runs side by side 1 → 8"),
        ({"gpu_name": "NVIDIA H100 PCIe"}, "not comparable", "gpu_name NVIDIA H200 → NVIDIA H100 PCIe"),
    ],
)
def test_rates_under_other_conditions_are_no_regression_or_say_so(other, outcome, said):
    known = {"gpu_uuids": "GPU-aaaaaaaa-1", "cpu_cores": 16}
    (found,) = compare.compare([row(**{**known, "samples_per_sec": 900.0, **other})], [row(**known)])
    assert (found.outcome, found.ratio is None) == (outcome, outcome == "not comparable")
    assert compare.is_worse(found) == (outcome == "regression")
    assert said in compare.environment_differences(found.now, found.before)


@pytest.mark.parametrize(
    "other", [{"gpu_uuids": "GPU-b"}, {"parallel_runs": 8}, {"power_limit_w": 400.0}, A100]
)
def test_the_baseline_under_the_same_conditions_is_taken(other):
    known = {"gpu_uuids": "GPU-a", "power_limit_w": 700.0}
    before = [row(**known), row(**{**known, **other, "started_at": "2026-02-01", "samples_per_sec": 5000.0})]
    (found,) = compare.compare([row(**known)], before)
    assert found.before is before[0]


def test_only_known_differences_of_the_environment_are_listed():
    now, before = row(driver="590.2", cuda="13.0", power_limit_w=600.0), row(power_limit_w=700.0)
    found = compare.environment_differences(now, before)
    assert found == ["driver 580.1 → 590.2", "power_limit_w 700.0 → 600.0"]


# Files and sensors.


def test_each_run_is_read_once_in_the_order_of_its_start(tmp_path):
    write(tmp_path / "runs.csv", [row(run_id="b", started_at="2026-01-02"), row(run_id="a")])
    write(tmp_path / "more" / "other.csv", [row(run_id="b", started_at="2026-01-02")])
    runs, sentences = load.read_runs([tmp_path, tmp_path / "more" / "other.csv"])
    assert [(run.row.run_id, run.folder) for run in runs] == [("a", tmp_path / "a"), ("b", tmp_path / "b")]
    assert sentences[1].endswith("1 row, 1 of them already read")


@pytest.fixture
def measured(tmp_path):
    """A run with one window from 100 to 110 s, and a reading of two GPUs each second from 90 to 119 s."""
    window = Window(index=0, steps=10, samples=100, start_s=100.0, end_s=110.0)
    write_windows_csv(tmp_path / "windows.csv", [window], [None])
    samples = [
        TelemetrySample(
            t_s=float(t), gpu=gpu, power_w=(300.0 if 100 <= t <= 110 else 100.0) + gpu, sm_active=0.5
        )
        for t in range(90, 120)
        for gpu in (0, 1)
    ]
    telemetry.write_csv(tmp_path / "telemetry.csv", samples)
    return load.Run(row(num_gpus=2), tmp_path)


def test_sensors_inside_the_windows(measured):
    found = sensors.over_time([measured], names(measured.row))
    lines = {(line["quantity"][0], line["GPU"][1]): line for line in cells(found)}
    assert set(lines) == {
        ("multiprocessors, %", 0),
        ("multiprocessors, %", 1),
        ("power, W", 0),
        ("power, W", 1),
    }
    assert [lines["power, W", 1][name][1] for name in ("mean", "least", "most", "readings")] == [
        301,
        301,
        301,
        11,
    ]
    assert lines["multiprocessors, %", 0]["mean"][1] == 50.0


def test_sensors_over_time_count_from_the_first_window(measured):
    activity, power = sensors.over_time([measured], names(measured.row)).charts
    assert power.spans == [(0.0, 10.0)]
    assert [line.name for line in power.lines] == ["GPU 0, power", "GPU 1, power"]
    assert [(p.x, p.y) for p in power.lines[0].points[9:11]] == [(-1.0, 100.0), (0.0, 300.0)]
    assert [line.name for line in activity.lines] == ["multiprocessors, mean of 2 GPUs"]


def test_a_run_without_windows_shows_what_was_read_before_its_end(measured):
    (measured.folder / "windows.csv").unlink()
    power = [
        line
        for line in cells(sensors.over_time([measured], names(measured.row)))
        if "W" in line["quantity"][0]
    ]
    # Of GPU 0: 11 of the 30 readings say 300, the rest 100.
    assert power[0]["mean"][1] == pytest.approx((11 * 300 + 19 * 100) / 30)
    assert power[0]["readings"][1] == 30


def test_a_run_without_readings_in_its_windows_has_pictures_only(measured):
    window = Window(index=0, steps=1, samples=1, start_s=100.2, end_s=100.8)
    write_windows_csv(measured.folder / "windows.csv", [window], [None])
    run = dataclasses.replace(measured, row=row(status="interrupted"))
    report = build.build([run], [])
    (section,) = (each for each in report.sections if each.key == "sensors")
    assert section.charts
    assert not section.tables
    assert not section.missing
    terminal.show(report, Console(file=io.StringIO(), width=80))


def test_readings_over_intervals_count_by_their_length_and_only_inside(tmp_path):
    window = Window(index=0, steps=1, samples=1, start_s=100.0, end_s=110.0)
    write_windows_csv(tmp_path / "windows.csv", [window], [None])
    intervals = [(99.0, 101.0, 0.9), (101.0, 102.0, 0.2), (102.0, 105.0, 0.6), (109.0, 111.0, 0.9)]
    samples = [
        TelemetrySample(t_s=end, gpu=0, gpm_start_s=start, gpm_end_s=end, tensor_active=share)
        for start, end, share in intervals
    ]
    telemetry.write_csv(tmp_path / "telemetry.csv", samples)
    (line,) = cells(sensors.over_time([load.Run(row(), tmp_path)], names(row())))
    assert line["mean"][1] == pytest.approx(50.0)  # (20 × 1 s + 60 × 3 s) ÷ 4 s
    assert line["readings"][1] == 2


def test_many_readings_become_means_of_neighbours(tmp_path):
    samples = [TelemetrySample(t_s=float(t), gpu=0, power_w=float(t)) for t in range(180)]
    telemetry.write_csv(tmp_path / "telemetry.csv", samples)
    (chart,) = sensors.over_time([load.Run(row(), tmp_path)], names(row())).charts
    points = chart.lines[0].points
    assert [(p.x, p.y) for p in (points[0], points[-1])] == [(0.5, 0.5), (178.5, 178.5)]
    assert len(points) == 90


@pytest.mark.parametrize(
    "content", ["t_s,gpu,power_w\n1.0,0,much\n", "when,what\n1,2\n", "t_s,gpu\n1,0,3,4\n"]
)
def test_a_broken_file_of_readings_is_said(tmp_path, content):
    (tmp_path / "telemetry.csv").write_text(content)
    found = sensors.over_time([load.Run(row(), tmp_path)], names(row()))
    assert str(tmp_path / "telemetry.csv") in found.missing + found.intro
    assert found.missing


# Pictures.


def attributes(drawn, pattern):
    return re.findall(pattern, drawn)


def test_bars_are_as_long_as_their_numbers():
    chart = BarChart("t", "u", [Bar("a", [("x", 6.0), ("y", 2.0)], "8"), Bar("b", [("x", 4.0)], "4")])
    found = attributes(svg.draw(chart), r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="14" class="(f\d)"')
    # The longest, 8, is the whole width of 360: 6 → 270, 2 → 90 beside it, 4 → 180.
    assert found == [("0.0", "270.0", "f0"), ("270.0", "90.0", "f1"), ("0.0", "180.0", "f0")]
    assert svg.legend(chart) == [(0, False, "x"), (1, False, "y")]


def test_points_lie_where_their_numbers_are():
    points = [Point(1, 50.0, "one"), Point(2, 100.0, "two"), Point(4, 0.0, "four")]
    chart = LineChart("t", "u", "x", [Line("l", points)], doubling=True)
    found = attributes(svg.draw(chart), r'<circle cx="([\d.]+)" cy="([\d.]+)" r="3.5"')
    # x: from 66 to 334 in equal steps per doubling; y: 12 at 100, 182 at 0.
    assert found == [("66.0", "97.0"), ("200.0", "12.0"), ("334.0", "182.0")]


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_a_line_that_does_not_change_can_be_drawn(value):
    lines = [Line("l", [Point(0, value, ""), Point(1, value, "")])]
    for dots in (True, False):
        drawn = svg.draw(LineChart("t", "u", "x", lines, from_zero=False, dots=dots))
        assert "nan" not in drawn
        assert "inf" not in drawn


@pytest.mark.parametrize(
    ("low", "high", "outside", "expected"),
    [
        (0, 7626, True, [0, 2000, 4000, 6000, 8000]),
        (0, 100, True, [0, 50, 100]),
        (1922, 1980, True, [1920, 1940, 1960, 1980]),
        (-48, 18, False, [-40, -20, 0]),
        (0.1, 0.3, True, [0.1, 0.15, 0.2, 0.25, 0.3]),
    ],
)
def test_axes_have_round_numbers(low, high, outside, expected):
    count = 4 if outside else 5
    assert svg.round_numbers(low, high, count, outside) == pytest.approx(expected)
