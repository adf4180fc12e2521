"""Matrix products: the rate of each number format, of many sizes, and of the products that models do.

Imports TensorFlow when something is measured.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfbench.hardware.specs import GpuSpec
from tfbench.microbench import timed
from tfbench.microbench.case import Case, Machine, NotPossibleError, Result, median
from tfbench.models.bert import BERT_LARGE_SHAPE, masked_positions
from tfbench.models.resnet import RESNET50, RESNET50_SHAPE, convolutions

SIZE = 8192  # of the square product that is the ceiling: large enough to fill any card
SIZE_ON_CPU = 256
SWEEP = (1024, 2048, 4096, 16384)
ODD_SIZES = (8184, 8188, 8190, 8191)  # multiples of 8, 4, 2 and 1
TOKENS = (256, 128)  # sequences and their length, BERT-large's defaults on a GPU
CEILING_S = 1.0  # of measuring a ceiling
OTHER_S = 0.3
REST_S = 0.5  # before each window of a rested case: an H200 has then its highest clock for 10 ms or more
RESTED = "after rests"  # in the names of such cases
RESTED_CALLS = 3  # in a window
_LEFTS = 4  # different left operands, so that no two products of a call are one
_CHECKED_ROWS = 8

Shape = tuple[int, int, int]  # M, K, N of [M, K] × [K, N]


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format of products.

    Attributes:
        inputs: TensorFlow's dtype of the operands.
        output: of the result.
        peak: column of the data sheet.
        least_compute_capability: of GPUs whose units know it; None: any device.
        input_bits: bits of the mantissa that an operand keeps in the unit, the hidden one included; None:
            operands are used as they are.
        output_bits: of the result; None: exact.
        sum_bits: of the running sum. 14 in Hopper's FP8 units (DeepSeek-V3, arXiv:2412.19437, section 3.5.2).
    """

    inputs: str
    output: str
    peak: str
    least_compute_capability: tuple[int, int] | None = None
    input_bits: int | None = None
    output_bits: int | None = None
    sum_bits: int = 24


FORMATS = {
    "fp64": Format("float64", "float64", "fp64_tflops", output_bits=53, sum_bits=53),
    "fp32": Format("float32", "float32", "fp32_tflops", output_bits=24),
    "tf32": Format("float32", "float32", "tf32_tflops", (8, 0), input_bits=11, output_bits=24),
    "fp16": Format("float16", "float16", "fp16_tflops", output_bits=11),
    "bf16": Format("bfloat16", "bfloat16", "bf16_tflops", output_bits=8),
    "fp8": Format("float8_e4m3fn", "bfloat16", "fp8_tflops", (8, 9), output_bits=8, sum_bits=14),
    "int8": Format("int8", "int32", "int8_tops", (7, 2)),
}
# Of the products of a training precision.
FORMAT_OF_TRAINING = {"fp32": "fp32", "tf32": "tf32", "mixed_float16": "fp16", "mixed_bfloat16": "bf16"}
XLA_ONLY = {
    "fp8": "tf.matmul takes no float8; only XLA can make such a product, out of a conversion before it",
    "int8": "TensorFlow has no int8 product on GPUs outside XLA",
}


def error_bound(precision: str, length: int) -> float:
    """The largest error of a sampled output, in units of the outputs' root mean square.

    Operands and outputs are about normal; among a hundred thousand of them none is beyond 6 sigma, so 8 is
    never reached by rounding: 8 × half a unit of the last place of the output, the same for operands that
    the unit shortens (by cutting, so a whole one), and √length steps of the running sum, whose roundings
    are independent. Integers are exact.

    Args:
        precision: a name in FORMATS.
        length: of the sums, K.
    """
    number = FORMATS[precision]
    if number.output_bits is None:
        return 0.0
    inputs = 2.0 ** (1 - number.input_bits) if number.input_bits else 0.0
    return float(8 * (inputs + 2.0**-number.output_bits + length**0.5 * 2.0**-number.sum_bits))


