"""Reads everything that the doctor judges, within a minute, without changing a setting. TensorFlow-free."""

import dataclasses
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tfbench.checks.deadline import within
from tfbench.checks.facts import Card, Disk, Facts, Host, Load, Pair, Software
from tfbench.checks.run_child import Watch, run_child
from tfbench.hardware.cards import card_facts
from tfbench.hardware.gpus import GIB, Gpu, Nvml, Probe, handle_of, probe
from tfbench.measure.telemetry import preexisting_load, summarize
from tfbench.measure.timing import Window

NVML_S = 8.0  # seconds that NVML, the disk and the kernel log get to answer
DISK_S = 5.0
LOG_S = 3.0
READ_S = 1.5  # seconds of reading files
READ_BYTES = 2**29
_SMALLEST_BYTES = 2**24  # of a file that tells a disk's speed
_FILES_LOOKED_AT = 5000
_KERNEL_LOGS = (("dmesg",), ("journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"))

# nvml.h, nvmlGpuTopologyLevel_t
_PATHS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "one PCIe host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "one NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "between NUMA nodes",
}


def gather(
    *,
    load_s: float,
    data_dir: Path,
    deadline_s: float,
    nvml: Any = pynvml,
    environ: Mapping[str, str] = os.environ,
    child: Sequence[str] = (sys.executable, "-m", "tfbench.checks.child"),
) -> Facts:
    """Looks at everything once.

    Args:
        load_s: Seconds for which free GPUs are kept busy; 0: not at all.
        data_dir: Folder whose files are read for the disk's speed.
        deadline_s: Time on the monotonic clock by which TensorFlow's process has ended.
        nvml: The `pynvml` module, or what stands for it in a test.
        environ: Environment in which TensorFlow is started.
        child: Command of TensorFlow's process; the load's seconds and the deadline are added.
    """
    found, mig, cards, pairs = read_gpus(nvml, environ)
    host, disk, log, software = read_host(), read_disk(data_dir), kernel_log(), read_software(environ)
    left_out = "" if load_s else "it was not asked for"
    if any(card.busy for card in cards):
        load_s, left_out = 0.0, "others use the GPUs"
    watch = Watch(tuple(card.gpu for card in cards), nvml)
    command = [*child, str(load_s), str(deadline_s)]
    tensorflow = run_child(command, deadline_s, watch.on_stage, environ)
    loads = _loads(watch, tensorflow.stages.get("load", {}), len(cards))
    return Facts(
        probe=found,
        mig_instances=mig,
        cards=tuple(dataclasses.replace(card, load=load) for card, load in zip(cards, loads, strict=True)),
        pairs=pairs,
        kernel_log=log,
        host=host,
        disk=disk,
        software=software,
        tensorflow=tensorflow,
        load_left_out=left_out,
    )


# NVML's nvmlGpuP2PCapsIndex for reading; a stray comma makes nvidia-ml-py's NVML_P2P_CAPS_INDEX_READ a tuple.
_P2P_READ = 0

_Gpus = tuple[Probe, tuple[int | None, ...], tuple[Card, ...], tuple[Pair, ...]]


def read_gpus(nvml: Any, environ: Mapping[str, str], seconds: float = NVML_S) -> _Gpus:
    """What NVML says in time: the probe, MIG instances of each installed card, visible cards, their pairs."""
    try:
        return within(seconds, lambda: _read_gpus(nvml, environ))
    except TimeoutError:
        reason = "the NVIDIA driver does not answer: a card or the driver hangs"
        return Probe(gpus=(), installed=0, driver=None, cuda=None, reason=reason), (), (), ()


def _read_gpus(nvml: Any, environ: Mapping[str, str]) -> _Gpus:
    found = probe(nvml, environ)
    with Nvml(nvml) as session:
        if session.problem:
            return found, (), (), ()
        mig = tuple(
            _mig_instances(session, index) for index in range(session.read("nvmlDeviceGetCount") or 0)
        )
        cards = tuple(_card(session, gpu, nvml) for gpu in found.gpus)
        handles = [handle_of(session, gpu) for gpu in found.gpus]
        pairs = tuple(_pair(session, handles, *two) for two in itertools.combinations(range(len(handles)), 2))
    return found, mig, cards, pairs


