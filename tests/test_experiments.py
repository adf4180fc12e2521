"""Every experiment at its smallest, on the CPU: the table, the picture, the answer. Few processes train."""

import csv
import functools
import importlib.util
import math
import re
import sys
import time

import pytest
import step_helpers  # noqa: F401  gives this process its CPU devices
from absl import flags
from absl.testing import flagsaver
from run_helpers import ROOT, gpu, machine

from tfbench import records, study
from tfbench.config import ConfigError
from tfbench.records import RunRecord
from tfbench.study import Estimate
from tfbench.sweeping import loop

# Of every training: all points that measure the same share a row.
TINY = (
    "--model=resnet_tiny", "--gpus=0", "--image_size=16", "--per_replica_batch_size=2", "--steps=2",
    "--windows=2", "--warmup_steps=1", "--steps_per_loop=1", "--tensorboard=false",
)  # fmt: skip


@functools.cache  # a module that is loaded again would define its flags twice
def experiment(name):
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", ROOT / "experiments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(name, folder, *arguments, in_folder="", code=0):
    """Run an experiment in this process; the lines of its table, after looking for its picture."""
    module = experiment(name)
    with flagsaver.flagsaver():
        flags.FLAGS([name, f"--results_dir={folder}", *arguments])
        assert module.main([name]) == code
    picture = folder / in_folder / f"{name}.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with open(folder / in_folder / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row(rate, low=None, high=None, **fields):
    told = {"status": "ok", "model": "resnet50", "started_at": "2026-01-01", "run_key": f"{rate}"}
    ends = {"samples_per_sec_low": low, "samples_per_sec_high": high}
    return RunRecord(samples_per_sec=rate, **ends, **told | fields)


def write(path, *rows):
    for each in rows:
        records.append(path, each)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


def test_ratio_of_estimates_by_hand():
    """The ends of a ratio: half-widths of 10 % and 10 % in logarithms add to √2 times one of them."""
    times = Estimate(200.0, 200 / 1.1, 220.0).over(Estimate(100.0, 100 / 1.1, 110.0))
    assert times.value == 2.0
    assert times.high == pytest.approx(2 * 1.1 ** math.sqrt(2))
    assert times.low == pytest.approx(2 / 1.1 ** math.sqrt(2))
    assert Estimate(3.0).over(Estimate(2.0)) == Estimate(1.5)
    same = Estimate(5.0, 4.0, 6.0)
    assert same.over(same) == Estimate(1.0)


def test_rate_of_failed_runs_is_none():
    failed = [row(10.0, status="oom")]
    assert study.rate_of(failed) is None
    assert study.status_of(failed) == "oom"
    assert study.status_of([]) == "not run"
    assert study.rate_of([*failed, row(4.0, 3.0, 5.0)]) == Estimate(4.0, 3.0, 5.0)


def test_timed_counts_calls():
    """Calls of 5 ms are at most 200 a second, whatever the machine."""
    calls = []
    rate = study.timed(lambda: (calls.append(1), time.sleep(0.005)), windows=3, calls=4)
    assert len(calls) == 2 + 3 * 4
    assert 0 < rate.value <= 200


def test_reused_rows_are_found_by_their_flags(tmp_path, capsys):
    """Rows of a GPU, read where there is none; the newest configuration, all its repeats, no other's."""
    precise = "--model=resnet50 --precision=fp32 --seed=0"
    mixed = "--model=resnet50 --precision=mixed_float16 --seed=0"
    path = write(
        tmp_path / "runs.csv",
        row(100.0, 99.0, 101.0, flags=precise, num_gpus=1, run_key="a", loss_last=2.0),
        row(500.0, 499.0, 501.0, flags=mixed, num_gpus=1, run_key="old", loss_last=9.0),
        row(
            300.0, 297.0, 303.0, flags=mixed, num_gpus=1, run_key="b", started_at="2026-01-02", loss_last=2.1
        ),
        row(
            300.0, 297.0, 303.0, flags=mixed, num_gpus=1, run_key="b", started_at="2026-01-03", loss_last=2.1
        ),
    )
    lines = {line["precision"]: line for line in ask("precision_speedup", tmp_path, f"--reuse={path}")}
    assert float(lines["mixed_float16"]["to fp32"]) == pytest.approx(3.0)
    assert float(lines["mixed_float16"]["to fp32, low"]) < 3 < float(lines["mixed_float16"]["to fp32, high"])
    assert float(lines["mixed_float16"]["off fp32, %"]) == pytest.approx(5.0)
    assert lines["tf32"]["status"] == "not run"
    assert "mixed_float16, is 3 times" in capsys.readouterr().out


