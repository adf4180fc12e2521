"""`python -m tfbench.sweep` as its users run it, mostly with a stand-in for the process that trains."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from run_helpers import DEADLINE_S, environment, environment_without_tensorflow, python

from tfbench import records

# Stands for tfbench.train: does what FAKE says for its --seed, or trains well; rows and folders as its own.
FAKE = """
import datetime, json, os, signal, subprocess, sys, time
from pathlib import Path
from absl import flags
import tfbench.flags
from tfbench import records
from tfbench.defaults import complete
from tfbench.hardware.gpus import this_machine

flags.FLAGS(sys.argv)
config, _ = complete(tfbench.flags.choices_from_flags(), this_machine())
now = datetime.datetime.now(datetime.UTC)
run_id = f"{now:%Y%m%d-%H%M%S}-{config.model}-{config.run_key[:6]}-{os.getpid()}"
folder = Path(config.results_dir) / run_id
folder.mkdir(parents=True)

def row(status, rate=None):
    told = dict(status=status, samples_per_sec=rate, flags=f"--seed={config.seed}")
    same = dict(run_id=run_id, run_key=config.run_key, started_at=now.isoformat())
    records.append(Path(config.results_dir) / "runs.csv", records.RunRecord(**told | same))

def sleep_for_ever(line=""):
    (folder / "asleep").touch()
    while True:
        time.sleep(0.1)
        if line:
            print(line, flush=True)

def interrupted(number, frame):
    row("interrupted")
    sys.exit(130)

print("training", flush=True)
behaviour = json.loads(os.environ["FAKE"]).get(str(config.seed), "ok")
if behaviour == "ok":
    time.sleep(float(os.environ.get("FAKE_S", 0)) / 2)
    row("ok", 100.0)
    time.sleep(float(os.environ.get("FAKE_S", 0)) / 2)
elif behaviour == "oom":
    row("oom")
    sys.exit(1)
elif behaviour == "crash":
    sys.exit("boom")
elif behaviour == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "cudnn":
    (folder / "train.log").write_text("E could not create: CUDNN_STATUS_ALLOC_FAILED\\n")
    os.abort()
elif behaviour == "helper":
    subprocess.Popen(["sleep", "600"])
    row("ok", 50.0)
elif behaviour == "hang":
    sleep_for_ever()
elif behaviour == "babble":
    sleep_for_ever("still there")
elif behaviour == "gentle":
    signal.signal(signal.SIGTERM, interrupted)
    sleep_for_ever()
elif behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever()
"""
# The real command, but for the program that it starts.
DRIVER = """
import sys
from tfbench.sweeping import loop
loop.TRAINER = (sys.executable, {fake!r})
from tfbench import sweep
sweep.main()
"""
BASE = ("--model=resnet_tiny", "--gpus=0", "--results_dir=out")


class Sweeper:
    """Sweeps in a folder, with stand-ins that behave as they are told."""

    def __init__(self, folder):
        self.folder, self.results = folder, folder / "out"
        (folder / "fake.py").write_text(FAKE)
        (folder / "driver.py").write_text(DRIVER.format(fake=str(folder / "fake.py")))

    def environment(self, behaviours, seconds=0.0):
        told = {"FAKE": json.dumps(behaviours), "FAKE_S": f"{seconds}", "FAKE_FOLDER": str(self.folder)}
        return environment(**told)

    def run(self, *flags, **behaviours):
        told = {seed.removeprefix("s"): behaviour for seed, behaviour in behaviours.items()}
        return python("driver.py", *BASE, *flags, cwd=self.folder, env=self.environment(told))

    def start(self, *flags, behaviours=None, seconds=0.0):
        return subprocess.Popen(
            [sys.executable, "driver.py", *BASE, *flags],
            cwd=self.folder,
            env=self.environment(behaviours or {}, seconds),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A job in the background of a script ignores Ctrl-C, and so would this one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def rows(self):
        return records.read(self.results / "runs.csv")

    def ends(self):
        """(seed, status) of every row."""
        return [(seed_of(row), row.status) for row in self.rows()]

    def wait_for(self, pattern):
        """Until a child has come so far."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not list(self.results.glob(pattern)):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def alive(self):
        """Processes of this folder's sweeps; zombies, which only wait to be counted, are dead."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process):
        try:
            ours = process.environ().get("FAKE_FOLDER") == str(self.folder)
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def assert_nobody_is_left(self):
        deadline_s = time.monotonic() + 5  # a killed process takes a moment
        while self.alive() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not self.alive()


def seed_of(row):
    """The seed among a row's flags."""
    (seed,) = (flag for flag in shlex.split(row.flags) if flag.startswith("--seed="))
    return int(seed.removeprefix("--seed="))


