"""The few custom layers: what Keras has in a form that the fast step cannot use.

All create their weights at construction, so a model is complete before it is called, and say so (`built`):
Keras would trace them once more to find out.
"""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Tokens whose equal ones are summed by a product, in the gradient of an embedding. More would make the
# product dearer: at 512 it takes 34 GFLOP for 32,768 tokens of 1,024 columns, 0.05 % of what BERT-large's
# step computes.
MERGED_TOKENS = 512
NO_PLACE = 9  # of a window's places 0 to 8


class Convolution(keras.layers.Layer):
    """Convolution without bias, padded by (kernel - 1) / 2 on every side.

    Keras' "same" pads asymmetrically at stride 2 and `ZeroPadding2D` writes the padded tensor to
    memory; explicit padding does neither. Weights: He normal over the outgoing connections.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1):
        super().__init__()
        self.stride = stride
        side = (kernel - 1) // 2
        self.padding = [[0, 0], [side, side], [side, side], [0, 0]]
        self.kernel = self.add_weight(
            name="kernel",
            shape=(kernel, kernel, in_channels, out_channels),
            initializer=keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"),
        )
        self.built = True

    def call(self, x: Any) -> Any:
        """[B, H, W, in_channels] → [B, ceil(H / stride), ceil(W / stride), out_channels]."""
        return tf.nn.conv2d(x, tf.convert_to_tensor(self.kernel), self.stride, self.padding)


class FusedBatchNorm(keras.layers.Layer):
    """Batch normalisation over all axes but the last, in one fused kernel.

    Keras computes moments and normalises in float32, unfused, which on a GPU multiplies the memory
    traffic of ResNet-50 by five. Statistics are per replica; reading the moving ones outside a replica
    averages them. float64 (proofs on the CPU) has no fused kernel and takes the plain formula.
    """

    def __init__(self, channels: int, momentum: float = 0.9, epsilon: float = 1e-5):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.gamma = self.add_weight(name="gamma", shape=(channels,), initializer="ones", autocast=False)
        self.beta = self.add_weight(name="beta", shape=(channels,), initializer="zeros", autocast=False)
        self.moving_mean = _statistic(self, "moving_mean", tf.zeros(channels))
        self.moving_variance = _statistic(self, "moving_variance", tf.ones(channels))
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        """[B, H, W, channels] → the same shape and dtype; in training also updates the moving statistics."""
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        if not training:
            mean, variance = (tf.convert_to_tensor(v) for v in (self.moving_mean, self.moving_variance))
            scale = gamma * tf.math.rsqrt(variance + self.epsilon)
            return x * tf.cast(scale, x.dtype) + tf.cast(beta - mean * scale, x.dtype)
        normalise = _plain_batch_norm if x.dtype == tf.float64 else _fused_batch_norm
        y, mean, variance = normalise(x, gamma, beta, self.epsilon)
        for moving, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
            new = moving * self.momentum + batch * (1 - self.momentum)
            # A step that overflows is skipped, but these are written before that is known.
            moving.assign(tf.where(tf.math.is_finite(batch), new, moving))
        return y


def _statistic(layer: keras.layers.Layer, name: str, initial: Any) -> keras.Variable:
    """A variable that each replica updates on its own; read outside a replica it is their mean."""
    return keras.Variable(
        initial,
        dtype=layer.variable_dtype,
        trainable=False,
        autocast=False,
        synchronization="on_read",
        aggregation="mean",
        name=name,
    )


def _fused_batch_norm(x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[Any, Any, Any]:
    """Normalised x, batch mean and unbiased batch variance (float32)."""
    nothing = tf.constant([], tf.float32)
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=gamma, offset=beta, mean=nothing, variance=nothing, epsilon=epsilon, is_training=True
    )
    return y, mean, variance


def _plain_batch_norm(x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[Any, Any, Any]:
    """The same by the formula, for dtypes without a fused kernel."""
    mean, variance = tf.nn.moments(x, axes=list(range(x.shape.rank - 1)))
    y = tf.nn.batch_normalization(x, mean, variance, beta, gamma, epsilon)
    count = tf.cast(tf.size(x) / x.shape[-1], x.dtype)
    return y, mean, variance * count / (count - 1)


class Linear(keras.layers.Layer):
    """y = x @ kernel + bias over the last axis, as one 2-D product.

    Keras' Dense multiplies [B, S, H] by [H, M] as a batched product with a broadcast kernel, whose
    gradient is a [B, H, M] tensor that is then summed.
    """

    def __init__(self, in_features: int, out_features: int, standard_deviation: float = 0.02):
        super().__init__()
        self.out_features = out_features
        self.kernel = self.add_weight(
            name="kernel",
            shape=(in_features, out_features),
            initializer=keras.initializers.RandomNormal(stddev=standard_deviation),
        )
        # Cast here, not by Keras: the kernel of a fused sum takes it as it is.
        self.bias = self.add_weight(name="bias", shape=(out_features,), initializer="zeros", autocast=False)
        self.built = True

    def call(self, x: Any, add_bias: bool = True) -> Any:
        """[..., in_features] → [..., out_features]; without the bias where the caller adds it."""
        y = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), tf.convert_to_tensor(self.kernel))
        if add_bias:
            y += tf.cast(tf.convert_to_tensor(self.bias), y.dtype)
        return tf.reshape(y, [*x.shape[:-1], self.out_features])


@tf.custom_gradient
def embedding_lookup(table: Any, ids: Any) -> Any:
    """Rows `ids` (int32, any shape) of `table` [rows, columns], with a dense gradient.

    TensorFlow's own is an IndexedSlices, which replicas all-gather instead of reduce, and which a table
    that is also the output matrix turns into one entry a row.
    """

    def gradient(upstream: Any) -> tuple[Any, None]:
        flat, rows = merge_equal(tf.reshape(upstream, [-1, table.shape[1]]), tf.reshape(ids, [-1]))
        return tf.math.unsorted_segment_sum(flat, rows, table.shape[0]), None

    return tf.gather(table, ids), gradient


def merge_equal(flat: Any, rows: Any) -> tuple[Any, Any]:
    """`flat` [N, columns] with what goes to the same row summed up in the first place of each block.

    XLA sums by atomic additions, one after the other for the same row. Real text is full of equal tokens:
    with 58 % padding this kernel took 23 of the 62 ms of BERT-base's step on an H200.

    Returns:
        The sums, and `rows` [N] with -1 in all other places, which a segment sum leaves out.
    """
    block = math.gcd(rows.shape[0] or 1, MERGED_TOKENS)
    rows = tf.reshape(rows, [-1, block])
    equal = rows[:, :, None] == rows[:, None, :]
    sums = tf.matmul(tf.cast(equal, flat.dtype), tf.reshape(flat, [-1, block, flat.shape[1]]))
    earlier = np.tri(block, k=-1, dtype=bool)
    first = ~tf.reduce_any(equal & earlier, axis=-1)
    return tf.reshape(sums, [-1, flat.shape[1]]), tf.reshape(tf.where(first, rows, -1), [-1])


def dropout(x: Any, rate: float, seed: Any, place: Any) -> Any:
    """A copy of x with a share `rate` of its elements zeroed and the rest scaled by 1 / (1 - rate).

    An element's fate is a hash of its number, the seed and the place: nothing is read from memory or kept
    for the backward pass, so XLA folds it into its neighbours. TensorFlow's own generator writes its
    random numbers to memory first, eight kernels for each dropout of BERT.

    Args:
        x: floating tensor of any static shape, at most 2**32 elements.
        rate: 0 leaves x as it is.
        seed: int32 [2], different for every step and replica.
        place: which dropout of the model this is, so that no two share a mask; int or int32 scalar.
    """
    if not rate:
        return x
    start, second = mask_keys(seed, place)
    keep = _mixed(_element_bits(x.shape, start), second) >= tf.constant(int(rate * 2**32), tf.uint32)
    return tf.where(keep, x * tf.cast(1 / (1 - rate), x.dtype), tf.zeros((), x.dtype))


def mask_keys(seed: Any, place: Any) -> tuple[Any, Any]:
    """Where the sequence of a dropout's bits starts, and the second key of its hash: uint32 scalars."""
    first, second = tf.unstack(tf.bitcast(seed, tf.uint32))
    return _mixed(first + tf.cast(place, tf.uint32) * tf.constant(ODD, tf.uint32), second), second