def test_reused_rows_of_another_precision_are_another_experiments(tmp_path):
    flags = "--model=resnet50 --xla=true --steps_per_loop=10 --precision="
    plain = "--model=resnet50 --xla=false --steps_per_loop=1 --tag=plain_keras --precision=mixed_float16"
    path = write(
        tmp_path / "runs.csv",
        row(100.0, flags=plain, num_gpus=1),
        row(900.0, flags=flags + "mixed_float16 --tag=", num_gpus=1, run_key="a"),
        row(400.0, flags=flags + "tf32 --tag=", num_gpus=1, run_key="b", started_at="2027-01-01"),
    )
    lines = {line["training"]: line for line in ask("xla", tmp_path, f"--reuse={path}")}
    assert float(lines["tfbench, XLA, 10 steps a call"]["to Keras as it comes"]) == pytest.approx(9.0)


def test_values_are_compared_with_the_default(tmp_path, capsys):
    """Rows of a GPU whose cheap gradients made it a quarter faster."""
    flags = "--model=resnet50 --precision=mixed_float16 --lr_warmup_steps={} --initial_loss_scale={}"
    path = write(
        tmp_path / "runs.csv",
        row(100.0, flags=flags.format(10000, 32768.0), num_gpus=1, run_key="a", sm_clock_mhz_mean=1500.0),
        row(110.0, flags=flags.format(0, 32768.0), num_gpus=1, run_key="b", started_at="2026-01-03"),
        row(125.0, flags=flags.format(10000, 1.0), num_gpus=1, run_key="c", started_at="2026-01-02"),
    )
    lines = {line["values"]: line for line in ask("values", tmp_path, f"--reuse={path}")}
    ratios = {name: line["to the default"] for name, line in lines.items() if line["status"] == "ok"}
    assert ratios == {"near the first weights": "1.0", "full learning rate": "1.1", "loss scale 1": "1.25"}
    assert lines["near the first weights"]["SM clock, MHz"] == "1500.0"
    assert lines["loss scale 2^20"]["status"] == "not run"
    assert "What differs most, loss scale 1, trains 1.25 times" in capsys.readouterr().out


@pytest.mark.slow
def test_training_experiments_share_rows(trained, capsys):
    """Three questions from three runs: each looks for what the others have run already."""
    only = "--only=fp32,bfloat16"
    precise = ask("precision_speedup", trained, *TINY, only)
    assert [line["status"] for line in precise] == ["ok", "ok"]
    assert float(precise[1]["to fp32"]) == pytest.approx(
        float(precise[1]["samples/s"]) / float(precise[0]["samples/s"])
    )
    batches = ask("batch_size", trained, *TINY, "--batches=2", "--mixed=mixed_bfloat16")
    assert [float(line["samples/s"]) for line in batches] == [float(line["samples/s"]) for line in precise]
    scaled = ask("scaling", trained, *TINY, "--cpu_replicas=2", "--modes=weak,strong")
    assert [line["mode"] for line in scaled] == ["weak", "weak", "strong", "strong"]
    for alone, together in (scaled[:2], scaled[2:]):
        one, two = float(alone["samples/s"]), float(together["samples/s"])
        assert float(together["efficiency"]) == pytest.approx(two / 2 / one)
    rows = records.read(trained / "runs.csv")
    assert len(rows) == 5  # the weak baseline is there
    assert [row.per_replica_batch_size for row in rows[-2:]] == [2, 1]
    assert "share its cores" in capsys.readouterr().out
    values = ask("values", trained, *TINY)
    assert [line["status"] for line in values] == ["ok", "ok"]
    assert len(records.read(trained / "runs.csv")) == 6  # near the first weights is what all others are


