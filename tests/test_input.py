"""The input alone: arithmetic by hand, stages that do what they count, the row, the command line."""

import csv
import dataclasses
import gc
import itertools
import threading
import time
import types
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import IMAGE_MODEL, TEXT_MODEL, config_of
from run_helpers import environment_without_tensorflow, python
from step_helpers import strategy_of

from tfbench import display, records
from tfbench.config import BenchmarkConfig
from tfbench.data import DATASETS, InputLog, Shard, image_shards
from tfbench.inputbench import compare, feeding, pipeline, row, variants
from tfbench.inputbench.compare import Variant
from tfbench.inputbench.cuts import cuts
from tfbench.inputbench.drain import Drained, Plan, Usage, drain
from tfbench.inputbench.feeding import GpuRate
from tfbench.measure.timing import Window
from tfbench.records import RunRecord


def drained(
    samples: int,
    seconds: float,
    cpu_s: float,
    cores_s: float | None = None,
    threads_s: tuple[float, ...] = (),
) -> Drained:
    """Two windows that agree."""
    half = Window(0, 1, samples // 2, 0.0, seconds / 2)
    used = Usage(cpu_s, cpu_s if cores_s is None else cores_s, None, dict(enumerate(threads_s)))
    return Drained((half, half), used)


class Host:
    """A clock that stands still but for the work, which takes 2 s and 3 s of CPU time for 10 samples."""

    def __init__(self, read_bytes: int | None = 0):
        self.now_s, self.cpu_s, self.read_bytes, self.taken = 100.0, 7.0, read_bytes, 0

    def take(self) -> int:
        self.now_s, self.cpu_s, self.taken = self.now_s + 2, self.cpu_s + 3, self.taken + 10
        if self.read_bytes is not None:
            self.read_bytes += 500
        return 10

    def drain(self, plan: Plan) -> Drained:
        usage = lambda: Usage(self.cpu_s, 2 * self.cpu_s + 1, self.read_bytes)  # noqa: E731
        return drain(self.take, plan, clock=lambda: self.now_s, usage=usage)


def test_windows_count_what_was_taken_in_them():
    done = Host().drain(Plan(seconds=12, windows=3))  # each window: 4 s, two takes
    assert [(w.start_s, w.end_s, w.steps, w.samples) for w in done.windows] == [
        (106.0, 110.0, 2, 20), (110.0, 114.0, 2, 20), (114.0, 118.0, 2, 20),
    ]  # after a warm-up of 6 s  # fmt: skip
    assert (done.samples, done.seconds, done.samples_per_sec) == (60, 12.0, 5.0)
    assert done.interval == pytest.approx((5.0, 5.0))
    assert done.cores_busy == 1.5  # 18 s of CPU time in 12 s
    assert done.cores_busy_by_others == 1.5  # 36 s on these cores, less its own
    assert done.cpu_us_per_sample == pytest.approx(300_000)
    assert done.read_bytes_per_sec == 250


def test_a_thread_that_alone_is_the_limit_is_seen():
    """One thread computes and others wait for it: its share of a core, not theirs, is the busiest."""

    def compute() -> int:
        end_s = time.thread_time() + 0.05
        while time.thread_time() < end_s:
            pass
        return 1

    with futures.ThreadPoolExecutor(3) as pool:
        lock = threading.Lock()

        def in_turn(_: int) -> int:
            with lock:
                return alone.submit(compute).result()

        with futures.ThreadPoolExecutor(1) as alone:
            done = drain(lambda: sum(pool.map(in_turn, range(3))), Plan(seconds=0.6, windows=1))
    assert max(done.used.threads_s.values()) == pytest.approx(0.05 * done.samples, abs=0.1)
    assert done.busiest_thread == pytest.approx(0.05 * done.samples / done.seconds, abs=0.2)


def test_a_take_longer_than_a_window_is_a_window_and_one_window_has_no_interval():
    done = Host(read_bytes=None).drain(Plan(seconds=0.5, windows=1))
    assert [w.samples for w in done.windows] == [10]
    assert done.interval == (None, None)
    assert done.read_bytes_per_sec is None


@pytest.mark.parametrize(("asked", "taken"), [(0, 10), (10, 10), (11, 20), (95, 100)])
def test_warm_up_takes_at_least_what_was_asked(asked, taken):
    host = Host()
    done = host.drain(Plan(seconds=1, windows=1, warm_up_samples=asked))
    assert host.taken - done.samples == taken


SYNTHETIC = {
    "status": "ok", "model": "any", "data": "synthetic", "image_size": 16, "samples_per_sec_per_gpu": 200.0,
    "started_at": "2026-01-02", "run_id": "known", "precision": "tf32", "per_replica_batch_size": 8,
    "gpu_name": "H200",
}  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"status": "oom"}, {"model": "another"}, {"data": "digits"}, {"image_size": 32}, {"seq_length": 8},
        {"samples_per_sec_per_gpu": None}, {"started_at": "2026-01-01"},
    ],
)  # fmt: skip
def test_rate_of_a_gpu_is_the_newest_good_one_of_the_same_kind(other):
    newer = {"started_at": "2026-01-03", "samples_per_sec_per_gpu": 999.0, "run_id": "other"}
    rows = [RunRecord(**SYNTHETIC), RunRecord(**SYNTHETIC | newer | other)]
    for order in itertools.permutations(rows):
        found = feeding.newest_rate(order, config_of("digits"))
        assert found == GpuRate(200.0, "run known: tf32, batch 8 on H200")