def dropout_keys(rate: float, seed: Any, place: Any) -> Any:
    """What fused kernels make the mask of, uint32 [3]: `mask_keys`, and the bits below which they drop."""
    if not rate:
        return tf.zeros(3, tf.uint32)
    return tf.stack([*mask_keys(seed, place), tf.constant(int(rate * 2**32), tf.uint32)])


GOLDEN_RATIO = 0x9E3779B9  # odd, 2**32 over the golden ratio: Weyl's sequence spreads neighbours apart
ODD = 0x85EBCA6B  # far from the golden ratio, so that a place is not another element


def _element_bits(shape: Any, start: Any) -> Any:
    """GOLDEN_RATIO · number of each element in row-major order, + start: uint32.

    As a sum over axes, of which nothing is stored. It begins with `start`, because without it the sum is a
    constant: TensorFlow would compute it on the host, 256 MiB for each layer of BERT-large at batch 256, only
    to find that it is too large to keep.
    """
    bits, stride = start, GOLDEN_RATIO
    for axis in reversed(range(len(shape))):
        along = tf.reshape(tf.range(shape[axis]), [-1] + [1] * (len(shape) - 1 - axis))
        bits += tf.cast(along, tf.uint32) * tf.constant(stride % 2**32, tf.uint32)
        stride *= shape[axis]
    return bits


