import csv
import dataclasses
import fcntl
import logging
import math
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

from tfbench import records
from tfbench.records import COLUMNS, RunRecord, SchemaError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "runs.csv"  # the folder does not exist yet


def raw_rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Writing and reading.


def test_append_makes_folder_header_and_rows(path):
    for run_id in ("a", "b"):
        records.append(path, RunRecord(run_id=run_id))

    lines = path.read_text().splitlines()
    assert lines[0].split(",") == list(COLUMNS)
    assert [row["run_id"] for row in raw_rows(path)] == ["a", "b"]
    assert len(lines) == 3


def test_empty_file_gets_a_header(path):
    path.parent.mkdir()
    path.touch()
    assert records.read(path) == []
    records.append(path, RunRecord(run_id="a"))
    assert [row.run_id for row in records.read(path)] == ["a"]


def test_what_is_no_text_is_refused(path):
    records.append(path, RunRecord(run_id="a"))
    with open(path, "ab") as file:
        file.write(b"\xff\xfe\n")
    with pytest.raises(SchemaError, match="no text"):
        records.read(path)


def test_missing_file_is_said(path):
    with pytest.raises(FileNotFoundError, match=r"runs\.csv"):
        records.read(path)


def test_unknown_is_an_empty_cell_and_never_zero(path):
    records.append(path, RunRecord(num_gpus=0, gpu_util_mean=0.0, xla=False))
    (row,) = raw_rows(path)
    known = {name: cell for name, cell in row.items() if cell}
    assert known == {
        "num_gpus": "0",
        "gpu_util_mean": "0.0",
        "xla": "False",
        "schema_version": str(records.SCHEMA_VERSION),
    }
    (record,) = records.read(path)
    assert record == RunRecord(num_gpus=0, gpu_util_mean=0.0, xla=False)
    assert record.mfu is None


@pytest.mark.parametrize(
    ("name", "value", "cell"),
    [
        ("num_params", 25_557_032, "25557032"),
        ("flops_per_sample", 2**60 + 1, "1152921504606846977"),
        ("samples_per_sec", 0.1 + 0.2, "0.30000000000000004"),
        ("samples_per_sec", 1 / 3 * 1e-300, repr(1 / 3 * 1e-300)),
        ("samples_per_sec_high", math.inf, "inf"),
        ("xla", True, "True"),
        ("weights_finite", False, "False"),
        ("compute_capability", "9.0", "9.0"),
        ("tag", " 007 ", " 007 "),
        ("note", "two, three", "two, three"),
        ("note", 'he said "no"', 'he said "no"'),
        ("note", "größer ✓ 好 🙂", "größer ✓ 好 🙂"),
        ("note", "'", "'"),
    ],
)
def test_round_trip_of_every_type(path, name, value, cell):
    records.append(path, RunRecord(**{name: value}))
    assert raw_rows(path)[0][name] == cell
    (record,) = records.read(path)
    assert getattr(record, name) == value
    assert type(getattr(record, name)) is type(value)


def test_nan_stays_nan(path):
    records.append(path, RunRecord(loss_last=float("nan")))
    assert math.isnan(records.read(path)[0].loss_last)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("loss_last", np.float32(0.1), float(np.float32(0.1))),
        ("mfu", np.float64(0.3), 0.3),
        ("steps_skipped", np.int64(3), 3),
        ("weights_finite", np.False_, False),
    ],
)
def test_numpy_scalars_are_written_as_plain_values(path, name, value, plain):
    records.append(path, RunRecord(**{name: value}))
    assert getattr(records.read(path)[0], name) == plain


def test_fraction_in_a_count_is_refused_before_anything_is_written(path):
    with pytest.raises(TypeError):
        records.append(path, RunRecord(measured_steps=2.5))
    assert not path.exists()


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r", "\u2028", "\x0b"])
def test_a_row_is_always_one_line(path, newline):
    records.append(path, RunRecord(run_id="a", note=f"first{newline}second", tag="x"))
    assert len(path.read_text().splitlines()) == 2
    assert records.read(path)[0].note == "first second"


def test_text_that_is_no_unicode_does_not_cost_the_row(path):
    records.append(path, RunRecord(run_id="a", note=os.fsdecode(b"no such file: \xff")))
    assert records.read(path)[0].note == r"no such file: \udcff"


