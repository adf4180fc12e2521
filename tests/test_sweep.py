"""`python -m tfbench.sweep` as its users run it, mostly with a stand-in for the process that trains."""

import os
import random
import re
import signal
import subprocess
import time

import pytest
from run_helpers import DEADLINE_S, environment, environment_without_tensorflow, python
from sweep_helpers import BASE, Sweeper

from tfbench import records

needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="runs side by side need a core each"
)


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
        assert "points: 8, runs: 8; 8 runs to make, 0 of 8 already in out/runs.csv" in shown
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


@needs_two_cores
class TestSideBySide:
    def test_on_the_cpu_with_cores_of_their_own(self, sweeper):
        # Each run waits for another: one after the other they would never end.
        flags = ("--sweep=seed=1,2,3", "--parallel=2", "--hang_timeout_s=60")
        done = sweeper.run(*flags, s1="meet", s2="meet", s3="oom")
        assert sorted(sweeper.ends()) == [(1, "ok"), (2, "ok"), (3, "oom")], done.stdout
        assert done.returncode == 1
        assert {row.parallel_runs for row in sweeper.rows()} == {2}
        one, other = (set(place["cores"]) for place in sweeper.places())
        assert one.isdisjoint(other)
        assert one | other == os.sched_getaffinity(0)
        assert {row.cpu_cores for row in sweeper.rows()} == {len(one), len(other)}

    def test_on_gpus_of_their_own_and_those_of_several_gpus_alone(self, tmp_path):
        sweeper = Sweeper(tmp_path, gpus=2)
        done = sweeper.run(
            "--sweep=seed=1,2 gpus=1,2", "--parallel=auto", "--hang_timeout_s=60", s1="meet", s2="meet"
        )
        assert done.returncode == 0, done.stdout
        shown = [(row.num_gpus, row.parallel_runs) for row in sweeper.rows()]
        assert shown == [(1, 2), (1, 2), (2, 1), (2, 1)]
        assert sorted(place["gpu"] for place in sweeper.places()) == ["", "", "GPU-0", "GPU-1"]

    def test_one_that_dies_leaves_the_other_alone(self, sweeper):
        sweeper.run("--sweep=seed=1,2,3,4", "--parallel=2", "--hang_timeout_s=5", s1="hang", s2="kill")
        assert sorted(sweeper.ends()) == [(1, "hang"), (2, "failed"), (3, "ok"), (4, "ok")]
        assert {row.parallel_runs for row in sweeper.rows()} == {2}  # also the rows of the dead
        sweeper.assert_nobody_is_left()

    def test_ctrl_c_ends_all_gently(self, sweeper):
        flags = ("--sweep=seed=1,2,3", "--parallel=2")
        parent = sweeper.start(*flags, behaviours={"1": "gentle", "2": "gentle"})
        sweeper.wait_for("*/asleep", 2)
        parent.send_signal(signal.SIGINT)
        parent.communicate(timeout=DEADLINE_S)
        assert parent.returncode == 2
        assert sorted(sweeper.ends()) == [(1, "interrupted"), (2, "interrupted")]
        sweeper.assert_nobody_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=needs_two_cores)])
def test_killed_at_random_moments_it_ends_with_every_row_once(sweeper, parallel):
    sweep = ("--sweep=seed=0,1,2,3,4,5 precision=fp32,mixed_bfloat16", f"--parallel={parallel}")
    random_s = random.Random(12).uniform
    for kill in range(12):
        parent = sweeper.start(*sweep, seconds=0.8 * parallel)
        if kill % 3:  # while runs begin, write their rows and end
            assert any(" runs to make" in line for line in parent.stdout)
            time.sleep(random_s(0, 1.6))
        else:  # while the sweep itself begins
            time.sleep(random_s(0, 0.8))
        assert parent.poll() is None
        parent.kill()
        parent.communicate(timeout=DEADLINE_S)
        sweeper.assert_nobody_is_left()
    done = sweeper.run(*sweep)
    assert done.returncode == 0, done.stdout
    rows = sweeper.rows()
    assert [row.status for row in rows] == ["ok"] * 12
    assert len({row.run_key for row in rows}) == 12
    lines = (sweeper.results / "runs.csv").read_bytes().split(b"\n")
    assert len(lines) == 12 + 2  # the header, and nothing after the last line break
    assert lines[-1] == b""
    sweeper.assert_nobody_is_left()


