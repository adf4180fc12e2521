"""The measured matrix rate: its arithmetic on a small product, and its cache."""

import json
import logging

import pytest

from tfbench import ceilings
from tfbench.hardware.gpus import Gpu

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
        lambda device, precision: asked.append(precision) or rates[len(asked) - 1],
    )
    return asked


def test_measured_once_for_a_card_and_its_software(measured):
    assert ceilings.matrix_flops(GPU, "mixed_float16", VERSIONS) == 7e14
    assert ceilings.matrix_flops(GPU, "mixed_float16", VERSIONS) == 7e14
    assert measured == ["mixed_float16"]


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


def test_rate_is_flops_over_the_windows_seconds(monkeypatch):
    """On a clock that gives each window 2 s: 3 products of 2 × 16³ FLOP each."""
    ticks = iter(range(0, 1000, 2))
    monkeypatch.setattr(
        ceilings, "WindowTimer", lambda synchronize: _original(synchronize, clock=lambda: float(next(ticks)))
    )
    rate = ceilings.measure_matrix_flops("CPU:0", "fp32", size=16, products=3)
    assert rate == pytest.approx(3 * 2 * 16**3 / 2.0)


_original = ceilings.WindowTimer