def test_a_note_beyond_what_readers_take_is_shortened(path):
    records.append(path, RunRecord(run_id="a", note="x" * 1_000_000, flags="--gpus=1"))
    (record,) = records.read(path)
    assert set(record.note) == {"x"}
    assert record.flags == "--gpus=1"


def test_a_misspelt_column_is_an_error():
    record = RunRecord()
    with pytest.raises(AttributeError):
        record.sample_per_sec = 1.0


# Several writers.


def _append_rows(path, writer, count, barrier):
    barrier.wait()
    for index in range(count):
        records.append(path, RunRecord(run_id=f"{writer}-{index}", note="n" * 3000))


def test_concurrent_appends_leave_whole_rows_and_one_header(path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    writers = [context.Process(target=_append_rows, args=(path, w, 25, barrier)) for w in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert [writer.exitcode for writer in writers] == [0] * 4
    rows = records.read(path)
    assert sorted(row.run_id for row in rows) == sorted(f"{w}-{i}" for w in range(4) for i in range(25))
    assert {row.note for row in rows} == {"n" * 3000}
    assert path.read_text().count("run_id,run_key") == 1


@pytest.mark.parametrize("use", [records.read, lambda path: records.append(path, RunRecord(run_id="mine"))])
def test_a_row_that_is_being_written_is_waited_for(path, use, caplog):
    records.append(path, RunRecord(run_id="first"))
    records.append(path, RunRecord(run_id="theirs"))
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with open(path, "ab") as other_writer:
        fcntl.flock(other_writer, fcntl.LOCK_EX)
        with futures.ThreadPoolExecutor() as pool:
            ours = pool.submit(use, path)
            assert not futures.wait([ours], timeout=0.3).done  # would be done at once without the lock
            other_writer.write(content[-20:])
            other_writer.flush()
            fcntl.flock(other_writer, fcntl.LOCK_UN)
            ours.result()

    assert [row.run_id for row in records.read(path)][:2] == ["first", "theirs"]
    assert not caplog.records


def test_row_is_on_disk_when_append_returns(path, monkeypatch):
    bytes_at_sync = []
    monkeypatch.setattr(os, "fsync", lambda file: bytes_at_sync.append(os.fstat(file).st_size))
    records.append(path, RunRecord(run_id="a"))
    assert bytes_at_sync == [path.stat().st_size]


# Torn last lines.


@pytest.fixture
def torn_path(path):
    """Two whole rows and the beginning of a third, cut inside a character of two bytes."""
    for run_id in ("a", "b"):
        records.append(path, RunRecord(run_id=run_id))
    whole = path.read_bytes()
    records.append(path, RunRecord(run_id="torn", note="größer"))
    content = path.read_bytes()
    path.write_bytes(content[: content.index("ö".encode(), len(whole)) + 1])
    return path


def test_torn_line_is_reported_and_dropped_on_reading(torn_path, caplog):
    before = torn_path.read_bytes()
    with caplog.at_level(logging.WARNING):
        assert [row.run_id for row in records.read(torn_path)] == ["a", "b"]
    assert "unfinished last line" in caplog.text
    assert "torn" in caplog.text
    assert torn_path.read_bytes() == before


def test_torn_line_is_cut_off_before_appending(torn_path, caplog):
    with caplog.at_level(logging.WARNING):
        records.append(torn_path, RunRecord(run_id="c"))
    assert "unfinished last line" in caplog.text
    caplog.clear()
    assert [row.run_id for row in records.read(torn_path)] == ["a", "b", "c"]
    assert not caplog.records


def test_torn_header_is_written_anew(path, caplog):
    path.parent.mkdir()
    path.write_text(",".join(COLUMNS)[:100])
    assert records.read(path) == []
    records.append(path, RunRecord(run_id="a"))
    assert "unfinished last line" in caplog.text
    assert [row.run_id for row in records.read(path)] == ["a"]


# Other schemas.

OTHER_FILES = {
    "column missing": ",".join(COLUMNS[:-1]) + "\n",
    "column more": ",".join((*COLUMNS, "extra")) + "\n",
    "columns in another order": ",".join(reversed(COLUMNS)) + "\n",
    "no header": "," * (len(COLUMNS) - 1) + "\n",
    "another version": ",".join(COLUMNS) + "\n,,,999" + "," * (len(COLUMNS) - 4) + "\n",
    "another torn file": "name,rate",
    "another file": "Dear diary,\ntoday\n",
    "blank line first": "\n" + ",".join(COLUMNS) + "\n",
}


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES.keys())
@pytest.mark.parametrize("use", [records.read, lambda path: records.append(path, RunRecord(run_id="a"))])
def test_other_schema_is_refused_and_left_as_it_is(path, use, content):
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(SchemaError, match=re.escape(str(path))) as caught:
        use(path)
    assert "--results_dir" in str(caught.value)
    assert path.read_text() == content


def test_schema_error_names_version_and_columns(path):
    path.parent.mkdir()
    path.write_text("run_id,schema_version,speed\nold,0,12.5\n")
    with pytest.raises(SchemaError) as caught:
        records.read(path)
    message = str(caught.value)
    assert "schema version 0 with 3 columns" in message
    assert f"version {records.SCHEMA_VERSION} with {len(COLUMNS)}" in message
    assert "not known here: speed" in message
    assert "run_key" in message


def test_file_saved_with_windows_line_ends_is_read(path):
    records.append(path, RunRecord(run_id="a", xla=True, flags="--gpus=1"))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert records.read(path) == [RunRecord(run_id="a", xla=True, flags="--gpus=1")]


@pytest.mark.parametrize(("name", "cell"), [("num_gpus", "two"), ("xla", "yes"), ("mfu", "n/a")])
def test_cell_that_is_no_value_of_its_column_is_named(path, name, cell):
    records.append(path, RunRecord(run_id="a"))
    cells = ["" if column != name else cell for column in COLUMNS]
    with open(path, "a") as file:
        file.write(",".join(cells) + "\n")
    with pytest.raises(SchemaError, match=f"line 3: {name}='{cell}'"):
        records.read(path)


def test_row_with_a_cell_too_few_is_named(path):
    records.append(path, RunRecord(run_id="a"))
    with open(path, "a") as file:
        file.write("b,\n")
    with pytest.raises(SchemaError, match=f"line 3: 2 cells for {len(COLUMNS)} columns"):
        records.read(path)


# Older schemas.

# What a schema did not have yet.
ADDED_BY_4 = {"environment", "graphics_active"}
ADDED_BY_3 = ADDED_BY_4 | {"strong_scaling_efficiency_low", "strong_scaling_efficiency_high", "gpu_uuids"}
LACKS = {
    1: ADDED_BY_3 | {
        "parallel_runs", "between_runs_percent", "records_skipped", "gpu_indices", "topology", "cpu_cores",
    },
    2: ADDED_BY_3,
    3: ADDED_BY_4,
}  # fmt: skip
OLD_ROWS = (
    {"run_id": "a", "num_gpus": "2", "samples_per_sec": "0.30000000000000004", "xla": "True"},
    {"run_id": "b", "note": 'größer, "quoted"', "status": "oom"},
)
A_AND_B = [
    RunRecord(run_id="a", num_gpus=2, samples_per_sec=0.1 + 0.2, xla=True),
    RunRecord(run_id="b", note='größer, "quoted"', status="oom"),
]


def write_old(path, version):
    """A file as an older schema wrote it."""
    path.parent.mkdir()
    with open(path, "w", newline="", encoding="utf-8") as file:
        columns = [name for name in COLUMNS if name not in LACKS[version]]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({"schema_version": str(version)} | row for row in OLD_ROWS)
    return path


@pytest.fixture
def v1_path(path):
    return write_old(path, 1)


def names_in(folder):
    return sorted(each.name for each in folder.iterdir())


def migrate_in_a_process(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "tfbench.records", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )


def test_every_older_schema_is_tested():
    assert list(LACKS) == list(range(1, records.SCHEMA_VERSION))


@pytest.mark.parametrize("version", LACKS)
def test_rows_of_older_schemas_are_read_with_the_new_columns_unknown(path, version):
    before = write_old(path, version).read_bytes()
    rows = records.read(path)
    assert rows == [dataclasses.replace(row, schema_version=version) for row in A_AND_B]
    assert {getattr(row, name) for row in rows for name in LACKS[version]} == {None}
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "use", [lambda path: records.append(path, RunRecord(run_id="c")), records.check_appendable]
)
@pytest.mark.parametrize("version", LACKS)
def test_a_row_is_not_appended_to_an_older_schema(path, version, use):
    before = write_old(path, version).read_bytes()
    with pytest.raises(SchemaError) as caught:
        use(path)
    message = str(caught.value)
    assert f"is of schema version {version}, this tfbench writes version 4" in message
    assert f"python -m tfbench.records --migrate={path}," in message
    assert "--results_dir" in message
    assert path.read_bytes() == before