@pytest.fixture
def sweeper(tmp_path):
    return Sweeper(tmp_path)


class TestEveryEnd:
    """One sweep over every way to end."""

    ENDS = ("ok", "oom", "crash", "kill", "cudnn", "helper", "hang", "ok")

    @pytest.fixture(scope="class")
    def swept(self, tmp_path_factory):
        sweeper = Sweeper(tmp_path_factory.mktemp("ends"))
        behaviours = {f"s{seed}": end for seed, end in enumerate(self.ENDS)}
        seeds = ",".join(str(seed) for seed in range(len(self.ENDS)))
        return sweeper, sweeper.run(f"--sweep=seed={seeds}", "--hang_timeout_s=5", **behaviours)

    def test_every_end_has_its_status_once_and_the_sweep_goes_on(self, swept):
        statuses = ["ok", "oom", "failed", "failed", "oom", "ok", "hang", "ok"]
        assert swept[0].ends() == list(enumerate(statuses)), swept[1].stdout

    def test_some_ok_is_exit_code_1(self, swept):
        assert swept[1].returncode == 1

    def test_rows_of_the_dead_say_why_and_what(self, swept):
        rows = swept[0].rows()
        assert "exit code 1; last line: boom" in rows[2].note
        assert "SIGKILL" in rows[3].note
        assert "CUDNN_STATUS_ALLOC_FAILED" in rows[4].note
        assert "--hang_timeout_s=5" in rows[6].note
        assert {rows[seed].model for seed in (2, 3, 4, 6)} == {"resnet_tiny"}
        assert len({row.run_key for row in rows}) == len(rows)

    def test_stacks_of_the_hung(self, swept):
        stacks = swept[0].rows()[6].note.partition("stacks: ")[2]
        assert "sleep_for_ever" in (swept[0].folder / stacks).read_text()

    def test_nobody_is_left(self, swept):
        swept[0].assert_nobody_is_left()

    def test_output_is_kept(self, swept):
        logs = [path.read_text() for path in (swept[0].results / "sweep_logs").iterdir()]
        assert len(logs) == len(self.ENDS)
        assert all("training" in log for log in logs)

    def test_progress(self, swept):
        shown = swept[1].stdout
        assert "points: 8, runs of each: 1; 8 runs to make, 0 of 8 already in out/runs.csv" in shown
        assert "0/8 done  now seed=0\n" in shown
        assert "7/8 done  now seed=7  ETA 0:00:" in shown
        assert "last: hang" in shown
        assert "seed=0:  ok  100.0 samples/s" in shown


def test_started_again_it_runs_what_failed(sweeper):
    assert sweeper.run("--sweep=seed=1,2,3", s2="crash", s3="oom").returncode == 1
    assert sweeper.ends() == [(1, "ok"), (2, "failed"), (3, "oom")]
    assert sweeper.run("--sweep=seed=1,2,3", "--retry=oom").returncode == 1
    assert sweeper.ends()[3:] == [(3, "ok")]
    done = sweeper.run("--sweep=seed=1,2,3")
    assert done.returncode == 0
    assert sweeper.ends()[4:] == [(2, "ok")]
    assert "1 runs to make, 2 of 3 already in" in done.stdout


def test_repeats_come_one_after_the_other(sweeper):
    assert sweeper.run("--sweep=seed=1,2", "--repeats=2").returncode == 0
    assert [seed for seed, _ in sweeper.ends()] == [1, 2, 1, 2]


def test_none_ok_is_exit_code_2(sweeper):
    assert sweeper.run("--sweep=seed=1,2", s1="crash", s2="crash").returncode == 2


def test_deadline_of_a_point(sweeper):
    assert sweeper.run("--sweep=seed=1", "--point_timeout_s=2", s1="babble").returncode == 2
    assert sweeper.ends() == [(1, "hang")]
    assert "--point_timeout_s=2" in sweeper.rows()[0].note
    sweeper.assert_nobody_is_left()


