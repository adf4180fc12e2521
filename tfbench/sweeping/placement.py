"""Where the runs of a sweep go: one after the other, or side by side on GPUs and cores of their own.

TensorFlow-free.
"""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tfbench.config import BenchmarkConfig, ConfigError
from tfbench.hardware.environment import PARALLEL_RUNS_VARIABLE
from tfbench.hardware.gpus import Machine

_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclasses.dataclass(frozen=True)
class Place:
    """What a run may use; by default what the sweep itself may use."""

    gpu: str = ""  # entry of CUDA_VISIBLE_DEVICES
    cores: frozenset[int] = frozenset()
    parallel_runs: int = 1  # runs side by side, this one included

    def environment(self) -> dict[str, str]:
        """Variables of the run's process."""
        variables = {PARALLEL_RUNS_VARIABLE: f"{self.parallel_runs}"}
        if self.gpu:
            variables |= {"CUDA_VISIBLE_DEVICES": self.gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return variables


EVERYTHING = Place()


def parse_parallel(text: str) -> int | None:
    """The number of runs side by side; None for "auto".

    Raises:
        ConfigError: neither "auto" nor a whole number from 1 to that of the cores.
    """
    cores = len(os.sched_getaffinity(0))
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= cores:
        accepted = f"auto (a run on each GPU) or a whole number from 1 to {cores}, a core for each run"
        raise ConfigError("parallel", text, accepted)
    return int(text)


def places(configs: Sequence[BenchmarkConfig], parallel: int | None, machine: Machine) -> list[Place]:
    """Places for runs of one kind: all on the CPU, all on one GPU, or all on several.

    Runs on several GPUs have the machine to themselves. "auto" means a run on each GPU; on the CPU, whose
    cores a run uses all, one run.

    Args:
        configs: of the runs, at least one.
        parallel: runs side by side at most; None: "auto".
        machine: the devices that are there.
    """
    if configs[0].gpus > 1:
        return [EVERYTHING]
    gpus = [gpu.uuid or f"{gpu.index}" for gpu in machine.gpus] if configs[0].gpus else []
    cores = by_physical_core(os.sched_getaffinity(0))
    wanted = parallel or max(len(gpus), 1)
    count = min(wanted, len(configs), len(gpus) or wanted, len(cores))
    if count == 1:
        return [EVERYTHING]
    shares = [frozenset(cores[len(cores) * i // count : len(cores) * (i + 1) // count]) for i in range(count)]
    return [Place(gpus[i] if gpus else "", share, count) for i, share in enumerate(shares)]


def by_physical_core(cores: Iterable[int], topology: Path = _TOPOLOGY) -> list[int]:
    """Cores in an order in which neighbours share a socket and threads of a physical core are neighbours.

    Shares of this order meet in a physical core only where a share ends inside one. Where the kernel does not
    say, the order is that of the numbers.
    """

    def position(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            socket, physical = (
                int((folder / name).read_text(encoding="ascii"))
                for name in ("physical_package_id", "core_id")
            )
        except (OSError, ValueError):
            return 0, core, core
        return socket, physical, core

    return sorted(cores, key=position)