def test_the_command_in_the_refusal_is_one_for_a_shell(tmp_path, v1_path):
    odd = v1_path.rename(tmp_path / "my runs.csv")
    with pytest.raises(SchemaError, match=re.escape(f"--migrate='{odd}'")):
        records.append(odd, RunRecord(run_id="c"))


def test_a_file_of_this_schema_and_none_at_all_can_be_appended_to(path):
    records.check_appendable(path)
    assert not path.exists()
    records.append(path, RunRecord(run_id="a"))
    records.check_appendable(path)


@pytest.mark.parametrize("version", LACKS)
def test_migrating_keeps_the_rows_and_the_old_file(path, version):
    write_old(path, version).chmod(0o640)
    before = path.read_bytes()
    backup = records.migrate(path)

    assert backup == path.with_name(f"runs.csv.v{version}")
    assert backup.read_bytes() == before
    assert path.read_text(encoding="utf-8").splitlines()[0].split(",") == list(COLUMNS)
    assert records.read(path) == [dataclasses.replace(row, schema_version=4) for row in A_AND_B]
    assert path.stat().st_mode & 0o777 == 0o640
    assert names_in(path.parent) == ["runs.csv", f"runs.csv.v{version}"]
    records.append(path, RunRecord(run_id="c", strong_scaling_efficiency_low=0.75))
    ends = [(row.run_id, row.strong_scaling_efficiency_low) for row in records.read(path)]
    assert ends == [("a", None), ("b", None), ("c", 0.75)]


