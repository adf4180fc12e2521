"""The micro-benchmarks: arithmetic by hand, what they check, what they say where something cannot be."""

import dataclasses
import io
import logging
from fractions import Fraction

import numpy as np
import pytest
import step_helpers  # noqa: F401  gives this process its CPU devices, before any test runs on one
from rich.console import Console
from run_helpers import gpu, python

from tfbench.hardware import specs
from tfbench.hardware.cards import CardFacts
from tfbench.measure.timing import Window
from tfbench.microbench import (
    all_reduce,
    apart,
    conv,
    input_rate,
    matmul,
    memory,
    roofline,
    rows,
    suite,
    timed,
)
from tfbench.microbench.case import (
    Case,
    Machine,
    NotPossibleError,
    Result,
    median,
    median_interval,
)
from tfbench.models.resnet import RESNET50_SHAPE, RESNET_TINY_SHAPE, ConvolutionShape
from tfbench.records import RunRecord

H200 = specs.find("NVIDIA H200")
FACTS = {"run_id": "micro-1", "started_at": "2026-01-01T00:00:00+00:00"}
NO_CARD = CardFacts(**{field.name: None for field in dataclasses.fields(CardFacts)})


def machine(**fields) -> Machine:
    """Two logical CPU devices unless told otherwise."""
    cpu = {"devices": ("CPU:0", "CPU:1"), "gpus": (), "spec": None, "card": None, "topology": None}
    return Machine(**cpu | {"quick": False} | fields)


def h200s(count: int = 1, **fields) -> Machine:
    names = tuple(f"GPU:{index}" for index in range(count))
    return machine(devices=names, gpus=(gpu(),) * count, spec=H200, card=NO_CARD, **fields)


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("values", "middle", "interval"),
    [
        ([5.0], 5.0, None),
        ([3.0, 1.0, 2.0, 4.0], 2.5, None),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, None),  # all of five: 1 - 2/32 = 93.75 %
        ([6.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3.5, (1.0, 6.0)),  # all of six: 1 - 2/64 = 96.9 %
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 100.0], 6.0, (3.0, 9.0)),  # 2nd to 8th: 1 - 2 × 10/512
    ],
)
def test_median_and_its_interval(values, middle, interval):
    assert median(values) == middle
    assert median_interval(values) == interval


def test_no_window_has_no_median():
    with pytest.raises(ValueError, match="no window"):
        median([])


def test_rates_are_work_over_the_windows_seconds():
    windows = (Window(0, 4, 4, 10.0, 12.0), Window(1, 3, 3, 20.0, 21.0))
    assert timed.rates(windows, 5.0) == (10.0, 15.0)  # 4 × 5 in 2 s, 3 × 5 in 1 s