def peak_of(spec: GpuSpec | None, precision: str) -> float | None:
    """The data sheet's dense rate in TFLOP/s (TOP/s for integers); for fp64 that of the matrix units."""
    if spec is None:
        return None
    if precision == "fp64" and spec.fp64_tensor_tflops:
        return spec.fp64_tensor_tflops
    peak: float | None = getattr(spec, FORMATS[precision].peak)
    return peak


def unit_of(precision: str) -> str:
    """Of the rates: integers have no floating point."""
    return "TOP/s" if precision == "int8" else "TFLOP/s"


def why_not(precision: str, engine: str, machine: Machine) -> str:
    """Why this card or TensorFlow cannot do it; empty where it may."""
    least = FORMATS[precision].least_compute_capability
    capability = machine.compute_capability
    if least and not machine.on_gpu:
        return f"the CPU has no units for {precision}"
    if least and capability and capability < least:
        return f"units for {precision} need compute capability {least[0]}.{least[1]}, this GPU has " + (
            f"{capability[0]}.{capability[1]}"
        )
    return XLA_ONLY.get(precision, "") if engine == "library" else ""


def measure(
    device: str,
    precision: str,
    shape: Shape,
    engine: str,
    seconds: float,
    spec: GpuSpec | None = None,
    rest_s: float = 0.0,
) -> Result:
    """The rate of one product on random operands: zeros need less power and run faster.

    A call multiplies different left operands with one right one, so that nothing can be left out, hoisted or
    read twice; outputs stay on the device.

    Args:
        device: TensorFlow's name.
        precision: a name in FORMATS.
        shape: M, K, N.
        engine: "library" (the matrix product operation) or "xla".
        seconds: of measuring.
        spec: the card's data sheet.
        rest_s: before each window, which is a short one then.

    Raises:
        NotPossibleError: XLA did not use the format's units.
    """
    import tensorflow as tf

    with tf.device(device), tensor_float_32(precision == "tf32"):
        lefts, right = _operands(precision, shape)
        product = _product(precision)
        call = tf.function(lambda lefts, right: [product(left, right) for left in lefts],
                           jit_compile=engine == "xla", autograph=False)  # fmt: skip
        evidence = "" if engine == "library" else _evidence(call, lefts, right, precision)
        error = relative_error(lefts[0], right, call(lefts, right)[0], precision)
        if rest_s:
            windows = timed.time_rested_calls(lambda: call(lefts, right), RESTED_CALLS, rest_s)
        else:
            windows = timed.time_calls(lambda: call(lefts, right), seconds)
    m, k, n = shape
    flops = 2 * m * k * n
    least_bytes = (m * k + k * n) * right.dtype.size + m * n * tf.as_dtype(FORMATS[precision].output).size
    rates = timed.rates(windows, len(lefts) * flops / 1e12)
    return Result(
        rates=rates,
        unit=unit_of(precision),
        windows=windows,
        peak=peak_of(spec, precision),
        relative_error=error,
        bound=error_bound(precision, k),
        gb_per_s=median(rates) * 1e3 * least_bytes / flops,
        flop_per_byte=flops / least_bytes,
        evidence=evidence,
    )


@contextlib.contextmanager
def tensor_float_32(allowed: bool) -> Iterator[None]:
    """TensorFlow's process-wide switch for float32 products, put back afterwards."""
    import tensorflow as tf

    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(allowed)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _operands(precision: str, shape: Shape) -> tuple[list[Any], Any]:
    """Left operands [M, K] and the right one, [K, N]; fp8's is [N, K], as its units read it.

    Normal numbers, those of the left scaled so that the outputs are standard normal; fp8's are not, whose
    smallest number is 2⁻⁹. Integers are uniform over their range.
    """
    import tensorflow as tf

    m, k, n = shape
    if precision == "int8":
        numbers = [
            tf.cast(tf.random.stateless_uniform(size, (i, 7), -127, 128, tf.int32), tf.int8)
            for i, size in enumerate([(m, k)] * _LEFTS + [(k, n)])
        ]
        return numbers[:-1], numbers[-1]
    dtype = FORMATS[precision].inputs
    # Compiled, because not every format has a conversion of its own on a GPU.
    cast = tf.function(lambda numbers: tf.cast(numbers, dtype), jit_compile=precision == "fp8")
    wide = tf.float64 if precision == "fp64" else tf.float32
    scale = 1.0 if precision == "fp8" else k**-0.5
    lefts = [cast(tf.random.stateless_normal((m, k), (i, 7), 0.0, scale, wide)) for i in range(_LEFTS)]
    size = (n, k) if precision == "fp8" else (k, n)
    return lefts, cast(tf.random.stateless_normal(size, (_LEFTS, 7), dtype=wide))