def scaling_points(monkeypatch, *arguments):
    """Points of the scaling experiment on eight made-up GPUs, in the order of the runs."""
    cards = [gpu(index=index, uuid=f"GPU-{index}") for index in range(8)]
    monkeypatch.setattr(study, "this_machine", lambda: machine(*cards))
    module = experiment("scaling")
    with flagsaver.flagsaver():
        flags.FLAGS(["scaling", "--per_replica_batch_size=64", *arguments])
        return module.points_of(study.Experiment("scaling", module.ON_GPU, module.ON_CPU))


def test_most_replicas_are_run_first_and_their_batches_stay_or_are_dealt_out(monkeypatch):
    points = scaling_points(monkeypatch, "--modes=weak,strong", "--places=outside,update")
    assert [(*spot[:1], *spot[2:]) for spot in points] == [
        (mode, *spot)
        for mode in ("weak", "strong")
        for spot in (
            ("alone", 1), ("outside", 8), ("update", 8), ("outside", 4), ("update", 4), ("outside", 2),
            ("update", 2),
        )
    ]  # fmt: skip
    batches = {spot[::3]: choices.get("per_replica_batch_size", 64) for spot, choices in points.items()}
    assert batches == {
        ("weak", 1): 64, ("weak", 8): 64, ("weak", 4): 64, ("weak", 2): 64,
        ("strong", 1): 64, ("strong", 8): 8, ("strong", 4): 16, ("strong", 2): 32,
    }  # fmt: skip


def test_scaling_has_every_place_and_each_precision_of_its_own(monkeypatch):
    points = scaling_points(monkeypatch, "--gpus=1,2", "--precisions=mixed_bfloat16,fp32")
    assert [spot[1:] for spot in points] == [
        (precision, *spot)
        for precision in ("mixed_bfloat16", "fp32")
        for spot in (("alone", 1), ("outside", 2), ("update", 2), ("inside", 2))
    ]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--modes=weak,week", "--modes=weak,week: some of weak,strong"),
        ("--places=between", "--places=between: some of outside,update,inside"),
        ("--precisions=fp8", "--precisions=fp8: some of fp32,tf32,mixed_float16,mixed_bfloat16"),
        ("--modes=", "--modes=: some of weak,strong"),
    ],
)
def test_what_cannot_be_scaled_is_refused(flag, message, monkeypatch):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        scaling_points(monkeypatch, flag)


def test_a_batch_that_cannot_be_dealt_out_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="per_replica_batch_size=64: for strong scaling a multiple of 3"):
        scaling_points(monkeypatch, "--gpus=3", "--modes=strong")


def test_efficiency_by_hand():
    """Weak: 760 on 8 against 100 on one is 95 %. Strong: steps of 10 and 1.6 ms on 8 are 10 / (8 × 1.6)."""
    efficiency = experiment("scaling").efficiency
    assert efficiency(Estimate(760.0), Estimate(100.0), 8).value == pytest.approx(0.95)
    one, eight = Estimate(64 / 10e-3), Estimate(64 / 1.6e-3)
    assert efficiency(eight, one, 8).value == pytest.approx(10 / (8 * 1.6))
    # √(ln² 1.03 + ln² 1.04) = 0.04911, a factor of 1.0503 either way.
    wide = efficiency(Estimate(760.0, 760 / 1.04, 760 * 1.04), Estimate(100.0, 100 / 1.03, 103.0), 8)
    assert (wide.low, wide.high) == pytest.approx((0.95 / 1.0503, 0.95 * 1.0503), rel=1e-4)
    assert efficiency(one, one, 1) == Estimate(1.0)
    assert efficiency(None, one, 2) is efficiency(one, None, 2) is None


