"""What holds for a card over a whole run or only counts up: limits, links, memory errors. TensorFlow-free."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pynvml

from tfbench.hardware.gpus import Gpu, Nvml, handle_of, scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardFacts:
    """One card at one moment. A field that NVML does not answer is None."""

    power_limit_w: float | None  # enforced: the least of all limits in force
    power_limit_default_w: float | None
    sm_clock_mhz_max: int | None
    memory_clock_mhz_max: int | None
    pcie_generation: int | None  # an idle card may have lowered it
    pcie_generation_max: int | None  # of card and slot together
    pcie_width: int | None  # lanes
    pcie_width_max: int | None
    nvlinks_active: int | None
    persistence: bool | None
    mig: bool | None
    numa_node: int | None
    ecc: bool | None
    ecc_errors_corrected: int | None  # since the driver was loaded ("volatile")
    ecc_errors_uncorrected: int | None  # likewise
    rows_remapped_corrected: int | None  # over the card's life, because of corrected errors
    rows_remapped_uncorrected: int | None
    row_remapping_pending: bool | None  # waits for a reset of the card
    row_remapping_failed: bool | None


def card_facts(gpu: Gpu, nvml: Any = pynvml) -> CardFacts:
    """Reads a card. It takes milliseconds: not for inside a window.

    Args:
        gpu: A visible GPU.
        nvml: The `pynvml` module, or what stands for it in a test.
    """
    with Nvml(nvml) as session:
        handle = None if session.problem else handle_of(session, gpu)

        def read(function: str, *args: int) -> Any:
            return None if handle is None else session.read(function, handle, *args)

        return CardFacts(
            power_limit_w=scaled(read("nvmlDeviceGetEnforcedPowerLimit"), 1000),
            power_limit_default_w=scaled(read("nvmlDeviceGetPowerManagementDefaultLimit"), 1000),
            sm_clock_mhz_max=read("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
            memory_clock_mhz_max=read("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM),
            **_links(read),
            persistence=_is_on(read("nvmlDeviceGetPersistenceMode")),
            mig=_is_on(read("nvmlDeviceGetMigMode")),
            numa_node=read("nvmlDeviceGetNumaNodeId"),
            **_memory_errors(read),
        )


def _links(read: Callable[..., Any]) -> dict[str, Any]:
    states = [read("nvmlDeviceGetNvLinkState", link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    known = [state for state in states if state is not None]  # links that the card has not are errors
    return {
        "pcie_generation": read("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_max": read("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width": read("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_max": read("nvmlDeviceGetMaxPcieLinkWidth"),
        "nvlinks_active": known.count(pynvml.NVML_FEATURE_ENABLED) if known else None,
    }


def _memory_errors(read: Callable[..., Any]) -> dict[str, Any]:
    function, volatile = "nvmlDeviceGetTotalEccErrors", pynvml.NVML_VOLATILE_ECC
    corrected, uncorrected, pending, failed = read("nvmlDeviceGetRemappedRows") or (None,) * 4
    return {
        "ecc": _is_on(read("nvmlDeviceGetEccMode")),
        "ecc_errors_corrected": read(function, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
        "ecc_errors_uncorrected": read(function, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile),
        "rows_remapped_corrected": corrected,
        "rows_remapped_uncorrected": uncorrected,
        "row_remapping_pending": _is_on(pending),
        "row_remapping_failed": _is_on(failed),
    }


def _is_on(state: Any) -> bool | None:
    current = state[0] if isinstance(state, list) else state  # [current, after the next reset]
    return None if current is None else bool(current)
