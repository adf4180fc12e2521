"""The end of a transformer's branch: bias, dropout, residual sum and layer norm, by the formula or fused."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfbench.kernels import Kernel, norm_kernels
from tfbench.models.layers import LayerNorm, Linear, dropout, dropout_keys


def plain_residual_norm(
    x: Any, inner: Any, linear: Linear, norm: LayerNorm, rate: float, seed: Any, place: Any
) -> Any:
    """norm(x + dropout(linear(inner))).

    Args:
        x: [..., H], static: what goes past the branch.
        inner: [..., in_features], static: the branch up to its last product.
        linear: that product, to H features.
        norm: over H features.
        rate: of the dropout.
        seed: of its mask, as `layers.dropout` has it.
        place: likewise.

    Returns:
        [..., H].
    """
    return norm(x + dropout(linear(inner), rate, seed, place))


def fused_residual_norm(
    x: Any, inner: Any, linear: Linear, norm: LayerNorm, rate: float, seed: Any, place: Any
) -> Any:
    """As `plain_residual_norm`, with the same dropout mask; all behind the product is one kernel each way.

    The bias' gradient stays float32. Runs where `tfbench.kernels.obstacle` finds none, and inside
    `tf.function(jit_compile=True)` only.
    """
    forward, backward = norm_kernels(x.dtype.name, x.shape[-1])
    keys, epsilon = dropout_keys(rate, seed, place), tf.constant([norm.epsilon], tf.float32)

    @tf.custom_gradient
    def end(x: Any, y: Any, bias: Any, gamma: Any, beta: Any) -> Any:
        like_x = tf.TensorSpec(x.shape, x.dtype)
        total, out = _launch(forward, [x, y, bias, gamma, beta, keys, epsilon], [like_x, like_x])

        def gradient(upstream: Any) -> tuple[Any, ...]:
            parts = tf.TensorSpec((programs_for(backward, x), 3, x.shape[-1]), tf.float32)
            operands = [total, upstream, gamma, keys, epsilon]
            d_total, d_y, partial = _launch(backward, operands, [like_x, like_x, parts])
            d_gamma, d_beta, d_bias = tf.unstack(tf.reduce_sum(partial, 0))
            return d_total, d_y, d_bias, d_gamma, d_beta

        return out, gradient

    parameters = (tf.convert_to_tensor(variable) for variable in (linear.bias, norm.gamma, norm.beta))
    return end(x, linear(inner, add_bias=False), *parameters)


def _launch(kernel: Kernel, operands: Sequence[Any], outputs: Sequence[tf.TensorSpec]) -> list[Any]:
    """Runs a kernel over the rows of its first operand."""
    from tfbench.kernels.call import triton_call

    grid = (programs_for(kernel, operands[0]), 1, 1)
    return triton_call(kernel.name, kernel.ir, operands, outputs, grid, kernel.num_warps, kernel.num_stages)


def programs_for(kernel: Kernel, x: Any) -> int:
    """How many programs share the rows of x [..., H].

    Raises:
        ValueError: they do not share them evenly.
    """
    rows = x.shape[:-1].num_elements()
    if rows is None or rows % kernel.block:
        raise ValueError(f"kernel {kernel.name}: {rows} rows; a multiple of {kernel.block} is accepted")
    return rows // kernel.block
