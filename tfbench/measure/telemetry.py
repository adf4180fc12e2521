"""What the GPUs did during the windows: an NVML sampler in a thread and its summary. TensorFlow-free.

A figure that was not measured is None, never 0.
"""

import contextlib
import csv
import dataclasses
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pynvml

from tfbench.hardware.gpus import GIB, Gpu, Nvml, decoded, handle_of, scaled
from tfbench.measure import gpm
from tfbench.measure.statistics import within
from tfbench.measure.timing import Window

# Bits of NVML's "clocks event reasons" (nvml.h, nvmlClocksEventReasons), as they appear in a row.
THROTTLE_REASONS = {
    pynvml.nvmlClocksThrottleReasonGpuIdle: "gpu_idle",
    pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting: "applications_clocks_setting",
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksThrottleReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "sw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
    pynvml.nvmlClocksThrottleReasonDisplayClockSetting: "display_clock_setting",
    0x200: "board_limit",  # these two have no name in older releases of nvidia-ml-py
    0x400: "reliability",
}
# Reasons for a clock below its maximum that do not slow down work: nothing to do, or set by the user.
_NOT_THROTTLING = (
    pynvml.nvmlClocksThrottleReasonGpuIdle | pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting
)

# Above this a GPU counts as loaded before the start. Less is what drivers and desktops hold by themselves.
# Utilisation is no sign: for a moment after its end it still shows the run before.
_LOADED_GIB = 1.0

# Errors that say "this card has no such sensor": expected, so not a problem to report.
_NO_SENSOR = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLLibraryMismatchError,
)

_ANSWER_S = 10.0  # seconds after which a thread that waits for NVML is given up