def test_what_is_migrated_is_left_as_it_is(v1_path):
    records.migrate(v1_path)
    before = (v1_path.read_bytes(), v1_path.stat().st_ino)
    assert records.migrate(v1_path) is None
    assert (v1_path.read_bytes(), v1_path.stat().st_ino) == before


def test_the_unfinished_line_of_an_old_file_is_only_in_the_backup(v1_path, caplog):
    with open(v1_path, "ab") as file:
        file.write("torn,größ".encode()[:-1])
    before = v1_path.read_bytes()
    backup = records.migrate(v1_path)
    assert "unfinished last line" in caplog.text
    assert [row.run_id for row in records.read(v1_path)] == ["a", "b"]
    assert backup.read_bytes() == before


def test_another_file_where_the_old_one_goes_is_kept(v1_path):
    before = v1_path.read_bytes()
    other = v1_path.with_name("runs.csv.v1")
    other.write_text("mine")
    with pytest.raises(FileExistsError, match=re.escape(f"{other} is in the way")):
        records.migrate(v1_path)
    assert (other.read_text(), v1_path.read_bytes()) == ("mine", before)


def test_a_row_that_does_not_fit_is_named_before_anything_is_written(v1_path):
    with open(v1_path, "a") as file:
        file.write("c,\n")
    before = v1_path.read_bytes()
    with pytest.raises(SchemaError, match="line 4: 2 cells"):
        records.migrate(v1_path)
    assert v1_path.read_bytes() == before
    assert names_in(v1_path.parent) == ["runs.csv"]


def test_a_full_disk_leaves_nothing_behind(v1_path, monkeypatch):
    before = v1_path.read_bytes()

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        records.migrate(v1_path)
    assert names_in(v1_path.parent) == ["runs.csv"]
    assert v1_path.read_bytes() == before