def test_no_run_has_no_rate():
    assert feeding.newest_rate([], config_of("digits")) is None


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (400.0, "enough for 2.5 GPUs (95 %: 1.1 or more) of 400 samples/s each"),
        (4000.0, "too little for one GPU of 4,000 samples/s (0.25 of it, 95 %: 0.11 or more;"),
    ],
)
def test_gpus_fed(rate, said):
    """Two windows, 12.7 standard errors (Student, 1 degree) of 10 %: the rate is 439 to any."""
    windows = (Window(0, 1, 900, 0.0, 1.0), Window(1, 1, 1100, 1.0, 2.0))
    done = Drained(windows, Usage(3.0, 3.0, None))
    fed = feeding.gpus_fed(done, GpuRate(rate, "the source"))
    assert fed["gpus_fed"] == 1000 / rate
    low, high = done.interval
    assert (fed["gpus_fed_low"], fed["gpus_fed_high"]) == (low / rate, high / rate)
    sentence = feeding.verdict(done, 2, GpuRate(rate, "the source"))
    assert said in sentence
    assert "1,000 samples/s" in sentence
    assert "1.5 of 2 cores" in sentence
    assert sentence.endswith("the source).")


def test_without_a_rate_no_gpus_are_spoken_of():
    assert "GPU" not in feeding.verdict(drained(100, 1, 1), 2, None)


STAGES = {"read": drained(1000, 1, 0.2), "decode": drained(1000, 1, 0.9), "batch": drained(1000, 1, 1.0)}


def test_a_stage_costs_what_it_adds():
    assert feeding.cost_of_each(STAGES) == pytest.approx({"read": 200, "decode": 700, "batch": 100})


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (
            drained(1000, 1, 1.9),
            ["cores are the limit: a sample", "1,900.0 µs", "most is 'decode', about 700.0 µs"],
        ),
        (drained(1000, 1, 1.0, cores_s=1.8), ["cores are the limit (0.8 of them", "other processes"]),
        (drained(1000, 1, 1.0, cores_s=1.2), ["0.8 of 2 cores are idle", "not the limit: storage, a stage"]),
        (drained(1000, 2, 2.2, threads_s=(0.3, 1.9)), ["limit: a stage in one thread is", "95% of a core"]),
        (drained(1000, 2, 2.2, threads_s=(1.7, 0.5)), ["storage, copies to", "more than 85% of a core"]),
    ],
)
def test_what_limits(whole, said):
    sentence = feeding.limit(whole, STAGES, 2)
    assert all(part in sentence for part in said), sentence


def test_limit_without_stages_names_none():
    whole = drained(1000, 1, 1.9)
    assert feeding.limit(whole, {"to the replicas": whole}, 2).endswith("takes 1,900.0 µs of CPU time.")


def a_row(**cells):
    asked = {
        "run_id": "r", "started_at": "t", "tag": "", "status": "ok", "model": "m", "data": "d",
        "cache": "none", "image_size": None, "seq_length": 8, "num_replicas": 1, "num_gpus": 0,
        "per_replica_batch_size": 1, "global_batch_size": 1, "cpu_cores": 2, "host": "h", "flags": "--a",
    }  # fmt: skip
    return row.InputRow(**asked | cells)


