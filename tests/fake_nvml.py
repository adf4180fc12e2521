# ruff: noqa: N802, N803 (the names are NVML's)
"""A stand-in for the pynvml module: cards that answer, fail, get lost, or are not there.

It keeps NVML's manners: errors are pynvml's own classes, answers its own structures, calls before
nvmlInit or after the last nvmlShutdown raise NVMLError_Uninitialized. Constants come from pynvml.

GPM counts up: `FakeCard.work` lets time pass at some activity, and what nvmlGpmMetricsGet gives is the mean
between two samples. The samples are memory that must be given back, once.
"""

import ctypes
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pynvml

GIB = 2**30


@dataclasses.dataclass(eq=False)
class FakeCard:
    """One card or MIG instance. `name` and `uuid` may be bytes, as old releases return them."""

    name: str | bytes = "NVIDIA H200"
    uuid: str | bytes = "GPU-aaaa0000-0000-0000-0000-000000000000"
    bus_id: str = "00000000:01:00.0"
    capability: tuple[int, int] = (9, 0)
    memory_total: int = 140 * GIB
    memory_used: int = 0
    utilization: int = 0
    memory_utilization: int = 0
    power_mw: int = 100_000
    energy_mj: int = 0
    temperature: int = 40
    sm_clock: int = 1980
    memory_clock: int = 3201
    reasons: int = 0
    processes: dict[int, int | None] = dataclasses.field(default_factory=dict)  # pid → bytes
    failing: dict[str, type[Exception]] = dataclasses.field(default_factory=dict)  # function → error
    answers: dict[str, object] = dataclasses.field(default_factory=dict)  # function → another answer
    lost_after: int | None = None  # reads after which the card falls off the bus
    mig_on: bool = False
    instances: dict[int, "FakeCard"] = dataclasses.field(default_factory=dict)  # number → MIG instance
    reads: int = 0
    ecc_errors: tuple[int, int] = (0, 0)  # corrected, uncorrected
    remapped_rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    nvlinks: tuple[int, ...] = ()  # state of each link that the card has
    gpm_supported: bool = False
    now_s: float = 0.0
    counters: dict[int, float] = dataclasses.field(default_factory=dict)  # GPM metric → value × seconds

    def work(self, seconds: float, **metrics: float) -> None:
        """Time passes at this activity; metrics by NVML's name without NVML_GPM_METRIC_, in its units."""
        self.now_s += seconds
        for name, value in metrics.items():
            metric = getattr(pynvml, f"NVML_GPM_METRIC_{name}")
            self.counters[metric] = self.counters.get(metric, 0.0) + value * seconds


def mig_instance(uuid: str, name: str = "NVIDIA H200 MIG 1g.18gb", **fields: object) -> FakeCard:
    """A MIG instance: NVML has no utilisation, power, energy, clock or temperature of it."""
    unsupported = (
        "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetPciInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode",
    )  # fmt: skip
    failing = {**dict.fromkeys(unsupported, pynvml.NVMLError_NotSupported), **fields.pop("failing", {})}
    return FakeCard(name=name, uuid=uuid, memory_total=18 * GIB, failing=failing, **fields)