def test_scaling_of_reused_rows(tmp_path, capsys):
    """Weak 1,800 on two against 1,000 on one; strong 1,600, the same batch in all; what is no part."""

    def scaled(rate, mode, gpus, batch, place="outside", **fields):
        told = f"--model=resnet50 --scaling_mode={mode} --precision=mixed_float16 --collectives={place} "
        told += f"--gpus={gpus} --per_replica_batch_size={batch} --diagnose={str(gpus > 1).lower()}"
        known = {"flags": told, "num_gpus": gpus, "num_replicas": gpus, "per_replica_batch_size": batch}
        return row(rate, precision="mixed_float16", **known | fields)

    exposed = [
        scaled(1800.0, "weak", 2, 64, exposed_communication_ms=ms, topology="NV18", run_key="weak")
        for ms in (2.0, 3.0, 4.0)
    ]
    path = write(
        tmp_path / "runs.csv",
        scaled(1000.0, "weak", 1, 64),
        *exposed,
        scaled(1900.0, "weak", 2, 64, "update"),
        scaled(9000.0, "weak", 2, 512, "inside"),  # another batch than the one alone
        scaled(1000.0, "strong", 1, 64),
        scaled(1600.0, "strong", 2, 32, exposed_communication_ms=1.5),
    )
    lines = ask("scaling", tmp_path, f"--reuse={path}", "--modes=weak,strong")
    shown = [(line["mode"], line["collectives"], line["replicas"], line["efficiency"]) for line in lines]
    assert shown == [
        ("weak", "alone", "1", "1.0"), ("weak", "inside", "2", ""), ("weak", "outside", "2", "0.9"),
        ("weak", "update", "2", "0.95"),
        ("strong", "alone", "1", "1.0"), ("strong", "inside", "2", ""), ("strong", "outside", "2", "0.8"),
        ("strong", "update", "2", ""),
    ]  # fmt: skip
    assert [lines[1]["status"], lines[2]["link"]] == ["not run", "NV18"]
    # 2, 3, 4: standard error 1 / √3, Student's quantile for 2 degrees of freedom 4.3027.
    ends = [float(lines[2][f"exposed all-reduce, ms{end}"]) for end in ("", ", low", ", high")]
    assert ends == pytest.approx([3.0, 3 - 4.3027 / 3**0.5, 3 + 4.3027 / 3**0.5], abs=1e-3)
    assert float(lines[6]["exposed all-reduce, ms"]) == 1.5
    said = " ".join(capsys.readouterr().out.split())
    assert "2 replicas (weak, mixed_float16, update) keep 95 % of their rate alone" in said
    assert "2 replicas (strong, mixed_float16, outside) keep 80 % of their rate alone" in said


def test_the_plan_says_what_is_missing_and_runs_nothing(tmp_path, capsys):
    flagged = ("--gpus=0", "--cpu_replicas=4", "--modes=weak,strong", "--plan_s=70")
    with pytest.raises(SystemExit) as ended:
        ask("scaling", tmp_path, *flagged)
    assert ended.value.code == 0
    assert "scaling, resnet_tiny: 6 of 6 runs missing, about 7 min at 70 s each" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def refused(name, folder, *arguments):
    """Why an experiment does not begin; it leaves nothing behind."""
    module = experiment(name)
    with flagsaver.flagsaver():
        flags.FLAGS([name, f"--results_dir={folder}", *arguments])
        with pytest.raises(ConfigError) as refusal:
            module.main([name])
    assert not list(folder.iterdir())
    return f"{refusal.value}"


@pytest.mark.parametrize(
    "name", ["input_pipeline", "tensor_core_shapes", "all_reduce", "activation_cost", "gpu_generations",
             "measurement_truth", "plain_keras"],
)  # fmt: skip
def test_experiments_without_runs_refuse_flags_of_runs(name, tmp_path):
    refusal = "--{}: not here: this experiment starts no runs; leave it out"
    assert refused(name, tmp_path, "--gpus=0", "--plan_s=10") == refusal.format("plan_s=10.0")
    assert refused(name, tmp_path, "--gpus=0", "--only=fp32") == refusal.format("only=fp32")


def test_a_name_that_no_point_has_is_refused(tmp_path):
    expected = "--only=fp32,foo: parts of the names fp32, tf32, mixed_float16, mixed_bfloat16"
    assert refused("precision_speedup", tmp_path, "--only=fp32,foo") == expected


def test_the_plan_of_several_programs_runs_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        ask("xla", tmp_path, "--gpus=0", "--plan_s=10", "--repeats=3")
    assert ended.value.code == 0
    assert "xla, resnet_tiny: 15 of 15 runs missing, about 3 min at 10 s each" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# Trains as told: a row without a process that imports TensorFlow. {0} ends it instead, where it is a status.