@pytest.mark.parametrize(("replicas", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_factor(replicas, factor):
    assert all_reduce.bus_factor(replicas) == factor


def test_one_replica_has_no_bus():
    with pytest.raises(ValueError, match="needs two"):
        all_reduce.bus_factor(1)


@pytest.mark.parametrize(
    ("operation", "count"),
    [("copy", 8000), ("triad", 12000), ("host_to_device", 4000), ("device_to_host", 4000)],
)
def test_bytes_that_move(operation, count):
    assert memory.moved_bytes(operation, 1000) == count


@pytest.mark.parametrize(
    ("generation", "lanes", "limit"),
    [(5, 16, 63.0), (4, 8, 15.75), (3, 16, 15.76), (None, 16, None), (9, 16, None)],
)
def test_pcie_limit(generation, lanes, limit):
    """32 GT/s × 128/130 ÷ 8 × 16 lanes = 63.0 GB/s, and so on."""
    card = dataclasses.replace(NO_CARD, pcie_generation_max=generation, pcie_width_max=lanes)
    found = memory.pcie_limit_gb_per_s(card)
    assert found == (None if limit is None else pytest.approx(limit, rel=1e-3))


@pytest.mark.parametrize(
    ("name", "topology", "peak"),
    [
        ("Tesla V100-SXM2-16GB", "NV1", 25.0),  # of 6 links of 25 GB/s in each direction
        ("Tesla V100-SXM2-16GB", "NV2", 50.0),
        ("NVIDIA A100-SXM4-80GB", "NV12", 300.0),
        ("NVIDIA H200", "NV18", 450.0),
        ("NVIDIA H200", "SYS", None),
        ("NVIDIA H200", None, None),
        ("NVIDIA H100 PCIe", "NV12", None),  # links of its bridges: not in the sources
        ("NVIDIA L4", "NV1", None),
        (None, "NV18", None),
    ],
)
def test_limit_of_the_link_between_gpus(name, topology, peak):
    linked = dataclasses.replace(h200s(2, topology=topology), spec=specs.find(name))
    assert all_reduce.link_peak_gb_per_s(linked) == peak


@pytest.mark.parametrize(
    ("precision", "peak"), [("fp64", 67), ("fp32", 67), ("tf32", 494.5), ("bf16", 989.5), ("fp8", 1979)]
)
def test_peak_is_the_dense_one_of_the_data_sheet(precision, peak):
    assert matmul.peak_of(H200, precision) == peak
    assert matmul.peak_of(None, precision) is None


@pytest.mark.parametrize(
    ("precision", "length", "bound"),
    [
        ("fp16", 4096, 8 * (2**-11 + 64 * 2**-24)),
        ("tf32", 4096, 8 * (2**-10 + 65 * 2**-24)),
        ("int8", 4096, 0.0),
    ],
)
def test_error_bound(precision, length, bound):
    assert matmul.error_bound(precision, length) == pytest.approx(bound)


def test_models_products_are_those_that_the_models_do():
    """Row counts by hand: 1,024 images of 56 × 56, 256 sequences of 128 tokens, 20 of them masked."""
    products = matmul.model_products()
    assert products["resnet50 layer1.0.conv1"] == (3_211_264, 64, 64)
    assert products["resnet50 classifier"] == (1024, 2048, 1000)
    assert products["bert_large inner"] == (32_768, 1024, 4096)
    assert products["bert_large vocabulary"] == (5120, 1024, 30_522)
    assert products["bert_large vocabulary, padded to 8"] == (5120, 1024, 30_528)


def test_distinct_convolutions_of_resnet50():
    """By hand: the stem, 4 in stage 1 (its projection is as its third), 6 in each of the others."""
    layers = conv.distinct(RESNET50_SHAPE, 224)
    sizes = [(x.in_channels, x.out_channels, x.kernel, x.stride, x.in_size) for x in layers]
    assert len(sizes) == len(set(sizes)) == 23
    assert sizes[0] == (3, 64, 7, 2, 224)


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("precision", "engine", "where", "why"),
    [
        ("fp8", "xla", machine(), "the CPU has no units"),
        ("tf32", "library", machine(), "the CPU has no units"),
        ("fp8", "library", h200s(), "takes no float8"),
        ("int8", "library", h200s(), "no int8 product"),
        ("fp8", "xla", machine(gpus=(gpu(compute_capability=(8, 0)),)), "8.9, this GPU has 8.0"),
    ],
)
def test_impossible_says_why(precision, engine, where, why):
    assert why in matmul.why_not(precision, engine, where)


@pytest.mark.parametrize(("precision", "engine"), [("fp8", "xla"), ("int8", "xla"), ("tf32", "library")])
def test_possible_on_an_h200(precision, engine):
    assert matmul.why_not(precision, engine, h200s()) == ""


CUBLAS_FP8 = """
ENTRY %main (a: f8e4m3fn[64,64], b: f8e4m3fn[64,64]) -> bf16[64,64] {
  %a = f8e4m3fn[64,64]{1,0} parameter(0)
  %b = f8e4m3fn[64,64]{1,0} parameter(1)
  %o = f32[] constant(1)
  ROOT %c = (bf16[64,64]{1,0}, s8[32]{0}) custom-call(%a, %b, %o), custom_call_target="__cublas$lt$matmul$f8"
}
"""
WIDENED = """
  %p0 = f8e4m3fn[64,64]{1,0} parameter(0)
  %wide.1 = f32[64,64]{1,0} convert(%p0)
  %d = f32[64,64]{1,0} dot(%wide.1, %wide.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %t = f32[8]{0} custom-call(%d), custom_call_target="TopK"
"""


@pytest.mark.parametrize(
    ("program", "precision", "products", "native"),
    [
        (CUBLAS_FP8, "fp8", ["__cublas$lt$matmul$f8(f8e4m3fn, f8e4m3fn)"], True),
        (WIDENED, "fp8", ["dot(f32, f32)"], False),
        ("  %x = s8[4,4] parameter(0)\n  ROOT %y = s32[4,4] dot(%x, %x)\n", "int8", ["dot(s8, s8)"], True),
    ],
)
def test_evidence_of_the_unit_in_a_compiled_program(program, precision, products, native):
    assert matmul.products_in(program) == products
    assert [matmul.is_native(each, precision) for each in products] == [native]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -SEGV $$", "was killed by SIGSEGV"),
        ("exit 3", "ended with exit code 3"),
        ("exec sleep 60", "no answer within 0.5 s"),
        ("""echo '{"not_possible": "not reached: as it says"}'""", "not reached: as it says"),
    ],
)
def test_a_process_that_does_not_measure_is_a_reason_and_not_the_end(monkeypatch, tmp_path, script, reason):
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\n{script}\n")
    other.chmod(0o755)
    monkeypatch.setattr(apart.sys, "executable", str(other))
    with pytest.raises(NotPossibleError, match=reason):
        apart.measure("GPU:0", "fp8", (32, 32, 32), "xla", 0.01, timeout_s=0.5)