def cells_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_rows_are_whole_lines_with_every_figure(tmp_path):
    path = tmp_path / "input.csv"
    row.append(path, a_row(note='a "quoted", two\nlines', samples_per_sec=0.1 + 0.2))
    path.write_bytes(path.read_bytes() + b"cut off by a ki")
    row.append(path, a_row(run_id="second"))
    first, second = cells_of(path)
    assert (first["note"], float(first["samples_per_sec"])) == ('a "quoted", two lines', 0.1 + 0.2)
    assert (second["run_id"], second["samples_per_sec"], second["image_size"]) == ("second", "", "")


def test_writers_do_not_mix_lines(tmp_path):
    path = tmp_path / "input.csv"

    def write(writer):
        for number in range(20):
            row.append(path, a_row(run_id=f"{writer}-{number}", note="x" * 5000))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = cells_of(path)
    assert sorted(each["run_id"] for each in written) == sorted(
        f"{w}-{n}" for w in range(3) for n in range(20)
    )
    assert {each["note"] for each in written} == {"x" * 5000}


@pytest.mark.parametrize("content", ["something,else\n1,2\n", "something"])
def test_other_files_are_left_alone(tmp_path, content):
    path = tmp_path / "input.csv"
    path.write_text(content)
    for use in (lambda path: row.check(path, row.InputRow), lambda path: row.append(path, a_row())):
        with pytest.raises(row.InputSchemaError, match=r"input\.csv"):
            use(path)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("data", "spec", "names"),
    [("digits", IMAGE_MODEL, ["sample", "batch"]), ("pydoc", TEXT_MODEL, ["draw", "read and mask", "batch"])],
)
def test_cut_elements_hold_the_samples_that_are_counted(data, spec, names):
    config = config_of(data, per_replica_batch_size=6, accumulate=2)
    dataset = DATASETS[data].make(config, spec, Shard(0, 1))
    found = cuts(dataset, 12)
    assert [cut.name for cut in found] == names
    for cut in found:
        element = next(cut.dataset.as_numpy_iterator())
        fields = list(element.values()) if isinstance(element, dict) else list(element)
        # A sample's last field has one axis less without a batch: labels and indices are scalars.
        sizes = {len(np.atleast_1d(field)) for field in fields} if cut.samples_per_element > 1 else {1}
        assert sizes == {cut.samples_per_element}


def test_stages_before_a_numbering_are_found():
    def read(value):
        return value, value

    def decode(number, record):
        return record

    records = tf.data.Dataset.from_tensors(1).map(read, num_parallel_calls=1).repeat()
    samples = records.enumerate().map(decode, num_parallel_calls=1)
    found = cuts(samples.batch(4, num_parallel_calls=1), 4)
    assert [(cut.name, cut.samples_per_element) for cut in found] == [
        ("read", 1),
        ("decode", 1),
        ("batch", 4),
    ]


def test_a_batch_in_one_thread_is_cut_where_it_is_the_last():
    samples = tf.data.Dataset.range(8).repeat().batch(2).unbatch().map(abs, num_parallel_calls=1)
    found = cuts(samples.batch(4).map(abs), 4)
    assert [(cut.name, cut.samples_per_element) for cut in found] == [("abs", 1), ("batch", 4)]


def test_what_cannot_be_followed_is_not_cut():
    batched = tf.data.Dataset.range(8).repeat().batch(4)
    assert cuts(tf.data.Dataset.zip((batched, batched)), 4) == []


@pytest.fixture
def counted(monkeypatch):
    """A pipeline of float32 [3] samples that counts how often each of its two stages ran."""
    calls = {name: tf.Variable(0, dtype=tf.int64) for name in ("first", "second")}

    def stage(name):
        def apply(value):
            calls[name].assign_add(1)
            return value

        apply.__name__ = name
        return apply

    def make(config, spec, shard):
        samples = tf.data.Dataset.from_tensors({"image": tf.ones(3)}).repeat()
        for name in calls:
            samples = samples.map(stage(name), num_parallel_calls=1)
        return samples.batch(config.per_replica_batch_size, drop_remainder=True, num_parallel_calls=1)

    monkeypatch.setattr(pipeline, "parse", lambda data: (types.SimpleNamespace(make=make), None))
    config = BenchmarkConfig(model="resnet_tiny", data="counted", per_replica_batch_size=16, image_size=8)
    return pipeline.Pipeline(config, InputLog()), calls


