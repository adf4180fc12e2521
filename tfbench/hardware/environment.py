"""The machine and its software in one JSON object, for a run's system.json. TensorFlow-free."""

import dataclasses
import importlib.metadata
import os
import platform
import re
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pynvml

from tfbench.hardware.cards import card_facts
from tfbench.hardware.gpus import GIB, probe

_PACKAGES = (
    "tfbench",
    "tensorflow",
    "keras",
    "numpy",
    "nvidia-ml-py",
    "tensorflow-datasets",
    "tokenizers",
    "scikit-learn",
)

# Tells a run how many runs its sweep makes side by side on this machine.
PARALLEL_RUNS_VARIABLE = "TFBENCH_PARALLEL_RUNS"

# Variables that change what is measured.
_VARIABLE = re.compile(r"(CUDA_|TF_|NCCL_).*|XLA_FLAGS|KERAS_BACKEND|NVIDIA_TF32_OVERRIDE")
# Of them, those that say where something is, which version it has, which GPUs are seen or what is logged.
_NO_SETTING = re.compile(
    r"CUDA_(HOME|PATH|ROOT|VERSION|PKG|TOOLKIT|VISIBLE_DEVICES|DEVICE_ORDER).*|NCCL_(VERSION|DEBUG).*|TF_CPP_.*"
    r"|KERAS_BACKEND"
)
# Terraform's variables start with TF_ too and hold secrets; the other words are caution.
_SECRET = re.compile(r"TF_(VAR|TOKEN|CLI|CLOUD|HTTP)_|TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY", re.IGNORECASE)

_NO_SETTING_OF_XLA = ("--xla_gpu_cuda_data_dir=", "--xla_dump_")  # where something is
# Before a run has set its own.
_AT_START = dict(os.environ)
NO_SETTINGS = "none"

_CGROUP = Path("/sys/fs/cgroup")


def describe(nvml: Any = pynvml, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Host, GPUs, software and settings; JSON serialisable, None where unknown.

    Args:
        nvml: The `pynvml` module, or what stands for it in a test.
        environ: The run's environment. Only variables of CUDA, TensorFlow, XLA, NCCL and Keras are kept.
    """
    found = probe(nvml, environ)
    return {
        "hostname": socket.gethostname(),
        "os": _os_name(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu": _cpu(),
        "ram_gib": psutil.virtual_memory().total / GIB,
        "container": _container(environ),
        "python": platform.python_version(),
        "packages": _packages(),
        "driver": found.driver,
        "cuda_driver_version": found.cuda,
        "gpus_installed": found.installed,
        "gpus_hidden_because": found.reason or None,
        "gpus": [dataclasses.asdict(gpu) | dataclasses.asdict(card_facts(gpu, nvml)) for gpu in found.gpus],
        "environment": {name: value for name, value in sorted(environ.items()) if _is_told(name)},
    }


def settings(environ: Mapping[str, str] = _AT_START) -> str:
    """What the user's environment tells CUDA, TensorFlow, XLA and NCCL to do otherwise, as a shell would.

    NO_SETTINGS where it tells nothing. Runs with other settings are no repeats.
    """
    told = {
        name: environ[name] for name in sorted(environ) if _is_told(name) and not _NO_SETTING.fullmatch(name)
    }
    if "XLA_FLAGS" in told:
        flags = told["XLA_FLAGS"].split()
        told["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(_NO_SETTING_OF_XLA))
    return shlex.join(f"{name}={value}" for name, value in told.items() if value) or NO_SETTINGS


def _is_told(name: str) -> bool:
    """Whether a variable may and should be written down."""
    return bool(_VARIABLE.fullmatch(name)) and not _SECRET.search(name)


def parallel_runs(environ: Mapping[str, str] = os.environ) -> int:
    """Runs of a sweep side by side on this machine, this one included; 1 outside a sweep."""
    return int(environ.get(PARALLEL_RUNS_VARIABLE, "1"))


def _os_name() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:  # no os-release file
        return None


def _cpu() -> dict[str, Any]:
    model = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return {
        "model": model[1] if model else None,  # Arm kernels do not name it
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
    }


def _container(environ: Mapping[str, str]) -> dict[str, Any]:
    """What says that this is a container, and the limits it works under."""
    signs = {
        "docker": Path("/.dockerenv").exists(),
        "podman": Path("/run/.containerenv").exists(),
        "kubernetes": "KUBERNETES_SERVICE_HOST" in environ,
        "apptainer": "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ,
    }
    shared_memory = Path("/dev/shm")
    return {
        "signs": [name for name, seen in signs.items() if seen],
        "cgroup_cpu_max": _text(_CGROUP / "cpu.max"),  # "quota period" in microseconds, or "max period"
        "cgroup_memory_max": _text(_CGROUP / "memory.max"),  # bytes, or "max"
        "dev_shm_gib": psutil.disk_usage("/dev/shm").total / GIB if shared_memory.exists() else None,
    }


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # not on this kernel, or not for this user
        return None


def _packages() -> dict[str, str | None]:
    """Versions of what computes and measures; every installed nvidia-* package too."""
    installed = {
        re.sub(r"[-_.]+", "-", distribution.name).lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name
    }
    nvidia = sorted(name for name in installed if name.startswith("nvidia-") and name not in _PACKAGES)
    return {name: installed.get(name) for name in (*_PACKAGES, *nvidia)}