@pytest.mark.slow
def test_another_process_measures_as_this_one_does():
    found = apart.measure("CPU:0", "fp16", (64, 32, 16), "xla", 0.02, H200)
    assert 0 < found.relative_error <= found.bound == matmul.error_bound("fp16", 32)
    assert len(found.rates) == len(found.windows) == timed.WINDOWS
    flops = matmul._LEFTS * 2 * 64 * 32 * 16
    first = found.windows[0]
    assert found.rates[0] == pytest.approx(first.steps * flops / 1e12 / (first.end_s - first.start_s))
    assert (found.peak, found.unit, found.flop_per_byte) == (989.5, "TFLOP/s", pytest.approx(64 / 7))
    with pytest.raises(NotPossibleError, match="not reached: XLA made of it"):
        apart.measure("CPU:0", "fp8", (32, 32, 32), "xla", 0.01)


def test_rested_windows_rest_and_count_the_calls_inside_only(monkeypatch):
    events = []
    monkeypatch.setattr(timed.devices, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(timed.time, "sleep", lambda seconds: events.append(seconds))
    windows = timed.time_rested_calls(lambda: events.append("call"), 3, 0.5, windows=2)
    window = ["wait", 0.5, "call", "wait", "call", "call", "call", "wait"]
    assert events == ["call", *window, *window]
    assert [each.steps for each in windows] == [3, 3]


def test_bursts_are_cases_of_a_gpu_only():
    named = [(case.name, case.precision) for case in matmul.cases(h200s()) if matmul.RESTED in case.name]
    assert named == [("8192x8192x8192 after rests", each) for each in ("fp16", "bf16")]
    assert not [case for case in matmul.cases(machine()) if matmul.RESTED in case.name]


def test_fp8_that_was_widened_has_no_rate():
    with pytest.raises(NotPossibleError, match=r"not reached.*dot\(f32, f32\)"):
        matmul.measure("CPU:0", "fp8", (32, 32, 32), "xla", 0.01)


# ---------------------------------------------------------------- rows


class NoSensors:
    samples = ()


def row_of(measure, sampler=None) -> rows.MicroRow:
    case = Case(benchmark="matmul", name="x", precision="fp16", measure=measure)
    return suite._row(case, sampler or NoSensors(), FACTS)


def refuse() -> Result:
    raise NotPossibleError("no such unit")


def test_impossible_case_is_an_empty_rate_with_the_reason():
    row = row_of(refuse)
    assert (row.rate, row.low, row.share_of_peak, row.note) == (None, None, None, "no such unit")


def test_a_device_without_memory_is_an_empty_rate_and_no_failure():
    import tensorflow as tf

    def exhaust() -> Result:
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    row = row_of(exhaust)
    assert row.rate is None
    assert "too small" in row.note


def test_whatever_fails_is_a_row_and_the_others_go_on(caplog):
    def broken() -> Result:
        raise ValueError("no device")

    row = row_of(broken)
    assert (row.rate, row.note) == (None, "failed: ValueError: no device")
    assert "matmul x failed" in caplog.text
    assert "Traceback" in caplog.text


def test_figures_of_a_row():
    values = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    row = row_of(lambda: Result(rates=values, unit="TFLOP/s", peak=7.0, relative_error=0.1, bound=0.2))
    assert (row.rate, row.low, row.high, row.windows) == (3.5, 1.0, 6.0, 6)
    assert row.share_of_peak == 0.5


@pytest.mark.parametrize("error", [0.3, float("nan"), float("inf")])
def test_wrong_outputs_have_no_rate(error):
    row = row_of(lambda: Result(rates=(1.0,), unit="TFLOP/s", relative_error=error, bound=0.2))
    assert row.rate is None
    assert row.note.startswith("wrong")


def test_rows_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "new" / "micro.csv"
    first = rows.MicroRow(
        **FACTS, benchmark="matmul", case='a, "b"', rate=1 / 3, windows=9, note="two\nlines"
    )
    rows.append(path, first)
    rows.append(path, rows.MicroRow(**FACTS, benchmark="conv", case="c"))
    back = rows.read(path)
    assert back == [
        dataclasses.replace(first, note="two lines"),
        rows.MicroRow(**FACTS, benchmark="conv", case="c"),
    ]
    assert path.read_text().count("run_id") == 1


def test_what_a_killed_writer_left_is_cut_off(tmp_path):
    path = tmp_path / "micro.csv"
    row = rows.MicroRow(**FACTS, benchmark="matmul", case="a")
    rows.append(path, row)
    path.write_text(path.read_text() + "micro-2,2026")
    assert rows.read(path) == [row]
    rows.append(path, row)
    assert rows.read(path) == [row, row]


def test_another_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "micro.csv"
    path.write_text("a,b\n1,2\n")
    for use in (
        lambda: rows.append(path, rows.MicroRow(**FACTS, benchmark="x", case="y")),
        lambda: rows.read(path),
    ):
        with pytest.raises(rows.MicroSchemaError, match="does not have the columns"):
            use()
    assert path.read_text() == "a,b\n1,2\n"


# ---------------------------------------------------------------- outputs against float64


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16", "int8"])
def test_products_are_right_and_counted(precision):
    result = matmul.measure("CPU:0", precision, (24, 40, 56), "xla", 0.01)
    assert result.relative_error <= result.bound
    assert not result.is_wrong
    size = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}[precision]
    written = 4 if precision == "int8" else size
    least_bytes = size * (24 * 40 + 40 * 56) + written * 24 * 56
    assert result.flop_per_byte == pytest.approx(2 * 24 * 40 * 56 / least_bytes)
    assert result.gb_per_s == pytest.approx(1e3 * median(result.rates) / result.flop_per_byte)


