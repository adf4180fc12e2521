"""The shell scripts that string sweeps and the report together, with a stand-in for the run itself."""

import os
import shutil
import subprocess
import sys

import pytest
from run_helpers import DEADLINE_S, ROOT
from sweep_helpers import Sweeper

from tfbench import records

# Stands for the virtual environment's python: its sweeps start the stand-in for training.
PYTHON = """#!/bin/sh
if [ "$2" = tfbench.sweep ]; then shift 2; set -- {driver} "$@"; fi
if [ "$1" = experiments/scaling.py ]; then shift; set -- {driver}.experiment "$@"; fi
if [ "$2" = tfbench.micro ]; then echo "micro $*"; exit; fi
exec {python} "$@"
"""
EXPERIMENT = """
import runpy, sys
import sweep_helpers
from tfbench import study
from tfbench.sweeping import loop
loop.TRAINER = (sys.executable, {fake!r})
study.this_machine = sweep_helpers.machine_there
runpy.run_path("experiments/scaling.py", run_name="__main__")
"""


class Scripts:
    """Scripts over a sweeper's stand-ins."""

    def __init__(self, folder):
        (folder / "sweeper").mkdir()
        self.sweeper, self.folder = Sweeper(folder / "sweeper"), folder
        fake = folder / "sweeper" / "fake.py"
        (folder / "sweeper" / "driver.py.experiment").write_text(EXPERIMENT.format(fake=f"{fake}"))
        program = folder / "bin" / "python"
        program.parent.mkdir()
        program.write_text(PYTHON.format(driver=folder / "sweeper" / "driver.py", python=sys.executable))
        program.chmod(0o755)

    def run(self, script, *flags, rate=100.0, **variables):
        known = {"TFBENCH_VENV": str(self.folder), "TFBENCH_NIGHTLY": str(self.folder / "nightly")}
        return subprocess.run(
            [ROOT / "scripts" / script, *flags],
            env=self.sweeper.environment({}) | known | {"FAKE_RATE": f"{rate}"} | variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


@pytest.fixture
def scripts(tmp_path):
    return Scripts(tmp_path)


class TestNightly:
    FLAGS = ("--gpus=0", "--sweep=model=resnet_tiny", "--repeats=2")

    def night(self, scripts, **variables):
        """The next night; tonight's folder becomes that of another one first."""
        done = scripts.run("nightly.sh", *self.FLAGS, **variables)
        (folder,) = (scripts.folder / "nightly").glob("2*")
        self.rows = records.read(folder / "runs.csv")
        shutil.rmtree(folder)
        return done

    def good_rates(self, scripts):
        return [row.samples_per_sec for row in records.read(scripts.folder / "nightly" / "good.csv")]

    def test_nights(self, scripts):
        first = self.night(scripts)
        assert first.returncode == 0, first.stdout + first.stderr
        assert "the first good night" in first.stdout
        assert self.good_rates(scripts) == [100.0, 100.0]
        faster = self.night(scripts, rate=110.0)
        assert faster.returncode == 0, faster.stdout + faster.stderr
        assert self.good_rates(scripts) == [110.0, 110.0]
        slower = self.night(scripts, rate=105.0)  # each ± 1, so the ratio is surely below 1
        assert slower.returncode == 1, slower.stdout + slower.stderr
        assert "regression" in slower.stdout
        assert self.good_rates(scripts) == [110.0, 110.0]
        kept = self.night(scripts, rate=120.0, TFBENCH_KEEP_GOOD="1")
        assert kept.returncode == 0
        assert self.good_rates(scripts) == [110.0, 110.0]

    def test_a_first_night_that_is_not_good_is_not_compared_with(self, scripts):
        done = self.night(scripts, FAKE='{"0": "crash"}')
        assert done.returncode == 2
        assert {row.status for row in self.rows} == {"failed"}
        assert not (scripts.folder / "nightly" / "good.csv").exists()

    def test_a_cpu_is_asked_for_what_it_can(self, scripts):
        done = scripts.run("nightly.sh", "--gpus=0", "--repeats=1")
        assert done.returncode == 0, done.stdout + done.stderr
        (folder,) = (scripts.folder / "nightly").glob("2*")
        assert [row.flags for row in records.read(folder / "runs.csv")] == ["--seed=0"] * 2
        assert "model=bert_base precision=fp32" in done.stdout

    def test_another_configuration_is_not_passed_over(self, scripts):
        assert self.night(scripts).returncode == 0
        other = scripts.run("nightly.sh", *self.FLAGS, "--seed=5")
        assert other.returncode == 2
        assert "nothing could be compared; to start anew from tonight: cp " in other.stderr


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("nightly.sh", ()), ("scaling.sh", ()), ("scaling_study.sh", ("out",)), ("sweep_batch.sh", ()),
     ("sweep_precision.sh", ())],
)  # fmt: skip
def test_without_a_virtual_environment(tmp_path, script, arguments):
    done = subprocess.run(
        [ROOT / "scripts" / script, *arguments],
        env=os.environ | {"TFBENCH_VENV": "/none"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith("error: no /none/bin/python: run ./scripts/quickstart.sh first")
    assert not list(tmp_path.iterdir())


class TestScaling:
    def test_both_modes_and_again(self, scripts):
        out = scripts.folder / "out"
        flags = ("--gpus=0", "--cpu_replicas=2", "--model=resnet_tiny", "--precision=fp32")
        done = scripts.run("scaling.sh", *flags, f"--results_dir={out}")
        assert done.returncode == 0, done.stdout + done.stderr
        shown = [(row.num_replicas, row.per_replica_batch_size) for row in records.read(out / "runs.csv")]
        assert shown == [(1, 256), (2, 256), (1, 256), (1, 256), (2, 128), (1, 256)]

    def test_refused_once(self, scripts):
        done = scripts.run("scaling.sh", "--gpus=0", f"--results_dir={scripts.folder / 'out'}")
        assert done.returncode == 2
        assert done.stdout.count("error") == 1


@pytest.mark.slow
class TestScalingStudy:
    FLAGS = ("--gpus=1,8", "--per_replica_batch_size=256", "--precisions=mixed_float16")

    def study(self, scripts, seconds, **variables):
        return scripts.run("scaling_study.sh", scripts.folder / "out", seconds, *self.FLAGS, **variables)

    def rows(self, scripts, model):
        return records.read(scripts.folder / "out" / model / "runs.csv")

    def test_goes_on_where_its_time_was_over(self, scripts):
        scripts.sweeper.gpus = 8
        first = self.study(scripts, "100", FAKE_S="12")  # 30 s without the grace: less than three runs
        assert first.returncode == 124, first.stdout + first.stderr
        assert "scaling, resnet50: 8 of 8 runs missing, about 11 min at 80 s each" in first.stdout
        assert "scaling, bert_large: 8 of 8 runs missing, about 16 min at 115 s each" in first.stdout
        assert first.stdout.rstrip().endswith("the same command goes on with what is missing.")
        cut = self.rows(scripts, "resnet50")
        assert 0 < len(cut) < 4
        assert (scripts.folder / "out" / "resnet50" / "scaling.png").exists()
        whole = self.study(scripts, "3600")
        assert whole.returncode == 0, whole.stdout + whole.stderr
        for model in ("resnet50", "bert_large"):
            good = [row for row in self.rows(scripts, model) if row.status == "ok"]
            assert len({row.run_key for row in good}) == len(good) == 8
        assert [(row.num_gpus, row.per_replica_batch_size) for row in good] == [
            (1, 256), (8, 256), (8, 256), (1, 256), (8, 32), (8, 32), (8, 256), (8, 32),
        ]  # fmt: skip
        assert whole.stdout.count("micro -m tfbench.micro --only=all_reduce") == 1
        again = self.study(scripts, "3600")
        assert again.returncode == 0
        assert "bert_large: 0 of 8 runs missing" in again.stdout
        assert "micro" not in again.stdout
        assert sum(len(self.rows(scripts, model)) for model in ("resnet50", "bert_large")) == 16 + len(
            [row for row in cut if row.status != "ok"]
        )

    def test_no_time_begins_nothing(self, scripts):
        done = self.study(scripts, "60")
        assert done.returncode == 124
        assert not (scripts.folder / "out").exists()

    @pytest.mark.parametrize("arguments", [(), ("--help",), ("out", "ten")])
    def test_usage(self, scripts, arguments):
        done = scripts.run("scaling_study.sh", *arguments)
        assert (done.returncode, done.stderr.split()[0]) == (2, "usage:")

    def test_a_refused_flag_ends_it(self, scripts):
        done = scripts.run("scaling_study.sh", scripts.folder / "out", "3600", "--modes=week")
        assert done.returncode == 2
        assert done.stdout.count("--modes=week: some of weak,strong") == 1
