"""The parts of a sweep that need no process: points, what is missing, limits, rows of the dead, progress."""

import datetime
import errno
import functools
import io
import os
import re
import signal
import time
from unittest import mock

import pytest
from absl import flags
from rich.console import Console
from run_helpers import gpu, machine

from tfbench import records
from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.display import Display
from tfbench.hardware import environment
from tfbench.records import RunRecord
from tfbench.sweeping import batch_search, child, loop, matrix, plan, postmortem, progress
from tfbench.sweeping.child import Ended, Launch, Limits, Watchdog
from tfbench.sweeping.matrix import Point
from tfbench.sweeping.stopping import StopRequests

BASE = {"model": "resnet_tiny", "gpus": 0}


def points_of(text, *gpus, base=None):
    return matrix.complete_points(base or BASE, matrix.parse_text(text), machine(*gpus))[0]


class TestMatrix:
    def test_order_is_the_users_and_the_last_flag_changes_fastest(self):
        points = points_of("seed=3,1 precision=fp32,mixed_bfloat16")
        assert [(point.config.seed, point.config.precision) for point in points] == [
            (3, "fp32"),
            (3, "mixed_bfloat16"),
            (1, "fp32"),
            (1, "mixed_bfloat16"),
        ]
        assert points[1].name == "seed=3 precision=mixed_bfloat16"

    def test_values_have_their_flags_types(self):
        (config,) = (point.config for point in points_of("xla=false learning_rate=1e-2 'tag=a b' gpus=0"))
        assert (config.xla, config.learning_rate, config.tag, config.gpus) == (False, 0.01, "a b", 0)

    def test_swept_flags_win_over_the_base(self):
        assert [p.config.seed for p in points_of("seed=1,2", base=BASE | {"seed": 9, "steps": 4})] == [1, 2]

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("", "names no flag"),
            ("precisoin=fp32", "'precisoin' cannot be swept; one of accumulate, "),
            ("results_dir=a,b", "'results_dir' cannot be swept"),
            ("repeats=1,2", "'repeats' cannot be swept"),
            ("gpus", "'gpus' is not of the form flag=value,value"),
            ("gpus=", "gpus has an empty value"),
            ("gpus=1,,2", "gpus has an empty value"),
            ("gpus=1,2,1", "gpus has the value 1 twice"),
            ("learning_rate=0.1,0.10", "learning_rate has the value 0.10 twice"),
            ("gpus=1 gpus=2", "gpus is there twice"),
            ("tag='a", "No closing quotation"),
        ],
    )
    def test_refused_text(self, text, named):
        with pytest.raises(ConfigError) as refused:
            matrix.parse_text(text)
        assert f"{refused.value}".startswith(f"--sweep={text}: ")
        assert named in f"{refused.value}"
        assert "\n" not in f"{refused.value}"

    @pytest.mark.parametrize(
        ("text", "named"), [("steps=4,x", "--steps=x"), ("precision=fp8", "fp32"), ("xla=maybe", "xla=maybe")]
    )
    def test_a_value_that_its_flag_refuses(self, text, named):
        with pytest.raises(flags.IllegalFlagValueError, match=re.escape(named)):
            matrix.parse_text(text)

    def test_every_impossible_point_is_named(self):
        with pytest.raises(matrix.ImpossiblePointsError) as refused:
            points_of("precision=fp32,tf32 gpus=0,1,2", gpu())
        lines = f"{refused.value}".splitlines()
        assert [line.partition(": ")[0] for line in lines] == [
            "point precision=fp32 gpus=2",
            "point precision=tf32 gpus=0",
            "point precision=tf32 gpus=2",
        ]
        assert "only 1 visible" in lines[0]
        assert lines[2].partition(": ")[2] == "as point precision=fp32 gpus=2"

    @pytest.mark.parametrize("text", ["tag=a,b", "gpus=auto,1"])
    def test_points_that_are_one_run(self, text):
        with pytest.raises(matrix.ImpossiblePointsError, match="measures the same as point"):
            points_of(text, gpu())

    def test_a_sentence_is_said_once(self):
        asked = matrix.parse_text("seed=1,2,3")
        sentences = matrix.complete_points(BASE, asked, machine())[1]
        assert len(sentences) == len(set(sentences)) == 1


