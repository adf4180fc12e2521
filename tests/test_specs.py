import pytest

from tfbench.hardware import specs


def test_every_row_parses_and_names_are_unique():
    rows = specs.load()
    assert len(rows) == 17
    names = [name.lower() for row in rows for name in row.nvml_names]
    assert len(names) == len(set(names))
    for row in rows:
        # The slowest card has 8 TFLOP/s, the fastest 2,250: anything else is a wrong unit.
        assert 8e12 <= specs.peak_flops(row, "fp32") < 1e14
        assert 5e13 < specs.peak_flops(row, "mixed_float16") < 3e15
        assert all(10 < gb < 200 for gb in row.mem_gb)
        assert 60 < row.tdp_w < 1100
        assert row.mem_bw_gbs > 250


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "mixed_bfloat16", 989.5),  # 1,979 with sparsity in the data sheet
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5),
        ("NVIDIA H100 PCIe", "mixed_float16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("A100-SXM4-40GB", "mixed_float16", 312),
        ("Tesla V100-SXM2-32GB", "mixed_float16", 125),
        ("Tesla T4", "mixed_float16", 65),
        ("NVIDIA GeForce RTX 3090", "mixed_float16", 71),  # with float32 accumulation
        ("nvidia geforce rtx 4090", "tf32", 82.6),
        ("NVIDIA B200", "mixed_bfloat16", 2250),
    ],
)
def test_peaks_of_the_data_sheets(name, precision, tflops):
    assert specs.peak_flops(specs.find(name), precision) == pytest.approx(tflops * 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "precision"), [("Tesla T4", "tf32"), ("Tesla V100-SXM2-16GB", "mixed_bfloat16")]
)
def test_a_unit_that_the_card_lacks_has_no_peak(name, precision):
    assert specs.peak_flops(specs.find(name), precision) is None


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "NVIDIA A100X",
        "NVIDIA A10G",
        "NVIDIA H200 NVL",
        "NVIDIA H100 NVL",
        "NVIDIA H100",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-80GB MIG 7g.80gb",
    ],
)
def test_unknown_cards_are_unknown(name):
    assert specs.find(name) is None


def test_memory_variants():
    assert specs.find("Tesla V100-PCIE-16GB").mem_gb == (16.0, 32.0)
    assert specs.find("NVIDIA H200").mem_gb == (141.0,)


def test_an_unknown_precision_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'int4'.*fp32, tf32, mixed_float16, mixed_bfloat16"):
        specs.peak_flops(specs.find("NVIDIA H200"), "int4")
