"""The report's section of a machine's ceilings: what it shows of micro.csv, in numbers worked by hand."""

import csv
import re
from collections import Counter

import pytest
from absl import flags
from absl.testing import flagsaver
from report_helpers import Page, cells, row, write

from tfbench import report
from tfbench.microbench import all_reduce, matmul, rows
from tfbench.microbench.rows import MicroRow
from tfbench.reporting import ceilings, svg
from tfbench.reporting.document import Line, LineChart, Point

SQUARE = "8192x8192x8192"
HEADER = ",".join(rows.COLUMNS) + "\n"


def micro(benchmark="matmul", case=SQUARE, **fields):
    """A row of one H200, of fp16's square product unless told otherwise."""
    known = {
        "run_id": "m",
        "started_at": "2026-01-01T10:00:00+00:00",
        "precision": "fp16",
        "engine": "library",
        "unit": "TFLOP/s" if benchmark == "matmul" else "GB/s",
        "gpu_name": "NVIDIA H200",
        "num_gpus": 1,
        "host": "left",
    }
    return MicroRow(benchmark=benchmark, case=case, **known | fields)


def write_micro(path, *measured):
    for each in measured:
        rows.append(path, each)
    return path


def run(*files, **given):
    """Exit code of the command line."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(**{name: str(value) for name, value in given.items()}):
        return report.report(["report", *map(str, files)])


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


# What is shown.


def test_a_format_is_shown_by_its_faster_engine():
    slow, fast = (
        micro(rate=600.0),
        micro(rate=700.0, engine="xla", share_of_peak=0.707, low=690.0, high=710.0),
    )
    found = ceilings.section([fast, slow], [])
    (line,) = cells(found)
    assert (line["rate"], line["by"], line["of peak"]) == (("700.0", 700.0), ("xla", None), ("70.7 %", 0.707))
    ((bar,),) = [chart.bars for chart in found.charts]
    assert (bar.label, bar.length, bar.shown, bar.low) == ("fp16", 700.0, "700.0, 71 % of peak", 690.0)


def test_what_a_burst_reaches_stands_beside_what_is_sustained():
    burst = micro(case=f"{SQUARE} {matmul.RESTED}", rate=739.0)
    (line,) = cells(ceilings.section([burst, micro(rate=658.0)], []))
    assert (line["rate"][1], line["after rests"][1]) == (658.0, 739.0)


def test_a_format_without_a_rate_says_why():
    tried = [
        micro(precision="fp8", note="no such operation"),
        micro(precision="fp8", engine="xla", note="not reached: XLA made of it dot(bf16, bf16)"),
    ]
    found = ceilings.section(tried, [])
    (line,) = cells(found)
    assert line["rate"] == ("", None)
    assert line["remark"][0] == "library: no such operation; xla: not reached: XLA made of it dot(bf16, bf16)"
    assert not found.charts


def test_the_newest_measurement_counts_and_not_the_best():
    old = micro(rate=790.0)
    new = micro(rate=640.0, run_id="n", started_at="2026-01-02T10:00:00+00:00")
    (line,) = cells(ceilings.section([new, old], []))
    assert line["rate"] == ("640.0", 640.0)


def test_other_sizes_are_no_ceiling():
    assert not cells(ceilings.section([micro(case="4096x4096x4096", rate=800.0)], []))


def test_the_same_card_in_two_hosts_is_two_machines():
    found = ceilings.section([micro(rate=700.0), micro(rate=600.0, host="right")], [])
    assert [table.title for table in found.tables] == [
        "Matrix products, H200 of left",
        "Matrix products, H200 of right",
    ]
    alone = ceilings.section([micro(rate=1.0, gpu_name=None)], [])
    assert alone.tables[0].title == "Matrix products, CPU"


def test_all_reduce_is_drawn_over_the_message():
    measured = [
        micro("all_reduce", "1 GiB", rate=380.0, num_gpus=2, share_of_peak=0.844),
        micro("all_reduce", "64 KiB", rate=2.0, num_gpus=2),
        micro("all_reduce", "64 KiB", rate=3.0, num_gpus=2, engine="xla"),
    ]
    found = ceilings.section(measured, [])
    (chart,) = found.charts
    assert chart.title == "All-reduce, 2 × H200"
    assert [(line.name, [(p.x, p.y) for p in line.points]) for line in chart.lines] == [
        ("fp16, library", [(0.0625, 2.0), (1024.0, 380.0)]),
        ("fp16, xla", [(0.0625, 3.0)]),
    ]
    assert cells(found)[0]["of the link"] == ("84.4 %", 0.844)


def test_one_device_is_a_sentence_and_no_table_of_the_same_reason():
    reason = "one device has nothing to sum with"
    found = ceilings.section([micro("all_reduce", size, note=reason) for size in ("1 MiB", "1 GiB")], [])
    assert not found.tables
    with_product = ceilings.section(
        [
            micro("all_reduce", "1 MiB", note=reason),
            micro("all_reduce", "1 GiB", note=reason),
            micro(rate=1.0),
        ],
        [],
    )
    assert with_product.intro.count(reason) == 1


@pytest.mark.parametrize("size", [*all_reduce.SIZES, 512])
def test_the_name_of_a_size_leads_back_to_its_bytes(size):
    assert all_reduce.size_of(all_reduce._size_name(size)) == size


@pytest.mark.parametrize("case", ["", "64", "64 KB", "much MiB"])
def test_other_words_are_no_size(case):
    with pytest.raises(ValueError, match="no size"):
        all_reduce.size_of(case)


def test_a_step_stands_below_its_roof():
    measured = [micro("memory", "copy", rate=4000.0), micro(rate=800.0), micro(rate=2000.0, precision="fp8")]
    step = row(dram_active=0.5, tflops_per_gpu=240.0)  # of 4.8 TB/s: 100 FLOP a byte, so 400 TFLOP/s at most
    found = ceilings.section(measured, [step])
    chart = found.charts[-1]
    assert [(line.name, [(p.x, p.y) for p in line.points]) for line in chart.lines] == [
        ("fp8", [(0.25, 1.0), (500.0, 2000.0), (8192.0, 2000.0)]),
        ("fp16", [(0.25, 1.0), (200.0, 800.0), (8192.0, 800.0)]),
        ("resnet50, batch 256, mixed_float16", [(pytest.approx(100.0), 240.0)]),
    ]
    line = cells(found)[-1]
    assert line["FLOP per byte"][1] == pytest.approx(100.0)
    assert line["of what its roof allows"] == ("60.0 %", pytest.approx(0.6))
    assert "bert_large is not placed" in found.intro


def test_without_the_memory_there_is_no_roof():
    assert "--only=matmul,memory" in ceilings.section([micro(rate=800.0)], []).intro


def test_no_measurement_names_the_command():
    assert ceilings.section([], []).missing.endswith("python -m tfbench.micro")


def test_points_lie_where_both_axes_grow_by_factors():
    points = [Point(1, 10.0, ""), Point(10, 1000.0, ""), Point(100, 100.0, "")]
    drawn = svg.draw(LineChart("t", "u", "x", [Line("l", points)], log_log=True))
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="3.5"', drawn)
    # x: from 66 to 334, 134 a factor of ten; y: 182 at 10, 12 at 1000.
    assert found == [("66.0", "182.0"), ("200.0", "12.0"), ("334.0", "97.0")]
    assert re.findall(r'class="(?:middle|end) dim">([\d,]+)<', drawn) == [
        "10",
        "100",
        "1,000",
        "1",
        "10",
        "100",
    ]


# From files to the page.


def test_numbers_of_the_page_are_those_of_the_file(tmp_path):
    write(tmp_path / "runs.csv", [row()])
    path = write_micro(
        tmp_path / "micro.csv",
        micro(rate=641.2345, share_of_peak=0.648, low=630.5, high=650.5, power_w_mean=686.4),
        micro("memory", "copy", rate=4123.456, share_of_peak=0.859),
        micro("memory", "empty launch, waited for", rate=31.25, unit="us"),
        micro("all_reduce", "1 MiB", rate=25.125, num_gpus=2),
    )
    assert run(tmp_path, html=tmp_path / "r.html", markdown=tmp_path / "r.md") == 0
    shown = Page((tmp_path / "r.html").read_text())
    values = Counter(float(e.attributes["value"]) for e in shown.all("data", "ceilings"))
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    for column in ("rate", "share_of_peak", "power_w_mean"):
        for cell in (line[column] for line in lines if line[column]):
            assert values[float(cell)], (column, cell)
    assert len(shown.all("svg", "ceilings")) >= 3
    text = (tmp_path / "r.md").read_text()
    assert "## Ceilings of the machine" in text
    assert "| fp16 | 641.2 | TFLOP/s | 630.5 to 650.5 | 64.8 % |" in text


@pytest.mark.parametrize("named", ["micro.csv", "other.csv", "."])
def test_measurements_alone_are_a_report(tmp_path, capsys, named):
    write_micro(tmp_path / ("other.csv" if named == "other.csv" else "micro.csv"), micro(rate=641.2345))
    assert run(tmp_path / named) == 0
    shown = capsys.readouterr().out
    assert "641.2" in shown
    assert "1 row of tfbench.micro" in shown


def test_a_file_named_and_found_is_read_once(tmp_path, capsys):
    write(tmp_path / "runs.csv", [row()])
    path = write_micro(tmp_path / "micro.csv", micro(rate=641.0))
    assert run(path, tmp_path, tmp_path / "runs.csv") == 0
    assert capsys.readouterr().out.count("of tfbench.micro") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows in {path}"),
        (HEADER, "no rows in {path}"),
        ("benchmark,case,rate\n1,2,3\n", "{path} does not have the columns of micro.csv version 1"),
        (f"{HEADER}m,2026,1,matmul,x,fp16,xla,fast{',' * 18}\n", "line 2: could not convert"),
    ],
)  # fmt: skip
def test_a_named_file_without_rows_is_refused_and_a_neighbour_left_out(tmp_path, capsys, content, message):
    path = tmp_path / "micro.csv"
    path.write_text(content)
    assert run(path) == 2
    assert message.format(path=path) in capsys.readouterr().err
    write(tmp_path / "runs.csv", [row()])
    assert run(tmp_path) == 0
    shown = capsys.readouterr().out
    assert f"{path}: 0 rows of tfbench.micro" in shown or message.format(path=path) in shown
    assert "Fill it with: python -m tfbench.micro" in shown
