import csv
import math
import os
import threading

import numpy as np
import pynvml
import pytest
from fake_nvml import GIB, FakeCard, FakeNvml, mig_instance

from tfbench.config import BenchmarkConfig
from tfbench.hardware.gpus import visible_gpus
from tfbench.journal import Observed
from tfbench.measure.card_watch import CardWatch
from tfbench.measure.gpm import METRICS, MIN_INTERVAL_S
from tfbench.measure.telemetry import (
    Sampler,
    TelemetrySample,
    energies_j,
    other_processes,
    preexisting_load,
    summarize,
    write_csv,
)
from tfbench.measure.timing import Window
from tfbench.records import RunRecord
from tfbench.summary import fill

A = "GPU-aaaa0000-0000-0000-0000-000000000000"
B = "GPU-bbbb0000-0000-0000-0000-000000000000"


def busy_card(uuid=A, bus_id="00000000:01:00.0", **fields) -> FakeCard:
    values = {
        "utilization": 96, "memory_utilization": 16, "memory_used": 42 * GIB, "power_mw": 686_500,
        "energy_mj": 1_234_567, "temperature": 61, "sm_clock": 1455, "memory_clock": 3201, "reasons": 0x4,
    }  # fmt: skip
    return FakeCard(uuid=uuid, bus_id=bus_id, **{**values, **fields})


BUSY = TelemetrySample(
    t_s=7.5, gpu=0, utilization_percent=96, memory_utilization_percent=16, memory_used_gib=42.0,
    power_w=686.5, energy_j=1234.567, temperature_c=61, sm_clock_mhz=1455, memory_clock_mhz=3201,
    throttle_reasons=0x4,
)  # fmt: skip


def fields(sample: TelemetrySample) -> dict[str, object]:
    return {name: value for name, value in vars(sample).items() if name not in ("t_s", "gpu")}


def sample_once(nvml: FakeNvml, environ=None) -> tuple[list[TelemetrySample], list[str]]:
    sampler = Sampler(visible_gpus(nvml, environ or {}), clock=lambda: 7.5, nvml=nvml)
    sampler.sample_once()
    sampler.stop()
    return sampler.samples, sampler.problems


def curve(gpu=0, **columns) -> list[TelemetrySample]:
    """Samples of one GPU from columns of equal length."""
    rows = zip(*columns.values(), strict=True)
    return [TelemetrySample(gpu=gpu, **dict(zip(columns, row, strict=True))) for row in rows]


def windows(*edges: tuple[float, float]) -> list[Window]:
    return [Window(i, 1, 1, start, end) for i, (start, end) in enumerate(edges)]


# --- sampling ---


def test_a_sample_has_every_field_in_its_unit():
    assert sample_once(FakeNvml(busy_card())) == ([BUSY], [])


def test_old_drivers_answer_under_the_old_names():
    new = (
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlSystemGetCudaDriverVersion_v2",
    )
    card = busy_card(failing={"nvmlDeviceGetMemoryInfo_v2": pynvml.NVMLError_FunctionNotFound})
    assert sample_once(FakeNvml(card, missing=new)) == ([BUSY], [])


FIELDS_OF = {
    ("nvmlDeviceGetUtilizationRates",): ("utilization_percent", "memory_utilization_percent"),
    ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"): ("memory_used_gib",),
    ("nvmlDeviceGetPowerUsage",): ("power_w",),
    ("nvmlDeviceGetTotalEnergyConsumption",): ("energy_j",),
    ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"): ("temperature_c",),
    ("nvmlDeviceGetClockInfo",): ("sm_clock_mhz", "memory_clock_mhz"),
    (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ): ("throttle_reasons",),
}


@pytest.mark.parametrize(("functions", "names"), FIELDS_OF.items())
@pytest.mark.parametrize(
    ("error", "is_a_problem"),
    [(pynvml.NVMLError_NotSupported, False), (pynvml.NVMLError_Unknown, True)],
)
def test_an_unsupported_or_failing_field_blanks_itself_only(functions, names, error, is_a_problem):
    samples, problems = sample_once(FakeNvml(busy_card(failing=dict.fromkeys(functions, error))))
    assert fields(samples[0]) == {**fields(BUSY), **dict.fromkeys(names)}
    assert problems == (["GPU 0: a sensor was not readable: Unknown Error"] if is_a_problem else [])


