"""The few custom layers: what Keras has in a form that the fast step cannot use.

All create their weights at construction, so a model is complete before it is called, and say so (`built`):
Keras would trace them once more to find out.
"""

from typing import Any

import keras
import tensorflow as tf


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

    def __init__(self, channels: int, zero_gamma: bool = False, momentum: float = 0.9, epsilon: float = 1e-5):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.gamma = self.add_weight(
            name="gamma", shape=(channels,), initializer="zeros" if zero_gamma else "ones", autocast=False
        )
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
        self.bias = self.add_weight(name="bias", shape=(out_features,), initializer="zeros")
        self.built = True

    def call(self, x: Any) -> Any:
        """[..., in_features] → [..., out_features]."""
        kernel, bias = tf.convert_to_tensor(self.kernel), tf.convert_to_tensor(self.bias)
        y = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), kernel) + bias
        return tf.reshape(y, [*x.shape[:-1], self.out_features])


@tf.custom_gradient
def embedding_lookup(table: Any, ids: Any) -> Any:
    """Rows `ids` (int32, any shape) of `table` [rows, columns], with a dense gradient.

    TensorFlow's own is an IndexedSlices, which replicas all-gather instead of reduce, and which a table
    that is also the output matrix turns into one entry a row.
    """

    def gradient(upstream: Any) -> tuple[Any, None]:
        flat = tf.reshape(upstream, [-1, table.shape[1]])
        return tf.math.unsorted_segment_sum(flat, tf.reshape(ids, [-1]), table.shape[0]), None

    return tf.gather(table, ids), gradient


def dropout(x: Any, rate: float, seed: Any, place: int) -> Any:
    """A copy of x with a share `rate` of its elements zeroed and the rest scaled by 1 / (1 - rate).

    Args:
        x: floating tensor of any shape.
        rate: 0 leaves x as it is.
        seed: int32 [2], different for every step and replica.
        place: which dropout of the model this is, so that no two share a mask.
    """
    if not rate:
        return x
    place_seed = tf.random.experimental.stateless_fold_in(seed, place)
    return tf.nn.experimental.stateless_dropout(x, rate, place_seed)