def test_a_rename_that_failed_can_be_tried_again(v1_path, monkeypatch):
    before = v1_path.read_bytes()
    replace = Path.replace

    def fail_for_the_file_itself(new, target):
        if target == v1_path:
            raise PermissionError(1, "not this one")
        return replace(new, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", fail_for_the_file_itself)
        with pytest.raises(PermissionError, match="not this one"):
            records.migrate(v1_path)
    assert v1_path.read_bytes() == before
    assert set(names_in(v1_path.parent)) <= {"runs.csv", "runs.csv.v1"}

    assert records.migrate(v1_path).read_bytes() == before
    assert [row.schema_version for row in records.read(v1_path)] == [4, 4]


def test_migrating_is_a_command(v1_path):
    done = migrate_in_a_process("--migrate=runs.csv", cwd=v1_path.parent)
    assert (done.returncode, done.stdout) == (0, "runs.csv: schema version 4, the old file is runs.csv.v1\n")
    again = migrate_in_a_process("--migrate=runs.csv", cwd=v1_path.parent)
    assert (again.returncode, again.stdout) == (0, "runs.csv: schema version 4, nothing to do\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--migrate=diary.txt"], "diary.txt has schema version unknown"),
        (["--migrate=missing.csv"], "No such file or directory: 'missing.csv'"),
        (["diary.txt"], "files are named as --migrate=FILE"),
    ],
)
def test_what_cannot_be_migrated_ends_with_an_error(tmp_path, arguments, message):
    (tmp_path / "diary.txt").write_text("Dear diary,\ntoday\n")
    done = migrate_in_a_process(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert (tmp_path / "diary.txt").read_text() == "Dear diary,\ntoday\n"


# The row to scale against.

FLAGS = (
    "--model=resnet50 --gpus={gpus} --per_replica_batch_size=256 --seed={gpus} --steps={gpus}00 "
    "--windows={gpus} --warmup_steps={gpus}0 --tag='run of {gpus}' --results_dir=r{gpus} "
    "--tensorboard={tensorboard} --profile_steps={gpus} --deterministic=False"
)


def gpu_row(gpus, /, **changes):
    row = RunRecord(
        run_id=f"gpu{gpus}",
        started_at="2026-01-02T03:04:05+00:00",
        status="ok",
        model="resnet50",
        data="synthetic",
        precision="mixed_bfloat16",
        xla=True,
        strategy="mirrored" if gpus > 1 else "one_device",
        scaling_mode="weak",
        num_gpus=gpus,
        num_replicas=gpus,
        per_replica_batch_size=256,
        global_batch_size=256 * gpus,
        accumulate=1,
        image_size=224,
        optimizer="sgd",
        steps_per_loop=10,
        samples_per_sec=1000.0 * gpus,
        gpu_name="NVIDIA H200",
        driver="580.1",
        tensorflow="2.21.0",
        keras="3.15.1",
        host="node1",
        flags=FLAGS.format(gpus=gpus, tensorboard=gpus > 1),
    )
    return dataclasses.replace(row, **changes)


def test_baseline_is_the_row_alike_but_for_replicas():
    one = gpu_row(1)
    assert records.find_baseline([gpu_row(2), one, gpu_row(4)], gpu_row(4)) is one


def test_newest_baseline_wins_wherever_it_stands():
    days = ("2026-01-05", "2026-03-01", "2026-02-09", None)
    rows = [gpu_row(1, started_at=day and f"{day}T00:00:00+00:00") for day in days]
    assert records.find_baseline(rows, gpu_row(4)) is rows[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", "failed"), ("status", None), ("samples_per_sec", None), ("num_gpus", 0), ("num_gpus", 2),
        ("num_gpus", None), ("model", "resnet_tiny"), ("data", "embedded"), ("precision", "tf32"),
        ("xla", False), ("xla", None), ("scaling_mode", "strong"), ("per_replica_batch_size", 128),
        ("accumulate", 2), ("seq_length", 128), ("image_size", 160), ("optimizer", "lamb"),
        ("steps_per_loop", 1), ("gpu_name", "NVIDIA L4"), ("driver", "575.1"), ("tensorflow", "2.20.0"),
        ("keras", "3.13.0"), ("host", "node2"), ("parallel_runs", 2),
        ("flags", FLAGS.format(gpus=1, tensorboard=True).replace("c=False", "c=True")),
        ("flags", FLAGS.format(gpus=1, tensorboard=True) + " --dropout=0.1"),
        ("flags", None),
    ],
)  # fmt: skip
def test_each_difference_blocks_the_baseline(name, value):
    assert records.find_baseline([gpu_row(1, **{name: value})], gpu_row(4)) is None


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [
        ("GPU-a", "GPU-a,GPU-b", True), ("GPU-b", "GPU-a,GPU-b", True), ("GPU-c", "GPU-a,GPU-b", False),
        (None, "GPU-a,GPU-b", True), ("GPU-a", None, True),
    ],
)  # fmt: skip
def test_the_baseline_is_of_one_of_the_same_cards(theirs, ours, found):
    one = gpu_row(1, gpu_uuids=theirs)
    assert records.find_baseline([one], gpu_row(2, gpu_uuids=ours)) is (one if found else None)