class TestFindMaxBatch:
    FLAGS = ("--find_max_batch", "--max_batch=100", "--per_replica_batch_size=8")
    TRIES = ((8, "ok"), (16, "ok"), (32, "ok"), (64, "oom"), (48, "oom"), (40, "ok"))

    def tries(self, sweeper):
        return tuple((row.per_replica_batch_size, row.status) for row in sweeper.rows())

    def test_found_with_the_rows_of_all_tries(self, tmp_path):
        sweeper = Sweeper(tmp_path, largest=47)
        done = sweeper.run(*self.FLAGS)
        assert done.returncode == 0, done.stdout
        assert self.tries(sweeper) == self.TRIES
        assert {row.requested_per_replica_batch_size for row in sweeper.rows()} == {8}
        assert {row.tag for row in sweeper.rows()} == {"find_max_batch"}
        assert re.search(r"40 +│ +100.0 ", done.stdout)
        assert re.search(r"largest batch *\n.*\n│model=resnet_tiny │ 40 ", done.stdout)

    def test_every_point_of_a_matrix_and_no_more_than_allowed(self, sweeper):
        flags = ("--find_max_batch", "--max_batch=12", "--sweep=seed=1,2", "--per_replica_batch_size=8")
        done = sweeper.run(*flags, s2="crash")
        assert done.returncode == 1
        assert [(seed, status) for seed, status in sweeper.ends()] == [(1, "ok"), (1, "ok"), (2, "failed")]
        assert re.search("seed=1 │ 12 │ not more than --max_batch=12 was tried", done.stdout)
        assert re.search("seed=2 │ +│ batch 8 ended as failed: ", done.stdout)

    def test_none_trains(self, tmp_path):
        sweeper = Sweeper(tmp_path, largest=3)
        assert (
            sweeper.run("--find_max_batch", "--max_batch=16", "--per_replica_batch_size=16").returncode == 2
        )
        assert self.tries(sweeper) == ((16, "oom"), (8, "oom"))

    @pytest.mark.slow
    def test_killed_at_random_moments_it_goes_on(self, tmp_path):
        sweeper = Sweeper(tmp_path, largest=47)
        for seconds in (0.7, 1.3, 1.9, 2.5):
            parent = sweeper.start(*self.FLAGS, seconds=0.5)
            time.sleep(seconds)
            parent.kill()
            parent.communicate(timeout=DEADLINE_S)
            sweeper.assert_nobody_is_left()
        assert sweeper.run(*self.FLAGS).returncode == 0
        assert self.tries(sweeper) == self.TRIES

    def test_ctrl_c(self, sweeper):
        parent = sweeper.start(*self.FLAGS, "--seed=7", behaviours={"7": "gentle"})
        sweeper.wait_for("*/asleep")
        parent.send_signal(signal.SIGINT)
        shown, _ = parent.communicate(timeout=DEADLINE_S)
        assert parent.returncode == 2
        assert "stopped by the user" in shown
        assert self.tries(sweeper) == ((8, "interrupted"),)
        sweeper.assert_nobody_is_left()