def test_a_wrong_product_is_found():
    import tensorflow as tf

    generator = np.random.default_rng(0)
    left, right = generator.standard_normal((16, 32)) / 32**0.5, generator.standard_normal((32, 24))
    product = left @ right
    bound = matmul.error_bound("fp64", 32)

    def error(output) -> float:
        return matmul.relative_error(*map(tf.constant, (left, right, output)), "fp64")

    assert error(product) <= bound
    product[0, 5] += 0.01  # one output of one row
    assert error(product) == pytest.approx(0.01 / np.sqrt(np.mean((left @ right)[_rows(16)] ** 2)), rel=1e-6)
    assert error(product) > bound


def _rows(count: int) -> list[int]:
    """Eight from first to last, as whole numbers: 0, 2, 4, 6, 8, 10, 12, 15."""
    assert count == 16
    return [0, 2, 4, 6, 8, 10, 12, 15]


LAYERS = [
    ConvolutionShape("stem", 3, 8, 7, 2, 16),
    ConvolutionShape("three", 4, 6, 3, 1, 9),
    ConvolutionShape("strided", 4, 6, 3, 2, 10),
    ConvolutionShape("projection", 4, 12, 1, 2, 10),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_references_of_convolutions_agree_with_automatic_differentiation(layer):
    """The NumPy sums against TensorFlow's gradients of its own forward pass in float64."""
    import tensorflow as tf

    generator = np.random.default_rng(1)
    image = generator.standard_normal((2, layer.in_size, layer.in_size, layer.in_channels))
    filters = generator.standard_normal((layer.kernel, layer.kernel, layer.in_channels, layer.out_channels))
    gradient = generator.standard_normal((2, layer.out_size, layer.out_size, layer.out_channels))
    edge = (layer.kernel - 1) // 2
    x, w = tf.constant(image), tf.constant(filters)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        padded = tf.pad(x, [[0, 0], [edge, edge], [edge, edge], [0, 0]])
        output = tf.nn.conv2d(padded, w, layer.stride, "VALID")
    dx, dw = tape.gradient(output, [x, w], output_gradients=tf.constant(gradient))
    outs, ins = np.array([0, layer.out_size - 1]), np.array([0, 1, layer.in_size - 1])
    np.testing.assert_allclose(conv.forward(layer, image[0], filters, outs), output.numpy()[0][outs, outs])
    np.testing.assert_allclose(
        conv.input_gradient(layer, gradient[0], filters, ins), dx.numpy()[0][ins, ins], atol=1e-12
    )
    taps = np.arange(layer.kernel)
    np.testing.assert_allclose(
        conv.filter_gradient(layer, image, gradient, taps), dw.numpy()[taps, taps[::-1]], atol=1e-12
    )


def test_no_gradient_of_images_is_measured():
    names = [case.name.split()[:2] for case in conv.cases(machine())]
    stem, *others = conv.distinct(RESNET_TINY_SHAPE, 32)
    assert [way for name, way in names if name == stem.name] == ["forward", "filter_gradient"]
    assert [way for name, way in names if name == others[0].name] == list(conv.DIRECTIONS)


@pytest.mark.parametrize("engine", ["library", "xla"])
@pytest.mark.parametrize("direction", conv.DIRECTIONS)
def test_convolutions_are_right(direction, engine):
    layer = conv.distinct(RESNET_TINY_SHAPE, 32)[0]
    result = conv.measure(machine(), layer, "fp32", direction, batch=2, engine=engine)
    assert result.relative_error <= result.bound
    # 2 images, 16² outputs, 7² × 3 × 16 products; float32 of both images and the filters
    flops, least_bytes = 2 * 2 * 256 * 49 * 48, 4 * (2 * 32 * 32 * 3 + 2 * 256 * 16 + 49 * 48)
    assert result.flop_per_byte == pytest.approx(flops / least_bytes)


@pytest.mark.parametrize(
    ("direction", "pixels"), [("forward", 28), ("filter_gradient", 28), ("input_gradient", 56)]
)
def test_a_1x1_convolution_of_stride_2_reads_every_second_pixel(direction, pixels):
    """The first downsampling of ResNet-50, 256 > 512 channels, 56 > 28 pixels; 2 images."""
    layer = ConvolutionShape("layer2.0.downsample.0", 256, 512, 1, 2, 56)
    elements = 2 * pixels**2 * 256 + 2 * 28**2 * 512 + 256 * 512
    assert conv.least_elements(layer, direction, 2) == elements
    overlapping = dataclasses.replace(layer, kernel=3)  # every pixel is under some tap
    assert conv.least_elements(overlapping, direction, 2) == 2 * (56**2 * 256 + 28**2 * 512) + 9 * 256 * 512


def test_a_wrong_convolution_is_found():
    import tensorflow as tf

    layer = LAYERS[1]
    inputs, filters, gradients = conv._operands(layer, "fp32", 2)
    good = conv._apply(layer, "forward", 2, inputs[0], gradients[0], filters)
    bad = conv._apply(layer, "forward", 2, inputs[0], gradients[0], tf.reverse(filters, [0]))
    bound = conv._WINOGRAD * matmul.error_bound("fp32", 36)
    assert conv._error(layer, "forward", inputs[0], filters, gradients[0], good) <= bound
    assert conv._error(layer, "forward", inputs[0], filters, gradients[0], bad) > bound


def test_gradients_of_transposed_filters_are_found():
    import tensorflow as tf

    layer = LAYERS[1]
    inputs, filters, gradients = conv._operands(layer, "fp32", 2)
    good = conv._apply(layer, "filter_gradient", 2, inputs[0], gradients[0], filters)
    bad = tf.transpose(good, [1, 0, 2, 3])
    bound = conv._WINOGRAD * matmul.error_bound("fp32", 2 * 81)
    assert conv._error(layer, "filter_gradient", inputs[0], filters, gradients[0], good) <= bound
    assert conv._error(layer, "filter_gradient", inputs[0], filters, gradients[0], bad) > bound


@pytest.mark.parametrize("operation", ["copy", "triad"])
def test_memory_is_checked(operation, monkeypatch):
    monkeypatch.setattr(memory, "ELEMENTS_ON_CPU", 4096)
    result = memory._on_device(machine(), operation, "library")
    assert not result.is_wrong
    monkeypatch.setattr(memory, "_triad", lambda left, right: left + 3.001 * right)
    monkeypatch.setattr(memory, "_FACTOR", 3.0)
    assert memory._on_device(machine(), operation, "library").is_wrong == (operation == "triad")


@pytest.mark.parametrize(
    "measure",
    [lambda: memory._to_host(machine()), lambda: memory._to_device(machine(), memory._numpy_vector)],
)
def test_a_cpu_has_no_link_to_the_host(measure):
    with pytest.raises(NotPossibleError, match="the CPU is the host"):
        measure()


def test_a_pinned_vector_is_the_vector():
    np.testing.assert_array_equal(memory._pinned_vector(9, "CPU:0"), memory._numpy_vector(9, "CPU:0"))


@pytest.mark.parametrize(
    ("devices", "counts"), [(1, [1]), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_numbers_of_devices_to_sum_over(devices, counts):
    assert all_reduce.counts(devices) == counts


def test_each_number_of_gpus_has_its_rows(monkeypatch):
    """The first two of four, linked better than all: their own link, in the row and in the peak."""
    monkeypatch.setattr(all_reduce.topology, "topology", lambda gpus: "NV18")
    four = h200s(4, topology="SYS")
    found = [case for case in all_reduce.cases(four) if (case.name, case.precision) == ("1 GiB", "fp16")]
    assert [(case.facts["num_gpus"], case.facts["topology"], case.engine) for case in found] == [
        (2, "NV18", "library"), (2, "NV18", "xla"), (4, "SYS", "library"), (4, "SYS", "xla"),
    ]  # fmt: skip
    monkeypatch.setattr(all_reduce, "measure", lambda part, *_: Result(rates=(1.0,), unit=part.devices[-1]))
    made = [suite._row(case, NoSensors(), FACTS | {"num_gpus": 4}) for case in found]
    assert [(row.num_gpus, row.unit) for row in made] == [
        (2, "GPU:1"),
        (2, "GPU:1"),
        (4, "GPU:3"),
        (4, "GPU:3"),
    ]
    quick = all_reduce.cases(dataclasses.replace(four, quick=True))
    assert {case.facts["num_gpus"] for case in quick} == {4}


def test_collectives_over_two_and_four_devices_in_one_process(monkeypatch):
    """By TensorFlow's collectives, as on GPUs, and not by the reduction that CPUs get."""
    import tensorflow as tf

    monkeypatch.setattr(tf.distribute, "ReductionToOneDevice", lambda: None)
    monkeypatch.setattr(all_reduce, "_strategy", all_reduce._strategy.__wrapped__)
    for count, factor in ((2, 1.0), (4, 1.5)):
        part = machine(devices=tuple(f"CPU:{index}" for index in range(count)))
        found = all_reduce.measure(part, 4096, "fp32", "library")
        assert found.relative_error == 0.0
        seconds = found.windows[0].end_s - found.windows[0].start_s
        sums = 8 * all_reduce._SUMS_ON_CPU * found.windows[0].steps
        algorithm = 4096 * sums / seconds / 1e9
        assert found.rates[0] == pytest.approx(factor * algorithm)


@pytest.mark.parametrize(("size", "messages"), [(2**12, 8), (2**27, 8), (2**29, 8), (2**30, 4), (2**32, 4)])
def test_messages_under_way_fit_into_memory(size, messages):
    assert all_reduce.in_flight(size) == messages


def test_nccl_is_told_where_its_operands_are_and_no_message_waits_for_another():
    """Its operation, which only GPUs have, is traced but not run: tracing refuses what has no device."""
    import tensorflow as tf

    operations = tf.distribute.NcclAllReduce(num_packs=0)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=operations)
    messages = [
        strategy.experimental_distribute_values_from_function(lambda context: tf.ones(4)) for _ in range(3)
    ]
    reduction = all_reduce._reduction(2, xla=False)
    call = tf.function(lambda values: strategy.run(reduction, args=(values,)), autograph=False)
    graph = call.get_concrete_function(messages).graph
    sums = [node for node in graph.get_operations() if node.type == "NcclAllReduce"]
    assert len(sums) == 3 * 2 * 2
    assert {node.inputs[0].device[-5:] for node in sums} == {"CPU:0", "CPU:1"}

    def waits_for(node, seen):
        for before in [operand.op for operand in node.inputs] + node.control_inputs:
            if before not in seen:
                seen.add(before)
                waits_for(before, seen)
        return seen

    # The second sum of a message waits for its first one; the first ones of all messages for none.
    assert sorted(len(waits_for(node, set()).intersection(sums)) for node in sums) == 6 * [0] + 6 * [1]


@pytest.mark.parametrize(("replicas", "sums", "total"), [(2, 1, 3.0), (2, 4, 24.0), (4, 2, 40.0)])
def test_sums_are_checked(replicas, sums, total):
    """1 + 2 = 3 and three times doubled 24; 1 + 2 + 3 + 4 = 10, then four of it: of units of 2⁻¹⁴."""
    import tensorflow as tf

    total = total / 2**14
    good, bad = tf.constant([-total, 0.0, total, -total]), tf.constant([-total, 0.0, total, total])
    check = all_reduce._wrong
    assert check((good,) * replicas, 4, "float32", replicas, sums) == 0
    assert check((good,) * (replicas - 1) + (bad,), 4, "float32", replicas, sums) == 1 / replicas


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 6, 7, 8, 16])
def test_all_sums_of_a_row_are_exact_in_float16_in_any_order(replicas):
    """Against Fraction: one replica's share after the other is added in float16, forwards and backwards."""
    sums = all_reduce.sums_in_a_row(replicas)
    assert sums == {2: 16, 4: 14, 8: 9}.get(replicas, sums) >= 1
    unit = Fraction(1, 2**14)
    shares = [(replica + 1) * unit for replica in range(replicas)]
    for _ in range(sums):
        for order in (shares, shares[::-1]):
            rounded = np.float16(0)
            for share in order:
                rounded = np.float16(rounded + np.float16(float(share)))
            assert Fraction(float(rounded)) == sum(order)
        shares = [sum(shares)] * replicas


