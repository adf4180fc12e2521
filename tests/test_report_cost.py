"""Costs of the report: prices, GPU-hours, trainings, in numbers worked by hand."""

from importlib import resources

import pytest
from absl import flags
from absl.testing import flagsaver
from report_helpers import Page, cells, row, write

from tfbench import report
from tfbench.reporting import cost, naming, prices
from tfbench.reporting.prices import CostError

HEADER = "card,currency,price_per_hour,source,date\n"
H200 = "H200-SXM,USD,3.60,a test,2026-01-31\n"


def price_file(tmp_path, text=HEADER + H200):
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    return path


def plan(tmp_path, text=HEADER + H200, **fields):
    return cost.Plan(prices=prices.read(price_file(tmp_path, text)), **fields)


def tables(section):
    """Lines of each table of a section, by its title."""
    return {
        table.title: [
            {column: (cell.text, cell.value) for column, cell in zip(table.columns, line, strict=True)}
            for line in table.rows
        ]
        for table in section.tables
    }


def section_of(rows, given):
    return cost.section(rows, given, naming.machine_names(rows))


# The file of prices.


@pytest.mark.parametrize(
    ("card", "gpu_name"),
    [
        ("H200-SXM", "NVIDIA H200"), ("h200-sxm", "NVIDIA H200"), ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("A card of its own", "A card of its own"),
    ],
)  # fmt: skip
def test_a_card_is_found_by_both_its_names(tmp_path, card, gpu_name):
    found = prices.read(price_file(tmp_path, f"{HEADER}{card},EUR, 2.5 ,a list,2026-01-31\n"))
    assert found.of(gpu_name) == prices.Price(card, "EUR", 2.5, "a list", "2026-01-31")
    assert found.currency == "EUR"


@pytest.mark.parametrize("gpu_name", ["NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", None])
def test_a_card_that_only_looks_alike_has_no_price(tmp_path, gpu_name):
    text = HEADER + H200 + "H100-SXM,USD,2,a test,2026-01-31\n"
    assert prices.read(price_file(tmp_path, text)).of(gpu_name) is None


def test_the_exact_name_counts_before_the_short_one(tmp_path):
    text = HEADER + H200 + "NVIDIA H200,USD,9,another,2026-01-31\n"
    assert prices.read(price_file(tmp_path, text)).of("NVIDIA H200").per_hour == 9


def test_columns_stand_in_any_order_behind_a_spreadsheets_mark(tmp_path):
    text = "\ufeffdate,card,source,currency,price_per_hour\r\n2026-01-31,H200-SXM,list,USD,4\r\n"
    assert prices.read(price_file(tmp_path, text)).of("NVIDIA H200").per_hour == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the columns are card,currency,price_per_hour,source,date, but here are none"),
        ("card;price\n", "line 1: the columns are .* here are card;price"),
        (HEADER, "no price; prices must be there"),
        (HEADER + H200 + "L4,USD,free,x,2026-01-31\n", "line 3: price_per_hour=free: a number above 0"),
        (HEADER + "L4,USD,-1,x,2026-01-31\n", "line 2: price_per_hour=-1"),
        (HEADER + "L4,USD,0,x,2026-01-31\n", "line 2: price_per_hour=0"),
        (HEADER + "L4,USD,inf,x,2026-01-31\n", "line 2: price_per_hour=inf"),
        (HEADER + "L4,USD,nan,x,2026-01-31\n", "line 2: price_per_hour=nan"),
        (HEADER + "L4,dollars,1,x,2026-01-31\n", "line 2: currency=dollars: three capital letters"),
        (HEADER + "L4,USD,1,x,31.1.2026\n", "line 2: date=31.1.2026: .* YYYY-MM-DD"),
        (HEADER + "L4,USD,1,,2026-01-31\n", "line 2: each of .* needs one value"),
        (HEADER + "L4,USD,1,x\n", "line 2: each of .* needs one value"),
        (HEADER + "L4,USD,2,50,x,2026-01-31\n", "line 2: each of .* needs one value"),
        (HEADER + H200 + "h200-sxm,USD,1,x,2026-01-31\n", "line 3: a second price of h200-sxm"),
        (HEADER + H200 + "L4,EUR,1,x,2026-01-31\n", "EUR and USD; .* all in one currency"),
        (HEADER + '"L4,USD,1,x\n', "no CSV file"),
    ],
)
def test_bad_prices_are_refused_with_their_line(tmp_path, text, message):
    with pytest.raises(CostError, match=message) as caught:
        prices.read(price_file(tmp_path, text))
    assert "prices.csv" in str(caught.value)


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(CostError, match="no CSV file in UTF-8"):
        prices.read(path)


def test_the_example_can_be_read_and_says_that_it_is_none():
    with resources.as_file(resources.files("tfbench.hardware") / "prices_example.csv") as path:
        found = prices.read(path)
    assert found.by_card
    assert found.currency == "XXX"  # ISO 4217: no currency
    assert all("INVENTED" in price.source for price in found.by_card.values())


# Costs.


