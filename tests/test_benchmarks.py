"""The scripts that measure beside the product: what they say of data made for it."""

import csv
import importlib.util
import os
import re
import subprocess
import sys

import pytest
import tensorflow as tf
from run_helpers import DEADLINE_S, ROOT


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestKernelCheck:
    @pytest.fixture(scope="class")
    def check(self):
        return script("kernel_check")

    def repeated(self, check, changed):
        """Facts of three executions, the second of which has `changed` as its last tensor."""
        first = [tf.constant([3.0, -4.0], tf.float16), tf.constant([3.0, -4.0])]
        again = iter([[first[0], tf.constant(changed)], first])
        return check.repeated(lambda: next(again), first, 3)

    def test_equal_executions_have_no_difference(self, check):
        assert not self.repeated(check, [3.0, -4.0]).any()

    def test_a_difference_is_counted_where_it_is(self, check):
        facts = self.repeated(check, [3.0, -4.5])
        rms = (25 / 2) ** 0.5
        assert facts[1, 1] == pytest.approx([1, 0, 0.5 / rms])
        assert facts.sum() == pytest.approx(1 + 0.5 / rms)

    def test_the_sign_of_a_zero_is_a_bit(self, check):
        zeros = [tf.constant([0.0, 1.0])]
        facts = check.repeated(lambda: [tf.constant([-0.0, 1.0])], zeros, 2)
        assert facts[1, 0].tolist() == [1, 0, 0]

    def test_what_is_not_finite_is_counted(self, check):
        facts = self.repeated(check, [float("nan"), float("inf")])
        assert facts[1, 1].tolist() == [2, 2, 0]

    @pytest.mark.parametrize(
        ("error", "is_above"),
        [
            ((1.4e-3, 2.9e-2), False),
            ((1.6e-3, 1e-2), True),
            ((1e-3, 3.1e-2), True),
            ((float("nan"),) * 2, True),
        ],
    )
    def test_an_error_is_held_against_the_plain_formulas(self, check, error, is_above):
        assert check.above({"d_x": error}, {"d_x": (1e-3, 1e-2)}) is is_above

    def test_numbers_are_equal_in_every_dtype(self, check):
        half, exact = (check.drawing("bfloat16", dtype, 1)(64) for dtype in ("bfloat16", "float64"))
        assert (tf.cast(half, tf.float64).numpy() == exact.numpy()).all()
        assert exact.numpy().std() > 0.5


class TestInputTable:
    def write(self, path, rows):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)

    def row(self, tag, rate, width=1.0, **more):
        ends = (rate / width, rate * width) if rate else ("", "")
        limits = dict(zip(("samples_per_sec_low", "samples_per_sec_high"), ends, strict=True))
        return {"tag": tag, "samples_per_sec": rate, **limits, "status": "ok", "note": "", **more}

    def test_a_rate_is_held_against_synthetic_input_and_the_input_alone(self, tmp_path):
        alone = self.row("input-jpeg", 250, 1.03, cores_busy=2, samples_per_core_per_sec=125)
        self.write(tmp_path / "input.csv", [alone])
        runs = [
            self.row("resnet-synthetic", 1000),
            self.row("resnet-jpeg", 200, 1.04),
            self.row("resnet-raw", ""),
        ]
        self.write(tmp_path / "runs.csv", [row | {"input_wait_fraction": 0.5} for row in runs])
        done = subprocess.run(
            [sys.executable, ROOT / "benchmarks" / "input_table.py", tmp_path],
            capture_output=True, text=True, timeout=DEADLINE_S, check=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}"},
        )  # fmt: skip
        cells = {words[0]: words[4:] for line in done.stdout.splitlines() if len(words := line.split()) > 4}
        assert cells["input-jpeg"] == ["2.00", "125", "ok"]
        # ± 4 % of the rate itself; with ± 3 % of the input's, √(ln² 1.03 + ln² 1.04) is a factor of 1.0503.
        ratios = ["0.200", "0.192", "0.208", "0.800", "0.762", "0.840"]
        assert cells["resnet-jpeg"] == [*ratios, "0.500", "ok"]
        assert cells["resnet-synthetic"] == ["1.000", *"-----", "0.500", "ok"]
        assert cells["resnet-raw"] == [*"------", "0.500", "ok"]

    def test_an_unlike_warm_up_is_named(self):
        synthetic, real = ({"lr_warmup_steps": steps} for steps in ("10000", "25"))
        table = script("input_table")
        assert "25" in table.unlike(real, synthetic)
        assert table.unlike(synthetic, synthetic) == table.unlike(real, None) == ""


