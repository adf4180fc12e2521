"""A made-up machine for the doctor's tests: two sound H200s, from which a test changes what it is about."""

import ctypes
import dataclasses
from typing import Any

import pynvml
from fake_nvml import FakeCard, FakeNvml
from run_helpers import gpu

from tfbench.checks.facts import Card, Disk, Facts, Host, Load, Pair, Software, TensorFlow
from tfbench.hardware.cards import CardFacts
from tfbench.hardware.gpus import Probe
from tfbench.measure.telemetry import TelemetrySummary

IDLE = CardFacts(
    power_limit_w=700.0, power_limit_default_w=700.0, sm_clock_mhz_max=1980, memory_clock_mhz_max=3201,
    pcie_generation=1, pcie_generation_max=5, pcie_width=16, pcie_width_max=16, nvlinks_active=18,
    persistence=True, mig=False, numa_node=None, ecc=True, ecc_errors_corrected=0, ecc_errors_uncorrected=0,
    rows_remapped_corrected=0, rows_remapped_uncorrected=0, row_remapping_pending=False,
    row_remapping_failed=False,
)  # fmt: skip
# A healthy H200 at full load is held down by its power limit.
LOADED = TelemetrySummary(
    **dict.fromkeys(field.name for field in dataclasses.fields(TelemetrySummary))
    | {"sm_clock_mhz_mean": 1455.0, "temperature_c_max": 60.0, "power_w_mean": 686.0}
    | {"throttle_reasons": "sw_power_cap"}
)
LOAD = Load(seconds=20.0, telemetry=LOADED, card=dataclasses.replace(IDLE, pcie_generation=5), tflops=700.0)
UUIDS = ("GPU-aaaa0000-0000-0000-0000-000000000000", "GPU-bbbb0000-0000-0000-0000-000000000000")
CARDS = tuple(
    Card(gpu=gpu(index=index, uuid=uuid), idle=IDLE, busy="", slowdown_c=90, numa_node=index, load=LOAD)
    for index, uuid in enumerate(UUIDS)
)
STAGES: dict[str, dict[str, Any]] = {
    "import": {
        "version": "2.21.0", "is_cuda_build": True, "cuda": "12.5.1", "cudnn": "9",
        "compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
    },
    "devices": {"gpus": 2},
    "product": {"sums": {"GPU:0": 4096.0, "GPU:1": 4096.0}, "expected": 4096.0},
    "all_reduce": {"replicas": 2, "results": 2, "wrong": []},
    "libraries": {"cuda": "12.5.1", "cudnn": "9.14.0", "nccl": "2.27.7"},
    "load": {"start_s": 100.0, "end_s": 120.0, "tflops": [700.0, 710.0]},
}  # fmt: skip
SOUND = Facts(
    probe=Probe(
        gpus=tuple(card.gpu for card in CARDS), installed=2, driver="580.65.06", cuda="13.0", reason=""
    ),
    mig_instances=(None, None),
    cards=CARDS,
    pairs=(Pair(first=0, second=1, path="between NUMA nodes", peer_access=True),),
    kernel_log=("[1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06",),
    host=Host(
        nvidia_devices=2, cores=32, cpu_nodes=frozenset({0, 1}), governors=frozenset({"performance"}),
        governor_driver="acpi-cpufreq", ram_gib=256.0, shm_free_gib=64.0,
    ),
    disk=Disk(folder="/data", mb_per_s=2000.0, reason=""),
    software=Software(
        packages={
            "tensorflow": "2.21.0", "keras": "3.15.1", "nvidia-ml-py": "13.580.65",
            "nvidia-nccl-cu12": "2.27.7", "nvidia-cudnn-cu12": "9.14.0.64", "nvidia-cublas-cu12": "12.5.3.2",
        },
        requirements=("tensorflow<2.22,>=2.21", "keras>=3.13"),
        cuda_requirements=(
            "nvidia-cublas-cu12<13.0,>=12.5.3.2", "nvidia-cudnn-cu12<10.0,>=9.3.0.75",
            "nvidia-nccl-cu12<3.0,>=2.27.7",
        ),
        environ={}, keras_config_backend=None,
    ),
    tensorflow=TensorFlow(stages=STAGES, messages="", ended="", in_time=True),
    load_left_out="",
)  # fmt: skip


def changed(**fields: Any) -> Facts:
    """The sound machine but for some facts; a dict changes fields inside host, software, probe, …"""
    return dataclasses.replace(
        SOUND,
        **{
            name: dataclasses.replace(getattr(SOUND, name), **value) if isinstance(value, dict) else value
            for name, value in fields.items()
        },
    )


def second_card(
    telemetry: dict[str, Any] | None = None, loaded: dict[str, Any] | None = None, **fields: Any
) -> Facts:
    """The sound machine but for its second card.

    Args:
        telemetry: Of the load.
        loaded: Facts of the card halfway through the load.
        fields: Of the card itself, or of its facts, idle and loaded.
    """
    own = {name: fields.pop(name) for name in [f.name for f in dataclasses.fields(Card)] if name in fields}
    load = dataclasses.replace(
        LOAD,
        telemetry=dataclasses.replace(LOADED, **telemetry or {}),
        card=dataclasses.replace(LOAD.card, **fields | (loaded or {})),
    )
    second = {"load": load, "idle": dataclasses.replace(IDLE, **fields)} | own
    return changed(cards=(CARDS[0], dataclasses.replace(CARDS[1], **second)))


def tensorflow(ended: str = "", messages: str = "", in_time: bool = True, **stages: Any) -> Facts:
    """The sound machine but for what TensorFlow's process said; a stage that is None was not reached."""
    new = {name: told for name, told in (STAGES | stages).items() if told is not None}
    return changed(tensorflow={"stages": new, "messages": messages, "ended": ended, "in_time": in_time})


class MachineNvml(FakeNvml):
    """A FakeNvml that knows topology too: the level, and the status of peer access, of every pair."""

    topology = pynvml.NVML_TOPOLOGY_SYSTEM
    peer_status = pynvml.NVML_P2P_STATUS_OK

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: FakeCard, device2: FakeCard) -> int:  # noqa: N802
        return self._read("nvmlDeviceGetTopologyCommonAncestor", device1, lambda card: self.topology)

    def nvmlDeviceGetP2PStatus(  # noqa: N802
        self,
        device1: FakeCard,
        device2: FakeCard,
        p2pIndex: int,  # noqa: N803
    ) -> int:
        if not isinstance(p2pIndex, int):  # as ctypes has it
            raise ctypes.ArgumentError("argument 3: TypeError: Don't know how to convert parameter 3")
        assert p2pIndex == 0  # nvmlGpuP2PCapsIndex_t's NVML_P2P_CAPS_INDEX_READ in nvml.h
        return self._read("nvmlDeviceGetP2PStatus", device1, lambda card: self.peer_status)

    def nvmlDeviceGetTemperatureThreshold(self, handle: FakeCard, threshold: int) -> int:  # noqa: N802
        assert threshold == pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return self._read("nvmlDeviceGetTemperatureThreshold", handle, lambda card: 90)