@pytest.mark.parametrize(
    ("theirs", "found"), [("none", False), ("XLA_FLAGS=--a", True), (None, True), ("XLA_FLAGS=--b", False)]
)
def test_baseline_is_of_the_same_environment_where_that_is_known(theirs, found):
    one = gpu_row(1, environment=theirs)
    record = gpu_row(2, environment="XLA_FLAGS=--a")
    assert records.find_baseline([one], record) is (one if found else None)


@pytest.mark.parametrize(
    ("name", "other"),
    [("power_limit_w", 400.0), ("sm_clock_mhz_max", 1500.0), ("cudnn", "8.9")],
)
def test_the_baseline_is_of_the_same_limits_where_they_are_known(name, other):
    known = {"power_limit_w": 700.0, "sm_clock_mhz_max": 1980.0, "cudnn": "9.19"}
    record, one = gpu_row(2, **known), gpu_row(1, **known | {name: other})
    assert records.find_baseline([one], record) is None
    for unknown in (gpu_row(1, **known | {name: None}), gpu_row(1, **known)):
        assert records.find_baseline([one, unknown], record) is unknown


def test_the_baseline_of_unlike_cards_is_their_mean():
    def one(card, rate, half, **changes):
        ends = {"samples_per_sec_low": rate - half, "samples_per_sec_high": rate + half}
        return gpu_row(1, run_id=f"on {card}", gpu_uuids=card, samples_per_sec=rate, **ends, **changes)

    rows = [one("GPU-a", 90.0, 1.0, started_at="2025"), one("GPU-a", 100.0, 3.0), one("GPU-b", 110.0, 4.0)]
    rows += [one(None, 200.0, 1.0), one("GPU-c", 300.0, 1.0)]
    found = records.find_baseline(rows, gpu_row(2, gpu_uuids="GPU-a,GPU-b"))
    assert found.run_id == "on GPU-a|on GPU-b"
    assert found.samples_per_sec == found.samples_per_sec_per_gpu == 105.0
    # 3 and 4 in quadrature are 5, of the mean half of that.
    assert (found.samples_per_sec_low, found.samples_per_sec_high) == (102.5, 107.5)
    assert found.step_time_ms_mean == pytest.approx(1000 * 256 / 105)
    rows[1].samples_per_sec_low = None
    found = records.find_baseline(rows, gpu_row(2, gpu_uuids="GPU-a,GPU-b"))
    assert (found.samples_per_sec_low, found.samples_per_sec_high) == (None, 107.5)


@pytest.mark.parametrize("parallel_runs", [None, 1])
def test_a_row_that_ran_alone_is_a_baseline(parallel_runs):
    one = gpu_row(1, parallel_runs=parallel_runs)
    assert records.find_baseline([gpu_row(1, parallel_runs=2), one], gpu_row(4, parallel_runs=2)) is one


def test_order_of_flags_does_not_matter():
    one = gpu_row(1)
    one.flags = shlex.join(reversed(shlex.split(one.flags)))
    assert records.find_baseline([one], gpu_row(4)) is one


@pytest.mark.parametrize("num_gpus", [None, 0, 1])
def test_rows_that_scale_nothing_have_no_baseline(num_gpus):
    record = gpu_row(1, num_gpus=num_gpus)
    assert records.find_baseline([gpu_row(1), gpu_row(1, num_gpus=0)], record) is None


