"""Several runs of one configuration, with a stand-in for the process that trains."""

import io

import pytest
from rich.console import Console

from tfbench import records, repeats
from tfbench.config import BenchmarkConfig
from tfbench.display import Display
from tfbench.records import RunRecord


@pytest.fixture
def config(tmp_path):
    return BenchmarkConfig(model="resnet_tiny", image_size=32, results_dir=str(tmp_path))


def row(config, rate, low, high, **columns):
    good = {"status": "ok", "run_key": config.run_key, "started_at": "2999-01-01T00:00:00.000+00:00"}
    interval = {"samples_per_sec_low": low, "samples_per_sec_high": high}
    return RunRecord(**good | {"samples_per_sec": rate} | interval | columns)


def run(config, monkeypatch, codes, rows=()):
    """Repeats with children that end with these codes and have written these rows."""
    commands = []

    def child(command, series):
        commands.append(command)
        return codes[len(commands) - 1]

    for each in rows:
        records.append(f"{config.results_dir}/runs.csv", each)
    monkeypatch.setattr(repeats, "_run", child)
    display = Display(Console(file=io.StringIO(), width=200))
    return repeats.repeat(config, len(codes), display), commands, display.console.file.getvalue()


def test_median_spread_and_intervals_by_hand(config, monkeypatch):
    # Rates 98, 100, 103: median 100, spread 5 %; mean 100.33, sd 2.517, t(2) = 4.303: ± 6.25.
    rows = [row(config, 98, 97, 99), row(config, 100, 99, 101), row(config, 103, 99, 107)]
    code, _, shown = run(config, monkeypatch, [0, 0, 0], rows)
    assert code == 0
    for figure in ("100.0", "5.00 %", "94.1 to 106.6", "2 of 3"):
        assert figure in shown


def test_two_runs_have_the_interval_from_end_to_end(config, monkeypatch):
    """Student's of two, 570 ± 12.706 · 99 ÷ √2, would begin below 0."""
    rows = [row(config, 500, 480, 521), row(config, 640, 601, 655)]
    shown = run(config, monkeypatch, [0, 0], rows)[2]
    assert "570.0" in shown
    assert "480.0 to 655.0" in shown


def test_runs_too_far_apart_have_no_interval(config, monkeypatch):
    rows = [row(config, rate, rate, rate) for rate in (10, 10, 1000)]  # 340 ± 4.303 · 571.6 ÷ √3
    assert "95 %: not known" in run(config, monkeypatch, [0] * 3, rows)[2]


def test_each_run_is_a_process_with_every_flag(config, monkeypatch):
    _, commands, _ = run(config, monkeypatch, [0, 0])
    assert len(commands) == 2
    assert commands[0] == commands[1]
    assert commands[0][1:3] == ["-m", "tfbench.train"]
    assert f"--results_dir={config.results_dir}" in commands[0]
    assert "--model=resnet_tiny" in commands[0]


def test_only_these_runs_count(config, monkeypatch):
    others = [
        row(config, 1, 1, 1, status="failed"),
        row(config, 1, 1, 1, run_key="another"),
        row(config, 1, 1, 1, started_at="2001-01-01T00:00:00.000+00:00"),
    ]
    rows = [*others, row(config, 100, 99, 101), row(config, 102, 99, 103)]
    assert "2 of 2" in run(config, monkeypatch, [0, 0], rows)[2]


@pytest.mark.parametrize(("codes", "ended", "ran"), [([0, 1, 0], 1, 3), ([0, 130, 0], 130, 2)])
def test_a_failure_shows_and_ctrl_c_ends_it(config, monkeypatch, codes, ended, ran):
    code, commands, _ = run(config, monkeypatch, codes)
    assert (code, len(commands)) == (ended, ran)


def test_child_is_a_real_process():
    with repeats._Stoppable() as series:
        assert repeats._run(["/bin/sh", "-c", "exit 3"], series) == 3
    assert not series.stopped
