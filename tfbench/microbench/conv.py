"""ResNet-50's convolutions, forward and both gradients, NHWC: TensorFlow's operations and XLA's programs.

Both call cuDNN, but choose its algorithms and lay out its operands by themselves.

Imports TensorFlow when something is measured.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfbench.microbench import timed
from tfbench.microbench.case import Case, Machine, NotPossibleError, Result, median
from tfbench.microbench.matmul import FORMATS, error_bound, peak_of, tensor_float_32, why_not
from tfbench.models.resnet import RESNET50, RESNET50_SHAPE, RESNET_TINY_SHAPE, ConvolutionShape, convolutions

PRECISIONS = ("fp16", "bf16", "tf32")
COMPILED = ("fp16",)  # also by XLA, which takes seconds for each: as a training has them by default
DIRECTIONS = ("forward", "input_gradient", "filter_gradient")
QUICK = 4  # of the convolutions, those with the most arithmetic
SECONDS = 0.08
_INPUTS = 2  # different inputs, so that no two convolutions of a call are one
_CHECKED = 4  # channels, places or taps
# Winograd's transforms of 3×3 convolutions add and multiply before and after the product: up to this many
# times the rounding of a direct sum.
_WINOGRAD = 8


def distinct(shape: Any, image_size: int) -> list[ConvolutionShape]:
    """The net's convolutions, each size once, under the first one's name."""
    found: dict[tuple[int, ...], ConvolutionShape] = {}
    for layer in convolutions(shape, image_size):
        sizes = (layer.in_channels, layer.out_channels, layer.kernel, layer.stride, layer.in_size)
        found.setdefault(sizes, layer)
    return list(found.values())


def least_elements(layer: ConvolutionShape, direction: str, batch: int) -> int:
    """Numbers of input, filters and output, or their gradients, that must be read or written at least.

    A kernel smaller than its stride leaves pixels out; only the gradient of the input must write them, as 0.
    """
    skips = layer.kernel < layer.stride and direction != "input_gradient"
    side = layer.out_size * layer.kernel if skips else layer.in_size
    pixels = layer.in_channels * side**2 + layer.out_channels * layer.out_size**2
    return batch * pixels + layer.kernel**2 * layer.in_channels * layer.out_channels


def measure(
    machine: Machine,
    layer: ConvolutionShape,
    precision: str,
    direction: str,
    batch: int,
    engine: str = "library",
) -> Result:
    """The rate of one convolution or gradient on random numbers.

    Args:
        machine: on whose first device it runs.
        layer: kernel, stride, channels and pixels.
        precision: a name in `matmul.FORMATS`.
        direction: one of DIRECTIONS.
        batch: images.
        engine: "library" (operations of their own) or "xla" (inside a compiled program).
    """
    import tensorflow as tf

    with tf.device(machine.devices[0]), tensor_float_32(precision == "tf32"):
        inputs, filters, gradients = _operands(layer, precision, batch)
        one = functools.partial(_apply, layer, direction, batch)
        call = tf.function(
            lambda inputs, filters, gradients: [
                one(*each, filters) for each in zip(inputs, gradients, strict=True)
            ],
            jit_compile=engine == "xla",
            autograph=False,
        )
        output = call(inputs, filters, gradients)[0]
        error = _error(layer, direction, inputs[0], filters, gradients[0], output)
        windows = timed.time_calls(lambda: call(inputs, filters, gradients), machine.seconds(SECONDS))
    flops = 2 * layer.macs * batch
    least_bytes = filters.dtype.size * least_elements(layer, direction, batch)
    rates = timed.rates(windows, _INPUTS * flops / 1e12)
    length = {
        "forward": layer.kernel**2 * layer.in_channels,
        "input_gradient": layer.kernel**2 * layer.out_channels,
        "filter_gradient": batch * layer.out_size**2,
    }[direction]
    return Result(
        rates=rates,
        unit="TFLOP/s",
        windows=windows,
        peak=peak_of(machine.spec, precision),
        relative_error=error,
        bound=_WINOGRAD * error_bound(precision, length),
        gb_per_s=median(rates) * 1e3 * least_bytes / flops,
        flop_per_byte=flops / least_bytes,
    )


def _operands(layer: ConvolutionShape, precision: str, batch: int) -> tuple[list[Any], Any, list[Any]]:
    """Inputs [B, H, W, C], filters [K, K, C, O] and output gradients [B, H', W', O], all normal."""
    import tensorflow as tf

    def normal(size: tuple[int, ...], seed: int, scale: float = 1.0) -> Any:
        return tf.cast(tf.random.stateless_normal(size, (seed, 5), 0.0, scale), FORMATS[precision].inputs)

    side, out, kernel = layer.in_size, layer.out_size, layer.kernel
    inputs = [normal((batch, side, side, layer.in_channels), seed) for seed in range(_INPUTS)]
    # Scaled so that sums over the whole batch stay in float16's range.
    gradients = [
        normal((batch, out, out, layer.out_channels), 10 + seed, (batch * out**2) ** -0.5)
        for seed in range(_INPUTS)
    ]
    scale = (kernel**2 * layer.in_channels) ** -0.5
    return inputs, normal((kernel, kernel, layer.in_channels, layer.out_channels), 20, scale), gradients


def _apply(
    layer: ConvolutionShape, direction: str, batch: int, image: Any, gradient: Any, filters: Any
) -> Any:
    """One convolution or gradient of it."""
    import tensorflow as tf

    edge = (layer.kernel - 1) // 2
    sizes = {
        "strides": [1, layer.stride, layer.stride, 1],
        "padding": "EXPLICIT",
        "explicit_paddings": [0, 0, edge, edge, edge, edge, 0, 0],
    }
    if direction == "forward":
        return tf.raw_ops.Conv2D(input=image, filter=filters, **sizes)
    if direction == "input_gradient":
        shape = [batch, layer.in_size, layer.in_size, layer.in_channels]
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=shape, filter=filters, out_backprop=gradient, **sizes
        )
    shape = [layer.kernel, layer.kernel, layer.in_channels, layer.out_channels]
    return tf.raw_ops.Conv2DBackpropFilter(input=image, filter_sizes=shape, out_backprop=gradient, **sizes)


def _error(
    layer: ConvolutionShape, direction: str, image: Any, filters: Any, gradient: Any, output: Any
) -> float:
    """Largest error of some outputs against float64 sums, ÷ the root mean square of the truth there."""
    if direction == "filter_gradient":
        ins, outs, taps = _some(layer.in_channels), _some(layer.out_channels), _some(layer.kernel)
        truth = filter_gradient(layer, _channels(image, ins), _channels(gradient, outs), taps)
        found = output.numpy().astype(np.float64)[taps, layer.kernel - 1 - taps][:, ins][..., outs]
    else:
        places = _some(layer.out_size if direction == "forward" else layer.in_size)
        values = (image if direction == "forward" else gradient)[0].numpy().astype(np.float64)
        compute = forward if direction == "forward" else input_gradient
        truth = compute(layer, values, filters.numpy().astype(np.float64), places)
        found = output[0].numpy().astype(np.float64)[places, places]
    return float(np.max(np.abs(found - truth)) / np.sqrt(np.mean(truth**2)))


def _some(count: int) -> Any:
    """A few indices below `count`, the edges among them."""
    return np.unique(np.linspace(0, count - 1, _CHECKED).astype(int))


def _channels(tensor: Any, channels: Any) -> Any:
    """Some channels of [B, H, W, C] as float64; only they are copied from the device."""
    import tensorflow as tf

    return tf.gather(tensor, channels, axis=-1).numpy().astype(np.float64)


def forward(layer: ConvolutionShape, image: Any, filters: Any, places: Any) -> Any:
    """Outputs at (p, p) for each p of `places`: [P, O] from [H, W, C] and [K, K, C, O]."""
    edge = (layer.kernel - 1) // 2
    padded = np.pad(image, ((edge, edge), (edge, edge), (0, 0)))
    starts = places * layer.stride
    return np.stack(
        [np.tensordot(padded[s : s + layer.kernel, s : s + layer.kernel], filters, 3) for s in starts]
    )


def input_gradient(layer: ConvolutionShape, gradient: Any, filters: Any, places: Any) -> Any:
    """Gradients of the input at (p, p) for each p of `places`: [P, C] from [H', W', O] and [K, K, C, O]."""
    edge = (layer.kernel - 1) // 2

    def taps(place: int) -> list[tuple[int, int]]:
        """(place in the filter, place in the output) of the outputs that read the input at `place`."""
        pairs = [(tap, place + edge - tap) for tap in range(layer.kernel)]
        return [
            (tap, reach // layer.stride)
            for tap, reach in pairs
            if reach % layer.stride == 0 and 0 <= reach // layer.stride < layer.out_size
        ]

    zero = np.zeros(layer.in_channels)
    return np.stack(
        [
            sum((filters[a, b] @ gradient[i, j] for a, i in taps(p) for b, j in taps(p)), start=zero)
            for p in places
        ]
    )


def filter_gradient(layer: ConvolutionShape, image: Any, gradient: Any, taps: Any) -> Any:
    """Gradients of the filters at (t, K - 1 - t) for each t of `taps`, which no transposed ones would pass.

    Returns:
        [T, C, O] from [B, H, W, C] and the outputs' [B, H', W', O].
    """
    edge = (layer.kernel - 1) // 2
    padded = np.pad(image, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    reach = layer.stride * (layer.out_size - 1) + 1

    def at(tap: int) -> Any:
        other = layer.kernel - 1 - tap
        read = padded[:, tap : tap + reach : layer.stride, other : other + reach : layer.stride]
        return np.tensordot(read, gradient, ((0, 1, 2), (0, 1, 2)))

    return np.stack([at(tap) for tap in taps])


def cases(machine: Machine) -> Iterator[Case]:
    """Every distinct convolution, in each direction that a training has, and format.

    Quick: the largest in the first format.
    """
    shape, image_size, batch = (
        (RESNET50_SHAPE, RESNET50.on_gpu.image_size or 0, RESNET50.on_gpu.per_replica_batch_size)
        if machine.on_gpu
        else (RESNET_TINY_SHAPE, 32, 4)
    )
    layers = distinct(shape, image_size)
    first = layers[0]
    if machine.quick:
        layers = sorted(layers, key=lambda layer: layer.macs, reverse=True)[:QUICK]
    precisions = PRECISIONS if machine.on_gpu else ("fp32",)
    for precision in precisions[:1] if machine.quick else precisions:
        for layer in layers:
            for direction in DIRECTIONS:
                if layer == first and direction == "input_gradient":
                    continue  # that of the images, which no training computes
                yield _case(machine, layer, precision, direction, batch, "library")
                if precision in COMPILED:
                    yield _case(machine, layer, precision, direction, batch, "xla")


def _case(
    machine: Machine, layer: ConvolutionShape, precision: str, direction: str, batch: int, engine: str
) -> Case:
    def run() -> Result:
        if reason := why_not(precision, engine, machine):
            raise NotPossibleError(reason)
        return measure(machine, layer, precision, direction, batch, engine)

    sizes = (
        f"{layer.kernel}x{layer.kernel}/{layer.stride} {layer.in_channels}>{layer.out_channels} "
        f"{layer.in_size}px batch {batch}"
    )
    return Case(
        benchmark="conv",
        name=f"{layer.name} {direction} {sizes}",
        precision=precision,
        engine=engine,
        measure=run,
    )