class FakeNvml:
    """The module. `init_error`: what nvmlInit raises; `missing`: functions the driver's library lacks."""

    def __init__(
        self,
        *cards: FakeCard,
        init_error: type[Exception] | None = None,
        shutdown_error: type[Exception] | None = None,
        missing: tuple[str, ...] = (),
        process_names: dict[int, str] | None = None,
    ):
        self.cards = list(cards)
        self.init_error = init_error
        self.shutdown_error = shutdown_error
        self.missing = missing
        self.process_names = process_names or {}
        self.references = 0
        self.threads: set[str] = set()  # names of the threads that read a card
        # By address: the memory itself, and the card's time and counters once it was filled.
        self.gpm_samples: dict[int, tuple[Any, tuple[float, dict[int, float]] | None]] = {}

    def __getattr__(self, name: str) -> object:
        if name.startswith("nvml") and callable(getattr(pynvml, name)):
            raise AssertionError(f"fake_nvml does not stand in for {name}")
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.references += 1

    def nvmlShutdown(self) -> None:
        self._check("nvmlShutdown")
        if self.shutdown_error is not None:
            raise self.shutdown_error
        self.references -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._check("nvmlSystemGetDriverVersion")
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._check("nvmlSystemGetCudaDriverVersion_v2")
        return 13000

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        self._check("nvmlSystemGetCudaDriverVersion")
        return 13000

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        self._check("nvmlSystemGetProcessName")
        if pid not in self.process_names:
            raise pynvml.NVMLError_NotFound
        return self.process_names[pid]

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        self._check("nvmlDeviceGetHandleByIndex")
        if index >= len(self.cards):
            raise pynvml.NVMLError_InvalidArgument
        return self._read("nvmlDeviceGetHandleByIndex", self.cards[index], lambda card: card)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        return self._find("nvmlDeviceGetHandleByUUID", lambda card: _text(card.uuid) == uuid)

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> FakeCard:
        # As with NVML, an instance is not found by the bus id of its card.
        return self._find(
            "nvmlDeviceGetHandleByPciBusId", lambda card: card.bus_id == pciBusId and card in self.cards
        )

    def nvmlDeviceGetName(self, handle: FakeCard) -> str | bytes:
        return self._read("nvmlDeviceGetName", handle, lambda card: card.name)

    def nvmlDeviceGetUUID(self, handle: FakeCard) -> str | bytes:
        return self._read("nvmlDeviceGetUUID", handle, lambda card: card.uuid)

    def nvmlDeviceGetPciInfo(self, handle: FakeCard) -> pynvml.nvmlPciInfo_t:
        return self._read(
            "nvmlDeviceGetPciInfo", handle, lambda card: pynvml.nvmlPciInfo_t(busId=card.bus_id.encode())
        )

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeCard) -> tuple[int, int]:
        return self._read("nvmlDeviceGetCudaComputeCapability", handle, lambda card: card.capability)

    def nvmlDeviceGetMemoryInfo(self, handle: FakeCard, version: int | None = None) -> object:
        kind = pynvml.c_nvmlMemory_v2_t if version else pynvml.c_nvmlMemory_t
        function = "nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo"
        return self._read(function, handle, lambda card: kind(total=card.memory_total, used=card.memory_used))

    def nvmlDeviceGetUtilizationRates(self, handle: FakeCard) -> pynvml.c_nvmlUtilization_t:
        return self._read(
            "nvmlDeviceGetUtilizationRates",
            handle,
            lambda card: pynvml.c_nvmlUtilization_t(gpu=card.utilization, memory=card.memory_utilization),
        )

    def nvmlDeviceGetPowerUsage(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetPowerUsage", handle, lambda card: card.power_mw)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetTotalEnergyConsumption", handle, lambda card: card.energy_mj)

    def nvmlDeviceGetTemperatureV(
        self, handle: FakeCard, sensor: int, version: int = pynvml.nvmlTemperature_v1
    ) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._read("nvmlDeviceGetTemperatureV", handle, lambda card: card.temperature)

    def nvmlDeviceGetTemperature(self, handle: FakeCard, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._read("nvmlDeviceGetTemperature", handle, lambda card: card.temperature)

    def nvmlDeviceGetClockInfo(self, handle: FakeCard, type: int) -> int:
        clock = {pynvml.NVML_CLOCK_SM: "sm_clock", pynvml.NVML_CLOCK_MEM: "memory_clock"}[type]
        return self._read("nvmlDeviceGetClockInfo", handle, lambda card: getattr(card, clock))

    def nvmlDeviceGetMaxClockInfo(self, handle: FakeCard, type: int) -> int:
        clock = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[type]
        return self._read("nvmlDeviceGetMaxClockInfo", handle, lambda card: clock)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetCurrentClocksEventReasons", handle, lambda card: card.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetCurrentClocksThrottleReasons", handle, lambda card: card.reasons)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeCard) -> list[pynvml.nvmlFriendlyObject]:
        return self._read(
            "nvmlDeviceGetComputeRunningProcesses",
            handle,
            lambda card: [
                pynvml.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": used})
                for pid, used in card.processes.items()
            ],
        )

    def nvmlDeviceGetMigMode(self, device: FakeCard) -> list[int]:
        return self._read("nvmlDeviceGetMigMode", device, lambda card: [int(card.mig_on)] * 2)

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeCard) -> int:
        return self._read("nvmlDeviceGetMaxMigDeviceCount", device, lambda card: 7)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeCard, index: int) -> FakeCard:
        self._check("nvmlDeviceGetMigDeviceHandleByIndex")
        if index not in device.instances:
            raise pynvml.NVMLError_NotFound
        return device.instances[index]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetEnforcedPowerLimit", handle, lambda card: 700_000)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetPowerManagementDefaultLimit", handle, lambda card: 700_000)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetCurrPcieLinkGeneration", handle, lambda card: 5)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetMaxPcieLinkGeneration", handle, lambda card: 5)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetCurrPcieLinkWidth", handle, lambda card: 16)

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetMaxPcieLinkWidth", handle, lambda card: 16)

    def nvmlDeviceGetPersistenceMode(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetPersistenceMode", handle, lambda card: 1)

    def nvmlDeviceGetEccMode(self, handle: FakeCard) -> list[int]:
        return self._read("nvmlDeviceGetEccMode", handle, lambda card: [1, 1])

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeCard, errorType: int, counterType: int) -> int:
        assert counterType == pynvml.NVML_VOLATILE_ECC
        return self._read("nvmlDeviceGetTotalEccErrors", handle, lambda card: card.ecc_errors[errorType])

    def nvmlDeviceGetRemappedRows(self, device: FakeCard) -> tuple[int, int, int, int]:
        return self._read("nvmlDeviceGetRemappedRows", device, lambda card: card.remapped_rows)

    def nvmlDeviceGetNvLinkState(self, device: FakeCard, link: int) -> int:
        if link >= len(device.nvlinks):
            raise pynvml.NVMLError_InvalidArgument if device.nvlinks else pynvml.NVMLError_NotSupported
        return self._read("nvmlDeviceGetNvLinkState", device, lambda card: card.nvlinks[link])

    def nvmlGpmQueryDeviceSupport(self, device: FakeCard) -> pynvml.c_nvmlGpmSupport_t:
        return self._read(
            "nvmlGpmQueryDeviceSupport",
            device,
            lambda card: pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=card.gpm_supported),
        )

    def nvmlGpmSampleAlloc(self) -> Any:
        self._check("nvmlGpmSampleAlloc")
        memory = ctypes.create_string_buffer(64)
        self.gpm_samples[ctypes.addressof(memory)] = memory, None
        return ctypes.cast(memory, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, gpmSample: Any) -> None:
        self._check("nvmlGpmSampleFree")
        assert _address(gpmSample) in self.gpm_samples, "a GPM sample was freed that was not allocated"
        del self.gpm_samples[_address(gpmSample)]

    def nvmlGpmSampleGet(self, device: FakeCard, gpmSample: Any) -> Any:
        filled = self._read("nvmlGpmSampleGet", device, lambda card: (card.now_s, dict(card.counters)))
        if not device.gpm_supported or device.mig_on:
            raise pynvml.NVMLError_NotSupported
        memory, _ = self.gpm_samples[_address(gpmSample)]
        self.gpm_samples[_address(gpmSample)] = memory, filled
        return gpmSample

    def nvmlGpmMetricsGet(self, metricsGet: pynvml.c_nvmlGpmMetricsGet_t) -> pynvml.c_nvmlGpmMetricsGet_t:
        self._check("nvmlGpmMetricsGet")
        if metricsGet.version != pynvml.NVML_GPM_METRICS_GET_VERSION:
            raise pynvml.NVMLError_ArgumentVersionMismatch
        samples = [self.gpm_samples[_address(s)][1] for s in (metricsGet.sample1, metricsGet.sample2)]
        if None in samples or not 0 < metricsGet.numMetrics <= pynvml.NVML_GPM_METRIC_MAX:
            raise pynvml.NVMLError_InvalidArgument
        (start_s, before), (end_s, after) = samples
        assert end_s - start_s >= 0.1, f"NVML wants 100 ms between samples, not {end_s - start_s} s"
        for metric in metricsGet.metrics[: metricsGet.numMetrics]:
            if metric.metricId not in after:
                metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
                continue
            done = after[metric.metricId] - before.get(metric.metricId, 0.0)
            metric.nvmlReturn, metric.value = pynvml.NVML_SUCCESS, done / (end_s - start_s)
        return metricsGet

    def nvmlDeviceGetNumaNodeId(self, handle: FakeCard) -> int:
        return self._read("nvmlDeviceGetNumaNodeId", handle, lambda card: 0)

    def _check(self, function: str) -> None:
        if self.references <= 0:
            raise pynvml.NVMLError_Uninitialized
        if function in self.missing:
            raise pynvml.NVMLError_FunctionNotFound

    def _find(self, function: str, matches: Callable[[FakeCard], bool]) -> FakeCard:
        self._check(function)
        everything = [*self.cards, *(i for card in self.cards for i in card.instances.values())]
        card = next(filter(matches, everything), None)
        if card is None:
            raise pynvml.NVMLError_NotFound
        return self._read(function, card, lambda found: found)

    def _read(self, function: str, card: FakeCard, field: Callable[[FakeCard], Any]) -> Any:
        self._check(function)
        assert isinstance(card, FakeCard), f"{function} was given {card!r}, which is no handle"
        self.threads.add(threading.current_thread().name)
        card.reads += 1
        if card.lost_after is not None and card.reads > card.lost_after:
            raise pynvml.NVMLError_GpuIsLost
        if function in card.failing:
            raise card.failing[function]
        return card.answers.get(function, field(card))


def _address(sample: Any) -> int:
    address = ctypes.cast(sample, ctypes.c_void_p).value
    assert address is not None, "a null pointer for a GPM sample"
    return address


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