@pytest.mark.parametrize(
    ("function", "answer", "names"),
    [
        ("nvmlDeviceGetPowerUsage", 2**32 - 1, ("power_w",)),
        ("nvmlDeviceGetTotalEnergyConsumption", 2**64 - 1, ("energy_j",)),
        ("nvmlDeviceGetClockInfo", 2**32 - 1, ("sm_clock_mhz", "memory_clock_mhz")),
    ],
)
def test_not_available_is_no_number(function, answer, names):
    samples, _ = sample_once(FakeNvml(busy_card(answers={function: answer})))
    assert fields(samples[0]) == {**fields(BUSY), **dict.fromkeys(names)}


@pytest.mark.parametrize(
    ("variable", "watts"), [("1,0", [200.0, 100.0]), (f"{B},{A}", [200.0, 100.0]), ("1", [200.0]), ("", [])]
)
def test_the_right_cards_are_sampled_in_cuda_s_order(variable, watts):
    nvml = FakeNvml(
        busy_card(power_mw=100_000), busy_card(uuid=B.encode(), bus_id="00000000:02:00.0", power_mw=200_000)
    )
    samples, problems = sample_once(nvml, {"CUDA_VISIBLE_DEVICES": variable})
    assert [(s.gpu, s.power_w) for s in samples] == list(enumerate(watts))
    assert problems == []


@pytest.mark.parametrize("without_uuid", [False, True])
def test_cards_are_found_by_identity_even_if_nvml_renumbers_them(without_uuid):
    failing = {"nvmlDeviceGetUUID": pynvml.NVMLError_NotSupported} if without_uuid else {}
    nvml = FakeNvml(
        busy_card(power_mw=100_000, failing=failing),
        busy_card(uuid=B, bus_id="00000000:02:00.0", power_mw=200_000, failing=failing),
    )
    gpus = visible_gpus(nvml, {})
    nvml.cards.reverse()
    sampler = Sampler(gpus, nvml=nvml)
    sampler.sample_once()
    assert [s.power_w for s in sampler.samples] == [100.0, 200.0]


def test_mig_leaves_what_nvml_cannot_say_blank_not_zero():
    uuid = "MIG-11111111-0000-0000-0000-000000000000"
    nvml = FakeNvml(busy_card(mig_on=True, instances={2: mig_instance(uuid, memory_used=9 * GIB)}))
    samples, problems = sample_once(nvml)
    assert samples == [TelemetrySample(t_s=7.5, gpu=0, memory_used_gib=9.0)]
    assert problems == []
    summary = summarize(samples, windows((7, 8)))
    assert (summary.gpu_util_mean, summary.gpu_util_max, summary.energy_j) == (None, None, None)
    assert summary.memory_used_gib_max == 9.0


def test_mig_instance_that_cannot_be_found_again_is_not_its_card():
    instance = mig_instance("MIG-1", failing={"nvmlDeviceGetUUID": pynvml.NVMLError_NotSupported})
    samples, problems = sample_once(FakeNvml(busy_card(mig_on=True, instances={0: instance})))
    assert samples == [TelemetrySample(t_s=7.5, gpu=0)]
    assert problems == ["GPU 0 (00000000:01:00.0) is not sampled: it cannot be opened"]


def test_a_card_lost_while_sampling_is_noted_once_and_the_other_goes_on():
    lost = busy_card()
    nvml = FakeNvml(lost, busy_card(uuid=B, bus_id="00000000:02:00.0"))
    sampler = Sampler(visible_gpus(nvml, {}), nvml=nvml)
    sampler.sample_once()
    lost.lost_after = lost.reads + 2  # in the middle of the second sample
    for _ in range(3):
        sampler.sample_once()
    sampler.stop()
    mine, other = ([fields(s) for s in sampler.samples if s.gpu == gpu] for gpu in (0, 1))
    assert mine[0] == fields(BUSY)
    assert None in mine[1].values()
    assert any(value is not None for value in mine[1].values())
    assert mine[2] == mine[3] == dict.fromkeys(fields(BUSY))
    assert other == [fields(BUSY)] * 4
    assert sampler.problems == ["GPU 0 was lost while sampling: its later cells stay empty"]


