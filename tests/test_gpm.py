import itertools

import pynvml
import pytest
from fake_nvml import FakeCard, FakeNvml, mig_instance

from tfbench.hardware.gpus import Nvml, handle_of, visible_gpus
from tfbench.measure.gpm import METRICS, Gpm, is_supported


def card(**fields) -> FakeCard:
    return FakeCard(gpm_supported=True, **fields)


class Reader:
    """A Gpm on the card, on the card's own time."""

    def __init__(self, handle: FakeCard, nvml: FakeNvml | None = None, clock=None):
        self.nvml = nvml or FakeNvml(handle)
        self.nvml.nvmlInit()
        self.errors: list[Exception] = []
        self.gpm = Gpm(handle, self.errors.append, clock or (lambda: handle.now_s), self.nvml)
        self.read = self.gpm.read


def activity(reading: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value for name, value in reading.items() if name in METRICS and value is not None}


def test_a_reading_is_the_mean_since_the_last_in_shares_and_gigabytes():
    h200 = card()
    reader = Reader(h200)
    assert reader.read() == {}  # nothing to compare with
    h200.work(0.1, GRAPHICS_UTIL=100.0, ANY_TENSOR_UTIL=90.0, PCIE_RX_PER_SEC=5000.0)
    h200.work(0.3, GRAPHICS_UTIL=100.0, ANY_TENSOR_UTIL=10.0, PCIE_RX_PER_SEC=1000.0)
    # Tensor cores 0.25 · 90 + 0.75 · 10 = 30 %; PCIe 2,000 MiB/s = 2,000 · 1,048,576 bytes/s.
    assert activity(reader.read()) == pytest.approx(
        {"graphics_active": 1.0, "tensor_active": 0.3, "pcie_rx_gb_per_s": 2.097152}
    )
    h200.work(0.2, GRAPHICS_UTIL=50.0, ANY_TENSOR_UTIL=0.0, PCIE_RX_PER_SEC=0.0)
    assert activity(reader.read()) == pytest.approx(
        {"graphics_active": 0.5, "tensor_active": 0.0, "pcie_rx_gb_per_s": 0.0}
    )
    assert reader.errors == []


# NVML's numbers as nvml.h has them, so that a wrong constant shows.
@pytest.mark.parametrize(
    ("field", "metric", "raw", "value"),
    [
        ("graphics_active", 1, 96.0, 0.96),
        ("sm_active", 2, 93.0, 0.93),
        ("sm_occupancy", 3, 25.0, 0.25),
        ("tensor_active", 5, 90.0, 0.9),
        ("dram_active", 10, 16.0, 0.16),
        ("pcie_tx_gb_per_s", 20, 1000.0, 1.048576),
        ("pcie_rx_gb_per_s", 21, 1000.0, 1.048576),
        ("nvlink_rx_gb_per_s", 60, 100_000.0, 104.8576),
        ("nvlink_tx_gb_per_s", 61, 100_000.0, 104.8576),
    ],
)
def test_each_metric_has_its_unit_and_one_alone_leaves_the_others_unknown(field, metric, raw, value):
    h200 = card()
    reader = Reader(h200)
    reader.read()
    h200.now_s, h200.counters = 2.0, {metric: 2.0 * raw}
    assert reader.read() == {
        **dict.fromkeys(METRICS),
        "gpm_start_s": 0.0,
        "gpm_end_s": 2.0,
        field: pytest.approx(value),
    }


def test_what_is_no_number_is_unknown():
    h200 = card()
    reader = Reader(h200)
    reader.read()
    h200.work(0.2, SM_UTIL=float("nan"), DRAM_BW_UTIL=40.0)
    assert activity(reader.read()) == pytest.approx({"dram_active": 0.4})


def test_the_interval_encloses_both_samples():
    # Each sample is taken between two readings of the clock: at 0 and 1 s, then at 2 and 3 s.
    h200 = card()
    reader = Reader(h200, clock=map(float, itertools.count()).__next__)
    reader.read()
    h200.work(2.0, SM_UTIL=10.0)
    reading = reader.read()
    assert (reading["gpm_start_s"], reading["gpm_end_s"]) == (0.0, 3.0)


def test_a_reading_too_soon_is_skipped_and_the_next_covers_all_the_time():
    h200 = card()
    reader = Reader(h200)
    reader.read()
    h200.work(0.06, SM_UTIL=100.0)
    assert reader.read() == {}
    h200.work(0.06, SM_UTIL=0.0)
    reading = reader.read()
    assert (reading["gpm_start_s"], reading["gpm_end_s"]) == (0.0, 0.12)
    assert reading["sm_active"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "function", ["nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"], ids=lambda name: name[7:]
)
def test_the_first_error_is_told_and_ends_the_readings(function):
    h200 = card()
    nvml = FakeNvml(h200, missing=(function,))
    reader = Reader(h200, nvml)
    readings = []
    for _ in range(3):
        readings.append(reader.read())
        h200.work(0.2, SM_UTIL=100.0)
    nvml.missing = ()  # that it works again does not matter: the time between is unknown
    assert [*readings, reader.read()] == [{}] * 4
    assert [type(error) for error in reader.errors] == [pynvml.NVMLError_FunctionNotFound]
    reader.gpm.close()
    assert nvml.gpm_samples == {}


def test_buffers_are_two_and_given_back():
    h200 = card()
    reader = Reader(h200)
    for _ in range(5):
        h200.work(0.2, SM_UTIL=100.0)
        reader.read()
        assert len(reader.nvml.gpm_samples) == 2
    reader.gpm.close()
    reader.gpm.close()
    assert reader.nvml.gpm_samples == {}
    h200.work(0.2)
    assert reader.read() == {}
    assert reader.errors == []


def test_a_driver_that_went_away_does_not_stop_the_closing():
    h200 = card()
    reader = Reader(h200)
    reader.read()
    reader.nvml.nvmlShutdown()
    reader.gpm.close()
    assert reader.errors == []


class OldRelease(FakeNvml):
    """An nvidia-ml-py that has never heard of GPM."""

    def __getattribute__(self, name: str) -> object:
        if name.startswith("nvmlGpm"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> object:
        if name.startswith("nvmlGpm"):
            raise AttributeError(name)
        return super().__getattr__(name)


@pytest.mark.parametrize(
    ("nvml", "supported", "told"),
    [
        (FakeNvml(card()), True, []),
        (FakeNvml(FakeCard()), False, []),
        (FakeNvml(card(), missing=("nvmlGpmQueryDeviceSupport",)), False, ["Function Not Found"]),
        (OldRelease(card()), False, []),
        (
            FakeNvml(card(failing={"nvmlGpmQueryDeviceSupport": pynvml.NVMLError_Unknown})),
            False,
            ["Unknown Error"],
        ),
        (FakeNvml(card(mig_on=True, instances={0: mig_instance("MIG-1", gpm_supported=True)})), False, []),
    ],
    ids=["hopper", "older card", "older driver", "older nvidia-ml-py", "error", "MIG"],
)
def test_only_cards_that_say_so_have_counters(nvml, supported, told):
    (gpu,) = visible_gpus(nvml, {})
    errors: list[str] = []
    with Nvml(nvml, on_error=lambda error: errors.append(str(error))) as session:
        assert is_supported(session, handle_of(session, gpu), gpu) is supported
    assert errors == told