def test_every_stage_does_all_that_it_counts(counted):
    measured, calls = counted
    runs = []
    for name, done in measured.stages(Plan(seconds=0.2, windows=2)):
        runs.append((name, *(int(count) >= done.samples for count in calls.values())))
        for count in calls.values():
            count.assign(0)
    assert runs == [("first", True, False), ("second", True, True), ("batch", True, True)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_whole_input_counts_the_samples_of_all_replicas(counted, replicas):
    measured, calls = counted
    assert measured.bytes_per_sample == 12  # three float32
    measured.config = dataclasses.replace(measured.config, cpu_replicas=replicas)
    done = measured.whole(strategy_of(replicas), Plan(seconds=0.2, windows=2))
    assert all(window.samples % (16 * replicas) == 0 for window in done.windows)
    assert int(calls["second"]) >= done.samples
    gc.collect()  # TensorFlow waits the longer for the end of an iterator, the older it is


def test_ratio_is_that_of_the_rounds_pairs():
    mean, low, high = compare.ratio([2.0, 8.0], [1.0, 2.0])
    assert mean == pytest.approx(8**0.5)
    half = 12.7062 * np.log(2) / 2  # Student, one degree of freedom; ln 2 and ln 4
    assert (low, high) == pytest.approx((mean * np.exp(-half), mean * np.exp(half)), rel=1e-4)
    assert compare.ratio([3.0], [2.0]) == (1.5, None, None)


def test_an_interval_without_an_upper_end_is_said_in_words():
    assert display.interval(294.2, float("inf")) == "294 or more"
    assert display.interval(1294.2, 2000.26, 1) == "1,294.2 to 2,000.3"
    assert display.interval(None, None) == ""


def test_variants_take_turns_and_a_cache_is_filled_once():
    taken = []

    def variant(name, warm_up):
        def take():
            taken.append(name)
            return 10

        def start():
            taken.append(f"start {name}")
            return take

        return Variant(name, "", start, warm_up, InputLog())

    found = [variant("a", 0), variant("b", 100_000), variant("c", 0)]
    rounds_done = []
    compare.take_turns(found, 0.001, 3, rounds_done.append)
    assert rounds_done == [1, 2, 3]
    assert [each for each in taken if len(each) > 1] == [f"start {name}" for name in "abcbcacab"]
    turns = [(name, 10 * len(list(group))) for name, group in itertools.groupby(taken)]
    assert [name for name, _ in turns][1::2] == list("abcbcacab")
    assert turns[3][1] >= 100_000
    assert [len(each.rounds) for each in found] == [3, 3, 3]


def test_rounds_together_are_weighted_by_their_time():
    rounds = [drained(100, 1, 2, cores_s=3), drained(500, 3, 4, cores_s=5)]
    done = Variant("a", "", lambda: lambda: 0, 0, InputLog(), rounds).all_rounds
    assert (done.samples_per_sec, done.cores_busy, done.cores_busy_by_others) == (150, 1.5, 0.5)


@pytest.mark.slow
def test_every_variant_takes_what_it_says(tmp_path):
    for name in ("first", "second"):
        image_shards.make(image_shards.images_recipe(64, 1, 10, seed=0), tmp_path / name, processes=1)
    first, second = (f"tfrecord:{tmp_path}/{name}/train-*" for name in ("first", "second"))
    config = BenchmarkConfig(model="resnet_tiny", data=first, image_size=32, per_replica_batch_size=32)
    found = list(variants.variants(config, [second]))
    assert [variant.name for variant in found] == [
        "as it is", "decode whole", "one worker", "workers x 2", "no shuffle", "cache ram", "order kept",
        "no prefetch", "one thread", "other data 1", "naive", "bare decode, whole", "bare decode",
        "bare decode, resize",
    ]  # fmt: skip
    assert [variant.start()() for variant in found] == [64] * 14
    assert {variant.name: variant.warm_up_samples for variant in found if variant.warm_up_samples} == {
        "cache ram": 64  # all of them
    }
    gc.collect()


def measure(*flags, cwd, env=None):
    return python("-m", "tfbench.input", *flags, cwd=cwd, env=env)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--data=synthetic: reads nothing that could be measured: one of digits"),
        (("--data=digits", "--steps=3"), "--steps=3: the input is measured for --seconds"),
        (("--data=digits", "--seconds=0"), "--seconds=0"),
        (("--data=digits", "--gpu_rate=fast"), "--gpu_rate=fast"),
        (("--data=pydoc",), "--data=pydoc: pydoc has text"),
        (("digits",), "'digits' is not a flag"),
        (("--data=digits", "--compare_data=pydoc"), "--compare_data=pydoc: goes with --compare only"),
        (("--data=digits", "--compare", "--compare_data=pydoc"), "--compare_data=pydoc: "),
        (("--data=digits", "--compare", "--compare_data=photos"), "--compare_data=photos: "),
        (("--data=digits", "--compare", "--rounds=0"), "--rounds=0"),
    ],
)
def test_refusals_come_without_tensorflow(tmp_path, flags, said):
    done = measure(*flags, cwd=tmp_path, env=environment_without_tensorflow(tmp_path / "blocker"))
    assert done.returncode == 2
    assert said in done.stdout
    assert "tfbench.input --help" in done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "tfbench_results").exists()