STAND_IN = """
import datetime, os, sys
from pathlib import Path
from absl import flags
import tfbench.flags
from tfbench import records
from tfbench.defaults import complete
from tfbench.hardware.gpus import Machine

flags.FLAGS(sys.argv)
MACHINE = Machine(gpus=(), cpu_cores=2, ram_gib=8.0, reason_without_gpu="none")
config, _ = complete(tfbench.flags.choices_from_flags(), MACHINE)
now = datetime.datetime.now(datetime.UTC)
row = records.RunRecord(run_id=f"{{now:%Y%m%d-%H%M%S}}-x-{{config.run_key[:6]}}-{{os.getpid()}}")
row.run_key, row.started_at, row.tag = config.run_key, now.isoformat(), config.tag
row.status, row.samples_per_sec = "{0}", 100.0 if "{0}" == "ok" else None
records.append(Path(config.results_dir) / "runs.csv", row)
"""


def stand_in(folder, status="ok"):
    path = folder / f"{status}.py"
    path.write_text(STAND_IN.format(status))
    return path


def test_plain_keras_takes_its_turn_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(loop, "TRAINER", (sys.executable, str(stand_in(tmp_path))))
    (tmp_path / "plain_keras.py").write_text(STAND_IN.format("ok"))
    monkeypatch.setattr(experiment("xla"), "KERAS", tmp_path / "plain_keras.py")
    out = tmp_path / "out"
    lines = ask("xla", out, "--gpus=0", "--repeats=2", "--only=XLA")
    assert [line["status"] for line in lines] == ["ok"] * 4
    plain, ours = records.read(out / "plain_keras" / "runs.csv"), records.read(out / "runs.csv")
    assert [(len(plain), len(ours)), {row.tag for row in plain}] == [(2, 6), {"plain_keras"}]
    in_turn = sorted([*plain, *ours], key=lambda row: row.started_at)
    assert [row.tag for row in in_turn] == ["plain_keras", *[None] * 3] * 2
    assert [row.run_key for row in in_turn[:4]] == [row.run_key for row in in_turn[4:]]


def test_exit_code_of_an_experiment(tmp_path, monkeypatch):
    """2 where no run is ok, 1 where some are."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(loop, "TRAINER", (sys.executable, str(stand_in(tmp_path, "failed"))))
    flagged = ("--gpus=0", "--model=resnet_tiny", "--only=fp32,bfloat16")
    lines = ask("precision_speedup", tmp_path, *flagged, code=2)
    assert [line["status"] for line in lines] == ["failed"] * 2
    monkeypatch.setattr(loop, "TRAINER", (sys.executable, str(stand_in(tmp_path))))
    ask("precision_speedup", tmp_path, *flagged[:2], "--only=fp32")
    ask("precision_speedup", tmp_path, *flagged, "--retry=none", code=1)


def test_ctrl_c_leaves_an_earlier_answer(tmp_path, monkeypatch, capsys):
    (tmp_path / "precision_speedup.csv").write_text("precision\nof before\n")
    (tmp_path / "precision_speedup.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    stop = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    monkeypatch.setattr(loop, "TRAINER", (sys.executable, "-c", stop))
    flagged = ("--gpus=0", "--model=resnet_tiny", "--only=fp32,bfloat16")
    assert ask("precision_speedup", tmp_path, *flagged, code=130) == [{"precision": "of before"}]
    assert "precision_speedup.csv is left as it was" in capsys.readouterr().out


def test_ctrl_c_of_what_runs_in_the_experiments_process(monkeypatch, capsys):
    def main(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["experiment"])
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        study.start(main)
    assert ended.value.code == 130
    assert "error: stopped by the user" in capsys.readouterr().out


def test_means_join_no_two_machines(tmp_path, capsys):
    """Of one configuration the newest row's machine alone; a run that died knows no machine."""
    told = {"flags": "--model=resnet50 --precision=fp32", "num_gpus": 1, "run_key": "a"}
    path = write(
        tmp_path / "runs.csv",
        row(3000.0, **told, run_id="one", gpu_name="NVIDIA H200", host="h"),
        row(300.0, **told, run_id="two", started_at="2026-01-02", gpu_name="NVIDIA L4", host="l"),
        row(320.0, **told, run_id="three", started_at="2026-01-03", gpu_name="NVIDIA L4", host="l"),
        row(200.0, **told, run_id="four", gpu_name="NVIDIA L4", host="l", parallel_runs=4),
        row(None, **told, run_id="five", started_at="2026-01-04", status="hang"),
    )
    (line,) = ask("precision_speedup", tmp_path, f"--reuse={path}", "--only=fp32")
    assert float(line["samples/s"]) == pytest.approx(310.0)
    said = " ".join(capsys.readouterr().out.split())
    assert "not of the machine of three (GPU, host" in said
    assert "configuration: four, one" in said