class TestMergeTuning:
    def file(self, path, *results):
        """A file of XLA's with results by the size of a product: places in cuBLAS's list."""
        blocks = (
            f'results {{\n  device: "H200"\n  hlo: "f16[{size}]"\n  result {{\n    gemm {{\n'
            f"      algorithm: {place}\n    }}\n  }}\n  version: 22\n}}\n"
            for size, place in results
        )
        path.write_text("version: 3\n" + "".join(blocks))
        return path

    def test_a_file_gains_what_it_lacks(self, tmp_path, capsys):
        into, new = (
            self.file(tmp_path / "into.txt", (8, -1)),
            self.file(tmp_path / "new.txt", (9, -1), (7, 3)),
        )
        script("merge_tuning").main(str(into), str(new))
        assert into.read_text() == self.file(tmp_path / "both.txt", (8, -1), (9, -1)).read_text()
        assert "2 results; 1 left out" in capsys.readouterr().out

    def test_a_damaged_file_is_named_and_nothing_written(self, tmp_path):
        into, new = tmp_path / "into.txt", tmp_path / "new.txt"
        new.write_text("nothing")
        with pytest.raises(SystemExit, match=r"new\.txt: it begins with"):
            script("merge_tuning").main(str(into), str(new))
        assert not into.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ([], r"RESULT plain: in 3 executions 0 of 1 messages differ, 1 are not finite"),
        (["--train"], r"RESULT plain: step 1, .*: not finite in 1 messages: the small ones \d+"),
    ],
)
def test_kernel_stress_names_the_messages_that_are_not_finite(flag, said, tmp_path):
    """With a loss scale that is too large; the model is so small that its gradients are one message."""
    run = subprocess.run(
        [
            sys.executable, f"{ROOT}/benchmarks/kernel_stress.py", "--model=bert_tiny", "--gpus=0",
            "--per_replica_batch_size=2", "--seq_length=128", "--precision=mixed_float16",
            "--initial_loss_scale=1e6", "--executions=3", "--sets=plain", *flag,
        ],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}"},
    )  # fmt: skip
    assert run.returncode == 0
    assert re.search(said, run.stdout), run.stdout + run.stderr


class TestDue:
    """What is due, with a stand-in for every program that it starts."""

    @pytest.fixture
    def due(self, tmp_path):
        program = tmp_path / "bin" / "python"
        program.parent.mkdir()
        program.write_text(
            '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >>"$CALLS"\ncase "$*" in *values.py*) exit 3;; esac\n'
        )
        program.chmod(0o755)
        calls = tmp_path / "calls"

        def run(*flags, gpus):
            calls.write_text("")
            variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "GPUS": gpus, "CALLS": f"{calls}"}
            done = subprocess.run(
                [ROOT / "benchmarks" / "due.sh", *flags],
                env=os.environ | variables, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            )  # fmt: skip
            return done, calls.read_text().splitlines()

        return run

    def test_each_run_once_and_every_end_is_written(self, due, tmp_path):
        done, calls = due(tmp_path / "out", "4000", gpus="2")
        assert done.returncode == 1, done.stdout + done.stderr
        ends = {path.parent.name: path.read_text().strip() for path in (tmp_path / "out").glob("*/exit_code")}
        assert {name for name, code in ends.items() if code != "0"} == {
            "values_resnet50",
            "values_bert_large",
        }
        assert {call.split()[0] for call in calls} == {"0", "1", "0,1"}
        again, calls = due(tmp_path / "out", "4000", gpus="2")
        assert (again.returncode, calls) == (1, [])

    def test_one_gpu_makes_no_run_of_two(self, due, tmp_path):
        _, calls = due(tmp_path / "out", "4000", gpus="1")
        assert {call.split()[0] for call in calls} == {"0"}

    def test_what_does_not_fit_is_named_and_run_later(self, due, tmp_path):
        done, calls = due(tmp_path / "out", "230", gpus="1")
        assert done.returncode == 124
        assert "not run for want of time: race_resnet50" in done.stdout
        assert calls
        assert not any("race/resnet50-1024" in call for call in calls)
        _, calls = due(tmp_path / "out", "4000", gpus="1")
        assert any("race/resnet50-1024" in call for call in calls)
        assert not any("pytorch_ceilings" in call for call in calls)

    def test_refuses_flags(self, due):
        done, calls = due("--fast", gpus="1")
        assert (done.returncode, calls) == (2, [])
        assert "usage" in done.stderr
