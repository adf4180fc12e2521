"""The measured matrix rate: its arithmetic on a small product, and its cache."""

import json
import logging

import pytest

from tfbench import ceilings
from tfbench.hardware.gpus import Gpu
from tfbench.measure.timing import Window
from tfbench.microbench import timed

GPU = Gpu(
    index=0, uuid="GPU-1", pci_bus_id="0", name="NVIDIA H200", memory_gib=140.0, compute_capability=(9, 0)
)
VERSIONS = {"driver": "580", "tensorflow": "2.21.0"}


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Rates that the next measurements give, and the precisions that were measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates, asked = [7e14, 8e14], []
    monkeypatch.setattr(
        ceilings,
        "measure_matrix_flops",
        lambda device, number_format: asked.append(number_format) or rates[len(asked) - 1],
    )
    return asked


def test_measured_once_for_a_card_and_its_software(measured):
    assert ceilings.matrix_flops(GPU, "mixed_float16", VERSIONS) == 7e14
    assert ceilings.matrix_flops(GPU, "mixed_float16", VERSIONS) == 7e14
    assert measured == ["fp16"]


@pytest.mark.parametrize(
    ("precision", "versions"), [("tf32", VERSIONS), ("mixed_float16", {**VERSIONS, "driver": "590"})]
)
def test_anything_else_is_measured_anew(measured, precision, versions):
    ceilings.matrix_flops(GPU, "mixed_float16", VERSIONS)
    assert ceilings.matrix_flops(GPU, precision, versions) == 8e14
    assert ceilings.matrix_flops(GPU, "mixed_float16", VERSIONS) == 7e14  # and the first is kept


def test_a_broken_cache_costs_a_measurement_and_says_so(measured, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("tfbench"), "propagate", True)
    path = tmp_path / "tfbench" / "ceilings.json"
    path.parent.mkdir()
    path.write_text("{torn")
    assert ceilings.matrix_flops(GPU, "tf32", VERSIONS) == 7e14
    assert "ceilings.json" in caplog.text
    assert list(json.loads(path.read_text()).values()) == [7e14]


def test_what_was_measured_elsewhere_is_not_measured_again(measured):
    ceilings.keep(GPU, "fp16", VERSIONS | {"run_id": "any"}, 9e14)
    assert ceilings.matrix_flops(GPU, "mixed_float16", VERSIONS) == 9e14
    assert measured == []


def test_rate_is_flops_over_the_windows_seconds_of_the_better_engine(monkeypatch):
    """2 × 16³ FLOP a product, four in a call; by the library 3 calls in 2 s, by XLA 4 calls in 2 s."""
    calls = iter([3, 4])
    monkeypatch.setattr(
        timed, "time_calls", lambda call, seconds: (Window(0, count := next(calls), count, 0.0, 2.0),)
    )
    rate = ceilings.measure_matrix_flops("CPU:0", "fp32", size=16)
    assert rate == pytest.approx(4 * 4 * 2 * 16**3 / 2.0)
