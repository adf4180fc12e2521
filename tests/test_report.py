"""python -m tfbench.report: from files to the terminal, Markdown and the page."""

import csv
import dataclasses
import re
from collections import Counter

import pytest
from absl import flags
from absl.testing import flagsaver
from report_helpers import Page, row, write
from run_helpers import ROOT, python

from tfbench import records, report
from tfbench.records import RunRecord
from tfbench.reporting import build, load, markdown, page

COMMITTED = ROOT / "results" / "h200" / "runs.csv"
FAILED = {"status": "oom", "samples_per_sec": None, "note": "no <b>memory</b> | at all & more"}


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def run(*files, **given):
    """Exit code of the command line."""
    flags.FLAGS.mark_as_parsed()  # what is not named here has its default
    with flagsaver.as_parsed(**{name: str(value) for name, value in given.items()}):
        return report.report(["report", *map(str, files)])


def page_of(*runs: RunRecord) -> Page:
    found = [load.Run(each, ROOT / "nowhere") for each in runs]
    return Page(page.render(build.build(found, [])))


# The numbers of the page are those of the file.

COLUMNS_OF_PAGE = {
    ("ranking", "samples/s per GPU"): "samples_per_sec_per_gpu",
    ("ranking", "samples/s"): "samples_per_sec",
    ("ranking", "step, ms"): "step_time_ms_mean",
    ("ranking", "MFU"): "mfu",
    ("ranking", "peak memory, GiB"): "peak_memory_gib",
    ("energy", "J per sample"): "energy_j_per_sample",
    ("energy", "samples per J"): "samples_per_joule",
    ("energy", "W per GPU"): "power_w_mean",
    ("scaling", "efficiency"): "weak_scaling_efficiency",
    ("parts", "compute, ms"): "compute_ms",
    ("parts", "host between calls, ms"): "host_gap_ms",
}


@pytest.fixture(scope="module")
def h200_csv(tmp_path_factory):
    """The first six committed rows, with their run folders: later ones do not change what is tested."""
    folder = tmp_path_factory.mktemp("h200")
    first = [each for each in records.read(COMMITTED) if each.started_at < "2026-11-30T06"]
    assert len(first) == 6
    for each in first:
        (folder / each.run_id).symlink_to(COMMITTED.parent / each.run_id)
    return write(
        folder / "runs.csv",
        (dataclasses.replace(each, schema_version=records.SCHEMA_VERSION) for each in first),
    )