def test_strong_scaling_compares_the_global_batch():
    record = gpu_row(4, scaling_mode="strong", per_replica_batch_size=64, global_batch_size=256)
    record.flags = record.flags.replace("batch_size=256", "batch_size=64")
    same_global = gpu_row(1, scaling_mode="strong")
    same_local = gpu_row(1, scaling_mode="strong", per_replica_batch_size=64, global_batch_size=64)
    assert records.find_baseline([same_global, same_local], record) is same_global


def test_a_compile_cache_does_not_block_the_baseline():
    record, one = gpu_row(2), gpu_row(1)
    record.flags += " --compile_cache=True"
    one.flags += " --compile_cache=False"
    assert records.find_baseline([one], record) is one


def test_where_sums_are_made_does_not_block_the_baseline():
    record = gpu_row(2)
    record.flags += " --collectives=update"
    one = gpu_row(1)
    one.flags += " --collectives=outside"
    assert records.find_baseline([one], record) is one
    assert "collectives" not in records.baseline_command(record)


@pytest.mark.parametrize(("data", "found"), [("synthetic", False), ("digits", True)])
def test_weights_that_move_at_another_pace_are_no_baseline_on_synthetic_data(data, found):
    """The warm-up is then not a part of the run; a card's rate depends on the values that it computes."""
    record, one = (gpu_row(gpus, data=data) for gpus in (2, 1))
    record.flags += " --lr_warmup_steps=10000"
    one.flags += " --lr_warmup_steps=22"
    assert (records.find_baseline([one], record) is one) == found


def test_searched_batch_does_not_block_the_baseline():
    record = gpu_row(4, requested_per_replica_batch_size=512)
    record.flags += " --requested_per_replica_batch_size=512"
    one = gpu_row(1)
    assert records.find_baseline([one], record) is one


def test_baseline_survives_the_file(path):
    for row in (gpu_row(1), gpu_row(4)):
        records.append(path, row)
    rows = records.read(path)
    assert records.find_baseline(rows, rows[1]).run_id == "gpu1"


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        (
            {"flags": "--model=bert --gpus=8 --xla=True --per_replica_batch_size=256"},
            "python -m tfbench.train --model=bert --xla=True --per_replica_batch_size=256 --gpus=1",
        ),
        (
            {"flags": "--per_replica_batch_size=512 --model=bert --gpus=8 --tag='two words'"},
            "python -m tfbench.train --model=bert '--tag=two words' --per_replica_batch_size=256 --gpus=1",
        ),
        (
            {
                "flags": "--model=bert --per_replica_batch_size=16 --accumulate=2 --gpus=8",
                "scaling_mode": "strong",
                "per_replica_batch_size": 16,
                "accumulate": 2,
                "global_batch_size": 256,
            },
            "python -m tfbench.train --model=bert --accumulate=2 --per_replica_batch_size=128 --gpus=1",
        ),
        (
            {"flags": "--model=bert --per_replica_batch_size=16", "per_replica_batch_size": None},
            "python -m tfbench.train --model=bert --per_replica_batch_size=16 --gpus=1",
        ),
    ],
)
def test_baseline_command(changes, command):
    assert records.baseline_command(gpu_row(8, **changes)) == command


def test_baseline_command_needs_flags():
    with pytest.raises(ValueError, match="gpu8 has no flags"):
        records.baseline_command(gpu_row(8, flags=None))


# The table for people.


def test_module_prints_a_row_for_every_column():
    root = Path(__file__).parents[1]
    table = subprocess.run(
        [sys.executable, "-m", "tfbench.records"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
    assert [cell.strip() for cell in lines[0]] == ["column", "unit", "meaning"]
    body = [[cell.strip() for cell in line] for line in lines[2:]]
    assert [line[0] for line in body] == [f"`{name}`" for name in COLUMNS]
    assert all(len(line) == 3 and line[2] for line in body)
    units = {line[0].strip("`"): line[1] for line in body}
    assert (units["step_time_ms_p50"], units["peak_memory_gib"], units["power_w_mean"]) == ("ms", "GiB", "W")


def test_measuring_and_records_need_no_tensorflow():
    code = (
        "import sys, tfbench.records;"
        "from tfbench.measure import gates, statistics, timing;"
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