# ---------------------------------------------------------------- input, roofline


def test_of_a_folder_only_record_files_are_read_and_a_damaged_one_is_a_failure(tmp_path, caplog):
    import tensorflow as tf

    record = tmp_path / "train-0"
    with tf.io.TFRecordWriter(str(record)) as writer:
        writer.write(b"a record")
    (tmp_path / "manifest.json").write_text('{"format": 1, "complete": true}')
    (tmp_path / "empty").touch()
    assert input_rate.files_of(str(tmp_path)) == input_rate.files_of(f"{tmp_path}/t*") == [str(record)]
    assert "1 files of" in row_of(lambda: input_rate.read([str(record)], 1, 0.05)).note
    record.write_bytes(record.read_bytes()[:-1] + b"\0\0")
    with caplog.at_level(logging.CRITICAL):
        row = row_of(lambda: input_rate.read([str(record)], 1, 0.05))
    assert row.rate is None
    assert row.note.startswith("failed: DataLossError: ")  # which the exit code tells


def test_roofs_are_the_best_measured_and_a_model_stands_where_its_card_counted():
    measured = [
        rows.MicroRow(**FACTS, benchmark="memory", case="copy", rate=4000.0),
        rows.MicroRow(**FACTS, benchmark="memory", case="triad", rate=4300.0),
        rows.MicroRow(**FACTS, benchmark="memory", case="host loop iteration", rate=9e9),
        rows.MicroRow(**FACTS, benchmark="matmul", case="8192x8192x8192", precision="fp16", rate=640.0),
        rows.MicroRow(**FACTS, benchmark="matmul", case="8192x8192x8192", precision="fp16", rate=790.0),
        rows.MicroRow(**FACTS, benchmark="matmul", case="4096x4096x4096", precision="fp16", rate=800.0),
    ]
    assert roofline.roofs(measured) == roofline.Roofs(4300.0, {"fp16": 790.0})
    run = RunRecord(
        model="resnet50", status="ok", gpu_name="NVIDIA H200", precision="mixed_float16", started_at="2026",
        per_replica_batch_size=512, dram_active=0.5, tflops_per_gpu=240.0,
    )  # fmt: skip
    (step,), sentences = roofline.steps([run], "NVIDIA H200", H200)
    assert step.flop_per_byte == pytest.approx(100.0)  # 240e12 ÷ (0.5 × 4.8e12)
    assert [sentence.split()[0] for sentence in sentences] == ["bert_large", "bert_base"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"dram_active": None}, "dram_active"), ({"gpu_name": "NVIDIA L4"}, "no good row of this card")],
)
def test_a_model_without_traffic_is_not_placed(fields, why):
    known = {"model": "resnet50", "status": "ok", "gpu_name": "NVIDIA H200", "tflops_per_gpu": 1.0}
    placed, sentences = roofline.steps(
        [RunRecord(**known | {"dram_active": 0.1} | fields)], "NVIDIA H200", H200
    )
    assert placed == []
    assert why in sentences[0]


