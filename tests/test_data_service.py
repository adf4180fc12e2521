"""Images through a real tf.data service against what Pillow reads; services that are not there."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from data_helpers import (
    IMAGE_MODEL,
    NUM_CLASSES,
    NUM_IMAGES,
    config_of,
    numbered_image,
    numbers_of,
    write_numbered_images,
    write_numbered_records,
)
from run_helpers import DEADLINE_S, environment, only_row, python, train
from step_helpers import strategy_of

from tfbench.config import ConfigError
from tfbench.data import Input, Shard, open_input, parse, require_data_service, service
from tfbench.data.spec import UnreadableError

COMMAND = ("-m", "tfbench.data_service")


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process of a service of its own session, which must leave nothing behind."""
    with subprocess.Popen(
        [sys.executable, *COMMAND, "--port=0", *flags],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        alarm = threading.Timer(DEADLINE_S, process.kill)
        alarm.start()
        try:
            line = process.stdout.readline()
            alarm.cancel()
            match = re.search(r"--data_service=(grpc://localhost:\d+)", line)
            assert match, line
            yield match[1], process
        finally:
            process.terminate()
            process.wait()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("service"), "--workers=2") as (found, _):
        yield found


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def records(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_records(images, tmp_path_factory.mktemp("records"))


class Numbered(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The same images as prepared by TensorFlow Datasets."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Any:
        for number in range(NUM_IMAGES):
            yield number, {"image": np.asarray(numbered_image(number)), "label": number % NUM_CLASSES}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tensorflow_datasets"))
    Numbered(data_dir=folder).download_and_prepare()
    return folder


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", ["folder", "tfrecord", "tfds"])
def test_labels_are_right_and_no_image_is_preferred(
    name: str, num_replicas: int, address: str, images: Path, records: Path, data_dir: str
) -> None:
    data = {"folder": f"folder:{images}", "tfrecord": f"tfrecord:{records}/train-*", "tfds": "tfds:numbered"}
    config = config_of(
        data[name],
        data_dir=data_dir,
        data_service=address,
        cpu_replicas=num_replicas,
        per_replica_batch_size=8 // num_replicas,
    )
    require_data_service(config, parse(config.data)[0])
    strategy = strategy_of(num_replicas)
    source = open_input(config, IMAGE_MODEL, strategy)
    assert source.log.notes == [f"data service: {address} has 2 worker(s)"]
    seen: Counter[int] = Counter()
    epochs = 10
    for _ in range(epochs * NUM_IMAGES // config.global_batch_size):
        batch = source.next()
        parts = [strategy.experimental_local_results(batch[key]) for key in ("image", "label")]
        for image, label in zip(*parts, strict=True):
            numbers = numbers_of(image.numpy())
            np.testing.assert_array_equal(label.numpy(), numbers % NUM_CLASSES)
            seen.update(numbers.tolist())
    assert len(seen) == NUM_IMAGES
    # What is under way at the end, and one worker that is an epoch ahead.
    assert max(seen.values()) <= epochs + 3
    assert min(seen.values()) >= epochs - 3


@pytest.mark.parametrize("at_once", [1, 64])
def test_an_epoch_is_dealt_once_over_all_workers(at_once: int, address: str) -> None:
    config = config_of("folder:x", data_service=address)
    numbers = list(range(1000))
    rows = service.dealt((numbers, [f"{n}" for n in numbers]), config, Shard(0, 1), at_once=at_once)
    computed = service.computed(rows, config, Shard(0, 1))
    # There would be twice as many, if each worker had its own.
    got = list(itertools.islice(computed.as_numpy_iterator(), len(numbers)))
    assert sorted(int(number) for number, _ in got) == numbers
    assert all(b"%d" % number == text for number, text in got)


def test_shards_are_dealt_different_rows() -> None:
    config = config_of("folder:x", seed=3)
    parts = [
        [int(n) for (n,) in service.dealt((list(range(100)),), config, Shard(i, 3), at_once=7)]
        for i in range(3)
    ]
    assert sorted(itertools.chain(*parts)) == list(range(100))
    assert parts[0] != sorted(parts[0])


def test_visits_differ() -> None:
    tf.random.set_seed(0)
    once = {int(service.any_visit()) for _ in range(100)}
    tf.random.set_seed(0)
    again = {int(service.any_visit()) for _ in range(100)}
    assert len(once | again) == 200


def test_a_run_says_where_its_input_comes_from(address: str, images: Path, tmp_path: Path) -> None:
    flags = ("--model=resnet_tiny", f"--data=folder:{images}", "--gpus=0", "--cpu_replicas=2")
    done = train(
        *flags, f"--data_service={address}", "--steps=4", "--windows=2", "--notensorboard", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"data service: {address} has 2 worker(s)" in done.stdout
    row = only_row(tmp_path / "tfbench_results")
    assert f"--data_service={address}" in row.flags
    assert row.status == "ok"
    keys = {config_of("folder:x", data_service=value).run_key for value in (None, address, "grpc://other:1")}
    assert len(keys) == 3


def test_the_input_alone_is_measured_too(address: str, images: Path, tmp_path: Path) -> None:
    flags = ("--model=resnet_tiny", f"--data=folder:{images}", "--gpus=0", "--seconds=0.5", "--windows=2")
    done = python("-m", "tfbench.input", *flags, f"--data_service={address}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No stages: the workers of the data service compute them" in done.stdout


def test_a_broken_image_ends_the_run(address: str, tmp_path: Path) -> None:
    (tmp_path / "class0").mkdir()
    (tmp_path / "class0" / "0.png").write_text("no image")
    config = config_of(f"folder:{tmp_path}", data_service=address)
    source = open_input(config, IMAGE_MODEL, strategy_of(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="Unknown image file format"):
        source.next()


def take_for_ever(source: Input) -> None:
    with source.log.explained():
        while True:
            source.next()


def test_a_service_that_is_lost_ends_the_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WATCH_S", 0.2)
    with served(tmp_path) as (address, process):
        config = config_of(f"folder:{images}", data_service=address)
        source = open_input(config, IMAGE_MODEL, strategy_of(1))
        source.next()
        process.kill()
        process.wait()
        with pytest.raises(UnreadableError, match=f"--data_service={address}: no dispatcher"):
            take_for_ever(source)


def test_a_service_that_is_busy_once_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [1, 0, 0, 1, 0, 1, 0, 0, 0, 1]
    told = []

    def require_answer(address: str) -> None:
        if address != "grpc://host:1":  # threads that watch other tests' services
            time.sleep(1)
        elif not answers.pop(0):
            raise ConfigError("data_service", address, "busy")

    monkeypatch.setattr(service, "WATCH_S", 0.0)
    monkeypatch.setattr(service, "require_answer", require_answer)
    service._watch("grpc://host:1", told.append)
    assert answers == [1]
    assert told == ["--data_service=grpc://host:1: busy"]


# --- refused


def refusal_of(**choices: Any) -> str:
    config = config_of(**{"data": "folder:/images", **choices})
    with pytest.raises(ConfigError) as refused:
        require_data_service(config, parse(config.data)[0])
    return f"{refused.value}"


@pytest.mark.parametrize(
    "value", ["localhost:5050", "grpc://localhost", "grpc://a:1,grpc://b:1", "grpc://:1"]
)
def test_not_an_address(value: str) -> None:
    expected = f"--data_service={value}: expected grpc://HOST:PORT of one dispatcher; "
    assert refusal_of(data_service=value).startswith(expected)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"data": "synthetic"}, "--data_service={0}: goes with images read from files, not with --data=syn"),
        ({"data": "digits"}, "--data_service={0}: goes with images read from files, not with --data=digits"),
        ({"deterministic": True}, "--deterministic=true: false with --data_service={0}: its workers deliver"),
        ({"cache": "auto"}, "--cache=auto: none with --data_service={0}: its workers keep no images"),
        ({"on_bad_record": "skip"}, "--on_bad_record=skip: fail with --data_service={0}: its workers cannot"),
    ],
)  # fmt: skip
def test_choices_that_do_not_go_with_it(choices: dict[str, Any], expected: str) -> None:
    value = "grpc://localhost:1"
    assert refusal_of(data_service=value, **choices).startswith(expected.format(value))


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def test_nobody_answers() -> None:
    value = f"grpc://localhost:{free_port()}"
    refusal = refusal_of(data_service=value)
    assert refusal.startswith(
        f"--data_service={value}: no dispatcher of a tf.data service answers there (UNAVAILABLE"
    )
    assert refusal.endswith("; python -m tfbench.data_service starts one")


def test_another_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ANSWER_TIMEOUT_S", 1.0)
    with socket.create_server(("localhost", 0)) as mute:
        value = f"grpc://localhost:{mute.getsockname()[1]}"
        assert "no dispatcher of a tf.data service answers there" in refusal_of(data_service=value)


@pytest.fixture
def dispatcher() -> Any:
    return tf.data.experimental.service.DispatchServer()


def worker(dispatcher: Any, address: str) -> Any:
    host = dispatcher.target.removeprefix("grpc://")
    config = tf.data.experimental.service.WorkerConfig(dispatcher_address=host, worker_address=address)
    return tf.data.experimental.service.WorkerServer(config)


def test_a_dispatcher_without_workers(dispatcher: Any) -> None:
    assert "has no workers (yet)" in refusal_of(data_service=dispatcher.target)


def test_a_worker_that_cannot_be_reached(dispatcher: Any) -> None:
    unreachable = f"localhost:{free_port()}"
    servers = [worker(dispatcher, "localhost:%port%"), worker(dispatcher, unreachable)]
    assert len(service.workers("data_service", dispatcher.target)) == len(servers)
    assert f"its worker {unreachable} cannot be reached from here" in refusal_of(
        data_service=dispatcher.target
    )


def test_a_worker_is_no_dispatcher(dispatcher: Any) -> None:
    server = worker(dispatcher, "localhost:%port%")
    (address,) = service.workers("data_service", dispatcher.target)
    assert server is not None
    assert grpc.StatusCode.UNIMPLEMENTED.name in refusal_of(data_service=f"grpc://{address}")


# --- python -m tfbench.data_service


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_workers_join(number: signal.Signals, tmp_path: Path) -> None:
    with served(tmp_path) as (address, process):
        assert len(service.workers("data_service", address)) == 1
        if number == signal.SIGTERM:
            with served(tmp_path, f"--join={address}", "--workers=2") as (joined, _):
                assert joined == address
                assert len(service.workers("data_service", address)) == 3
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0


def test_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        done = python(*COMMAND, f"--port={port}", cwd=tmp_path)
    assert done.returncode == 2
    assert f"--port={port}: Address already in use" in done.stdout
    other = python(*COMMAND, f"--join=grpc://localhost:{free_port()}", cwd=tmp_path)
    assert other.returncode == 2
    assert "no dispatcher of a tf.data service answers there" in other.stdout


def test_workers_for_another_host_need_a_name(dispatcher: Any, tmp_path: Path) -> None:
    address = dispatcher.target.replace("localhost", "127.0.0.1")
    done = python(*COMMAND, f"--join={address}", cwd=tmp_path)
    assert done.returncode == 2
    assert f"--host=localhost: expected this host's name for others: --join={address}" in done.stdout