def _mixed(bits: Any, key: Any) -> Any:
    """A hash of uint32 bits: each output bit flips with probability near 1/2 for any input bit flipped.

    The constants are "lowbias32" of C. Wellons' search for integer hashes of least bias
    (nullprogram.com/blog/2018/07/31); the key enters half-way, so that two keys' sequences are not one
    sequence shifted.
    """

    def folded(bits: Any, shift: int) -> Any:
        return bits ^ tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32))

    bits = folded(bits, 16) * tf.constant(0x7FEB352D, tf.uint32) + key
    return folded(folded(bits, 15) * tf.constant(0x846CA68B, tf.uint32), 16)


def _wide(x: Any) -> Any:
    """The dtype that sums and functions are taken in: float32, or float64 for proofs."""
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)


@tf.custom_gradient
def gelu(x: Any) -> Any:
    """Exact GELU, x · Φ(x), computed in float32.

    The backward pass needs x alone; TensorFlow's formula keeps two more tensors of x's size, which for
    BERT-large are most of what its perceptron writes.
    """

    def cumulative(x: Any) -> Any:
        return 0.5 * (1 + tf.math.erf(x * 0.5**0.5))

    def gradient(upstream: Any) -> Any:
        wide = _wide(x)
        density = tf.exp(-0.5 * wide * wide) * (2 * math.pi) ** -0.5
        return tf.cast(_wide(upstream) * (cumulative(wide) + wide * density), x.dtype)

    wide = _wide(x)
    return tf.cast(wide * cumulative(wide), x.dtype), gradient


@tf.custom_gradient
def softmax(scores: Any, bias: Any) -> Any:
    """Softmax over the last axis of scores + bias, computed in float32, returned in the scores' dtype.

    Args:
        scores: [..., columns].
        bias: float32, broadcast to the scores; has no gradient.

    The backward pass reads the rounded result, half of what a float32 one would be.
    """
    weights = tf.cast(tf.nn.softmax(_wide(scores) + tf.cast(bias, _wide(scores).dtype)), scores.dtype)

    def gradient(upstream: Any) -> tuple[Any, None]:
        wide, product = _wide(weights), _wide(upstream) * _wide(weights)
        return tf.cast(product - wide * tf.reduce_sum(product, -1, keepdims=True), scores.dtype), None

    return weights, gradient