@pytest.mark.parametrize(("intensity", "reached"), [(10.0, 43.0), (1000.0, 790.0)])
def test_roof(intensity, reached):
    assert roofline.attainable_tflops(intensity, 4300.0, 790.0) == pytest.approx(reached)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("width", [80, 119, 120, 200])
def test_a_table_says_what_was_measured_however_narrow(width):
    measured = rows.MicroRow(
        **FACTS, benchmark="matmul", case="bert_large query, key, value 32768x1024x3072", precision="fp16",
        engine="library", rate=641.2345, unit="TFLOP/s", low=630.0, high=650.0, share_of_peak=0.648,
        relative_error=1e-3, sm_clock_mhz_mean=1455.0, power_w_mean=686.0, note="a remark",
    )  # fmt: skip
    console = Console(width=width, file=io.StringIO())
    console.print(suite.table([measured], width))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    text = "".join(shown.split())
    for word in ("bert_large", "fp16", "library", "641.2", "64.8%", "a", "remark"):
        assert word in text
    assert ("1,455" in text) == (width >= 120)


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_of_sums_names_the_number_of_gpus(width):
    told = {"benchmark": "all_reduce", "case": "128 MiB", "precision": "fp16", "engine": "library"}
    made = [rows.MicroRow(**FACTS, **told, num_gpus=n, rate=300.0 + n, unit="GB/s") for n in (2, 8)]
    console = Console(width=width, file=io.StringIO())
    console.print(suite.table(made, width))
    shown = [line.replace("│", " ").split() for line in console.file.getvalue().splitlines()]
    assert ["128", "MiB", "fp16", "library", "8", "308", "GB/s"] in shown
    console.print(suite.table(made[:1], width))
    assert console.file.getvalue().count("GPUs") == 1


