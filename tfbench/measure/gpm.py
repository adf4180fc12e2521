"""GPM, NVML's performance counters from Hopper on: what one GPU did between two readings. TensorFlow-free."""

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import pynvml

from tfbench.hardware.gpus import Gpu, Nvml

# NVML's documentation of nvmlGpmMetricsGet asks for more than 100 ms between its two samples, because the
# counters are refreshed no faster.
MIN_INTERVAL_S = 0.1

_SHARE = 0.01  # of a percent
_GB = 2**20 / 1e9  # of a MiB

# Field of a TelemetrySample → NVML's metric and what one unit of it is in ours (nvml.h, nvmlGpmMetricId_t).
METRICS = {
    "graphics_active": (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, _SHARE),
    "sm_active": (pynvml.NVML_GPM_METRIC_SM_UTIL, _SHARE),
    "sm_occupancy": (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, _SHARE),
    "tensor_active": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, _SHARE),
    "dram_active": (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, _SHARE),
    "pcie_rx_gb_per_s": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _GB),
    "pcie_tx_gb_per_s": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _GB),
    "nvlink_rx_gb_per_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, _GB),
    "nvlink_tx_gb_per_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, _GB),
}


def is_supported(session: Nvml, handle: Any, gpu: Gpu) -> bool:
    """Whether `Gpm` can read this card: Hopper or later, with a driver that knows how.

    MIG instances are left out: their counters are read through another function, which belongs to the whole
    GPU instance and not to the compute instance that CUDA uses.
    """
    if gpu.is_mig:
        return False
    support = session.read("nvmlGpmQueryDeviceSupport", handle)
    return support is not None and bool(support.isSupportedDevice)


class Gpm:
    """Reads one card's counters. Its first error is told, and then there are no more readings.

    Args:
        handle: NVML's handle of a card that `is_supported`.
        on_failure: Called with the error that ended the readings, once.
        clock: Seconds; the windows' clock.
        nvml: The `pynvml` module, initialised until after `close`, or what stands for it in a test.
    """

    def __init__(
        self,
        handle: Any,
        on_failure: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
        nvml: Any = pynvml,
    ):
        self._handle, self._on_failure, self._clock, self._nvml = handle, on_failure, clock, nvml
        self._failed = False
        self._buffers: list[Any] = []  # two of NVML's: the one to fill next, the one last filled
        self._filled_s: tuple[float, float] | None = None  # before and after the last filling
        self._request = pynvml.c_nvmlGpmMetricsGet_t(
            version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(METRICS)
        )
        for place, (metric, _) in enumerate(METRICS.values()):
            self._request.metrics[place].metricId = metric

    def read(self) -> dict[str, float | None]:
        """The METRICS since the last reading, and `gpm_start_s` and `gpm_end_s`, which enclose that time.

        A metric that this card lacks is None.

        Returns:
            The fields; empty at the first call, less than MIN_INTERVAL_S after the last, and after a failure.
        """
        now_s = self._clock()
        if self._failed or (self._filled_s is not None and now_s - self._filled_s[1] < MIN_INTERVAL_S):
            return {}
        try:
            return self._advance(now_s)
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
            self._failed = True
            self._on_failure(error)
            return {}

    def close(self) -> None:
        """Gives the buffers back to NVML."""
        self._failed = True  # so that nothing reads into them
        while self._buffers:
            # NVML that lost its card or its driver refuses; nothing is left to be done about it.
            with contextlib.suppress(pynvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(self._buffers.pop())

    def _advance(self, now_s: float) -> dict[str, float | None]:
        while len(self._buffers) < 2:
            self._buffers.append(self._nvml.nvmlGpmSampleAlloc())
        later, earlier = self._buffers
        self._nvml.nvmlGpmSampleGet(self._handle, later)
        earlier_s, self._filled_s = self._filled_s, (now_s, self._clock())
        self._buffers.reverse()
        if earlier_s is None:
            return {}
        self._request.sample1, self._request.sample2 = earlier, later
        self._nvml.nvmlGpmMetricsGet(self._request)
        values = {
            name: _value(self._request.metrics[place], unit)
            for place, (name, (_, unit)) in enumerate(METRICS.items())
        }
        return {"gpm_start_s": earlier_s[0], "gpm_end_s": self._filled_s[1], **values}


def _value(metric: Any, unit: float) -> float | None:
    """One answer in our unit; None where NVML has none, such as NVLink on a card without."""
    known = metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value)
    return metric.value * unit if known else None