@pytest.fixture(scope="module")
def h200(h200_csv, tmp_path_factory):
    """Their page, and the rows as text."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert run(h200_csv, html=path) == 0
    with h200_csv.open(newline="") as file:
        return Page(path.read_text()), list(csv.DictReader(file))


@pytest.mark.parametrize(("place", "column"), COLUMNS_OF_PAGE.items())
def test_numbers_are_those_of_the_file(h200, place, column):
    shown, rows = h200
    section, label = place
    found = [e for e in shown.all("td", section) if e.attributes["data-label"] == label]
    values = [e for e in shown.elements if e.tag == "data" and e.section == section]
    texts = Counter(e.text for e in found if re.match(r"\d", e.text))
    expected = [float(each[column]) for each in rows if each[column]]
    assert expected
    assert sum(texts.values()) == len(expected)
    for value in expected:
        (text,) = {e.text for e in values if float(e.attributes["value"]) == value} & set(texts)
        number = float(text.removesuffix(" %").replace(",", "")) / (100 if text.endswith("%") else 1)
        assert number == pytest.approx(value, rel=5e-3)  # three digits
        texts[text] -= 1
    assert not +texts


def test_pointing_at_a_bar_gives_rate_and_interval(h200):
    shown, _ = h200
    titles = [e.text for e in shown.all("title", "ranking")]
    assert "1 × H200, batch 512: 7,626, 95 %: 7,612 to 7,640 (samples/s per GPU)" in titles


# The page needs nothing else, and can be read without seeing it.


def test_page_loads_nothing(h200):
    shown, _ = h200
    assert not {e.tag for e in shown.elements} & {"script", "img", "iframe", "object"}
    for element in shown.elements:
        assert "src" not in element.attributes
        assert (element.attributes.get("href") or "#").startswith(("#", "data:"))
    (style,) = shown.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    assert "prefers-color-scheme: dark" in style.text


def test_links_lead_to_sections(h200):
    shown, _ = h200
    names = [e.attributes["id"] for e in shown.elements if "id" in e.attributes]
    assert len(names) == len(set(names))
    targets = [e.attributes["href"].removeprefix("#") for e in shown.all("a")]
    assert targets == [e.attributes["id"] for e in shown.all("section")]


def test_every_picture_has_a_name_and_a_table(h200):
    shown, _ = h200
    pictures = [e for e in shown.all("svg") if "aria-hidden" not in e.attributes]
    assert len(pictures) == len(shown.all("figure")) > 0
    for picture in pictures:
        assert picture.attributes["role"] == "img"
        assert picture.attributes["aria-label"]
        assert shown.all("table", picture.section)


def test_every_colour_of_a_picture_is_in_the_style_sheet(h200):
    shown, _ = h200
    style = shown.all("style")[0].text
    used = {name for e in shown.elements for name in (e.attributes.get("class") or "").split()}
    assert {"f0", "l0", "l1"} <= used
    assert not [name for name in used if not re.search(rf"\.{name}\b", style)]


def test_pointing_at_repeats_gives_their_starts():
    runs = [row(started_at=f"2026-01-0{day}T10:00:00.000+00:00") for day in (1, 2)]
    shown = page_of(*runs, row(per_replica_batch_size=64))
    titles = {e.text: e.attributes.get("title") for e in shown.all("th", "ranking")}
    assert titles["1 × H200, batch 256, 2 runs"] == "started 2026-01-01 10:00:00, 2026-01-02 10:00:00"
    assert titles["1 × H200, batch 64"] is None


def test_terminal_markdown_and_page_have_the_same_repeats(tmp_path, capsys):
    """Of the committed rows nine are one configuration at batch 1024, whose median README.md states."""
    first = [each for each in records.read(COMMITTED) if each.started_at < "2026-11-30T09"]
    now = (dataclasses.replace(each, schema_version=records.SCHEMA_VERSION) for each in first)
    folder = write(tmp_path / "runs.csv", now)
    assert run(folder, markdown=tmp_path / "r.md", html=tmp_path / "r.html") == 0
    shown = Page((tmp_path / "r.html").read_text())
    line = next(e.text for e in shown.all("tr", "ranking") if "batch 1024" in e.text)
    flagged = [e for e in shown.all("tr", "flagged") if "batch 1024" in e.text]
    for text in (capsys.readouterr().out, (tmp_path / "r.md").read_text().replace("\\", ""), line):
        assert "1 × H200, batch 1024, 9 runs" in text
        assert "throttled (9), clocks_below_90_percent (9)" in text
    assert "8402.87874440352" in [e.attributes["value"] for e in shown.all("data", "ranking")]
    assert len(flagged) == 2 * 9


# What is shown as it is.


def test_failed_rows_are_shown_as_what_they_are():
    shown = page_of(row(), row(run_id="broken", **FAILED))
    texts = [e.text for e in shown.all("tr", "failed")]
    assert len(texts) == 2  # the heading and the row
    assert "oom" in texts[1]
    assert FAILED["note"] in texts[1]
    assert "broken" not in "".join(e.text for e in shown.all("tr", "ranking"))


def test_only_failed_rows_leave_sections_out_with_what_would_fill_them():
    shown = page_of(row(**FAILED))
    for section in ("ranking", "scaling", "batch", "precision", "parts", "energy", "sensors"):
        (sentence,) = (e for e in shown.all("p", section) if e.attributes.get("class") == "missing")
        assert "python -m tfbench.train" in sentence.text
        assert not shown.all("table", section)
    assert len(shown.all("tr", "failed")) == 2


@pytest.mark.parametrize("fields", [{"tag": "<script>alert(1)</script>"}, {"host": '"><script>'}])
def test_text_of_rows_is_no_markup(fields):
    shown = page_of(row(samples_per_sec=900.0, **fields), row())
    assert not shown.all("script")
    assert next(iter(fields.values())) in "".join(e.text for e in shown.all("main"))


def test_a_row_on_the_cpu_is_ranked_by_its_whole_rate():
    cpu = row(num_gpus=0, num_replicas=2, gpu_name=None, driver=None, samples_per_sec=40.0)
    values = [e.attributes["value"] for e in page_of(cpu).all("data", "ranking")]
    assert values == ["40.0", "40.0"]


def test_markdown_has_as_many_cells_in_every_line_of_a_table():
    found = [load.Run(each, ROOT) for each in (row(), row(run_id="broken", **FAILED))]
    text = markdown.render(build.build(found, []))
    assert r"no \<b\>memory\</b\> \| at all & more" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) >= 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


# The command line.


def test_terminal_shows_the_numbers(h200_csv, capsys):
    assert run(h200_csv) == 0
    shown = capsys.readouterr().out
    for text in ("7,626", "7,612 to 7,640", "88.8 %", "0.08786", "throttled", "157 % of H200-SXM"):
        assert text in shown


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_cuts_no_column_off(h200_csv, monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(h200_csv) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    heads = [line for line in shown.splitlines() if line.lstrip().startswith("run ")]
    assert "flag" in heads[0]  # the last column
    assert "sou" in heads[1]


def test_long_names_stand_below_the_table_of_a_narrow_terminal(tmp_path, monkeypatch, capsys):
    path = write(
        tmp_path / "runs.csv",
        [
            row(
                run_key=tag,
                tag=f"{tag} and a long label of the user's own",
                samples_per_sec=rate,
                mfu=0.2,
                peak_memory_gib=39.5,
                gates="throttled",
            )
            for tag, rate in (("cold", 900.0), ("hot", 800.0))
        ],
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert run(path) == 0
    ranking = capsys.readouterr().out.partition("Published beside")[0]
    assert re.search(r"^1 +900\.0 ", ranking, re.MULTILINE)
    assert "\n2: 1 × H200, batch 256, hot and a long label of the user's own\n" in ranking
    monkeypatch.setenv("COLUMNS", "200")
    assert run(path) == 0
    assert "\n2: 1 × H200" not in capsys.readouterr().out


def test_strong_scaling_has_its_interval_in_every_output(tmp_path, capsys):
    strong = {"scaling_mode": "strong", "global_batch_size": 256}
    one = row(run_id="s1", **strong)
    two = row(num_gpus=2, per_replica_batch_size=128, samples_per_sec=1700.0, baseline_run_id="s1", **strong)
    path = write(tmp_path / "runs.csv", [one, two])
    assert run(path, markdown=tmp_path / "r.md", html=tmp_path / "r.html") == 0
    texts = [capsys.readouterr().out, (tmp_path / "r.md").read_text(), (tmp_path / "r.html").read_text()]
    for text in texts:
        assert "Strong scaling: resnet50" in text
        assert "84.0 to 86.0 %" in text  # 85 %, ± 1 % of the one rate and ± 10 of 1,700 of the other
    titles = [e.text for e in Page(texts[2]).all("title", "scaling")]
    assert any("85.0 % (84.0 to 86.0) of ideal" in title for title in titles)


def test_files_are_written(h200_csv, tmp_path, capsys):
    assert run(h200_csv, markdown=tmp_path / "r.md", html=tmp_path / "r.html") == 0
    assert (tmp_path / "r.md").read_text().startswith("# tfbench report\n")
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert f"written: {tmp_path / 'r.html'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "FILE={path}: No such file or directory; it takes a runs.csv"),
        ("", "no rows in {path}"),
        (",".join(records.COLUMNS) + "\n", "no rows in {path}"),
        ("a,b\n1,2\n", "{path} has schema version unknown with 2 columns"),
    ],
)
def test_files_without_rows_are_refused(tmp_path, capsys, content, message):
    path = tmp_path / "runs.csv"
    if content is not None:
        path.write_text(content)
    assert run(path) == 2
    assert message.format(path=path) in capsys.readouterr().err.replace("\n", " ")


def test_an_empty_folder_is_refused(tmp_path, capsys):
    assert run(tmp_path) == 2
    assert f"FILE={tmp_path / 'runs.csv'}: No such file" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("flag", "accepted"),
    [
        ("html", "a folder that exists"), ("markdown", "a folder that exists"), ("baseline", "a runs.csv"),
        ("prices", "card,currency,price_per_hour,source,date"),
    ],
)  # fmt: skip
def test_a_path_that_is_not_there_is_named_with_its_flag(tmp_path, capsys, flag, accepted):
    gone = tmp_path / "gone" / "file"
    assert run(write(tmp_path / "runs.csv", [row()]), **{flag: gone}) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"--{flag}={gone}: No such file or directory" in said
    assert accepted in said


def test_rows_of_the_cpu_are_sent_to_no_gpu():
    on_cpu = row(num_gpus=0, gpu_name=None, driver=None, precision="fp32")
    report_ = build.build([load.Run(on_cpu, ROOT / "nowhere")], [])
    missing = {section.key: section.missing for section in report_.sections}
    said = " ".join(missing.values())
    assert "--gpus=1" not in said
    assert "tf32" not in said
    assert "--gpus=0 --precision=fp32, then the same with --precision=mixed_bfloat16" in missing["precision"]


def test_no_file_is_refused(capsys):
    assert run() == 2
    assert "no FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rate", "status", "code"),
    [(1000.0, "ok", 0), (995.0, "ok", 0), (900.0, "ok", 1), (1100.0, "ok", 0), (None, "oom", 1)],
)
def test_a_regression_exits_with_1(tmp_path, rate, status, code):
    before = write(tmp_path / "before.csv", [row()])
    now = write(tmp_path / "now.csv", [row(samples_per_sec=rate, status=status, driver="590.2")])
    assert run(now, baseline=before, html=tmp_path / "r.html") == code
    shown = Page((tmp_path / "r.html").read_text())
    assert "driver 580.1 → 590.2" in "".join(e.text for e in shown.all("td", "baseline"))


def test_a_configuration_that_is_not_run_any_more_exits_with_1(tmp_path, capsys):
    before = write(tmp_path / "before.csv", [row(), row(run_key="gone", run_id="gone")])
    assert run(write(tmp_path / "now.csv", [row()]), baseline=before) == 1
    assert "not run now" in capsys.readouterr().out


@pytest.mark.parametrize("before", [[], [row(run_key="other")], [row(**FAILED)]])
def test_a_baseline_with_nothing_to_compare_does_not_pass(tmp_path, capsys, before):
    path = write(tmp_path / "before.csv", before)
    path.touch()
    assert run(write(tmp_path / "now.csv", [row()]), baseline=path) == 2
    assert f"--baseline={path}" in capsys.readouterr().err


def test_the_module_is_a_command(tmp_path):
    done = python("-m", "tfbench.report", str(COMMITTED.parent), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = records.read(COMMITTED)
    good = sum(each.status == "ok" for each in rows)
    assert f"{len(rows)} runs, {good} of them ended well, on " in done.stdout
    refused = python("-m", "tfbench.report", "--htm=x", str(COMMITTED), cwd=tmp_path)
    assert refused.returncode == 2
    assert "htm" in refused.stderr
    assert "Traceback" not in refused.stderr