def _product(precision: str) -> Callable[[Any, Any], Any]:
    """left, right → product, as TensorFlow can say it."""
    import tensorflow as tf

    if precision == "int8":
        return functools.partial(tf.matmul, output_type=tf.int32)
    if precision != "fp8":
        plain: Callable[[Any, Any], Any] = tf.matmul
        return plain

    # XLA makes one FP8 product of conversions and scales around a bfloat16 one. The scale is a variable, as
    # in a training; a constant of 1 would be left out before.
    scale = tf.Variable(1.0)

    def product(left: Any, right: Any) -> Any:
        wide = [tf.cast(operand, tf.bfloat16) * tf.cast(scale, tf.bfloat16) for operand in (left, right)]
        return tf.matmul(*wide, transpose_b=True)

    return product


def relative_error(left: Any, right: Any, output: Any, precision: str) -> float:
    """Largest error on some rows of the output, against float64, ÷ the root mean square of the truth there.

    Args:
        left: tensor [M, K].
        right: tensor [K, N]; for fp8 [N, K].
        output: tensor [M, N] that should be their product.
        precision: a name in FORMATS.
    """
    rows = np.unique(np.linspace(0, left.shape[0] - 1, _CHECKED_ROWS).astype(int))
    # Rows are taken on the host: not every format can be sliced on a GPU.
    left_64, found = (tensor.numpy()[rows].astype(np.float64) for tensor in (left, output))
    right_64 = right.numpy().astype(np.float64)
    truth = left_64 @ (right_64.T if precision == "fp8" else right_64)
    return float(np.max(np.abs(found - truth)) / np.sqrt(np.mean(truth**2)))


def _evidence(call: Any, lefts: list[Any], right: Any, precision: str) -> str:
    """Which operation of the program compiled for the device in scope multiplies.

    Raises:
        NotPossibleError: not one of fp8's or int8's.
    """
    program = call.experimental_get_compiler_ir(lefts, right)(stage="optimized_hlo")
    found = products_in(program)
    if precision in XLA_ONLY and not any(is_native(each, precision) for each in found):
        raise NotPossibleError(f"not reached: XLA made of it {'; '.join(found) or 'no product'}")
    return "; ".join(found)