class TestFile:
    def parse(self, tmp_path, text):
        path = tmp_path / "sweep.yaml"
        path.write_text(text)
        return matrix.parse_file(str(path))

    def test_values_as_they_are_spelled(self, tmp_path):
        text = "# note\nprecision: [tf32, fp32]\nlearning_rate:\n- 1e-3\n- 0.10\ntag: [no, 'a,b']\n"
        assert self.parse(tmp_path, text) == {
            "precision": ["tf32", "fp32"],
            "learning_rate": ["1e-3", "0.10"],
            "tag": ["no", "a,b"],
        }

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("", "a mapping of flags"),
            ("- gpus", "a mapping of flags"),
            ("seed: [1]\ngpus: 1", "line 2: a flag and a list"),
            ("gpus: [[1, 2]]", "line 1: a flag and a list"),
            ("gpus: []", "gpus has an empty value"),
            ("gpus: [1, null]", "gpus has an empty value"),
            ("gpus: [1]\ngpus: [2]", "gpus is there twice"),
            ("gpus: [1", "expected ',' or ']'"),
            ("gpuz: [1]", "'gpuz' cannot be swept"),
        ],
    )
    def test_refused(self, tmp_path, text, named):
        with pytest.raises(ConfigError, match=re.escape(named)) as refused:
            self.parse(tmp_path, text)
        assert "\n" not in f"{refused.value}"

    def test_no_such_file(self, tmp_path):
        with pytest.raises(ConfigError, match="No such file"):
            matrix.parse_file(str(tmp_path / "none.yaml"))


def rows_of(point, *statuses):
    return [RunRecord(run_key=point.config.run_key, status=status) for status in statuses]


class TestPlan:
    A, B = points_of("seed=1,2")

    def numbers(self, rows, retry="failed", repeats=2):
        return [
            (each.point.name[-1], each.number)
            for each in plan.missing(plan.rounds([self.A, self.B], repeats), rows, retry)
        ]

    def test_repeats_are_interleaved(self):
        assert self.numbers([]) == [("1", 1), ("2", 1), ("1", 2), ("2", 2)]

    def test_ok_rows_are_not_run_again(self):
        assert self.numbers(rows_of(self.A, "ok")) == [("2", 1), ("1", 2), ("2", 2)]
        assert self.numbers(rows_of(self.A, "ok", "ok", "ok") + rows_of(self.B, "ok", "ok")) == []

    def test_rows_of_other_configurations_do_not_count(self):
        assert len(self.numbers([RunRecord(run_key="another", status="ok")])) == 4

    @pytest.mark.parametrize(
        ("retry", "again"),
        [
            ("failed", {"oom", "host_oom", "hang", "failed", "no_update", "interrupted"}),
            ("oom", {"oom", "host_oom", "interrupted"}),
            ("none", {"interrupted"}),
        ],
    )
    def test_what_is_run_again(self, retry, again):
        ends = ("ok", "oom", "host_oom", "hang", "failed", "no_update", "interrupted")
        run = {end for end in ends if ("1", 1) in self.numbers(rows_of(self.A, end), retry, 1)}
        assert run == again

    @pytest.mark.parametrize("beside", [False, True])
    def test_a_row_of_a_run_beside_others_is_another_ones(self, beside):
        def left(runs):
            rows = [RunRecord(run_key=self.A.config.run_key, status="ok", parallel_runs=runs)]
            return len(plan.missing(plan.rounds([self.A], 1), rows, "none", lambda config: beside))

        assert [left(runs) for runs in (None, 1, 2, 8)] == ([1, 1, 0, 0] if beside else [0, 0, 1, 1])

    def test_an_ok_row_without_the_diagnosis_that_is_asked_for_does_not_stand(self):
        (asked,) = points_of("seed=1", base=BASE | {"diagnose": True})
        assert asked.config.run_key == self.A.config.run_key
        plain, diagnosed, failed = (
            RunRecord(run_key=asked.config.run_key, status=status, compute_ms=ms)
            for status, ms in (("ok", None), ("ok", 2.0), ("failed", None))
        )
        for rows, count in (([plain], 1), ([diagnosed], 0), ([failed], 0)):
            assert len(plan.missing(plan.rounds([asked], 1), rows, "none")) == count

    def test_what_is_left_of_a_sweep_runs_in_the_places_of_all_of_it(self):
        points = points_of("seed=1,2,3 gpus=1,2", gpu(), gpu(index=1, uuid="GPU-2"))
        work = loop.Sweep(
            points, plan.rounds(points, 1), machine(gpu(), gpu(index=1, uuid="GPU-2")), parallel=None
        )
        with mock.patch.object(os, "sched_getaffinity", return_value={0, 1}):
            ((left, spots),) = loop._batches(work.tries[:1], work)
            assert (len(left), [place.parallel_runs for place in spots]) == (1, [2, 2])
            assert [work.beside(point.config) for point in points] == [True, False] * 3

    @pytest.mark.parametrize(
        ("of_a", "of_b", "code"),
        [
            (("ok", "ok"), ("failed", "ok", "ok"), 0),
            (("ok", "ok", "ok"), ("ok",), 1),
            (("failed",), ("ok",), 1),
            (("failed", "oom"), (), 2),
        ],
    )
    def test_exit_code(self, of_a, of_b, code):
        rows = rows_of(self.A, *of_a) + rows_of(self.B, *of_b)
        tries = plan.rounds([self.A, self.B], 2)
        work = loop.Sweep([self.A, self.B], tries, machine())
        with mock.patch.object(loop.Sweep, "rows", return_value=rows):
            assert work.exit_code() == code