def test_cost_of_a_million_samples(tmp_path):
    # 3.60 an hour is 0.001 a second: at 1000 samples/s a million takes 1000 s and costs 1.00. Two GPUs cost
    # 0.002 a second and need 1e6 ÷ 1600 = 625 s: 1.25.
    rows = [row(num_gpus=2, samples_per_sec=1600.0), row()]
    found = section_of(rows, plan(tmp_path))
    (lines,) = tables(found).values()
    assert [line["USD per million samples"][1] for line in lines] == pytest.approx([1.0, 1.25])
    # 1000 ± 10 samples/s: 1e6 × 0.001 ÷ 1010 = 0.9901 and ÷ 990 = 1.0101.
    assert lines[0]["95 %"][0] == "0.9901 to 1.010"
    assert (lines[0]["source of the price"][0], lines[0]["price of"][0]) == ("a test", "2026-01-31")
    bar = found.charts[0].bars[0]
    assert (bar.length, bar.low, bar.high) == pytest.approx((1.0, 1 / 1.01, 1 / 0.99))


def test_a_rate_without_an_interval_has_a_cost_without_one(tmp_path):
    (lines,) = tables(section_of([row(samples_per_sec_high=None)], plan(tmp_path))).values()
    assert lines[0]["USD per million samples"][1] == pytest.approx(1.0)
    assert lines[0]["95 %"] == ("", None)


def test_only_the_newest_configuration_of_a_setup_is_priced(tmp_path):
    rows = [row(started_at="2026-01-02", samples_per_sec=500.0, run_key="newer"), row()]
    (lines,) = tables(section_of(rows, plan(tmp_path))).values()
    assert [line["USD per million samples"][1] for line in lines] == pytest.approx([2.0])


def test_repeats_are_priced_by_their_median_and_the_interval_over_runs(tmp_path):
    rows = [
        row(started_at="2026-01-02", samples_per_sec=500.0, gates="throttled"),
        row(samples_per_sec=300.0),
    ]
    found = section_of(rows, plan(tmp_path))
    (lines,) = tables(found).values()
    # 3.60 an hour is 0.001 a second: 1e6 × 0.001 ÷ 400, and ÷ 510 and ÷ 290 at the ends of both intervals.
    bar = found.charts[0].bars[0]
    assert (bar.length, bar.low, bar.high) == pytest.approx((2.5, 1000 / 510, 1000 / 290))
    assert (lines[0]["run"][0], lines[0]["samples/s"][1]) == ("1 × H200, batch 256, 2 runs", 400.0)
    assert lines[0]["flags"][0] == "throttled (1)"


def test_gpu_hours_buy_samples(tmp_path):
    # 100 hours of one GPU: 50 of two, at 1600 samples/s 288 million samples.
    rows = [row(num_gpus=2, samples_per_sec=1600.0)]
    lines = tables(section_of(rows, plan(tmp_path, budget_gpu_hours=100.0)))[
        "100 GPU-hours, resnet50, 224 px"
    ]
    (line,) = lines
    assert [line[name][1] for name in ("hours", "cost, USD", "millions of samples")] == pytest.approx(
        [50.0, 360.0, 288.0]
    )
    assert line["95 %"][0] == "286.2 to 289.8"  # of 1590 and 1610


def trainings(rows, given):
    found = tables(section_of(rows, given))
    (name,) = (title for title in found if title.startswith("Training on") and "choice" not in title)
    (choice,) = (title for title in found if "the choice" in title)
    return found[name], {line["choice"][0]: line["run"][0] for line in found[choice]}


ONE_AND_TWO = (row(), row(num_gpus=2, samples_per_sec=1600.0))


def test_a_training_costs_its_hours(tmp_path):
    # 36 million samples: 10 h at 1000 samples/s; 6.25 h of two GPUs at 1600, 12.5 GPU-hours.
    lines, choice = trainings(ONE_AND_TWO, plan(tmp_path, train_samples=36_000_000))
    shown = [[line[name][1] for name in ("hours", "GPU-hours", "cost, USD")] for line in lines]
    assert shown[0] == pytest.approx([10.0, 10.0, 36.0])
    assert shown[1] == pytest.approx([6.25, 12.5, 45.0])
    assert lines[0]["95 % of them"][0] == "9.901 to 10.10"
    assert lines[0]["95 %"][0] == "35.64 to 36.36"
    assert lines[0]["limits"][0] == lines[0]["failures"][0] == ""
    assert choice == {"cheapest": "1 × H200, batch 256", "fastest": "2 × H200, batch 256"}


NONE = "none keeps the limits"


@pytest.mark.parametrize(
    ("limits", "said", "cheapest", "fastest"),
    [
        ({"budget": 100.0}, ["within", "within"], "1 ×", "2 ×"),
        ({"budget": 40.0}, ["within", "over budget"], "1 ×", "1 ×"),
        ({"deadline_hours": 8.0}, ["too late", "within"], "2 ×", "2 ×"),
        ({"budget": 40.0, "deadline_hours": 8.0}, ["too late", "over budget"], NONE, NONE),
        ({"budget": 1.0, "deadline_hours": 1.0}, ["over budget and too late"] * 2, NONE, NONE),
        ({"budget": 36.1}, ["within, but its interval reaches over budget", "over budget"], "1 ×", "1 ×"),
    ],
)
def test_limits_decide_what_is_chosen(tmp_path, limits, said, cheapest, fastest):
    lines, choice = trainings(ONE_AND_TWO, plan(tmp_path, train_samples=36_000_000, **limits))
    assert [line["limits"][0] for line in lines] == said
    assert choice["cheapest"].startswith(cheapest)
    assert choice["fastest"].startswith(fastest)


