import json
import os
import platform

import numpy as np
import pynvml
import pytest
from fake_nvml import FakeCard, FakeNvml

from tfbench.hardware.environment import describe, settings

UUID = "GPU-bbbb0000-0000-0000-0000-000000000000"


def test_this_machine_without_gpus_is_json():
    facts = describe(FakeNvml(init_error=pynvml.NVMLError_LibraryNotFound), {})
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["driver"], facts["cuda_driver_version"], facts["gpus"]) == (None, None, [])
    assert "no NVIDIA driver" in facts["gpus_hidden_because"]
    assert facts["python"] == platform.python_version()
    assert facts["hostname"] == os.uname().nodename
    assert facts["kernel"] == os.uname().release
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["packages"]["nvidia-ml-py"]
    assert facts["cpu"]["logical_cores"] == os.cpu_count()
    assert facts["ram_gib"] == pytest.approx(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, rel=0.01
    )


def test_visible_gpus_with_their_settings():
    nvml = FakeNvml(FakeCard(), FakeCard(uuid=UUID, bus_id="00000000:02:00.0"))
    facts = describe(nvml, {"CUDA_VISIBLE_DEVICES": "1"})
    (gpu,) = facts["gpus"]
    assert json.loads(json.dumps(facts))["gpus"][0]["compute_capability"] == [9, 0]
    assert (facts["driver"], facts["cuda_driver_version"], facts["gpus_installed"]) == (
        "580.65.06",
        "13.0",
        2,
    )
    assert (gpu["index"], gpu["uuid"], gpu["name"], gpu["memory_gib"]) == (1, UUID, "NVIDIA H200", 140.0)
    assert (gpu["power_limit_w"], gpu["pcie_generation"], gpu["pcie_width"]) == (700.0, 5, 16)
    assert (gpu["persistence"], gpu["ecc"], gpu["mig"]) == (True, True, False)
    assert (gpu["sm_clock_mhz_max"], gpu["ecc_errors_uncorrected"], gpu["nvlinks_active"]) == (1980, 0, None)
    assert nvml.references == 0


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w"),
        ("nvmlDeviceGetCurrPcieLinkGeneration", "pcie_generation"),
        ("nvmlDeviceGetCurrPcieLinkWidth", "pcie_width"),
        ("nvmlDeviceGetPersistenceMode", "persistence"),
        ("nvmlDeviceGetEccMode", "ecc"),
        ("nvmlDeviceGetMigMode", "mig"),
    ],
)
def test_an_unknown_setting_is_none_and_leaves_the_others(function, field):
    whole = describe(FakeNvml(FakeCard()), {})["gpus"][0]
    failed = describe(FakeNvml(FakeCard(failing={function: pynvml.NVMLError_NotSupported})), {})["gpus"][0]
    assert whole[field] is not None
    assert failed == {**whole, field: None}


def test_only_variables_that_matter_and_no_secrets():
    kept = {
        "CUDA_VISIBLE_DEVICES": "0",
        "KERAS_BACKEND": "tensorflow",
        "NCCL_DEBUG": "INFO",
        "TF_GPU_THREAD_MODE": "gpu_private",
        "XLA_FLAGS": "--xla_gpu_autotune_level=4",
    }
    dropped = {
        "AWS_SECRET_ACCESS_KEY": "x",
        "HOME": "/root",
        "MY_TF_VALUE": "x",
        "PATH": "/bin",
        "TF_API_KEY": "x",
        "TF_HTTP_PASSWORD": "x",
        "TF_TOKEN_app_terraform_io": "x",
        "TF_VAR_db": "x",
    }
    assert describe(FakeNvml(), {**dropped, **kept})["environment"] == kept


def test_settings_are_what_changes_how_a_program_runs():
    machine = {
        "CUDA_HOME": "/cuda",
        "CUDA_VISIBLE_DEVICES": "1",
        "NCCL_VERSION": "2.28",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    assert settings({**machine, "HOME": "/root", "TF_TOKEN_x": "secret"}) == "none"
    assert settings({"XLA_FLAGS": "--xla_gpu_cuda_data_dir=/cuda  --xla_dump_to=x"}) == "none"
    told = {
        "XLA_FLAGS": "--a=1  --xla_gpu_cuda_data_dir=/cuda --b",
        "NCCL_ALGO": "Ring",
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    assert settings(machine | told) == "NCCL_ALGO=Ring NVIDIA_TF32_OVERRIDE=0 'XLA_FLAGS=--a=1 --b'"


def test_container_is_recognised_by_its_environment():
    assert "kubernetes" in describe(FakeNvml(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})["container"]["signs"]
    assert "kubernetes" not in describe(FakeNvml(), {})["container"]["signs"]