def test_without_driver_nothing_is_sampled_and_nothing_raises():
    nvml = FakeNvml(
        init_error=pynvml.NVMLError_DriverNotLoaded, shutdown_error=pynvml.NVMLError_Uninitialized
    )
    with Sampler(visible_gpus(nvml, {}), nvml=nvml) as sampler:
        pass
    assert (sampler.samples, sampler.problems) == ([], [])


def test_a_driver_that_goes_away_after_discovery_leaves_blank_cells():
    nvml = FakeNvml(busy_card())
    gpus = visible_gpus(nvml, {})
    nvml.init_error = pynvml.NVMLError_DriverNotLoaded
    with Sampler(gpus, clock=lambda: 7.5, nvml=nvml) as sampler:
        pass
    assert {tuple(fields(s).values()) for s in sampler.samples} == {(None,) * len(fields(BUSY))}
    assert len(sampler.problems) == 1
    assert "not loaded" in sampler.problems[0]


class CountingClock:
    """Seconds that pass with each reading; tells when it was read often enough."""

    def __init__(self, enough: int):
        self.readings = 0
        self.reached = threading.Event()
        self._enough = enough

    def __call__(self) -> float:
        self.readings += 1
        if self.readings >= self._enough:
            self.reached.set()
        return float(self.readings)


def test_the_thread_samples_until_stopped_and_stop_can_be_repeated():
    nvml, clock = FakeNvml(busy_card()), CountingClock(enough=5)
    with Sampler(visible_gpus(nvml, {}), period_s=0.001, clock=clock, nvml=nvml) as sampler:
        assert clock.reached.wait(timeout=60)
    sampler.stop()
    count = len(sampler.samples)
    assert count >= 5
    assert [s.t_s for s in sampler.samples] == [float(i + 1) for i in range(count)]
    assert "tfbench-telemetry" in nvml.threads
    assert "tfbench-telemetry" not in {thread.name for thread in threading.enumerate()}
    assert nvml.references == 0
    with pytest.raises(RuntimeError, match="starts once"):
        sampler.start()


def test_windows_between_start_and_stop_are_enclosed_however_long_the_period():
    nvml, clock = FakeNvml(busy_card()), CountingClock(enough=1)
    sampler = Sampler(visible_gpus(nvml, {}), period_s=3600, clock=clock, nvml=nvml)
    sampler.start()
    start_s = clock()
    nvml.cards[0].energy_mj += 5_000_000
    end_s = clock()
    sampler.stop()
    # 5,000 J in the three ticks between the samples at 1 and 4, one of which is the window.
    assert summarize(sampler.samples, windows((start_s, end_s))).energy_j == pytest.approx(5000 / 3)


def test_stop_without_start_and_with_a_failing_shutdown():
    nvml = FakeNvml(busy_card(), shutdown_error=pynvml.NVMLError_Unknown)
    Sampler(visible_gpus(nvml, {}), nvml=nvml).stop()


def test_an_error_that_is_not_nvml_s_ends_sampling_with_a_word_not_the_run():
    nvml, readings = FakeNvml(busy_card()), []

    def clock() -> float:
        readings.append(threading.current_thread().name)
        if readings[-1] == "tfbench-telemetry":
            raise OSError("clock broke")
        return float(len(readings))

    with Sampler(visible_gpus(nvml, {}), period_s=0.001, clock=clock, nvml=nvml) as sampler:
        sampler._thread.join(timeout=60)
    assert sampler.problems == ["sampling ended early: OSError('clock broke')"]


# --- activity ---


def counting_sampler(*cards: FakeCard, **options) -> tuple[Sampler, FakeNvml]:
    """Of these cards, on the first one's time."""
    nvml = FakeNvml(*cards, **options)
    return Sampler(visible_gpus(nvml, {}), clock=lambda: cards[0].now_s, nvml=nvml), nvml


