import dataclasses

import pytest
from fake_nvml import FakeCard, FakeNvml

from tfbench.hardware.cards import CardFacts
from tfbench.hardware.gpus import visible_gpus
from tfbench.measure.card_watch import CardWatch, columns

WHOLE = CardFacts(
    power_limit_w=700.0, power_limit_default_w=700.0, sm_clock_mhz_max=1980, memory_clock_mhz_max=3201,
    pcie_generation=5, pcie_generation_max=5, pcie_width=16, pcie_width_max=16, nvlinks_active=17,
    persistence=True, mig=False, numa_node=0, ecc=True, ecc_errors_corrected=4, ecc_errors_uncorrected=2,
    rows_remapped_corrected=3, rows_remapped_uncorrected=1, row_remapping_pending=True,
    row_remapping_failed=False,
)  # fmt: skip


def cards(**fields: list) -> list[CardFacts]:
    """A card for each value of the lists, which are of equal length."""
    return [
        dataclasses.replace(WHOLE, **dict(zip(fields, row, strict=True)))
        for row in zip(*fields.values(), strict=True)
    ]


def test_the_slowest_card_and_the_sum_of_new_errors_make_the_row():
    before = cards(ecc_errors_uncorrected=[2, 0], power_limit_w=[700.0, 700.0])
    after = cards(
        ecc_errors_uncorrected=[3, 4], power_limit_w=[700.0, 600.0], sm_clock_mhz_max=[1755, 1980],
        pcie_width=[16, 8],
    )  # fmt: skip
    assert columns(before, after) == {
        "sm_clock_mhz_max": 1755,
        "power_limit_w": 600.0,
        "pcie_link": "5x16|5x8",
        "ecc_errors": 1 + 4,
    }


def test_a_run_that_ended_before_its_windows_knows_limits_only():
    expected = {"sm_clock_mhz_max": 1980, "power_limit_w": 700.0, "pcie_link": None, "ecc_errors": None}
    assert columns([WHOLE], []) == expected


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ([None, 0], [0, 0], "ecc_errors_uncorrected"),
        ([0, 0], [0, None], "ecc_errors_uncorrected"),
        ([5, 0], [0, 9], "ecc_errors_uncorrected"),  # reset in between: the counter began anew
        ([1980, 1980], [1980, None], "sm_clock_mhz_max"),
        ([700.0, 700.0], [None, 700.0], "power_limit_w"),
        ([5, 5], [5, None], "pcie_generation"),
        ([16, 16], [None, 16], "pcie_width"),
    ],
)
def test_what_one_card_does_not_say_is_unknown(before, after, name):
    column = {
        "ecc_errors_uncorrected": "ecc_errors",
        "pcie_generation": "pcie_link",
        "pcie_width": "pcie_link",
    }
    found = columns(cards(**{name: before}), cards(**{name: after}))
    assert [key for key, value in found.items() if value is None] == [column.get(name, name)]


def test_no_gpu_no_columns():
    assert set(columns([], []).values()) == {None}


def test_equal_links_are_said_once_and_no_new_error_is_zero():
    found = columns([WHOLE, WHOLE], [WHOLE, WHOLE])
    assert (found["pcie_link"], found["ecc_errors"]) == ("5x16", 0)


def test_the_watch_reads_every_card_twice():
    cards = [FakeCard(ecc_errors=(0, 2)), FakeCard(uuid="GPU-2", bus_id="00000000:02:00.0")]
    nvml = FakeNvml(*cards)
    watch = CardWatch(visible_gpus(nvml, {}), nvml)
    assert (watch.columns()["power_limit_w"], watch.columns()["pcie_link"]) == (700.0, None)
    for card in cards:
        card.ecc_errors = (5, 4)
        card.answers = {"nvmlDeviceGetEnforcedPowerLimit": 650_000}
    watch.look_again()
    assert watch.columns() == {
        "sm_clock_mhz_max": 1980,
        "power_limit_w": 650.0,
        "pcie_link": "5x16",
        "ecc_errors": 2 + 4,
    }
    assert nvml.references == 0