def micro(*flags: str, cwd):
    return python("-m", "tfbench.micro", *flags, cwd=cwd)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--only=matmull", "only=matmull"),
        ("--gpus=3", "gpus=3"),
        ("--gpus=many", "gpus=many"),
        ("--sizes=3", "sizes"),
        ("--data=nowhere", "data=nowhere: a folder or a glob of uncompressed TFRecord files"),
    ],
)
def test_refused_flags(flag, words, tmp_path):
    done = micro(flag, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stdout
    assert not (tmp_path / "tfbench_results").exists()


@pytest.mark.slow
def test_command_on_a_cpu(tmp_path):
    """Sums over two devices, products and memory: rows, reasons, picture, and an exit code that says well."""
    done = micro("--gpus=0", "--quick", "--results_dir=out", "--only=matmul,memory,all_reduce", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = rows.read(tmp_path / "out" / "micro.csv")
    assert {row.benchmark for row in written} == {"matmul", "memory", "all_reduce"}
    by_case = {(row.benchmark, row.case, row.precision, row.engine): row for row in written}
    side = "x".join([str(matmul.SIZE_ON_CPU)] * 3)
    assert by_case["matmul", side, "fp32", "library"].rate > 0
    assert "no units for fp8" in by_case["matmul", side, "fp8", "xla"].note
    summed = by_case["all_reduce", "4 KiB", "fp16", "library"]
    assert (summed.unit, summed.relative_error) == ("GB/s", 0.0)
    assert "need GPUs" in by_case["all_reduce", "4 KiB", "fp16", "xla"].note
    assert all(row.note for row in written if row.rate is None)
    assert (tmp_path / "out" / "micro_roofline.png").read_bytes().startswith(b"\x89PNG")


def test_warning_of_a_wrong_ceiling(monkeypatch, caplog):
    from tfbench import ceilings

    monkeypatch.setattr(logging.getLogger("tfbench"), "propagate", True)
    wrong = Result(rates=(2.0,), unit="TFLOP/s", relative_error=1.0, bound=0.1)
    monkeypatch.setattr(ceilings.matmul, "measure", lambda *arguments: wrong)
    assert ceilings.measure_matrix_flops("GPU:0", "fp16") == 2e12
    assert "are wrong" in caplog.text
