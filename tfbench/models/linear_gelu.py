"""A perceptron's first half, product, bias and GELU: by the formula, or fused behind the product."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfbench.kernels import GELU_BLOCK, Kernel, gelu_kernels
from tfbench.models.layers import Linear, gelu
from tfbench.models.residual_norm import programs_for


def plain_linear_gelu(x: Any, linear: Linear) -> Any:
    """gelu(linear(x)).

    Args:
        x: [..., in_features], static.
        linear: from these to N features.

    Returns:
        [..., N].
    """
    return gelu(linear(x))


def fused_linear_gelu(x: Any, linear: Linear) -> Any:
    """As `plain_linear_gelu`; all behind the product is one kernel each way, and nothing but it is kept.

    XLA keeps the exponential too, in float32. The bias' gradient stays float32. Runs where
    `tfbench.kernels.obstacle` finds none, and inside `tf.function(jit_compile=True)` only.
    """
    return _bias_gelu(linear(x, add_bias=False), tf.convert_to_tensor(linear.bias))


@tf.custom_gradient
def _bias_gelu(product: Any, bias: Any) -> Any:
    """gelu(product + bias): of half [..., N] and float32 [N]."""
    features = product.shape[-1]
    forward, backward = gelu_kernels(product.dtype.name, features)
    like_product = tf.TensorSpec(product.shape, product.dtype)
    (y,) = _launch(forward, [product, bias], [like_product])

    def gradient(upstream: Any) -> tuple[Any, Any]:
        parts = tf.TensorSpec((programs_for(backward, product), features), tf.float32)
        d_product, partial = _launch(backward, [product, bias, upstream], [like_product, parts])
        return d_product, tf.reduce_sum(partial, 0)

    return y, gradient


def _launch(kernel: Kernel, operands: Sequence[Any], outputs: Sequence[tf.TensorSpec]) -> list[Any]:
    """Runs a kernel over the columns and rows of its first operand."""
    from tfbench.kernels.call import triton_call

    grid = (operands[0].shape[-1] // GELU_BLOCK, programs_for(kernel, operands[0]), 1)
    return triton_call(kernel.name, kernel.ir, operands, outputs, grid, kernel.num_warps, kernel.num_stages)