_DEFINED = re.compile(r"^\s*(?:ROOT )?(%[\w.\-]+) = (\w+)\[")
_MULTIPLIES = re.compile(r" (dot|custom-call)\(([^)]*)\)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OPERAND = re.compile(r"%[\w.\-]+")


def products_in(program: str) -> list[str]:
    """The kinds of matrix products in an optimised XLA program, each once: what, and its operands' types.

    Args:
        program: HLO as text, as `experimental_get_compiler_ir` gives it.

    Returns:
        Such as "__cublas$lt$matmul$f8(f8e4m3fn, f8e4m3fn)" or, inside a kernel of XLA's own, "dot(s8, s8)".
    """
    types, found = {}, []
    for line in program.splitlines():
        if defined := _DEFINED.match(line):
            types[defined[1]] = defined[2]
        multiplies = _MULTIPLIES.search(line)
        if not multiplies:
            continue
        target = _TARGET.search(line)
        name = target[1] if target else multiplies[1]
        if name == "dot" or "cublas" in name or "gemm" in name.lower():
            operands = [types.get(operand, "?") for operand in _OPERAND.findall(multiplies[2])[:2]]
            found.append(f"{name}({', '.join(operands)})")
    return list(dict.fromkeys(found))


def is_native(product: str, precision: str) -> bool:
    """Whether a product as `products_in` names it reads operands of fp8 or int8 as they are."""
    kind = {"fp8": "f8e4m3fn", "int8": "s8"}[precision]
    return product.endswith(f"({kind}, {kind})")


def _apart(*arguments: Any) -> Result:
    """As `measure`, in a process of its own."""
    from tfbench.microbench import apart  # which imports this module

    return apart.measure(*arguments)


def _case(
    machine: Machine, precision: str, shape: Shape, engine: str, seconds: float, name: str = ""
) -> Case:
    def run() -> Result:
        if reason := why_not(precision, engine, machine):
            raise NotPossibleError(reason)
        method = _apart if precision == "fp8" else measure
        result = method(machine.devices[0], precision, shape, engine, machine.seconds(seconds), machine.spec)
        if precision == "tf32" and (result.relative_error or 0.0) <= error_bound("fp32", shape[1]):
            raise NotPossibleError("not reached: the outputs are as exact as fp32's")
        return result

    dimensions = "x".join(map(str, shape))
    return Case(
        benchmark="matmul",
        name=f"{name} {dimensions}".strip(),
        precision=precision,
        engine=engine,
        measure=run,
    )


def _rested_case(machine: Machine, precision: str, shape: Shape) -> Case:
    """What short bursts reach: figures of a few products are higher than what a card sustains."""

    def run() -> Result:
        if reason := why_not(precision, "library", machine):
            raise NotPossibleError(reason)
        return measure(machine.devices[0], precision, shape, "library", 0.0, machine.spec, REST_S)

    name = f"{'x'.join(map(str, shape))} {RESTED}"
    return Case(benchmark="matmul", name=name, precision=precision, measure=run)


def model_products() -> dict[str, Shape]:
    """The matrix products of ResNet-50 and BERT-large at their default sizes on a GPU, by name."""
    batch = RESNET50.on_gpu.per_replica_batch_size
    found: dict[Shape, str] = {}
    for layer in convolutions(RESNET50_SHAPE, RESNET50.on_gpu.image_size or 0):
        if layer.kernel == 1:  # a strided one reads every second pixel only
            shape = (batch * layer.out_size**2, layer.in_channels, layer.out_channels)
            found.setdefault(shape, f"resnet50 {layer.name}")
    found.setdefault((batch, RESNET50_SHAPE.features, RESNET50_SHAPE.num_classes), "resnet50 classifier")
    bert, tokens = BERT_LARGE_SHAPE, TOKENS[0] * TOKENS[1]
    places = TOKENS[0] * masked_positions(TOKENS[1])
    for name, shape in (
        ("query, key, value", (tokens, bert.hidden, 3 * bert.hidden)),
        ("attention output", (tokens, bert.hidden, bert.hidden)),
        ("inner", (tokens, bert.hidden, bert.intermediate)),
        ("inner output", (tokens, bert.intermediate, bert.hidden)),
        ("vocabulary", (places, bert.hidden, bert.vocab_size)),
        ("vocabulary, padded to 8", (places, bert.hidden, -(-bert.vocab_size // 8) * 8)),
    ):
        found.setdefault(shape, f"bert_large {name}")
    return {name: shape for shape, name in found.items()}


def cases(machine: Machine) -> Iterator[Case]:
    """Ceilings of every format first, then sizes, shapes that are no multiple of 8, and models' products."""
    size = SIZE if machine.on_gpu else SIZE_ON_CPU
    for precision in FORMATS:
        for engine in ("library", "xla"):
            yield _case(machine, precision, (size, size, size), engine, CEILING_S)
    if not machine.on_gpu:
        yield _case(machine, "fp32", (250, 251, 253), "library", OTHER_S)
        return
    if machine.quick:
        return
    for precision in ("fp16", "bf16"):
        yield _rested_case(machine, precision, (size, size, size))
    for precision in ("fp16", "bf16", "tf32"):
        for side in SWEEP:
            yield _case(machine, precision, (side, side, side), "library", OTHER_S)
    for side in ODD_SIZES:
        yield _case(machine, "fp16", (side, side, side), "library", OTHER_S)
    for name, shape in model_products().items():
        yield _case(machine, "fp16", shape, "library", OTHER_S, name)