def test_a_sample_of_a_card_with_counters_has_the_activity_since_the_one_before():
    first, second = busy_card(gpm_supported=True), busy_card(uuid=B, bus_id="00000000:02:00.0")
    sampler, nvml = counting_sampler(first, second)
    sampler.sample_once()
    first.work(0.2, ANY_TENSOR_UTIL=80.0, DRAM_BW_UTIL=30.0)
    sampler.sample_once()
    measured = {"gpm_start_s": 0.0, "gpm_end_s": 0.2, "tensor_active": 0.8, "dram_active": 0.3}
    assert [fields(s) for s in sampler.samples] == [
        fields(BUSY),
        fields(BUSY),
        fields(BUSY) | {name: pytest.approx(value) for name, value in measured.items()},
        fields(BUSY),  # an older card beside it
    ]
    sampler.stop()
    assert sampler.problems == []
    assert (nvml.gpm_samples, nvml.references) == ({}, 0)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (pynvml.NVMLError_NotSupported, "GPU 0: its activity is not known from here on: Not Supported"),
        (
            pynvml.NVMLError_NoPermission,
            "GPU 0: its activity is not known from here on: Insufficient Permissions (reading GPU counters "
            "may need root or the driver option NVreg_RestrictProfilingToAdminUsers=0)",
        ),
    ],
)
def test_counters_that_fail_are_noted_once_and_all_else_goes_on(error, problem):
    first = busy_card(gpm_supported=True, failing={"nvmlGpmSampleGet": error})
    second = busy_card(uuid=B, bus_id="00000000:02:00.0", gpm_supported=True)
    sampler, nvml = counting_sampler(first, second)
    for _ in range(3):
        sampler.sample_once()
        first.work(0.2)
        second.work(0.2, SM_UTIL=70.0)
    sampler.stop()
    assert sampler.problems == [problem]
    assert [fields(s) for s in sampler.samples if s.gpu == 0] == [fields(BUSY)] * 3
    assert [s.sm_active for s in sampler.samples if s.gpu == 1] == [None, *[pytest.approx(0.7)] * 2]
    assert (nvml.gpm_samples, nvml.references) == ({}, 0)


def test_a_card_with_counters_that_gets_lost_is_noted_once():
    card = busy_card(gpm_supported=True)
    sampler, nvml = counting_sampler(card)
    sampler.sample_once()
    card.work(0.2, SM_UTIL=70.0)
    card.lost_after = card.reads
    sampler.sample_once()
    sampler.stop()
    assert fields(sampler.samples[1]) == dict.fromkeys(fields(BUSY))
    assert sampler.problems == ["GPU 0 was lost while sampling: its later cells stay empty"]
    assert nvml.gpm_samples == {}


