"""Devices: the environment before TensorFlow starts, and GPUs that it does not see."""

import contextlib
import logging
import os
from pathlib import Path

import pytest
from run_helpers import gpu, machine

from tfbench import devices, malloc
from tfbench.config import BenchmarkConfig, ConfigError

DETERMINISTIC = BenchmarkConfig(model="any", gpus=1, deterministic=True)


@pytest.fixture(autouse=True)
def _tensorflow_logger():
    level = logging.getLogger("tensorflow").level
    yield
    logging.getLogger("tensorflow").setLevel(level)


@pytest.mark.parametrize(("data", "kept"), [("synthetic", 0), ("tfrecord:/data/train-*", 1)])
def test_real_data_keeps_what_it_frees(data, kept, monkeypatch):
    asked = []
    monkeypatch.setattr(malloc, "keep_freed_memory", asked.append)
    devices.set_environment(BenchmarkConfig(model="any", gpus=1, data=data), {})
    assert len(asked) == kept


def test_environment_without_any_settings():
    environ: dict[str, str] = {}
    devices.set_environment(BenchmarkConfig(model="any", gpus=1), environ)
    assert environ == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_GPU_THREAD_MODE": "gpu_private",
        "KERAS_BACKEND": "tensorflow",
    }


def test_users_settings_stay():
    own = {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_GPU_THREAD_MODE": "global",
        "XLA_FLAGS": "--xla_dump_to=/tmp/x",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    environ = dict(own)
    devices.set_environment(BenchmarkConfig(model="any", gpus=1), environ)
    assert environ.items() >= own.items()


def test_devices_are_counted_as_nvml_counts_them():
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    devices.set_environment(BenchmarkConfig(model="any"), environ)
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "--xla_gpu_deterministic_ops=true"),
        ("--xla_dump_to=/tmp/x", "--xla_dump_to=/tmp/x --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
    ],
)
def test_deterministic_flag_is_added_once(before, after):
    environ = {} if before is None else {"XLA_FLAGS": before}
    devices.set_environment(DETERMINISTIC, environ)
    devices.set_environment(DETERMINISTIC, environ)
    assert environ["XLA_FLAGS"] == after


@pytest.mark.parametrize("choices", [{"gpus": 1}, {"deterministic": True}])
def test_deterministic_flag_is_for_deterministic_gpus_only(choices):
    environ: dict[str, str] = {}
    devices.set_environment(BenchmarkConfig(model="any", **choices), environ)
    assert "XLA_FLAGS" not in environ


@pytest.mark.parametrize(
    ("kernels", "before", "after"),
    [
        ("plain", None, None),
        ("fused", None, "--xla_gpu_enable_triton_gemm=false"),
        ("fused", "--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true"),
    ],
)
def test_products_beside_fused_kernels_are_the_librarys(kernels, before, after):
    environ = {} if before is None else {"XLA_FLAGS": before}
    devices.set_environment(BenchmarkConfig(model="any", gpus=1, kernels=kernels), environ)
    assert environ.get("XLA_FLAGS") == after


def test_native_messages_go_to_the_file_and_only_inside(tmp_path: Path, capfd):
    log = tmp_path / "train.log"
    log.write_text("before\n")
    with contextlib.suppress(ValueError), devices.native_messages_to(log):
        os.write(2, b"greeting\n")  # as C++ code writes it
        raise ValueError("ends the block early")
    os.write(2, b"afterwards\n")
    assert log.read_text() == "before\ngreeting\n"
    assert capfd.readouterr().err == "afterwards\n"


@pytest.mark.parametrize(("version", "text"), [(91400, "9.14.0"), (22703, "2.27.3"), (90805, "9.8.5")])
def test_nvidias_numbers_as_versions(version, text):
    assert devices._dotted(version) == text


def test_library_that_is_not_loaded_is_unknown():
    assert devices._loaded_library("libno-such-library.so.1") is None


@pytest.mark.parametrize(
    ("asked", "seen", "with_cuda", "driver_sees", "words"),
    [
        (1, 0, False, 1, ["TensorFlow sees 0; this TensorFlow is built without CUDA", "tfbench[cuda]"]),
        (2, 0, True, 0, ["TensorFlow sees 0; no driver here.", "--gpus=0"]),
        (4, 1, True, 4, ["TensorFlow sees 1, the driver 4", "CUDA library", "train.log"]),
        (2, 1, True, 1, ["TensorFlow sees 1; use --gpus=1 or fewer", "CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_fewer_gpus_than_asked_for_are_refused(monkeypatch, asked, seen, with_cuda, driver_sees, words):
    import tensorflow as tf

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [object()] * seen)
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: with_cuda)
    here = machine(*[gpu()] * driver_sees)
    monkeypatch.setattr("tfbench.hardware.gpus.this_machine", lambda: here)
    with pytest.raises(ConfigError) as refused:
        devices.open_devices(BenchmarkConfig(model="any", gpus=asked))
    message = str(refused.value)
    assert message.startswith(f"--gpus={asked}: ")
    for word in words:
        assert word in message
