"""What the doctor's checks look at: everything that was read of a machine, gathered before any judgement."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfbench.hardware.cards import CardFacts
from tfbench.hardware.gpus import Gpu, Probe
from tfbench.measure.telemetry import TelemetrySummary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """One card while matrix products keep it busy."""

    seconds: float
    telemetry: TelemetrySummary
    card: CardFacts | None  # halfway through
    tflops: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU that CUDA sees. What could not be read is None."""

    gpu: Gpu
    idle: CardFacts
    busy: str  # a sentence on the work of others that it had before the checks; "" if it was free
    slowdown_c: int | None  # temperature at which it lowers its clock
    numa_node: int | None  # that its PCI slot belongs to
    load: Load | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two GPUs, by their place among the visible ones, and the way between them."""

    first: int
    second: int
    path: str | None  # what their PCI paths have in common
    peer_access: bool | None  # whether one reads the other's memory without the host


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The computer around the GPUs."""

    nvidia_devices: int  # NVIDIA display controllers on the PCI bus, with a driver or not
    cores: float  # that this process may use, by affinity and by the container's quota
    cpu_nodes: frozenset[int]  # NUMA nodes of these cores; empty if unknown
    governors: frozenset[str]  # of these cores; empty where the kernel has no say (virtual machines)
    governor_driver: str | None
    ram_gib: float  # the machine's, or what the container may use
    shm_free_gib: float | None  # None: there is no /dev/shm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """How fast the data folder's files were read, past the page cache."""

    folder: str
    mb_per_s: float | None  # 10^6 bytes
    reason: str  # why there is no figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Software:
    """Python packages and settings."""

    packages: Mapping[str, str]  # installed: name, normalised, and version
    requirements: tuple[str, ...]  # of tfbench
    cuda_requirements: tuple[str, ...]  # of tensorflow[and-cuda], without those of tensorflow
    environ: Mapping[str, str]
    keras_config_backend: str | None  # in ~/.keras/keras.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFlow:
    """What a child process found out with TensorFlow."""

    stages: Mapping[str, Mapping[str, Any]]  # see tfbench.checks.child; those that it finished
    messages: str  # what it wrote to standard error
    ended: str  # how it ended; "" if well
    in_time: bool  # False: the deadline came first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """A machine."""

    probe: Probe
    mig_instances: tuple[int | None, ...]  # of each installed card; None: MIG is off or not known
    cards: tuple[Card, ...]
    pairs: tuple[Pair, ...]
    kernel_log: tuple[str, ...] | None  # its lines about NVIDIA's driver; None if not readable
    host: Host
    disk: Disk
    software: Software
    tensorflow: TensorFlow
    load_left_out: str  # why there was no load; "" if there was