def test_the_period_suits_the_counters():
    card = busy_card(gpm_supported=True)
    nvml = FakeNvml(card)
    sampler = Sampler(visible_gpus(nvml, {}), nvml=nvml)
    waits = []

    class Stopping(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return True

    sampler._stopping = Stopping()
    sampler.start()
    sampler._thread.join()
    sampler.stop()
    assert waits[0] > MIN_INTERVAL_S


def intervals(gpu=0, **columns) -> list[TelemetrySample]:
    """Samples of one GPU from columns of equal length, each at the end of its interval."""
    return curve(gpu, t_s=columns["gpm_end_s"], **columns)


def test_activity_counts_by_time_and_only_intervals_wholly_inside_a_window():
    samples = intervals(
        gpm_start_s=[0.90, 1.00, 1.25, 1.9, 3.0, 3.4],
        gpm_end_s=[1.00, 1.25, 1.90, 2.1, 3.4, 3.6],
        tensor_active=[0.01, 0.80, 0.40, 0.02, None, 0.03],
        nvlink_rx_gb_per_s=[9.0, 10.0, 20.0, 9.0, 40.0, 9.0],
    )
    summary = summarize(samples, windows((1.0, 2.0), (3.0, 3.5)))
    # Tensor cores: 0.25 s at 0.8 and 0.65 s at 0.4 are 0.46 in 0.9 s.
    assert summary.tensor_active == pytest.approx(0.46 / 0.9)
    # NVLink: 2.5 + 13 GB there, and 0.4 s at 40 in the second window.
    assert summary.nvlink_rx_gb_per_s == pytest.approx((2.5 + 13 + 16) / 1.3)
    assert summary.dram_active is None


def test_an_interval_over_two_windows_is_in_neither():
    samples = intervals(gpm_start_s=[1.2], gpm_end_s=[1.8], sm_active=[0.5])
    assert summarize(samples, windows((1.0, 1.5), (1.5, 2.0))).sm_active is None


def test_activity_is_that_of_one_gpu():
    samples = intervals(0, gpm_start_s=[0.0], gpm_end_s=[1.0], dram_active=[0.5]) + intervals(
        1, gpm_start_s=[0.0], gpm_end_s=[3.0], dram_active=[0.1]
    )
    assert summarize(samples, windows((0, 4))).dram_active == pytest.approx(0.2)


# --- summary ---


def test_only_samples_inside_windows_count():
    samples = curve(
        t_s=[0.9, 1.0, 1.5, 2.0, 2.5, 3.0, 3.1],
        utilization_percent=[1, 90, 92, 94, 2, 100, 3],
        power_w=[9, 300, 310, 320, 9, 390, 999],
        sm_clock_mhz=[9, 1900, 1900, 1950, 9, 1450, 9999],
        temperature_c=[99, 60, 61, 62, 99, 65, 99],
        memory_used_gib=[99, 20, 21, 22, 99, 21, 99],
        throttle_reasons=[0x8, 0x4, 0x1, 0x0, 0x8, 0x40, 0x8],
    )
    summary = summarize(samples, windows((1.0, 2.0), (2.8, 3.0)))
    assert summary.gpu_util_mean == pytest.approx((90 + 92 + 94 + 100) / 4)
    assert summary.gpu_util_max == 100
    assert summary.power_w_mean == pytest.approx(330)
    assert summary.sm_clock_mhz_mean == pytest.approx(1800)
    assert summary.temperature_c_max == 65
    assert summary.memory_used_gib_max == 22
    assert summary.throttle_reasons == "hw_thermal_slowdown|sw_power_cap"


def test_means_are_over_gpus_and_samples_and_power_is_of_one_gpu():
    samples = curve(0, t_s=[0, 1], utilization_percent=[100, 80], power_w=[700, 700]) + curve(
        1, t_s=[0, 1], utilization_percent=[60, None], power_w=[500, 500]
    )
    summary = summarize(samples, windows((0, 1)))
    assert (summary.gpu_util_mean, summary.power_w_mean) == (80.0, 600.0)


@pytest.mark.parametrize(
    ("masks", "names"),
    [
        ([None, None], None),
        ([0, 0], ""),
        ([0x1, 0x2, None], ""),  # idle, or clocks the user has set
        ([0x1, 0x20, 0x80], "hw_power_brake_slowdown|sw_thermal_slowdown"),
        ([0x8 | 0x10 | 0x100 | 0x2], "display_clock_setting|hw_slowdown|sync_boost"),
        ([0x200, 0x400], "board_limit|reliability"),
        ([0x4 | 1 << 40], "reason_0x10000000000|sw_power_cap"),
    ],
)
def test_throttle_reasons_by_name(masks, names):
    samples = curve(t_s=list(range(len(masks))), throttle_reasons=masks)
    assert summarize(samples, windows((0, 10))).throttle_reasons == names


def test_nothing_measured_is_none_everywhere():
    empty = {
        "gpu_util_mean", "gpu_util_max", "power_w_mean", "energy_j", "energy_source", "sm_clock_mhz_mean",
        "temperature_c_max", "throttle_reasons", "memory_used_gib_max", *METRICS,
    }  # fmt: skip
    for samples, edges in [
        ([], [(0, 1)]),
        (curve(t_s=[0, 1]), [(0, 1)]),
        (curve(t_s=[0, 1], utilization_percent=[5, 5], power_w=[100, 100]), []),
    ]:
        assert vars(summarize(samples, windows(*edges))) == dict.fromkeys(empty)


# --- energy ---


@pytest.mark.parametrize(
    ("edges", "joules"),
    [
        ([(0, 4)], 500),
        ([(1, 3)], 250),  # 50 J at 1 s, 300 J at 3 s
        ([(0, 2), (3, 4)], 300),  # what is drawn between windows does not count
        ([(2.5, 3.0)], 100),  # no sample inside
        ([(2, 2.5)], 100),  # an edge on a sample
    ],
)
def test_energy_from_the_counter(edges, joules):
    samples = curve(t_s=[0, 2, 4], energy_j=[7000, 7100, 7500], power_w=[1, 1, 1])
    summary = summarize(samples, windows(*edges))
    assert summary.energy_j == pytest.approx(joules)
    assert summary.energy_source == "counter"


@pytest.mark.parametrize(
    ("edges", "joules"),
    [
        ([(0, 4)], 900),  # 2 s at a mean of 150 W, 2 s at a mean of 300 W
        ([(1, 3)], 425),  # 150 → 200 → 300 W
        ([(0, 1), (3, 4)], 125 + 350),
        ([(2.5, 3.5)], 300),  # no sample inside: 250 → 350 W
    ],
)
def test_energy_integrated_from_power(edges, joules):
    samples = curve(t_s=[0, 2, 4], power_w=[100, 200, 400])
    summary = summarize(samples, windows(*edges))
    assert summary.energy_j == pytest.approx(joules)
    assert summary.energy_source == "integrated_power"


def test_both_sources_agree_on_a_card_of_changing_power():
    # 300 W + 100 W · sin t: the counter is 300 t + 100 (1 − cos t), sampled unevenly around 10 Hz.
    t_s = np.cumsum(np.random.default_rng(0).uniform(0.05, 0.15, 200)) - 0.5
    power_w, energy_j = 300 + 100 * np.sin(t_s), 300 * t_s + 100 * (1 - np.cos(t_s))
    edges = [(1.03, 4.71), (5.2, 11.97)]
    exact_j = sum(300 * (b - a) + 100 * (math.cos(a) - math.cos(b)) for a, b in edges)
    counted = summarize(curve(t_s=t_s, power_w=power_w, energy_j=energy_j), windows(*edges))
    integrated = summarize(curve(t_s=t_s, power_w=power_w), windows(*edges))
    assert (counted.energy_source, integrated.energy_source) == ("counter", "integrated_power")
    assert counted.energy_j == pytest.approx(exact_j, rel=1e-3)
    assert integrated.energy_j == pytest.approx(exact_j, rel=1e-3)


def test_both_energies_side_by_side():
    # Two cards at 300 and 500 W over 2 of 4 s; the counters say 1 % more.
    samples = curve(0, t_s=[0, 4], power_w=[300, 300], energy_j=[0, 1212]) + curve(
        1, t_s=[0, 4], power_w=[500, 500], energy_j=[7, 2027]
    )
    assert energies_j(samples, windows((1, 3))) == (pytest.approx(1616), pytest.approx(1600))


@pytest.mark.parametrize(
    ("second_card", "edges", "known"),
    [
        ({"power_w": [200, 200], "energy_j": [None, None]}, [(0, 1)], (False, True)),
        ({"power_w": [None, None], "energy_j": [0, 200]}, [(0, 1)], (True, False)),
        ({"power_w": [None, 200], "energy_j": [0, 0]}, [(0, 1)], (False, False)),
        ({"power_w": [200, 200], "energy_j": [0, 200]}, [], (False, False)),
    ],
)
def test_each_energy_is_of_all_gpus_or_unknown(second_card, edges, known):
    samples = curve(0, t_s=[0, 1], power_w=[100, 100], energy_j=[0, 100]) + curve(
        1, t_s=[0, 1], **second_card
    )
    found = energies_j(samples, windows(*edges))
    assert found == tuple(pytest.approx(300) if each else None for each in known)
    assert energies_j([], windows((0, 1))) == (None, None)


def test_energy_is_of_all_gpus():
    samples = curve(0, t_s=[0, 10], energy_j=[0, 3000]) + curve(1, t_s=[0, 10], energy_j=[50_000, 57_000])
    assert summarize(samples, windows((2, 4))).energy_j == pytest.approx(600 + 1400)


@pytest.mark.parametrize(
    "counter",
    [
        [None, None, None],
        [0, 0, 0],  # cards without a counter may answer 0 for ever
        [900, 950, 10],  # the driver was loaded again
        [None, 10, 20],  # begins inside the window
    ],
)
def test_a_counter_that_cannot_be_trusted_gives_way_to_power(counter):
    samples = curve(t_s=[0, 1, 2], energy_j=counter, power_w=[200, 200, 200])
    summary = summarize(samples, windows((0.5, 2)))
    assert (summary.energy_j, summary.energy_source) == (pytest.approx(300), "integrated_power")


def test_one_source_for_all_gpus():
    samples = curve(0, t_s=[0, 1], energy_j=[0, 999], power_w=[100, 100]) + curve(
        1, t_s=[0, 1], energy_j=[None, None], power_w=[200, 200]
    )
    summary = summarize(samples, windows((0, 1)))
    assert (summary.energy_j, summary.energy_source) == (pytest.approx(300), "integrated_power")


@pytest.mark.parametrize(
    ("second_card", "edges"),
    [
        ({"t_s": [0, 1], "power_w": [None, None]}, (0, 1)),  # a sum that lacks a card is not the energy
        ({"t_s": [0, 1], "power_w": [200, 200]}, (0, 1.5)),  # the window ends after the last sample
        ({"t_s": [0, 1], "power_w": [200, None]}, (0, 1)),  # lost on the way
    ],
)
def test_energy_that_was_not_measured_is_none(second_card, edges):
    samples = curve(0, t_s=[0, 1], power_w=[100, 100]) + curve(1, **second_card)
    summary = summarize(samples, windows(edges))
    assert (summary.energy_j, summary.energy_source) == (None, None)


# --- files and warnings ---


def test_csv_has_a_row_per_sample_and_empty_cells(tmp_path):
    path = tmp_path / "telemetry.csv"
    write_csv(path, [BUSY, TelemetrySample(t_s=7.6, gpu=1, utilization_percent=0)])
    full, sparse = csv.DictReader(path.read_text().splitlines())
    measured = {name: value for name, value in vars(BUSY).items() if value is not None}
    assert {name: float(cell) for name, cell in full.items() if cell} == measured
    assert {name: cell for name, cell in sparse.items() if cell} == {
        "t_s": "7.6",
        "gpu": "1",
        "utilization_percent": "0",
    }


def test_load_before_the_start_is_told_in_a_sentence():
    nvml = FakeNvml(
        FakeCard(uuid=A),
        FakeCard(
            uuid=B, bus_id="00000000:02:00.0", memory_used=int(12.3 * GIB), utilization=87,
            processes={123: 12 * GIB, 77: None, os.getpid(): GIB},
        ),
        process_names={123: "/usr/bin/python"},
    )  # fmt: skip
    gpus = visible_gpus(nvml, {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert preexisting_load(gpus, nvml=nvml) == [
        "GPU 0 already had 12.3 GiB in use and 87 % utilisation before the start; processes: 123 python, 77"
    ]
    found = other_processes(gpus, [os.getpid(), 77], nvml=nvml)
    assert [(p.gpu, p.pid, p.name, p.memory_gib) for p in found] == [(0, 123, "python", 12.0)]
    assert nvml.references == 0


@pytest.mark.parametrize(
    ("card", "sentence"),
    [
        (FakeCard(), None),
        (FakeCard(memory_used=GIB // 2, utilization=96), None),  # of the run before, which has just ended
        (FakeCard(processes={os.getpid(): GIB}), None),
        (
            FakeCard(memory_used=3 * GIB),
            "GPU 0 already had 3.0 GiB in use and 0 % utilisation before the start",
        ),
        (
            FakeCard(
                memory_used=3 * GIB, failing={"nvmlDeviceGetUtilizationRates": pynvml.NVMLError_NotSupported}
            ),
            "GPU 0 already had 3.0 GiB in use before the start",
        ),
        (
            FakeCard(
                memory_used=2 * GIB,
                failing={"nvmlDeviceGetComputeRunningProcesses": pynvml.NVMLError_NoPermission},
            ),
            "GPU 0 already had 2.0 GiB in use and 0 % utilisation before the start",
        ),
    ],
)
def test_load_says_only_what_it_could_read(card, sentence):
    nvml = FakeNvml(card)
    assert preexisting_load(visible_gpus(nvml, {}), nvml=nvml) == ([sentence] if sentence else [])


def test_no_load_without_a_driver():
    nvml = FakeNvml(FakeCard(memory_used=9 * GIB))
    gpus = visible_gpus(nvml, {})
    nvml.init_error = pynvml.NVMLError_LibraryNotFound
    assert preexisting_load(gpus, nvml=nvml) == []


# --- the row ---


def row_of(samples: list[TelemetrySample], precision: str, **seen) -> RunRecord:
    """Of two windows of 20 steps of 100 samples, 2 s each, on one H200."""
    config = BenchmarkConfig(model="resnet50", gpus=1, per_replica_batch_size=100, precision=precision)
    observed = Observed(
        windows=[Window(0, 20, 2000, 0.0, 2.0), Window(1, 20, 2000, 3.0, 5.0)],
        losses=[7.0, 6.0],
        accuracies=[0.0, 0.1],
        telemetry=samples,
        **seen,
    )
    return fill(RunRecord(status="ok"), config, observed, [])


def test_from_samples_and_cards_to_columns_and_gates():
    card = FakeCard(gpm_supported=True, nvlinks=(1,), ecc_errors=(0, 2))
    nvml = FakeNvml(card)
    watch = CardWatch(visible_gpus(nvml, {}), nvml)
    card.ecc_errors = (9, 3)
    watch.look_again()
    samples = curve(
        t_s=[0.0, 2.0, 5.0], energy_j=[0.0, 800.0, 2000.0], power_w=[400.0, 400.0, 400.0],
        utilization_percent=[90, 90, 90], sm_clock_mhz=[1700, 1700, 1700], memory_used_gib=[30.0, 31.0, 30.0],
        gpm_start_s=[None, 0.0, 3.0], gpm_end_s=[None, 2.0, 5.0], sm_active=[None, 0.7, 0.9],
        graphics_active=[None, 0.95, 0.97],
        sm_occupancy=[None, 0.3, 0.5], tensor_active=[None, 0.001, 0.003], dram_active=[None, 0.6, 0.8],
        pcie_rx_gb_per_s=[None, 1.0, 3.0], pcie_tx_gb_per_s=[None, 2.0, 4.0],
        nvlink_rx_gb_per_s=[None, 10.0, 30.0], nvlink_tx_gb_per_s=[None, 20.0, 40.0],
    )  # fmt: skip
    row = row_of(samples, "mixed_float16", cards=watch, other_process_on_gpu=True)
    expected = {
        # 800 J in each window of 2,000 samples.
        "energy_j_per_sample": 0.4, "samples_per_joule": 2.5, "sm_active": 0.8, "sm_occupancy": 0.4,
        "graphics_active": 0.96,
        "tensor_active": 0.002, "dram_active": 0.7, "pcie_rx_gb_per_s": 2.0, "pcie_tx_gb_per_s": 3.0,
        "nvlink_rx_gb_per_s": 20.0, "nvlink_tx_gb_per_s": 30.0, "memory_used_gib_max": 31.0,
        "sm_clock_mhz_max": 1980, "power_limit_w": 700.0, "pcie_link": "5x16", "ecc_errors": 1,
    }  # fmt: skip
    assert {name: getattr(row, name) for name in expected} == pytest.approx(expected)
    assert {
        "clocks_below_90_percent", "other_process_on_gpu", "busy_without_tensor_cores", "ecc_errors"
    } <= set(row.gates.split("|"))  # fmt: skip


def test_a_row_of_a_card_that_says_nothing_has_empty_cells_and_trips_nothing():
    row = row_of([], "mixed_float16")
    assert {getattr(row, name) for name in (*METRICS, "samples_per_joule")} == {None}
    assert row.gates == ""