class LayerNorm(keras.layers.Layer):
    """Layer normalisation over the last axis, in float32, with its backward pass written out.

    Keras' saves intermediate tensors that the formula of the gradient does not need.
    """

    def __init__(self, features: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.gamma = self.add_weight(name="gamma", shape=(features,), initializer="ones", autocast=False)
        self.beta = self.add_weight(name="beta", shape=(features,), initializer="zeros", autocast=False)
        self.built = True

    def call(self, x: Any) -> Any:
        """[..., features] → the same shape and dtype."""
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        return _layer_norm(x, gamma, beta, self.epsilon)


def _layer_norm(x: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    """See LayerNorm."""

    @tf.custom_gradient
    def normalise(x: Any, gamma: Any, beta: Any) -> Any:
        mean = tf.reduce_mean(_wide(x), -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(_wide(x) - mean), -1, keepdims=True)
        inverse = tf.math.rsqrt(variance + epsilon)

        def gradient(upstream: Any) -> tuple[Any, Any, Any]:
            normal, wide = (_wide(x) - mean) * inverse, _wide(upstream)
            scaled = wide * gamma
            along = tf.reduce_mean(scaled * normal, -1, keepdims=True)
            down = inverse * (scaled - tf.reduce_mean(scaled, -1, keepdims=True) - normal * along)
            rows = list(range(x.shape.rank - 1))
            return tf.cast(down, x.dtype), tf.reduce_sum(wide * normal, rows), tf.reduce_sum(wide, rows)

        return tf.cast((_wide(x) - mean) * inverse * gamma + beta, x.dtype), gradient

    return normalise(x, gamma, beta)


@tf.custom_gradient
def relu_max_pool(x: Any) -> Any:
    """ReLU, then the maximum over 3×3 places at stride 2, padded by one: [B, H, W, C] → [B, ⌈H/2⌉, ⌈W/2⌉, C].

    Which of the nine places won, or that none is above 0, is kept in a byte, and the backward pass asks each
    pixel's up to four windows whether it won there: all elementwise, so that XLA folds it into the batch
    norm's passes. XLA's own gradient of a maximum finds the places again, sorts out their addresses and
    scatters, which for ResNet-50 cost 6 of 69 ms of a step on an H200. Equal values: the first place wins, as
    in TensorFlow.
    """
    height, width = x.shape[1:3]
    rows, columns = (height + 1) // 2, (width + 1) // 2
    padding = [[0, 0], [1, 2 * rows - height], [1, 2 * columns - width], [0, 0]]
    padded = tf.pad(x, padding, constant_values=x.dtype.min)
    best = padded[:, 0 : 2 * rows : 2, 0 : 2 * columns : 2]
    winner = tf.zeros(tf.shape(best), tf.int8)
    for place in range(1, 9):
        row, column = divmod(place, 3)
        value = padded[:, row : row + 2 * rows - 1 : 2, column : column + 2 * columns - 1 : 2]
        winner = tf.where(value > best, tf.constant(place, tf.int8), winner)
        best = tf.maximum(best, value)
    # In the byte and not asked of the maximum later, which would be kept beside its ReLU for that alone.
    winner = tf.where(best > 0, winner, tf.constant(NO_PLACE, tf.int8))

    def gradient(upstream: Any) -> Any:
        down = 0
        for after in ((0, 0), (0, 1), (1, 0), (1, 1)):  # the window of the pixel's number halved, or the next
            won = _window_of_pixels(winner, (height, width), after)
            value = _window_of_pixels(upstream, (height, width), after)
            down += tf.where(won == _places((height, width), after), value, tf.zeros((), value.dtype))
        return down

    return tf.nn.relu(best), gradient


def _places(size: tuple[int, int], after: tuple[int, int]) -> Any:
    """Place of each pixel in its window, int8 [height, width, 1]; -1 where it is not in the window."""

    def along(pixels: int, after: int) -> Any:
        odd = tf.range(pixels) % 2
        return tf.where(odd == 1, 0, -9) if after else 1 + odd  # pixel 2k + 1 is the first of window k + 1

    places = 3 * along(size[0], after[0])[:, None] + along(size[1], after[1])[None, :]
    return tf.cast(tf.maximum(places, -1), tf.int8)[:, :, None]


def _window_of_pixels(windows: Any, size: tuple[int, int], after: tuple[int, int]) -> Any:
    """For each pixel the value of window ⌊pixel / 2⌋ + after on either axis; 0 behind the last window."""
    shifted = tf.pad(windows, [[0, 0], [0, after[0]], [0, after[1]], [0, 0]])[:, after[0] :, after[1] :]
    return tf.repeat(tf.repeat(shifted, 2, axis=1), 2, axis=2)[:, : size[0], : size[1]]