def test_an_answer_that_a_full_disk_takes_names_the_folder(tmp_path, monkeypatch, capsys):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(study.Figure, "savefig", full)
    path = write(tmp_path / "runs.csv", row(1.0, num_gpus=1, flags="--model=resnet50 --precision=fp32"))
    with pytest.raises(ConfigError, match=f"--results_dir={tmp_path}: the answer is not written: .*No space"):
        ask("precision_speedup", tmp_path, f"--reuse={path}")
    assert "precision_speedup" in capsys.readouterr().out  # the table was shown


@pytest.mark.slow
def test_xla_compares_with_plain_keras(trained):
    """The same net: as many parameters as tfbench's. Its row of the other experiments is taken again."""
    lines = ask("xla", trained, *TINY, "--only=as it comes,no XLA")
    assert [line["status"] for line in lines] == ["ok", "ok"]
    (plain,) = records.read(trained / "plain_keras" / "runs.csv")
    ours = records.read(trained / "runs.csv")[0]
    assert plain.num_params == ours.num_params
    assert float(lines[1]["to Keras as it comes"]) == pytest.approx(
        float(lines[1]["samples/s"]) / plain.samples_per_sec
    )


@pytest.mark.slow
def test_cold_start_runs_twice_with_caches_of_its_own(tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "CUDA_CACHE_PATH"):
        monkeypatch.setenv(name, "of the user")  # and put back after the test
    lines = ask("cold_start", tmp_path, *TINY, "--noxla", in_folder="cold_start")
    assert [line["start"] for line in lines] == ["1", "2"]
    first_s, second_s = (float(line["to the first step, s"]) for line in lines)
    assert float(lines[1]["ratio to the first"]) == pytest.approx(second_s / first_s)
    assert [line["status"] for line in lines] == ["ok", "ok"]


@pytest.mark.slow
def test_input_pipeline_never_outruns_the_step(tmp_path):
    lines = ask("input_pipeline", tmp_path, "--per_replica_batch_size=2", "--image_size=32", "--windows=2",
                "--step_ms=5", "--images=4")  # fmt: skip
    assert [line["pipeline"].split()[0] for line in lines] == ["one", "+", "+", "+", "+", "none,"]
    for line in lines:
        assert 0 < float(line["images/s"]) <= 2 / 0.005
        assert 0 <= float(line["of the time waiting, %"]) < 100


@pytest.mark.slow
def test_made_up_photos_are_photos_and_batches_differ(tmp_path):
    pipeline = experiment("input_pipeline")
    paths = pipeline.write_jpegs(tmp_path, 2)
    for name, batches in pipeline.pipelines(paths, 2, 24).items():
        rewrites = batches.options().experimental_optimization
        assert rewrites.map_parallelization == rewrites.inject_prefetch == name.startswith("none")
        (batch,) = batches.take(1)
        assert batch.shape == (2, 24, 24, 3)
        assert batch.numpy().std() > 10  # neither black nor one colour


@pytest.mark.slow
def test_tensor_core_shapes(tmp_path, capsys):
    lines = ask("tensor_core_shapes", tmp_path, "--gpus=0", "--sides=16")
    assert [int(line["side"]) for line in lines] == [16, 17, 18, 20, 24, 80]
    assert [int(line["multiple of"]) for line in lines] == [16, 1, 2, 4, 8, 16]
    assert float(lines[0]["to the power of two"]) == 1
    assert all(float(line["TFLOP/s"]) > 0 for line in lines)
    worst = min(lines, key=lambda line: float(line["to the power of two"]))
    said = " ".join(capsys.readouterr().out.split())
    # On a busy machine no side may be slower than 16.
    is_slower = float(worst["to the power of two"]) < 1
    assert re.search(rf"{worst['side']} reaches [\d.]+ times \(95 %: .*rate\.|No side is slower", said)
    assert ("No side is slower" in said) is not is_slower