class TestWatchdog:
    def test_silence_counts_from_the_last_line(self):
        watchdog = Watchdog(Limits(hang_timeout_s=10), start_s=100)
        assert watchdog.complaint(109, 0) == ""
        assert watchdog.complaint(110, 5) == ""  # a line
        assert watchdog.complaint(120, 5) == ""
        assert "no line for 11 s (--hang_timeout_s=10)" in watchdog.complaint(121, 5)

    def test_deadline_counts_from_the_start(self):
        watchdog = Watchdog(Limits(point_timeout_s=10), start_s=100)
        assert watchdog.complaint(110, 1) == ""
        assert "--point_timeout_s=10" in watchdog.complaint(110.5, 2)

    def test_zero_is_no_limit(self):
        assert Watchdog(Limits(), start_s=0).complaint(1e9, 0) == ""


@pytest.mark.parametrize(
    ("text", "count"), [("nr_free 1\noom_kill 7\n", 7), ("nr_free 1\n", None), ("so it is\n", None)]
)
def test_kernels_counter(tmp_path, text, count):
    (tmp_path / "vmstat").write_text(text)
    assert child.kernel_oom_kills(tmp_path / "vmstat") == count


def test_kernel_without_counters(tmp_path):
    assert child.kernel_oom_kills(tmp_path / "vmstat") is None


