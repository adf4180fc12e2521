"""Every experiment at its smallest, on the CPU: the table, the picture, the answer. Few processes train."""

import csv
import functools
import importlib.util
import math
import re
import time

import pytest
import step_helpers  # noqa: F401  gives this process its CPU devices
from absl import flags
from absl.testing import flagsaver
from run_helpers import ROOT

from tfbench import records, study
from tfbench.records import RunRecord
from tfbench.study import Estimate

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


def ask(name, folder, *arguments, in_folder=""):
    """Run an experiment in this process; the lines of its table, after looking for its picture."""
    module = experiment(name)
    with flagsaver.flagsaver():
        flags.FLAGS([name, f"--results_dir={folder}", *arguments])
        module.main([name])
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


@pytest.mark.slow
def test_training_experiments_share_rows(trained, capsys):
    """Three questions from three runs: each looks for what the others have run already."""
    only = "--only=fp32,bfloat16,outside"
    precise = ask("precision_speedup", trained, *TINY, only)
    assert [line["status"] for line in precise] == ["ok", "ok"]
    assert float(precise[1]["to fp32"]) == pytest.approx(
        float(precise[1]["samples/s"]) / float(precise[0]["samples/s"])
    )
    batches = ask("batch_size", trained, *TINY, "--batches=2", "--mixed=mixed_bfloat16")
    assert [float(line["samples/s"]) for line in batches] == [float(line["samples/s"]) for line in precise]
    scaled = ask("scaling", trained, *TINY, "--cpu_replicas=2")
    one, two = (float(line["samples/s"]) for line in scaled)
    assert float(scaled[1]["efficiency"]) == pytest.approx(two / 2 / one)
    assert len(records.read(trained / "runs.csv")) == 3
    assert "share its cores" in capsys.readouterr().out


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
    assert [line["pipeline"].split()[0] for line in lines] == ["as", "+", "+", "+", "+"]
    for line in lines:
        assert 0 < float(line["images/s"]) <= 2 / 0.005
        assert 0 <= float(line["of the time waiting, %"]) < 100


@pytest.mark.slow
def test_made_up_photos_are_photos_and_batches_differ(tmp_path):
    pipeline = experiment("input_pipeline")
    paths = pipeline.write_jpegs(tmp_path, 2)
    for batches in pipeline.pipelines(paths, 2, 24).values():
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