def _mig_instances(session: Nvml, index: int) -> int | None:
    handle = session.read("nvmlDeviceGetHandleByIndex", index)
    mode = None if handle is None else session.read("nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    numbers = range(session.read("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    instances = [session.read("nvmlDeviceGetMigDeviceHandleByIndex", handle, number) for number in numbers]
    return sum(instance is not None for instance in instances)


def _card(session: Nvml, gpu: Gpu, nvml: Any) -> Card:
    handle = handle_of(session, gpu)
    threshold = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    return Card(
        gpu=gpu,
        idle=card_facts(gpu, nvml),
        busy="; ".join(preexisting_load([gpu], nvml=nvml)).removeprefix("GPU 0 "),
        slowdown_c=handle and session.read("nvmlDeviceGetTemperatureThreshold", handle, threshold),
        numa_node=_pci_numa_node(gpu.pci_bus_id),
    )


def _pci_numa_node(pci_bus_id: str | None, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The slot's NUMA node; None where the firmware does not say (the kernel then has -1)."""
    if pci_bus_id is None:
        return None
    node = _text(devices / pci_bus_id.lower()[-12:] / "numa_node")  # NVML writes 8 digits of domain, sysfs 4
    return int(node) if node and int(node) >= 0 else None


def _pair(session: Nvml, handles: list[Any], first: int, second: int) -> Pair:
    two = handles[first], handles[second]
    level = session.read("nvmlDeviceGetTopologyCommonAncestor", *two)
    status = session.read("nvmlDeviceGetP2PStatus", *two, _P2P_READ)
    access = None if status is None else status == pynvml.NVML_P2P_STATUS_OK
    return Pair(first=first, second=second, path=_PATHS.get(level), peer_access=access)


def _loads(watch: Watch, stage: Mapping[str, Any], cards: int) -> list[Load | None]:
    """What the sampler saw of each card inside the load."""
    if watch.sampler is None or "start_s" not in stage:
        return [None] * cards
    start_s, end_s = stage["start_s"], stage["end_s"]
    # The second half: clocks and temperature that have settled.
    window = Window(0, 1, 1, (start_s + end_s) / 2, end_s)
    rates = stage["tflops"] if len(stage["tflops"]) == cards else [None] * cards
    return [
        Load(
            seconds=end_s - start_s,
            telemetry=summarize([s for s in watch.sampler.samples if s.gpu == ordinal], [window]),
            card=watch.halfway[ordinal] if watch.halfway else None,
            tflops=rate,
        )
        for ordinal, rate in enumerate(rates)
    ]


def read_host(root: Path = Path("/")) -> Host:
    """Cores, memory and buses; `root` is the folder in which sys and dev are."""
    usable = sorted(os.sched_getaffinity(0))
    cpu_folders = [root / f"sys/devices/system/cpu/cpu{core}" for core in usable]
    governors = {_text(folder / "cpufreq/scaling_governor") for folder in cpu_folders}
    nodes = {int(node.name[4:]) for folder in cpu_folders for node in folder.glob("node[0-9]*")}
    quota = (_text(root / "sys/fs/cgroup/cpu.max") or "max").split()
    limit = _text(root / "sys/fs/cgroup/memory.max") or "max"
    ram = psutil.virtual_memory().total
    shm = root / "dev/shm"
    return Host(
        nvidia_devices=sum(_is_nvidia_gpu(device) for device in (root / "sys/bus/pci/devices").glob("*")),
        cores=len(usable) if quota[0] == "max" else min(len(usable), int(quota[0]) / int(quota[1])),
        cpu_nodes=frozenset(nodes),
        governors=frozenset(governor for governor in governors if governor),
        governor_driver=_text(cpu_folders[0] / "cpufreq/scaling_driver"),
        ram_gib=(ram if limit == "max" else min(ram, int(limit))) / GIB,
        shm_free_gib=psutil.disk_usage(str(shm)).free / GIB if shm.is_dir() else None,
    )


def _is_nvidia_gpu(device: Path) -> bool:
    return _text(device / "vendor") == "0x10de" and (_text(device / "class") or "").startswith("0x03")


def read_disk(folder: Path) -> Disk:
    """Reads large files of the folder for a moment."""
    try:
        return within(DISK_S, lambda: _read_disk(folder))
    except TimeoutError as error:
        return Disk(folder=str(folder), mb_per_s=None, reason=f"the disk gave {error}")
    except OSError as error:
        return Disk(folder=str(folder), mb_per_s=None, reason=str(error))


def _read_disk(folder: Path) -> Disk:
    if not folder.is_dir():
        return Disk(folder=str(folder), mb_per_s=None, reason="there is no such folder")
    files = [path for path in itertools.islice(folder.rglob("*"), _FILES_LOOKED_AT) if path.is_file()]
    large = [path for path in files if path.stat().st_size >= _SMALLEST_BYTES]
    if not large:
        return Disk(folder=str(folder), mb_per_s=None, reason="it has no file of 16 MiB or more to read")
    start_s, done = time.monotonic(), 0
    for path in large:
        done += _read_past_cache(path, start_s + READ_S, READ_BYTES - done)
        if done >= READ_BYTES or time.monotonic() >= start_s + READ_S:
            break
    return Disk(folder=str(folder), mb_per_s=done / 1e6 / (time.monotonic() - start_s), reason="")


def _read_past_cache(path: Path, until_s: float, most: int) -> int:
    """Reads a file from the disk, not from the memory of an earlier reading; returns the bytes."""
    done = 0
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while done < most and time.monotonic() < until_s and (block := file.read(2**22)):
            done += len(block)
    return done


def kernel_log(commands: Iterable[tuple[str, ...]] = _KERNEL_LOGS) -> tuple[str, ...] | None:
    """Lines of the kernel log about NVIDIA's driver ("NVRM"); None where it may not be read."""
    for command in commands:
        try:
            log = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LOG_S)
        except (OSError, subprocess.TimeoutExpired):  # not installed, or a journal that is slow to search
            continue
        if log.returncode == 0 and log.stdout:
            return tuple(line for line in log.stdout.splitlines() if "NVRM" in line)
    return None


def read_software(environ: Mapping[str, str]) -> Software:
    """Installed packages, what they require, and settings of Keras."""
    return Software(
        packages={
            canonicalize_name(found.name): found.version
            for found in importlib.metadata.distributions()
            if found.name
        },
        requirements=_requirements("tfbench", ""),
        cuda_requirements=_requirements("tensorflow", "and-cuda"),
        environ=dict(environ),
        keras_config_backend=_keras_config(environ).get("backend"),
    )


def _requirements(package: str, extra: str) -> tuple[str, ...]:
    """Requirements of an installed package on this Python: its own, or those that an extra adds."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(line for line in lines if _applies(Requirement(line), extra))


def _applies(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    if extra and (marker is None or marker.evaluate({"extra": ""})):
        return False  # the package's own
    return marker is None or marker.evaluate({"extra": extra})


def _keras_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Keras' settings file, where Keras looks for it; empty if there is none that can be read."""
    home = environ.get("KERAS_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".keras"
    try:
        return dict(json.loads(_text(Path(home) / "keras.json") or "{}"))
    except (ValueError, TypeError):  # Keras ignores it then
        return {}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # not on this kernel, or not for this user
        return None