@pytest.mark.slow
def test_a_user_learns_how_many_gpus_the_host_feeds(tmp_path):
    run = SYNTHETIC | {"model": "resnet_tiny", "samples_per_sec_per_gpu": 50.0}
    records.append(tmp_path / "tfbench_results" / "runs.csv", RunRecord(**run))
    flags = (
        "--model=resnet_tiny",
        "--data=digits",
        "--image_size=16",
        "--gpus=0",
        "--per_replica_batch_size=4",
    )
    done = measure(*flags, "--seconds=0.5", "--windows=4", "--tag=mine", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (cells,) = cells_of(tmp_path / "tfbench_results" / "input.csv")
    rate = float(cells["samples_per_sec"])
    assert float(cells["gpus_fed"]) == pytest.approx(rate / 50)
    assert float(cells["samples_per_sec_low"]) <= rate <= float(cells["samples_per_sec_high"])
    # 16 × 16 × 3 bytes and an int32 label a sample.
    assert float(cells["batch_bytes_per_sec"]) == pytest.approx(772 * rate)
    assert float(cells["samples_per_core_per_sec"]) == pytest.approx(rate / float(cells["cores_busy"]))
    assert [each.partition("=")[0] for each in cells["stages"].split("|")] == [
        "sample",
        "batch",
        "to the replicas",
    ]
    assert (cells["status"], cells["windows"], cells["tag"]) == ("ok", "4", "mine")
    assert f"{rate:,.0f} samples/s" in done.stdout
    assert "of 50 samples/s each (run known: tf32, batch 8 on H200)" in done.stdout


@pytest.mark.slow
def test_a_user_learns_what_the_parts_of_the_input_bring(tmp_path):
    flags = ("--model=resnet_tiny", "--data=digits", "--image_size=16", "--gpus=0", "--tag=mine")
    done = measure(*flags, "--compare", "--seconds=0.2", "--rounds=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = cells_of(tmp_path / "tfbench_results" / "input_compare.csv")
    assert [cells["variant"] for cells in rows] == ["as it is", "order kept", "no prefetch", "one thread"]
    assert [float(rows[0][name]) for name in ("ratio", "ratio_low", "ratio_high")] == [1, 1, 1]
    for cells in rows:
        assert (cells["status"], cells["rounds"], cells["tag"]) == ("ok", "2", "mine")
        assert float(cells["ratio_low"]) <= float(cells["ratio"]) <= float(cells["ratio_high"])
        cores_busy = float(cells["cpu_us_per_sample"]) * float(cells["samples_per_sec"]) / 1e6
        assert float(cells["cores_busy"]) == pytest.approx(cores_busy)
        assert f"{float(cells['samples_per_sec']):,.0f}" in done.stdout
    assert "--rounds=2" in rows[0]["flags"]


def test_what_cannot_be_read_leaves_a_row_that_says_so(tmp_path):
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "photos" / "cats" / "broken.jpg").write_bytes(b"no image")
    done = measure("--model=resnet_tiny", "--data=folder:photos", "--gpus=0", "--seconds=0.2", cwd=tmp_path)
    assert done.returncode == 1
    (cells,) = cells_of(tmp_path / "tfbench_results" / "input.csv")
    assert (cells["status"], cells["samples_per_sec"]) == ("failed", "")
    assert "broken.jpg" in cells["note"]
    assert "broken.jpg" in done.stdout
