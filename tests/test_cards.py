import dataclasses

import pynvml
import pytest
from fake_nvml import FakeCard, FakeNvml, mig_instance

from tfbench.hardware.cards import CardFacts, card_facts
from tfbench.hardware.gpus import visible_gpus

WHOLE = CardFacts(
    power_limit_w=700.0, power_limit_default_w=700.0, sm_clock_mhz_max=1980, memory_clock_mhz_max=3201,
    pcie_generation=5, pcie_generation_max=5, pcie_width=16, pcie_width_max=16, nvlinks_active=17,
    persistence=True, mig=False, numa_node=0, ecc=True, ecc_errors_corrected=4, ecc_errors_uncorrected=2,
    rows_remapped_corrected=3, rows_remapped_uncorrected=1, row_remapping_pending=True,
    row_remapping_failed=False,
)  # fmt: skip


def h200(**fields) -> FakeCard:
    return FakeCard(
        ecc_errors=(4, 2), remapped_rows=(3, 1, 1, 0), nvlinks=(1,) * 17 + (0,), **fields
    )  # one of 18 links is down


def read(card: FakeCard, **options) -> CardFacts:
    nvml = FakeNvml(card, **options)
    (gpu,) = visible_gpus(nvml, {})
    facts = card_facts(gpu, nvml)
    assert nvml.references == 0
    return facts


def test_every_fact_in_its_unit():
    assert read(h200()) == WHOLE


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetEnforcedPowerLimit", ("power_limit_w",)),
        ("nvmlDeviceGetPowerManagementDefaultLimit", ("power_limit_default_w",)),
        ("nvmlDeviceGetMaxClockInfo", ("sm_clock_mhz_max", "memory_clock_mhz_max")),
        ("nvmlDeviceGetCurrPcieLinkGeneration", ("pcie_generation",)),
        ("nvmlDeviceGetCurrPcieLinkWidth", ("pcie_width",)),
        ("nvmlDeviceGetNvLinkState", ("nvlinks_active",)),
        ("nvmlDeviceGetEccMode", ("ecc",)),
        ("nvmlDeviceGetTotalEccErrors", ("ecc_errors_corrected", "ecc_errors_uncorrected")),
        (
            "nvmlDeviceGetRemappedRows",
            ("rows_remapped_corrected", "rows_remapped_uncorrected", "row_remapping_pending",
             "row_remapping_failed"),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("error", [pynvml.NVMLError_NotSupported, pynvml.NVMLError_Unknown])
def test_an_unknown_fact_is_none_and_leaves_the_others(function, fields, error):
    assert read(h200(failing={function: error})) == dataclasses.replace(WHOLE, **dict.fromkeys(fields))


def test_a_card_without_nvlink_does_not_say_no_links_but_nothing():
    assert read(FakeCard()).nvlinks_active is None
    assert read(FakeCard(nvlinks=(0, 0))).nvlinks_active == 0


def test_a_card_that_is_gone_and_a_mig_instance_say_what_they_know():
    nvml = FakeNvml(h200())
    (gpu,) = visible_gpus(nvml, {})
    nvml.cards.clear()
    assert set(vars(card_facts(gpu, nvml)).values()) == {None}
    instance = mig_instance("MIG-1", failing={"nvmlDeviceGetMaxClockInfo": pynvml.NVMLError_NotSupported})
    facts = read(h200(mig_on=True, instances={0: instance}))
    assert (facts.sm_clock_mhz_max, facts.mig, facts.ecc_errors_uncorrected) == (None, None, 0)


def test_without_driver_nothing_is_known():
    nvml = FakeNvml(h200())
    (gpu,) = visible_gpus(nvml, {})
    nvml.init_error = pynvml.NVMLError_DriverNotLoaded
    assert set(vars(card_facts(gpu, nvml)).values()) == {None}