@pytest.fixture
def launch(tmp_path):
    config = BenchmarkConfig(model="resnet_tiny", image_size=32, seed=5, results_dir=str(tmp_path))
    started = datetime.datetime(2030, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    return Launch(config, started, 77, tmp_path / "output.log")


class TestRowOfTheDead:
    def row(self, launch, output="", **ended):
        launch.output.write_text(output)
        return postmortem.row_of(Ended(launch, **ended))

    def test_says_what_is_known(self, launch):
        row = self.row(launch, exit_code=-signal.SIGSEGV)
        assert row.run_id == f"20300102-030405-resnet_tiny-{launch.config.run_key[:6]}-77"
        assert (row.run_key, row.model, row.image_size) == (launch.config.run_key, "resnet_tiny", 32)
        assert row.started_at == "2030-01-02T03:04:05.000+00:00"
        assert "--seed=5" in row.flags
        assert row.environment == environment.settings()
        assert row.samples_per_sec is None
        assert row.measured_steps is None

    def test_is_named_after_its_folder(self, launch, tmp_path):
        name = f"20300102-030409-resnet_tiny-{launch.config.run_key[:6]}-77"
        (tmp_path / f"20200102-030409-resnet_tiny-{launch.config.run_key[:6]}-77").mkdir()  # had this pid too
        (tmp_path / name).mkdir()
        assert self.row(launch, exit_code=1).run_id == name

    @pytest.mark.parametrize(
        ("ended", "output", "status", "note"),
        [
            ({"exit_code": -9, "oom_kills": 1}, "", "host_oom", "the kernel killed it"),
            ({"exit_code": -9, "oom_kills": None}, "", "host_oom", "most likely by the kernel"),
            ({"exit_code": -9, "oom_kills": 0}, "", "failed", "SIGKILL from outside"),
            ({"exit_code": -11}, "step 3", "failed", "ended by SIGSEGV; last line: step 3"),
            ({"exit_code": 3}, "a\nboom\n\n", "failed", "exit code 3; last line: boom"),
            ({"exit_code": 130}, "", "interrupted", "before the run began"),
            ({"exit_code": -6}, "x CUDNN_STATUS_ALLOC_FAILED\nFatal", "oom", "out of GPU memory"),
            ({"exit_code": -6}, "F RESOURCE_EXHAUSTED: by allocator cpu", "host_oom", "host memory"),
            ({"exit_code": 1}, "ran out of memory; this is not a failure", "failed", "exit code 1"),
            ({"exit_code": -9, "status": "hang", "reason": "no line"}, "out of memory", "hang", "no line"),
        ],
    )
    def test_status(self, launch, ended, output, status, note):
        row = self.row(launch, output, **ended)
        assert row.status == status
        assert note in row.note

    def test_train_log_is_read_too(self, launch, tmp_path):
        folder = tmp_path / f"20300102-030405-resnet_tiny-{launch.config.run_key[:6]}-77"
        folder.mkdir()
        (folder / "train.log").write_text("failed to create cublas handle\n")
        assert self.row(launch, "Aborted", exit_code=-6).status == "oom"


class TestProgress:
    POINTS = points_of("seed=1,2")

    def shown(self, *, terminal):
        file = io.StringIO()
        view = progress.SweepProgress(Display(Console(file=file, force_terminal=terminal, width=150)), 6, 2)
        with view:
            for seconds, row in (
                (90, RunRecord(status="ok", samples_per_sec=1234.56)),
                (30, RunRecord(status="oom", note="why")),
            ):
                view.start("seed=1")
                view.tick()
                view.finish("seed=1", row, seconds)
            view.start("seed=2")
        return file.getvalue()

    def test_plain_lines(self):
        # 3 left at 90 s; then 2 left at (90 + 30) / 2 s.
        assert self.shown(terminal=False).splitlines() == [
            "2/6 done  now seed=1",
            "seed=1:  ok  1,234.6 samples/s",
            "3/6 done  now seed=1  ETA 0:04:30  last: 1,234.6 samples/s",
            "seed=1:  oom  why",
            "4/6 done  now seed=2  ETA 0:02:00  last: oom",
        ]

    def test_bar_on_a_terminal(self):
        text = self.shown(terminal=True)
        assert "━" in text
        assert "4/6" in text
        assert "now seed" not in text

    def test_table(self):
        a, b = self.POINTS
        rows = [
            RunRecord(run_key=a.config.run_key, status="ok", samples_per_sec=rate)
            for rate in (10.0, 90.0, 30.0)
        ] + rows_of(a, "oom")
        rows += [RunRecord(run_key=a.config.run_key, status="ok", samples_per_sec=1.0, parallel_runs=2)]
        assert progress.table([a, b], rows, lambda config: False) == [
            ("seed=1", "30.0 samples/s", "3 ok, 1 oom"),
            ("seed=2", "", "not run"),
        ]


def sweep_of(config):
    point = Point("seed=0", config)
    return loop.Sweep([point], plan.rounds([point], 1), machine())


def test_two_sweeps_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "LOCK_WAIT_S", 0.0)
    config = BenchmarkConfig(model="resnet_tiny", image_size=32, results_dir=str(tmp_path))
    work = sweep_of(config)
    with loop.folder(tmp_path, StopRequests()), pytest.raises(ConfigError, match="another sweep is at work"):
        loop.sweep(work, Display(Console(file=io.StringIO())))


@pytest.mark.parametrize("search", [loop.sweep, functools.partial(batch_search.search, most=8)])
def test_ctrl_c_ends_the_wait_for_another_sweep(tmp_path, search, monkeypatch):
    def stop(_):
        os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C, which a job in the background ignores

    monkeypatch.setattr(loop, "LOCK_WAIT_S", 60.0)
    monkeypatch.setattr(time, "sleep", stop)
    work = sweep_of(BenchmarkConfig(model="resnet_tiny", image_size=32, results_dir=str(tmp_path)))
    display = Display(Console(file=io.StringIO()))
    with loop.folder(tmp_path, StopRequests()), pytest.raises(ConfigError, match="another sweep is at work"):
        search(work, display=display)


def test_a_disk_that_is_full_in_the_middle_of_a_sweep(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop, "TRAINER", ("false",))  # a run without a row: the sweep writes one
    monkeypatch.setattr(records, "append", full)
    config = BenchmarkConfig(model="resnet_tiny", image_size=32, results_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"^--results_dir={tmp_path}: .*No space left on device"):
        loop.sweep(sweep_of(config), Display(Console(file=io.StringIO())))
    with (
        pytest.raises(BlockingIOError),
        loop.folder(tmp_path, StopRequests()),
    ):  # of anything else nothing is guessed
        raise BlockingIOError(errno.EAGAIN, "no more processes")


def test_results_of_another_schema(tmp_path):
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    config = BenchmarkConfig(model="resnet_tiny", image_size=32, results_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="schema version"):
        loop.sweep(sweep_of(config), Display(Console(file=io.StringIO())))
    assert (tmp_path / "runs.csv").read_text() == "a,b\n1,2\n"