class TestScaling:
    def test_weak(self, tmp_path):
        sweeper = Sweeper(tmp_path, gpus=4)
        flags = ("--scaling=weak", "--gpus=auto")
        done = sweeper.run(*flags)
        assert done.returncode == 0, done.stdout
        assert [row.num_gpus for row in sweeper.rows()] == [1, 2, 1, 4, 1]
        # The stand-in trains at 100 samples/s whatever it has.
        assert re.search(r"│replicas=4 │ +100.0 │ +25.0 │ +25.0 % │", done.stdout)
        again = sweeper.run(*flags)
        assert "0 runs to make, 5 of 5 already" in again.stdout
        assert re.search(r"│replicas=2 │ +100.0 │ +50.0 │ +50.0 % │", again.stdout)

    def test_strong_on_the_cpu_for_every_point_of_a_matrix(self, sweeper):
        flags = ("--scaling=strong", "--cpu_replicas=2", "--sweep=seed=1,2", "--per_replica_batch_size=8")
        done = sweeper.run(*flags)
        assert done.returncode == 0, done.stdout
        shown = [(row.num_replicas, row.per_replica_batch_size) for row in sweeper.rows()]
        assert shown == [(1, 8), (2, 4), (1, 8)] * 2
        assert [seed for seed, _ in sweeper.ends()] == [1, 1, 1, 2, 2, 2]
        assert "seed=2 replicas=2" in done.stdout

    def test_a_failed_baseline_leaves_the_efficiency_empty(self, tmp_path):
        sweeper = Sweeper(tmp_path, gpus=2, largest=16)
        flags = ("--scaling=strong", "--gpus=2", "--per_replica_batch_size=32")
        done = sweeper.run(*flags)
        assert done.returncode == 1
        assert [row.status for row in sweeper.rows()] == ["oom", "ok", "oom"]
        assert re.search(r"│replicas=2 │ +100.0 │ +50.0 │ +│", done.stdout)


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
            (["--sweep=seed=1", "--parallel=0"], "--parallel=0: auto (a run on each GPU) or a whole number"),
            (["--scaling=weak", "--cpu_replicas=2", "--parallel=2"], "--parallel=2: runs of --scaling come"),
            (["--sweep=seed=1", "--max_batch=8"], "--max_batch=8: goes with --find_max_batch only"),
            (["--find_max_batch"], "--max_batch=: is needed with --gpus=0"),
            (["--find_max_batch", "--max_batch=1"], "--max_batch=1: at least --per_replica_batch_size="),
            (["--find_max_batch", "--sweep=per_replica_batch_size=1,2"], "chooses the values of per_replica"),
            (["--find_max_batch", "--max_batch=64", "--repeats=2"], "--repeats=2: goes without --find_max"),
            (["--find_max_batch", "--scaling=weak"], "--scaling=weak: goes without --find_max_batch"),
            (["--scaling=weak"], "--cpu_replicas=1: --scaling needs at least 2 replicas"),
            (["--scaling=weak", "--sweep=gpus=1,2"], "--sweep=gpus: --scaling chooses the values of gpus"),
            (
                ["--scaling=strong", "--cpu_replicas=4", "--per_replica_batch_size=6", "--sweep=seed=1,2"],
                "point seed=1 replicas=4: --per_replica_batch_size=6: for strong scaling a multiple of 4",
            ),
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
        for flag in (
            "sweep",
            "sweep_file",
            "repeats",
            "retry",
            "point_timeout_s",
            "hang_timeout_s",
            "gpus",
            "parallel",
            "scaling",
        ):
            assert f"--{flag}:" in done.stdout
        assert "Traceback" not in done.stderr


SMALL = ("--image_size=8", "--steps=4", "--windows=2", "--warmup_steps=1", "--notensorboard")


@pytest.mark.slow
def test_real_runs(tmp_path):
    parallel = min(2, len(os.sched_getaffinity(0)))
    (tmp_path / "sweep.yaml").write_text("per_replica_batch_size: [2, 4]\n")
    command = ("-m", "tfbench.sweep", *BASE, *SMALL, "--sweep_file=sweep.yaml", f"--parallel={parallel}")
    done = python(*command, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stdout
    rows = records.read(tmp_path / "out" / "runs.csv")
    assert sorted((row.status, row.per_replica_batch_size) for row in rows) == [("ok", 2), ("ok", 4)]
    assert all(os.path.isdir(tmp_path / "out" / row.run_id) for row in rows)
    assert [row.parallel_runs for row in rows] == [parallel] * 2
    assert all(row.cpu_cores <= len(os.sched_getaffinity(0)) / parallel + 1 for row in rows)
    again = python(*command, cwd=tmp_path, env=environment())
    assert again.returncode == 0
    assert "0 runs to make, 2 of 2 already" in again.stdout
    assert len(records.read(tmp_path / "out" / "runs.csv")) == 2


@pytest.mark.slow
def test_real_strong_scaling(tmp_path):
    flags = ("--scaling=strong", "--cpu_replicas=2", "--per_replica_batch_size=4")
    done = python("-m", "tfbench.sweep", *BASE, *SMALL, *flags, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stdout
    single, both, again = records.read(tmp_path / "out" / "runs.csv")
    assert [row.num_replicas for row in (single, both, again)] == [1, 2, 1]
    assert {row.global_batch_size for row in (single, both, again)} == {4}
    assert {row.scaling_mode for row in (single, both, again)} == {"strong"}
    assert both.exposed_communication_ms is not None
    rate = (single.samples_per_sec + again.samples_per_sec) / 2
    assert f"{100 * both.samples_per_sec / 2 / rate:.1f} %" in done.stdout