def test_failures_and_checkpoints_make_a_training_longer(tmp_path):
    # Ten failures in 1000 hours of one GPU: one in 100 h of a job on one. Writing takes 0.1 h: Young's
    # interval is √(2 · 0.1 · 100) = 4.47 h; checkpoints cost 0.1 ÷ 4.47 = 2.2 % and lost work as much again.
    given = plan(
        tmp_path, train_samples=360_000_000, failures_per_1000_gpu_hours=10.0, checkpoint_minutes=6.0
    )
    lines, _ = trainings([row()], given)
    (line,) = lines
    assert line["checkpoint every, min"][1] == pytest.approx(60 * 4.47, rel=0.02)
    assert line["both add"][1] == pytest.approx(0.0447, rel=0.05)
    hours = line["hours"][1]
    assert hours == pytest.approx(100 * (1 + line["both add"][1]))
    assert line["failures"][1] == pytest.approx(hours / 100)
    assert line["cost, USD"][1] == pytest.approx(3.6 * hours)
    slower, _ = trainings([row()], cost.Plan(**vars(given) | {"restart_minutes": 60.0}))
    assert slower[0]["hours"][1] - hours == pytest.approx(1.0, rel=0.1)  # one failure, one hour


# What has no price.


def test_cards_without_a_price_are_listed(tmp_path):
    rows = [row(), row(gpu_name="NVIDIA L4"), row(num_gpus=0, gpu_name=None)]
    lines = tables(section_of(rows, plan(tmp_path)))["Without a price"]
    assert [line["card"][0] for line in lines] == ["NVIDIA L4", "CPU"]
    assert "add a line for it to" in lines[0]["why"][0]
    assert "prices.csv" in lines[0]["why"][0]


@pytest.mark.parametrize(
    ("rows", "said"), [([row(gpu_name="NVIDIA L4")], "NVIDIA L4"), ([], "no run ended well")]
)
def test_prices_of_no_measured_card_say_so(tmp_path, rows, said):
    found = section_of(rows, plan(tmp_path))
    assert said in found.missing
    assert not cells(found)


def test_without_prices_the_section_says_what_would_fill_it():
    assert "--prices=FILE" in section_of([row()], None).missing


# The command line.


def run(*files, **given):
    flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(**{name: str(value) for name, value in given.items()}):
        return report.report(["report", *map(str, files)])


def test_costs_are_in_all_three_forms(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    files = {"html": tmp_path / "r.html", "markdown": tmp_path / "r.md"}
    rows = write(tmp_path / "runs.csv", ONE_AND_TWO)
    given = {"prices": price_file(tmp_path), "train_samples": 36_000_000, "budget": 40}
    assert run(rows, **files, **given) == 0
    shown = capsys.readouterr().out
    for text in (" ".join(shown.split()), files["markdown"].read_text()):
        assert "Cost per million samples, resnet50, 224 px" in text
        assert "Training on 36,000,000 samples, resnet50, 224 px: the choice within 40.00 USD" in text
    page = Page(files["html"].read_text())
    assert len(page.all("figure", "cost")) == 1
    assert {"1.25", "36.0"} <= {e.attributes["value"] for e in page.all("data", "cost")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget_gpu_hours": 10}, "--budget_gpu_hours needs --prices"),
        ({"prices": "missing.csv"}, "--prices=missing.csv: No such file or directory"),
        ({"prices": "", "budget_gpu_hours": -1}, "--budget_gpu_hours=-1.0: a number above 0"),
        ({"prices": "", "train_samples": 0}, "--train_samples=0: a number above 0"),
        ({"prices": "", "train_samples": 9, "budget": "nan"}, "--budget=nan: a number above 0"),
        ({"prices": "", "budget": 5}, "--budget needs --train_samples"),
        ({"prices": "", "deadline_hours": 5}, "--deadline_hours needs --train_samples"),
        (
            {"prices": "", "train_samples": 9, "failures_per_1000_gpu_hours": 1},
            "--failures_per_1000_gpu_hours needs --checkpoint_minutes",
        ),
        (
            {"prices": "", "train_samples": 9, "checkpoint_minutes": 1},
            "--checkpoint_minutes needs --failures_per_1000_gpu_hours",
        ),
        (
            {"prices": "", "train_samples": 9, "restart_minutes": 1},
            "--restart_minutes needs --failures_per_1000_gpu_hours",
        ),
    ],
)
def test_flags_that_cannot_be_are_refused(tmp_path, capsys, given, message):
    if given.get("prices") == "":
        given = given | {"prices": price_file(tmp_path)}
    assert run(write(tmp_path / "runs.csv", [row()]), **given) == 2
    assert message in capsys.readouterr().err