EnergySource = Literal["counter", "integrated_power"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetrySample:
    """One GPU at one moment. A field that NVML does not answer is None."""

    t_s: float  # on the sampler's clock, which is the windows' clock
    gpu: int  # position among the visible GPUs, as TensorFlow numbers them
    utilization_percent: int | None = None  # share of NVML's last sampling period with a kernel running
    memory_utilization_percent: int | None = None  # likewise, with device memory read or written
    memory_used_gib: float | None = None  # of all processes, TensorFlow's pool included
    power_w: float | None = None
    energy_j: float | None = None  # counter since the driver was loaded
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: int | None = None  # bits of THROTTLE_REASONS
    # From here on means over an interval that ends with the sample: see tfbench.measure.gpm.
    gpm_start_s: float | None = None
    gpm_end_s: float | None = None
    graphics_active: float | None = None  # share of the time with work on the GPU
    sm_active: float | None = None  # share of the multiprocessors that had work
    sm_occupancy: float | None = None  # warps on them ÷ the most that fit
    tensor_active: float | None = None  # share of the time in which tensor cores computed
    dram_active: float | None = None  # share of the memory's bandwidth
    pcie_rx_gb_per_s: float | None = None  # to the GPU; 10^9 bytes
    pcie_tx_gb_per_s: float | None = None  # from it
    nvlink_rx_gb_per_s: float | None = None  # all links together
    nvlink_tx_gb_per_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetrySummary:
    """The GPUs inside the windows; None where nothing was measured."""

    gpu_util_mean: float | None  # percent, over GPUs and samples
    gpu_util_max: float | None  # percent
    power_w_mean: float | None  # of one GPU
    energy_j: float | None  # of all GPUs over all windows
    energy_source: EnergySource | None
    sm_clock_mhz_mean: float | None
    temperature_c_max: float | None
    throttle_reasons: str | None  # names joined by "|"; "" if read and none
    memory_used_gib_max: float | None  # of one GPU
    # Means over GPUs and time, as in TelemetrySample, so of one GPU.
    graphics_active: float | None
    sm_active: float | None
    sm_occupancy: float | None
    tensor_active: float | None
    dram_active: float | None
    pcie_rx_gb_per_s: float | None
    pcie_tx_gb_per_s: float | None
    nvlink_rx_gb_per_s: float | None
    nvlink_tx_gb_per_s: float | None


@dataclasses.dataclass(frozen=True)
class _Card:
    """What one GPU is read through."""

    session: Nvml
    handle: Any  # None: the card cannot be opened
    counters: gpm.Gpm | None  # None: the card has none


class Sampler:
    """Samples GPUs in a background thread. No NVML error ever reaches the caller.

    `start` takes a first sample and `stop` a last one, so windows between the two are always enclosed.

    Args:
        gpus: Visible GPUs in CUDA's order; each is found again by UUID or PCI bus id.
        period_s: Seconds from the end of a sample to the start of the next. Below `gpm.MIN_INTERVAL_S` only
            some samples have the fields of GPM.
        clock: The clock of the windows, in seconds.
        nvml: The `pynvml` module, or what stands for it in a test.

    Attributes:
        samples: All samples so far, oldest first.
        problems: What went wrong, one sentence each, each once.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        period_s: float = 0.25,  # well clear of gpm.MIN_INTERVAL_S; at 0.11 s it cost 0.24 % of an H200
        clock: Callable[[], float] = time.monotonic,
        nvml: Any = pynvml,
    ):
        self.samples: list[TelemetrySample] = []
        self.problems: list[str] = []
        self._period_s = period_s
        self._clock = clock
        self._sessions = contextlib.ExitStack()
        self._cards = [self._open(ordinal, gpu, nvml) for ordinal, gpu in enumerate(gpus)]
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Takes the first sample and starts the thread.

        Raises:
            RuntimeError: The sampler was started before.
        """
        if self._thread is not None:
            raise RuntimeError("a Sampler starts once: make another one")
        self.sample_once()
        self._thread = threading.Thread(target=self._run, name="tfbench-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, takes the last sample and closes NVML. Does nothing the second time."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=_ANSWER_S)
            if self._thread.is_alive():  # NVML hangs on a broken card: leave it to the daemon thread
                self._report("NVML does not answer any more: sampling was given up")
                return
            self.sample_once()
        self._sessions.close()

    def sample_once(self) -> None:
        """Adds one sample of each GPU; a card that cannot be read gives an empty one."""
        for ordinal, card in enumerate(self._cards):
            now_s = self._clock()
            fields = {} if card.handle is None else _read_fields(card.session, card.handle)
            if card.counters is not None:
                fields |= card.counters.read()
            self.samples.append(TelemetrySample(t_s=now_s, gpu=ordinal, **fields))

    def _open(self, ordinal: int, gpu: Gpu, nvml: Any) -> _Card:
        """The card, with a session that reports its errors as this card's."""
        session = self._sessions.enter_context(Nvml(nvml, on_error=functools.partial(self._note, ordinal)))
        handle = None if session.problem else handle_of(session, gpu)
        if handle is None:
            why = session.problem or "it cannot be opened"
            self._report(f"GPU {ordinal} ({gpu.uuid or gpu.pci_bus_id}) is not sampled: {why}")
        if handle is None or not gpm.is_supported(session, handle, gpu):
            return _Card(session, handle, None)
        counters = gpm.Gpm(handle, functools.partial(self._note_gpm, ordinal), self._clock, nvml)
        self._sessions.callback(counters.close)
        return _Card(session, handle, counters)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._period_s):
                self.sample_once()
        except Exception as error:  # an error here is reported with the run, which it must not end
            self._report(f"sampling ended early: {error!r}")

    def _note(self, ordinal: int, error: Exception) -> None:
        if isinstance(error, pynvml.NVMLError_GpuIsLost):
            self._report(f"GPU {ordinal} was lost while sampling: its later cells stay empty")
        elif not isinstance(error, _NO_SENSOR):
            self._report(f"GPU {ordinal}: a sensor was not readable: {error}")

    def _note_gpm(self, ordinal: int, error: Exception) -> None:
        if isinstance(error, pynvml.NVMLError_GpuIsLost):
            self._note(ordinal, error)
            return
        hint = (
            " (reading GPU counters may need root or the driver option NVreg_RestrictProfilingToAdminUsers=0)"
            if isinstance(error, pynvml.NVMLError_NoPermission)
            else ""
        )
        self._report(f"GPU {ordinal}: its activity is not known from here on: {error}{hint}")

    def _report(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _read_fields(nvml: Nvml, handle: Any) -> dict[str, Any]:
    """Fields of a TelemetrySample, each read on its own; NVML's mW, mJ and bytes in W, J and GiB."""
    # The energy is read first, next to the sample's time, because its moment matters most.
    energy_mj = nvml.read("nvmlDeviceGetTotalEnergyConsumption", handle)
    utilization = nvml.read("nvmlDeviceGetUtilizationRates", handle)
    memory = nvml.memory(handle)
    return {
        "energy_j": scaled(energy_mj, 1000),
        "power_w": scaled(nvml.read("nvmlDeviceGetPowerUsage", handle), 1000),
        "utilization_percent": None if utilization is None else decoded(utilization.gpu),
        "memory_utilization_percent": None if utilization is None else decoded(utilization.memory),
        "memory_used_gib": None if memory is None else scaled(decoded(memory.used), GIB),
        "temperature_c": nvml.read_first(
            ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "sm_clock_mhz": nvml.read("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": nvml.read("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_MEM),
        "throttle_reasons": nvml.read_first(
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), handle
        ),
    }


def summarize(samples: Sequence[TelemetrySample], windows: Sequence[Window]) -> TelemetrySummary:
    """What the GPUs did inside the windows.

    Only samples with start ≤ t ≤ end of a window count. Energy also uses the samples next to the edges. What
    is a mean over an interval counts by the interval's length, and only if a window holds all of it.
    """
    inside = within(samples, windows)
    energy_j, energy_source = _energy(samples, windows)
    clocks_mhz = _measured(s.sm_clock_mhz for s in inside)
    utilization = _measured(s.utilization_percent for s in inside)
    power_w = _measured(s.power_w for s in inside)
    return TelemetrySummary(
        gpu_util_mean=statistics.fmean(utilization) if utilization else None,
        gpu_util_max=max(utilization, default=None),
        power_w_mean=statistics.fmean(power_w) if power_w else None,
        energy_j=energy_j,
        energy_source=energy_source,
        sm_clock_mhz_mean=statistics.fmean(clocks_mhz) if clocks_mhz else None,
        temperature_c_max=max(_measured(s.temperature_c for s in inside), default=None),
        throttle_reasons=_throttling([s.throttle_reasons for s in inside]),
        memory_used_gib_max=max(_measured(s.memory_used_gib for s in inside), default=None),
        **_activity(samples, windows),
    )


def _activity(samples: Iterable[TelemetrySample], windows: Sequence[Window]) -> dict[str, float | None]:
    """Means of the fields of GPM over GPUs and time."""
    weighted = [
        (s.gpm_end_s - s.gpm_start_s, s)
        for s in samples
        if s.gpm_start_s is not None
        and s.gpm_end_s is not None
        and any(w.start_s <= s.gpm_start_s and s.gpm_end_s <= w.end_s for w in windows)
    ]
    means: dict[str, float | None] = {}
    for name in gpm.METRICS:
        points = [(seconds, value) for seconds, s in weighted if (value := getattr(s, name)) is not None]
        total_s = sum(seconds for seconds, _ in points)
        means[name] = sum(seconds * value for seconds, value in points) / total_s if points else None
    return means


def _measured(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _throttling(masks: Iterable[int | None]) -> str | None:
    """Names of all reasons that slowed any GPU down at any time; a bit without a name by its number."""
    read = [mask for mask in masks if mask is not None]
    if not read:
        return None
    seen = functools.reduce(int.__or__, read) & ~_NOT_THROTTLING
    bits = [1 << place for place in range(seen.bit_length()) if seen >> place & 1]
    return "|".join(sorted(THROTTLE_REASONS.get(bit, f"reason_{bit:#x}") for bit in bits))


def energies_j(
    samples: Sequence[TelemetrySample], windows: Sequence[Window]
) -> tuple[float | None, float | None]:
    """Joules of all GPUs over all windows, by the cards' counters and by their power integrated over time.

    Both go through the samples next to the windows' edges. Where both are known, their ratio says how far
    either can be trusted: NVML's power is a mean over the last second on recent cards, so the integral is
    late where the load has just changed. Each is of all GPUs or None: a sum that lacks a card is not the
    energy.
    """
    gpus = [[s for s in samples if s.gpu == gpu] for gpu in sorted({s.gpu for s in samples})]
    if not windows:
        return None, None
    return (
        _sum_of_all([_counted_j(_curve(gpu, "energy_j"), windows) for gpu in gpus]),
        _sum_of_all([_integrated_j(_curve(gpu, "power_w"), windows) for gpu in gpus]),
    )


def _sum_of_all(joules: Sequence[float | None]) -> float | None:
    known = _measured(joules)
    return sum(known) if known and len(known) == len(joules) else None


def _energy(
    samples: Sequence[TelemetrySample], windows: Sequence[Window]
) -> tuple[float | None, EnergySource | None]:
    """The energy, from one source for all GPUs: the counter where it can be."""
    counted_j, integrated_j = energies_j(samples, windows)
    if counted_j is not None:
        return counted_j, "counter"
    return integrated_j, None if integrated_j is None else "integrated_power"


@dataclasses.dataclass(frozen=True)
class _Curve:
    """One measured field of one GPU over time, linear between samples."""

    t_s: np.ndarray  # float64 [n], rising
    value: np.ndarray  # float64 [n]

    def at(self, t_s: Sequence[float]) -> np.ndarray:
        """Values at times that the curve encloses."""
        return np.asarray(np.interp(t_s, self.t_s, self.value))

    def encloses(self, windows: Sequence[Window]) -> bool:
        """True if there is a sample at or before each window's start and at or after its end."""
        return bool(self.t_s.size) and all(
            self.t_s[0] <= w.start_s and w.end_s <= self.t_s[-1] for w in windows
        )


def _curve(samples: Iterable[TelemetrySample], field: str) -> _Curve:
    points = [(s.t_s, value) for s in samples if (value := getattr(s, field)) is not None]
    t_s, value = np.asarray(points, np.float64).reshape(-1, 2).T
    return _Curve(t_s, value)


def _counted_j(counter: _Curve, windows: Sequence[Window]) -> float | None:
    """Joules from the counter, its value at the edges interpolated between the neighbouring samples.

    None for a counter that went back (driver reloaded) or stood still (cards without one may answer 0).
    """
    if not counter.encloses(windows) or np.any(np.diff(counter.value) < 0):
        return None
    used = counter.at([w.end_s for w in windows]) - counter.at([w.start_s for w in windows])
    return float(used.sum()) or None


def _integrated_j(power: _Curve, windows: Sequence[Window]) -> float | None:
    """Joules from power by the trapezoidal rule, the power at the edges interpolated."""
    if not power.encloses(windows):
        return None
    total_j = 0.0
    for w in windows:
        inner = power.t_s[(power.t_s > w.start_s) & (power.t_s < w.end_s)]
        t_s = [w.start_s, *inner, w.end_s]
        watts = power.at(t_s)
        total_j += float(np.sum(np.diff(t_s) * (watts[:-1] + watts[1:]) / 2))
    return total_j


def write_csv(path: str | os.PathLike[str], samples: Iterable[TelemetrySample]) -> None:
    """Writes one row per sample, columns as the fields of TelemetrySample; not measured is empty."""
    columns = [field.name for field in dataclasses.fields(TelemetrySample)]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([getattr(sample, column) for column in columns] for sample in samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process with a CUDA context on a GPU."""

    gpu: int  # position among the visible GPUs
    pid: int  # as the driver sees it, which in a container may not be the container's number
    name: str | None
    memory_gib: float | None


def other_processes(gpus: Sequence[Gpu], own_pids: Iterable[int], nvml: Any = pynvml) -> list[GpuProcess]:
    """Processes of others that compute on these GPUs; what the driver hides (virtual machines) is missing."""
    own, found = set(own_pids), []
    with Nvml(nvml) as session:
        for ordinal, gpu in enumerate(gpus if not session.problem else ()):
            found += [p for p in _processes(session, ordinal, handle_of(session, gpu)) if p.pid not in own]
    return found


def _processes(nvml: Nvml, ordinal: int, handle: Any) -> list[GpuProcess]:
    running = nvml.read("nvmlDeviceGetComputeRunningProcesses", handle) or []
    return [
        GpuProcess(
            gpu=ordinal,
            pid=process.pid,
            name=os.path.basename(nvml.read("nvmlSystemGetProcessName", process.pid) or "") or None,
            memory_gib=scaled(process.usedGpuMemory, GIB),
        )
        for process in running
    ]


def preexisting_load(
    gpus: Sequence[Gpu], own_pids: Iterable[int] | None = None, nvml: Any = pynvml
) -> list[str]:
    """A sentence for each GPU that somebody else already uses. Call it before TensorFlow opens the GPUs.

    Args:
        gpus: Visible GPUs in CUDA's order.
        own_pids: Processes that are no strangers; default: this one.
        nvml: The `pynvml` module, or what stands for it in a test.
    """
    strangers = other_processes(gpus, {os.getpid()} if own_pids is None else own_pids, nvml)
    sentences = []
    with Nvml(nvml) as session:
        for ordinal, gpu in enumerate(gpus if not session.problem else ()):
            handle = handle_of(session, gpu)
            fields = {} if handle is None else _read_fields(session, handle)
            processes = [process for process in strangers if process.gpu == ordinal]
            sentences += _load_sentence(ordinal, fields, processes)
    return sentences


def _load_sentence(ordinal: int, fields: dict[str, Any], processes: Sequence[GpuProcess]) -> list[str]:
    """The sentence on one GPU, or nothing if it is free. What could not be read is left out."""
    memory_gib, percent = fields.get("memory_used_gib"), fields.get("utilization_percent")
    if not processes and (memory_gib or 0) < _LOADED_GIB:
        return []
    facts = []
    if memory_gib is not None:
        facts.append(f"{memory_gib:.1f} GiB in use")
    if percent is not None:
        facts.append(f"{percent} % utilisation")
    names = ", ".join(f"{p.pid} {p.name}" if p.name else str(p.pid) for p in processes)
    load = f"GPU {ordinal} already had {' and '.join(facts) or 'work'} before the start"
    return [f"{load}; processes: {names}" if names else load]