@pytest.mark.slow
def test_activation_cost(tmp_path):
    lines = ask("activation_cost", tmp_path, "--gpus=0", "--hidden=8", "--per_replica_batch_size=1",
                "--seq_length=8")  # fmt: skip
    rates = {line["activation"]: float(line["steps/s"]) for line in lines}
    exact = next(line for line in lines if line["activation"] == "GELU, exact")
    assert float(exact["time to ReLU's"]) == pytest.approx(rates["ReLU"] / rates["GELU, exact"])
    assert float(exact["µs forward and backward"]) == pytest.approx(1e6 / rates["GELU, exact"])


@pytest.mark.parametrize(
    ("replicas", "message_bytes", "sums_per_s", "gb_per_s"),
    [(2, 1e9, 10, 10.0), (4, 1e9, 10, 15.0), (8, 4e6, 1000, 7.0)],
)
def test_bus_bandwidth_by_hand(replicas, message_bytes, sums_per_s, gb_per_s):
    """NCCL's factor 2 (n - 1) / n: 1, 1.5 and 1.75."""
    assert experiment("all_reduce").bus_gb_per_s(message_bytes, replicas, sums_per_s) == pytest.approx(
        gb_per_s
    )


@pytest.mark.slow
def test_all_reduce(tmp_path):
    lines = ask("all_reduce", tmp_path, "--gpus=0", "--mib=0.0625")
    assert {line["wire"] for line in lines} == {"float32", "float16"}
    assert len(lines) == 2 * 4
    for line in lines:
        assert line["status"] == "ok"
        assert float(line["bus bandwidth, GB/s"]) == pytest.approx(65536 / float(line["ms"]) / 1e6)


@pytest.mark.slow
def test_all_reduce_shows_what_fails(tmp_path, monkeypatch):
    """An algorithm that leaves the sum out is found out, and no rate is given for it."""
    import tensorflow as tf

    class NoSum(tf.distribute.ReductionToOneDevice):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            return [value for value, _ in value_destination_pairs]

    monkeypatch.setattr(experiment("all_reduce"), "algorithms", lambda on_gpu: {"broken": NoSum()})
    lines = ask("all_reduce", tmp_path, "--gpus=0", "--mib=0.0625")
    assert [line["status"].split(":")[0] for line in lines] == ["ArithmeticError"] * 2
    assert not any(line["ms"] for line in lines)


def test_gpu_generations_ranks_measured_among_published(tmp_path):
    """The faster of two rows of a card, first of all by a made-up rate; what was published says so."""
    fast = {"num_gpus": 2, "gpu_name": "Card A", "run_id": "fast", "samples_per_sec_per_gpu": 1e6}
    slow = fast | {"run_id": "slow", "samples_per_sec_per_gpu": 10.0}
    other = {"num_gpus": 1, "gpu_name": "Card B", "run_id": "other", "samples_per_sec_per_gpu": 5e5}
    rows = [row(20.0, 19.0, 21.0, **slow), row(2e6, 1.9e6, 2.1e6, **fast), row(5e5, 4.9e5, 5.1e5, **other)]
    path = write(tmp_path / "runs.csv", *rows)
    lines = ask("gpu_generations", tmp_path, f"--reuse={path}")
    assert [line["origin"] for line in lines].count("measured") == 2
    ends = [float(lines[1][f"to the first{end}"]) for end in ("", ", low", ", high")]
    assert ends == pytest.approx([0.5, 0.4743, 0.5283], abs=1e-4)  # ± 5 % and ± 2 %: √(5² + 2²) = 5.4 %
    assert [float(line["to the first"]) for line in lines[2:]] == [
        pytest.approx(float(line["per GPU, samples/s"]) / 1e6) for line in lines[2:]
    ]
    assert (lines[0]["card"], lines[0]["GPUs"], lines[0]["origin"]) == ("Card A", "2", "measured")
    assert float(lines[0]["per GPU, samples/s"]) == pytest.approx(1e6)
    assert float(lines[0]["per GPU, samples/s, high"]) == pytest.approx(1.05e6)
    rates = [float(line["per GPU, samples/s"]) for line in lines]
    assert rates == sorted(rates, reverse=True)
    assert len(lines) > 5
