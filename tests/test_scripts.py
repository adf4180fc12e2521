"""The shell scripts that string sweeps and the report together, with a stand-in for the run itself."""

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
exec {python} "$@"
"""


class Scripts:
    """Scripts over a sweeper's stand-ins."""

    def __init__(self, folder):
        (folder / "sweeper").mkdir()
        self.sweeper, self.folder = Sweeper(folder / "sweeper"), folder
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

    def test_another_configuration_is_not_passed_over(self, scripts):
        assert self.night(scripts).returncode == 0
        other = scripts.run("nightly.sh", *self.FLAGS, "--seed=5")
        assert other.returncode == 2
        assert "nothing could be compared; to start anew from tonight: cp " in other.stderr


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