class TestCtrlC:
    def test_once_ends_the_run_gently_and_the_sweep(self, sweeper):
        parent = sweeper.start("--sweep=seed=1,2,3", behaviours={"2": "gentle"})
        sweeper.wait_for("*/asleep")
        parent.send_signal(signal.SIGINT)
        shown, _ = parent.communicate(timeout=DEADLINE_S)
        assert parent.returncode == 1
        assert sweeper.ends() == [(1, "ok"), (2, "interrupted")]
        assert "the same command runs what is missing" in shown
        assert "Traceback" not in shown
        assert sweeper.run("--sweep=seed=1,2,3", "--retry=none").returncode == 0
        assert sweeper.ends()[2:] == [(2, "ok"), (3, "ok")]

    def test_twice_ends_it_at_once(self, sweeper):
        parent = sweeper.start("--sweep=seed=1,2", behaviours={"1": "stubborn"})
        sweeper.wait_for("*/asleep")
        parent.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # one request waits for the run to end
            parent.wait(1)
        parent.send_signal(signal.SIGINT)
        parent.communicate(timeout=DEADLINE_S)
        assert parent.returncode == 2
        assert sweeper.ends() == [(1, "interrupted")]
        sweeper.assert_nobody_is_left()


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_every_row_once(sweeper):
    sweep = "--sweep=seed=0,1,2,3,4,5 precision=fp32,mixed_bfloat16"
    random_s = random.Random(12).uniform
    for kill in range(12):
        parent = sweeper.start(sweep, seconds=0.8)
        if kill % 3:  # while runs begin, write their rows and end
            assert any(" runs to make" in line for line in parent.stdout)
            time.sleep(random_s(0, 1.6))
        else:  # while the sweep itself begins
            time.sleep(random_s(0, 0.8))
        assert parent.poll() is None
        parent.kill()
        parent.communicate(timeout=DEADLINE_S)
        sweeper.assert_nobody_is_left()
    done = sweeper.run(sweep)
    assert done.returncode == 0, done.stdout
    rows = sweeper.rows()
    assert [row.status for row in rows] == ["ok"] * 12
    assert len({row.run_key for row in rows}) == 12
    lines = (sweeper.results / "runs.csv").read_bytes().split(b"\n")
    assert len(lines) == 12 + 2  # the header, and nothing after the last line break
    assert lines[-1] == b""
    sweeper.assert_nobody_is_left()


class TestRefused:
    """At once, with the reason, and nothing is run or written."""

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            ([], "give one of --sweep"),
            (["--sweep=seed=1", "--sweep_file=x.yaml"], "give one of --sweep"),
            (["--sweep=steps=1,x"], "flag --steps=x: "),
            (["--sweep=steps=4,0"], "point steps=0: --steps=0: "),
            (["--sweep=precision=fp32,tf32"], "point precision=tf32: --precision=tf32: a GPU only has TF32"),
            (["--sweep=seed=1", "--retry=never"], "--retry"),
            (["--sweep=seed=1", "--hang_timeout_s=-1"], "--hang_timeout_s"),
            (["seed=1"], "'seed=1' is not a flag"),
        ],
    )
    def test_refused(self, tmp_path, flags, named):
        env = environment_without_tensorflow(tmp_path / "blocker")
        done = python("-m", "tfbench.sweep", *BASE, *flags, cwd=tmp_path, env=env)
        assert done.returncode == 2, done.stdout + done.stderr
        assert named in done.stdout
        assert "Traceback" not in done.stdout + done.stderr
        assert not (tmp_path / "out").exists()

    def test_results_of_another_schema(self, sweeper):
        sweeper.results.mkdir()
        (sweeper.results / "runs.csv").write_text("a,b\n1,2\n")
        done = sweeper.run("--sweep=seed=1")
        assert done.returncode == 2
        assert "schema version" in done.stdout
        assert not list((sweeper.results / "sweep_logs").iterdir())

    def test_help(self, tmp_path):
        env = environment_without_tensorflow(tmp_path / "blocker")
        done = python("-m", "tfbench.sweep", "--help", cwd=tmp_path, env=env)
        for flag in ("sweep", "sweep_file", "repeats", "retry", "point_timeout_s", "hang_timeout_s", "gpus"):
            assert f"--{flag}:" in done.stdout
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_real_runs(tmp_path):
    (tmp_path / "sweep.yaml").write_text("per_replica_batch_size: [2, 4]\n")
    small = ("--image_size=8", "--steps=4", "--windows=2", "--warmup_steps=1", "--notensorboard")
    command = ("-m", "tfbench.sweep", *BASE, *small, "--sweep_file=sweep.yaml")
    done = python(*command, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stdout
    rows = records.read(tmp_path / "out" / "runs.csv")
    assert [(row.status, row.per_replica_batch_size) for row in rows] == [("ok", 2), ("ok", 4)]
    assert all(os.path.isdir(tmp_path / "out" / row.run_id) for row in rows)
    again = python(*command, cwd=tmp_path, env=environment())
    assert again.returncode == 0
    assert "0 runs to make, 2 of 2 already" in again.stdout
    assert len(records.read(tmp_path / "out" / "runs.csv")) == 2
